"""Checkpoints of random weights and odd sizes, in which equal scores are the rule.

Unlike in those of ``tools.checkpoints.make_tiny``, nothing keeps scores apart: the indexer's heads all
rectify, so that a hundred positions of a query score exactly zero and the boundary of its selection goes
through the middle of them. Two correct implementations give the same tokens only if both take the lowest
positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.checkpoints.files import write_config
from tools.checkpoints.make_tiny import OUTER_CONFIGS, VOCAB_SIZE, write_tokenizer

INDEX_TOPK = 37
CONTEXT_LENGTH = 2048
_INDEXER_TYPES = ["full", "shared", "full", "full", "shared"]


def write_tied_checkpoint(out_dir: Path, variant: str, seed: int = 0, **changes: object) -> None:
    """Write config, weights and tokenizer of ``variant`` ("v32", "glm" or "mistral"), with ``changes`` of its
    configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config: dict[str, Any] = {
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 78,
        "intermediate_size": 150,
        "moe_intermediate_size": 30,
        "num_hidden_layers": 2,  # one dense, one with experts
        "num_attention_heads": 6,
        "n_shared_experts": 1,
        "n_routed_experts": 6,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 44,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 12,
        "v_head_dim": 18,
        "index_n_heads": 5,
        "index_head_dim": 24,
        "index_topk": INDEX_TOPK,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.15,
    }
    if variant == "glm":
        config |= {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "num_hidden_layers": len(_INDEXER_TYPES),
            "model_type": "glm_moe_dsa",
            "indexer_types": _INDEXER_TYPES,
            "rms_norm_eps": 1e-5,
        }
    if variant == "mistral":
        config |= {
            "model_type": "mistral_large4_text",
            "num_hidden_layers": len(_INDEXER_TYPES),
            "indexer_types": _INDEXER_TYPES,
            "no_rope_layers": [1, 0, 0, 1, 0],
            "kv_source_layers": [0, 1, 1, 0, 1],
        }
    write_config(out_dir, config | changes, OUTER_CONFIGS.get(variant))
    model_type: Any = AutoModelForImageTextToText if variant in OUTER_CONFIGS else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_type.from_config(AutoConfig.from_pretrained(out_dir))
        for name, values in model.state_dict().items():
            if "softmax_scaling" in name or name.endswith("rotary_emb.alpha"):
                values += 0.1 * torch.randn(values.shape)
        model.save_pretrained(out_dir)
    write_tokenizer(out_dir)
