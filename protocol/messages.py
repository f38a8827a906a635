"""Control messages between a decode node and a prefill node.

A room's messages, in order: Register and Registered once for each connection, Bootstrap, RoomScores if
logprobs of the prompt are wanted, and RoomDone or RoomFailed; AbortRoom and RoomQuiet when the decode node
gives it up.

Every message is a frozen, array-like ``msgspec.Struct`` in msgpack. Array-like means append-only, but for
Bootstrap: a field may be added at the end, with a default, and never moved or removed. A peer that does not
send the new field still decodes (the default applies), a peer that does not know it ignores it. The golden
bytes in ``tests/unit/protocol/test_messages.py`` pin the encoding.

Outcome of a message that does not fit:

=============  ============================================================================
kind           outcome
=============  ============================================================================
oversized      ZMQ closes the connection (``MAX_MESSAGE_BYTES``); the peer reconnects
malformed      dropped and counted (``malformed``); truncated, wrong type, out of bounds, unknown tag
unregistered   Bootstrap or AbortRoom before Register: answered with RegistrationRefused
repeated       Bootstrap with the same attempt as one of its room that was delivered or has failed: answered
               with that outcome again, also while the failed room's writes are not over
duplicate      second Bootstrap of a live room, unless repeated: dropped and counted; the first one stands
unknown room   AbortRoom: answered with RoomQuiet (nothing in flight); from a prefill node: dropped, counted
late           Bootstrap of a room that ended, unless repeated, or of an attempt that was given up:
               RoomFailed; AbortRoom of another attempt than the live one: answered with RoomQuiet of its
               attempt; other messages: dropped, counted
=============  ============================================================================

No outcome is fatal to the node, and none touches another room.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Final, NewType

from msgspec import Meta, Struct
from msgspec.msgpack import Encoder

from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.protocol.prompt_scores import MAX_LOGPROBS, MAX_ROWS_BYTES, WantedScores

PROTOCOL_VERSION = 8

ROOT_BYTES = 16
"""Length of a request's root key, from which the keys of its pages are derived."""

TOKEN_BYTES = 4
"""Bytes of one token id in ``Bootstrap.prompt``."""
MAX_PROMPT_TOKENS = 1 << 20
"""Most token ids in one Bootstrap."""

MAX_MESSAGE_BYTES = 8 << 20
"""Largest control message, in bytes; it holds the longest prompt and about 200,000 extents."""

MAX_EXTENTS = 200_000
"""Most extents of one kind in a Bootstrap."""
MAX_LAYERS = 4096
"""Most layers of a model."""

DROP_REASONS = (
    "malformed",
    "oversized",
    "unroutable",  # to a peer that has no connection, or whose queue is full
    "unregistered",
    "refused",  # Register of a decode node that this node cannot serve
    "address_not_allowed",  # a connection, as in the next line (``zap.py``)
    "wrong_key",
    "duplicate",
    "late",
    "unknown_room",
)
"""Reasons under which messages without effect are counted. Counters start at 0, so that an alert sees the
first one too."""

Room = NewType("Room", int)
"""The id that the router gives one request on both nodes, in [0, 2**63)."""

RoomField = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, lt=2**48)]
Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Secs = Annotated[float, Meta(ge=0, le=1e6)]
"""Seconds; NaN is out of bounds too."""
Name = Annotated[str, Meta(max_length=256, pattern=r"^[ -~]*\Z")]
"""Printable ASCII, because names go to logs, metrics and the transport."""
MAX_TEXT_CHARS = 4096
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


class Extent(Struct, frozen=True, array_like=True):
    """``length`` contiguous token slots from ``start``; half-open, never empty."""

    start: Annotated[int, Meta(ge=0, lt=2**48)]
    length: Annotated[int, Meta(ge=1, lt=2**48)]

    @property
    def end(self) -> int:
        return self.start + self.length


Extents = Annotated[tuple[Extent, ...], Meta(max_length=MAX_EXTENTS)]


