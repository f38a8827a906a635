"""A byte-level tokenizer in which the first 256 token ids are the bytes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

EOS = "<|end|>"
BOS = "<|begin|>"
WORDS = ("the", " page", " pool", "st", "op")


def make_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, a few merged words, then the special tokens."""
    vocab = {char: i for i, char in enumerate(byte_chars())}
    merges = []
    for word in WORDS:
        joined = word.replace(" ", "Ġ")
        for length in range(2, len(joined) + 1):
            piece = joined[:length]
            if piece not in vocab:
                vocab[piece] = len(vocab)
                merges.append((piece[:-1], piece[-1]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token=BOS)
    if bos:
        bos_id = tokenizer.convert_tokens_to_ids(BOS)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
        )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system must come first') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def byte_chars() -> list[str]:
    """Return the vocabulary's character for each byte 0..255, whose token id is the byte."""
    shown = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(range(256))
    return [chr(byte) if chr(byte) in shown else chr(0x100 + next(others)) for byte in range(256)]


def write_checkpoint(directory: Path) -> Path:
    """Write a directory with the files that a front reads: config.json and the tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer)}))
    return directory
