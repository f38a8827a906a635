"""The HTTP API of a node: bodies and what they ask for, prompts, text, grammars of answers, answers
in each dialect, API keys, and the start of a node.
"""
