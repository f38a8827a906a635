"""Specs of models of which no checkpoint is needed."""

from __future__ import annotations

from typing import Any

import torch

from hisparse_pd.core.model.spec import ModelSpec


def make_spec(**changes: Any) -> ModelSpec:
    """Return the spec of DeepSeek-V3.2 in bfloat16, with ``changes``."""
    values: dict[str, Any] = {
        "model_type": "deepseek_v32",
        "num_layers": 61,
        "index_group_of_layer": tuple(range(61)),
        "num_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_num_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "context_length": 163840,
        "hidden_size": 7168,
        "vocab_size": 129280,
        "eos_token_ids": (1,),
        "dtype": torch.bfloat16,
        "kv_format": "bfloat16",
        "index_format": "bfloat16",
        "weights_are_fp8": False,
        "fingerprint": "abc",
        **changes,
    }
    return ModelSpec(**values)
