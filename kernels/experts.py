"""Routed experts: every token goes through its top-k of many small gated MLPs, whose results are added up.

``run_experts`` computes them for the experts that one rank holds: by Triton on a GPU, in torch on a CPU.
"""

from __future__ import annotations

from torch import Tensor

from kernels.block_linear import block_linear
from kernels.expert_routing import ExpertMatrices, Routing
from kernels.fp8_rows import Rounded
from kernels.row_math import linear, silu


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
    """What the experts from ``first_expert`` on, which these matrices are of, are to add to each token.

    ``hidden``: [num_tokens, hidden_size]. An expert is ``down(silu(gate(x)) * up(x))``: two matrices in
    ``gate_up``, one in ``down``; where ``routing`` says so, what they multiply is rounded to fp8: ``rounded``
    is ``hidden`` so rounded, if it is there already. Returns
    [num_tokens, top_k, hidden_size] of ``hidden``'s dtype, by choice, weighted, with zeros for experts that
    are not among these, unless it is said that ``routing`` never ``has_others``.
    """
    if hidden.device.type == "cuda":
        from kernels.triton_experts import run_experts_triton

        return run_experts_triton(
            hidden, routing, gate_up, down, first_expert, rounded, has_others=has_others
        )
    return _run_reference(hidden, routing, gate_up, down, first_expert)


def _run_reference(
    hidden: Tensor, routing: Routing, gate_up: ExpertMatrices, down: ExpertMatrices, first_expert: int
) -> Tensor:
    results = hidden.new_zeros((len(routing.order), hidden.shape[1]))
    starts = routing.starts.tolist()
    for expert in range(len(gate_up.values)):
        rows = routing.order[starts[first_expert + expert] : starts[first_expert + expert + 1]].long()
        if len(rows):
            of_rows = hidden[rows // routing.top_k]
            gate, up = (_product(of_rows, gate_up, expert, number, routing.is_rounded) for number in (0, 1))
            result = _product(silu(gate) * up, down, expert, 0, routing.is_rounded)
            results[rows] = (result * routing.weights[rows, None]).to(hidden.dtype)
    return results.view(-1, routing.top_k, hidden.shape[1])


def _product(x: Tensor, matrices: ExpertMatrices, expert: int, number: int, is_rounded: bool) -> Tensor:
    if is_rounded and matrices.scales is not None:
        values, scales = matrices.values[expert, number], matrices.scales[expert, number]
        return block_linear(x, values, scales, ue8m0=matrices.ue8m0)
    return linear(x, matrices.of(expert, x.dtype)[number])
