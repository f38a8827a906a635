"""Experts in four bits on a GPU: products as in float64, the bits of a row, ranks, graphs, and loading.

Padding is poisoned: tokens of no expert are NaN, and so are the places behind the last row, and rows behind a
matrix's last one have numbers, too.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model import loader, weight_reader
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.kernels.expert_routing import INT4_TILE_ROWS, Routing, rounds
from hisparse_pd.kernels.experts import run_experts
from hisparse_pd.kernels.int4 import Int4Form, Int4Matrices, pack, quantize, round_tokens
from tests.gpu.support import needs_gpu
from tests.int4_checkpoints import FORMS as STORED_FORMS
from tests.int4_checkpoints import write_int4_checkpoint
from tools.checkpoints.quantize_int4 import StoredForm

pytestmark = needs_gpu

HOME = torch.device("cuda:0")
CPU = torch.device("cpu")
NUM_EXPERTS, TOP_K = 6, 2
FORMS = [
    Int4Form(128, has_zeros=False),
    Int4Form(128, has_zeros=True, scale_dtype=torch.float16),
    Int4Form(128, has_zeros=False, rounds_tokens=True),
    Int4Form(64, has_zeros=True, scale_dtype=torch.float32),
    Int4Form(32, has_zeros=False, scale_dtype=torch.float16),
]
NUM_TOKENS = (1, 3, 17, 50, 97, 200, 601)


def draw_matrices(form: Int4Form, num_matrices: int, rows: int, columns: int) -> Int4Matrices:
    """Return matrices of NUM_EXPERTS on the GPU; rows of padding have numbers."""
    generator = torch.Generator().manual_seed(rows + form.group_size)
    found = Int4Matrices.empty(NUM_EXPERTS, num_matrices, rows, columns, form, CPU)
    for place in itertools.product(range(NUM_EXPERTS), range(num_matrices)):
        dense = torch.randn((rows, columns), generator=generator) / columns**0.5
        values, scales, zeros = quantize(dense, form)
        padding = torch.full((-rows % 64, columns), 13, dtype=torch.uint8)
        found.values[place] = pack(torch.cat((values, padding)), form.group_size)
        found.scales[place] = scales
        if found.zeros is not None and zeros is not None:
            found.zeros[place] = zeros
    return moved(found, HOME)


def moved(matrices: Int4Matrices, device: torch.device) -> Int4Matrices:
    zeros = None if matrices.zeros is None else matrices.zeros.to(device)
    return replace(
        matrices, values=matrices.values.to(device), scales=matrices.scales.to(device), zeros=zeros
    )


def part(whole: Int4Matrices, experts: slice) -> Int4Matrices:
    zeros = None if whole.zeros is None else whole.zeros[experts]
    return replace(whole, values=whole.values[experts], scales=whole.scales[experts], zeros=zeros)


def draw_tokens(
    num_tokens: int, hidden_size: int, dtype: torch.dtype, *, has_padding: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their experts and weights; if it ``has_padding``, every third token is padding, whose
    numbers are NaN. Experts have very different numbers of rows."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn((num_tokens, hidden_size), generator=generator).to(dtype)
    likely = torch.tensor([9.0, 5.0, 2.0, 1.0, 0.5, 0.1]).expand(num_tokens, -1)
    expert_ids = torch.multinomial(likely, TOP_K, generator=generator)
    weights = torch.rand((num_tokens, TOP_K), generator=generator)
    if has_padding:
        hidden[2::3], weights[2::3], expert_ids[2::3] = torch.nan, torch.nan, NUM_EXPERTS
    return hidden.to(HOME), expert_ids.to(HOME), weights.to(HOME)


def run(
    tokens: tuple[Tensor, Tensor, Tensor], gate_up: Int4Matrices, down: Int4Matrices, first: int = 0
) -> Tensor:
    hidden, expert_ids, weights = tokens
    routing = Routing.plan(expert_ids, weights, NUM_EXPERTS, is_rounded=rounds(hidden, gate_up), in_int4=True)
    return run_experts(hidden, routing, gate_up, down, first)


def exact(tokens: tuple[Tensor, Tensor, Tensor], gate_up: Int4Matrices, down: Int4Matrices) -> Tensor:
    """Compute the results in float64, with the weights that the numbers stand for; gates, and what is
    multiplied by them, are rounded to the tokens' dtype."""
    hidden, expert_ids, weights = (each.cpu() for each in tokens)
    gate_up, down = moved(gate_up, CPU), moved(down, CPU)
    results = torch.zeros((*expert_ids.shape, hidden.shape[1]), dtype=torch.float64)
    for expert in range(NUM_EXPERTS):
        rows, choices = torch.nonzero(expert_ids == expert).unbind(1)
        if not len(rows):
            continue
        x = hidden[rows].double()
        if gate_up.form.rounds_tokens and hidden.dtype == torch.bfloat16:
            values, scales = round_tokens(hidden[rows])
            x = values.double() * scales.double()[:, None]
        gate, up = (gate_up.of(expert, torch.float64) @ x.T).to(hidden.dtype).double()
        inner = (torch.nn.functional.silu(gate) * up).T
        if gate_up.form.rounds_tokens and hidden.dtype == torch.bfloat16:
            values, scales = round_tokens(inner.float())
            inner = values.double() * scales.double()[:, None]
        of_down = inner @ down.of(expert, torch.float64)[0].T
        results[rows, choices] = of_down * weights[rows, choices, None].double()
    return results


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("sizes", [(512, 256), (640, 320), (1024, 192)], ids=str)
def test_products_are_those_of_float64(sizes: tuple[int, int], form: Int4Form, num_tokens: int) -> None:
    hidden_size, inner_size = (-(-size // form.group_size) * form.group_size for size in sizes)
    gate_up = draw_matrices(form, 2, inner_size, hidden_size)
    down = draw_matrices(form, 1, hidden_size, inner_size)
    tokens = draw_tokens(num_tokens, hidden_size, torch.bfloat16)
    found, expected = run(tokens, gate_up, down).cpu().double(), exact(tokens, gate_up, down)
    assert not found[2::3].any(), "padding has results"
    # What gates let through, and results, are rounded to 8 bits; where activations are in fp8, a gate that is
    # rounded otherwise may put a number on the other side between two of fp8.
    tolerance = 0.03 if form.rounds_tokens else 0.006
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert (found - expected).abs().max() <= 8 * tolerance * expected.abs().max()


def tiled(routing: Routing, tile_rows: int) -> Routing:
    """Return the plan with tiles of this size."""
    num_tiles = (routing.starts.diff() + tile_rows - 1) // tile_rows
    tile_experts = torch.repeat_interleave(torch.arange(NUM_EXPERTS, device=HOME), num_tiles).int()
    return replace(
        routing,
        tile_starts=torch.nn.functional.pad(num_tiles.cumsum(0), (1, 0)).int(),
        tile_experts=torch.nn.functional.pad(tile_experts, (0, 2 * len(routing.order)), value=NUM_EXPERTS),
        tile_rows=tile_rows,
    )


@pytest.mark.parametrize("tile_rows", INT4_TILE_ROWS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_product_is_rounded_once(form: Int4Form, tile_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results in bfloat16 are those of float64 but for their own rounding and the sums' in float32. Blocks of
    any number of rows, however many there are, and the kernel for other GPUs give the same bits."""
    from hisparse_pd.kernels import int4_experts
    from hisparse_pd.kernels.triton_int4 import _launch
    from hisparse_pd.kernels.triton_int4_tokens import lay_out

    rows, columns, num_rows = 328, 1024, 187
    matrices = draw_matrices(form, 2, rows, columns)
    x = torch.randn((num_rows, columns), generator=torch.Generator().manual_seed(1)).bfloat16().to(HOME)
    expert_ids = (torch.arange(num_rows, device=HOME) % 8 // 5 * 2)[:, None]  # two experts with many rows
    weights = torch.ones((num_rows, 1), device=HOME)
    routing = tiled(Routing.plan(expert_ids, weights, NUM_EXPERTS, in_int4=True), tile_rows)
    out = torch.full((num_rows + 3, 2 * rows), torch.nan, dtype=torch.bfloat16, device=HOME)
    _launch(x, None, matrices, out[:num_rows], routing, 0, is_first=True)
    if int4_experts.takes(x, matrices):
        tokens = lay_out(x, routing, 0, matrices, is_first=True)
        for num_multiprocessors in (1, 7, 1000):
            monkeypatch.setattr(int4_experts, "num_multiprocessors", lambda _, num=num_multiprocessors: num)
            other = torch.full_like(out, torch.nan)
            int4_experts.multiply(tokens, matrices, other[:num_rows], routing, 0)
            assert torch.equal(out.view(torch.int16), other.view(torch.int16)), num_multiprocessors
    on_cpu = moved(matrices, CPU)
    dense = [on_cpu.of(expert, torch.float64).flatten(0, 1) for expert in range(NUM_EXPERTS)]
    for place, token in enumerate(routing.order.tolist()):
        expected = dense[int(expert_ids[token])] @ x[token].cpu().double()
        error = (out[place].cpu().double() - expected).abs()
        assert (error <= expected.abs() * 2**-8 + 1e-4).all()
    assert out[num_rows:].isnan().all()


@pytest.mark.parametrize("tile_rows", INT4_TILE_ROWS)
@pytest.mark.parametrize("form", [FORMS[2], replace(FORMS[4], rounds_tokens=True)], ids=str)
def test_products_in_fp8_are_those_of_the_rounded_numbers(form: Int4Form, tile_rows: int) -> None:
    """The second product of a layer: gates are applied, results weighed and put in their rows' places."""
    from hisparse_pd.kernels import int4_experts
    from hisparse_pd.kernels.triton_int4_tokens import lay_out

    rows, columns, num_rows = 328, 512, 187
    matrices = draw_matrices(form, 1, rows, columns)
    gates_and_ups = torch.randn((num_rows, 2 * columns), device=HOME).bfloat16()
    if not int4_experts.takes(gates_and_ups, matrices):
        pytest.skip("only Hopper multiplies fp8 by weights in four bits")
    expert_ids = (torch.arange(num_rows, device=HOME) % 8 // 5 * 2)[:, None]
    weights = torch.rand((num_rows, 1), device=HOME) + 0.5
    plan = Routing.plan(expert_ids, weights, NUM_EXPERTS, is_rounded=True, in_int4=True)
    routing = tiled(plan, tile_rows)
    inner = lay_out(gates_and_ups, routing, 0, matrices, is_first=False)
    out = torch.full((num_rows, rows), torch.nan, dtype=torch.bfloat16, device=HOME)
    int4_experts.multiply(inner, matrices, out, routing, 0)
    gate, up = gates_and_ups.float().chunk(2, dim=1)
    values, scales = (each.double().cpu() for each in round_tokens(torch.nn.functional.silu(gate) * up))
    on_cpu, expected = moved(matrices, CPU), torch.empty((num_rows, rows), dtype=torch.float64)
    dense = [on_cpu.of(expert, torch.float64)[0] for expert in range(NUM_EXPERTS)]
    for place, row in enumerate(routing.order.tolist()):
        product = dense[int(expert_ids[row])] @ values[place] * scales[place]
        expected[row] = product * weights[row].double().cpu()
    # A number that is rounded to fp8 the other way moves a result by little; sums in fp8 have 14 bits.
    assert (out.cpu().double() - expected).norm() <= 0.004 * expected.norm()


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4]], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_float32_is_exact(form: Int4Form, num_tokens: int) -> None:
    inner_size = 128 if form.group_size == 128 else 96
    gate_up, down = draw_matrices(form, 2, inner_size, 256), draw_matrices(form, 1, 256, inner_size)
    tokens = draw_tokens(num_tokens, 256, torch.float32)
    found = run(tokens, gate_up, down).cpu().double()
    torch.testing.assert_close(found, exact(tokens, gate_up, down), rtol=1e-4, atol=1e-5)


@pytest.mark.I5
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_others(form: Int4Form) -> None:
    """The numbers of tokens make tiles of every size; experts of another rank's are left out."""
    hidden_size, inner_size = 1024, 384
    gate_up = draw_matrices(form, 2, inner_size, hidden_size)
    down = draw_matrices(form, 1, hidden_size, inner_size)
    tokens = draw_tokens(3001, hidden_size, torch.bfloat16)
    some = [slice(0, 1), slice(4, 5), slice(15, 32), slice(30, 75), slice(200, 270), slice(90, 230)]
    sizes = set()
    for experts in (slice(0, NUM_EXPERTS), slice(1, 4)):
        shard = part(gate_up, experts), part(down, experts), experts.start
        many = run(tokens, *shard)
        for rows in some:
            hidden, expert_ids, weights = (each[rows] for each in tokens)
            sizes.add(Routing.plan(expert_ids, weights, NUM_EXPERTS, in_int4=True).tile_rows)
            found = run((hidden, expert_ids, weights), *shard)
            assert torch.equal(many[rows].view(torch.int16), found.view(torch.int16)), (experts, rows)
    assert sizes == set(INT4_TILE_ROWS)


@pytest.mark.I5
@pytest.mark.parametrize("form", [FORMS[1], FORMS[2]], ids=str)
@pytest.mark.parametrize("num_tokens", [6, 150, 700])
def test_every_launch_gives_the_same_bits(form: Int4Form, num_tokens: int) -> None:
    """Copies overwrite stages while warps still add up: one that came too early would show in some of many
    launches."""
    hidden_size, inner_size = 4096, 1024
    gate_up = draw_matrices(form, 2, inner_size, hidden_size)
    down = draw_matrices(form, 1, hidden_size, inner_size)
    tokens = draw_tokens(num_tokens, hidden_size, torch.bfloat16)
    first = run(tokens, gate_up, down)
    for _ in range(100):
        assert torch.equal(first.view(torch.int16), run(tokens, gate_up, down).view(torch.int16))


def test_ranks_share_what_one_has() -> None:
    gate_up, down = draw_matrices(FORMS[0], 2, 256, 512), draw_matrices(FORMS[0], 1, 512, 256)
    tokens = draw_tokens(77, 512, torch.bfloat16)
    whole = run(tokens, gate_up, down)
    shares = [
        run(tokens, part(gate_up, experts), part(down, experts), experts.start)
        for experts in (slice(0, 1), slice(1, 4), slice(4, NUM_EXPERTS))
    ]
    assert torch.equal(sum(shares[1:], shares[0]), whole)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]], ids=str)
