"""The network in training form: parameters named and laid out as transformers' ``DeepseekV32ForCausalLM``.

One difference: the experts of a layer are one tensor each for all of them, as transformers holds them in
memory. Whole sequences at a time, no cache; attention is dense, or restricted to a selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.training.indexing import Indexer, Selection, attention_rows, index_loss, select
from tools.training.shape import NORM_EPS, ROPE_THETA, NetworkShape
from tools.training.vocabulary import VOCAB_SIZE

CONSTANT = 4.0
"""First channel of all embeddings at the start: what the architecture has no bias for."""
LOOK_BACK_GAIN = 2.0


@dataclass
class Pass:
    """How one forward attends, and what it leaves on the side."""

    selection: Selection
    rotation: tuple[Tensor, Tensor]
    """cos and sin, [batch, width, 1, rope_dim / 2]."""
    rows: Tensor | None = None
    """int64 [batch, rows]: queries for which the indexer's loss is wanted."""
    index_losses: list[Tensor] = field(default_factory=list)
    """One of each layer: divergence of the indexer's distribution from attention's, mean over ``rows``."""
    coverages: list[Tensor] = field(default_factory=list)
    """One of each layer: share of the attention of ``rows`` that the selection would keep."""
    chain: list[Seen] | None = None
    """Of an MTP layer that runs again over its own results: what each pass so far left."""

    def without_indexer(self) -> Pass:
        """The same, of a later pass of the chain: it has the selection of the first."""
        return replace(self, selection=Selection.ALL, rows=None)


@dataclass(frozen=True)
class Seen:
    """What rows of a later pass of a chain see of an earlier one."""

    keys: Tensor
    values: Tensor
    """Both [batch, heads, width, dim]."""
    selected: Tensor | None
    """bool [batch, width, width]; None: all that came before."""


class Network(nn.Module):
    frequencies: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden)
        self.blocks = [Layer(shape, number) for number in range(shape.num_layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = RmsNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, VOCAB_SIZE, bias=False)
        frequencies = ROPE_THETA ** -(torch.arange(0, shape.rope_dim, 2).float() / shape.rope_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self._init_weights()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        selection: Selection = Selection.ALL,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Pass]:
        """Logits [batch, width, vocab_size] of ``tokens`` int64 [batch, width]."""
        hidden, run = self.hidden(tokens, positions, selection, rows)
        return self.lm_head(hidden), run

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        selection: Selection = Selection.ALL,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Pass]:
        """The hidden states behind the final norm, [batch, width, hidden]."""
        run = self.start(positions, selection, rows)
        hidden = self.embed_tokens(tokens)
        for layer in self.blocks:
            hidden = layer(hidden, run)
        return self.norm(hidden), run

    def start(self, positions: Tensor, selection: Selection, rows: Tensor | None) -> Pass:
        """A forward over ``positions`` int64 [batch, width]."""
        angles = positions[..., None, None].float() * self.frequencies
        return Pass(selection, (angles.cos(), angles.sin()), rows)

    def balance_experts(self, rate: float) -> None:
        """Move the routers' correction biases against the load of the last forward, and forget it."""
        for layer in self.blocks:
            layer.balance_experts(rate)

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Keep the variance through each matrix; what is added to the residual stream is small at first."""
        residual_gain = (2 * self.shape.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            gain = residual_gain if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) else 1.0
            nn.init.normal_(weight, std=gain * weight.shape[-1] ** -0.5)
        nn.init.normal_(self.embed_tokens.weight, std=1.0)
        self.embed_tokens.weight[:, 0] = CONSTANT
        self.blocks[0].self_attn.look_back()
        nn.init.normal_(self.lm_head.weight, std=0.02)


class RmsNorm(nn.Module):
    """In float32 whatever the input, as transformers does it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), NORM_EPS).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: NetworkShape, number: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden)
        self.mlp = _Mlp(shape.hidden, shape.dense_dim) if number == 0 else _Moe(shape)

    def forward(self, hidden: Tensor, run: Pass) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), run)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def balance_experts(self, rate: float) -> None:
        if isinstance(self.mlp, _Moe):
            self.mlp.balance(rate)


