"""One hisparse request whose hot buffer is so small that every entry can be written down."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.hot_state import HotBufferState
from kernels.miss_plan import MissPlan
from kernels.swap_in import start_row, swap_in

NUM_LAYERS, NUM_SLOTS, NUM_HOST_SLOTS, ITEM_BYTES = 2, 24, 40, 8
HOT_SLOTS = [5, 9, 2, 11]
PAGE_SIZE = 4
HOST_PAGES = [7, 3, 6, 2, 9]
HOST_SLOTS = [page * PAGE_SIZE + offset for page in HOST_PAGES for offset in range(PAGE_SIZE)]
ROW = 1


class Buffer:
    """One hisparse request of capacity 4 in row 1 whose 20 positions are on the host."""

    def __init__(self, max_new: int = 1) -> None:
        self.state = HotBufferState.create(1, 3, 20, 6, PAGE_SIZE, NUM_HOST_SLOTS, max_new=max_new)
        self.state.assign_row(ROW, torch.tensor(HOT_SLOTS), torch.tensor(HOST_PAGES))
        generator = torch.Generator().manual_seed(1)
        self.k_host = torch.randint(
            0, 256, (NUM_LAYERS, NUM_HOST_SLOTS, ITEM_BYTES), dtype=torch.uint8, generator=generator
        )
        self.k_dev = torch.zeros((NUM_LAYERS, NUM_SLOTS, ITEM_BYTES), dtype=torch.uint8)
        self.plan = MissPlan.create(max_new, 4)

    def requests(self, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor([seq_len]), torch.tensor([ROW]), torch.tensor([1], dtype=torch.int32)

    def swap_in(self, seq_len: int, selected: list[int]) -> list[int]:
        slots = swap_in(
            torch.tensor([selected], dtype=torch.int32),
            *self.requests(seq_len),
            self.state,
            group=0,
            layer=0,
            k_host=self.k_host,
            k_dev=self.k_dev,
            miss_plan=self.plan,
        )
        self.state.check_consistency({ROW: seq_len})
        result: list[int] = slots[0].tolist()
        return result

    def start(self, num_tokens: int, hint: list[int]) -> int:
        self.state.reset_row(ROW)
        (num_warm,) = start_row(
            self.state,
            ROW,
            hot_slots=torch.tensor(HOT_SLOTS),
            host_pages=torch.tensor(HOST_PAGES),
            index_pages=torch.tensor([4, 1]),
            num_tokens=num_tokens,
            hints=[np.array(hint, np.int32)],
            layers_of_group=((0, 1),),
            k_host=self.k_host,
            k_dev=self.k_dev,
        )
        return num_warm

    def hot_positions(self, group: int = 0, row: int = ROW) -> list[int]:
        """What is at each hot_index, -1 where nothing is."""
        slots: list[int] = self.state.hot_to_host[group, row].tolist()
        return [HOST_SLOTS.index(slot) if slot >= 0 else -1 for slot in slots]

    def resize(self, slots: list[int], seq_len: int) -> None:
        old = self.state.hot_slots[ROW]
        self.state.resize_row(ROW, old[old >= 0], torch.tensor(slots), seq_len)

    def counters(self) -> list[int]:
        result: list[int] = self.state.counters[ROW].tolist()
        return result
