"""Dummy weights whose selections have locality, so that the hit rate of hot buffers is a setting.

Selections by random weights have next to no locality. As in ``tools.checkpoints.make_synthetic``, a constant
channel of the hidden state gives every indexer query a part that all tokens share, and the other part is
jitter. The shared part's size is a norm's weight, which can be set between two measurements:

- Channel 0 of the hidden state is CONSTANT: embeddings write it, and what layers add is small.
- The indexer's query matrix reads a normed vector: the query latent, or in Mistral the hidden state itself.
  Element 0 of that vector is the same for all tokens (before the norm SHARED_QUERY, or in Mistral CONSTANT),
  and its weight in the norm sets the shared part's size.
- Column 0 of that matrix is the query that all tokens share; the other columns give the jitter.
- Heads come in pairs of opposite sign, whose weights have these signs, too.

``tools.bench.whole_node`` loads its model with ``draw_weight``, and calls ``set_jitter`` before each cell.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from hisparse_pd.core.model.dummy_weights import INT4_SCALES, draw
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.stored_formats import SCALES
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from tools.checkpoints.make_synthetic import CONSTANT, SHARED_QUERY, shared_query

LAYER_GAIN = 0.02
"""Gain of what layers add to the hidden state, small enough that 61 layers hardly change the constant's
share."""


class DummyLocality:
    """Draws the weights of one model and sets their locality."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.num_bytes = 0
        """Bytes of all drawn weights, by their shapes."""
        self._query_norms: list[tuple[Tensor, float]] = []
        """Weights of the norms before indexer queries, each with what element 0 is when it enters the
        norm."""

    def set_jitter(self, jitter: float) -> None:
        """Set the share of the variance of indexer scores that depends on the newest token alone.

        ``jitter`` is above 0 and below 1; 1 - jitter is the correlation of consecutive scores.
        """
        num_pairs = self._spec.index_num_heads // 2
        # The pairs' mean query is a sum of the shared part and the jitter's part, whose squared lengths are
        # to satisfy jitter = own_squared / (own_squared + shared_squared).
        own_squared = self._spec.index_head_dim / num_pairs
        shared_squared = own_squared * (1 - jitter) / jitter
        for weight, constant in self._query_norms:
            weight[0] = math.sqrt(shared_squared) / constant

    def draw_weight(self, name: str, target: Tensor) -> None:
        """Draw a dummy weight for ``load_model``, changed as locality needs it."""
        draw(name, target)
        self.num_bytes += target.nbytes
        is_scale = name.endswith((SCALES, INT4_SCALES))
        match name.split(".")[-2]:  # the module that the weight belongs to
            # What layers add. Of a matrix in fp8 or four bits only the scales are multiplied.
            case "o_proj" | "down_proj" | "wo" | "w2" if is_scale or target.dtype not in (FP8, torch.int32):
                target.mul_(LAYER_GAIN)
            case "embed_tokens" | "tok_embeddings":
                target.mul_(math.sqrt(target.shape[1]))
                target[:, 0] = CONSTANT
            case "eh_proj":  # a draft layer's input, which takes the constant from the embedding
                target[0] = 0
                target[0, 0] = 1
            case "q_a_proj" if not is_scale:  # element 0 of the query latent reads the constant alone
                self._put(target[0], torch.zeros(target.shape[1]))
                self._put(target[0, :1], self._in_units(target, torch.tensor([SHARED_QUERY / CONSTANT])))
            case "q_a_layernorm":
                self._query_norms.append((target, SHARED_QUERY))
            case "q_input_norm" if name.endswith("weight"):
                self._query_norms.append((target, CONSTANT))
            case "wq_b" if not is_scale:  # the indexer's queries
                self._put_shared_queries(name, target)
            case "weights_proj":  # the weights of the indexer's heads
                signs = torch.tensor([1.0, -1.0]).repeat(len(target) // 2)
                target.zero_()
                self._put(target[:, 0], signs / CONSTANT)

    def _put_shared_queries(self, name: str, target: Tensor) -> None:
        """Give all heads the shared query; heads come in pairs of opposite sign, as in ``make_synthetic``."""
        spec, generator = self._spec, torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shared = shared_query(
            lambda size: torch.randn(size, generator=generator),
            spec.index_head_dim,
            spec.qk_rope_head_dim,
            norm=1.0,
        )
        if spec.family.interleaves_index_rope:  # RoPE pairs element i with i + 1, not with i + half
            rope = shared[: spec.qk_rope_head_dim]
            rope.copy_(rope.view(2, -1).T.flatten())
        pairs = target.view(-1, 2, spec.index_head_dim, target.shape[1])
        for first, second in pairs:
            self._put(first[:, 0], self._in_units(target, shared))
            self._put(second, -first.float())

    @staticmethod
    def _in_units(target: Tensor, values: Tensor) -> Tensor:
        """Return ``values`` as they are stored: fp8 matrices are divided by the size of their scales."""
        return values * math.sqrt(target.shape[1]) if target.dtype == FP8 else values

    @staticmethod
    def _put(target: Tensor, values: Tensor) -> None:
        target.copy_(values.to(target.device).to(target.dtype))
