"""Arithmetic on a CPU in which a token's result does not depend on other tokens of the batch.

The model's modules and the CPU side of all kernels call these functions instead of torch's. A token has the
same bits in a batch or alone, in a chunk of 1 or 512 tokens, with one torch thread or many. Four things in
torch do not have this property:

- Matrix products. A library chooses the order of additions by the number of rows and threads. Therefore every
  product of a forward is made here, and no other module calls torch for one. Rows are split into blocks of
  ``BLOCK_ROWS``, padded with zeros. Each block is a separate product in contiguous memory, which has the same
  shape whatever the number of rows, and MKL computes it in one thread. A row must still get the same bits at
  each place of a block; ``kernels.row_trial`` tries this when a node starts.
- Functions of single elements. torch computes the last few elements of a tensor, which do not fill a vector
  register, by other code than the rest. ``exp`` has no such difference, so ``silu`` and ``sigmoid`` are
  computed with it.
- The first ``cos`` of a process. MKL chooses the code of each function in its first call. If two threads make
  that call at once, one may use code that is accurate to 11 bits only (pytorch#188792). ``fix_arithmetic``
  makes the first calls in one thread.
- Sums over a dimension other than the last one. ``sum_heads`` replaces them.

On a GPU most of these functions call torch's own.
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
"""The environment variable with MKL's mode of reproducibility."""
STRICT: Final = "AUTO,STRICT"
BLOCK_ROWS: Final = 16
"""Rows of one product. A step of one request computes all of them; a prompt makes one call for each block."""
BLOCK_QUERIES: Final = 8
"""Query heads in one product of the indexer; a token has several heads."""
BLOCK_KEYS: Final = 512
"""Keys in one product of the indexer, whose scores are the columns of its result."""

_CHOSEN_BY_FIRST_CALL = (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt)


def fix_arithmetic() -> None:
    """Choose MKL's strict mode, unless the environment has set a mode, and fix the code of its functions.

    Call before the first arithmetic of a process.
    """
    os.environ.setdefault(MKL_MODE, STRICT)
    one = torch.ones(1)  # one element: one thread
    for function in _CHOSEN_BY_FIRST_CALL:
        function(one)


