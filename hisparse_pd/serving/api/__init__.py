"""The HTTP API of a node: bodies of requests, prompts, grammars of answers, answers in each dialect, API
keys, and the start of a node.
"""
