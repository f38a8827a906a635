"""Words that nodes, router and tools share: error codes, modes, sampling parameters, finish reasons, version.

Nothing here depends on another module of the project, so all of them may import it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

VERSION = "0.1.0"

PREFILL_NODE_FAILED = "prefill_node_failed"
"""Error code of a decode node whose request's prefill node failed; another prefill node may serve it. Without
this code, a 503 is about the decode node, and a 502 about the transfer to it."""

ENGINE_LOST = "engine_lost"
"""Error code of a node one of whose engines has died or stands still; the node ends."""

MOVED = "moved"
"""Error code of a node that shuts down; the request goes on at another node."""

KV_ROW_CORRUPT = "kv_row_corrupt"
"""Error code of a decode node that found a row of KV that is not as it was written. The tokens that the
request had until then are right, and another node can continue it."""

MAX_RANKS = 64
"""Limit of ranks in a node."""

MAX_DRAFTS = 7
"""Limit of drafts that a step verifies for a request: as many as GLM-5.2's draft layer was trained to
make."""


class RankPlace(Struct, frozen=True):
    """The place of one engine process in a node of ``size`` ranks.

    The ranks meet by the file ``meeting_path`` or, in a node of several machines, at the address
    ``meeting_host`` and port ``meeting_port`` of rank 0's machine.
    """

    rank: int = 0
    size: int = 1
    meeting_path: str = ""
    meeting_host: str = ""
    meeting_port: int = 0


class StartError(Exception):
    """The configuration cannot work here. The message says what to do, and is shown without a traceback."""


class CheckpointError(StartError):
    """A checkpoint is missing, incomplete or not supported; the message says which, and what is."""


class HisparseFlag(StrEnum):
    """What a request asks for. ``AUTO`` lets the decode node choose by the free space in its device pool."""

    TRUE = "true"
    FALSE = "false"
    AUTO = "auto"


class Mode(StrEnum):
    """How the decode node served a request."""

    HISPARSE = "hisparse"
    DENSE = "dense"


class FinishReason(StrEnum):
    """Why an answer ended: at an eos, a stop token or a stop string; or at a limit of tokens."""

    STOP = "stop"
    LENGTH = "length"


MAX_LOGIT_BIAS = 1024
"""Limit of tokens that a request may bias."""


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """Validated sampling settings of one sample. Stop strings are not among them: fronts look for them."""

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
    """None: no logprobs; n: those of the sampled token and of the n likeliest tokens."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are left out."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it is in the output."""
    repetition_penalty: float = 1.0
    """Divisor of the logit of each token in prompt or output; a negative logit is multiplied by it."""
    logit_bias: bytes = b""
    """Biases to add to logits, from ``pack_logit_bias``."""
    grammar: str = ""
    """Grammar of the output, as llguidance reads it (Lark with ``%json``); empty: any output."""
    num_resumed_tokens: int = 0
    """Number of tokens at the prompt's end that are the beginning of a resumed output. Draws, penalties and
    the grammar continue after them. ``max_new_tokens`` and ``min_new_tokens`` do not count them."""

    @property
    def needs_prompt(self) -> bool:
        """Whether draws depend on which tokens the prompt has."""
        reads_resumed = self.num_resumed_tokens > 0 and (self.changes_logits or bool(self.grammar))
        return self.repetition_penalty != 1 or reads_resumed

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases come before the draw."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or len(self.logit_bias) > 0


def pack_logit_bias(biases: Sequence[tuple[int, float]]) -> bytes:
    """Pack all token ids (int32) and then all biases (float32), little endian.

    Each sample has a copy of up to a thousand biases, which as objects would take fifteen times the memory.
    """
    token_ids, values = (token_id for token_id, _ in biases), (bias for _, bias in biases)
    return struct.pack(f"<{len(biases)}i{len(biases)}f", *token_ids, *values)


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural-log probability of a sampled token under the unscaled logits, and of the likeliest tokens."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Token id and logprob of each of the likeliest tokens, likeliest first."""


def info_metric(name: str, **labels: str) -> str:
    """Return name and labels of a gauge that is always 1, whose labels carry the information."""
    # Characters that would end a label or a line of Prometheus' text are replaced.
    harmless = str.maketrans('"{}\n\\', "'()  ")
    shown = ",".join(f'{label}="{value.translate(harmless)}"' for label, value in labels.items())
    return f"{name}{{{shown}}}"
