"""One hisparse request whose hot buffer is so small that every entry can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import RowStart, swap_in
from tests.unit.kernels.table_rules import by_row, check_consistency

NUM_LAYERS, NUM_SLOTS, NUM_HOST_SLOTS, NUM_LOOKUP_SLOTS, ITEM_BYTES = 2, 24, 40, 48, 8
PAGE_SIZE = 4
HOT_PAGES, CAPACITY = [5], 4
HOT_SLOTS = [20, 21, 22, 23]
HOST_PAGES = [7, 3, 6, 2, 9]
LOOKUP_PAGES = [4, 11, 0, 8, 5]
HOST_SLOTS, LOOKUP_SLOTS = (
    [page * PAGE_SIZE + offset for page in pages for offset in range(PAGE_SIZE)]
    for pages in (HOST_PAGES, LOOKUP_PAGES)
)
ROW = 1


class Buffer:
    """One hisparse request of capacity 4 in row 1 whose 20 positions are on the host."""

    def __init__(self, max_new: int = 1) -> None:
        self.state = HotBufferState.create(
            1, 3, 20, 6, PAGE_SIZE, NUM_LOOKUP_SLOTS, NUM_SLOTS, max_new=max_new
        )
        pages = (torch.tensor(pages) for pages in (HOT_PAGES, HOST_PAGES, LOOKUP_PAGES))
        self.state.assign_row(ROW, CAPACITY, *pages)
        generator = torch.Generator().manual_seed(1)
        self.k_host = torch.randint(
            0, 256, (NUM_LAYERS, NUM_HOST_SLOTS, ITEM_BYTES), dtype=torch.uint8, generator=generator
        )
        self.k_dev = torch.zeros((NUM_LAYERS, NUM_SLOTS, ITEM_BYTES), dtype=torch.uint8)
        self.plan = MissPlan.create(max_new, 4)

    def requests(self, seq_len: int, num_new: int = 1) -> StepRequests:
        one = torch.tensor([1], dtype=torch.int32)
        return StepRequests(self.state, torch.tensor([seq_len]), torch.tensor([ROW]), one, num_new)

    @property
    def pools(self) -> dict[str, Any]:
        return {"k_host": self.k_host, "k_dev": self.k_dev}

    def swap_in(self, seq_len: int, selected: list[int]) -> list[int]:
        slots = swap_in(
            torch.tensor([selected], dtype=torch.int32),
            self.requests(seq_len),
            group=0,
            layer=0,
            miss_plan=self.plan,
            **self.pools,
        )
        check_consistency(self.state, {ROW: seq_len})
        result: list[int] = slots[0].tolist()
        return result

    def row_start(
        self, num_tokens: int, hint: list[int] | None, num_pages: int = len(HOST_PAGES)
    ) -> RowStart:
        """Empty the row, and return a start of it with the first ``num_pages`` of its pages."""
        self.state.reset_rows(ROW)
        return RowStart(
            self.state,
            ROW,
            capacity=CAPACITY,
            hot_pages=torch.tensor(HOT_PAGES),
            host_pages=torch.tensor(HOST_PAGES[:num_pages]),
            lookup_pages=torch.tensor(LOOKUP_PAGES[:num_pages]),
            index_pages=torch.tensor([4, 1]),
            num_tokens=num_tokens,
            hints=None if hint is None else [np.array(hint, np.int32)],
            layers_of_group=((0, 1),),
            **self.pools,
        )

    def start(self, num_tokens: int, hint: list[int] | None) -> int:
        row_start = self.row_start(num_tokens, hint)
        row_start.launch_slice(None)
        (num_warm,) = row_start.num_warm
        return num_warm

    def hot_positions(self, group: int = 0, row: int = ROW) -> list[int]:
        """Return the position at each hot_index, -1 where it is empty."""
        slots: list[int] = by_row(self.state, self.state.hot_to_lookup)[group, row].tolist()
        return [LOOKUP_SLOTS.index(slot) if slot >= 0 else -1 for slot in slots]

    def counters(self) -> list[int]:
        result: list[int] = self.state.counters[ROW].tolist()
        return result
