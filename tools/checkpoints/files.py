"""Writes the files of a checkpoint beside its weights: configuration, tokenizer and chat template.

``make_tiny`` and ``make_synthetic`` use it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_BYTES = 256
"""Tokens that stand for one byte each, the first ones of every vocabulary."""
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
"""Special tokens, the last ones of every vocabulary."""

CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}"
    "{% if message['role'] in ('system', 'user', 'assistant') %}<|{{ message['role'] }}|>"
    "{% else %}{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_config(out_dir: Path, own: dict[str, Any], around: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write config.json and generation_config.json to ``out_dir``, made when missing.

    ``own``: the model's values, over the defaults below. ``around``: an outer configuration that gets the
    model's as its ``text_config``; None for none. Returns the model's configuration.
    """
    first_special = own["vocab_size"] - len(SPECIAL_TOKENS)
    special = {
        f"{name}_token_id": first_special + SPECIAL_TOKENS.index(f"<{name}>")
        for name in ("bos", "eos", "pad")
    }
    config = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_key_value_heads": own["num_attention_heads"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        **own,
        **special,
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    whole = config if around is None else {**around, "text_config": config}
    for name, content in (("config", whole), ("generation_config", special)):
        (out_dir / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    return config


def save_tokenizer(tokenizer: Tokenizer, out_dir: Path, model_max_length: int) -> None:
    """Write a byte-level ``tokenizer`` with the special tokens and the chat template to ``out_dir``."""
    from tokenizers import AddedToken, decoders
    from transformers import PreTrainedTokenizerFast

    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(out_dir)


def byte_characters() -> list[str]:
    """Return the printable character that byte-level vocabularies, from GPT-2 on, write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(NUM_BYTES) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {
        byte: chr(NUM_BYTES + number) for number, byte in enumerate(others)
    }
    return [characters[byte] for byte in range(NUM_BYTES)]
