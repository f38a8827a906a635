"""KV formats: every byte of a row is where the layout says, and loads return what was stored."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.kv_format import BFLOAT16, FLOAT32, FORMAT_NAMES, FP8_E4M3, IndexKeyFormat, KvFormat

SIZES = [(512, 64), (96, 16), (300, 6), (36, 2), (4, 0)]


def stored(kv_format: KvFormat | IndexKeyFormat, values: Tensor) -> Tensor:
    """Return the rows in which ``values`` are stored."""
    pool = torch.zeros((len(values), kv_format.item_bytes), dtype=torch.uint8)
    kv_format.store(pool, torch.arange(len(values)), values)
    return pool


def test_sizes_of_deepseek_v32() -> None:
    assert [KvFormat(name, 512, 64).item_bytes for name in FORMAT_NAMES] == [2304, 1152, 656]
    assert [IndexKeyFormat(name, 128).item_bytes for name in FORMAT_NAMES] == [512, 256, 132]
    fp8 = KvFormat(FP8_E4M3, 512, 64)
    assert (fp8.num_scales, fp8.scales_offset, fp8.rope_offset) == (4, 512, 528)


def test_golden_bytes_of_plain_items() -> None:
    item = torch.tensor([[1.0, -2.5, 0.15625]])
    assert bytes(stored(KvFormat(FLOAT32, 2, 1), item)[0].tolist()) == struct.pack("<3f", 1, -2.5, 0.15625)
    assert bytes(stored(KvFormat(BFLOAT16, 2, 1), item)[0].tolist()).hex(" ") == "80 3f 20 c0 20 3e"


def test_golden_bytes_of_an_fp8_item() -> None:
    item = torch.zeros((1, 260 + 2))
    item[0, :3] = torch.tensor([896.0, -2.0, 1.0])
    item[0, 256:] = torch.tensor([3.0, 0.0, 0.0, 0.0, 1.0, -2.5])
    row = bytes(stored(KvFormat(FP8_E4M3, 260, 2), item)[0].tolist())
    assert len(row) == 260 + 3 * 4 + 2 * 2
    # 896 / 448 is the scale 2; the second tile is zero; 3 / 448 is below 2 ** -7, and 3 * 2 ** 7 is 384.
    assert row[:4].hex(" ") == "7e b8 30 00"
    assert not any(row[4:256])
    assert row[256:260].hex(" ") == "7c 00 00 00"
    assert row[260:272] == struct.pack("<3f", 2.0, 1.0, 2.0**-7)
    assert row[272:].hex(" ") == "80 3f 20 c0"


def test_golden_bytes_of_an_fp8_index_key() -> None:
    key = torch.zeros((1, 128))
    key[0, 0], key[0, 127] = -448.0, 7.0
    row = bytes(stored(IndexKeyFormat(FP8_E4M3, 128), key)[0].tolist())
    assert len(row) == 132
    assert (row[0], row[127], row[128:]) == (0xFE, 0x4E, struct.pack("<f", 1.0))
    assert not any(row[1:127])


@pytest.mark.parametrize("name", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_plain_items_come_back_exactly(name: str, rank: int, rope: int) -> None:
    kv_format = KvFormat(name, rank, rope)
    items = torch.randn((5, rank + rope), generator=torch.Generator().manual_seed(0)).to(kv_format.dtype)
    loaded = kv_format.load(stored(kv_format, items))
    assert loaded.dtype == kv_format.dtype
    assert torch.equal(loaded, items)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_fp8_items_keep_three_bits_of_mantissa(rank: int, rope: int, dtype: torch.dtype) -> None:
    kv_format = KvFormat(FP8_E4M3, rank, rope)
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor([1.0, 1e4, 1e-6, 3e30, 1e-25])[:, None]
    items = (torch.randn((5, rank + rope), generator=generator) * magnitudes).to(dtype)
    loaded = kv_format.load(stored(kv_format, items))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded[:, rank:], items[:, rank:].bfloat16().float())
    for start in range(0, rank, 128):
        tile = items[:, start : min(start + 128, rank)].double()
        largest_scale = 2 * tile.abs().amax(dim=1, keepdim=True) / 448
        bound = torch.maximum(tile.abs() * 2**-4, largest_scale * 2**-10)
        error = (loaded[:, start : start + tile.shape[1]].double() - tile).abs()
        assert (error <= bound).all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dim", [128, 16, 4])
def test_index_keys_come_back(name: str, dim: int) -> None:
    key_format = IndexKeyFormat(name, dim)
    keys = torch.randn((4, dim), generator=torch.Generator().manual_seed(0))
    loaded = key_format.load(stored(key_format, keys))
    assert loaded.dtype == key_format.dtype
    tolerance = {FLOAT32: 0.0, BFLOAT16: 2**-8, FP8_E4M3: 2**-4}[name]
    torch.testing.assert_close(loaded.float(), keys, rtol=tolerance, atol=tolerance * 0.02)


def test_fp8_products_are_exact_in_bfloat16() -> None:
    kv_format = KvFormat(FP8_E4M3, 512, 0)
    items = torch.randn((64, 512), generator=torch.Generator().manual_seed(0))
    loaded = kv_format.load(stored(kv_format, items))
    assert torch.equal(loaded.bfloat16().float(), loaded)
    # Loaded values are stored again without a change.
    assert torch.equal(kv_format.load(stored(kv_format, loaded)), loaded)


def test_fp8_tiles_at_the_ends_of_the_range() -> None:
    kv_format = KvFormat(FP8_E4M3, 4, 0)
    items = torch.tensor(
        [[0.0] * 4, [1e-45, 0, 0, 0], [1e-37, 0, 0, 0], [3e38, -1e38, 0, 0], [float("nan"), 1, 2, 3]]
    )
    loaded = kv_format.load(stored(kv_format, items))
    assert not loaded[:2].any()
    torch.testing.assert_close(loaded[2:4], items[2:4], rtol=2**-4, atol=0)
    torch.testing.assert_close(loaded[4], items[4], rtol=2**-4, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_only_the_slots_are_written(name: str, rank: int, rope: int) -> None:
    kv_format = KvFormat(name, rank, rope)
    items = torch.randn((3, rank + rope), generator=torch.Generator().manual_seed(0))
    pool = torch.full((8, kv_format.item_bytes), 0xAB, dtype=torch.uint8)
    kv_format.store(pool, torch.tensor([6, 0, 3]), items)
    assert torch.equal(pool[[6, 0, 3]], stored(kv_format, items))
    assert (pool[[1, 2, 4, 5, 7]] == 0xAB).all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_any_leading_shape_is_loaded(name: str) -> None:
    kv_format = KvFormat(name, 96, 16)
    pool = stored(kv_format, torch.randn((6, 112), generator=torch.Generator().manual_seed(0)))
    loaded = kv_format.load(pool)
    slots = torch.tensor([[0, 5, 2], [1, 1, 4]])
    assert torch.equal(kv_format.load(pool[slots]), loaded[slots])
    assert torch.equal(kv_format.load(pool[3]), loaded[3])
    assert kv_format.load(pool[:0]).shape == (0, 112)
    kv_format.store(pool, torch.zeros(0, dtype=torch.int64), torch.zeros((0, 112)))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(KernelArgumentError, match=r"name: expected a format of .*fp8_e4m3, got 'fp8'"):
        KvFormat("fp8", 512, 64)
    with pytest.raises(KernelArgumentError, match="kv_lora_rank: expected at least 1, got 0"):
        KvFormat(FLOAT32, 0, 64)
    with pytest.raises(KernelArgumentError, match=r"kv_lora_rank, rope_dim: .* 4 and 2 .*, got 33 and 2"):
        KvFormat(FP8_E4M3, 33, 2)
    with pytest.raises(KernelArgumentError, match=r"kv_lora_rank, rope_dim: .* 4 and 2 .*, got 32 and 3"):
        KvFormat(FP8_E4M3, 32, 3)
    with pytest.raises(KernelArgumentError, match=r"index_head_dim: expected a multiple of 4 .*, got 26"):
        IndexKeyFormat(FP8_E4M3, 26)
    kv_format = KvFormat(BFLOAT16, 4, 2)
    pool, slots, items = torch.zeros((3, 12), dtype=torch.uint8), torch.tensor([0]), torch.zeros((1, 6))
    with pytest.raises(KernelArgumentError, match=r"layer_pool: expected shape \[\*, 12\], got \[3, 11\]"):
        kv_format.store(pool[:, :11], slots, items)
    with pytest.raises(KernelArgumentError, match="layer_pool: expected a contiguous tensor"):
        kv_format.store(torch.zeros((3, 13), dtype=torch.uint8)[:, :12], slots, items)
    with pytest.raises(KernelArgumentError, match=r"items: expected shape \[1, 6\], got \[2, 6\]"):
        kv_format.store(pool, slots, torch.zeros((2, 6)))
    with pytest.raises(KernelArgumentError, match=r"slots: expected dtype torch.int64, got torch.int32"):
        kv_format.store(pool, slots.int(), items)
    with pytest.raises(KernelArgumentError, match=r"rows: expected uint8 \[\.\.\., 12\], got .*\[3, 11\]"):
        kv_format.load(pool[:, :11])


def test_queries_of_fp8_keys_are_rounded_as_keys_are() -> None:
    key_format = IndexKeyFormat("fp8_e4m3", 16)
    queries = torch.randn(5, 3, 16).bfloat16() * torch.tensor([1e-20, 1.0, 3e20])[:, None].bfloat16()
    pool = torch.zeros((15, key_format.item_bytes), dtype=torch.uint8)
    key_format.store(pool, torch.arange(15), queries.flatten(0, 1))
    assert torch.equal(key_format.round_queries(queries), key_format.load(pool).view(5, 3, 16))
    assert torch.equal(key_format.round_queries(queries.float()), queries.float())
    assert torch.equal(IndexKeyFormat("bfloat16", 16).round_queries(queries), queries)
