"""Routed experts: every token goes through its top-k of many small gated MLPs, whose results are added up.

``hisparse_pd.core.model.experts`` calls ``run_experts`` in every layer, after ``Routing.plan``. It computes
the experts that one rank has: by Triton on a GPU, in torch on a CPU. On a CPU, products with fp8 or int4
weights are those with the weights that they stand for, in the dtype of the activations: the definition.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hisparse_pd.kernels.block_linear import block_linear
from hisparse_pd.kernels.expert_routing import ExpertMatrices, Routing
from hisparse_pd.kernels.fp8_rows import Rounded
from hisparse_pd.kernels.int4 import Int4Matrices, round_tokens
from hisparse_pd.kernels.row_math import linear, silu


def run_experts(
    hidden: Tensor,
    routing: Routing,
    gate_up: ExpertMatrices | Int4Matrices,
    down: ExpertMatrices | Int4Matrices,
    first_expert: int,
    rounded: Rounded | None = None,
    *,
    has_others: bool = True,
) -> Tensor:
    """Return the weighted results of this rank's experts for each token. The rank has consecutive experts of
    the layer, from number ``first_expert`` on, and the matrices of no others.

    ``hidden``: [num_tokens, hidden_size], not changed. An expert is ``down(silu(gate(x)) * up(x))``: two
    matrices in ``gate_up``, one in ``down``, both of one class. Where ``routing.is_rounded``, activations are
    rounded to fp8; ``rounded`` is ``hidden`` rounded for fp8 matrices, if the caller has it. Returns
    [num_tokens, top_k, hidden_size] of ``hidden``'s dtype: the weighted result of each of a token's experts,
    and zeros for other ranks' experts. ``has_others``: False if ``routing`` has this rank's experts only, so
    that nothing has to be set to zero.
    """
    if hidden.device.type == "cuda":
        if isinstance(gate_up, Int4Matrices) and isinstance(down, Int4Matrices):
            from hisparse_pd.kernels.triton_int4 import run_int4_triton

            return run_int4_triton(hidden, routing, gate_up, down, first_expert, has_others=has_others)
        assert isinstance(gate_up, ExpertMatrices), "gate_up and down of two classes"
        assert isinstance(down, ExpertMatrices), "gate_up and down of two classes"
        from hisparse_pd.kernels.triton_experts import run_experts_triton

        return run_experts_triton(
            hidden, routing, gate_up, down, first_expert, rounded, has_others=has_others
        )
    return _run_reference(hidden, routing, gate_up, down, first_expert)  # which rounds by itself


def _run_reference(
    hidden: Tensor,
    routing: Routing,
    gate_up: ExpertMatrices | Int4Matrices,
    down: ExpertMatrices | Int4Matrices,
    first_expert: int,
) -> Tensor:
    """See ``run_experts``. A row is a token and one of its experts, numbered ``token * top_k + choice``.

    ``routing.order`` has the rows sorted by expert; those of expert ``i`` are from ``routing.starts[i]`` to
    ``routing.starts[i + 1]``.
    """
    starts = routing.starts[first_expert : first_expert + len(gate_up.values) + 1].tolist()
    rows = routing.order[starts[0] : starts[-1]].long()  # of this rank's experts
    sizes = [end - start for start, end in pairwise(starts)]
    gate, up = _products(hidden[rows // routing.top_k], sizes, gate_up, routing.is_rounded).chunk(2, dim=1)
    weighted = _products(silu(gate) * up, sizes, down, routing.is_rounded) * routing.weights[rows, None]
    results = hidden.new_zeros((len(routing.order), hidden.shape[1]))
    results[rows] = weighted.to(hidden.dtype)
    return results.view(-1, routing.top_k, hidden.shape[1])


def _products(
    x: Tensor, sizes: list[int], matrices: ExpertMatrices | Int4Matrices, is_rounded: bool
) -> Tensor:
    """Multiply each row of ``x`` by its expert's matrices, whose results are adjacent columns. The first
    ``sizes[0]`` rows are the first expert's, the next ``sizes[1]`` the second one's, and so on."""
    products = [
        _product(rows, matrices, expert, is_rounded)
        for expert, rows in enumerate(torch.split(x, sizes))
        if len(rows)
    ]
    return torch.cat(products) if products else x.new_empty((0, matrices.num_outputs))


def _product(x: Tensor, matrices: ExpertMatrices | Int4Matrices, expert: int, is_rounded: bool) -> Tensor:
    """Multiply rows by the matrices of their expert."""
    if is_rounded and isinstance(matrices, Int4Matrices):
        values, token_scales = round_tokens(x.float())
        product = linear(values, matrices.of(expert, torch.float32).flatten(0, 1))
        return (product * token_scales[:, None]).to(x.dtype)
    if is_rounded and isinstance(matrices, ExpertMatrices) and matrices.scales is not None:
        pairs = zip(matrices.values[expert], matrices.scales[expert], strict=True)
        return torch.cat([block_linear(x, *pair, ue8m0=matrices.ue8m0) for pair in pairs], dim=1)
    return linear(x, matrices.of(expert, x.dtype).flatten(0, 1))
