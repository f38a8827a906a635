"""Token tries of a byte-level tokenizer without merges, and what its tokens spell."""

from __future__ import annotations

import json
from functools import cache

import numpy as np

from hisparse_pd.core.grammar.matcher import Bits, Matcher, OutputMasks, fill_masks
from hisparse_pd.core.grammar.token_trie import TokenTrie
from tools.checkpoints.files import SPECIAL_TOKENS, byte_characters

EOS, OTHER_EOS = 258, 261
VOCAB_SIZE = 300
"""Number of logits; the tokenizer has 262 tokens."""


def tokenizer_json() -> str:
    names = [*byte_characters(), *SPECIAL_TOKENS]
    added = [
        {"id": index, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, name in enumerate(names)
        if name in SPECIAL_TOKENS
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {name: at for at, name in enumerate(names)}, "merges": []},
        }
    )


@cache
def trie() -> TokenTrie:
    return TokenTrie(tokenizer_json(), VOCAB_SIZE, (EOS, OTHER_EOS))


def schema(of: object) -> str:
    return "start: %json " + json.dumps(of)


def allowed(mask: Bits) -> set[int]:
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def next_tokens(matcher: Matcher) -> set[int]:
    masks = np.zeros((1, trie().num_words), dtype=np.int32)
    fill_masks(masks, [OutputMasks(matcher, 0, ())])
    return allowed(masks[0])


def matcher(grammar: str, *, ignore_eos: bool = False) -> Matcher:
    return trie().compile(grammar).matcher(ignore_eos=ignore_eos)
