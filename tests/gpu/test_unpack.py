"""Items unpacked on a GPU are those of the CPU, bit by bit."""

from __future__ import annotations

import pytest
import torch

from hisparse_pd.kernels.kv_format import FP8_E4M3, KvFormat
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize(("kv_lora_rank", "rope_dim"), [(512, 64), (96, 16), (128, 2), (36, 0)])
@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_unpacked_as_on_a_cpu(kv_lora_rank: int, rope_dim: int, page_size: int) -> None:
    kv_format = KvFormat(FP8_E4M3, kv_lora_rank, rope_dim)
    num_pages, dim = 23, kv_format.item_dim
    slots = torch.arange((num_pages - 1) * page_size)  # the last page holds poison
    items = torch.randn(len(slots), dim) * torch.exp2(torch.randint(-20, 20, (len(slots), 1)).float())
    pool = torch.full((num_pages * page_size + 3, kv_format.item_bytes), 0xFF, dtype=torch.uint8)
    kv_format.store(pool, slots, items)
    page_ids = torch.randperm(num_pages - 1).int()
    page_ids[[2, 9]] = -1
    outs = []
    for device in ("cpu", DEVICE):
        out = torch.full((num_pages * page_size, dim), 7.0, dtype=torch.bfloat16, device=device)
        kv_format.unpack(pool.to(device), page_ids.to(device), page_size, out)
        outs.append(out.cpu().view(torch.int16))
    assert torch.equal(*outs)
    assert bool((outs[0][2 * page_size : 3 * page_size] == outs[0][-1]).all()), "rows of no page stay"
    rows = (page_ids.long()[:, None] * page_size + torch.arange(page_size)).flatten()
    rounded = kv_format.load(pool)[rows[rows >= 0]].bfloat16()
    is_row = (rows >= 0).nonzero().flatten()
    assert torch.equal(outs[1][is_row], rounded.view(torch.int16))