def test_does_the_same_in_graphs(form: Int4Form) -> None:
    experts = RoutedExperts(NUM_EXPERTS, 512, 256, form, HOME)
    experts.gate_up, experts.down = draw_matrices(form, 2, 256, 512), draw_matrices(form, 1, 512, 256)
    for num_tokens in (3, 90):
        tokens = draw_tokens(num_tokens, 512, torch.bfloat16, has_padding=False)
        experts(*tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = experts(*tokens)
        for turn in range(3):
            others = draw_tokens(num_tokens, 512, torch.bfloat16, has_padding=False)
            for target, source in zip(tokens, others, strict=True):
                target.copy_(source.roll(turn, 0))
            graph.replay()
            assert torch.equal(result.view(torch.int16), experts(*tokens).view(torch.int16))


def test_nothing_is_computed_for_no_tokens() -> None:
    gate_up, down = draw_matrices(FORMS[2], 2, 128, 256), draw_matrices(FORMS[2], 1, 256, 128)
    tokens = tuple(each[:0] for each in draw_tokens(1, 256, torch.bfloat16))
    assert run((tokens[0], tokens[1], tokens[2]), gate_up, down).shape == (0, TOP_K, 256)


@pytest.mark.parametrize("form", STORED_FORMS.values(), ids=STORED_FORMS)
def test_a_gpu_gets_the_numbers_that_a_cpu_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: StoredForm
) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 4096)
    path, _ = write_int4_checkpoint(tmp_path, "v32", form)
    spec = load_spec(path, "bfloat16")

    def numbers(device: torch.device) -> list[Tensor]:
        model: Any = loader.Loader(path, spec, device, None).load()
        found = []
        for layer in model.model.layers:
            if isinstance(experts := getattr(layer.mlp, "experts", None), RoutedExperts):
                for matrices in (experts.gate_up, experts.down):
                    assert isinstance(matrices, Int4Matrices)
                    assert matrices.values.device == device
                    found += [matrices.values, matrices.scales]
                    found += [] if matrices.zeros is None else [matrices.zeros]
        return [each.cpu() for each in found]

    on_gpu, on_cpu = numbers(HOME), numbers(CPU)
    assert len(on_gpu) == len(on_cpu) == 2 * (6 if form.has_zeros else 4)
    assert all(torch.equal(found, expected) for found, expected in zip(on_gpu, on_cpu, strict=True))
