"""The DSA model's forward: transformers' modules around our own attention.

transformers supplies the configuration, embeddings, MLP and MoE blocks and the LM head
(``hisparse_pd.core.model.loader``); attention is in ``hisparse_pd.core.model.attention``. The model keeps no
state of requests; a ``KvAccess`` does.

A node calls ``forward`` or, where hidden states are needed, ``forward_with_hidden`` for the new tokens of all
requests that it computes together, and then ``draft`` if the model has an MTP layer, or ``write_draft_kv``
after a decode step that makes no guesses. A decode node with micro-batches calls ``forward_by_layer`` instead
of ``forward``. A prefill rank without tokens calls ``join_forward`` and ``join_draft`` while others do this;
``engine/lockstep.py`` tells ranks how many tokens to pad theirs to, and in a warm-up ``expect_tokens`` does.
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
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.kernels.fp8_rows import Activations, Rounding
from hisparse_pd.kernels.norms import NormGate, add_norm
from hisparse_pd.kernels.row_math import softcap

_NO_DRAFT_LAYER = "this node runs no draft layer: num_draft_layers of its model is 0"


class DsaModel:
    """Forward of a model of one of ``hisparse_pd.core.model.families`` over a ``KvAccess``.

    ``ranks``: the node's ranks if they share the routed experts; then all of them make each forward together.
    """

    def __init__(self, spec: ModelSpec, hf_model: Any, ranks: RankGroup | None = None) -> None:
        self.spec = spec
        self.ranks = ranks
        self.embed = hf_model.model.embed_tokens
        self._rotary = hf_model.model.rotary_emb
        self._inv_freq = _inv_freq(self._rotary)
        self._softcap: float | None = getattr(hf_model.config, "final_logit_softcapping", None)
        self._norm = _Norm(hf_model.model.norm)
        # The epsilon of the latents' norms; None: each norm has its own.
        has_latent_eps = spec.family.has_configured_latent_eps
        latent_eps = float(hf_model.config.rms_norm_eps) if has_latent_eps else None
        self.lm_head = hf_model.lm_head
        side_stream = SideStream(self.device)
        self.layers = [
            _Layer(spec, number, module, latent_eps, side_stream)
            for number, module in enumerate(hf_model.model.layers[: spec.num_layers])
        ]
        self.draft_layer: _DraftLayer | None = None
        if spec.num_draft_layers:
            self.draft_layer = _DraftLayer(spec, hf_model, latent_eps, side_stream)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.embed.weight.device
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
        """Run ``forward``. Returns also the hidden states behind the final norm, [num_tokens, hidden_size],
        for ``logits`` and ``draft``."""
        logits, hidden = self._forward(token_ids, positions, kv, logit_rows, with_hidden=True)
        assert hidden is not None
        return logits, hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [n, vocab_size], of ``hidden`` [n, hidden_size] as
        ``forward_with_hidden`` returns it. Without rows the LM head is not read."""
        if not len(hidden):
            return hidden.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        logits = product_of(self.lm_head, hidden).float()
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

        A row is a position i: ``positions`` int64 [num_tokens]; ``hidden`` [num_tokens, hidden_size] is what
        ``forward_with_hidden`` returned for position i; ``token_ids`` int64 [num_tokens] is the token of
        position i + 1. ``logit_rows``: as in ``forward``. The layer writes and reads layer
        ``spec.num_layers`` of ``kv``. With ``selected``, int32 [num_tokens, index_topk], it attends to these
        positions, runs no indexer and writes no indexer keys.

        Returns logits, float32 [n, vocab_size], of the token of position i + 2, and [num_tokens, hidden_size]
        to use as ``hidden`` of position i + 1 for the next guess. Raises ValueError without a draft layer.
        """
        if self.draft_layer is None:
            raise ValueError(_NO_DRAFT_LAYER)
        places = self._places(hidden, positions)
        return self.draft_layer.forward(token_ids, hidden, places, kv, logit_rows, selected)

    @torch.inference_mode()
    def write_draft_kv(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, kv: KvAccess) -> None:
        """Write the MTP layer's KV and indexer keys as ``draft`` of these rows would, without a guess.

        Later guesses see these positions as if ``draft`` had run. Raises ValueError without a draft layer.
        """
        if self.draft_layer is None:
            raise ValueError(_NO_DRAFT_LAYER)
        self.draft_layer.write(token_ids, hidden, self._places(hidden, positions), kv)

    @torch.inference_mode()
    def join_forward(self) -> None:
        """Take part in a forward of other ranks, with this rank's experts and no token of its own."""
        hidden = self.embed.weight[:0]
        for layer in self.layers:
            layer.join_forward(hidden)

    @torch.inference_mode()
    def join_draft(self) -> None:
        """Take part in a ``draft`` of other ranks, as ``join_forward`` does. Without a draft layer nothing is
        done."""
        if self.draft_layer is not None:
            self.draft_layer.join_forward(self.embed.weight[:0])

    def expect_tokens(self, num_tokens: int) -> None:
        """Pad each rank's tokens to ``num_tokens`` in the next forwards: the number of the rank that has
        most. 0: all ranks have equally many, and none pads. Without ranks nothing is done."""
        if self.ranks is not None:
            self.ranks.step_tokens = num_tokens

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
        """Run the layers and yield after each, so that ``decode_node/micro_batches.py`` can enqueue two
        forwards alternately.

        Returns what ``forward_with_hidden`` does; the hidden states are None unless there is a draft layer or
        ``with_hidden`` is set.
        """
        # The hidden states are the sum of ``hidden`` and ``added``, which the next norm adds up.
        hidden: Tensor = self.embed(token_ids)
        added: list[Tensor] = []
        places = self._places(hidden, positions)
        selected: Tensor | None = None
        for layer in self.layers:
            hidden, added, selected = layer.forward(hidden, added, places, kv, selected)
            yield
        _, last = self._norm(hidden, added)
        normed = last.dense
        logits = self.logits(normed if logit_rows is None else normed[logit_rows])
        return logits, normed if self.draft_layer is not None or with_hidden else None

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
        in_float32 = hidden.new_empty(0, dtype=torch.float32)  # cos and sin get its dtype
        cos, sin = self._rotary(in_float32, positions[None])
        half = cos.shape[-1] // 2
        return Places(positions, (cos[0, :, :half], sin[0, :, :half]))


