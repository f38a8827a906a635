"""Messages between a node's HTTP fronts and its engine processes, which ``sockets.py`` carries.

Both ends are one release of one program, so the messages carry no version. They are tagged Structs in
msgpack, like the control messages between nodes, with one typed decoder for each direction: ``ToEngine``,
``FromEngine``.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.msgpack import Encoder
from msgspec.structs import asdict

from hisparse_pd.base.vocabulary import (
    FinishReason,
    HisparseFlag,
    Mode,
    SamplingParams,
    TokenLogprob,
    info_metric,
)
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.phases import Phase
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.messages import TOKEN_BYTES, PrefillTimes, RoomDone
from hisparse_pd.protocol.prompt_scores import WantedScores

# --- front to engine -------------------------------------------------------------------------------


class Generate(Struct, frozen=True, omit_defaults=True):
    """One sample of a ``GenerateGroup``. ``room`` is the request's id on the prefill node, too.

    ``request_id`` begins with a ``request_prefix``. ``bootstrap_host`` and ``bootstrap_port`` name the
    prefill node. ``hisparse`` is None when the request did not say.
    """

    request_id: str
    room: int
    num_prompt_tokens: int
    sampling: SamplingParams
    bootstrap_host: str
    bootstrap_port: int
    hisparse: HisparseFlag | None = None
    is_speculative: bool = True
    """Whether the request's steps may verify drafts."""
    scores: WantedScores | None = None
    """The prompt tokens whose logprobs are wanted."""


class GenerateGroup(Struct, frozen=True, tag="generate"):
    """All samples of one prompt, which is sent once, for a decode engine. In a resumed stream, all of them
    resume the same number of tokens (``SamplingParams.num_resumed_tokens``), with which ``prompt`` ends.

    ``root``: the first key of the prompt's pages, which depends on the request's isolation
    (``prompt_keys.py``).
    ``prompt``: all token ids, packed by ``pack_token_ids``.
    ``page_keys``: the keys of the prompt's whole pages.
    """

    samples: tuple[Generate, ...]
    root: PageKey
    prompt: bytes
    page_keys: tuple[PageKey, ...] = ()


class Abort(Struct, frozen=True, tag="abort"):
    """The client is gone, or a stop string was met. No answer follows; unknown ids are ignored."""

    request_id: str
    has_finished: bool = False
    """Whether a stop string was met, so that the client has its answer."""


class FlushCache(Struct, frozen=True, tag="flush_cache"):
    """Drop every cached or held prefix that no request uses. Flushed is the answer.

    ``request_id``: begins with a ``request_prefix``; the answer has it, too.
    """

    request_id: str


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """Leave the loop, release everything and exit with status 0, once every front has said so."""

    front_number: int = 0


class ReleaseQuarantine(Struct, frozen=True, tag="release_quarantine"):
    """An operator states that this run of a prefill node has ended, so that the slots that it might still
    write to are free. A prefill node ignores it."""

    instance_id: str


class ReleasePage(Struct, frozen=True, tag="release_page"):
    """An operator states that a page that was set aside is good again."""

    pool: PoolKind
    start: int
    """The page's first slot, as in ``SetAsidePage``."""


def request_prefix(front_number: int) -> str:
    """Return the beginning of the ids of one HTTP request's samples: the number of the front that gets the
    answers, and a random part."""
    return f"{front_number:02x}{secrets.token_hex(8)}"


def front_number_of(request_id: str) -> int:
    """Return the number of the request's front. Raises ValueError unless the id begins with a
    ``request_prefix``."""
    return int(request_id[:2], 16)


ToEngine = GenerateGroup | Abort | FlushCache | ReleaseQuarantine | ReleasePage | Shutdown


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return a prompt as int32, little endian. A msgpack list would have an object for each id."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)  # takes a third of numpy's time for a list


def unpack_token_ids(prompt: bytes) -> npt.NDArray[np.int32]:
    """Return the ids ``[num_tokens]`` of a packed prompt, read-only, without a copy."""
    return np.frombuffer(prompt, "<i4")


