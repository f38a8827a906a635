"""Routed experts: every token goes through its top-k of many small gated MLPs, whose results are added up.

``hisparse_pd.core.model.experts`` calls ``run_experts`` in every layer, after ``Routing.plan``. It computes
the experts that one rank has: by Triton on a GPU, in torch on a CPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hisparse_pd.kernels.block_linear import block_linear
from hisparse_pd.kernels.expert_routing import ExpertMatrices, Routing
from hisparse_pd.kernels.fp8_rows import Rounded
from hisparse_pd.kernels.row_math import linear, silu


def run_experts(
    hidden: Tensor,
    routing: Routing,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    first_expert: int,
    rounded: Rounded | None = None,
    *,
    has_others: bool = True,
) -> Tensor:
    """Return the weighted results of these experts for each token; the first matrices are ``first_expert``'s.

    ``hidden``: [num_tokens, hidden_size], not changed. An expert is ``down(silu(gate(x)) * up(x))``: two
    matrices in ``gate_up``, one in ``down``. Where ``routing.is_rounded``, activations are rounded to fp8;
    ``rounded`` is ``hidden`` so rounded, if the caller has it. Returns [num_tokens, top_k, hidden_size] of
    ``hidden``'s dtype: the weighted result of each of a token's experts, and zeros for experts that are not
    among these.
    ``has_others``: False if ``routing`` only has these experts, so that nothing has to be set to zero.
    """
    if hidden.device.type == "cuda":
        from hisparse_pd.kernels.triton_experts import run_experts_triton

        return run_experts_triton(
            hidden, routing, gate_up, down, first_expert, rounded, has_others=has_others
        )
    return _run_reference(hidden, routing, gate_up, down, first_expert)


def _run_reference(
    hidden: Tensor, routing: Routing, gate_up: ExpertMatrices, down: ExpertMatrices, first_expert: int
) -> Tensor:
    starts = routing.starts[first_expert : first_expert + len(gate_up.values) + 1].tolist()
    rows = routing.order[starts[0] : starts[-1]].long()
    sizes = [end - start for start, end in pairwise(starts)]
    gate, up = _products(hidden[rows // routing.top_k], sizes, gate_up, routing.is_rounded).chunk(2, dim=1)
    added = _products(silu(gate) * up, sizes, down, routing.is_rounded) * routing.weights[rows, None]
    results = hidden.new_zeros((len(routing.order), hidden.shape[1]))
    results[rows] = added.to(hidden.dtype)
    return results.view(-1, routing.top_k, hidden.shape[1])


def _products(x: Tensor, sizes: list[int], matrices: ExpertMatrices, is_rounded: bool) -> Tensor:
    """Multiply the rows of ``x``, of which expert i has ``sizes[i]`` in turn, by their expert's matrices. The
    results of several matrices are adjacent columns."""
    values, scales = matrices.values, matrices.scales
    products = [x.new_empty((0, values.shape[1] * values.shape[2]))]
    for expert, rows in enumerate(torch.split(x, sizes)):
        if not sizes[expert]:
            continue
        if is_rounded and scales is not None:
            pairs = zip(values[expert], scales[expert], strict=True)
            parts = [block_linear(rows, *pair, ue8m0=matrices.ue8m0) for pair in pairs]
            products.append(torch.cat(parts, dim=1))
        else:
            products.append(linear(rows, matrices.of(expert, x.dtype).flatten(0, 1)))
    return torch.cat(products)
