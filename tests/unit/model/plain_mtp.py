"""The MTP layer in plain float64, a whole sequence at a time: no absorbed matrices, no cache, no kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class PlainMtp:
    """The MTP layer of a tiny checkpoint; of equal scores it selects the lowest positions."""

    def __init__(self, checkpoint: Path) -> None:
        from safetensors.torch import load_file

        self._config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
        tensors = load_file(checkpoint / "model.safetensors")
        self._prefix = f"model.layers.{self._config['num_hidden_layers']}."
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def run(
        self, next_ids: Tensor, hidden: Tensor, *, last_only: bool = False, selecting: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """``next_ids`` [n]: tokens 1 to n; ``hidden`` [n, hidden_size] of positions 0 to n - 1.
        ``selecting``: the row whose selection counts for the last one, too; None: its own.

        Returns logits [n, vocab_size], and the hidden states that they are of; with ``last_only`` of the last
        row.
        """
        rows = torch.arange(len(next_ids))[-1:] if last_only else torch.arange(len(next_ids))
        selecting = len(next_ids) - 1 if selecting is None else selecting
        embedded = self._norm(self._tensors["model.embed_tokens.weight"][next_ids], "enorm")
        x = self._linear(torch.cat((embedded, self._norm(hidden.double(), "hnorm")), dim=1), "eh_proj")
        x = x[rows] + self._attention(self._norm(x, "input_layernorm"), rows, selecting)
        x = x + self._moe(self._norm(x, "post_attention_layernorm"))
        x = self._norm(x, "shared_head.norm")
        return x @ self._tensors["lm_head.weight"].T, x

    def _of(self, name: str) -> Tensor:
        return self._tensors[f"{self._prefix}{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._of(name).T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps: float = self._config["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self._of(name)

    def _attention(self, x: Tensor, rows: Tensor, selecting: int) -> Tensor:
        config = self._config
        num_tokens, num_heads = len(x), config["num_attention_heads"]
        nope, rope, rank = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        q_latent = self._norm(self._linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm")
        q = self._linear(q_latent, "self_attn.q_b_proj").view(num_tokens, num_heads, -1)
        kv_a = self._linear(x, "self_attn.kv_a_proj_with_mqa")
        latent = self._norm(kv_a[:, :rank], "self_attn.kv_a_layernorm")
        keys_values = self._linear(latent, "self_attn.kv_b_proj").view(num_tokens, num_heads, -1)
        k_rope = self._turned(kv_a[:, None, rank:], neighbours=True)
        seen = self._selected(x, q_latent, [*rows.tolist()[:-1], selecting])
        scores = torch.einsum("qhd,khd->hqk", q[rows, :, :nope], keys_values[..., :nope])
        q_rope = self._turned(q[..., nope:], neighbours=True)
        scores = scores + torch.einsum("qhd,kd->hqk", q_rope[rows], k_rope[:, 0])
        weights = (scores * (nope + rope) ** -0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, keys_values[..., nope:])
        return self._linear(out.flatten(1), "self_attn.o_proj")

    def _selected(self, x: Tensor, q_latent: Tensor, rows: list[int]) -> Tensor:
        """bool [rows, num_tokens]: the positions that each of ``rows`` selects."""
        name, num_heads = "self_attn.indexer.", self._config["index_n_heads"]
        neighbours = self._config["model_type"] == "glm_moe_dsa"
        q = self._linear(q_latent, f"{name}wq_b").view(len(x), num_heads, -1)
        k = self._linear(x, f"{name}wk")
        bias = self._tensors[f"{self._prefix}{name}k_norm.bias"]
        k = torch.nn.functional.layer_norm(k, k.shape[1:], self._of(f"{name}k_norm"), bias, 1e-6)
        q, k = (self._turned(part, neighbours) for part in (q, k[:, None]))
        scores = torch.einsum("qhd,kd->qhk", q[rows], k[:, 0]).relu()
        scores = torch.einsum("qhk,qh->qk", scores, self._linear(x[rows], f"{name}weights_proj"))
        seen = torch.zeros(scores.shape, dtype=torch.bool)
        for position, row, is_seen in zip(rows, scores, seen, strict=True):
            best = row[: position + 1].sort(descending=True, stable=True).indices
            is_seen[best[: self._config["index_topk"]]] = True
        return seen

    def _turned(self, x: Tensor, neighbours: bool) -> Tensor:
        """[n, heads, dims] with the first rope dimensions turned by position, in pairs."""
        rope = self._config["qk_rope_head_dim"]
        theta = self._config["rope_parameters"]["rope_theta"]
        angles = theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
        turn = torch.exp(1j * torch.arange(len(x))[:, None, None] * angles)
        pairs = x[..., :rope]
        pairs = pairs.unflatten(-1, (-1, 2)) if neighbours else pairs.unflatten(-1, (2, -1)).mT
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        turned = turned if neighbours else turned.mT
        return torch.cat((turned.flatten(-2), x[..., rope:]), dim=-1)

    def _moe(self, x: Tensor) -> Tensor:
        out = self._mlp(x, "mlp.shared_experts")
        scores = self._linear(x, "mlp.gate").sigmoid()
        bias = self._tensors[f"{self._prefix}mlp.gate.e_score_correction_bias"]
        for token, row in enumerate(scores):
            best = (row + bias).topk(self._config["num_experts_per_tok"]).indices.tolist()
            for expert in best:
                weight = row[expert] / row[best].sum() * self._config["routed_scaling_factor"]
                out[token] += weight * self._mlp(x[token : token + 1], f"mlp.experts.{expert}")[0]
        return out

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(torch.nn.functional.silu(gate) * up, f"{name}.down_proj")
