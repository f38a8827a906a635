# ruff: noqa: RUF001 -- the marks of the models are written with wide bars
"""Tokenizers of several kinds, with templates that write control tokens and all strings of clients."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hisparse_pd.serving.api.text_codec import TextCodec
from tests.unit.api.tiny_tokenizer import byte_chars, make_tokenizer
from tools.checkpoints import files

READS_REASONING = (
    "{% set text = m.content %}{% set reasoning = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set reasoning = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].strip() %}{% endif %}"
    "{% if m.role == 'assistant' and reasoning %}<think>{{ reasoning }}</think>{% endif %}"
)
_WRITES_REASONING = (
    "{% set text = m.content %}"
    "{% if m.role == 'assistant' and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
)
_WRITES_ALL = (
    "{% for t in tools or [] %}<tools>{{ t | tojson }}{{ t.function.name }}{{ t.function.description }}"
    "{% for key, rule in t.function.parameters.properties.items() %}"
    "{{ '<' ~ key ~ '>' }}{{ rule }}{{ '</' ~ key ~ '>' }}{% if rule.type == 'object' %}(o){% endif %}"
    "{% endfor %}</tools>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>%REASONING%{{ text | trim }}"
    "{% for t in m.tools or [] %}{{ t | tojson(ensure_ascii=true) }}{% endfor %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{{ c.function.arguments }}{% if c.function.arguments is mapping %}"
    "{% for key, value in c.function.arguments.items() %}{{ '<|%s|>' % key }}{{ value }}|>{% endfor %}"
    "{% endif %}</tool_call>{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    "{{ extra }}{{ reasoning_effort }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WRITES_ALL = _WRITES_ALL.replace("%REASONING%", _WRITES_REASONING)
READS_ALL = _WRITES_ALL.replace("%REASONING%", READS_REASONING)
ROLES = ("<|system|>", "<|developer|>", "<|user|>", "<|assistant|>", "<|tool|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


def _with_tokens(tokenizer: PreTrainedTokenizerFast, **options: bool) -> PreTrainedTokenizerFast:
    """Roles are special tokens and marks are not, as in GLM's and Qwen's tokenizers."""
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False, **options) for text in ROLES])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKS])
    return tokenizer


def _bytes() -> PreTrainedTokenizerFast:
    tokenizer = _with_tokens(make_tokenizer())
    tokenizer.chat_template = READS_ALL
    return tokenizer


def _deepseek() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (*MARKS[:2], "｜DSML｜", *DEEPSEEK)])
    tokenizer.bos_token, tokenizer.eos_token = DEEPSEEK[:2]
    tokenizer.chat_template = None
    return tokenizer


def _retrieval() -> PreTrainedTokenizerFast:
    directory = Path(files.__file__).with_name("retrieval")
    return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def _normalizing() -> PreTrainedTokenizerFast:
    """Its special tokens swallow the spaces behind them, and its marks are found in the normalized text."""
    tokenizer = _with_tokens(make_tokenizer(), rstrip=True)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase()]
    )
    tokenizer.chat_template = WRITES_ALL
    return tokenizer


def _words() -> PreTrainedTokenizerFast:
    """Its vocabulary has the marks as words of the text, too."""
    words = [*byte_chars(), *ROLES, *MARKS]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    pieces = pre_tokenizers.Split(Regex(r"</?[a-z_]+>|<\|[a-z]+\|>|\s+|\w+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    backend.decoder = decoders.ByteLevel()
    tokenizer = _with_tokens(PreTrainedTokenizerFast(tokenizer_object=backend))
    tokenizer.chat_template = WRITES_ALL
    return tokenizer


_MAKERS = {
    "bytes": (_bytes, "glm_moe_dsa"),
    "deepseek": (_deepseek, "deepseek_v32"),
    "retrieval": (_retrieval, "deepseek_v32"),
    "normalizing": (_normalizing, "glm_moe_dsa"),
    "words": (_words, "glm_moe_dsa"),
}
KINDS = tuple(_MAKERS)


@cache
def codec(kind: str, *, clients_write_tokens: bool = False) -> TextCodec:
    make, model_type = _MAKERS[kind]
    tokenizer: Any = make()
    return TextCodec(tokenizer, len(tokenizer), model_type, clients_write_tokens=clients_write_tokens)


@cache
def spellings(kind: str) -> tuple[str, ...]:
    return tuple(codec(kind).chat_format.token_ids)
