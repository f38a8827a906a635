"""Checks that a tree of runs is in order, as it is between any two of its changes.

``PrefixTree.check_integrity`` calls ``check_runs``: while a node is idle, and in tests after each change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Kinds, Prefix, end_of
from hisparse_pd.core.paging.run_tree import RunTree


def check_runs(runs: RunTree, users: Iterable[Prefix], page_size: int) -> None:
    """Raise PoolIntegrityError unless index, order and counts agree with the runs and their users.

    ``users``: the run of each request that uses one.
    """
    num_users = Counter(part for run in users for part in run.chain())
    if strays := [run for run in num_users if run not in runs]:
        raise PoolIntegrityError(f"{len(strays)} prefixes are used and not held")
    num_pages: Counter[Kinds] = Counter()
    num_idle_pages: Counter[Kinds] = Counter()
    for run in runs:
        if fault := _fault(runs, run, num_users[run], page_size):
            raise PoolIntegrityError(f"prefix of room {run.holding.room}: {fault}")
        num_pages[run.kinds] += 0 if run.is_dropped else len(run.keys)
        num_idle_pages[run.pools] += 0 if run.num_users else len(run.keys)
    seen: set[Prefix] = set()
    for run in runs.idle:
        if run.parent in seen:
            raise PoolIntegrityError(f"prefix of room {run.holding.room}: would outlive its parent")
        seen.add(run)
    num_with_parent = sum(run.parent is not None for run in runs)
    if (num_children := sum(len(run.children) for run in runs)) != num_with_parent:
        raise PoolIntegrityError(f"{num_with_parent} prefixes have parents, which have {num_children}")
    num_keys = Counter(runs.num_pages)
    if (num_pages, num_idle_pages) != (num_keys, runs.idle.num_pages):
        raise PoolIntegrityError(
            f"held pages {num_pages}, unused {num_idle_pages}, counted as {num_keys}, {runs.idle.num_pages}"
        )


def _fault(runs: RunTree, run: Prefix, num_users: int, page_size: int) -> str:
    """Return what is wrong with a run that ``num_users`` requests use, or an empty string."""
    num_pages, parent = len(run.keys), run.parent
    slots = {kind: run.holding.num_slots(kind) for kind in run.holding.extents}
    kinds = (PoolKind.HOST,) if run.is_down and run.is_stored else run.kinds
    if slots != dict.fromkeys(kinds, num_pages * page_size):
        return f"its slots are not {num_pages} pages of {kinds}"
    if run.is_arriving and (run.is_down or not run.num_users):
        return "it is arriving, and has moved down or has no users"
    if not num_pages or run.start_page != end_of(parent):
        return f"{num_pages} pages from {end_of(parent)} to {run.end_page}"
    if parent is not None and parent not in runs:
        return "its parent is not held"
    if any(child.parent is not run or child not in runs for child in run.children):
        return "a child is not held, or has another parent"
    num_findable = sum(runs.run_with(key, run.kinds) is run for key in run.keys)
    if num_findable != (0 if run.is_dropped else num_pages):
        return "a page can still be found" if run.is_dropped else "a page cannot be found"
    if parent is not None and parent.is_dropped and not run.is_dropped:
        return "its parent was dropped"
    if run.is_dropped and not num_users and not run.children:
        return "it was dropped, and is still there"
    if run.num_users != num_users:
        return f"{run.num_users} users counted, {num_users} known"
    is_idle = run in runs.idle
    if is_idle != (num_users == 0):
        return f"{num_users} users, listed as unused {is_idle}"
    return ""