def num_packed_tokens(prompt: bytes) -> int:
    return len(prompt) // TOKEN_BYTES


# --- engine to front -------------------------------------------------------------------------------


class EngineLoading(Struct, frozen=True, tag="loading"):
    """The engine is not ready yet. Sent twice a second while weights are read, and when a stage begins.

    ``num_done`` of the stage's ``num_bytes`` are done; both are 0 in a stage that is not measured in bytes.
    """

    stage: str
    num_done: int = 0
    num_bytes: int = 0

    def __str__(self) -> str:
        if not self.num_bytes:
            return self.stage
        return f"{self.stage}, {self.num_done / 1e9:.1f} of {self.num_bytes / 1e9:.1f} GB"


class EngineReady(Struct, frozen=True, tag="ready"):
    """The engine serves. The front refuses requests that exceed these bounds.

    ``control_endpoint``, ``instance_id`` and ``geometry`` (msgpack of ``protocol.messages.Geometry``) go to
    the bootstrap endpoint of a prefill node and are empty for a decode node.
    """

    context_length: int
    max_total_tokens_hisparse: int
    """Most tokens of prompt and output together that fit the pools as a hisparse request."""
    max_total_tokens_dense: int
    control_endpoint: str = ""
    instance_id: str = ""
    geometry: bytes = b""
    transfer_protocol: str = ""
    """The KV transport's protocol; its RDMA devices and the reason of the choice follow."""
    transfer_devices: tuple[str, ...] = ()
    transfer_reason: str = ""
    numa_node: int | None = None
    """The NUMA node of the engine's threads and pools, with the reason; None: the kernel decides."""
    numa_placement: str = ""


class Tokens(Struct, frozen=True, tag="tokens", omit_defaults=True):
    """New tokens of a request, in order; the last message has a ``finish_reason``.

    Each that an engine sends carries the ``stats`` so far, because a stop string lets the front end a request
    at any token. ``stats`` is None only in what a front makes of a journal's record without them, to replay a
    resumed stream. ``phases``: those that have ended since the message before. ``prefill``: the prefill
    node's times, with the first token; None where no prefill node took part.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop_token: int | None = None
    stats: RequestStats | None = None
    phases: tuple[Phase, ...] = ()
    prefill: PrefillTimes | None = None


class CachedTokens(Struct, frozen=True):
    """Cached tokens of a prompt, by the tier that spared computing them.

    ``device``, ``host``: the prefill node's tiers. What another request brought up counts as on the device.
    ``storage``: the cluster's store; what it brought to main memory for another request counts as there.
    ``decode``: what the decode node had of a prompt that no prefill node was asked for, and what the prefill
    node read from there.
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    decode: int = 0

    @classmethod
    def of_room(cls, done: RoomDone) -> Self:
        """Return those of a prefill node's RoomDone. It cannot have fetched more than it had cached."""
        left = done.num_cached_tokens
        decode = min(done.fetched.decode, left)
        storage = min(done.fetched.storage, left - decode)
        host = min(done.fetched.host, left - decode - storage)
        return cls(device=left - host - storage - decode, host=host, storage=storage, decode=decode)

    def by_tier(self) -> dict[str, int]:
        return asdict(self)

    def first(self, num_tokens: int) -> CachedTokens:
        """Return those of the prompt's first ``num_tokens`` tokens; the device's come before the host's,
        then come the store's and the decode node's."""
        counts = {}
        for tier, count in self.by_tier().items():
            counts[tier] = min(count, num_tokens)
            num_tokens -= counts[tier]
        return CachedTokens(**counts)


