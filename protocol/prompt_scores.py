"""Logprobs of a prompt's own tokens: the decode node's request for them, and the rows of the answer.

A Bootstrap carries ``WantedScores``, and RoomScores messages bring the rows to the decode node, which passes
them on to its front.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

MAX_LOGPROBS = 20
"""Limit for the number of likeliest tokens in the row of one position."""

MAX_ROWS_BYTES = 1 << 20
"""Limit for the bytes of rows in one message. Scores are sent in pieces, as they are computed."""


class WantedScores(Struct, frozen=True, array_like=True):
    """A request for logprobs of the prompt's tokens from position ``first`` on; position 0 has none.

    ``num_top``: how many of the likeliest tokens a row has, beside the prompt's own token.
    """

    first: Annotated[int, Meta(ge=1, lt=2**32)]
    num_top: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


def score_dtype(num_top: int) -> np.dtype[np.void]:
    """Return the dtype of one position's row: the token's logprob, its rank (how many tokens are at least as
    likely, itself included), and the likeliest tokens with their logprobs. Among equally likely tokens the
    lowest ids come first."""
    return np.dtype(
        [
            ("logprob", "<f4"),
            ("rank", "<i4"),
            ("top_ids", "<i4", (num_top,)),
            ("top_logprobs", "<f4", (num_top,)),
        ]
    )
