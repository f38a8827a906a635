"""The DSA model's forward: transformers' modules around our own attention.

transformers supplies the configuration, embeddings, MLP and MoE blocks and the LM head
(``hisparse_pd.model.loader``). Attention is multi-head latent attention in its absorbed form, in prefill as
in decode: queries are moved into the latent space, so that the KV of a token is one item ``[latent, rotated
key]`` that all heads share. Where items and indexer keys live, and which slots a position has, is the
business of a ``KvAccess``; the model keeps no per-request state.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

import torch
from torch import Tensor

from hisparse_pd.model.block_linear import JoinedLinears, gated_mlp
from hisparse_pd.model.expert_router import ExpertRouter
from hisparse_pd.model.experts import RoutedExperts
from hisparse_pd.model.rank_group import RankGroup
from hisparse_pd.model.spec import ModelSpec
from hisparse_pd.vocabulary import CheckpointError
from kernels.hadamard import hadamard_matrix
from kernels.rope import rotate
from kernels.row_math import linear, matmul_heads, sigmoid, silu

_NO_DRAFT_LAYER = "this node runs no draft layer: num_draft_layers of its model is 0"


class KvAccess(Protocol):
    """Where a forward's keys are written and read; one object a forward, tokens in the forward's order."""

    def write(self, layer: int, kv: Tensor, index_keys: Tensor | None) -> None:
        """Store the new tokens' items [num_tokens, item_dim] and, unless the layer shares an index, their
        indexer keys [num_tokens, index_head_dim]."""

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


class DsaModel:
    """Forward of a model of one of ``hisparse_pd.model.families`` over a ``KvAccess``.

    ``ranks``: of the node, when they have the routed experts in common. Then all of them make each forward.
    """

    def __init__(self, spec: ModelSpec, hf_model: Any, ranks: RankGroup | None = None) -> None:
        self.spec = spec
        self.ranks = ranks
        self._embed = hf_model.model.embed_tokens
        self._rotary = hf_model.model.rotary_emb
        self._norm = _RmsNorm(hf_model.model.norm)
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
    def forward(self, token_ids: Tensor, positions: Tensor, kv: KvAccess, logit_rows: Tensor) -> Tensor:
        """Run new tokens through all layers.

        ``token_ids``, ``positions``: int64 [num_tokens], of any mix of requests, as ``kv`` knows them.
        ``logit_rows``: int64 [n], tokens whose logits are wanted. Returns float32 [n, vocab_size].
        """
        return self._forward(token_ids, positions, kv, logit_rows)[0]

    @torch.inference_mode()
    def forward_with_hidden(
        self, token_ids: Tensor, positions: Tensor, kv: KvAccess, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``forward``, which also returns the hidden states behind the final norm, [num_tokens, hidden_size],
        as ``logits`` and ``draft`` take them."""
        logits, hidden = self._forward(token_ids, positions, kv, logit_rows, with_hidden=True)
        assert hidden is not None
        return logits, hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size], of ``hidden`` [n, hidden_size] as ``forward_with_hidden`` returns them."""
        logits: Tensor = self._lm_head(hidden)
        return logits.float()

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
        rotation = self._rotation(hidden, positions)
        return self._draft_layer.forward(token_ids, hidden, rotation, kv, logit_rows, selected)

    @torch.inference_mode()
    def write_draft_kv(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, kv: KvAccess) -> None:
        """What ``draft`` of these rows writes to the MTP layer's KV and index keys, and no guess: the layer
        sees these positions later as if it had guessed behind them. Raises ValueError without a draft layer.
        """
        if self._draft_layer is None:
            raise ValueError(_NO_DRAFT_LAYER)
        self._draft_layer.write(token_ids, hidden, self._rotation(hidden, positions), kv)

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
        logit_rows: Tensor,
        *,
        with_hidden: bool = False,
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """``forward_with_hidden``, which stops after each layer, so that several can be enqueued layer by
        layer. Without a draft layer the result has hidden states only ``with_hidden``."""
        hidden = self._embed(token_ids)
        rotation = self._rotation(hidden, positions)
        selected: Tensor | None = None
        for layer in self._layers:
            hidden, selected = layer.forward(hidden, rotation, kv, selected)
            yield
        if self._draft_layer is None and not with_hidden:
            return self.logits(self._norm(hidden[logit_rows])), None
        hidden = self._norm(hidden)
        return self.logits(hidden[logit_rows]), hidden

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: KvAccess,
        logit_rows: Tensor,
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

    def _rotation(self, hidden: Tensor, positions: Tensor) -> Rotation:
        in_float32 = hidden.new_empty(0, dtype=torch.float32)  # whatever the model's dtype is
        cos, sin = self._rotary(in_float32, positions[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]


Rotation = tuple[Tensor, Tensor]
"""cos and sin, each float32 [num_tokens, qk_rope_head_dim / 2]."""


def _latent_eps(spec: ModelSpec, config: Any) -> float | None:
    return float(config.rms_norm_eps) if spec.family.has_configured_latent_eps else None


class _RmsNorm:
    """A norm of transformers' by torch's own function: one kernel on a GPU, where the module is eight."""

    def __init__(self, module: Any, eps: float | None = None) -> None:
        """``eps``: in place of the module's."""
        self._weight: Tensor = module.weight
        self._eps: float = module.variance_epsilon if eps is None else eps

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self._weight.shape, self._weight, self._eps)


