"""The DSA model's forward: transformers' modules around our own attention.

transformers supplies the configuration, embeddings, MLP and MoE blocks and the LM head
(``hisparse_pd.core.model.loader``); attention is in ``hisparse_pd.core.model.attention``. The model keeps no
per-request state: that is the business of a ``KvAccess``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.core.model.attention import Attention, KvAccess, Places
from hisparse_pd.core.model.block_linear import parts_of, product_of
from hisparse_pd.core.model.feed_forward import FeedForward
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.kernels.fp8_rows import Activations, Rounding
from hisparse_pd.kernels.norms import NormGate, add_norm
from hisparse_pd.kernels.row_math import softcap

_NO_DRAFT_LAYER = "this node runs no draft layer: num_draft_layers of its model is 0"


class DsaModel:
    """Forward of a model of one of ``hisparse_pd.core.model.families`` over a ``KvAccess``.

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
        has_latent_eps = spec.family.has_configured_latent_eps
        latent_eps = float(hf_model.config.rms_norm_eps) if has_latent_eps else None
        self._lm_head = hf_model.lm_head
        self._layers = [
            _Layer(spec, number, module, latent_eps)
            for number, module in enumerate(hf_model.model.layers[: spec.num_layers])
        ]
        self._draft_layer: _DraftLayer | None = None
        if spec.num_draft_layers:
            self._draft_layer = _DraftLayer(spec, hf_model, latent_eps)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._embed.weight.device
        return device

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
        """float32 [n, vocab_size], of ``hidden`` [n, hidden_size] as ``forward_with_hidden`` returns them.
        Without rows the LM head is not read."""
        if not len(hidden):
            return hidden.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        logits = product_of(self._lm_head, hidden).float()
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
        if hidden.is_cuda:
            from hisparse_pd.kernels.triton_rope import angles

            return Places(positions, angles(positions, self._inv_freq, rotary.attention_scaling))
        in_float32 = hidden.new_empty(0, dtype=torch.float32)  # whatever the model's dtype is
        cos, sin = self._rotary(in_float32, positions[None])
        half = cos.shape[-1] // 2
        return Places(positions, (cos[0, :, :half], sin[0, :, :half]))


def _inv_freq(rotary: Any) -> Tensor:
    """float32 [rope_dim / 2]; a checkpoint may have learned what they are to be multiplied by."""
    inv_freq: Tensor = rotary.inv_freq
    return inv_freq.float() * rotary.alpha.float().exp() if hasattr(rotary, "alpha") else inv_freq


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

    def __init__(self, spec: ModelSpec, number: int, module: Any, latent_eps: float | None) -> None:
        self._attention = Attention(spec, number, module.self_attn, latent_eps)
        self._feed_forward = FeedForward(module.mlp, spec.family)
        self._input_norm = _Norm(module.input_layernorm, self._attention.rounding)
        self._post_attention_norm = _Norm(module.post_attention_layernorm, self._feed_forward.rounding)

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

    def __init__(self, spec: ModelSpec, hf_model: Any, latent_eps: float | None) -> None:
        module = hf_model.model.layers[spec.num_layers]
        self._embed = getattr(module, "embed_tokens", hf_model.model.embed_tokens)
        self._embed_norm = _Norm(module.enorm)
        self._hidden_norm = _Norm(module.hnorm)
        self._join = module.eh_proj
        self._layer = _Layer(spec, spec.num_layers, module, latent_eps)
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
        return product_of(self._lm_head, normed[logit_rows]).float(), normed

    def write(self, token_ids: Tensor, hidden: Tensor, places: Places, kv: KvAccess) -> None:
        self._layer.write([self._joined(token_ids, hidden)], places, kv)

    def _joined(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[parts, num_tokens, hidden_size]."""
        embedded = self._embed_norm(self._embed(token_ids))[1].dense
        both = torch.cat((embedded, self._hidden_norm(hidden)[1].dense), dim=-1)
        return parts_of(self._join, Activations(both))
