"""Prompts attend to unpacked items as they would to those of the pool, in any groups and behind padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest, PagedRows
from hisparse_pd.core.model.spec import ModelSpec, load_spec
from hisparse_pd.core.model.unpacked import ContextPages, Turn, UnpackedMemory
from hisparse_pd.kernels.attention import TorchAttention
from hisparse_pd.kernels.kv_format import BFLOAT16, FP8_E4M3, KvFormat

PAGE_SIZE, NUM_PAGES, NUM_HEADS = 8, 20, 2
CPU = torch.device("cpu")


class HalvedAttention(TorchAttention):
    """Stands for the attention of steps, which must be told from that of prompts."""

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        return 0.5 * super().attend(*args, **kwargs)


class Prompts:
    """Three requests over a pool of fp8 items whose free slots hold garbage."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(11)
        num_slots = NUM_PAGES * PAGE_SIZE
        self.pool = torch.full((spec.num_kv_layers, num_slots, spec.item_bytes), 0xFF, dtype=torch.uint8)
        self.index = torch.zeros((spec.num_index_groups, num_slots, spec.index_item_bytes), dtype=torch.uint8)
        pages = torch.randperm(NUM_PAGES, generator=generator)
        self.requests = [
            PagedRequest(pages[:3], 9, 8),
            PagedRequest(pages[3:8], 0, 1),  # more pages than it needs yet
            PagedRequest(pages[8:15], 30, 11),
        ]
        dim = spec.item_format.item_dim
        for request in self.requests:
            at = torch.arange(request.seq_len)
            slots = request.page_ids[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            for layer in self.pool:
                spec.item_format.store(layer, slots, torch.randn((len(at), dim), generator=generator))
        num_tokens = sum(request.num_new_tokens for request in self.requests)
        self.q = torch.randn((num_tokens, NUM_HEADS, dim), generator=generator)
        lengths = torch.cat([torch.arange(r.prefix_len, r.seq_len) + 1 for r in self.requests])
        self.selected = (torch.rand((num_tokens, 6), generator=generator) * lengths[:, None]).int()
        self.selected[:, 5] = -1

    def kernels(self, most_pages: int) -> AttentionKernels:
        """Return kernels whose prompts read unpacked items; 0 pages: they read the pool."""
        kernels = AttentionKernels.reference(self.spec)
        kernels = replace(kernels, step_attention=HalvedAttention(self.spec.item_format))
        if not most_pages:
            return kernels
        fp8 = self.spec.item_format
        bfloat16 = KvFormat(BFLOAT16, fp8.kv_lora_rank, fp8.rope_dim)
        shape = most_pages * PAGE_SIZE, fp8.item_dim
        memory = UnpackedMemory(torch.full(shape, float("nan"), dtype=torch.bfloat16))
        return replace(kernels, attention=TorchAttention(bfloat16), unpacked=memory)

    def kv(self, requests: Any, most_pages: int) -> PagedKv:
        kernels = self.kernels(most_pages)
        return PagedKv(self.spec, self.pool, self.index, PAGE_SIZE, requests, kernels=kernels)

    def attended(self, kv: PagedKv, padding: int = 0) -> Tensor:
        q, selected = (torch.cat((x, x[:1].expand(padding, *x.shape[1:]))) for x in (self.q, self.selected))
        last = self.spec.num_layers - 1
        results = [kv.attend(layer, q, selected, 0.3) for layer in (0, last)]
        return torch.stack(results)[:, : len(self.q)]


@pytest.fixture
def prompts(tiny_checkpoint: Any) -> Prompts:
    return Prompts(load_spec(tiny_checkpoint("v32"), kv_cache_dtype=FP8_E4M3))


@pytest.mark.parametrize(("most_pages", "num_turns"), [(10, 1), (9, 2), (6, 2), (7, 2)])
def test_any_turns_have_the_bits_of_the_pool(prompts: Prompts, most_pages: int, num_turns: int) -> None:
    expected = prompts.attended(prompts.kv(prompts.requests, 0))
    kv = prompts.kv(prompts.requests, most_pages)
    assert kv.contexts is not None
    assert len(kv.contexts.turns) == num_turns
    assert torch.equal(prompts.attended(kv), expected)


def test_stepped_tokens_attend_as_steps_do(prompts: Prompts) -> None:
    first, *others = prompts.requests
    stepped = [replace(first, num_stepped=5), *others]
    expected = prompts.attended(prompts.kv(stepped, 0))
    kv = prompts.kv(stepped, 7)
    assert torch.equal(prompts.attended(kv), expected)
    only = [replace(request, num_stepped=request.num_new_tokens) for request in prompts.requests]
    expected = prompts.attended(prompts.kv(only, 0))
    kernels = prompts.kernels(7)
    kv = PagedKv(prompts.spec, prompts.pool, prompts.index, PAGE_SIZE, only, kernels=kernels)
    assert torch.equal(prompts.attended(kv), expected)
    assert kernels.unpacked is not None
    assert bool(kernels.unpacked.items.isnan().all()), "nothing is unpacked for steps' attention alone"


def test_padding_holds_some_requests_after_others(prompts: Prompts) -> None:
    """Graphs of short forwards keep their tensors and take other requests in turn, with other stepped
    tokens."""
    rows = PagedRows.padding(4, 9, 24, 23, scratch_slot=0, device=CPU, max_len=9 * PAGE_SIZE)
    padded = prompts.kv(rows, 12)
    larger = [PagedRequest(torch.arange(9), 60, 12, 12), PagedRequest(torch.arange(9, 12), 0, 12, 9)]
    first, *others = prompts.requests
    stepped = [replace(request, num_stepped=count) for request, count in zip(others, (1, 4), strict=True)]
    for requests in (larger, [first, *stepped], [replace(first, num_stepped=8), *others], prompts.requests):
        kv = prompts.kv(requests, 12)
        padded.fill(kv, scratch_slot=0)
        assert torch.equal(padded._num_columns[: len(kv._num_columns)], kv._num_columns)
        if requests is not larger:
            expected = prompts.attended(kv)
            assert torch.equal(prompts.attended(padded, padding=4), expected)


def test_where_pages_lie() -> None:
    pages = [torch.tensor([7, 3]), torch.tensor([1]), torch.tensor([4, 5, 6]), torch.tensor([2])]
    found = ContextPages.of(pages, [5, 1, 9, 2], max_pages=3, most_pages=3, device=CPU)
    assert found.page_ids.tolist() == [7, 3, 1, 4, 5, 6, 2]
    assert found.page_table.tolist() == [[0, 1, 0], [2, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert found.turns == [
        Turn(slice(0, 6), slice(0, 3)),
        Turn(slice(6, 15), slice(3, 6)),
        Turn(slice(15, 17), slice(6, 7)),
    ]