class _GatedRmsNorm:
    """A norm whose result opens a gate of low rank for itself, as A.X-K2 has it."""

    def __init__(self, module: Any) -> None:
        self._norm = _RmsNorm(module.norm)
        self._down, self._up = module.mlp.fc1, module.mlp.fc2

    def __call__(self, x: Tensor) -> Tensor:
        y = self._norm(x)
        gate: Tensor = sigmoid(self._up(silu(self._down(y))).float())
        return (y * gate).to(y.dtype)


def _norm_of_hidden(module: Any) -> _RmsNorm | _GatedRmsNorm:
    return _GatedRmsNorm(module) if hasattr(module, "mlp") else _RmsNorm(module)


class _Layer:
    """One decoder layer: our attention, then transformers' MLP or MoE block with our router."""

    def __init__(
        self, spec: ModelSpec, number: int, module: Any, latent_eps: float | None, is_silu: bool
    ) -> None:
        self._input_norm = _norm_of_hidden(module.input_layernorm)
        self._attention = _Attention(spec, number, module.self_attn, latent_eps)
        self._post_attention_norm = _norm_of_hidden(module.post_attention_layernorm)
        self._mlp = module.mlp
        if hasattr(self._mlp, "gate"):
            self._mlp.gate = ExpertRouter(self._mlp.gate, spec.family.score_outside_groups)
        if is_silu and hasattr(self._mlp, "shared_experts"):
            self._mlp.shared_experts = gated_mlp(self._mlp.shared_experts)
        elif is_silu and hasattr(self._mlp, "gate_proj"):
            self._mlp = gated_mlp(self._mlp)
        for part in self._mlp.modules():
            if is_silu and hasattr(part, "act_fn"):
                part.act_fn = _Silu()

    @property
    def num_heads(self) -> int:
        return self._attention.num_heads

    @property
    def experts(self) -> Any:
        """The routed ones; None in a dense layer."""
        return getattr(self._mlp, "experts", None)

    def forward_of_others(self, hidden: Tensor) -> None:
        if isinstance(self.experts, RoutedExperts):
            self.experts.forward_of_others(hidden, self._mlp.gate.top_k)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        kv: KvAccess,
        selected: Tensor | None,
        *,
        runs_indexer: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """``selected``: by a layer or pass before this one; where there is no indexer to run, it holds."""
        attended, selected = self._attention.forward(
            self._input_norm(hidden), rotation, kv, selected, runs_indexer=runs_indexer
        )
        hidden = hidden + attended
        return hidden + self._mlp(self._post_attention_norm(hidden)), selected

    def write(self, hidden: Tensor, rotation: Rotation, kv: KvAccess) -> None:
        """What ``forward`` writes, and nothing else of it."""
        self._attention.write(self._input_norm(hidden), rotation, kv)


