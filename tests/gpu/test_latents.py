"""The steps between projections and attention: against the reference on the CPU, row by row."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.fp8_rows import Rounding, dequantize_rows, quantize_rows
from hisparse_pd.kernels.hadamard import hadamard_matrix
from hisparse_pd.kernels.latent_vectors import IndexVectors, LatentNorms, Rotation
from hisparse_pd.kernels.latents import finish_latents, index_queries, latent_queries, lift_values
from hisparse_pd.kernels.norms import add_parts
from tests.gpu.support import DEVICE, needs_gpu, no_waiting

pytestmark = needs_gpu

SIZES = [
    (1536, 512, 64, 128, 64, 128, 128),
    (200, 48, 16, 32, 5, 24, 72),
    (2048, 512, 64, 128, 32, 192, 256),
    (384, 128, 32, 128, 16, 64, 64),
]
"""Sizes of the query latent, KV latent, rotary part, index key, index heads, a head without its rotary part,
and a value."""
ROWS = [1, 3, 16, 17, 63, 200]
DTYPES = [torch.bfloat16, torch.float32]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rotation_of(num_tokens: int, rope_dim: int) -> Rotation:
    angles = 3 * draw(num_tokens, rope_dim // 2)
    return angles.cos(), angles.sin()


T = TypeVar("T")


def vectors_of(key_dim: int, dtype: torch.dtype, *, is_interleaved: bool, spreads: bool) -> IndexVectors:
    hadamard = hadamard_matrix(key_dim, dtype) if spreads else None
    return IndexVectors(draw(key_dim), draw(key_dim + 1)[1:], 1e-6, is_interleaved, hadamard)


def on_gpu(vectors: IndexVectors) -> IndexVectors:
    hadamard = None if vectors.hadamard is None else vectors.hadamard.to(DEVICE)
    weight, bias = vectors.key_weight.to(DEVICE), vectors.key_bias.to(DEVICE)
    return IndexVectors(weight, bias, vectors.key_eps, vectors.is_interleaved, hadamard)


def to_gpu(rotation: Rotation, rows: slice = slice(None)) -> Rotation:
    cos, sin = rotation
    return cos[rows].to(DEVICE), sin[rows].to(DEVICE)


def present(value: T | None) -> T:
    assert value is not None
    return value


def is_close(found: Tensor, expected: Tensor) -> None:
    """Compare up to the rounding of sums in another order."""
    steps = 2**-7 if expected.dtype == torch.bfloat16 else 2**-18
    largest = float(expected.abs().max())
    torch.testing.assert_close(found.cpu(), expected, rtol=steps, atol=largest * steps / 4)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", ROWS)
def test_latents_are_as_on_the_cpu(
    num_tokens: int, sizes: tuple[int, ...], dtype: torch.dtype, parts: int
) -> None:
    q_rank, latent, rope, key_dim, index_heads, *_ = sizes
    norms = [draw(size).to(dtype) for size in (q_rank, latent)]
    rotation = rotation_of(num_tokens, rope)
    columns = [q_rank, key_dim, latent + rope]
    of_hidden = draw(parts, num_tokens, sum(columns)).to(dtype if parts == 1 else torch.float32)
    heads = draw(parts, num_tokens, index_heads)
    vectors = vectors_of(key_dim, dtype, is_interleaved=parts == 1, spreads=dtype == torch.bfloat16)
    q_a, keys, kv_a = of_hidden.split(columns, dim=-1)
    expected = finish_latents(
        q_a, kv_a, LatentNorms(norms[0], 1e-6, norms[1], 1e-5, norms[0].dtype), rotation, None,
        index_keys=keys, vectors=vectors, head_weights=heads,
    )  # fmt: skip
    weights = [norm.to(DEVICE) for norm in norms]
    q_a, keys, kv_a = of_hidden.to(DEVICE).split(columns, dim=-1)
    there = LatentNorms(weights[0], 1e-6, weights[1], 1e-5, weights[0].dtype), to_gpu(rotation)
    index = {"index_keys": keys, "vectors": on_gpu(vectors), "head_weights": heads.to(DEVICE)}
    with no_waiting():
        found = finish_latents(q_a, kv_a, *there, Rounding(), **index)
        without_indexer = finish_latents(q_a, kv_a, *there, Rounding())
        without_query = finish_latents(None, kv_a, *there, Rounding(), **index)
        keys_alone = finish_latents(None, None, *there, None, **index)
        with_raw = finish_latents(q_a, kv_a, *there, Rounding(), keeps_raw=True)
    query, rounded = present(found.q), present(present(found.q).rounded)
    raw, item = present(with_raw.q), present(found.item)
    is_close(query.dense, present(expected.q).dense)
    is_close(item, present(expected.item))
    for name in ("index_keys", "head_weights"):
        is_close(getattr(found, name), getattr(expected, name))
    values, scales = quantize_rows(query.dense.cpu())
    assert torch.equal(rounded.values[:num_tokens].cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(rounded.scales[:, :num_tokens].cpu(), scales)
    assert torch.equal(present(without_indexer.item), item)
    assert torch.equal(present(without_indexer.q).dense, query.dense)
    assert torch.equal(raw.dense[:, :q_rank], query.dense)
    assert torch.equal(raw.dense[:, q_rank:], add_parts(q_a).to(dtype))
    assert torch.equal(present(raw.rounded).scales, rounded.scales)
    assert (without_query.q, keys_alone.q, keys_alone.item) == (None, None, None)
    assert torch.equal(present(without_query.item), item)
    for some in (without_query, keys_alone):
        assert torch.equal(present(some.index_keys), present(found.index_keys))
        assert torch.equal(present(some.head_weights), present(found.head_weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", ROWS)
def test_heads_are_as_on_the_cpu(num_tokens: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    _, latent, rope, key_dim, index_heads, nope, value_dim = sizes
    num_heads, rotation = 6, rotation_of(num_tokens, rope)
    q = draw(2, num_tokens, num_heads, nope + rope + value_dim).to(dtype)
    q, gate = q[:1, ..., : nope + rope], q[..., nope + rope :].float()
    key_up = draw(num_heads, nope, latent).to(dtype) / nope**0.5
    value_up = draw(num_heads, latent, value_dim).to(dtype) / latent**0.5
    attended = draw(num_tokens, num_heads, latent).to(dtype)
    queries = draw(1, num_tokens, index_heads * key_dim).to(dtype)
    vectors = vectors_of(key_dim, dtype, is_interleaved=False, spreads=True)
    found = latent_queries(q.to(DEVICE), key_up.to(DEVICE), to_gpu(rotation))
    is_close(found, latent_queries(q, key_up, rotation))
    found = index_queries(queries.to(DEVICE), on_gpu(vectors), to_gpu(rotation), dtype)
    is_close(found, index_queries(queries, vectors, rotation, dtype))
    there = attended.to(DEVICE), value_up.to(DEVICE)
    is_close(lift_values(*there, None, None).dense, lift_values(attended, value_up, None, None).dense)
    expected = lift_values(attended, value_up, gate, None).dense
    is_close(lift_values(*there, gate.to(DEVICE), None).dense, expected)
    if dtype == torch.bfloat16:
        for rounding in (Rounding(), Rounding(ue8m0=True)):
            rounded = lift_values(*there, gate.to(DEVICE), rounding).rounded
            assert rounded is not None
            back = dequantize_rows(rounded.values, rounded.scales)[:num_tokens].cpu()
            assert (back - expected.float()).norm() <= 0.04 * expected.float().norm()
