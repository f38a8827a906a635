"""Logprobs of a prompt's own tokens: what a decode node asks for, and the rows with which it is answered."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

MAX_LOGPROBS = 20
"""Likeliest tokens that are told of one position at most."""

MAX_ROWS_BYTES = 1 << 20
"""Bytes of rows in one message at most: scores leave in pieces, as they are computed."""


class WantedScores(Struct, frozen=True, array_like=True):
    """Logprobs of the prompt's tokens from position ``first`` on; the token at position 0 has none.

    ``num_top``: the likeliest tokens that are told of each position, beside the token that is there.
    """

    first: Annotated[int, Meta(ge=1, lt=2**32)]
    num_top: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


def score_dtype(num_top: int) -> np.dtype[np.void]:
    """One row a position: the token's logprob, how many tokens are as likely or likelier, itself counted, and
    the likeliest tokens with theirs. Of equally likely tokens the lowest ids come first."""
    return np.dtype(
        [
            ("logprob", "<f4"),
            ("rank", "<i4"),
            ("top_ids", "<i4", (num_top,)),
            ("top_logprobs", "<f4", (num_top,)),
        ]
    )
