"""A row of a product has the same bits alone and among any others, at any place: the result of a token in a
decode step, a verification or a prefill's forward of any length depends on that token alone.

Sizes are those of DeepSeek-V3.2, GLM-5 and A.X-K2-Light.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.block_fp8 import quantize
from hisparse_pd.kernels.block_linear import block_linear, dense_product, gated
from hisparse_pd.kernels.expert_choice import narrow_product
from hisparse_pd.kernels.fp8_rows import Activations, Rounding
from hisparse_pd.kernels.latent_vectors import IndexVectors, LatentNorms, Rotation
from hisparse_pd.kernels.latents import finish_latents, index_queries, latent_queries, lift_values
from hisparse_pd.kernels.norms import NormGate, add_norm, add_parts
from hisparse_pd.kernels.row_math import cumulate
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = [*needs_gpu, pytest.mark.I5]

COUNTS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 100, 128, 192, 256, 257, 500, 512, 1000, 1024, 2000, 4096)
MOST = 8192
ROPE = 64


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()


def matrix_of(rows: int, columns: int) -> Tensor:
    return draw(rows, columns, seed=1).div_(columns**0.5)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def check(product: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that the ``product`` of any rows of ``x`` equals those rows of the product of all."""
    whole = product(x)
    assert whole.isfinite().all()
    different = [
        (count, first)
        for count in COUNTS
        if count <= len(x)
        for first in {0, min(5, len(x) - count), len(x) - count}
        if not torch.equal(bits(product(x[first : first + count])), bits(whole[first : first + count]))
    ]
    assert not different, different


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(2240, 7168), (32768, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (7168, 18432), (2752, 6144),
     (20480, 2048), (6144, 16384), (36864, 7168), (576, 7168), (128, 7168)],
)  # fmt: skip
def test_of_a_matrix_in_fp8(rows: int, columns: int) -> None:
    values, scales = quantize(matrix_of(rows, columns))
    check(lambda x: block_linear(x, values, scales), draw(MOST, columns))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(672, 2048), (5120, 768), (2048, 4096), (2048, 512), (16384, 2048), (1024, 2048), (7168, 14336),
     (2240, 7168)],
)  # fmt: skip
def test_of_a_matrix_in_bfloat16(rows: int, columns: int) -> None:
    matrix = matrix_of(rows, columns)
    check(lambda x: add_parts(dense_product(x, matrix)).bfloat16(), draw(MOST, columns))


@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(129280, 7168), (154880, 6144), (163840, 2048)])
def test_of_an_lm_head(vocab_size: int, hidden_size: int) -> None:
    """The logprobs are compared too."""
    matrix = matrix_of(vocab_size, hidden_size)

    def logprobs(x: Tensor) -> Tensor:
        return torch.log_softmax(dense_product(x, matrix)[0].float(), dim=-1)

    check(logprobs, draw(1024, hidden_size))


def test_of_probabilities() -> None:
    """Probabilities are accumulated as in drawing a token."""
    check(lambda x: cumulate(torch.softmax(x.double(), dim=1)), draw(256, 129280))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "columns"), [(256, 7168), (64, 7168), (256, 6144), (128, 2048)])
def test_of_a_narrow_matrix(outputs: int, columns: int, dtype: torch.dtype) -> None:
    matrix = matrix_of(outputs, columns).to(dtype)
    check(lambda x: add_parts(narrow_product(x, matrix)), draw(MOST, columns))


