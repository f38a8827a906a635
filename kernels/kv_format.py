"""Converts numbers to the bytes of a pool's rows and back: items of the KV pools, rows of the index pools.

A node makes a ``KvFormat`` and an ``IndexKeyFormat`` from the model and the cache's dtype. Forwards ``store``
new rows into one layer of a pool; attention and indexer in torch ``load`` rows that were gathered from a
layer, while GPU kernels read the bytes themselves. ``docs/kv-layout.md`` has every format byte by byte. A
format keeps no state and never synchronises with a device, and a CUDA graph may capture both directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError, check_at_least, check_tensor
from hisparse_pd.kernels.fp8 import FP8_CAPABILITY, FP8_MAX, next_power_of_two

FLOAT32: Final = "float32"
BFLOAT16: Final = "bfloat16"
FP8_E4M3: Final = "fp8_e4m3"
FORMAT_NAMES: Final = (FLOAT32, BFLOAT16, FP8_E4M3)

SCALE_TILE: Final = 128
"""Elements of a latent that share one scale in an fp8 item; the last tile may be shorter."""

_PLAIN_DTYPES: Final = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KvFormat:
    """The bytes of an item: a latent of ``kv_lora_rank`` numbers, then a rotary key of ``rope_dim`` numbers.

    ``float32``, ``bfloat16``: the numbers one after the other. ``fp8_e4m3``: the latent in fp8, a float32
    scale for each 128 of its numbers, the rotary key in bfloat16; for sizes of 512 and 64 these are the 656
    bytes of FlashMLA's fp8 KV cache.
    """

    name: str
    kv_lora_rank: int
    rope_dim: int

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_at_least("kv_lora_rank", self.kv_lora_rank, 1)
        check_at_least("rope_dim", self.rope_dim, 0)
        if self.name == FP8_E4M3 and (self.kv_lora_rank % 4 or self.rope_dim % 2):
            raise KernelArgumentError(
                "kv_lora_rank, rope_dim: expected multiples of 4 and 2 for fp8 items, got "
                f"{self.kv_lora_rank} and {self.rope_dim}"
            )

    @property
    def item_dim(self) -> int:
        """Number of numbers in an item."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def num_scales(self) -> int:
        return -(-self.kv_lora_rank // SCALE_TILE) if self.name == FP8_E4M3 else 0

    @property
    def scales_offset(self) -> int:
        """Byte of an fp8 item at which its scales begin."""
        return self.kv_lora_rank

    @property
    def rope_offset(self) -> int:
        """Byte at which the rotary key begins."""
        if self.name == FP8_E4M3:
            return self.scales_offset + 4 * self.num_scales
        return self.kv_lora_rank * self.dtype.itemsize

    @property
    def item_bytes(self) -> int:
        if self.name == FP8_E4M3:
            return self.rope_offset + 2 * self.rope_dim
        return self.item_dim * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a loaded item."""
        return _PLAIN_DTYPES.get(self.name, torch.float32)

    def store(self, layer_pool: Tensor, slots: Tensor, items: Tensor) -> None:
        """Write ``items`` to the rows ``slots`` of one layer of a pool.

        ``layer_pool``: uint8 [num_slots, item_bytes], contiguous. ``slots``: int64 [n], in [0, num_slots), on
        the pool's device; the row of a duplicate slot may hold anything afterwards. ``items``: float [n,
        item_dim], the latent first, on the pool's device.
        """
        _check_stored("items", layer_pool, self.item_bytes, slots, items, self.item_dim)
        _store(self.name, layer_pool, slots, items, self.kv_lora_rank, SCALE_TILE)

    def load(self, rows: Tensor) -> Tensor:
        """Return the items in ``rows``, uint8 [..., item_bytes], as [..., item_dim] of ``self.dtype``.

        The result shares memory with ``rows`` unless the format is fp8.
        """
        _check_loaded(rows, self.item_bytes)
        if self.name != FP8_E4M3:
            return rows.view(self.dtype)
        scales = rows[..., self.scales_offset : self.rope_offset].view(torch.float32)
        latent = _dequantise(rows[..., : self.kv_lora_rank], scales, SCALE_TILE)
        return torch.cat((latent, rows[..., self.rope_offset :].view(torch.bfloat16).float()), dim=-1)

    def unpack(self, layer_pool: Tensor, page_ids: Tensor, page_size: int, out: Tensor) -> None:
        """Write the items of whole pages in bfloat16 to the first rows of ``out``. Values are exact, unless a
        scale is so small or large that its products leave bfloat16's range.

        ``layer_pool``: uint8 [num_slots, item_bytes] of this format, which is fp8_e4m3. ``page_ids``: int32
        [n], pages of the pool, or -1 (padding of a CUDA graph), whose rows of ``out`` stay as they are.
        ``out``: bfloat16 [>= n * page_size, item_dim]. All are contiguous and on one device.
        """
        check_tensor("layer_pool", layer_pool, dtypes=(torch.uint8,), shape=(None, self.item_bytes))
        check_tensor("page_ids", page_ids, dtypes=(torch.int32,), shape=(None,), device=layer_pool.device)
        check_tensor(
            "out", out, dtypes=(torch.bfloat16,), shape=(None, self.item_dim), device=layer_pool.device
        )
        check_at_least("rows of out", out.shape[0], len(page_ids) * page_size)
        if self.name != FP8_E4M3:
            raise KernelArgumentError(f"format: expected {FP8_E4M3}, got {self.name}")
        if layer_pool.device.type == "cuda":
            from hisparse_pd.kernels import triton_kv_format

            triton_kv_format.unpack(layer_pool, page_ids, page_size, out, self.kv_lora_rank, SCALE_TILE)
            return
        slots = page_slots(page_ids, page_size)
        is_there = slots >= 0
        out[: len(slots)][is_there] = self.load(layer_pool[slots[is_there]]).bfloat16()


@dataclass(frozen=True)
class IndexKeyFormat:
    """The bytes of an indexer key: ``index_head_dim`` numbers, followed in ``fp8_e4m3`` by a float32
    scale."""

    name: str
    index_head_dim: int

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_at_least("index_head_dim", self.index_head_dim, 1)
        if self.name == FP8_E4M3 and self.index_head_dim % 4:
            raise KernelArgumentError(
                f"index_head_dim: expected a multiple of 4 for fp8 keys, got {self.index_head_dim}"
            )

    @property
    def item_bytes(self) -> int:
        if self.name == FP8_E4M3:
            return self.index_head_dim + 4
        return self.index_head_dim * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a loaded key."""
        return _PLAIN_DTYPES.get(self.name, torch.float32)

    def store(self, layer_pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        """Write ``keys`` to the rows ``slots`` of one layer of an index pool.

        ``layer_pool``: uint8 [num_slots, item_bytes], contiguous. ``slots``: int64 [n], in [0, num_slots), on
        the pool's device; the row of a duplicate slot may hold anything afterwards. ``keys``: float [n,
        index_head_dim], on the pool's device.
        """
        _check_stored("keys", layer_pool, self.item_bytes, slots, keys, self.index_head_dim)
        _store(self.name, layer_pool, slots, keys, self.index_head_dim, self.index_head_dim)

    def load(self, rows: Tensor) -> Tensor:
        """Return the keys in uint8 ``rows`` [..., item_bytes], as [..., index_head_dim] of ``self.dtype``."""
        _check_loaded(rows, self.item_bytes)
        if self.name != FP8_E4M3:
            return rows.view(self.dtype)
        scale = rows[..., self.index_head_dim :].view(torch.float32)
        return _dequantise(rows[..., : self.index_head_dim], scale, self.index_head_dim)

    def round_queries(self, q_index: Tensor) -> Tensor:
        """Return queries, [..., index_head_dim], as they are multiplied with keys of this format.

        bfloat16 queries of fp8 keys are rounded to fp8, with a scale for each head's query, as keys are; the
        result is float32 then. Others stay as they are.
        """
        if self.name != FP8_E4M3 or q_index.dtype != torch.bfloat16:
            return q_index
        quantised, scales = _quantise(q_index.reshape(-1, self.index_head_dim), self.index_head_dim)
        return _dequantise(quantised, scales, self.index_head_dim).view(q_index.shape)


def page_slots(page_ids: Tensor, page_size: int) -> Tensor:
    """Return the slots of whole pages on the CPU, int64 [len(page_ids) * page_size]; below 0 for a page of
    -1."""
    numbers = torch.arange(len(page_ids) * page_size)
    return page_ids.long()[numbers // page_size] * page_size + numbers % page_size


def _check_name(name: str) -> None:
    if name not in FORMAT_NAMES:
        raise KernelArgumentError(f"name: expected a format of {', '.join(FORMAT_NAMES)}, got {name!r}")


def _check_stored(
    name: str, layer_pool: Tensor, item_bytes: int, slots: Tensor, values: Tensor, dim: int
) -> None:
    device = layer_pool.device
    check_tensor("layer_pool", layer_pool, dtypes=(torch.uint8,), shape=(None, item_bytes))
    check_tensor("slots", slots, dtypes=(torch.int64,), shape=(None,), device=device)
    shape = (slots.shape[0], dim)
    check_tensor(name, values, dtypes=_FLOATS, shape=shape, device=device, contiguous=False)


def _check_loaded(rows: Tensor, item_bytes: int) -> None:
    if rows.dtype != torch.uint8 or rows.dim() == 0 or rows.shape[-1] != item_bytes:
        raise KernelArgumentError(
            f"rows: expected uint8 [..., {item_bytes}], got {rows.dtype} {list(rows.shape)}"
        )


def _store(
    name: str, layer_pool: Tensor, slots: Tensor, values: Tensor, num_quantised: int, tile: int
) -> None:
    """Store ``values`` in the format ``name``; in fp8, columns from ``num_quantised`` on are bfloat16, and
    the others have a scale for each ``tile`` of them."""
    has_kernel = layer_pool.device.type == "cuda" and name != FLOAT32
    if has_kernel and (kernel := _store_kernel(layer_pool.device)) is not None:
        kernel(layer_pool, slots, values, num_quantised if name == FP8_E4M3 else 0, tile)
        return
    if name == FP8_E4M3:
        quantised, scales = _quantise(values[:, :num_quantised], tile)
        rest = values[:, num_quantised:].to(torch.bfloat16)
        layer_pool[slots] = torch.cat((quantised, _bytes(scales), _bytes(rest)), dim=-1)
        return
    dtype = _PLAIN_DTYPES[name]
    layer_pool.view(dtype)[slots] = values.to(dtype)


@functools.cache
def _store_kernel(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, int, int], None] | None:
    """Return the kernel that does all of ``_store`` in one launch, if triton and the GPU can do it."""
    try:
        from hisparse_pd.kernels.triton_kv_format import store
    except ImportError:
        return None
    return store if torch.cuda.get_device_capability(device) >= FP8_CAPABILITY else None


def _quantise(values: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Return the fp8 bytes, uint8 [n, dim], of ``values`` [n, dim], and float32 scales [n, ceil(dim / tile)].

    A scale is the smallest power of two, at least 2 ** -126, that brings its tile's largest magnitude to 448
    or below. It is 1 for a tile of zeros or with values that are not finite: infinities become 448, NaN
    stays.
    """
    num_rows, dim = values.shape
    num_tiles = -(-dim // tile)
    padded = torch.nn.functional.pad(values.float(), (0, num_tiles * tile - dim))
    tiles = padded.view(num_rows, num_tiles, tile)
    scales = next_power_of_two(tiles.abs().amax(dim=-1) / FP8_MAX)
    scales = torch.where(scales.isfinite() & (scales > 0), scales, 1.0)
    # The cast need not saturate. In a tile with an infinity, whose scale is 1, any value may exceed 448.
    quantised = (tiles / scales[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return quantised.view(torch.uint8).view(num_rows, num_tiles * tile)[:, :dim], scales


def _dequantise(quantised: Tensor, scales: Tensor, tile: int) -> Tensor:
    """Return float32 [..., dim] for fp8 bytes, uint8 [..., dim], and scales [..., ceil(dim / tile)]."""
    values = quantised.view(torch.float8_e4m3fn).float()
    per_value = scales[..., None].expand(*scales.shape, tile).flatten(-2)[..., : values.shape[-1]]
    return values * per_value


def _bytes(values: Tensor) -> Tensor:
    """View ``values`` [n, dim] as uint8 [n, bytes]."""
    num_rows, dim = values.shape
    return values.reshape(-1).view(torch.uint8).view(num_rows, dim * values.itemsize)
