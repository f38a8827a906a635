"""Which pages need not be verified again because they have just arrived."""

from __future__ import annotations

import numpy as np

from hisparse_pd.prefill_node.fresh_pages import FRESH_SECS, FreshPages

ALL = np.arange(4, dtype=np.int32)


def test_pages_are_fresh_for_a_while_or_until_somebody_writes_to_them() -> None:
    now = 5.0
    pages = FreshPages(4, lambda: now)
    assert not pages.are_fresh(ALL).any()
    pages.note(np.array([0, 2, 3]))
    pages.note(np.array([], np.int64))
    pages.forget([3])
    pages.forget([])
    assert pages.are_fresh(ALL).tolist() == [True, False, True, False]
    now += 0.75 * FRESH_SECS
    pages.note(np.array([2]))
    now += 0.75 * FRESH_SECS
    assert pages.are_fresh(ALL).tolist() == [False, False, True, False]
