"""A row's result has the same bits alone and among others, at sizes that fill no vector register."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.indexer import index_logits
from hisparse_pd.kernels.row_math import RowLinear, matmul_heads, products_are_fixed, sigmoid, silu, softcap

NUM_OTHERS = (1, 2, 3, 5, 16, 17, 33, 300)


def of_heads(size_in: int, size_out: int) -> Callable[[Tensor], Tensor]:
    matrices = torch.randn((6, size_in, size_out), generator=torch.Generator().manual_seed(2))

    def product(x: Tensor) -> Tensor:
        heads = x.view(len(x), 6, -1)[..., :size_in]
        out = torch.empty((len(x), 6, size_out + 3))
        matmul_heads(heads, matrices, out[..., :size_out])
        return out[..., :size_out].clone()

    return product


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "sigmoid": lambda x: sigmoid(x[:, :6].contiguous()),
    "softcap": lambda x: softcap(5 * x[:, :41].contiguous(), 7.0),
    "scores of few experts": lambda x: x[:, :6].softmax(dim=1),
    "scores of many experts": lambda x: x[:, :129].softmax(dim=1),
    "linear": RowLinear(300, 41),
    "a small matrix a head": of_heads(7, 9),
    "a matrix a head": of_heads(40, 18),
}


@pytest.mark.I5
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_row_is_the_same_alone_and_among_others(case: str) -> None:
    rows = torch.randn((300, 300), generator=torch.Generator().manual_seed(1))
    whole = CASES[case](rows)
    for count in NUM_OTHERS:
        for start in {0, 300 - count, (300 - count) // 2}:
            part = CASES[case](rows[start : start + count].clone())
            assert torch.equal(part, whole[start : start + count]), (count, start)


def test_the_products_of_this_machine_are_fixed() -> None:
    assert products_are_fixed()


def test_a_score_does_not_depend_on_other_queries_and_later_keys() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn((1500, 24), generator=generator)
    q_index = torch.randn((40, 5, 24), generator=generator)
    weights = torch.randn((40, 5), generator=generator)
    whole = index_logits(q_index, weights, keys)
    for count in (1, 2, 7, 40):
        for seq_len in (40, 63, 80, 129, 1000):
            part = index_logits(q_index[:count], weights[:count], keys[:seq_len])
            assert torch.equal(part, whole[:count, :seq_len]), (count, seq_len)


def test_they_are_the_functions_of_these_names() -> None:
    x = torch.tensor([-200.0, -90.0, -3.0, -0.0, 0.0, 1e-30, 2.0, 80.0, 200.0])
    torch.testing.assert_close(silu(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(sigmoid(x), x.sigmoid())
    torch.testing.assert_close(softcap(x, 30.0), 30 * (x / 30).tanh())
    torch.testing.assert_close(silu(x.bfloat16()), torch.nn.functional.silu(x.bfloat16()))
