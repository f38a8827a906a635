"""Attention backends and KV formats on a GPU, against the reference on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.attention import (
    FLASHMLA_KV,
    FLASHMLA_SPARSE,
    TORCH,
    TRITON,
    AttentionBackend,
    AttentionBackendError,
    TorchAttention,
)
from hisparse_pd.kernels.attention_backends import attention_beside, choose_backend
from hisparse_pd.kernels.kv_format import BFLOAT16, FLOAT32, FORMAT_NAMES, FP8_E4M3, IndexKeyFormat, KvFormat
from tests.gpu.support import DEVICE, needs_gpu, no_waiting

pytestmark = needs_gpu

SCALE = 0.08
POISON = 0xFF
"""Every byte of a row that is never selected; NaN in each format."""
DEEPSEEK = (512, 64)
NAMES_OF_FORMAT = {
    FLOAT32: (TRITON, TORCH),
    BFLOAT16: (FLASHMLA_SPARSE, TRITON, TORCH),
    FP8_E4M3: (FLASHMLA_KV, TRITON, TORCH),
}
BACKENDS = [(kv_format, name) for kv_format, names in NAMES_OF_FORMAT.items() for name in names]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def backend_for(
    name: str, kv_format: KvFormat, num_heads: int, top_k: int, *, split_slots: int | None = 0
) -> AttentionBackend:
    device = torch.device(DEVICE)
    sizes = {"num_heads": num_heads, "top_k": top_k}
    try:
        return choose_backend(name, device=device, kv_format=kv_format, split_slots=split_slots, **sizes)
    except AttentionBackendError as error:
        if name in (TRITON, TORCH):
            raise
        pytest.skip(str(error))


def filled_pool(kv_format: KvFormat, num_slots: int, generator: torch.Generator) -> Tensor:
    """Return a pool on the CPU whose even slots are poisoned."""
    pool = torch.full((num_slots, kv_format.item_bytes), POISON, dtype=torch.uint8)
    slots = torch.arange(1, num_slots, 2)
    kv_format.store(pool, slots, torch.randn((len(slots), kv_format.item_dim), generator=generator))
    return pool


def some_slots(num_tokens: int, top_k: int, num_slots: int, generator: torch.Generator) -> Tensor:
    """Return odd slots and gaps in every pattern: no gaps, only gaps, padded, scattered."""
    slots = 2 * torch.randint(0, num_slots // 2, (num_tokens, top_k), generator=generator) + 1
    for token in range(num_tokens):
        if token % 5 == 1:
            slots[token] = -1
        elif token % 5 == 2:
            slots[token, max(1, top_k // 3) :] = -1
        elif token % 5 == 3:
            slots[token, torch.rand(top_k, generator=generator) < 0.5] = -1
        elif token % 5 == 4:
            slots[token, : top_k - 1] = -1
    return slots.int()


def check(backend: AttentionBackend, kv_format: KvFormat, q: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    """Compare ``backend`` with the reference. All arguments are on the CPU, and the result is on the GPU."""
    expected = TorchAttention(kv_format).attend(q.float(), pool, slots, SCALE)
    actual = backend.attend(q.to(DEVICE), pool.to(DEVICE), slots.to(DEVICE), SCALE)
    assert actual.dtype == q.dtype
    assert not actual[(slots < 0).all(dim=1).to(DEVICE)].any(), "nothing is selected, but not all is zero"
    in_float32 = backend.name in (TRITON, TORCH) and FLOAT32 in (kv_format.name, str(q.dtype)[6:])
    tolerance = 1e-4 if in_float32 or backend.name == TORCH else 2e-2
    if q.dtype == torch.bfloat16:
        tolerance = max(tolerance, 1e-2)
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=tolerance, atol=tolerance)
    return actual


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 150])
@pytest.mark.parametrize(("format_name", "name"), BACKENDS)
def test_deepseek_sizes(format_name: str, name: str, num_tokens: int, generator: torch.Generator) -> None:
    if format_name == FLOAT32 and num_tokens > 7:
        pytest.skip("the reference takes minutes")
    kv_format = KvFormat(format_name, *DEEPSEEK)
    num_heads, top_k = (128, 2048) if num_tokens <= 7 else (64, 256)
    backend = backend_for(name, kv_format, num_heads, top_k)
    q = torch.randn((num_tokens, num_heads, 576), generator=generator).bfloat16()
    pool = filled_pool(kv_format, 4096, generator)
    check(backend, kv_format, q, pool, some_slots(num_tokens, top_k, 4096, generator))


@pytest.mark.parametrize("num_tokens", [5, 140])
@pytest.mark.parametrize(("format_name", "name"), BACKENDS[2:])
def test_queries_in_splits(format_name: str, name: str, num_tokens: int, generator: torch.Generator) -> None:
    kv_format = KvFormat(format_name, *DEEPSEEK)
    backend = backend_for(name, kv_format, 128, 2048, split_slots=None)
    q = torch.randn((num_tokens, 128, 576), generator=generator).bfloat16().to(DEVICE)
    pool = filled_pool(kv_format, 4096, generator).to(DEVICE)
    slots = some_slots(num_tokens, 2048, 4096, generator).to(DEVICE)
    expected = TorchAttention(kv_format).attend(q.float(), pool, slots, SCALE)
    actual = backend.attend(q, pool, slots, SCALE)
    assert not actual[(slots < 0).all(dim=1)].any(), "nothing is selected, but not all is zero"
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.I5
@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("split_slots", [0, None])
@pytest.mark.parametrize(("format_name", "name"), BACKENDS[2:])
def test_a_row_has_the_same_bits_among_any_others(
    format_name: str, name: str, split_slots: int | None, num_heads: int, generator: torch.Generator
) -> None:
    """The bits are also the same if other kernels hold some multiprocessors."""
    kv_format = KvFormat(format_name, *DEEPSEEK)
    backend = backend_for(name, kv_format, num_heads, 2048, split_slots=split_slots)
    if name == TORCH:
        pytest.skip("its products are torch's")
    pool = filled_pool(kv_format, 4096, generator).to(DEVICE)
    slots = some_slots(600, 2048, 4096, generator).to(DEVICE)
    q = torch.randn((600, num_heads, 576), generator=generator).bfloat16().to(DEVICE)
    expected = backend.attend(q, pool, slots, SCALE)
    for same in (backend, attention_beside(backend, 40)):
        for start, stop in ((0, 1), (2, 4), (3, 6), (7, 16), (0, 17), (4, 68), (5, 70), (10, 160), (0, 599)):
            rows = slice(start, stop)
            assert torch.equal(same.attend(q[rows], pool, slots[rows], SCALE), expected[rows]), rows


@pytest.mark.parametrize(
    ("format_name", "dtype", "rank", "rope", "num_heads", "top_k", "num_tokens"),
    [
        (FLOAT32, torch.float32, 96, 16, 4, 64, 9),
        (FLOAT32, torch.bfloat16, 33, 7, 5, 70, 6),
        (FLOAT32, torch.float32, 512, 64, 20, 2048, 3),
        (BFLOAT16, torch.bfloat16, 96, 16, 4, 64, 9),
        (BFLOAT16, torch.bfloat16, 96, 16, 1, 1, 3),
        (BFLOAT16, torch.float32, 33, 7, 5, 70, 6),
        (BFLOAT16, torch.bfloat16, 128, 0, 16, 2048, 2),
        (BFLOAT16, torch.bfloat16, 300, 64, 40, 100, 5),
        # This one is too long for the shared memory of the first tilings.
        (BFLOAT16, torch.bfloat16, 600, 64, 40, 77, 4),
        # These are the longest, for every kind of product.
        (BFLOAT16, torch.bfloat16, 1024, 64, 40, 77, 4),
        (FLOAT32, torch.float32, 1024, 64, 20, 77, 4),
        (FP8_E4M3, torch.bfloat16, 1024, 64, 40, 77, 4),
        (BFLOAT16, torch.bfloat16, 512, 64, 16, 2048, 3),
        (BFLOAT16, torch.bfloat16, 512, 64, 100, 300, 33),
        (FP8_E4M3, torch.bfloat16, 96, 16, 4, 64, 9),
        (FP8_E4M3, torch.bfloat16, 36, 6, 5, 70, 6),
        (FP8_E4M3, torch.float32, 36, 6, 5, 70, 6),
        (FP8_E4M3, torch.bfloat16, 300, 64, 40, 100, 5),
        (FP8_E4M3, torch.bfloat16, 128, 0, 16, 2048, 2),
        (FP8_E4M3, torch.bfloat16, 512, 64, 16, 2048, 3),
    ],
)
def test_triton_at_any_size(
    format_name: str,
    dtype: torch.dtype,
    rank: int,
    rope: int,
    num_heads: int,
    top_k: int,
    num_tokens: int,
    generator: torch.Generator,
) -> None:
    kv_format = KvFormat(format_name, rank, rope)
    backend = backend_for(TRITON, kv_format, num_heads, top_k)
    q = torch.randn((num_tokens, num_heads, rank + rope), generator=generator).to(dtype)
    pool = filled_pool(kv_format, 500, generator)
    check(backend, kv_format, q, pool, some_slots(num_tokens, top_k, 500, generator))


def test_longer_latents_than_triton_takes() -> None:
    with pytest.raises(AttentionBackendError, match="up to 1024 numbers, not 1025"):
        backend_for(TRITON, KvFormat(BFLOAT16, 1025, 64), 40, 77)


def test_strided_queries(generator: torch.Generator) -> None:
    kv_format = KvFormat(BFLOAT16, 96, 16)
    q = torch.randn((4, 3, 112), generator=generator).bfloat16().transpose(0, 1).to(DEVICE)
    pool = filled_pool(kv_format, 100, generator).to(DEVICE)
    slots = some_slots(3, 20, 100, generator).to(DEVICE)
    for name in (TRITON, TORCH):
        backend = backend_for(name, kv_format, 4, 20)
        expected = backend.attend(q.contiguous(), pool, slots, SCALE)
        assert torch.equal(backend.attend(q, pool, slots, SCALE), expected)


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
@pytest.mark.parametrize(("rank", "rope", "num_heads", "top_k"), [(512, 64, 128, 2048), (96, 16, 4, 64)])
def test_auto_finds_one_for_everything(
    format_name: str, rank: int, rope: int, num_heads: int, top_k: int, generator: torch.Generator
) -> None:
    kv_format = KvFormat(format_name, rank, rope)
    backend = backend_for("auto", kv_format, num_heads, top_k)
    assert backend.name != TORCH, backend.reason
    q = torch.randn((2, num_heads, rank + rope), generator=generator).bfloat16()
    pool = filled_pool(kv_format, 300, generator)
    check(backend, kv_format, q, pool, some_slots(2, top_k, 300, generator))


@pytest.mark.parametrize(("format_name", "name"), BACKENDS[2:])
def test_a_chunk_of_prefill(format_name: str, name: str, generator: torch.Generator) -> None:
    kv_format = KvFormat(format_name, *DEEPSEEK)
    num_tokens, num_heads, top_k = 8192, 64, 128
    backend = backend_for(name, kv_format, num_heads, top_k)
    q = torch.randn((num_tokens, num_heads, 576), generator=generator).bfloat16().to(DEVICE)
    pool = filled_pool(kv_format, 8192, generator).to(DEVICE)
    slots = some_slots(num_tokens, top_k, 8192, generator).to(DEVICE)
    out = backend.attend(q, pool, slots, SCALE)
    tokens = torch.tensor([*range(12), 510, 511, 512, 513, 4095, 4096, 8190, 8191])
    reference = TorchAttention(kv_format)
    expected = reference.attend(q[tokens].float(), pool, slots[tokens], SCALE)
    torch.testing.assert_close(out[tokens].float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("format_name", "name"), BACKENDS)
def test_a_graph_follows_its_inputs(format_name: str, name: str, generator: torch.Generator) -> None:
    kv_format = KvFormat(format_name, *DEEPSEEK)
    num_heads, top_k, num_tokens = 64, 256, 4
    backend = backend_for(name, kv_format, num_heads, top_k)
    q = torch.zeros((num_tokens, num_heads, 576), dtype=torch.bfloat16, device=DEVICE)
    pool = torch.zeros((1000, kv_format.item_bytes), dtype=torch.uint8, device=DEVICE)
    slots = torch.full((num_tokens, top_k), -1, dtype=torch.int32, device=DEVICE)
    new_slots = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    new_items = torch.zeros((num_tokens, 576), dtype=torch.bfloat16, device=DEVICE)

    def step() -> Tensor:
        kv_format.store(pool, new_slots, new_items)
        return backend.attend(q, pool, slots, SCALE)

    step()
    with no_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        pool.copy_(filled_pool(kv_format, 1000, generator))
        q.copy_(torch.randn(q.shape, generator=generator))
        slots.copy_(some_slots(num_tokens, top_k, 1000, generator))
        new_slots.copy_(torch.randperm(500, generator=generator)[:num_tokens] * 2 + 1)
        new_items.copy_(torch.randn(new_items.shape, generator=generator))
        graph.replay()
        expected = TorchAttention(kv_format).attend(q.float().cpu(), pool.cpu(), slots.cpu(), SCALE)
        torch.testing.assert_close(captured.float().cpu(), expected, rtol=2e-2, atol=2e-2)
        assert torch.equal(step(), captured)


@pytest.mark.parametrize(("format_name", "name"), BACKENDS)
def test_a_shape_first_seen_in_a_capture(format_name: str, name: str, generator: torch.Generator) -> None:
    """Values computed in the capture do not exist before the replay, so other calls must not use them."""
    kv_format = KvFormat(format_name, *DEEPSEEK)
    backend = backend_for(name, kv_format, 64, 256)
    pool = filled_pool(kv_format, 1000, generator).to(DEVICE)
    q = torch.randn((3, 64, 576), generator=generator).bfloat16().to(DEVICE)
    slots = some_slots(3, 256, 1000, generator).to(DEVICE)
    backend.attend(q[:2], pool, slots[:2], SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.attend(q, pool, slots, SCALE)
    before = backend.attend(q, pool, slots, SCALE)
    graph.replay()
    expected = TorchAttention(kv_format).attend(q.float().cpu(), pool.cpu(), slots.cpu(), SCALE)
    for out in (before, captured):
        torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("format_name", "name"), BACKENDS)
def test_offsets_beyond_two_gigabytes(format_name: str, name: str, generator: torch.Generator) -> None:
    kv_format = KvFormat(format_name, *DEEPSEEK)
    num_slots = (5 << 30) // kv_format.item_bytes // 64 * 64
    backend = backend_for(name, kv_format, 64, 128)
    pool = torch.full((num_slots, kv_format.item_bytes), POISON, dtype=torch.uint8, device=DEVICE)
    places = torch.randint(0, num_slots, (256,), generator=generator).unique()
    places[-1] = num_slots - 1
    kv_format.store(pool, places.to(DEVICE), torch.randn((len(places), 576), generator=generator).to(DEVICE))
    rows = pool[places.to(DEVICE)].cpu()
    q = torch.randn((2, 64, 576), generator=generator).bfloat16()
    chosen = torch.randint(0, len(places), (2, 128), generator=generator).int()
    chosen[0, 5] = len(places) - 1
    expected = TorchAttention(kv_format).attend(q.float(), rows, chosen, SCALE)
    slots = places[chosen.long()].int().to(DEVICE)
    out = backend.attend(q.to(DEVICE), pool, slots, SCALE)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [FLASHMLA_KV, TRITON])
@pytest.mark.parametrize("num_slots", [101, 96, 64])
def test_fp8_pools_that_are_no_whole_pages(name: str, num_slots: int, generator: torch.Generator) -> None:
    kv_format = KvFormat(FP8_E4M3, *DEEPSEEK)
    backend = backend_for(name, kv_format, 64, 128)
    q = torch.randn((3, 64, 576), generator=generator).bfloat16()
    pool = filled_pool(kv_format, num_slots, generator)
    check(backend, kv_format, q, pool, some_slots(3, 128, num_slots, generator))


@pytest.mark.I5
@pytest.mark.parametrize(("format_name", "name"), BACKENDS)
def test_no_bit_depends_on_whether_lengths_are_given(
    format_name: str, name: str, generator: torch.Generator
) -> None:
    kv_format = KvFormat(format_name, *DEEPSEEK)
    backend = backend_for(name, kv_format, 64, 512)
    lengths = torch.tensor([512, 0, 1, 63, 64, 65, 127, 128, 129, 300, 511, 449])
    q = torch.randn((len(lengths), 64, 576), generator=generator).bfloat16().to(DEVICE)
    pool = filled_pool(kv_format, 640, generator).to(DEVICE)
    slots = 2 * torch.randint(0, 320, (len(lengths), 512), generator=generator).int() + 1
    slots[torch.arange(512) >= lengths[:, None]] = -1
    slots = slots.to(DEVICE)
    num_columns = lengths.int().to(DEVICE)
    whole, shortened = (backend.attend(q, pool, slots, SCALE, given) for given in (None, num_columns))
    assert torch.equal(whole, shortened)
    assert bool((whole[1] == 0).all())


@pytest.mark.parametrize(("format_name", "name"), BACKENDS)
def test_no_tokens(format_name: str, name: str) -> None:
    kv_format = KvFormat(format_name, *DEEPSEEK)
    backend = backend_for(name, kv_format, 64, 128)
    q = torch.zeros((0, 64, 576), dtype=torch.bfloat16, device=DEVICE)
    pool = torch.zeros((64, kv_format.item_bytes), dtype=torch.uint8, device=DEVICE)
    slots = torch.zeros((0, 128), dtype=torch.int32, device=DEVICE)
    assert backend.attend(q, pool, slots, SCALE).shape == (0, 64, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format_name", FORMAT_NAMES)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (96, 16), (300, 6), (36, 2), (4, 0)])
def test_a_gpu_stores_the_same_bytes(
    format_name: str, rank: int, rope: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    kv_format = KvFormat(format_name, rank, rope)
    magnitudes = torch.tensor([1.0, 1e4, 1e-6, 1e30, 0.0, 1e-36])[:, None]
    items = (torch.randn((6, rank + rope), generator=generator) * magnitudes).to(dtype)
    slots = torch.tensor([7, 0, 3, 2, 9, 5])
    pool = torch.full((10, kv_format.item_bytes), POISON, dtype=torch.uint8)
    pool_dev = pool.to(DEVICE)
    kv_format.store(pool, slots, items)
    kv_format.store(pool_dev, slots.to(DEVICE), items.to(DEVICE))
    assert torch.equal(pool_dev.cpu(), pool)
    assert torch.equal(kv_format.load(pool_dev[slots.to(DEVICE)]).cpu(), kv_format.load(pool[slots]))


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
@pytest.mark.parametrize("dim", [128, 16, 4])
def test_a_gpu_stores_the_same_index_keys(format_name: str, dim: int, generator: torch.Generator) -> None:
    key_format = IndexKeyFormat(format_name, dim)
    keys = torch.randn((200, dim), generator=generator).bfloat16()
    slots = torch.randperm(300, generator=generator)[:200]
    pool = torch.full((2, 300, key_format.item_bytes), POISON, dtype=torch.uint8)
    pool_dev = pool.to(DEVICE)
    key_format.store(pool[1], slots, keys)
    key_format.store(pool_dev[1], slots.to(DEVICE), keys.to(DEVICE))
    assert torch.equal(pool_dev.cpu(), pool)
