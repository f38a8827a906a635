"""Fills the device pages of a hisparse row: all of its items go there from the host pool, in slices.

Steps find the positions of a resident row in ``page_table``, as those of a dense row, without a look at ages
or hits. The row keeps its host pages, too, so that ``backup_newest`` keeps the host pool complete.

A row with a hot buffer takes part in steps while its pages are filled. The steps read the hot buffer alone
and back their newest items up to the host pool, from which ``PageFill`` takes them. The row becomes resident
between two steps: a second fill copies what is new since, and ``HotBufferState.drop_hot_buffer`` ends the hot
buffer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import check_page_ids, check_range, check_tensor
from hisparse_pd.kernels.hot_state import INTEGERS, HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.swap_in import replay_misses
from hisparse_pd.kernels.warm_up import FILL_BLOCKS

CHUNK_TOKENS: Final = 16_384
"""Most positions of one copy. With V3.2's items these are 10.7 MB, which take 0.2 ms of PCIe, and its launch
takes the host 0.1 ms."""


class _Copy(NamedTuple):
    """One layer's items of the positions [``start``, ``stop``)."""

    start: int
    stop: int
    layer: int


class PageFill:
    """Fills the pages of ``row`` in slices, so that steps do not compete for PCIe with all of it at once.

    The caller calls ``launch_slice`` between steps until ``num_left_bytes`` is None, and may use the pages
    when the last launch is over. There are two kinds of rows: an empty one, as ``create`` and ``reset_rows``
    leave it, which becomes resident; and one that has a hot buffer and the same host, lookup and index pages
    already, and keeps them. Copies are verified by the row checks, as copies of misses are.

    On a GPU everything is launched on the current stream, which may be a side stream beside steps of the row.
    Nothing waits for the device, and pages may be added to the row meanwhile.
    """

    def __init__(
        self,
        state: HotBufferState,
        row: int,
        *,
        pages: Tensor,
        host_pages: Tensor,
        lookup_pages: Tensor,
        index_pages: Tensor,
        num_tokens: int,
        k_host: Tensor,
        k_dev: Tensor,
        num_filled: int = 0,
    ) -> None:
        """``pages``, ``host_pages``, ``lookup_pages``, ``index_pages``: integer [n] on the CPU, the ids of
        the row's first pages in the device, host, lookup and index pool. Positions [0, ``num_tokens``) are in
        the host pool; all four have pages for them. The first ``num_filled`` of them are in the device pages,
        too, and not copied. Raises KernelArgumentError before it changes anything.
        """
        page_size = state.page_size
        check_range("row", row, 0, state.num_rows)
        lists = {
            "pages": (pages, k_dev.shape[1], None),
            "host_pages": (host_pages, k_host.shape[1], None),
            "lookup_pages": (lookup_pages, state.num_lookup_slots, host_pages.shape[0]),
        }
        for name, (tensor, num_slots, num_ids) in lists.items():
            check_tensor(name, tensor, dtypes=INTEGERS, shape=(num_ids,), device=torch.device("cpu"))
            state.check_pages(name, 0, tensor)
            check_page_ids(name, tensor, num_slots // page_size)
        state.check_pages("index_pages", 0, index_pages)
        num_pages = min(each.shape[0] for each in (pages, host_pages, index_pages))
        check_range("num_tokens", num_tokens, 0, min(state.max_context, num_pages * page_size) + 1)
        check_range("num_filled", num_filled, 0, num_tokens + 1)

        self._state, self._row = state, row
        self._pages, self._host_pages = pages, host_pages
        self._lookup_pages, self._index_pages = lookup_pages, index_pages
        self._k_host, self._k_dev = k_host, k_dev
        self._copies = [
            _Copy(start, min(start + CHUNK_TOKENS, num_tokens), layer)
            for start in range(num_filled, num_tokens, CHUNK_TOKENS)
            for layer in range(k_dev.shape[0])
        ]
        """Copies that are not launched yet."""
        self._plan: tuple[int, MissPlan] | None = None
        """The first position of the present chunk, and the chunk's slots, in tensors on the device."""
        self._is_begun = False

    @property
    def num_left_bytes(self) -> int | None:
        """Bytes of items that are not copied yet; None when everything was launched."""
        if not self._copies and self._is_begun:
            return None
        return sum(map(self._num_bytes, self._copies))

    def launch_slice(self, most_bytes: int | None) -> int:
        """Launch the next copies, of at most ``most_bytes`` but at least one; None: all. Returns their bytes.
        The first slice also fills the row's tables."""
        if not self._is_begun:
            state, row = self._state, self._row
            state.set_pages(row, 0, self._pages)
            state.set_host_pages(row, 0, self._host_pages, self._lookup_pages)
            state.set_index_pages(row, 0, self._index_pages)
            self._is_begun = True
        num_copies = num_bytes = 0
        for copy in self._copies:
            if num_copies and most_bytes is not None and num_bytes + self._num_bytes(copy) > most_bytes:
                break
            replay_misses(
                self._plan_of(copy), copy.layer, self._k_host, self._k_dev, FILL_BLOCKS, state=self._state
            )
            num_copies += 1
            num_bytes += self._num_bytes(copy)
        del self._copies[:num_copies]
        return num_bytes

    def _num_bytes(self, copy: _Copy) -> int:
        return (copy.stop - copy.start) * self._k_dev.shape[2]

    def _plan_of(self, copy: _Copy) -> MissPlan:
        """Return the slots of the copy's positions, which all layers of a chunk share."""
        if self._plan is None or self._plan[0] != copy.start:
            host, dev = (
                self._slots(pages, copy.start, copy.stop) for pages in (self._host_pages, self._pages)
            )
            plan = MissPlan.of_slots(
                host, dev, self._state.device, first_position=copy.start, req_row=self._row
            )
            self._plan = copy.start, plan
        return self._plan[1]

    def _slots(self, pages: Tensor, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the slots of the positions [start, stop), whose pages have these ids."""
        page_size = self._state.page_size
        first, last = start // page_size, -(-stop // page_size)
        ids = pages[first:last].numpy().astype(np.int64)
        slots = (ids[:, None] * page_size + np.arange(page_size)).ravel()
        return slots[start - first * page_size : stop - first * page_size]
