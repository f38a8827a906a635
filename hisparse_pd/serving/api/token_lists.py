"""Writes token ids as JSON lists, long ones piece by piece in a thread.

``tokens.py`` answers with such lists, and ``openai_answers.py`` writes the ids of prompts.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Raw

from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.serving.http.off_loop import off_loop

TOKENS_A_PIECE = 1 << 14
"""Tokens that are encoded as JSON at a time, which takes some 5 ms in which no other thread runs."""
_MAX_INLINE_TOKENS = TOKENS_A_PIECE // 16
"""Most tokens that are encoded in the event loop, in some 0.3 ms; more of them go to a thread."""


async def json_list(packed: bytes, show: Callable[[list[int]], object] = list) -> Raw:
    """Return the JSON of the list that ``show`` makes of packed token ids, encoded piece by piece."""
    token_ids = unpack_token_ids(packed)

    def encoded(start: int) -> bytes:
        return msgspec.json.encode(show(token_ids[start : start + TOKENS_A_PIECE].tolist()))[1:-1]

    if len(token_ids) <= _MAX_INLINE_TOKENS:
        return Raw(b"[%b]" % encoded(0))
    pieces = [await off_loop(encoded, start) for start in range(0, len(token_ids), TOKENS_A_PIECE)]
    return Raw(b"[%b]" % b",".join(pieces))
