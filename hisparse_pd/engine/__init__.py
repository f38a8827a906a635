"""The parts that the engines of both nodes share: their start and loop, their messages and sockets to the
fronts, the steps that ranks make together, a request's phases, and what becomes of wrong rows.
"""
