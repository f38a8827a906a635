"""Attention backends: the choice and its reason, the reference for all formats, and Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse_pd.kernels import flashmla
from hisparse_pd.kernels.attention import (
    BACKEND_NAMES,
    FLASHMLA_KV,
    FLASHMLA_SPARSE,
    TORCH,
    TRITON,
    AttentionBackendError,
    TorchAttention,
)
from hisparse_pd.kernels.attention_backends import choose_backend
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.kv_format import BFLOAT16, FLOAT32, FORMAT_NAMES, FP8_E4M3, KvFormat
from tests.unit.kernels.triton_here import interpreted, interprets_loops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the choice of a backend see a GPU machine with FlashMLA."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flashmla, "flash_mla", lambda: object())


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_cpu_gets_the_reference(name: str) -> None:
    kv_format = KvFormat(name, 512, 64)
    backend = choose_backend("auto", device=CPU, kv_format=kv_format, num_heads=128, top_k=2048)
    assert (backend.name, backend.reason) == (TORCH, "auto on cpu")


@pytest.mark.parametrize("name", [TRITON, FLASHMLA_SPARSE, FLASHMLA_KV])
def test_a_cpu_refuses_gpu_backends_and_names_what_works(name: str) -> None:
    kv_format = KvFormat(BFLOAT16, 512, 64)
    with pytest.raises(AttentionBackendError, match=rf"{name}: .*; these would work here: torch$"):
        choose_backend(name, device=CPU, kv_format=kv_format, num_heads=128, top_k=2048)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttentionBackendError, match=r"expected auto or one of .*triton, torch, got 'fa3'"):
        choose_backend("fa3", device=CPU, kv_format=KvFormat(FLOAT32, 8, 4), num_heads=1, top_k=1)


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(
    ("name", "num_heads", "top_k", "chosen"),
    [
        (BFLOAT16, 128, 2048, FLASHMLA_SPARSE),
        (BFLOAT16, 64, 128, FLASHMLA_SPARSE),
        (FP8_E4M3, 128, 2048, FLASHMLA_KV),
        (FP8_E4M3, 64, 64, FLASHMLA_KV),
    ],
)
def test_flashmla_where_it_fits(name: str, num_heads: int, top_k: int, chosen: str) -> None:
    backend = choose_backend(
        "auto", device=CUDA, kv_format=KvFormat(name, 512, 64), num_heads=num_heads, top_k=top_k
    )
    assert backend.name == chosen


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(
    ("name", "kv_format", "num_heads", "top_k", "reason"),
    [
        (FLASHMLA_SPARSE, KvFormat(FP8_E4M3, 512, 64), 128, 2048, "reads bfloat16 items, not fp8_e4m3"),
        (FLASHMLA_KV, KvFormat(BFLOAT16, 512, 64), 128, 2048, "reads fp8_e4m3 items, not bfloat16"),
        (FLASHMLA_KV, KvFormat(FP8_E4M3, 96, 16), 128, 2048, r"512 \+ 64 numbers, not 96 \+ 16"),
        (FLASHMLA_SPARSE, KvFormat(BFLOAT16, 512, 64), 16, 2048, "64 or 128 heads, not 16"),
        (FLASHMLA_SPARSE, KvFormat(BFLOAT16, 512, 64), 128, 64, "multiple of 128, not 64"),
        (FLASHMLA_KV, KvFormat(FP8_E4M3, 512, 64), 128, 32, "multiple of 64, not 32"),
    ],
)
def test_flashmla_is_refused_where_it_does_not_fit(
    name: str, kv_format: KvFormat, num_heads: int, top_k: int, reason: str
) -> None:
    with pytest.raises(AttentionBackendError, match=rf"{name}: .*{reason}; these would work here: .*torch"):
        choose_backend(name, device=CUDA, kv_format=kv_format, num_heads=num_heads, top_k=top_k)
    backend = choose_backend("auto", device=CUDA, kv_format=kv_format, num_heads=num_heads, top_k=top_k)
    assert backend.name != name


def test_gpus_without_flashmla_or_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flashmla, "flash_mla", lambda: "no such wheel")
    monkeypatch.setitem(sys.modules, "hisparse_pd.kernels.triton_attention", None)
    monkeypatch.delattr("hisparse_pd.kernels.triton_attention", raising=False)
    kv_format = KvFormat(BFLOAT16, 512, 64)
    backend = choose_backend("auto", device=CUDA, kv_format=kv_format, num_heads=128, top_k=2048)
    assert backend.name == TORCH
    assert "no such wheel" in backend.reason
    assert "not triton: triton cannot be imported" in backend.reason


@pytest.mark.usefixtures("an_h200")
def test_every_name_can_be_asked_for() -> None:
    for name in BACKEND_NAMES:
        if name == TRITON and importlib.util.find_spec("triton") is None:
            continue
        kv_format = KvFormat(FP8_E4M3 if name == FLASHMLA_KV else BFLOAT16, 512, 64)
        backend = choose_backend(name, device=CUDA, kv_format=kv_format, num_heads=128, top_k=2048)
        assert (backend.name, backend.reason) == (name, "configured")


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_reference_attends_to_loaded_items(name: str, generator: torch.Generator) -> None:
    kv_format = KvFormat(name, 36, 4)
    pool = torch.full((20, kv_format.item_bytes), 0xFF, dtype=torch.uint8)
    kv_format.store(pool, torch.arange(1, 20), torch.randn((19, 40), generator=generator))
    q = torch.randn((6, 3, 40), generator=generator)
    slots = torch.randint(1, 20, (6, 11), dtype=torch.int32, generator=generator)
    slots[torch.rand((6, 11), generator=generator) < 0.4] = -1
    slots[3] = -1
    out = TorchAttention(kv_format).attend(q, pool, slots, 0.3)
    loaded = kv_format.load(pool).float()
    loaded[0] = 0.0
    plain = KvFormat(FLOAT32, 36, 4)
    expected = TorchAttention(plain).attend(q, loaded.view(torch.uint8), slots, 0.3)
    assert torch.equal(out, expected)
    assert not out[3].any()
    assert not out.isnan().any()


@pytest.mark.I6
def test_attention_matches_float64_and_ignores_poison(generator: torch.Generator) -> None:
    num_tokens, num_heads, rank, rope_dim, top_k = 700, 3, 8, 4, 40
    q = torch.randn((num_tokens, num_heads, rank + rope_dim), generator=generator)
    kv = torch.randn((90, rank + rope_dim), generator=generator)
    slots = torch.randint(1, 90, (num_tokens, top_k), dtype=torch.int32, generator=generator)
    slots[torch.rand((num_tokens, top_k), generator=generator) < 0.3] = -1
    slots[4] = -1
    kv[0] = float("nan")
    out = TorchAttention(KvFormat(FLOAT32, rank, rope_dim)).attend(q, kv.view(torch.uint8), slots, 0.3)
    for token in (0, 4, 350, 699):
        rows = kv[slots[token][slots[token] >= 0].long()].double()
        weights = torch.softmax(q[token].double() @ rows.T * 0.3, dim=-1)
        torch.testing.assert_close(out[token].double(), weights @ rows[:, :rank], rtol=1e-5, atol=1e-6)
    assert not out[4].any()


def test_attention_of_strided_queries_in_bfloat16(generator: torch.Generator) -> None:
    q = torch.randn((2, 5, 12), generator=generator).transpose(0, 1).bfloat16()
    kv = torch.randn((9, 12), generator=generator).bfloat16()
    slots = torch.tensor([[0, 8, 3]] * 5)
    out = TorchAttention(KvFormat(BFLOAT16, 8, 4)).attend(q, kv.view(torch.uint8), slots, 1.0)
    in_float32 = TorchAttention(KvFormat(FLOAT32, 8, 4))
    expected = in_float32.attend(q.float().contiguous(), kv.float().view(torch.uint8), slots, 1.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


def test_attention_of_nothing() -> None:
    backend = TorchAttention(KvFormat(FLOAT32, 4, 2))
    pool = torch.zeros((3, 24), dtype=torch.uint8)
    none = torch.zeros((0, 4), dtype=torch.int32)
    assert backend.attend(torch.zeros(0, 2, 6), pool, none, 1.0).shape == (0, 2, 4)
    assert not backend.attend(torch.ones(2, 2, 6), pool, none.view(2, 0), 1.0).any()


def test_wrong_arguments_are_named() -> None:
    backend = TorchAttention(KvFormat(BFLOAT16, 8, 4))
    q, pool = torch.zeros((2, 3, 12)), torch.zeros((5, 24), dtype=torch.uint8)
    slots = torch.zeros((2, 4), dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"q: expected shape \[\*, \*, 12\], got \[2, 3, 11\]"):
        backend.attend(q[..., :11], pool, slots, 1.0)
    with pytest.raises(KernelArgumentError, match=r"layer_pool: expected shape \[\*, 24\], got \[5, 20\]"):
        backend.attend(q, pool[:, :20].contiguous(), slots, 1.0)
    with pytest.raises(KernelArgumentError, match=r"device_slots: expected shape \[2, \*\], got \[1, 4\]"):
        backend.attend(q, pool, slots[:1], 1.0)


NUM_POOL_SLOTS = 90
TRITON_CASES = [
    (FLOAT32, 96, 16, 3, 40),
    (FLOAT32, 33, 0, 17, 1),
    (BFLOAT16, 96, 16, 2, 40),
    (FP8_E4M3, 300, 16, 2, 40),
    (FP8_E4M3, 36, 6, 5, 40),
]
"""Format, kv_lora_rank, rope_dim, num_heads, top_k. Queries are float32, because the interpreter multiplies
the bits of bfloat16 matrices as integers."""


def compare(split_slots: int) -> None:
    from hisparse_pd.kernels import triton_attention

    generator = torch.Generator().manual_seed(split_slots)
    for name, rank, rope, num_heads, top_k in TRITON_CASES:
        kv_format = KvFormat(name, rank, rope)
        # The bytes of slot 0, which is never selected, are NaN in every format.
        pool = torch.full((NUM_POOL_SLOTS, kv_format.item_bytes), 0xFF, dtype=torch.uint8)
        items = torch.randn((NUM_POOL_SLOTS - 1, kv_format.item_dim), generator=generator)
        kv_format.store(pool, torch.arange(1, NUM_POOL_SLOTS), items)
        q = torch.randn((3, num_heads, kv_format.item_dim), generator=generator)
        slots = torch.randint(1, NUM_POOL_SLOTS, (3, top_k), dtype=torch.int32, generator=generator)
        slots[torch.rand(slots.shape, generator=generator) < 0.3] = -1
        slots[1] = -1
        slots[2, max(1, top_k // 3) :] = -1
        expected = TorchAttention(kv_format).attend(q, pool, slots, 0.2)
        actual = triton_attention.TritonAttention(kv_format, split_slots=split_slots).attend(
            q, pool, slots, 0.2
        )
        assert not actual[1].any(), f"{name}: nothing is selected, but the result is not zero"
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def interpret_cases() -> None:
    compare(0)
    compare(16)


@interprets_loops
def test_triton_kernels_agree_with_the_reference() -> None:
    interpreted(interpret_cases)


@given(st.integers(1, 140), st.integers(1, 40), st.integers(1, 132), st.integers(1, 132))
def test_a_schedule_has_every_query_whole(
    num_queries: int, num_blocks: int, num_parts: int, rows: int
) -> None:
    table = flashmla.spread(num_queries, num_blocks, num_parts, rows)
    assert flashmla.num_scheduled_blocks(table, num_queries, num_blocks) == num_queries * num_blocks
    queries: list[int] = []
    lengths: list[int] = []
    for first, last, begin, end, *cuts in table.tolist():
        if first == num_queries:  # a part without work
            continue
        queries += range(first, last + 1)
        lengths.append(last - first + 1)
        assert (begin, end, *cuts) == (0, num_blocks, 0, 0, 0, 0)
    assert queries == list(range(num_queries))
    assert len(lengths) <= min(num_parts, rows)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("top_k", "split_slots", "multiple", "num_splits"),
    [
        (2048, 0, 64, 1),
        (2048, 512, 64, 4),
        (2048, 512, 128, 4),
        (256, 512, 64, 1),
        (1024, 512, 128, 2),
        (64 * 9, 128, 64, 1),
        (64 * 9, 192, 64, 3),
    ],
)
def test_splits_are_of_one_length_and_of_whole_rounds(
    top_k: int, split_slots: int, multiple: int, num_splits: int
) -> None:
    assert flashmla.num_splits_of(top_k, split_slots, multiple) == num_splits
