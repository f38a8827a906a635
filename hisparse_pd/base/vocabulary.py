"""The words of all rooms: what a request asks for, how it was served, how it ended. Imports none of ours."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

VERSION = "0.1.0"

PREFILL_NODE_FAILED = "prefill_node_failed"
"""Code of a decode node's error that is about its request's prefill node: another one may do better. Without
it a 503 is about the decode node, and a 502 about the transfer to it."""

ENGINE_LOST = "engine_lost"
"""Code of an error of a node one of whose engines has died, or stands still: the node ends."""

MOVED = "moved"
"""Code of an error of a node that leaves: its requests go on at another one."""

KV_ROW_CORRUPT = "kv_row_corrupt"
"""Code of an error of a decode node, which found that a row of KV was not as it was written. What the request
had of it until then is right, and another node can go on with it."""

MAX_RANKS = 64
"""Of a node."""

MAX_DRAFTS = 7
"""Of a request that a step verifies: as many as GLM-5.2's draft layer was trained to make."""


class RankPlace(Struct, frozen=True):
    """One engine process of a node of ``size``.

    They meet in the file ``meeting_path`` or, when the node has several machines, at the address
    ``meeting_host`` and the port ``meeting_port`` of rank 0's.
    """

    rank: int = 0
    size: int = 1
    meeting_path: str = ""
    meeting_host: str = ""
    meeting_port: int = 0


class StartError(Exception):
    """What was configured cannot work here, and the message says what to do; a traceback would bury it."""


class CheckpointError(StartError):
    """A checkpoint is missing, incomplete or not supported; the message says which, and what is."""


class HisparseFlag(StrEnum):
    """What a request asks for. ``AUTO`` lets the decode node choose by the room in its device pool."""

    TRUE = "true"
    FALSE = "false"
    AUTO = "auto"


class Mode(StrEnum):
    """How the decode node served a request."""

    HISPARSE = "hisparse"
    DENSE = "dense"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


MAX_LOGIT_BIAS = 1024
"""Tokens that a request may bias."""


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """Validated sampling settings of one sample. Stop strings are the front's business, not the engine's."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    """None: no logprobs; n: the sampled token's and those of the n likeliest tokens."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are left out."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the output has it."""
    repetition_penalty: float = 1.0
    """The logit of each token that prompt or output has is divided by it, or multiplied when negative."""
    logit_bias: bytes = b""
    """As of ``pack_logit_bias``: added to the logits of these token ids."""
    grammar: str = ""
    """What the output has to be, as llguidance reads it: Lark with ``%json``; empty: anything."""
    num_resumed_tokens: int = 0
    """The last of the prompt are the first of an output that goes on here: draws, penalties and the grammar
    go on behind them. The two bounds of new tokens do not count them."""

    @property
    def needs_prompt(self) -> bool:
        """Whether draws depend on which tokens the prompt has."""
        follows = self.num_resumed_tokens > 0 and (self.changes_logits or bool(self.grammar))
        return self.repetition_penalty != 1 or follows

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases come before the draw."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or len(self.logit_bias) > 0


def pack_logit_bias(biases: Sequence[tuple[int, float]]) -> bytes:
    """Token ids, int32, and behind all of them their biases, float32, little endian: each sample has its own
    copy of a thousand of them, which as objects would be fifteen times as much."""
    token_ids, values = (token_id for token_id, _ in biases), (bias for _, bias in biases)
    return struct.pack(f"<{len(biases)}i{len(biases)}f", *token_ids, *values)


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural-log probability of a sampled token under the unscaled logits, with the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def info_metric(name: str, **labels: str) -> str:
    """Name and labels of a gauge that is always 1, and whose labels tell something."""
    # What would end a label or a line of Prometheus' text is no part of any label but by accident.
    harmless = str.maketrans('"{}\n\\', "'()  ")
    told = ",".join(f'{label}="{value.translate(harmless)}"' for label, value in labels.items())
    return f"{name}{{{told}}}"