class _DraftLayer:
    """The MTP layer: a decoder layer over what is known of two neighbouring positions.

    As its authors published it, and vLLM and SGLang run it: the hidden state behind the model's final norm
    comes second, position 0 is as any other, and what goes on to the next guess is behind the layer's norm.
    Embedding and LM head are the model's, unless the checkpoint has others here.
    """

    def __init__(self, spec: ModelSpec, hf_model: Any, latent_eps: float | None, is_silu: bool) -> None:
        module = hf_model.model.layers[spec.num_layers]
        self._embed = getattr(module, "embed_tokens", hf_model.model.embed_tokens)
        self._embed_norm = _RmsNorm(module.enorm)
        self._hidden_norm = _RmsNorm(module.hnorm)
        self._join = module.eh_proj
        self._layer = _Layer(spec, spec.num_layers, module, latent_eps, is_silu)
        self._norm = _RmsNorm(module.shared_head.norm)
        self._lm_head = getattr(module.shared_head, "head", hf_model.lm_head)

    def forward_of_others(self, hidden: Tensor) -> None:
        self._layer.forward_of_others(hidden)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        kv: KvAccess,
        logit_rows: Tensor,
        selected: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        joined = self._joined(token_ids, hidden)
        hidden, _ = self._layer.forward(joined, rotation, kv, selected, runs_indexer=selected is None)
        hidden = self._norm(hidden)
        logits: Tensor = self._lm_head(hidden[logit_rows])
        return logits.float(), hidden

    def write(self, token_ids: Tensor, hidden: Tensor, rotation: Rotation, kv: KvAccess) -> None:
        self._layer.write(self._joined(token_ids, hidden), rotation, kv)

    def _joined(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self._embed_norm(self._embed(token_ids))
        joined: Tensor = self._join(torch.cat((embedded, self._hidden_norm(hidden)), dim=-1))
        return joined


class _Silu(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


class _Attention:
    """Absorbed multi-head latent attention of one layer, with its indexer when it has one."""

    def __init__(self, spec: ModelSpec, number: int, module: Any, latent_eps: float | None) -> None:
        self._number = number
        self._group = spec.index_group_of_layer[number]
        self.num_heads: int = module.num_heads
        self._head_dims: list[int] = [module.qk_nope_head_dim, module.qk_rope_head_dim]
        self._latent_dims: list[int] = [module.kv_lora_rank, module.qk_rope_head_dim]
        self._scale: float = module.scaling
        indexer = module.indexer
        keys = [] if indexer is None else [indexer.wk]
        self._of_hidden = JoinedLinears([module.q_a_proj, *keys, module.kv_a_proj_with_mqa])
        self._queries = _GatedQueries(module) if hasattr(module, "q_gate_proj") else _Queries(module)
        self._q_a_norm = _RmsNorm(module.q_a_layernorm, latent_eps)
        self._kv_a_norm = _RmsNorm(module.kv_a_layernorm, latent_eps)
        self._o_proj = module.o_proj
        up = module.kv_b_proj.weight.view(self.num_heads, -1, module.kv_lora_rank)
        # [num_heads, qk_nope_head_dim, kv_lora_rank] and [num_heads, kv_lora_rank, v_head_dim]
        self._key_up = up[:, : module.qk_nope_head_dim].contiguous()
        self._value_up = up[:, module.qk_nope_head_dim :].transpose(1, 2).contiguous()
        self._indexer = None if indexer is None else _Indexer(spec, indexer)

    def forward(
        self, x: Tensor, rotation: Rotation, kv: KvAccess, selected: Tensor | None, *, runs_indexer: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens = x.shape[0]
        indexer = self._indexer if runs_indexer else None
        q_a, *index_keys, kv_a = self._of_hidden(x)
        q_resid = self._q_a_norm(q_a)
        q, gate, index_queries = self._queries(q_resid, q_a, with_index=indexer is not None)
        q_nope, q_rope = torch.split(q, self._head_dims, dim=-1)
        item = self._item(kv_a, rotation)
        if indexer is None or index_queries is None:
            kv.write(self._number, item, None)
        else:
            q_index, keys, weights = indexer.finish(x, index_queries, index_keys[0], rotation)
            kv.write(self._number, item, keys)
            selected = kv.select(self._group, q_index, weights)
        if selected is None:
            raise CheckpointError(
                f"layer {self._number} shares an index, but no layer before it has an indexer"
            )
        # As long as an item; both parts are written in place.
        q = x.new_empty((num_tokens, self.num_heads, item.shape[1]))
        latent_dim = self._latent_dims[0]
        matmul_heads(q_nope, self._key_up, out=q[..., :latent_dim])
        rotate(q_rope, *rotation, is_interleaved=True, out=q[..., latent_dim:])
        attended = kv.attend(self._number, q, selected, self._scale)
        values = x.new_empty((num_tokens, self.num_heads, self._value_up.shape[2]))
        matmul_heads(attended, self._value_up, out=values)
        if gate is not None:
            values = (values * sigmoid(gate.float())).to(values.dtype)
        output: Tensor = self._o_proj(values.flatten(1))
        return output, selected

    def write(self, x: Tensor, rotation: Rotation, kv: KvAccess) -> None:
        """What ``forward`` writes, and nothing else of it."""
        _, *index_keys, kv_a = self._of_hidden(x)
        keys = None if self._indexer is None else self._indexer.finish_keys(index_keys[0], rotation)
        kv.write(self._number, self._item(kv_a, rotation), keys)

    def _item(self, kv_a: Tensor, rotation: Rotation) -> Tensor:
        latent, k_rope = torch.split(kv_a, self._latent_dims, dim=-1)
        k_rope = rotate(k_rope[:, None], *rotation, is_interleaved=True)[:, 0]
        return torch.cat((self._kv_a_norm(latent), k_rope), dim=-1)


class _Queries:
    """What becomes of the latent query: the heads' queries and, in the same product, the indexer's."""

    def __init__(self, module: Any) -> None:
        queries = [] if module.indexer is None else [module.indexer.wq_b]
        self._linears = JoinedLinears([module.q_b_proj, *queries])
        self._num_heads: int = module.num_heads

    def __call__(
        self, normed: Tensor, raw: Tensor, *, with_index: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of the latent query [num_tokens, q_lora_rank] behind its norm and before it: queries [num_tokens,
        num_heads, head_dim]; a gate of each head's values, or None; and ``with_index`` what wq_b makes."""
        q, *index_queries = self._linears(normed) if with_index else [self._linears.first(normed)]
        return _of_heads(q, self._num_heads), None, next(iter(index_queries), None)


class _GatedQueries:
    """``_Queries`` of A.X-K2: one projection of the latent query, normed and raw, makes queries and gates."""

    def __init__(self, module: Any) -> None:
        self._projection = module.q_gate_proj
        self._index_queries = module.indexer.wq_b
        self._num_heads: int = module.num_heads
        self._parts: list[int] = [module.qk_head_dim, module.v_head_dim]

    def __call__(
        self, normed: Tensor, raw: Tensor, *, with_index: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        both = self._projection(torch.cat((normed, raw), dim=-1))
        q, gate = torch.split(_of_heads(both, self._num_heads), self._parts, dim=-1)
        return q, gate, self._index_queries(normed) if with_index else None


def _of_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(x.shape[0], num_heads, -1)


class _Indexer:
    """The lightning indexer's side of the projections; the scoring itself is ``kernels.indexer``."""

    def __init__(self, spec: ModelSpec, module: Any) -> None:
        self._num_heads: int = module.n_heads
        norm = module.k_norm
        self._k_norm = norm.weight.float(), norm.bias.float(), norm.eps
        self._weights_proj = module.weights_proj
        self._is_interleaved = spec.family.interleaves_index_rope
        self._hadamard: Tensor | None = None
        if spec.index_rotation:
            self._hadamard = hadamard_matrix(spec.index_head_dim, spec.dtype, norm.weight.device)

    def finish(
        self, x: Tensor, queries: Tensor, keys: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the hidden states and what wq_b and wk made: queries [num_tokens, heads, dim], keys [num_tokens,
        dim] and float32 head weights [num_tokens, heads]. For keys in fp8 both are rotated
        (``kernels.hadamard``).
        """
        queries = queries.view(x.shape[0], self._num_heads, -1)
        queries = rotate(queries, *rotation, is_interleaved=self._is_interleaved)
        if self._hadamard is not None:
            queries = linear(queries, self._hadamard)
        weights = self._weights_proj(x.float()) * self._num_heads**-0.5
        return queries, self.finish_keys(keys, rotation), weights

    def finish_keys(self, keys: Tensor, rotation: Rotation) -> Tensor:
        """Of what wk made: keys [num_tokens, dim], as ``finish`` returns them."""
        wide = torch.nn.functional.layer_norm(keys.float(), keys.shape[1:], *self._k_norm)
        keys = wide.to(keys.dtype)[:, None]
        keys = rotate(keys, *rotation, is_interleaved=self._is_interleaved)[:, 0]
        return keys if self._hadamard is None else linear(keys, self._hadamard)
