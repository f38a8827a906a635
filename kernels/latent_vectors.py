"""The latents of a layer and its indexer's vectors, and what they are made by (``kernels.latents``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.kernels.fp8_rows import Activations
from hisparse_pd.kernels.rope import rotate
from hisparse_pd.kernels.row_math import linear

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each float32 [num_tokens, rope_dim / 2]."""


@dataclass(frozen=True)
class LatentNorms:
    """RMS norms of both latents of a layer, in ``dtype``, the model's; None where there is no such latent."""

    q_weight: Tensor | None
    q_eps: float
    kv_weight: Tensor | None
    kv_eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class IndexVectors:
    """How a layer's index keys, and queries, are finished. ``hadamard``: see ``kernels.hadamard``; None: they
    are not spread."""

    key_weight: Tensor
    """float32, of the layer norm of keys; so are ``key_bias`` and ``key_eps``."""
    key_bias: Tensor
    key_eps: float
    is_interleaved: bool
    hadamard: Tensor | None

    def finish_keys(self, keys: Tensor, rotation: Rotation) -> Tensor:
        """[num_tokens, dim] of what the projection made of them."""
        wide = torch.nn.functional.layer_norm(
            keys.float(), keys.shape[1:], self.key_weight, self.key_bias, self.key_eps
        )
        return self.turn(wide.to(keys.dtype)[:, None], rotation)[:, 0]

    def turn(self, vectors: Tensor, rotation: Rotation) -> Tensor:
        """[num_tokens, heads, dim], rotated and spread."""
        rotated = rotate(vectors, *rotation, is_interleaved=self.is_interleaved)
        return rotated if self.hadamard is None else linear(rotated, self.hadamard)


@dataclass(frozen=True)
class Latents:
    """What a layer makes of its hidden states before it looks at any other token."""

    q: Activations | None
    """The query latent behind its norm, [num_tokens, q_lora_rank]; where the raw one is kept, its dense form
    has that behind it, [num_tokens, 2 * q_lora_rank]."""
    item: Tensor | None
    """[num_tokens, item_dim]: the KV latent behind its norm, then the rotated key."""
    index_keys: Tensor | None
    """[num_tokens, index_head_dim]"""
    head_weights: Tensor | None
    """float32 [num_tokens, index heads]"""
