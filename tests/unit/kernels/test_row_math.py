"""A row's result has the same bits alone and among others, at sizes that fill no vector register."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.indexer import index_logits
from hisparse_pd.kernels.row_math import (
    RowLinear,
    linear,
    matmul_heads,
    matmul_keys,
    matmul_tokens,
    sigmoid,
    silu,
    softcap,
)
from hisparse_pd.kernels.row_trial import OUTPUTS, RowBitsError, try_products

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


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Yield torch's function; the number of threads is restored at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def products(dtype: torch.dtype, num_outputs: int, width: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return every kind of product, of rows [num_rows, width] with results [num_rows, ...]."""
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn((num_outputs, width), generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    heads = matrix.t().expand(3, -1, -1).contiguous()

    def by_heads(x: Tensor) -> Tensor:
        out = x.new_empty((len(x), 3, num_outputs))
        matmul_heads(x[:, None].expand(-1, 3, -1), heads, out)
        return out

    def by_tokens(x: Tensor) -> Tensor:
        of_heads = x[:, None].expand(-1, num_outputs, -1).float().contiguous()
        return matmul_tokens(of_heads, matrix.t().float().expand(len(x), -1, -1))

    return {
        "linear": lambda x: linear(x, matrix, bias),
        "heads": by_heads,
        "tokens": by_tokens,
        "keys": lambda x: matmul_keys(x, matrix)[0],
    }


@pytest.mark.I5
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        # Each width and each dtype; in `make test-full` all four.
        (24, torch.bfloat16),
        (300, torch.float32),
        pytest.param(24, torch.float32, marks=pytest.mark.slow),
        pytest.param(300, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_a_product_depends_on_its_row_alone(
    dtype: torch.dtype, width: int, set_threads: Callable[[int], None]
) -> None:
    """This holds for 1 to 70 rows from any start, also rows that are not contiguous, and for any number of
    outputs and threads."""
    rows = torch.randn((70, 2 * width), generator=torch.Generator().manual_seed(5)).to(dtype)[:, ::2]
    for num_outputs in (*range(1, 18), 24, 31, 32, 33, 47, 48, 49, 64):
        kinds = products(dtype, num_outputs, width)
        set_threads(1)
        whole = {name: product(rows) for name, product in kinds.items()}
        for num_threads in (1, 2, 4):
            set_threads(num_threads)
            for count in {1, 3, 8, 17, 70, 1 + (7 * num_outputs + num_threads) % 69}:
                start = (num_outputs * num_threads) % (71 - count)
                for name, product in kinds.items():
                    part = product(rows[start : start + count])
                    assert torch.equal(part, whole[name][start : start + count]), (name, num_outputs, count)


@pytest.mark.I5
@torch.inference_mode()
def test_products_are_those_of_their_definition() -> None:
    rows, keys = torch.randn(19, 40), torch.randn(700, 40)
    for name, result in {
        name: product(rows) for name, product in products(rows.dtype, 6, 40).items()
    }.items():
        assert len(result) == 19, name
    matrix, bias = torch.randn(6, 40), torch.randn(6)
    torch.testing.assert_close(linear(rows, matrix, bias), rows @ matrix.t() + bias)
    by_keys = matmul_keys(rows, keys).transpose(0, 1).flatten(1)
    torch.testing.assert_close(by_keys[:, :700], rows @ keys.t())
    assert not by_keys[:, 700:].any()
    each = torch.randn(19, 40, 7)
    torch.testing.assert_close(matmul_tokens(rows[:, None], each), rows[:, None] @ each)
    assert linear(rows[:0], matrix).shape == (0, 6)


@pytest.mark.I5
def test_the_trial_passes_here_and_leaves_the_threads(set_threads: Callable[[int], None]) -> None:
    for num_threads in (1, 3):
        set_threads(num_threads)
        try_products(OUTPUTS)
        assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("fault", ["rows", "places", "threads"])
def test_a_machine_whose_products_differ_is_refused(
    fault: str, monkeypatch: pytest.MonkeyPatch, set_threads: Callable[[int], None]
) -> None:
    """The library's rounding depends on the rows, their places or the threads."""

    def product(x: Tensor, matrix: Tensor) -> Tensor:
        result = linear(x, matrix)
        if fault == "rows":
            return result * (1 + 1e-6 * (len(x) < 5))
        if fault == "places":
            return result * (1 + 1e-6 * (torch.arange(len(x)) % 8 == 3)[:, None])
        return result * (1 + 1e-6 * (torch.get_num_threads() == 2))

    set_threads(2)
    monkeypatch.setattr("hisparse_pd.kernels.row_trial.linear", product)
    with pytest.raises(RowBitsError, match=r"linear of 40 columns .* --num-threads 1"):
        try_products(OUTPUTS)
    assert torch.get_num_threads() == 2


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
