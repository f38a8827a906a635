"""Threads for grammars: they take the one that came first and the shortest one by turns.

The engine's compiler and the front's grammar checks use them, so that a large grammar does not hold up small
ones. A short grammar waits for at most one long one in each thread. A long grammar waits for those that came
before it and for as many short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from operator import itemgetter

from hisparse_pd.base.call_threads import CallThreads


def compile_threads(num_threads: int, name: str) -> CallThreads[int]:
    """Make threads for calls whose keys are the sizes of their grammars. A call for which no thread can be
    started is made with a later one."""
    choices: Iterator[Callable[[Sequence[int]], int]] = cycle((itemgetter(0), min))
    return CallThreads(num_threads, name, lambda sizes: next(choices)(sizes), keeps_unstarted=True)
