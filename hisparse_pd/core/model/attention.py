"""A layer's attention: write each token's item and indexer key, select positions, attend to them.

It is multi-head latent attention in its absorbed form, in prefill as in decode: queries are moved into the
latent space, and a token's KV is one item ``[latent, rotated key]`` that all heads share. A ``KvAccess``
knows where items and indexer keys are stored. Some models have gates of the heads' values, layers without
rope, layers that read an earlier layer's KV, or queries that are made without a latent: transformers' modules
and the ``ModelSpec`` tell which.

Results of linear layers are in parts, [parts, ...], whose sum is the result: the kernel that reads them adds
them up (``block_linear.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.block_linear import JoinedLinears, parts_of, product_of, rounding_of
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.kernels.expert_choice import narrow_product
from hisparse_pd.kernels.fp8_rows import Activations, Rounding
from hisparse_pd.kernels.hadamard import hadamard_matrix
from hisparse_pd.kernels.latent_vectors import IndexVectors, LatentNorms, Latents, Rotation
from hisparse_pd.kernels.latents import finish_latents, index_queries, latent_queries, lift_values
from hisparse_pd.kernels.norms import add_parts


class KvAccess(Protocol):
    """Writes and reads the KV of one forward; each forward has its own, with tokens in the forward's
    order."""

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        """Store the new tokens' items and indexer keys. Called for every layer.

        ``kv``: [num_tokens, item_dim]; None where the layer attends to another layer's KV. ``index_keys``:
        [num_tokens, index_head_dim]; None where the layer has no indexer.
        """

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        """Return the positions that each token attends to in an index group: int32 [num_tokens, index_topk],
        padded with -1.

        ``group``: a layer with an indexer, and the layers behind it that share its selection. ``q_index``:
        [num_tokens, num_index_heads, index_head_dim]; ``weights``: float32 [num_tokens, num_index_heads].
        Called after ``write`` of the group's first layer.
        """

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        """Return the attention of ``q`` [num_tokens, num_heads, item_dim] over ``positions``, the result of
        the last ``select``: [num_tokens, num_heads, kv_lora_rank]."""


@dataclass(frozen=True)
class Places:
    """The positions of a forward's tokens, int64 [num_tokens], and what layers compute from them."""

    positions: Tensor
    rotation: Rotation

    @cached_property
    def no_rotation(self) -> Rotation:
        """The rotation of layers without rope, which changes nothing."""
        cos, sin = self.rotation
        return torch.ones_like(cos), torch.zeros_like(sin)

    @cached_property
    def logs(self) -> Tensor:
        """The logarithm of how many positions each token can see: float32 [num_tokens]."""
        # float64, because its last bits, which may depend on the batch, vanish in the rounding to float32.
        return (self.positions + 1).double().log().float()