class Geometry(Struct, frozen=True, array_like=True):
    """The facts on which both nodes must agree. Only ``page_size`` may differ, and then only hisparse rooms
    are served.

    ``num_layers``: the model's layers that have KV; other layers may attend to the KV of an earlier one.
    ``num_draft_layers``: draft layers behind them, each with an indexer, whose KV the prefill node computes
    and the decode node takes; a decode node that states 0 gets none. ``index_rotation``: the rotation of
    indexer keys before they are rounded; "" for none. ``has_row_checks``: whether the decode node takes, or
    the prefill node computes, a check of each item; a decode node that takes none gets none.
    ``attention_split_tile_size``: the option of that name; None for the default.
    """

    model_fingerprint: Name
    dtype: Name
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    num_index_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    item_bytes: Annotated[int, Meta(ge=1, le=1 << 20)]
    index_item_bytes: Annotated[int, Meta(ge=1, le=1 << 20)]
    index_topk: Annotated[int, Meta(ge=1, le=1 << 20)]
    page_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    num_draft_layers: Annotated[int, Meta(ge=0, le=1)] = 0
    index_rotation: Name = ""
    has_row_checks: bool = False
    attention_split_tile_size: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers + self.num_draft_layers

    @property
    def num_index_groups(self) -> int:
        """Layers of ``INDEX``: those of the model that have an indexer, and the draft layers."""
        return self.num_index_layers + self.num_draft_layers


class RegionKind(StrEnum):
    """The kinds of memory that a decode node registers.

    ``KV_HOST`` and ``KV_DEVICE`` are ``[num_kv_layers][num_slots][item_bytes]``, ``INDEX`` is
    ``[num_index_groups][num_slots][index_item_bytes]``, ``AUX`` is ``[num_slots][aux slot bytes]``.
    ``ROW_CHECKS`` is ``[num_kv_layers][num_slots][ROW_CHECK_BYTES]``, with the slots of ``INDEX``; only a
    node that takes row checks has it.
    """

    KV_HOST = "kv_host"
    KV_DEVICE = "kv_device"
    INDEX = "index"
    AUX = "aux"
    ROW_CHECKS = "row_checks"


ROW_CHECK_BYTES = 4


class Region(Struct, frozen=True, array_like=True):
    """One registered region: ``num_bytes`` from ``base_addr``, with ``num_slots`` slots a layer."""

    kind: RegionKind
    base_addr: Address
    num_bytes: Count
    num_slots: Count


# --- decode node to prefill node -------------------------------------------------------------------


class Register(Struct, frozen=True, array_like=True, tag=1):
    """First message of a decode node. It is sent again after each reconnect, and each second until Registered
    or RegistrationRefused answers it. While the prefill node chooses the lane, which takes a while, it
    answers with a HeartbeatAck to say that it is alive. It also sends a HeartbeatAck to a decode node that is
    silent, to find out whether the connection stands."""

    protocol_version: Annotated[int, Meta(ge=0, lt=2**16)]
    node_id: Name
    session: Name
    geometry: Geometry
    regions: Annotated[tuple[Region, ...], Meta(max_length=8)]
    transfer_protocol: Name = ""
    """The session's protocol, such as "tcp"; empty from a node that does not say."""
    lane: LaneOffer | None = None
    instance_id: Name = ""
    """Names one run of the decode node, whichever ``node_id`` it registers under; empty from a node that does
    not say."""
    """An offer to processes of the same machine to open the memory of the regions; None if they cannot."""


class Heartbeat(Struct, frozen=True, array_like=True, tag=2):
    """Asks whether the prefill engine still turns, once per heartbeat interval. HeartbeatAck answers it, or
    RegistrationRefused when the decode node is not registered.

    ``seq``: the number of heartbeats sent since the prefill node's last message.
    """

    seq: Count


class HeldKv(Struct, frozen=True, array_like=True):
    """Where the decode node has a prompt's first tokens, which the prefill node may read from there.

    ``kv_extents``: token slots of ``KV_HOST`` when hisparse, else of ``KV_DEVICE``; ``index_extents``: those
    of ``INDEX`` and ``ROW_CHECKS``. Both are in position order from 0 on, and of the same number of tokens.
    ``num_prefilled_tokens``: how many of these tokens come before the first one whose KV is rounded as in
    decode steps. The slots stand until the room is delivered or quiet.
    """

    kv_extents: Extents
    index_extents: Extents
    num_prefilled_tokens: Count


