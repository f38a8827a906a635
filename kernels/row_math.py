"""Arithmetic on a CPU of which a token's result does not depend on what is computed beside it.

In one batch or alone, in a chunk of 1 or 512 tokens: the bits are the same. Three things would differ:

- Products of matrices. MKL chooses by the number of rows in which order it adds up. Its strict mode does not
  (``fix_arithmetic``), but on AMD's processors very few rows are added up in another order all the same: they
  are computed among rows of zeros (``linear``). torch has products of its own for very small batches of
  matrices (``matmul_heads``).
- Functions of single elements. torch computes the last few of a tensor, which do not fill a vector register,
  by other code than the rest. ``exp`` is not among them, so ``silu`` and ``sigmoid`` are made of it.
- The first ``cos`` of a process. MKL chooses the code of its functions in their first call; where two threads
  make it, one may compute by code of 11 bits (pytorch#188792). ``fix_arithmetic`` makes it in one thread.
- Sums over a dimension that is not the last one, and products of a row by a matrix: ``sum_heads``.

On a GPU all of it is torch's own, in fewer launches.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

_MKL_MODE = "MKL_CBWR"
_STRICT = "AUTO,STRICT"
_TORCH_PRODUCT_SIZE = 400
"""Multiplications of one matrix of a batch below which torch does not ask MKL."""
_FEWEST_ROWS = 2
"""Of each matrix of a batch: one row by a matrix is another operation to MKL."""
_MOST_PADDED_ROWS = 8
"""Products of more rows than this are never padded."""


_CHOSEN_BY_FIRST_CALL = (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt)


def fix_arithmetic() -> None:
    """Choose MKL's strict mode, unless the environment has chosen, and the code of its functions.

    To be called before the first arithmetic of a process.
    """
    os.environ.setdefault(_MKL_MODE, _STRICT)
    one = torch.ones(1)  # one element: one thread
    for function in _CHOSEN_BY_FIRST_CALL:
        function(one)
    if not products_are_fixed():
        log.warning(
            "products of matrices differ by rounding with the number of their rows here (%s=%s): near ties "
            "may be decided by what shares a batch",
            _MKL_MODE,
            os.environ[_MKL_MODE],
        )


def products_are_fixed() -> bool:
    """Whether a row's product has the same bits alone and among others here: tried, not looked up."""
    return all(not _differing(linear, *shape) for shape in ((1000, 96), (40, 18)))


@functools.cache
def fewest_rows() -> int:
    """The number of rows from which on a product's bits do not depend on it here: 1 where MKL is strict."""
    return max((count + 1 for count in _differing(functional.linear, 1000, 96)), default=1)


def _differing(product: Callable[[Tensor, Tensor], Tensor], num_columns: int, num_outputs: int) -> list[int]:
    """The numbers of rows, of those tried, whose ``product`` by a matrix has other bits than among 64."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, num_columns), (num_outputs, num_columns))
    rows, matrix = (torch.randn(shape, generator=generator) for shape in shapes)
    among_others = product(rows, matrix)
    counts = (*range(1, _MOST_PADDED_ROWS), 17)
    return [count for count in counts if not torch.equal(product(rows[:count], matrix), among_others[:count])]


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., m] by the transpose of ``matrix`` [n, m], and ``bias`` [n] added: [..., n]."""
    if x.device.type == "cpu" and 0 < (num_rows := x.numel() // x.shape[-1]) < (fewest := fewest_rows()):
        padded = functional.pad(x.reshape(num_rows, -1), (0, 0, 0, fewest - num_rows))
        return functional.linear(padded, matrix, bias)[:num_rows].view(*x.shape[:-1], -1)
    return functional.linear(x, matrix, bias)


class RowLinear(torch.nn.Linear):
    """``torch.nn.Linear`` by ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def sigmoid(x: Tensor) -> Tensor:
    """As torch's, to the last bit or the one before it. On a CPU ``x`` is float32 or float64."""
    if x.device.type != "cpu":
        return x.sigmoid()
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """As torch's, to the last bits; computed in float32 at least."""
    if x.device.type != "cpu":
        return functional.silu(x)
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def matmul_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Each head's product: ``x`` [num_tokens, heads, m] by ``matrices`` [heads, m, n] into ``out``
    [num_tokens, heads, n]. Strides are free.
    """
    num_tokens, size = x.shape[0], matrices.shape[1] * matrices.shape[2]
    fewest = (
        max(_FEWEST_ROWS, fewest_rows(), -(-_TORCH_PRODUCT_SIZE // size)) if x.device.type == "cpu" else 0
    )
    if num_tokens < fewest:
        padded = functional.pad(x.transpose(0, 1), (0, 0, 0, fewest - num_tokens))
        out.copy_(torch.bmm(padded, matrices)[:, :num_tokens].transpose(0, 1))
        return
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))


def softcap(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)`` of float32 ``logits``, in float64 on a CPU: it rounds what its codes for
    whole vector registers and for the rest of a tensor differ by."""
    wide = logits if logits.is_cuda else logits.double()
    return (torch.tanh(wide / cap) * cap).to(logits.dtype)


def cumulate(x: Tensor) -> Tensor:
    """The running sums of each row of ``x`` [rows, columns]. A GPU adds up a single row in another order than
    several, so that it is made one of two."""
    return x.expand(2, -1).cumsum(1)[:1] if x.is_cuda and len(x) == 1 else x.cumsum(1)


def sum_heads(weights: Tensor, values: Tensor) -> Tensor:
    """[num_tokens, n]: the sum over heads of ``weights`` [num_tokens, heads] times ``values`` [num_tokens,
    heads, n], which is overwritten. In the order of the heads.
    """
    values.mul_(weights[:, :, None])
    total = values[:, 0].clone()
    for head in range(1, values.shape[1]):
        total += values[:, head]
    return total