class Attention:
    """Absorbed multi-head latent attention of one layer, with its indexer and its own KV if it has them.

    ``module``: transformers' attention of layer ``number``. ``latent_eps``: epsilon of the latents' norms;
    None keeps each one's own. In layers without rope, the rotated parts of queries and keys are zero.
    """

    def __init__(self, spec: ModelSpec, number: int, module: Any, latent_eps: float | None) -> None:
        self._number = number
        self._group = spec.index_group_of_layer[number]
        self._scale: float = module.scaling
        indexer = module.indexer
        query_linear = module.q_a_proj if hasattr(module, "q_a_proj") else module.q_proj
        key_linears = [] if indexer is None else [indexer.wk]
        self._has_kv = module.kv_a_proj_with_mqa is not None
        self.from_hidden = JoinedLinears(
            [query_linear, *key_linears, *([module.kv_a_proj_with_mqa] if self._has_kv else [])]
        )
        """The projections of the hidden states: queries or their latent, then index keys and KV, if any."""
        self._queries = _queries_of(module)
        self.norms = _latent_norms(spec, module, latent_eps)
        self._missing_rope_dim = 0 if getattr(module, "use_rope", True) else spec.qk_rope_head_dim
        """Number of zeros to append to queries and keys in the place of rotated parts; 0 in a layer with
        rope."""
        self.o_proj = module.o_proj
        up = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
        # [num_heads, qk_nope_head_dim, kv_lora_rank] and [num_heads, kv_lora_rank, v_head_dim]
        self._key_up = up[:, : module.qk_nope_head_dim].contiguous()
        self._value_up = up[:, module.qk_nope_head_dim :].transpose(1, 2).contiguous()
        self.indexer = None if indexer is None else _Indexer(spec, indexer)

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of the input; None where no layer takes it rounded."""
        return self.from_hidden.rounding

    def forward(
        self, x: Activations, places: Places, kv: KvAccess, selected: Tensor | None, *, runs_indexer: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what to add to the hidden states, [parts, num_tokens, hidden_size], and the selection.

        ``x``: the hidden states after the layer's input norm. ``runs_indexer``: whether the layer's indexer,
        if it has one, makes a new selection; otherwise ``selected``, that of an earlier layer or pass, is
        used.
        """
        indexer = self.indexer if runs_indexer else None
        rotation = self._rotation(places)
        q_a, latents = self._write(x, rotation, kv, indexer, with_queries=True)
        normed = x if latents.q is None else latents.q  # without a latent, queries are made from the input
        queries = self._queries(normed, q_a, places, with_index=indexer is not None)
        q = queries.q
        if self._missing_rope_dim:
            q = functional.pad(q, (0, self._missing_rope_dim))
        if indexer is not None and queries.index_q is not None and latents.head_weights is not None:
            q_index = index_queries(queries.index_q, indexer.vectors, rotation, x.dense.dtype)
            selected = kv.select(self._group, q_index, latents.head_weights)
        if selected is None:
            raise CheckpointError(
                f"layer {self._number} shares an index, but no layer before it has an indexer"
            )
        attended = kv.attend(self._number, latent_queries(q, self._key_up, rotation), selected, self._scale)
        values = lift_values(attended, self._value_up, queries.gate, rounding_of(self.o_proj))
        return parts_of(self.o_proj, values), selected

    def write(self, x: Activations, places: Places, kv: KvAccess) -> None:
        """Write the KV that ``forward`` writes and no more (``DsaModel.write_draft_kv``)."""
        self._write(x, self._rotation(places), kv, self.indexer, with_queries=False)

    def _rotation(self, places: Places) -> Rotation:
        return places.no_rotation if self._missing_rope_dim else places.rotation

    def _write(
        self,
        x: Activations,
        rotation: Rotation,
        kv: KvAccess,
        indexer: _Indexer | None,
        *,
        with_queries: bool,
    ) -> tuple[Tensor, Latents]:
        """Write the layer's items, if it has its own, and the keys of an ``indexer``, if given.

        ``with_queries``: also make what queries need, the rounded query latent and the head weights. Returns
        the result of the query projection (the raw query latent, or for ``_DirectQueries`` the queries), and
        the latents.
        """
        q_a, *keys_and_kv = self.from_hidden(x)
        kv_a = keys_and_kv.pop() if self._has_kv else None
        if kv_a is not None and self._missing_rope_dim:
            kv_a = functional.pad(kv_a, (0, self._missing_rope_dim))
        latents = finish_latents(
            None if self.norms.q_weight is None else q_a,
            kv_a,
            self.norms,
            rotation,
            self._queries.rounding if with_queries else None,
            keeps_raw=with_queries and self._queries.takes_raw,
            index_keys=None if indexer is None else keys_and_kv[0],
            vectors=None if indexer is None else indexer.vectors,
            head_weights=indexer.head_weights(x) if with_queries and indexer is not None else None,
        )
        kv.write(self._number, latents.item, latents.index_keys)
        return q_a, latents


def _latent_norms(spec: ModelSpec, module: Any, eps: float | None) -> LatentNorms:
    """Return the norms of the latents. ``eps``: the epsilon of both; None keeps each one's own."""
    norms = [getattr(module, name, None) for name in ("q_a_layernorm", "kv_a_layernorm")]
    weights = [None if norm is None else norm.weight for norm in norms]
    epsilons = [0.0 if norm is None else norm.variance_epsilon if eps is None else eps for norm in norms]
    return LatentNorms(weights[0], epsilons[0], weights[1], epsilons[1], spec.dtype)


def _queries_of(module: Any) -> _Queries | _GatedQueries | _DirectQueries:
    if hasattr(module, "q_gate_proj"):
        return _GatedQueries(module)
    return _Queries(module) if hasattr(module, "q_b_proj") else _DirectQueries(module)


class _MadeQueries(NamedTuple):
    """The queries of a layer's heads and of its indexer, in parts and before rotation."""

    q: Tensor
    """[parts, num_tokens, num_heads, head_dim]"""
    gate: Tensor | None
    """Gates of the heads' values, [parts, num_tokens, num_heads, v_head_dim]; None where there are none."""
    index_q: Tensor | None
    """The indexer's queries, [parts, num_tokens, heads * dim]; None where they are not wanted."""


