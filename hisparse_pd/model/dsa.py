"""The DSA model's forward: transformers' modules around our own attention.

transformers supplies the configuration, embeddings, MLP and MoE blocks and the LM head
(``hisparse_pd.model.loader``). Attention is multi-head latent attention in its absorbed form, in prefill as
in decode: queries are moved into the latent space, so that the KV of a token is one item ``[latent, rotated
key]`` that all heads share. Where items and indexer keys live, and which slots a position has, is the
business of a ``KvAccess``; the model keeps no per-request state.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hisparse_pd.model.block_linear import JoinedLinears, parts_of, rounding_of
from hisparse_pd.model.experts import RoutedExperts
from hisparse_pd.model.feed_forward import FeedForward
from hisparse_pd.model.rank_group import RankGroup
from hisparse_pd.model.spec import ModelSpec
from hisparse_pd.vocabulary import CheckpointError
from kernels.expert_choice import narrow_product
from kernels.fp8_rows import Activations, Rounding
from kernels.hadamard import hadamard_matrix
from kernels.latent_vectors import IndexVectors, LatentNorms, Latents, Rotation
from kernels.latents import finish_latents, index_queries, latent_queries, lift_values
from kernels.norms import NormGate, add_norm
from kernels.row_math import softcap

_CHANGING_ANGLES = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies follow the length."""
_NO_DRAFT_LAYER = "this node runs no draft layer: num_draft_layers of its model is 0"


class KvAccess(Protocol):
    """Where a forward's keys are written and read; one object a forward, tokens in the forward's order."""

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        """Store the new tokens' items [num_tokens, item_dim], unless the layer attends to another one's, and
        their indexer keys [num_tokens, index_head_dim], unless it shares an index. Called for every layer."""

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        """Positions, int32 [num_tokens, index_topk], -1 for none, that each token attends to in this group.

        ``q_index``: [num_tokens, num_index_heads, index_head_dim]; ``weights``: float32 [num_tokens,
        num_index_heads]. Called after ``write`` of the group's first layer.
        """

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        """Attention of ``q`` [num_tokens, num_heads, item_dim] over ``positions``, the last ``select``'s
        result.

        Returns [num_tokens, num_heads, kv_lora_rank].
        """


@dataclass(frozen=True)
class Places:
    """What a forward makes of its tokens' positions, int64 [num_tokens]; some of it when a layer asks."""

    positions: Tensor
    rotation: Rotation

    @cached_property
    def no_rotation(self) -> Rotation:
        """That of layers without rope, which turns nothing."""
        cos, sin = self.rotation
        return torch.ones_like(cos), torch.zeros_like(sin)

    @cached_property
    def logs(self) -> Tensor:
        """float32 [num_tokens]: the logarithm of how many positions a token can see."""
        return (self.positions + 1).double().log().float()  # in float64, so that a row's bits are its own


