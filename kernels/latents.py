"""The steps of MLA between projections and attention: norms of latents, rotations, the heads' matrices.

A layer's attention (``hisparse_pd.core.model.attention``) calls ``finish_latents``, then ``index_queries``
and ``latent_queries`` before attention, and ``lift_values`` after it. Results of projections come in parts,
[parts, num_tokens, columns], which are added up in order (``kernels.block_linear``). On a GPU each function
is one launch for few tokens, and few launches for many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.fp8_rows import Activations, Rounding, are_few, round_rows
from hisparse_pd.kernels.latent_vectors import IndexVectors, LatentNorms, Latents, Rotation
from hisparse_pd.kernels.norms import add_parts
from hisparse_pd.kernels.rope import rotate
from hisparse_pd.kernels.row_math import matmul_heads, sigmoid


def finish_latents(
    q_a: Tensor | None,
    kv_a: Tensor | None,
    norms: LatentNorms,
    rotation: Rotation,
    rounding: Rounding | None,
    *,
    keeps_raw: bool = False,
    index_keys: Tensor | None = None,
    vectors: IndexVectors | None = None,
    head_weights: Tensor | None = None,
) -> Latents:
    """Return a layer's latents, from the results of its first projections.

    ``q_a``: [parts, num_tokens, q_lora_rank], or None for no query latent. ``kv_a``: [parts, num_tokens,
    item_dim], or None for no item. With an indexer: ``index_keys`` [parts, num_tokens, index_head_dim],
    ``vectors`` and, unless only keys are wanted, ``head_weights``, float32 [parts, num_tokens, heads], which
    are multiplied here by ``heads ** -0.5``. ``rotation``: cos and sin, [num_tokens, rope_dim / 2].
    ``rounding``: the rounding of the normed query latent, if any. ``keeps_raw``: whether the query latent
    without its norm follows the normed one in ``Latents.q.dense``, [num_tokens, 2 * q_lora_rank].
    """
    dtype = norms.dtype
    if rotation[0].device.type == "cuda":
        from hisparse_pd.kernels.triton_latents import finish_latents_triton

        return finish_latents_triton(
            q_a, kv_a, norms, rotation, rounding, index_keys, vectors, head_weights, keeps_raw=keeps_raw
        )
    q = item = keys = weights = None
    # Each projection comes with its norm's weight or its vectors; the second tests are for the type checker.
    if q_a is not None and norms.q_weight is not None:
        raw = add_parts(q_a).to(dtype)
        normed = torch.nn.functional.rms_norm(raw, norms.q_weight.shape, norms.q_weight, norms.q_eps)
        dense = torch.cat((normed, raw), dim=-1) if keeps_raw else normed
        q = Activations(dense, None if rounding is None else round_rows(normed, rounding))
    if kv_a is not None and norms.kv_weight is not None:
        size = len(norms.kv_weight)
        latent, k_rope = add_parts(kv_a).to(dtype).tensor_split([size], dim=-1)
        latent = torch.nn.functional.rms_norm(latent, (size,), norms.kv_weight, norms.kv_eps)
        k_rope = rotate(k_rope[:, None], *rotation, is_interleaved=True)[:, 0]
        item = torch.cat((latent, k_rope), dim=-1)
    if index_keys is not None and vectors is not None:
        keys = vectors.finish_keys(add_parts(index_keys).to(dtype), rotation)
    if head_weights is not None:
        weights = add_parts(head_weights) * head_weights.shape[2] ** -0.5
    return Latents(q, item, keys, weights)


def latent_queries(q: Tensor, key_up: Tensor, rotation: Rotation) -> Tensor:
    """Return [num_tokens, heads, latent_dim + rope_dim]: each head's query, projected into the latent space,
    and its rotated part.

    ``q``: [parts, num_tokens, heads, nope_dim + rope_dim]; ``key_up``: [heads, nope_dim, latent_dim].
    """
    heads, nope_dim, latent_dim = key_up.shape
    num_tokens = q.shape[1]
    rope_dim = q.shape[3] - nope_dim
    out = torch.empty((num_tokens, heads, latent_dim + rope_dim), dtype=key_up.dtype, device=q.device)
    if are_few(num_tokens, q.device) and key_up.dtype == torch.bfloat16:
        from hisparse_pd.kernels.triton_heads import latent_queries_triton

        latent_queries_triton(q, key_up, *rotation, out)
        return out
    q_nope, q_rope = add_parts(q).to(key_up.dtype).tensor_split([nope_dim], dim=-1)
    matmul_heads(q_nope, key_up, out=out[..., :latent_dim])
    rotate(q_rope, *rotation, is_interleaved=True, out=out[..., latent_dim:])
    return out


def index_queries(queries: Tensor, vectors: IndexVectors, rotation: Rotation, dtype: torch.dtype) -> Tensor:
    """Return rotated index queries [num_tokens, heads, dim]; ``queries``: [parts, num_tokens, heads *
    dim]."""
    dim = len(vectors.key_weight)
    if queries.device.type == "cuda":
        from hisparse_pd.kernels.triton_heads import index_queries_triton

        return index_queries_triton(queries, dim, vectors, rotation, dtype)
    by_head = add_parts(queries).to(dtype).view(queries.shape[1], -1, dim)
    return vectors.rotate(by_head, rotation)


def lift_values(
    attended: Tensor, value_up: Tensor, gate: Tensor | None, rounding: Rounding | None
) -> Activations:
    """Project attention's results from the latent space to each head's values.

    ``attended``: [num_tokens, heads, latent_dim]; each head is multiplied by its matrix of ``value_up``
    [heads, latent_dim, value_dim]. Returns [num_tokens, heads * value_dim].

    ``gate``: [parts, num_tokens, heads, value_dim], whose sigmoid multiplies the values.
    """
    num_tokens, (heads, _, value_dim) = len(attended), value_up.shape
    if value_up.dtype == torch.bfloat16 and are_few(num_tokens, attended.device):
        from hisparse_pd.kernels.triton_heads import lift_values_triton

        if rounding is None or value_dim % BLOCK == 0:  # else a block would cross heads, and is rounded below
            return lift_values_triton(attended, value_up, gate, rounding)
        dense = lift_values_triton(attended, value_up, gate, None).dense
        return Activations(dense, round_rows(dense, rounding))
    values = torch.empty((num_tokens, heads, value_dim), dtype=attended.dtype, device=attended.device)
    matmul_heads(attended, value_up, out=values)
    if gate is not None:
        factors = sigmoid(add_parts(gate).to(values.dtype).float())
        values = (values * factors).to(values.dtype)
    dense = values.flatten(1)
    return Activations(dense, None if rounding is None else round_rows(dense, rounding))