class _Queries:
    """Makes the heads' queries and, in the same product, the indexer's from the latent query."""

    takes_raw = False
    """Whether a row of ``normed`` has the latent query twice: after its norm, and then before it."""

    def __init__(self, module: Any) -> None:
        queries = [] if module.indexer is None else [module.indexer.wq_b]
        self._linears = JoinedLinears([module.q_b_proj, *queries])
        self._num_heads: int = module.num_heads

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of the normed latent query."""
        return self._linears.rounding

    def __call__(self, normed: Activations, raw: Tensor, places: Places, *, with_index: bool) -> _MadeQueries:
        """Return the queries of the heads, and ``with_index`` of the indexer.

        ``normed``: the latent query after its norm (``Latents.q``); ``raw``: in parts, before the norm.
        """
        q, *index_queries = self._linears(normed) if with_index else [self._linears.first(normed)]
        return _MadeQueries(_by_head(q, self._num_heads), None, next(iter(index_queries), None))


class _GatedQueries:
    """The queries of A.X-K2: one projection of the latent query, normed and raw, makes queries and gates."""

    takes_raw = True

    def __init__(self, module: Any) -> None:
        self._projection = module.q_gate_proj
        self._index_queries = module.indexer.wq_b
        self._num_heads: int = module.num_heads
        self._parts: list[int] = [module.qk_head_dim, module.v_head_dim]

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of the normed latent query, which only the indexer's projection takes rounded."""
        return rounding_of(self._index_queries)

    def __call__(self, normed: Activations, raw: Tensor, places: Places, *, with_index: bool) -> _MadeQueries:
        joined = _by_head(parts_of(self._projection, Activations(normed.dense)), self._num_heads)
        q, gate = torch.split(joined, self._parts, dim=-1)
        without_raw = Activations(normed.dense.chunk(2, dim=-1)[0], normed.rounded)
        return _MadeQueries(q, gate, parts_of(self._index_queries, without_raw) if with_index else None)


class _DirectQueries:
    """The queries of Mistral-Large-4: made from the hidden state itself, and scaled by the token's
    position."""

    rounding: Rounding | None = None  # there is no latent query
    takes_raw = False

    def __init__(self, module: Any) -> None:
        self._scaling = _PositionScaling(module.softmax_scaling)
        self._num_heads: int = module.num_heads
        self.indexer: Any = module.indexer
        if module.indexer is not None:
            self._index_scaling = _PositionScaling(module.indexer.softmax_scaling)

    def __call__(self, normed: Activations, raw: Tensor, places: Places, *, with_index: bool) -> _MadeQueries:
        """``normed``: the hidden state after its norm; ``raw``: the result of q_proj for it."""
        in_one_part = add_parts(raw).to(normed.dense.dtype)[None]
        q = self._scaling(_by_head(in_one_part, self._num_heads), places)
        if not with_index:
            return _MadeQueries(q, None, None)
        indexer = self.indexer
        queries = product_of(indexer.wq_b, indexer.q_input_norm(normed.dense))[None]
        scaled = self._index_scaling(_by_head(queries, indexer.n_heads), places)
        return _MadeQueries(q, None, scaled.flatten(2))


class _PositionScaling:
    """Scales each head's queries by a linear function of the logarithm of how many positions a token can
    see."""

    def __init__(self, module: Any) -> None:
        self._slope: Tensor = module.scale.float()
        self._offset: Tensor = module.bias.float()

    def __call__(self, q: Tensor, places: Places) -> Tensor:
        """Return ``q`` [parts, num_tokens, heads, dim] scaled, in the same shape and dtype."""
        factors = places.logs[:, None] * self._slope + self._offset
        return (q * factors[:, :, None]).to(q.dtype)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:2], num_heads, -1)


class _Indexer:
    """The lightning indexer's weights; ``kernels.indexer`` does the scoring."""

    def __init__(self, spec: ModelSpec, module: Any) -> None:
        norm = module.k_norm
        hadamard = None
        if spec.index_rotation:
            hadamard = hadamard_matrix(spec.index_head_dim, spec.dtype, norm.weight.device)
        is_interleaved = spec.family.interleaves_index_rope
        self.vectors = IndexVectors(
            norm.weight.float(), norm.bias.float(), norm.eps, is_interleaved, hadamard
        )
        self._head_matrix: Tensor = module.weights_proj.weight

    def head_weights(self, x: Activations) -> Tensor:
        """Return the heads' weights, float32 [parts, num_tokens, heads] (``kernels.latents``)."""
        return narrow_product(x.dense, self._head_matrix)
