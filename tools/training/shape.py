"""The sizes of the network, and the configuration that a checkpoint of it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.training.task import CONTEXT_LENGTH
from tools.training.vocabulary import VOCAB_SIZE

ROPE_THETA = 10000.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class NetworkShape:
    """Sizes; the defaults are those of the checkpoint in the repository."""

    hidden: int = 256
    num_layers: int = 4
    num_heads: int = 8
    q_lora: int = 128
    kv_lora: int = 96
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 48
    """Equal to ``nope_dim + rope_dim``, so that every attention kernel takes it."""
    index_heads: int = 4
    index_dim: int = 64
    index_topk: int = 64
    dense_dim: int = 384
    num_experts: int = 8
    expert_groups: int = 2
    experts_per_token: int = 2
    expert_dim: int = 64
    shared_experts: int = 2

    def hf_config(self) -> dict[str, Any]:
        """What config.json says of them."""
        return {
            "dtype": "bfloat16",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_dim,
            "moe_intermediate_size": self.expert_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "n_shared_experts": self.shared_experts,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "n_group": self.expert_groups,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.index_topk,
            "max_position_embeddings": CONTEXT_LENGTH,
        }