@pytest.mark.parametrize(("heads", "nope", "value_dim"), [(128, 128, 128), (64, 192, 256), (32, 128, 128)])
def test_of_the_heads(heads: int, nope: int, value_dim: int) -> None:
    key_up, value_up = (
        matrix_of(heads * nope, 512).view(heads, nope, 512),
        draw(heads, 512, value_dim, seed=1),
    )

    def queries(x: Tensor) -> Tensor:
        by_head, angles = x[:, : -ROPE // 2].view(len(x), 1, heads, -1), x[:, -ROPE // 2 :].float()
        return latent_queries(by_head.transpose(0, 1), key_up, (angles.cos(), angles.sin())).flatten(1)

    check(queries, draw(2048, heads * (nope + ROPE) + ROPE // 2))
    size = heads * 512

    def values(x: Tensor) -> Tensor:
        gate = x[:, size:].view(1, len(x), heads, value_dim)
        attended = x[:, :size].view(len(x), heads, 512)
        dense = lift_values(attended, value_up, gate, None).dense
        return bits_of(Activations(dense, lift_values(attended, value_up, gate, Rounding()).rounded), len(x))

    check(values, draw(2048, size + heads * value_dim))


@pytest.mark.parametrize(
    ("hidden_size", "inner_size", "num_experts", "top_k", "dtype"),
    [(7168, 2048, 16, 2, FP8), (6144, 2048, 16, 8, FP8), (2048, 384, 64, 8, torch.bfloat16)],
)
def test_of_experts(
    hidden_size: int, inner_size: int, num_experts: int, top_k: int, dtype: torch.dtype
) -> None:
    experts = RoutedExperts(num_experts, hidden_size, inner_size, dtype, torch.device(DEVICE, 0))
    for matrices in (experts.gate_up, experts.down):
        for expert, values in enumerate(matrices.values):
            for number, target in enumerate(values):
                dense = draw(*target.shape, seed=expert) / target.shape[1] ** 0.5
                if matrices.scales is None:
                    target.copy_(dense)
                else:
                    quantized, matrices.scales[expert, number] = quantize(dense)
                    target.copy_(quantized)

    def result(x: Tensor) -> Tensor:
        chosen = x[:, :num_experts].float().topk(top_k, dim=1)
        return experts.forward(x, chosen.indices, chosen.values.softmax(dim=1))

    check(result, draw(MOST, hidden_size))


def test_of_norms_and_roundings() -> None:
    size = 2048
    weight, gate = draw(size), NormGate.of(matrix_of(16, size), matrix_of(size, 16))

    def normed(x: Tensor) -> Tensor:
        added = x[:, size:].view(len(x), 3, size).transpose(0, 1)
        made = [add_norm(x[:, :size], [added], weight, 1e-6, Rounding(), of) for of in (None, gate)]
        return torch.cat([bits_of(activations, len(x)) for _, activations in made], dim=1)

    check(normed, draw(MOST, 4 * size))

    def inner(x: Tensor) -> Tensor:
        return bits_of(gated(x[None], torch.bfloat16, Rounding()), len(x))

    check(inner, draw(MOST, 2 * size))
    check(lambda x: torch.nn.functional.layer_norm(x, (size,), weight, weight, 1e-6), draw(MOST, size))
    check(lambda x: x.view(len(x), 8, size).sum(dim=1), draw(MOST, 8 * size))  # the sum of ranks' experts


def bits_of(x: Activations, num_tokens: int) -> Tensor:
    assert x.rounded is not None
    rounded, scales = x.rounded.values[:num_tokens].float(), x.rounded.scales.t()[:num_tokens]
    return torch.cat([x.dense.float(), rounded, scales], dim=1)


def test_of_what_is_between_projections_and_attention() -> None:
    norms = LatentNorms(draw(1536), 1e-6, draw(512), 1e-6, torch.bfloat16)
    hadamard = matrix_of(128, 128)
    vectors = IndexVectors(draw(128).float(), draw(128).float(), 1e-6, False, hadamard)
    sizes = [1536, 512 + ROPE, 128, 64 * 128, ROPE // 2]

    def made(x: Tensor) -> Tensor:
        q_a, kv_a, keys, queries, angles = (part.contiguous() for part in torch.split(x, sizes, dim=1))
        rotation: Rotation = (angles.float().cos(), angles.float().sin())
        latents = finish_latents(
            q_a[None], kv_a[None], norms, rotation, Rounding(), index_keys=keys[None], vectors=vectors,
        )  # fmt: skip
        assert latents.q is not None
        assert latents.item is not None
        assert latents.index_keys is not None
        turned = index_queries(queries[None], vectors, rotation, torch.bfloat16).flatten(1)
        return torch.cat([bits_of(latents.q, len(x)), latents.item, latents.index_keys, turned], dim=1)

    check(made, draw(MOST, sum(sizes)))