class Bootstrap(Struct, frozen=True, array_like=True, tag=3):
    """The KV that a room lacks, and where it is to land.

    The prefill node computes all tokens of the prompt but the last one, which is the decode node's first
    step. It writes the KV of the tokens after the first ``num_held_tokens``, which the decode node has.

    ``kv_extents``: token slots of ``KV_HOST`` when hisparse, else of ``KV_DEVICE``, in position order.
    ``index_extents``: token slots of ``INDEX``, in position order, each a whole number of pages but the last;
    row checks go to the same slots of ``ROW_CHECKS``. Both kinds of extents cover the positions from
    ``num_held_tokens`` to the one before the prompt's last token.
    ``prompt``: the ids of all tokens, int32, little-endian. ``root``: the key from which the keys of the
    request's pages are derived; only prompts with the same root share KV.
    ``attempt``: the number of this landing zone. The decode node gives it to no other zone, and no longer
    sends it once it has given the zone up. A Bootstrap that repeats a number was sent again over a new
    connection, and is answered with the outcome of the room. 0 is the number of a node that does not say.
    ``num_resumed_tokens``: how many tokens at the prompt's end are output of a stream that is resumed here.
    From ``first_stepped`` on the prefill node computes with the roundings of decode steps.
    ``scores``: the wanted logprobs of the prompt's own tokens, if any.
    ``held``: where the first ``num_held_tokens`` are; None if nothing is to be read there.
    ``hisparse``: the request's mode; false is dense. It stays the last field. Unlike in other messages, a new
    field therefore comes before a known one and shifts it, so it raises PROTOCOL_VERSION.
    """

    room: RoomField
    kv_extents: Extents
    index_extents: Extents
    aux_slot: Count
    prompt: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=MAX_PROMPT_TOKENS * TOKEN_BYTES)]
    root: Annotated[bytes, Meta(min_length=ROOT_BYTES, max_length=ROOT_BYTES)]
    attempt: Count = 0
    num_held_tokens: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    num_resumed_tokens: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    scores: WantedScores | None = None
    held: HeldKv | None = None
    hisparse: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def num_computed_tokens(self) -> int:
        """Number of positions that the prefill node computes or has cached: all but the last."""
        return self.num_prompt_tokens - 1


STEPPED_BLOCK: Final = 16
"""Number of consecutive positions whose KV is rounded in one way, as in prefill forwards or as in decode
steps, if pages are a multiple of it (``first_stepped``)."""


def first_stepped(num_prompt_tokens: int, num_resumed_tokens: int, page_size: int) -> int:
    """Return the first position of a prompt whose KV is rounded as in decode steps.

    It begins the block of the prompt's last token, or, for a resumed stream, of the last token that is not
    output. A block is STEPPED_BLOCK positions, or fewer so that pages of ``page_size`` tokens, the decode
    node's, have whole blocks: with 200 tokens and pages of 64 it is 192, with 220 tokens 208.

    From this position on either node may compute the KV, the decode node in its steps, so both round as steps
    do. Before it KV is rounded as in prefill forwards, which on a GPU gives other bits for equal tokens.
    Pages that have this position or a later one are therefore neither taken from a cache nor shared while the
    request is live.
    """
    last = num_prompt_tokens - num_resumed_tokens - 1
    block = math.gcd(page_size, STEPPED_BLOCK)
    return last // block * block


class AbortRoom(Struct, frozen=True, array_like=True, tag=4):
    """The decode node gave the room up. RoomQuiet answers it once no write is in flight.

    ``attempt``: the room's, as in its Bootstrap; 0 from a node that does not say.
    """

    room: RoomField
    reason: Text
    attempt: Count = 0


ToPrefill = Register | Heartbeat | Bootstrap | AbortRoom


# --- prefill node to decode node -------------------------------------------------------------------