class DsaModel:
    """Forward of a model of one of ``hisparse_pd.model.families`` over a ``KvAccess``.

    ``ranks``: of the node, when they have the routed experts in common. Then all of them make each forward.
    """

    def __init__(self, spec: ModelSpec, hf_model: Any, ranks: RankGroup | None = None) -> None:
        self.spec = spec
        self.ranks = ranks
        self._embed = hf_model.model.embed_tokens
        self._rotary = hf_model.model.rotary_emb
        self._inv_freq = _inv_freq(self._rotary)
        self._softcap: float | None = getattr(hf_model.config, "final_logit_softcapping", None)
        self._norm = _Norm(hf_model.model.norm)
        latent_eps = _latent_eps(spec, hf_model.config)
        is_silu = hf_model.config.hidden_act == "silu"
        self._lm_head = hf_model.lm_head
        self._layers = [
            _Layer(spec, number, module, latent_eps, is_silu)
            for number, module in enumerate(hf_model.model.layers[: spec.num_layers])
        ]
        self._draft_layer: _DraftLayer | None = None
        if spec.num_draft_layers:
            self._draft_layer = _DraftLayer(spec, hf_model, latent_eps, is_silu)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._embed.weight.device
        return device

    @property
    def num_heads(self) -> int:
        return self._layers[0].num_heads

    @property
    def hidden_size(self) -> int:
        return int(self._embed.weight.shape[1])

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, kv: KvAccess, logit_rows: Tensor | None
    ) -> Tensor:
        """Run new tokens through all layers.

        ``token_ids``, ``positions``: int64 [num_tokens], of any mix of requests, as ``kv`` knows them.
        ``logit_rows``: int64 [n], tokens whose logits are wanted; None: all. Returns float32 [n, vocab_size].
        """
        return self._forward(token_ids, positions, kv, logit_rows)[0]

    @torch.inference_mode()
    def forward_with_hidden(
        self, token_ids: Tensor, positions: Tensor, kv: KvAccess, logit_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``forward``, which also returns the hidden states behind the final norm, [num_tokens, hidden_size],
        as ``logits`` and ``draft`` take them."""
        logits, hidden = self._forward(token_ids, positions, kv, logit_rows, with_hidden=True)
        assert hidden is not None
        return logits, hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size], of ``hidden`` [n, hidden_size] as ``forward_with_hidden`` returns them."""
        logits: Tensor = self._lm_head(hidden).float()
        return logits if self._softcap is None else softcap(logits, self._softcap)

    @torch.inference_mode()
    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        kv: KvAccess,
        logit_rows: Tensor,
        *,
        selected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run rows through the MTP layer, which guesses the token two positions on.

        A row is a position i: ``positions`` int64 [num_tokens]; ``hidden`` [num_tokens, hidden_size], what
        ``forward_with_hidden`` returned for position i; ``token_ids`` int64 [num_tokens], the token of
        position i + 1. ``logit_rows`` as in ``forward``. Writes and reads layer ``spec.num_layers`` of
        ``kv``. ``selected``: int32 [num_tokens, index_topk], what ``kv.attend`` gets; then the layer runs no
        indexer, and writes no indexer keys. Returns logits float32 [n, vocab_size] of the token of position
        i + 2, and [num_tokens, hidden_size]: what stands for ``hidden`` of position i + 1 when the guess is
        its row's token. Raises ValueError without a draft layer.
        """
        if self._draft_layer is None:
            raise ValueError(_NO_DRAFT_LAYER)
        places = self._places(hidden, positions)
        return self._draft_layer.forward(token_ids, hidden, places, kv, logit_rows, selected)

    @torch.inference_mode()
    def write_draft_kv(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, kv: KvAccess) -> None:
        """What ``draft`` of these rows writes to the MTP layer's KV and index keys, and no guess: the layer
        sees these positions later as if it had guessed behind them. Raises ValueError without a draft layer.
        """
        if self._draft_layer is None:
            raise ValueError(_NO_DRAFT_LAYER)
        self._draft_layer.write(token_ids, hidden, self._places(hidden, positions), kv)

    @torch.inference_mode()
    def forward_of_others(self) -> None:
        """Take part in a forward that other ranks make, with this rank's experts and no token of its own."""
        hidden = self._embed.weight[:0]
        for layer in self._layers:
            layer.forward_of_others(hidden)

    @property
    def has_own_experts(self) -> bool:
        """Whether the routed experts are ours, not transformers'."""
        return any(isinstance(layer.experts, RoutedExperts) for layer in self._layers)

    def expect_tokens(self, num_tokens: int) -> None:
        """How many the rank with most computes in the forwards from now on, where there are ranks."""
        if self.ranks is not None:
            self.ranks.step_tokens = num_tokens

    @torch.inference_mode()
    def draft_of_others(self) -> None:
        """``forward_of_others`` for a ``draft``. Nothing without a draft layer."""
        if self._draft_layer is not None:
            self._draft_layer.forward_of_others(self._embed.weight[:0])

    @torch.inference_mode()
    def forward_by_layer(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KvAccess,
        logit_rows: Tensor | None,
        *,
        with_hidden: bool = False,
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """``forward_with_hidden``, which stops after each layer, so that several can be enqueued layer by
        layer. Without a draft layer the result has hidden states only ``with_hidden``."""
        hidden: Tensor = self._embed(token_ids)
        added: list[Tensor] = []
        places = self._places(hidden, positions)
        selected: Tensor | None = None
        for layer in self._layers:
            hidden, added, selected = layer.forward(hidden, added, places, kv, selected)
            yield
        normed = self._norm(hidden, added)[1].dense
        logits = self.logits(normed if logit_rows is None else normed[logit_rows])
        return logits, normed if self._draft_layer is not None or with_hidden else None

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KvAccess,
        logit_rows: Tensor | None,
        *,
        with_hidden: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        layers = self.forward_by_layer(token_ids, positions, kv, logit_rows, with_hidden=with_hidden)
        while True:
            try:
                next(layers)
            except StopIteration as end:
                result: tuple[Tensor, Tensor | None] = end.value
                return result

    def _places(self, hidden: Tensor, positions: Tensor) -> Places:
        rotary = self._rotary
        if hidden.is_cuda and rotary.rope_type not in _CHANGING_ANGLES:
            from kernels.triton_rope import angles

            return Places(positions, angles(positions, self._inv_freq, rotary.attention_scaling))
        in_float32 = hidden.new_empty(0, dtype=torch.float32)  # whatever the model's dtype is
        cos, sin = self._rotary(in_float32, positions[None])
        half = cos.shape[-1] // 2
        return Places(positions, (cos[0, :, :half], sin[0, :, :half]))


def _inv_freq(rotary: Any) -> Tensor:
    """float32 [rope_dim / 2]; a checkpoint may have learned what they are to be multiplied by."""
    inv_freq: Tensor = rotary.inv_freq
    return inv_freq.float() * rotary.alpha.float().exp() if hasattr(rotary, "alpha") else inv_freq


def _latent_eps(spec: ModelSpec, config: Any) -> float | None:
    return float(config.rms_norm_eps) if spec.family.has_configured_latent_eps else None


class _Norm:
    """A norm of transformers', with its gate if it has one (A.X-K2), the sum in front of it, and the rounding
    that what follows wants."""

    def __init__(self, module: Any, rounding: Rounding | None = None) -> None:
        gate = getattr(module, "mlp", None)
        self._gate = None if gate is None else NormGate.of(gate.fc1.weight, gate.fc2.weight)
        norm = module if gate is None else module.norm
        self._weight: Tensor = norm.weight
        self._eps: float = norm.variance_epsilon
        self._rounding = rounding

    def __call__(self, hidden: Tensor | None, added: Sequence[Tensor] = ()) -> tuple[Tensor, Activations]:
        """See ``kernels.norms.add_norm``."""
        return add_norm(hidden, added, self._weight, self._eps, self._rounding, self._gate)


class _Layer:
    """One decoder layer: attention, then an MLP or experts. What both add is added up by the next norm."""

    def __init__(
        self, spec: ModelSpec, number: int, module: Any, latent_eps: float | None, is_silu: bool
    ) -> None:
        self._attention = _Attention(spec, number, module.self_attn, latent_eps)
        self._feed_forward = FeedForward(module.mlp, spec.family, is_silu=is_silu)
        self._input_norm = _Norm(module.input_layernorm, self._attention.rounding)
        self._post_attention_norm = _Norm(module.post_attention_layernorm, self._feed_forward.rounding)

    @property
    def num_heads(self) -> int:
        return self._attention.num_heads

    @property
    def experts(self) -> Any:
        """The routed ones; None in a dense layer."""
        return self._feed_forward.experts

    def forward_of_others(self, hidden: Tensor) -> None:
        self._feed_forward.forward_of_others(hidden)

    def forward(
        self,
        hidden: Tensor | None,
        added: Sequence[Tensor],
        places: Places,
        kv: KvAccess,
        selected: Tensor | None,
        *,
        runs_indexer: bool = True,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Hidden states are the sum of ``hidden`` and what is ``added`` (``kernels.norms``), before the layer
        and behind it. ``selected``: by a layer or pass before this one; where there is no indexer to run, it
        holds.
        """
        hidden, x = self._input_norm(hidden, added)
        attended, selected = self._attention.forward(x, places, kv, selected, runs_indexer=runs_indexer)
        hidden, x = self._post_attention_norm(hidden, [attended])
        return hidden, self._feed_forward(x), selected

    def write(self, added: Sequence[Tensor], places: Places, kv: KvAccess) -> None:
        """What ``forward`` writes, and nothing else of it."""
        self._attention.write(self._input_norm(None, added)[1], places, kv)


class _DraftLayer:
    """The MTP layer: a decoder layer over what is known of two neighbouring positions.

    As its authors published it, and vLLM and SGLang run it: the hidden state behind the model's final norm
    comes second, position 0 is as any other, and what goes on to the next guess is behind the layer's norm.
    Embedding and LM head are the model's, unless the checkpoint has others here.
    """

    def __init__(self, spec: ModelSpec, hf_model: Any, latent_eps: float | None, is_silu: bool) -> None:
        module = hf_model.model.layers[spec.num_layers]
        self._embed = getattr(module, "embed_tokens", hf_model.model.embed_tokens)
        self._embed_norm = _Norm(module.enorm)
        self._hidden_norm = _Norm(module.hnorm)
        self._join = module.eh_proj
        self._layer = _Layer(spec, spec.num_layers, module, latent_eps, is_silu)
        self._norm = _Norm(module.shared_head.norm)
        self._lm_head = getattr(module.shared_head, "head", hf_model.lm_head)

    def forward_of_others(self, hidden: Tensor) -> None:
        self._layer.forward_of_others(hidden)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        places: Places,
        kv: KvAccess,
        logit_rows: Tensor,
        selected: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        joined = [self._joined(token_ids, hidden)]
        hidden, added, _ = self._layer.forward(
            None, joined, places, kv, selected, runs_indexer=selected is None
        )
        normed = self._norm(hidden, added)[1].dense
        logits: Tensor = self._lm_head(normed[logit_rows])
        return logits.float(), normed

    def write(self, token_ids: Tensor, hidden: Tensor, places: Places, kv: KvAccess) -> None:
        self._layer.write([self._joined(token_ids, hidden)], places, kv)

    def _joined(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[parts, num_tokens, hidden_size]"""
        embedded = self._embed_norm(self._embed(token_ids))[1].dense
        both = torch.cat((embedded, self._hidden_norm(hidden)[1].dense), dim=-1)
        return parts_of(self._join, Activations(both))


class _Attention:
    """Absorbed multi-head latent attention of one layer, with its indexer and KV of its own when it has them.

    Without rope, queries and keys have a rotated part all the same, which is zero.
    """

    def __init__(self, spec: ModelSpec, number: int, module: Any, latent_eps: float | None) -> None:
        self._number = number
        self._group = spec.index_group_of_layer[number]
        self.num_heads: int = module.num_heads
        self._scale: float = module.scaling
        indexer = module.indexer
        first = module.q_a_proj if hasattr(module, "q_a_proj") else module.q_proj
        keys = [] if indexer is None else [indexer.wk]
        self._has_kv = module.kv_a_proj_with_mqa is not None
        self._of_hidden = JoinedLinears(
            [first, *keys, *([module.kv_a_proj_with_mqa] if self._has_kv else [])]
        )
        self._queries = _queries_of(module)
        self._norms = _latent_norms(spec, module, latent_eps)
        self._missing_rope_dim = 0 if getattr(module, "use_rope", True) else spec.qk_rope_head_dim
        self._o_proj = module.o_proj
        up = module.kv_b_proj.weight.view(self.num_heads, -1, module.kv_lora_rank)
        # [num_heads, qk_nope_head_dim, kv_lora_rank] and [num_heads, kv_lora_rank, v_head_dim]
        self._key_up = up[:, : module.qk_nope_head_dim].contiguous()
        self._value_up = up[:, module.qk_nope_head_dim :].transpose(1, 2).contiguous()
        self._indexer = None if indexer is None else _Indexer(spec, indexer)

    @property
    def rounding(self) -> Rounding | None:
        """Of the input; None where nothing takes it so."""
        return self._of_hidden.rounding

    def forward(
        self, x: Activations, places: Places, kv: KvAccess, selected: Tensor | None, *, runs_indexer: bool
    ) -> tuple[Tensor, Tensor]:
        """What to add to the hidden states, [parts, num_tokens, hidden_size], and what was selected."""
        indexer = self._indexer if runs_indexer else None
        rotation = self._rotation(places)
        q_a, latents = self._write(x, rotation, kv, indexer, asks=True)
        normed = x if latents.q is None else latents.q
        q, gate, queries = self._queries(normed, q_a, places, with_index=indexer is not None)
        if self._missing_rope_dim:
            q = functional.pad(q, (0, self._missing_rope_dim))
        if indexer is not None and queries is not None and latents.head_weights is not None:
            q_index = index_queries(queries, indexer.vectors, rotation, x.dense.dtype)
            selected = kv.select(self._group, q_index, latents.head_weights)
        if selected is None:
            raise CheckpointError(
                f"layer {self._number} shares an index, but no layer before it has an indexer"
            )
        attended = kv.attend(self._number, latent_queries(q, self._key_up, rotation), selected, self._scale)
        values = lift_values(attended, self._value_up, gate, rounding_of(self._o_proj))
        return parts_of(self._o_proj, values), selected

    def write(self, x: Activations, places: Places, kv: KvAccess) -> None:
        """What ``forward`` writes, and nothing else of it."""
        self._write(x, self._rotation(places), kv, self._indexer, asks=False)

    def _rotation(self, places: Places) -> Rotation:
        return places.no_rotation if self._missing_rope_dim else places.rotation

    def _write(
        self, x: Activations, rotation: Rotation, kv: KvAccess, indexer: _Indexer | None, *, asks: bool
    ) -> tuple[Tensor, Latents]:
        """Write what the layer has of items and, with ``indexer``, its keys. Returns the raw query latent, or
        the queries where there is none, and what was made.

        ``asks``: queries follow, so that their latent is rounded and head weights are wanted.
        """
        q_a, *made = self._of_hidden(x)
        kv_a = made.pop() if self._has_kv else None
        if kv_a is not None and self._missing_rope_dim:
            kv_a = functional.pad(kv_a, (0, self._missing_rope_dim))
        latents = finish_latents(
            None if self._norms.q_weight is None else q_a,
            kv_a,
            self._norms,
            rotation,
            self._queries.rounding if asks else None,
            keeps_raw=asks and self._queries.takes_raw,
            index_keys=None if indexer is None else made[0],
            vectors=None if indexer is None else indexer.vectors,
            head_weights=indexer.head_weights(x) if asks and indexer is not None else None,
        )
        kv.write(self._number, latents.item, latents.index_keys)
        return q_a, latents


def _latent_norms(spec: ModelSpec, module: Any, eps: float | None) -> LatentNorms:
    """``eps``: of both norms; None: each has its own."""
    norms = [getattr(module, name, None) for name in ("q_a_layernorm", "kv_a_layernorm")]
    weights = [None if norm is None else norm.weight for norm in norms]
    own = [0.0 if norm is None else norm.variance_epsilon if eps is None else eps for norm in norms]
    return LatentNorms(weights[0], own[0], weights[1], own[1], spec.dtype)


def _queries_of(module: Any) -> _Queries | _GatedQueries | _DirectQueries:
    if hasattr(module, "q_gate_proj"):
        return _GatedQueries(module)
    return _Queries(module) if hasattr(module, "q_b_proj") else _DirectQueries(module)


class _Queries:
    """What becomes of the latent query: the heads' queries and, in the same product, the indexer's."""

    takes_raw = False
    """Whether ``normed`` is to have the latent query before its norm behind it."""

    def __init__(self, module: Any) -> None:
        queries = [] if module.indexer is None else [module.indexer.wq_b]
        self._linears = JoinedLinears([module.q_b_proj, *queries])
        self._num_heads: int = module.num_heads

    @property
    def rounding(self) -> Rounding | None:
        """Of the latent query behind its norm."""
        return self._linears.rounding

    def __call__(
        self, normed: Activations, raw: Tensor, places: Places, *, with_index: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of the latent query behind its norm (``Latents.q``) and, in parts, before it: queries [parts,
        num_tokens, num_heads, head_dim]; a gate of each head's values, so too, or None; and ``with_index``
        what wq_b makes, [parts, num_tokens, columns]."""
        q, *index_queries = self._linears(normed) if with_index else [self._linears.first(normed)]
        return _of_heads(q, self._num_heads), None, next(iter(index_queries), None)


class _GatedQueries:
    """``_Queries`` of A.X-K2: one projection of the latent query, normed and raw, makes queries and gates."""

    takes_raw = True

    def __init__(self, module: Any) -> None:
        self._projection = module.q_gate_proj
        self._index_queries = module.indexer.wq_b
        self._num_heads: int = module.num_heads
        self._parts: list[int] = [module.qk_head_dim, module.v_head_dim]

    @property
    def rounding(self) -> Rounding | None:
        """Of the latent query behind its norm."""
        return rounding_of(self._index_queries)

    def __call__(
        self, normed: Activations, raw: Tensor, places: Places, *, with_index: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        made = _of_heads(parts_of(self._projection, Activations(normed.dense)), self._num_heads)
        q, gate = torch.split(made, self._parts, dim=-1)
        normed = Activations(normed.dense.chunk(2, dim=-1)[0], normed.rounded)
        return q, gate, parts_of(self._index_queries, normed) if with_index else None


class _DirectQueries:
    """``_Queries`` of Mistral-Large-4: of the hidden state itself, and scaled by the token's position."""

    rounding: Rounding | None = None
    """There is no latent query."""
    takes_raw = False

    def __init__(self, module: Any) -> None:
        self._scaling = _PositionScaling(module.softmax_scaling)
        self._num_heads: int = module.num_heads
        self._indexer: Any = module.indexer
        if module.indexer is not None:
            self._index_scaling = _PositionScaling(module.indexer.softmax_scaling)

    def __call__(
        self, normed: Activations, raw: Tensor, places: Places, *, with_index: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``normed``: the hidden state behind its norm; ``raw``: what q_proj made of it."""
        q = self._scaling(_of_heads(raw, self._num_heads), places)
        if not with_index:
            return q, None, None
        indexer = self._indexer
        queries = parts_of(indexer.wq_b, Activations(indexer.q_input_norm(normed.dense)))
        return q, None, self._index_scaling(_of_heads(queries, indexer.n_heads), places).flatten(2)


class _PositionScaling:
    """Multiplies each head's queries by a line in the logarithm of how many positions a token can see."""

    def __init__(self, module: Any) -> None:
        self._slope: Tensor = module.scale.float()
        self._offset: Tensor = module.bias.float()

    def __call__(self, q: Tensor, places: Places) -> Tensor:
        """``q``: [parts, num_tokens, heads, dim]; so is the result, in the same dtype."""
        factors = places.logs[:, None] * self._slope + self._offset
        return (q * factors[:, :, None]).to(q.dtype)


def _of_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:2], num_heads, -1)


class _Indexer:
    """The lightning indexer's side of the projections; the scoring itself is ``kernels.indexer``."""

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
        """float32 [parts, num_tokens, heads], see ``kernels.latents``."""
        return narrow_product(x.dense, self._head_matrix)
