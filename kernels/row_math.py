"""Arithmetic on a CPU of which a token's result does not depend on what is computed beside it.

In one batch or alone, in a chunk of 1 or 512 tokens, with one torch thread or many: the bits are the same.
Four things would differ:

- Products of matrices. A library chooses by the number of rows and of threads in which order it adds up. So
  every product of a forward is made here, and no other module calls torch for one: rows go in blocks of
  ``BLOCK_ROWS``, padded with zeros, each block is a product of its own, of one shape and in contiguous memory
  whatever the number of rows, and MKL makes it in one thread. What is left is that a block gives a row the
  same bits in each of its places, which ``kernels.row_trial`` tries at the start.
- Functions of single elements. torch computes the last few of a tensor, which do not fill a vector register,
  by other code than the rest. ``exp`` is not among them, so ``silu`` and ``sigmoid`` are made of it.
- The first ``cos`` of a process. MKL chooses the code of its functions in their first call; where two threads
  make it, one may compute by code of 11 bits (pytorch#188792). ``fix_arithmetic`` makes it in one thread.
- Sums over a dimension that is not the last one: ``sum_heads``.

On a GPU all of it is torch's own, in fewer launches.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

MKL_MODE: Final = "MKL_CBWR"
STRICT: Final = "AUTO,STRICT"
BLOCK_ROWS: Final = 16
"""Rows of one product. A step of one request pays for as many, and a prompt has a call for every so many."""
BLOCK_QUERIES: Final = 8
"""The same for heads of the indexer's queries, of which a token has several."""
BLOCK_KEYS: Final = 512
"""Keys of one product of the indexer, whose scores are the columns of its result."""

_CHOSEN_BY_FIRST_CALL = (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt)


def fix_arithmetic() -> None:
    """Choose MKL's strict mode, unless the environment has chosen, and the code of its functions.

    To be called before the first arithmetic of a process.
    """
    os.environ.setdefault(MKL_MODE, STRICT)
    one = torch.ones(1)  # one element: one thread
    for function in _CHOSEN_BY_FIRST_CALL:
        function(one)


@functools.cache
def _set_mkl_threads() -> Callable[[int], int]:
    """MKL's function for the number of its threads in the calling thread's products, which returns the number
    before; 0 is torch's choice. torch exports it and has no name for it. Without MKL a function of no effect.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # PyDLL keeps the interpreter's lock, which a call of 0.1 us is not worth giving away.
        function: Callable[[int], int] = ctypes.PyDLL(str(library)).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return lambda _: 0
    return function


class _OneThread:
    """MKL makes the products within in the calling thread alone."""

    __slots__ = ("_before", "_set")

    def __enter__(self) -> None:
        self._set = _set_mkl_threads()
        self._before = self._set(1)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)


def _wide(x: Tensor) -> Tensor:
    """``x`` as products on a CPU take it: smaller dtypes are another library's, with threads of its own."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _whole_blocks(x: Tensor, size: int) -> list[Tensor]:
    """``x`` in contiguous blocks of ``size`` rows, the last one padded with zeros."""
    if not len(x):
        return []
    blocks = [x] if len(x) <= size else list(torch.split(x, size))
    if missing := -len(x) % size:
        blocks[-1] = torch.constant_pad_nd(blocks[-1], (0, 0) * (x.dim() - 1) + (0, missing))
    return [block.contiguous() for block in blocks]


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., m] by the transpose of ``matrix`` [n, m], and ``bias`` [n] added: [..., n].

    On a CPU ``matrix`` is contiguous, for its strides are a part of the product's shape.
    """
    if x.device.type != "cpu":
        return functional.linear(x, matrix, bias)
    rows, by = _wide(x if x.dim() == 2 else x.reshape(-1, x.shape[-1])), _wide(matrix).t()
    num_rows = len(rows)
    with _OneThread():
        if 0 < num_rows <= BLOCK_ROWS:
            product: Tensor = torch.mm(_whole_blocks(rows, BLOCK_ROWS)[0], by)
        else:
            blocks = _whole_blocks(rows, BLOCK_ROWS)
            product = rows.new_empty((len(blocks) * BLOCK_ROWS, len(matrix)))
            for block, of_block in zip(blocks, torch.split(product, BLOCK_ROWS), strict=False):
                torch.mm(block, by, out=of_block)
    product = product[:num_rows]
    if bias is not None:
        product += bias
    result: Tensor = product.to(x.dtype).view(*x.shape[:-1], len(matrix))
    return result


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
    if x.device.type != "cpu":
        torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
        return
    by = _wide(matrices)
    with _OneThread():
        for number, block in enumerate(_whole_blocks(_wide(x), BLOCK_ROWS)):
            product = torch.bmm(block.transpose(0, 1).contiguous(), by).transpose(0, 1)
            result = out[number * BLOCK_ROWS : (number + 1) * BLOCK_ROWS]
            result.copy_(product[: len(result)])


def matmul_tokens(x: Tensor, matrices: Tensor) -> Tensor:
    """Each token's product with a matrix of its own: ``x`` [num_tokens, m, k] by ``matrices`` [num_tokens, k,
    n]: [num_tokens, m, n]. On a CPU both are float32 or float64, and a token's strides do not depend on the
    number of tokens.
    """
    if x.device.type != "cpu":
        return torch.matmul(x, matrices)
    out = x.new_empty((*x.shape[:2], matrices.shape[2]))
    with _OneThread():
        # No batch of them: with one column or row, a batch of one adds up in another order than one of two.
        for of_token, matrix, result in zip(x.unbind(), matrices.unbind(), out.unbind(), strict=True):
            torch.mm(of_token, matrix, out=result)
    return out


def matmul_keys(x: Tensor, keys: Tensor) -> Tensor:
    """``x`` [rows, dim] by each of ``keys`` [num_keys, dim]: [blocks, rows, BLOCK_KEYS], the blocks in order,
    with zeros behind the last of the keys.
    """
    by = _whole_blocks(_wide(keys), BLOCK_KEYS)
    if x.device.type != "cpu":
        return torch.matmul(x, torch.stack(by).transpose(1, 2))
    rows = _whole_blocks(_wide(x), BLOCK_QUERIES)
    out = by[0].new_empty((len(by), len(rows), BLOCK_QUERIES, BLOCK_KEYS))
    with _OneThread():
        for of_keys, results in zip(by, out.unbind(), strict=True):
            for block, result in zip(rows, results.unbind(), strict=True):
                torch.mm(block, of_keys.t(), out=result)
    return out.flatten(1, 2)[:, : len(x)]


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
    """[..., num_tokens, n]: the sum over heads of ``weights`` [num_tokens, heads] times ``values`` [...,
    num_tokens, heads, n], which is overwritten. In the order of the heads.
    """
    values.mul_(weights[:, :, None])
    total = values[..., 0, :].clone()
    for head in range(1, values.shape[-2]):
        total += values[..., head, :]
    return total