class RequestStats(Struct, frozen=True):
    """The mode, tokens and counts of one request."""

    mode: Mode
    cached: CachedTokens = CachedTokens()
    num_held_tokens: int = 0
    """Prompt tokens whose KV the decode node held, so that no prefill node sent it."""
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    transfer_bytes: int = 0
    transfer_secs: float = 0.0
    num_retractions: int = 0
    """Times that the request, being dense, became hisparse, or that its hot buffer shrank."""
    num_drafted: int = 0
    """Drafts that steps have verified."""
    num_accepted: int = 0
    """Drafts of ``num_drafted`` that the model drew as well."""

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached.by_tier().values())


class PromptScores(Struct, frozen=True, tag="prompt_scores"):
    """Logprobs of a prompt's tokens, in order and in pieces, before the request's first token.

    ``rows``: one row of ``prompt_scores.score_dtype(num_top)`` a position, from ``WantedScores.first`` on.
    """

    request_id: str
    num_top: int
    rows: bytes


class RequestFailed(Struct, frozen=True, tag="request_failed"):
    """The request ended in an error with this HTTP ``status``; no further message follows.

    ``code``: an error code, such as those in ``vocabulary.py``; empty when the status says all. ``phases``:
    those that the front has not heard of; the request failed in the last one.
    """

    request_id: str
    status: int
    error: str
    code: str = ""
    phases: tuple[Phase, ...] = ()


class Flushed(Struct, frozen=True, tag="flushed"):
    """The prefixes of the FlushCache with this ``request_id`` are dropped."""

    request_id: str


class QuarantinedRun(Struct, frozen=True):
    """Slots that a decode node does not reuse because one run of a prefill node may still write there."""

    prefill_node: str
    """Its bootstrap endpoint, ``host:port``."""
    instance_id: str
    num_rooms: int
    num_unacknowledged: int
    """Rooms whose writes the run has not confirmed to be over. The slots of other rooms are free after a
    known time."""
    longest_secs: float
    """Longest time that one of these rooms has been in quarantine."""
    host_slots: int
    device_slots: int
    index_slots: int
    aux_slots: int


class SetAsidePage(Struct, frozen=True):
    """A page that a node does not reuse because a row in it did not match its row check."""

    pool: PoolKind
    """"host" or "device"."""
    start: int
    """Its first slot."""
    num_slots: int
    is_in_use: bool
    """Whether a request that had the page before still has it."""
    error: str
    """The wrong row, with its check and the expected one."""
    at: float
    """Seconds since the epoch."""


class PeerLane(Struct, frozen=True):
    """How KV goes between this rank and a peer: ``lane`` is shm, tcp or rdma."""

    peer: str
    """A prefill node's bootstrap endpoint, or a decode node's session."""
    lane: str
    reason: str

    @property
    def info_metric(self) -> str:
        return info_metric("lane_info", peer=self.peer, lane=self.lane, reason=self.reason)


class EngineStats(Struct, frozen=True, tag="stats"):
    """The engine's statistics, sent at least twice a second while its loop turns; /health fails without them.

    ``gauges`` are current values, ``counters`` monotone totals since the engine's start; the names are
    the metric names without prefix, with labels as ``name{label="value"}``.
    """

    gauges: dict[str, float]
    counters: dict[str, float]
    num_running: int
    num_waiting: int
    num_used_tokens: int
    step: int
    """Turns of the loop that did work. The front calls the engine stalled if this number stays the same while
    ``num_running`` exceeds ``num_without_grammar``."""
    trouble: str = ""
    """Why no request can be admitted until an operator acts; empty while one can."""
    quarantine: tuple[QuarantinedRun, ...] = ()
    set_aside: tuple[SetAsidePage, ...] = ()
    lanes: tuple[PeerLane, ...] = ()
    num_without_grammar: int = 0
    """Running requests that wait, for a bounded time, until their grammars are compiled."""


FromEngine = EngineLoading | EngineReady | Tokens | PromptScores | RequestFailed | Flushed | EngineStats

encoder = Encoder()
to_engine_decoder: TypedDecoder[ToEngine] = TypedDecoder(ToEngine)
from_engine_decoder: TypedDecoder[FromEngine] = TypedDecoder(FromEngine)
