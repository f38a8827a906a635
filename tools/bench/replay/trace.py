"""Reads a trace of Mooncake's format, and makes prompts of it.

A line is a JSON object with ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens,
and ``hash_ids``: one id for each block of the prompt, the last of which may be shorter. Blocks have
TRACE_BLOCK tokens in Mooncake's own traces; converted ones (``convert.py``) may have others. Equal ids mean
equal prompts up to the end of their blocks. Prompts are made of the ids alone: each id has its own tokens.
With fewer tokens a block than in the trace, a prompt has as many blocks, and is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

TRACE_BLOCK: Final = 512
"""Tokens of a block in Mooncake's traces."""


class TraceError(Exception):
    """A trace cannot be read; the message names file and line."""


class TraceRequest(Struct, frozen=True):
    """One line of a trace."""

    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds since the trace's beginning."""
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...]


def read_trace(path: Path, num_requests: int = 0, trace_block: int = TRACE_BLOCK) -> list[TraceRequest]:
    """Return the first requests of a trace, all of them if ``num_requests`` is 0. Raises TraceError, also
    where an id comes after different ones, as equal ids would then not mean equal prompts.

    ``trace_block``: tokens of a block in this trace.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    found: list[TraceRequest] = []
    before: dict[int, int | None] = {}
    try:
        with path.open("rb") as lines:
            for line in islice(lines, num_requests or None):
                request = decoder.decode(line)
                _check(request, trace_block, before)
                if found and request.timestamp < found[-1].timestamp:
                    raise ValueError("its timestamp is before that of the line above")
                found.append(request)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(f"{path}, line {len(found) + 1}: {error}") from error
    if not found:
        raise TraceError(f"{path}: it has no requests")
    return found


def _check(request: TraceRequest, trace_block: int, before: dict[int, int | None]) -> None:
    """Raise ValueError if ids do not fit. ``before``: each id with the one that it follows, which grows."""
    if len(request.hash_ids) != (num_blocks := -(-request.input_length // trace_block)):
        raise ValueError(
            f"{len(request.hash_ids)} hash_ids, and {request.input_length} tokens have {num_blocks} blocks"
        )
    last: int | None = None
    for block in request.hash_ids:
        if before.setdefault(block, last) != last:
            raise ValueError(f"id {block} follows {last} here and {before[block]} above")
        last = block


@dataclass(frozen=True)
class Scale:
    """Lengths with ``block_tokens`` tokens a block, where the trace has ``trace_block``."""

    block_tokens: int
    trace_block: int = TRACE_BLOCK

    def num_tokens(self, length: int) -> int:
        """Return the scaled number of ``length`` tokens, rounded up."""
        num_whole, rest = divmod(length, self.trace_block)
        return num_whole * self.block_tokens + -(-rest * self.block_tokens // self.trace_block)

    def page_keys(self, request: TraceRequest, page_size: int) -> list[tuple[int, int]]:
        """Return a key for each page of a request's prompt that a prefix cache can share: whole pages before
        the last token. It is the id of the block in which the page ends, and where it ends there."""
        num_pages = (self.num_tokens(request.input_length) - 1) // page_size
        ends = range(page_size, num_pages * page_size + 1, page_size)
        blocks = ((end - 1) // self.block_tokens for end in ends)
        return [
            (request.hash_ids[block], end - block * self.block_tokens)
            for end, block in zip(ends, blocks, strict=True)
        ]


class PromptMaker:
    """Prompts of ids in [low, high); the same trace and ``seed`` give the same ones."""

    def __init__(self, scale: Scale, token_range: tuple[int, int], seed: int) -> None:
        self._scale = scale
        self._token_range = token_range
        self._seed = seed

    def prompt(self, request: TraceRequest) -> list[int]:
        num_tokens = self._scale.num_tokens(request.input_length)
        found: list[int] = np.concatenate(self._blocks(request.hash_ids))[:num_tokens].tolist()
        return found

    def _blocks(self, ids: Sequence[int]) -> list[NDArray[np.int64]]:
        low, high = self._token_range
        return [
            np.random.default_rng((self._seed, block)).integers(low, high, self._scale.block_tokens)
            for block in ids
        ]