def _inv_freq(rotary: Any) -> Tensor:
    """Return the inverse frequencies, float32 [rope_dim / 2], times learned factors if the checkpoint has
    them."""
    inv_freq: Tensor = rotary.inv_freq
    return inv_freq.float() * rotary.alpha.float().exp() if hasattr(rotary, "alpha") else inv_freq


class _Norm:
    """One of transformers' norms, together with the sum before it, its gate if it has one (A.X-K2), and the
    rounding that the next linear layer takes."""

    def __init__(self, module: Any, rounding: Rounding | None = None) -> None:
        gate = getattr(module, "mlp", None)
        self._gate = None if gate is None else NormGate.of(gate.fc1.weight, gate.fc2.weight)
        norm = module if gate is None else module.norm
        self._weight: Tensor = norm.weight
        self._eps: float = norm.variance_epsilon
        self._rounding = rounding

    def __call__(self, hidden: Tensor | None, added: Sequence[Tensor] = ()) -> tuple[Tensor, Activations]:
        """Return the sum of ``hidden`` and ``added``, and its norm (``kernels.norms.add_norm``)."""
        return add_norm(hidden, added, self._weight, self._eps, self._rounding, self._gate)


class _Layer:
    """One decoder layer: attention, then an MLP or experts. Their results are added to the hidden states by
    the norms that follow them."""

    def __init__(
        self, spec: ModelSpec, number: int, module: Any, latent_eps: float | None, side_stream: SideStream
    ) -> None:
        self.attention = Attention(spec, number, module.self_attn, latent_eps)
        self._feed_forward = FeedForward(module.mlp, spec.family, side_stream)
        self._input_norm = _Norm(module.input_layernorm, self.attention.rounding)
        self._post_attention_norm = _Norm(module.post_attention_layernorm, self._feed_forward.rounding)

    def join_forward(self, hidden: Tensor) -> None:
        self._feed_forward.join_forward(hidden)

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
        """Return ``hidden``, ``added`` and the selection after the layer.

        Before the layer and after it, the hidden states are the sum of ``hidden`` (None: zeros) and all
        ``added``, which are [parts, num_tokens, hidden_size] each: a matrix product that is split along its
        inner dimension (split-K) leaves its partial sums as parts, for the next norm to add up
        (``block_linear.parts_of``). ``selected``: the selection of an earlier layer or pass, used where no
        indexer runs.
        """
        hidden, x = self._input_norm(hidden, added)
        attended, selected = self.attention.forward(x, places, kv, selected, runs_indexer=runs_indexer)
        hidden, x = self._post_attention_norm(hidden, [attended])
        return hidden, self._feed_forward(x), selected

    def write(self, added: Sequence[Tensor], places: Places, kv: KvAccess) -> None:
        """Write the KV that ``forward`` writes, and compute nothing else."""
        _, x = self._input_norm(None, added)
        self.attention.write(x, places, kv)


class _DraftLayer:
    """The MTP layer: a decoder layer whose input joins a token's embedding and the previous position's hidden
    state.

    It works as published, and as vLLM and SGLang run it: the hidden state behind the model's final norm is
    the second half of the input, position 0 is not special, and the next guess takes the hidden state behind
    this layer's norm. Embedding and LM head are the model's, unless the checkpoint has its own for this
    layer.
    """

    def __init__(
        self, spec: ModelSpec, hf_model: Any, latent_eps: float | None, side_stream: SideStream
    ) -> None:
        module = hf_model.model.layers[spec.num_layers]
        self.embed = getattr(module, "embed_tokens", hf_model.model.embed_tokens)
        self._embed_norm = _Norm(module.enorm)
        self._hidden_norm = _Norm(module.hnorm)
        self._join = module.eh_proj
        self._layer = _Layer(spec, spec.num_layers, module, latent_eps, side_stream)
        self._norm = _Norm(module.shared_head.norm)
        self.lm_head = getattr(module.shared_head, "head", hf_model.lm_head)

    def join_forward(self, hidden: Tensor) -> None:
        self._layer.join_forward(hidden)

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
        _, last = self._norm(hidden, added)
        # A softcap would not change the likeliest token, and nothing else is taken from these logits.
        return product_of(self.lm_head, last.dense[logit_rows]).float(), last.dense

    def write(self, token_ids: Tensor, hidden: Tensor, places: Places, kv: KvAccess) -> None:
        self._layer.write([self._joined(token_ids, hidden)], places, kv)

    def _joined(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input: [parts, num_tokens, hidden_size]."""
        _, embedded = self._embed_norm(self.embed(token_ids))
        _, before = self._hidden_norm(hidden)
        both = torch.cat((embedded.dense, before.dense), dim=-1)
        return parts_of(self._join, Activations(both))
