"""The lightning indexer in training: its scores, what it selects, and what it learns from.

A score is the weighted sum over the indexer's heads of the rectified products of query and key. Selection is
not differentiable; the indexer learns from the divergence of its scores' softmax from the main model's
attention, for some rows of queries: a [width, width] matrix for every head would not fit at 8192 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from tools.training.shape import NetworkShape

_SCORE_ELEMENTS = 1 << 28
"""Per-head scores that selection holds at a time."""


class Selection(Enum):
    """What a query attends to."""

    ALL = "all"
    INDEXER = "indexer"


@dataclass(frozen=True)
class Index:
    """What the indexer makes of a layer's input, in float32."""

    queries: Tensor
    """[batch, width, index_heads, index_dim]"""
    keys: Tensor
    """[batch, width, index_dim]"""
    weights: Tensor
    """[batch, width, index_heads]"""

    def rows(self, rows: Tensor) -> Index:
        """The same keys, and the queries of ``rows`` int64 [batch, rows]."""
        at = torch.arange(rows.shape[0], device=rows.device)[:, None]
        return Index(self.queries[at, rows], self.keys, self.weights[at, rows])

    def scores(self) -> Tensor:
        """[batch, queries, width], without regard to causality."""
        with torch.autocast(self.keys.device.type, enabled=False):
            per_head = torch.einsum("bqhd,bkd->bqhk", self.queries, self.keys) * self.keys.shape[-1] ** -0.5
            return torch.einsum("bqh,bqhk->bqk", self.weights, per_head.relu())


class Indexer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self._shape = shape
        self.wq_b = nn.Linear(shape.q_lora, shape.index_heads * shape.index_dim, bias=False)
        self.wk = nn.Linear(shape.hidden, shape.index_dim, bias=False)
        self.k_norm = nn.LayerNorm(shape.index_dim, eps=1e-6)
        self.weights_proj = nn.Linear(shape.hidden, shape.index_heads, bias=False)

    def forward(self, x: Tensor, q_resid: Tensor, rotation: tuple[Tensor, Tensor]) -> Index:
        heads = self._shape.index_heads
        queries = self._rotated(self.wq_b(q_resid).view(*x.shape[:2], heads, -1), rotation)
        keys = self._rotated(self.k_norm(self.wk(x))[:, :, None], rotation)[:, :, 0]
        return Index(queries.float(), keys.float(), self.weights_proj(x).float() * heads**-0.5)

    def _rotated(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        rope, rest = x[..., : self._shape.rope_dim], x[..., self._shape.rope_dim :]
        cos, sin = rotation
        first, second = rope.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@torch.no_grad()
def select(index: Index, top_k: int) -> Tensor:
    """What each query attends to, bool [batch, width, width]: ``top_k`` positions up to its own."""
    batch, width, heads, _ = index.queries.shape
    device = index.keys.device
    at = torch.arange(width, device=device)
    if width <= top_k:
        return (at <= at[:, None]).expand(batch, -1, -1)
    is_seen = torch.zeros(batch, width, width, dtype=torch.bool, device=device)
    block = max(1, _SCORE_ELEMENTS // (batch * heads * width))
    for start in range(0, width, block):
        rows = slice(start, min(start + block, width))
        part = Index(index.queries[:, rows], index.keys, index.weights[:, rows])
        is_past = at <= at[rows, None]
        best = part.scores().masked_fill(~is_past, float("-inf")).topk(top_k, dim=-1).indices
        is_seen[:, rows] = is_seen[:, rows].scatter(-1, best, True) & is_past
    return is_seen


@torch.no_grad()
def attention_rows(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Attention of some queries to all before them, averaged over the heads: [batch, rows, width].

    ``q``, ``k``: [batch, heads, width, dim].
    """
    at = torch.arange(rows.shape[0], device=rows.device)[:, None]
    some = q.transpose(1, 2)[at, rows].transpose(1, 2)
    logits = torch.matmul(some, k.transpose(-1, -2)).float() * scale
    is_past = torch.arange(k.shape[2], device=rows.device) <= rows[..., None]
    return logits.masked_fill(~is_past[:, None], float("-inf")).softmax(-1).mean(1)


def index_loss(
    index: Index, rows: Tensor, attention: Tensor, is_seen: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """Divergence of the indexer's softmax from ``attention``, and the share of ``attention`` in its top-k.

    Where there is a selection, bool [batch, width, width], the divergence is that over what it holds.
    """
    scores = index.rows(rows).scores()
    is_past = torch.arange(scores.shape[-1], device=rows.device) <= rows[..., None]
    scores = scores.masked_fill(~is_past, float("-inf"))
    best = scores.detach().topk(min(top_k, scores.shape[-1]), dim=-1).indices
    coverage = attention.gather(-1, best).sum(-1).mean()
    if is_seen is not None:
        is_outside = ~is_seen[torch.arange(rows.shape[0], device=rows.device)[:, None], rows]
        scores = scores.masked_fill(is_outside, float("-inf"))
        attention = attention.masked_fill(is_outside, 0.0)
        attention = attention / (attention.sum(-1, keepdim=True) + 1e-20)
    log_index = scores.log_softmax(-1).clamp(min=-1e4)
    divergence = (torch.special.xlogy(attention, attention) - attention * log_index).sum(-1).mean()
    return divergence, coverage
