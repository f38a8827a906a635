"""The routed experts of one MoE layer: all of them, or this rank's share.

Experts are most of a large model's weights, and their input is only one hidden state for each token. They are
therefore spread over the ranks of a node (expert parallelism): in every layer a rank gathers the tokens of
all ranks, computes what its own experts add to them, and gets back the sums for its own tokens.

The loader makes a ``RoutedExperts`` for each layer and fills it; ``feed_forward.py`` calls ``parts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.block_fp8 import scales_shape
from hisparse_pd.kernels.expert_routing import ExpertMatrices, Routing, rounds
from hisparse_pd.kernels.experts import run_experts
from hisparse_pd.kernels.fp8_rows import Activations
from hisparse_pd.kernels.int4 import Int4Form, Int4Matrices


class RoutedExperts(torch.nn.Module):
    """A replacement of transformers' module of experts, with the same call."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        dtype: torch.dtype | Int4Form,
        device: torch.device,
        ranks: RankGroup | None = None,
        *,
        ue8m0: bool = False,
        has_room: bool = False,
    ) -> None:
        """The loader fills the weights.

        ``dtype``: the weights' dtype, or their form in four bits. Weights in ``kernels.block_fp8.DTYPE`` have
        scales. ``ranks``: the ranks that share the experts; None: this rank has all. ``ue8m0``: see
        ``kernels.fp8_rows``. ``has_room``: allocate one more expert, which ``take_shared`` fills; not with
        ``ranks``, and not with weights in four bits.
        """
        super().__init__()
        assert ranks is None or not has_room, (
            "has_room: a shared expert has no place among experts of several ranks"
        )
        assert not (has_room and isinstance(dtype, Int4Form)), "has_room: shared experts are not in four bits"
        self.experts = range(num_experts) if ranks is None else ranks.share_of(num_experts)
        """The numbers of this rank's experts."""
        num_local = len(self.experts) + has_room
        # ``gate_up`` has two matrices of each expert, 0: gate and 1: up.
        self.gate_up = _empty((num_local, 2, inner_size, hidden_size), dtype, device, ue8m0=ue8m0)
        self.down = _empty((num_local, 1, hidden_size, inner_size), dtype, device, ue8m0=ue8m0)
        self._num_experts = num_experts + has_room
        self._has_room = has_room
        self._ranks = ranks

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        ``hidden``: [num_tokens, hidden_size]; ``expert_ids``, ``weights``: [num_tokens, top_k]. All ranks
        make this call together, each for up to ``RankGroup.step_tokens`` tokens, or for equally many if that
        is 0.
        """
        return self.parts(Activations(hidden), expert_ids, weights).sum(dim=0)

    @torch.no_grad()
    def take_shared(self, mlp: Any) -> bool:
        """Copy the shared expert, the gated MLP that every token uses, to the place behind the last routed
        one. It must have the form of the others.

        Returns False if there is no room for it, or its weights have another dtype or a bias.
        """
        if isinstance(self.gate_up, Int4Matrices) or isinstance(self.down, Int4Matrices):
            return False
        places = (
            (mlp.gate_proj, self.gate_up, 0),
            (mlp.up_proj, self.gate_up, 1),
            (mlp.down_proj, self.down, 0),
        )
        if not self._has_room or any(
            layer.weight.dtype != matrices.values.dtype or getattr(layer, "bias", None) is not None
            for layer, matrices, _ in places
        ):
            return False
        for layer, matrices, number in places:
            matrices.values[-1, number] = layer.weight
            if matrices.scales is not None:
                matrices.scales[-1, number] = layer.weight_scale_inv
        return True

    def parts(self, x: Activations, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return what ``forward`` adds up: [parts, num_tokens, hidden_size]."""
        if self._ranks is None:
            return _parts(self._compute(x, expert_ids, weights))
        hidden, num_tokens = x.dense, x.num_tokens
        # Ranks gather equally many rows, so a rank with fewer tokens pads its own.
        num_padding = max(self._ranks.step_tokens - num_tokens, 0)
        if num_padding:
            hidden, weights = (pad(part, (0, 0, 0, num_padding)) for part in (hidden, weights))
            expert_ids = pad(expert_ids, (0, 0, 0, num_padding), value=self._num_experts)  # no expert's id
        rows = self._ranks.gather(_pack(hidden, expert_ids, weights))
        hidden, expert_ids, weights = _unpack(rows, expert_ids.shape[1], hidden.dtype)
        added = self._compute(Activations(hidden), expert_ids, weights)
        if hidden.dtype == torch.float32:
            # Each value comes from one rank and is zero on the others, so this sum rounds nothing, and the
            # results are those of one rank alone. The price is that top_k times as much is sent.
            return _parts(self._ranks.sum_own(added)[:num_tokens])
        return self._ranks.sum_own(added.sum(dim=1))[None, :num_tokens]

    def join_forward(self, like: Tensor, top_k: int) -> None:
        """Take part in a ``forward`` of other ranks, with no token of its own. ``like``: [0, hidden_size]."""
        self(like, like.new_empty((0, top_k), dtype=torch.int64), like.new_empty((0, top_k)))

    def _compute(self, x: Activations, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return what each of a token's experts adds: [num_tokens, top_k, hidden_size], with zeros for other
        ranks' experts. Where fp8 is multiplied, ``x.rounded`` is read, if it is there (``rounds``)."""
        is_rounded = rounds(x.dense, self.gate_up)
        in_bfloat16 = x.dense.dtype == torch.bfloat16 == self.gate_up.values.dtype and x.dense.is_cuda
        routing = Routing.plan(
            expert_ids,
            weights,
            self._num_experts,
            is_rounded=is_rounded,
            in_bfloat16=in_bfloat16,
            in_int4=isinstance(self.gate_up, Int4Matrices),
        )
        return run_experts(
            x.dense,
            routing,
            self.gate_up,
            self.down,
            self.experts.start,
            x.rounded,
            has_others=self._ranks is not None,
        )


def _parts(added: Tensor) -> Tensor:
    """Return ``added`` [num_tokens, top_k, hidden_size] as parts: on a GPU top_k of them, which ``add_norm``
    adds up, on a CPU their sum."""
    return added.transpose(0, 1) if added.is_cuda else added.sum(dim=1)[None]


def _pack(hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Return one row of bytes for each token, so that one operation sends all three."""
    parts: Sequence[Tensor] = (expert_ids.int(), weights.float(), hidden.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def _unpack(rows: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states, expert ids and weights in the rows of ``_pack``."""
    ids, weights, hidden = torch.split(rows, [4 * top_k, 4 * top_k, rows.shape[1] - 8 * top_k], dim=1)
    return hidden.view(dtype), ids.view(torch.int32), weights.view(torch.float32)


def _empty(
    shape: tuple[int, int, int, int], dtype: torch.dtype | Int4Form, device: torch.device, *, ue8m0: bool
) -> ExpertMatrices | Int4Matrices:
    if isinstance(dtype, Int4Form):
        return Int4Matrices.empty(*shape, dtype, device)
    values = torch.empty(shape, dtype=dtype, device=device)
    if dtype != FP8:
        return ExpertMatrices(values, None)
    scales = torch.empty((*shape[:2], *scales_shape(*shape[2:])), dtype=torch.float32, device=device)
    return ExpertMatrices(values, scales, ue8m0)