@functools.cache
def _mkl_threads_setter() -> Callable[[int], int]:
    """Return MKL's function that sets how many threads compute the calling thread's products, and returns the
    number before; as either number, 0 stands for torch's choice. torch exports it without a Python name.
    Without MKL the function has no effect.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # PyDLL keeps the interpreter's lock; a call of 0.1 us is not worth releasing it.
        function: Callable[[int], int] = ctypes.PyDLL(str(library)).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return lambda _: 0
    return function


class _OneThread:
    """A context in which MKL computes products in the calling thread alone. It restores the former number."""

    __slots__ = ("_before", "_set")

    def __enter__(self) -> None:
        self._set = _mkl_threads_setter()
        self._before = self._set(1)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)


def _wide(x: Tensor) -> Tensor:
    """Widen ``x`` for products on a CPU: smaller dtypes use another library, with its own threads."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _whole_blocks(x: Tensor, size: int) -> list[Tensor]:
    """Split ``x`` into contiguous blocks of ``size`` rows, the last one padded with zeros."""
    num_rows = x.shape[0]  # len() of a tensor takes three times as long
    if num_rows == 0:
        return []
    blocks = [x] if num_rows <= size else list(torch.split(x, size))
    if missing := -num_rows % size:
        blocks[-1] = torch.constant_pad_nd(blocks[-1], (0, 0) * (x.dim() - 1) + (0, missing))
    return [block.contiguous() for block in blocks]


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` [..., m] by the transpose of ``matrix`` [n, m], and add ``bias`` [n]. Returns [..., n].

    On a CPU ``matrix`` must be contiguous, because its strides are a part of the product's shape.
    """
    if x.device.type != "cpu":
        return functional.linear(x, matrix, bias)
    rows = _wide(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    transposed = _wide(matrix).t()
    num_rows, num_columns = rows.shape[0], matrix.shape[0]
    blocks = _whole_blocks(rows, BLOCK_ROWS)
    with _OneThread():
        if len(blocks) == 1:
            product: Tensor = torch.mm(blocks[0], transposed)
        else:
            results = rows.new_empty((len(blocks), BLOCK_ROWS, num_columns))
            for block, result in zip(blocks, results.unbind(), strict=True):
                torch.mm(block, transposed, out=result)
            product = results.flatten(0, 1)
    product = product[:num_rows]
    if bias is not None:
        product += bias
    product = product.to(x.dtype)
    return product if x.dim() == 2 else product.view(*x.shape[:-1], num_columns)


class RowLinear(torch.nn.Linear):
    """``torch.nn.Linear`` with the product of ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid as torch does, up to the last two bits. On a CPU ``x`` is float32 or float64."""
    if x.device.type != "cpu":
        return x.sigmoid()
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """Compute ``silu`` as torch does, up to the last bits, in float32 or wider."""
    if x.device.type != "cpu":
        return functional.silu(x)
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def matmul_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Multiply each head of ``x`` [num_tokens, heads, m] by its matrix of ``matrices`` [heads, m, n], into
    ``out`` [num_tokens, heads, n]. All may have any strides.
    """
    if x.device.type != "cpu":
        torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
        return
    wide = _wide(matrices)
    with _OneThread():
        for number, block in enumerate(_whole_blocks(_wide(x), BLOCK_ROWS)):
            product = torch.bmm(block.transpose(0, 1).contiguous(), wide).transpose(0, 1)
            result = out[number * BLOCK_ROWS :][:BLOCK_ROWS]
            result.copy_(product[: result.shape[0]])


def matmul_tokens(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each token of ``x`` [num_tokens, m, k] by its own matrix of ``matrices`` [num_tokens, k, n].
    Returns [num_tokens, m, n]. On a CPU both are float32 or float64, and a token's strides must not depend on
    the number of tokens.
    """
    if x.device.type != "cpu":
        return torch.matmul(x, matrices)
    out = x.new_empty((*x.shape[:2], matrices.shape[2]))
    with _OneThread():
        # One product a token, not one batch: with one column or row, a batch of one token adds up in another
        # order than a batch of two.
        for token, matrix, result in zip(x.unbind(), matrices.unbind(), out.unbind(), strict=True):
            torch.mm(token, matrix, out=result)
    return out


def matmul_keys(x: Tensor, keys: Tensor) -> Tensor:
    """Multiply ``x`` [rows, dim] by each of ``keys`` [num_keys, dim]. Returns [blocks, rows, BLOCK_KEYS],
    with the blocks of keys in order and zeros after the last key.
    """
    key_blocks = _whole_blocks(_wide(keys), BLOCK_KEYS)
    if x.device.type != "cpu":
        return torch.matmul(x, torch.stack(key_blocks).transpose(1, 2))
    rows = _whole_blocks(_wide(x), BLOCK_QUERIES)
    out = key_blocks[0].new_empty((len(key_blocks), len(rows), BLOCK_QUERIES, BLOCK_KEYS))
    with _OneThread():
        for key_block, results in zip(key_blocks, out.unbind(), strict=True):
            for block, result in zip(rows, results.unbind(), strict=True):
                torch.mm(block, key_block.t(), out=result)
    return out.flatten(1, 2)[:, : len(x)]


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(logits / cap)`` for float32 ``logits``. A CPU computes it in float64, so that
    rounding removes the difference between its code for whole vector registers and for the rest of a
    tensor."""
    wide = logits if logits.is_cuda else logits.double()
    return (torch.tanh(wide / cap) * cap).to(logits.dtype)


def cumulate(x: Tensor) -> Tensor:
    """Return the running sums of each row of ``x`` [rows, columns]. A GPU adds up a single row in another
    order than several rows, so a single row is computed twice."""
    return x.expand(2, -1).cumsum(1)[:1] if x.is_cuda and len(x) == 1 else x.cumsum(1)


def sum_heads(weights: Tensor, values: Tensor) -> Tensor:
    """Return the sum of ``weights`` times ``values`` over the heads, added up in their order: [...,
    num_tokens, n].

    ``weights``: [num_tokens, heads]; ``values``: [..., num_tokens, heads, n], which is overwritten.
    """
    values.mul_(weights[:, :, None])
    total = values[..., 0, :].clone()
    for head in range(1, values.shape[-2]):
        total += values[..., head, :]
    return total
