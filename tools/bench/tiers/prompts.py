"""Prompts of random tokens, and the bodies of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tools.bench.serve import HISPARSE

PREFIX, TURN, CONVERSATION = range(3)
"""First numbers of keys, by what tokens are drawn for."""


@dataclass(frozen=True)
class Prompts:
    """Tokens by what they are drawn for. ``token_range``: the ids, from the first to one behind the last."""

    model: str
    token_range: Sequence[int]
    seed: int

    def tokens(self, count: int, *key: int) -> list[int]:
        """Return tokens that are the same for an equal ``key``, and others for another one."""
        low, high = self.token_range
        found: list[int] = np.random.default_rng((self.seed, *key)).integers(low, high, count).tolist()
        return found

    def body(
        self, prompt: Sequence[int], max_tokens: int, hisparse: str, *, returns_ids: bool = False
    ) -> bytes:
        """Return the body of a request for ``max_tokens`` tokens. ``hisparse``: a key of
        ``serve.HISPARSE``. ``returns_ids``: whether the answer has token ids, those of the prompt, too, which
        take as many bytes as the body."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": returns_ids,
            "ignore_eos": True,
        }
        if HISPARSE[hisparse] is not None:
            fields["hisparse"] = HISPARSE[hisparse]
        return msgspec.json.encode(fields)
