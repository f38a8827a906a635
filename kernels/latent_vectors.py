"""The types that ``kernels.latents`` takes and returns: a layer's latents, and the parameters that make them.

The latents are MLA's compressed query and KV. Where a layer has an indexer, its keys, queries and head
weights belong to them.
"""

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
    """RMS norms of a layer's query and KV latent; a weight is None if the layer has no such latent.
    ``dtype``: the model's."""

    q_weight: Tensor | None
    q_eps: float
    kv_weight: Tensor | None
    kv_eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class IndexVectors:
    """Parameters of the last steps of a layer's index keys and queries: the keys' norm, and rotations."""

    key_weight: Tensor
    """Weight of the layer norm of keys, float32, as is ``key_bias``."""
    key_bias: Tensor
    key_eps: float
    is_interleaved: bool
    """Whether the rotary embedding pairs neighbours (``kernels.rope``)."""
    hadamard: Tensor | None
    """The matrix that rotates keys and queries (``kernels.hadamard``), or None."""

    def finish_keys(self, keys: Tensor, rotation: Rotation) -> Tensor:
        """Norm and rotate ``keys``, the result of their projection. Returns [num_tokens, dim]."""
        wide = torch.nn.functional.layer_norm(
            keys.float(), keys.shape[1:], self.key_weight, self.key_bias, self.key_eps
        )
        return self.rotate(wide.to(keys.dtype)[:, None], rotation)[:, 0]

    def rotate(self, vectors: Tensor, rotation: Rotation) -> Tensor:
        """Rotate ``vectors`` [num_tokens, heads, dim] by their positions, and by the Hadamard matrix, if
        any."""
        rotated = rotate(vectors, *rotation, is_interleaved=self.is_interleaved)
        return rotated if self.hadamard is None else linear(rotated, self.hadamard)


@dataclass(frozen=True)
class Latents:
    """Vectors that a layer makes of its hidden states before attention; None where it has none, or where the
    caller wants none."""

    q: Activations | None
    """The normed query latent, [num_tokens, q_lora_rank]. If the raw latent is kept, it follows in the dense
    form, [num_tokens, 2 * q_lora_rank]."""
    item: Tensor | None
    """[num_tokens, item_dim]: the normed KV latent, then the rotated key."""
    index_keys: Tensor | None
    """[num_tokens, index_head_dim]"""
    head_weights: Tensor | None
    """float32 [num_tokens, index heads], multiplied by (number of index heads) ** -0.5."""
