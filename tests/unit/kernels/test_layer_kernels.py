"""A layer's Triton kernels on a machine without a GPU: every launch of their wrappers compiles for an H200,
and interpreted kernels compute what torch does.

The interpreter multiplies bfloat16 matrices wrongly, so kernels with matrix products are given float32.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import quantize
from hisparse_pd.kernels.block_linear import block_product, dense_product
from hisparse_pd.kernels.expert_choice import ExpertChoice, narrow_product
from hisparse_pd.kernels.expert_routing import FEW_TILE_ROWS, ExpertMatrices, Routing, most_tiles
from hisparse_pd.kernels.fp8_rows import (
    Activations,
    Rounded,
    Rounding,
    gated_rows,
    quantize_gated,
    quantize_rows,
)
from hisparse_pd.kernels.hadamard import hadamard_matrix
from hisparse_pd.kernels.kv_format import IndexKeyFormat, KvFormat
from hisparse_pd.kernels.latent_vectors import IndexVectors, LatentNorms, Rotation
from hisparse_pd.kernels.latents import finish_latents, index_queries, latent_queries, lift_values
from hisparse_pd.kernels.norms import NormGate, add_norm, add_parts
from tests.unit.kernels.triton_here import (
    compiles_launches,
    interpreted,
    interprets_loops,
    needs_triton,
    output_of,
)

ROUNDINGS = (None, Rounding(), Rounding(ue8m0=True))
EPS = 1e-6


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def is_close(found: Tensor | None, expected: Tensor | None) -> None:
    """Compare up to the rounding of sums in another order."""
    assert found is not None
    assert expected is not None
    steps = 2**-6 if expected.dtype == torch.bfloat16 else 2**-16
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=steps, atol=largest * steps / 4)


def nearly_all_equal(found: Tensor, expected: Tensor) -> None:
    """Compare bytes of fp8. The interpreter rounds some halves the wrong way, and drops carries."""
    assert (found == expected).float().mean() > 0.85


def is_rounded(found: Activations, dense: Tensor, rounding: Rounding | None) -> None:
    """Check that ``found`` has ``dense`` in fp8, followed by rows of zeros."""
    if rounding is None:
        assert found.rounded is None
        return
    assert found.rounded is not None
    values, scales = quantize_rows(dense, ue8m0=rounding.ue8m0)
    rows = len(dense)
    nearly_all_equal(found.rounded.values[:rows].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.rounded.scales[:, :rows], scales)
    assert not found.rounded.values[rows:].float().any()


def vectors_of(dim: int, dtype: torch.dtype, *, is_interleaved: bool) -> IndexVectors:
    hadamard = None if is_interleaved else hadamard_matrix(dim, dtype)
    return IndexVectors(draw(dim), draw(dim + 1)[1:], EPS, is_interleaved, hadamard)


def rotation_of(num_tokens: int, rope: int) -> Rotation:
    angles = 3 * draw(num_tokens, rope // 2)
    return angles.cos(), angles.sin()


def norms_and_roundings() -> None:
    from hisparse_pd.kernels import triton_norms
    from hisparse_pd.kernels.triton_fp8 import gated_rows_triton, quantize_gated_triton, quantize_rows_triton
    from hisparse_pd.kernels.triton_norms import add_norm_triton

    for num_rows, size in ((3, 200), (1, 128)):
        hidden, weight = draw(num_rows, size).bfloat16(), draw(size).bfloat16()
        of_product, of_experts = draw(4, num_rows, size), draw(num_rows, 3, size).bfloat16().transpose(0, 1)
        for before, added in ((hidden, []), (hidden, [of_product, of_experts]), (None, [of_experts])):
            for rounding in ROUNDINGS:
                sums, normed = add_norm_triton(before, added, weight, EPS, rounding)
                of_reference, expected = add_norm(before, [part.float() for part in added], weight, EPS, None)
                is_close(sums, of_reference.bfloat16())
                is_close(normed.dense, expected.dense.bfloat16())
                is_rounded(normed, normed.dense, rounding)
        gate = NormGate.of(draw(5, size) / size**0.5, draw(size, 5))
        inputs = hidden.float(), [of_product], weight.float(), EPS
        for most_numbers in (1 << 15, 512):  # all ranks of the gate at once, or some
            triton_norms.GATE_NUMBERS = most_numbers
            gated = add_norm_triton(*inputs, None, (gate.down, gate.up.t().contiguous()))[1]
            is_close(gated.dense, add_norm(*inputs, None, gate)[1].dense)
        for ue8m0 in (False, True):
            found = Rounded.empty(num_rows + 2, size, hidden.device)
            quantize_rows_triton(hidden, *found, ue8m0=ue8m0)
            is_rounded(Activations(hidden, found), hidden, Rounding(ue8m0))
            gate_up = draw(1, num_rows, 2 * size)
            values, scales = Rounded.empty(num_rows, size, hidden.device)
            quantize_gated_triton(gate_up, values, scales, ue8m0=ue8m0)
            of_reference, expected_scales = quantize_gated(gate_up, ue8m0=ue8m0)
            is_close(scales, expected_scales)
            nearly_all_equal(values.view(torch.uint8), of_reference.view(torch.uint8))
            is_close(gated_rows_triton(gate_up, torch.float32), gated_rows(gate_up, torch.float32))


def latents_and_heads() -> None:
    from hisparse_pd.kernels.triton_heads import index_queries_triton, latent_queries_triton
    from hisparse_pd.kernels.triton_latents import finish_latents_triton

    num_tokens, q_rank, latent, rope, key_dim, index_heads, heads = 3, 200, 48, 16, 32, 5, 2
    rotation = rotation_of(num_tokens, rope)
    for dtype, parts in ((torch.bfloat16, 3), (torch.float32, 1)):
        norms = LatentNorms(draw(q_rank).to(dtype), EPS, draw(latent).to(dtype), 1e-5, dtype)
        vectors = vectors_of(key_dim, dtype, is_interleaved=parts == 1)
        columns = [q_rank, key_dim, latent + rope]
        q_a, keys, kv_a = torch.split(draw(parts, num_tokens, sum(columns)), columns, dim=-1)
        of_heads = draw(parts, num_tokens, index_heads)
        expected = finish_latents(
            q_a, kv_a, norms, rotation, None, index_keys=keys, vectors=vectors, head_weights=of_heads
        )
        for rounding in ROUNDINGS:
            found = finish_latents_triton(q_a, kv_a, norms, rotation, rounding, keys, vectors, of_heads)
            assert found.q is not None
            assert expected.q is not None
            is_close(found.q.dense, expected.q.dense)
            is_rounded(found.q, found.q.dense, rounding)
            for name in ("item", "index_keys", "head_weights"):
                is_close(getattr(found, name), getattr(expected, name))
        with_raw = finish_latents_triton(q_a, kv_a, norms, rotation, None, None, None, None, keeps_raw=True)
        wanted = finish_latents(q_a, kv_a, norms, rotation, None, keeps_raw=True)
        assert with_raw.q is not None
        assert wanted.q is not None
        is_close(with_raw.q.dense, wanted.q.dense)
        without = finish_latents_triton(None, None, norms, rotation, Rounding(), keys, vectors, None)
        assert (without.q, without.item, without.head_weights) == (None, None, None)
        is_close(without.index_keys, expected.index_keys)
    queries = draw(3, num_tokens, index_heads * key_dim)
    for is_interleaved in (False, True):
        vectors = vectors_of(key_dim, torch.float32, is_interleaved=is_interleaved)
        is_close(
            index_queries_triton(queries, key_dim, vectors, rotation, torch.float32),
            index_queries(queries, vectors, rotation, torch.float32),
        )
    nope = 24
    q, key_up = draw(2, num_tokens, heads, nope + rope), draw(heads, nope, latent)
    out = torch.empty((num_tokens, heads, latent + rope))
    latent_queries_triton(q, key_up, *rotation, out)
    is_close(out, latent_queries(q, key_up, rotation))


def values_of_heads() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice

    from hisparse_pd.kernels.triton_heads import lift_values_triton

    libdevice.exp = lambda x: tl.exp(x)  # the interpreter's exp; this runs in its own process
    num_tokens, heads, latent, value_dim = 3, 2, 72, 128
    attended, value_up = draw(num_tokens, heads, latent), draw(heads, latent, value_dim)
    for gate in (None, draw(2, num_tokens, heads, value_dim)):
        plain = lift_values_triton(attended, value_up, gate, None)
        is_close(plain.dense, lift_values(attended, value_up, gate, None).dense)
        for rounding in ROUNDINGS[1:]:
            is_rounded(lift_values_triton(attended, value_up, gate, rounding), plain.dense, rounding)


def products_of_few_rows() -> None:
    from hisparse_pd.kernels.triton_linear import linear_parts, num_parts

    for num_tokens, rows, columns in ((3, 136, 1152), (17, 48, 384), (66, 136, 1152)):
        values, scales = quantize(draw(rows, columns))
        x = quantize_rows(draw(num_tokens, columns))
        found = linear_parts(x.values, num_tokens, values, x.scales, scales)
        assert len(found) == (num_parts(values) if num_tokens <= 64 else 1)
        expected = block_product(x, num_tokens, torch.float32, values, scales)[0]
        is_close(add_parts(found), expected.to(found.dtype))
        dense, matrix = draw(num_tokens, 2 * columns)[:, :columns], draw(rows, columns)
        found = linear_parts(dense, num_tokens, matrix)
        is_close(add_parts(found), dense_product(dense, matrix)[0].to(found.dtype))


def products_by_a_narrow_matrix() -> None:
    from hisparse_pd.kernels import triton_routing
    from hisparse_pd.kernels.triton_routing import narrow_parts

    triton_routing.FEW_TOKENS = 64  # type: ignore[misc]  # in a process of its own
    x, matrix = draw(65, 700), draw(40, 700)
    for of_type in (matrix, matrix.bfloat16()):
        few, many = narrow_parts(x[:17], of_type), narrow_parts(x, of_type)
        is_close(add_parts(few), narrow_product(x[:17], of_type)[0])
        assert len(many) == 1
        is_close(many[0, :17], add_parts(few))


def experts_are_chosen_and_planned() -> None:
    from hisparse_pd.kernels.triton_routing import choose_triton, plan_triton

    for num_groups, num_chosen, num_experts, is_softmax in (
        (1, 1, 9, False),
        (4, 2, 24, False),
        (1, 1, 9, True),
    ):
        choice = ExpertChoice(
            draw(num_experts) / 8,
            3,
            num_groups,
            num_chosen,
            num_groups > 1,
            2.5,
            is_softmax=is_softmax,
            has_shared=is_softmax,
        )
        logits = draw(2, 5, num_experts)
        logits[:, 1] = 0.0  # equal logits: the lowest ids are chosen
        weights, ids = choose_triton(
            logits, choice.bias, 3, num_groups=num_groups, num_chosen_groups=num_chosen,
            normalizes=choice.normalizes, scale=choice.scale, score_outside=choice.score_outside,
            is_softmax=is_softmax, has_shared=is_softmax,
        )  # fmt: skip
        expected_weights, expected_ids = choice.choose(logits)
        assert torch.equal(ids, expected_ids)
        is_close(weights, expected_weights)
        num_experts += is_softmax
        routing = Routing.plan(ids, weights, num_experts)
        tables = plan_triton(ids, num_experts, routing.tile_rows, len(routing.tile_experts))
        names = ("order", "starts", "tile_starts", "tile_experts")
        assert all(map(torch.equal, tables, (getattr(routing, name) for name in names)))


def rows_of_pools() -> None:
    from hisparse_pd.kernels.triton_kv_format import store

    for made, num_quantised, tile in (
        (KvFormat("fp8_e4m3", 256, 8), 256, 128),
        (KvFormat("fp8_e4m3", 12, 2), 12, 128),
        (IndexKeyFormat("fp8_e4m3", 32), 32, 32),
        (KvFormat("bfloat16", 13, 3), 0, 128),
        (IndexKeyFormat("bfloat16", 32), 0, 32),
    ):
        dim = made.item_dim if isinstance(made, KvFormat) else made.index_head_dim
        values, slots = draw(3, dim).bfloat16(), torch.tensor([4, 0, 2])
        found, expected = (torch.full((5, made.item_bytes), 77, dtype=torch.uint8) for _ in range(2))
        store(found, slots, values, num_quantised, tile)
        made.store(expected, slots, values)
        assert torch.equal(found[:, num_quantised:], expected[:, num_quantised:])
        if num_quantised:
            nearly_all_equal(found[:, :num_quantised], expected[:, :num_quantised])


def without_loops() -> None:
    latents_and_heads()
    experts_are_chosen_and_planned()
    rows_of_pools()


def with_loops() -> None:
    norms_and_roundings()
    values_of_heads()
    products_of_few_rows()
    products_by_a_narrow_matrix()


@needs_triton
def test_interpreted_kernels() -> None:
    interpreted(without_loops)


@interprets_loops
def test_interpreted_kernels_that_loop() -> None:
    interpreted(with_loops)


NUM_EXPERTS, HEADS, HIDDEN, Q_RANK, LATENT, ROPE, KEY_DIM, VALUE_DIM = 256, 128, 7168, 1536, 512, 64, 128, 128


def compile_a_layer() -> None:
    """Launch all kernels of a layer at DeepSeek-V3.2's sizes, with tensors that have no memory."""
    from hisparse_pd.kernels import gluon_linear
    from hisparse_pd.kernels.triton_experts import run_experts_triton
    from hisparse_pd.kernels.triton_fp8 import quantize_gated_triton, quantize_rows_triton
    from hisparse_pd.kernels.triton_heads import (
        index_queries_triton,
        latent_queries_triton,
        lift_values_triton,
    )
    from hisparse_pd.kernels.triton_kv_format import store
    from hisparse_pd.kernels.triton_latents import finish_latents_triton
    from hisparse_pd.kernels.triton_linear import linear_parts
    from hisparse_pd.kernels.triton_norms import add_norm_triton
    from hisparse_pd.kernels.triton_rope import angles, rotate
    from hisparse_pd.kernels.triton_routing import choose_triton, narrow_parts, plan_triton

    fp8 = torch.float8_e4m3fn

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def wide(*shape: int) -> Tensor:
        return some(*shape, dtype=torch.float32)

    with compiles_launches() as compiled:
        for rounding in (None, Rounding(ue8m0=True)):
            hidden, weight = some(5, HIDDEN), some(HIDDEN)
            for added in ([], [wide(8, 5, HIDDEN)], [some(1, 5, HIDDEN), some(8, 5, HIDDEN)]):
                add_norm_triton(hidden, added, weight, EPS, rounding)
        rotation = wide(5, ROPE // 2), wide(5, ROPE // 2)
        norms = LatentNorms(some(Q_RANK), EPS, some(LATENT), EPS, torch.bfloat16)
        vectors = IndexVectors(wide(KEY_DIM), wide(KEY_DIM), EPS, False, some(KEY_DIM, KEY_DIM))
        finish_latents_triton(
            wide(8, 5, Q_RANK), wide(8, 5, LATENT + ROPE), norms, rotation, Rounding(),
            wide(8, 5, KEY_DIM), vectors, wide(14, 5, 64),
        )  # fmt: skip
        index_queries_triton(wide(4, 5, 64 * KEY_DIM), KEY_DIM, vectors, rotation, torch.bfloat16)
        out = some(5, HEADS, LATENT + ROPE)
        angles(some(5, dtype=torch.int64), wide(ROPE // 2), 1.0)
        rotate(out[..., LATENT:], *rotation, True, out[..., LATENT:])
        rows, of_gate = some(5, HIDDEN), wide(4, 5, 2 * 2048)
        quantize_rows_triton(rows, *Rounded.empty(16, HIDDEN, rows.device), ue8m0=False)
        quantize_gated_triton(of_gate, *Rounded.empty(5, 2048, rows.device), ue8m0=True)
        for num_tokens in (5, 17, 33):
            q = some(1, num_tokens, HEADS, 128 + ROPE)
            angles_of = wide(num_tokens, ROPE // 2), wide(num_tokens, ROPE // 2)
            into = some(num_tokens, HEADS, LATENT + ROPE)
            latent_queries_triton(q, some(HEADS, 128, LATENT), *angles_of, into)
            attended = some(num_tokens, HEADS, LATENT)
            lift_values_triton(attended, some(HEADS, LATENT, VALUE_DIM), None, Rounding())
            x, x_scales = some(num_tokens, Q_RANK, dtype=fp8), wide(Q_RANK // 128, num_tokens)
            matrix, scales = some(32768, Q_RANK, dtype=fp8), wide(256, Q_RANK // 128)
            linear_parts(x, num_tokens, matrix, x_scales, scales)
            linear_parts(some(num_tokens, Q_RANK), num_tokens, some(32768, Q_RANK))
            narrow_parts(some(num_tokens, HIDDEN), wide(NUM_EXPERTS, HIDDEN))
        linear_parts(some(65, HIDDEN), 65, some(2240, HIDDEN))
        # This is a process of its own, so nothing is put back.
        patch.object(gluon_linear, "takes_groups", lambda x, values: True).start()
        patch.object(gluon_linear, "num_multiprocessors", lambda device: 132).start()
        for num_tokens in (65, 4096):
            x, x_scales = some(num_tokens, HIDDEN, dtype=fp8), wide(HIDDEN // 128, num_tokens)
            matrix, scales = some(2240, HIDDEN, dtype=fp8), wide(18, HIDDEN // 128)
            assert len(linear_parts(x, num_tokens, matrix, x_scales, scales)) == (
                8 if num_tokens == 65 else 1
            )
            linear_parts(some(num_tokens, HIDDEN), num_tokens, some(2240, HIDDEN))
        gate = some(16, 2048), some(16, 2048)
        for rounding in (None, Rounding()):
            add_norm_triton(some(5, 2048), [wide(8, 5, 2048)], some(2048), EPS, rounding, gate)
        choose_triton(
            wide(14, 5, NUM_EXPERTS), wide(NUM_EXPERTS), 8,
            num_groups=8, num_chosen_groups=4, normalizes=True, scale=2.5, score_outside=0.0,
        )  # fmt: skip
        num_tiles = most_tiles(40, NUM_EXPERTS, FEW_TILE_ROWS)
        tables = plan_triton(some(5, 8, dtype=torch.int64), NUM_EXPERTS, FEW_TILE_ROWS, num_tiles)
        routing = Routing(*tables, wide(40), 8, FEW_TILE_ROWS, is_rounded=True)
        gate_up = ExpertMatrices(some(32, 2, 2048, HIDDEN, dtype=fp8), wide(32, 2, 16, HIDDEN // 128))
        down = ExpertMatrices(some(32, 1, HIDDEN, 2048, dtype=fp8), wide(32, 1, HIDDEN // 128, 16))
        run_experts_triton(some(5, HIDDEN), routing, gate_up, down, 0)
        in_bfloat16 = replace(routing, is_rounded=False)
        gate_up = ExpertMatrices(some(32, 2, 2048, HIDDEN), None)
        run_experts_triton(
            some(5, HIDDEN), in_bfloat16, gate_up, ExpertMatrices(some(32, 1, HIDDEN, 2048), None), 0
        )
        store(some(100, 656, dtype=torch.uint8), some(5, dtype=torch.int64), some(5, 576), 512, 128)
    print(" ".join(sorted(compiled)))


@needs_triton
def test_all_launches_of_a_layer_compile() -> None:
    assert output_of(compile_a_layer).split() == sorted(
        [
            *("add_norm_kernel", "angles_kernel", "choose_kernel", "finish_latents_kernel"),
            *("index_queries_kernel", "latent_queries_kernel", "lift_values_kernel", "linear_kernel"),
            "many_rows_kernel",
            *("narrow_kernel", "plan_kernel", "rotate_kernel", "store_kernel"),
            *("_product_kernel", "_quantize_kernel"),
        ]
    )
