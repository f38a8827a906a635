"""Tests this machine's matrix products when an engine on a CPU starts (``try_products``).

``kernels.row_math`` gives every product one shape and one thread. It cannot guarantee that a row has the same
bits at each place of its block and with any number of torch's threads; that depends on the machine and the
library. A node whose machine fails the test does not start, because answers would depend on the other
requests of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.kernels.row_math import (
    BLOCK_ROWS,
    MKL_MODE,
    linear,
    matmul_heads,
    matmul_keys,
    matmul_tokens,
)

OUTPUTS: Final = (1, 2, 4, 5, 6, 8, 12, 17, 20, 33, 64)
"""Numbers of outputs that are tried; libraries have special code for few outputs. Tests try all up to 64."""
WIDTHS: Final = (40, 301)
"""Numbers of columns that are tried: one output is the sum of as many products."""
_NUM_ROWS: Final = 3 * BLOCK_ROWS
"""Rows of each product: three blocks."""
_PARTS: Final = (
    (0, 1),
    (BLOCK_ROWS + 3, 5),
    (5, 2 * BLOCK_ROWS + 1),
    *((place, 9) for place in (1, 2, 4, 6)),
)
"""First row and number of rows of the parts that are computed separately. Together they put each row at
several places of its block, among zeros and among other rows."""

Product = Callable[[Tensor], Tensor]


class RowBitsError(StartError):
    """A row's product has other bits alone than among other rows on this machine."""


def try_products(outputs: Iterable[int] = OUTPUTS, widths: Iterable[int] = WIDTHS) -> None:
    """Raise RowBitsError unless a row's products have the same bits among any rows and with any number of
    torch's threads. The number of threads is restored."""
    all_threads = torch.get_num_threads()
    trials = [*_trials(widths, tuple(outputs))]
    try:
        torch.set_num_threads(1)
        products_of_all = [trial.product(trial.rows) for trial in trials]
        for num_threads in sorted({1, min(2, all_threads), all_threads}):
            torch.set_num_threads(num_threads)
            for trial, of_all in zip(trials, products_of_all, strict=True):
                for start, count in ((0, len(trial.rows)), *_PARTS):
                    part = slice(start, start + count)
                    if not torch.equal(trial.product(trial.rows[part]), of_all[part]):
                        raise RowBitsError(_message(trial.name, count, num_threads))
    finally:
        torch.set_num_threads(all_threads)


class _Trial(NamedTuple):
    """One product that is tried, and the rows that it is tried with."""

    name: str
    product: Product
    rows: Tensor


def _trials(widths: Iterable[int], outputs: Sequence[int]) -> Iterator[_Trial]:
    """Yield every kind of product in ``kernels.row_math`` in several shapes."""
    generator = torch.Generator().manual_seed(0)
    for width in widths:
        rows = torch.randn((_NUM_ROWS, width), generator=generator)
        keys = torch.randn((max(outputs), width), generator=generator)
        yield _Trial(f"matmul_keys of {width} columns", partial(_keys_product, keys), rows)
        for num_outputs in outputs:
            shape = f"of {width} columns and {num_outputs} outputs"
            matrix = keys[:num_outputs]
            yield _Trial(f"linear {shape}", partial(linear, matrix=matrix), rows)
            heads = torch.stack((matrix.t(), matrix.t()))
            yield _Trial(f"matmul_heads {shape}", partial(_heads_product, heads), rows)
            tokens = rows[:, None].expand(-1, num_outputs, -1).contiguous()
            yield _Trial(f"matmul_tokens {shape}", partial(_tokens_product, matrix.t()), tokens)


def _keys_product(keys: Tensor, x: Tensor) -> Tensor:
    return matmul_keys(x, keys)[0]  # the scores of the first block of keys


def _heads_product(matrices: Tensor, x: Tensor) -> Tensor:
    out = x.new_empty((len(x), 2, matrices.shape[2]))
    matmul_heads(x[:, None].expand(-1, 2, -1), matrices, out)
    return out


def _tokens_product(matrix: Tensor, x: Tensor) -> Tensor:
    return matmul_tokens(x, matrix.expand(len(x), -1, -1))


def _message(product: str, num_rows: int, num_threads: int) -> str:
    return (
        f"{product} gives other bits for {num_rows} rows with {num_threads} torch threads than for the same "
        f"rows among {_NUM_ROWS} with one thread, on {_cpu()} with "
        f"{MKL_MODE}={os.environ.get(MKL_MODE, '')}: answers would depend on the other requests of a batch; "
        f"unset {MKL_MODE}, start with --num-threads 1, use a build of torch with MKL, or use another machine"
    )


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "this CPU"
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"
