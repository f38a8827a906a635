"""What the engines of both nodes share: their start, their messages and sockets to the fronts, their ranks'
steps together, a request's phases, and rows that are found to be wrong.
"""