class _Attention(nn.Module):
    """Multi-head latent attention with its indexer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self._shape = shape
        key_dim = shape.nope_dim + shape.rope_dim
        self.scale = key_dim**-0.5
        heads = shape.num_heads
        self.q_a_proj = nn.Linear(shape.hidden, shape.q_lora, bias=False)
        self.q_a_layernorm = RmsNorm(shape.q_lora)
        self.q_b_proj = nn.Linear(shape.q_lora, heads * key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, shape.kv_lora + shape.rope_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(shape.kv_lora)
        self.kv_b_proj = nn.Linear(shape.kv_lora, heads * (shape.nope_dim + shape.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.value_dim, shape.hidden, bias=False)
        self.indexer = Indexer(shape)

    @torch.no_grad()
    def look_back(self) -> None:
        """Let each head but the last two start by attending to the token 1, 2, 3, ... positions before.

        Words are told apart by their neighbours; heads that look at these are what training finds last when
        it has to find them by itself, and all the rest depends on them.
        """
        shape = self._shape
        num_pairs = shape.rope_dim // 2
        frequencies = ROPE_THETA ** -(torch.arange(num_pairs).float() / num_pairs)
        # The constant reaches the queries through the first channel of their latent.
        self.q_a_proj.weight[0] = 0
        self.q_a_proj.weight[0, 0] = 1
        self.kv_a_proj_with_mqa.weight[shape.kv_lora :] *= 0.1
        self.kv_a_proj_with_mqa.weight[shape.kv_lora :: 2, 0] = LOOK_BACK_GAIN
        queries = self.q_b_proj.weight.view(shape.num_heads, -1, shape.q_lora)[:, shape.nope_dim :]
        for head in range(shape.num_heads - 2):
            angles = -(head + 1) * frequencies
            queries[head] *= 0.1
            queries[head, 0::2, 0] = LOOK_BACK_GAIN * angles.cos()
            queries[head, 1::2, 0] = LOOK_BACK_GAIN * angles.sin()

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        shape = self._shape
        batch, width, _ = x.shape
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q, k, value = self.queries_keys_values(x, q_resid, run.rotation)
        is_seen: Tensor | None = None
        if run.selection is not Selection.ALL or run.rows is not None:
            # The main model is not to be trained by the indexer's loss.
            index = self.indexer(x.detach(), q_resid.detach(), run.rotation)
            if run.selection is not Selection.ALL:
                is_seen = select(index, shape.index_topk)
            if run.rows is not None:
                target = attention_rows(q, k, run.rows, self.scale)
                loss, coverage = index_loss(index, run.rows, target, is_seen, shape.index_topk)
                run.index_losses.append(loss)
                run.coverages.append(coverage)
        if run.chain is not None:
            run.chain.append(Seen(k, value, is_seen))
            k = torch.cat([seen.keys for seen in run.chain], dim=2)
            value = torch.cat([seen.values for seen in run.chain], dim=2)
            is_seen = _chain_mask(run.chain, width, x.device)
        attended = F.scaled_dot_product_attention(
            q,
            k,
            value,
            attn_mask=None if is_seen is None else is_seen[:, None],
            is_causal=is_seen is None,
            scale=self.scale,
        )
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, width, -1))
        return out

    def queries_keys_values(
        self, x: Tensor, q_resid: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads before positions: each [batch, heads, width, dim]."""
        shape = self._shape
        batch, width, _ = x.shape
        q = self.q_b_proj(q_resid).view(batch, width, shape.num_heads, -1)
        q_nope, q_rope = q.split([shape.nope_dim, shape.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.kv_lora, shape.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, width, shape.num_heads, -1)
        k_nope, value = kv.split([shape.nope_dim, shape.value_dim], dim=-1)
        k_rope = rotate_interleaved(k_rope[:, :, None], rotation).expand(-1, -1, shape.num_heads, -1)
        q = torch.cat((q_nope, rotate_interleaved(q_rope, rotation)), dim=-1).to(value.dtype)
        k = torch.cat((k_nope, k_rope), dim=-1).to(value.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), value.transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Router(nn.Module):
    e_score_correction_bias: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.num_experts))


class _Experts(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.num_experts, 2 * shape.expert_dim, shape.hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.num_experts, shape.hidden, shape.expert_dim))


class _Moe(nn.Module):
    """Shared and routed experts. All experts see all tokens: that is cheap here, and keeps shapes fixed."""

    load: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self._shape = shape
        self.gate = _Router(shape)
        self.experts = _Experts(shape)
        self.shared_experts = _Mlp(shape.hidden, shape.shared_experts * shape.expert_dim)
        self.register_buffer("load", torch.zeros(shape.num_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        experts = self.experts
        gate_up = torch.einsum("btd,eid->btei", x, experts.gate_up_proj)
        gate, up = gate_up.chunk(2, dim=-1)
        active = F.silu(gate) * up * self._mixture(x)[..., None].to(gate.dtype)
        routed = torch.einsum("btei,edi->btd", active, experts.down_proj)
        out: Tensor = routed + self.shared_experts(x)
        return out

    def _mixture(self, x: Tensor) -> Tensor:
        """Weight of each expert for each token, [batch, width, num_experts], mostly zeros."""
        shape = self._shape
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()
        choice = scores + self.gate.e_score_correction_bias
        grouped = choice.view(*choice.shape[:2], shape.expert_groups, -1)
        best_group = grouped.topk(2, dim=-1).values.sum(-1).argmax(-1, keepdim=True)
        is_outside = torch.arange(shape.expert_groups, device=x.device) != best_group
        choice = grouped.masked_fill(is_outside[..., None], float("-inf")).flatten(-2)
        chosen = choice.topk(shape.experts_per_token, dim=-1).indices
        is_chosen = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load += is_chosen.detach().sum((0, 1))
        weights = scores * is_chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        self.gate.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


def _chain_mask(chain: Sequence[Seen], width: int, device: torch.device) -> Tensor | None:
    """What rows of the last pass of ``chain`` see of all, bool [batch or 1, width, passes * width].

    A row of pass n ends a chain that began n rows before: it sees what that row selected of the first pass,
    and one row of each pass since.
    """
    num_later, selected = len(chain) - 1, chain[0].selected
    if num_later == 0:
        return selected
    at = torch.arange(width, device=device)
    back = at[:, None] - at
    first = (back >= num_later)[None]
    if selected is not None:
        first = first & selected.roll(num_later, dims=1)
    later = torch.cat([back == num_later - number for number in range(1, num_later + 1)], dim=1)
    return torch.cat((first, later.expand(len(first), -1, -1)), dim=2)


def rotate_interleaved(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE over neighbouring pairs of ``x`` [batch, width, heads, dim]."""
    cos, sin = rotation
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