class Registered(Struct, frozen=True, array_like=True, tag=1):
    """The registration stands; ``instance_id`` changes whenever the prefill node restarts.

    ``lane``: how the prefill node writes to this decode node; empty from a node that does not say.
    ``lane_reason``: why. The message may come again with another lane.
    """

    protocol_version: Annotated[int, Meta(ge=0, lt=2**16)]
    instance_id: Name
    geometry: Geometry
    lane: Name = ""
    lane_reason: Text = ""


class RegistrationRefused(Struct, frozen=True, array_like=True, tag=2):
    """The decode node is not registered: a mismatch (``error`` has both values), or no Register came.

    ``permanent``: whether the same Register would be refused again, as with a mismatch.
    """

    error: Text
    permanent: bool


class HeartbeatAck(Struct, frozen=True, array_like=True, tag=3):
    """Answers a Heartbeat with its ``seq``, which is 0 where no Heartbeat asked (see ``Register``)."""

    seq: Count
    instance_id: Name


class PrefillTimes(Struct, frozen=True, array_like=True):
    """Seconds that a room spent in each phase on its prefill node, in order.

    ``transfer_secs``: the part of sending the KV that comes after the computation.
    """

    queue_secs: Secs
    prefill_secs: Secs
    transfer_secs: Secs


class FetchedTokens(Struct, frozen=True, array_like=True):
    """Cached tokens that the prefill node brought to its device for a room, by the tier that had them.
    ``storage``: the cluster's store, under SGLang's name. ``decode``: the room's decode node."""

    host: Count = 0
    storage: Count = 0
    decode: Count = 0


class RoomDone(Struct, frozen=True, array_like=True, tag=4):
    """All bytes of the room, the aux record included, are in the decode node's memory.

    ``num_cached_tokens``: leading tokens of the prompt whose KV the prefill node had cached.
    ``transfer_secs``: the transport's time for the room, most of it while the prompt was computed.
    ``times``: None from a node that does not say.
    ``fetched``: those of ``num_cached_tokens`` that were not on its device when the room came.
    """

    room: RoomField
    num_bytes: Count
    num_cached_tokens: Count
    transfer_secs: Secs
    times: PrefillTimes | None = None
    fetched: FetchedTokens = FetchedTokens()


class RoomFailed(Struct, frozen=True, array_like=True, tag=5):
    """The room failed with an HTTP ``status``. ``quiet``: none of its writes is in flight any more.

    ``batch_failed``: one of its transfer batches ended in an error, so bytes may still sit in the transport
    and the room's slots must wait out the transport's own timeouts as well.
    ``attempt``: that of the Bootstrap. An answer that is said twice may come when another request has the
    room, about whose writes it says nothing. 0 from a node that does not say.
    """

    room: RoomField
    status: Annotated[int, Meta(ge=400, le=599)]
    error: Text
    quiet: bool
    batch_failed: bool
    attempt: Count = 0


class RoomQuiet(Struct, frozen=True, array_like=True, tag=6):
    """Nothing of the room is in flight: the answer to AbortRoom, or the sequel of a RoomFailed.

    ``attempt``: that of the AbortRoom or the RoomFailed; see there.
    """

    room: RoomField
    batch_failed: bool
    attempt: Count = 0


class RoomScores(Struct, frozen=True, array_like=True, tag=7):
    """Logprobs of prompt tokens from position ``first`` on, sent in order before the room's RoomDone.

    ``rows``: one row of ``prompt_scores.score_dtype(num_top)`` for each position. A message that was lost
    with its connection is not repeated: the decode node sees at RoomDone that rows are missing.
    """

    room: RoomField
    first: Annotated[int, Meta(ge=1, lt=2**32)]
    num_top: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
    rows: Annotated[bytes, Meta(max_length=MAX_ROWS_BYTES)]


ToDecode = Registered | RegistrationRefused | HeartbeatAck | RoomDone | RoomFailed | RoomQuiet | RoomScores

encoder = Encoder()
to_prefill_decoder: TypedDecoder[ToPrefill] = TypedDecoder(ToPrefill)
to_decode_decoder: TypedDecoder[ToDecode] = TypedDecoder(ToDecode)
