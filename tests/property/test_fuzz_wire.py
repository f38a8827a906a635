"""Hostile bytes at everything that is decoded from a socket or from memory that a peer writes."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.vocabulary import FinishReason, HisparseFlag, Mode, SamplingParams, TokenLogprob
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import (
    Abort,
    CachedTokens,
    EngineLoading,
    EngineReady,
    EngineStats,
    FlushCache,
    Flushed,
    Generate,
    GenerateGroup,
    PromptScores,
    QuarantinedRun,
    ReleasePage,
    ReleaseQuarantine,
    RequestFailed,
    RequestStats,
    Shutdown,
    Tokens,
    pack_token_ids,
)
from hisparse_pd.engine.phases import Phase
from hisparse_pd.prefill_node.registrations import Registrations, why_not_landing
from hisparse_pd.protocol import bootstrap, kv_events, lane, messages
from hisparse_pd.protocol.bootstrap import BootstrapInfo, BootstrapLookupError
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.messages import (
    PROTOCOL_VERSION,
    ROW_CHECK_BYTES,
    Bootstrap,
    Extent,
    PrefillTimes,
    Region,
    RegionKind,
    Register,
)
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.transfer.aux_record import AuxLayout, AuxMismatch
from tests.identities import ROOT
from tests.property.fuzzing import (
    BATCH,
    HUGE_LENGTHS,
    MSGPACK_PARTS,
    batch,
    damage,
    fuzz,
    fuzz_batches,
    outcome,
    peak_bytes,
    seeds,
)
from tests.unit.protocol.examples import BOOTSTRAP, GEOMETRY, TO_DECODE, TO_PREFILL

pytestmark = pytest.mark.I7

_SAMPLING = SamplingParams(8, temperature=0.5, seed=-1, stop_token_ids=(1, 2), num_logprobs=2)
_STATS = RequestStats(Mode.HISPARSE, CachedTokens(1, 8, 9), 2, 3, 4, 5, 6, 7)
_PHASES = (Phase("queue", 1.5, 2.5), Phase("prefill", 2.5, 3.5))
TO_ENGINE = (
    GenerateGroup(
        (
            Generate("r", 7, 3, _SAMPLING, "10.0.0.1", 8998, HisparseFlag.AUTO),
            Generate("s", 8, 3, _SAMPLING, "", 1, scores=WantedScores(1, 2)),
        ),
        ROOT,
        pack_token_ids((1, 2, 3)),
        (ROOT,),
    ),
    Abort("r"),
    FlushCache("f"),
    ReleaseQuarantine("inst"),
    ReleasePage(PoolKind.HOST, 64),
    Shutdown(),
)
FROM_ENGINE = (
    EngineLoading("weights", 7, 9),
    EngineReady(100, 100, 50, "10.0.0.1:7", "inst", msgspec.msgpack.encode(GEOMETRY)),
    PromptScores("r", 2, bytes(24)),
    Tokens("r", (1,), (TokenLogprob(1, -0.5, ((1, -0.5), (2, -2.0))),), FinishReason.STOP, 2, _STATS),
    Tokens("r", (1,), phases=_PHASES, prefill=PrefillTimes(0.25, 0.5, 1.0)),
    RequestFailed("r", 503, "full", phases=_PHASES),
    Flushed("f"),
    EngineStats(
        {"token_usage": 0.5},
        {'requests_total{mode="dense"}': 3.0},
        *(1, 2, 3, 4),
        trouble="all slots are kept",
        quarantine=(QuarantinedRun("10.0.0.1:8998", "inst", 2, 1, 61.5, 640, 0, 640, 2),),
    ),
)

FROM_WRITER = (lane.LaneHello(bytes(32), "inst"), lane.LaneSole())
LANE_ANSWERS = (
    lane.LaneWelcome((lane.Window(4096, 300, 1), lane.Window(1 << 40, 7, 0, b"handle", 512))),
    lane.LaneDenied("another user"),
)

KV_EVENTS = (
    kv_events.AllBlocksCleared(),
    kv_events.BlockStored([1, 1 << 62], 7, [1, 2, 3, 4], 2, medium="GPU"),
    kv_events.BlockRemoved([7], "CPU_PINNED"),
)

DECODERS: dict[str, tuple[TypedDecoder[Any], list[bytes]]] = {
    "to_prefill": (messages.to_prefill_decoder, [bytes.fromhex(golden) for _, golden in TO_PREFILL]),
    "to_decode": (messages.to_decode_decoder, [bytes.fromhex(golden) for _, golden in TO_DECODE]),
    "lane_writer": (lane.from_writer_decoder, [msgspec.msgpack.encode(m) for m in FROM_WRITER]),
    "lane_answer": (lane.answer_decoder, [msgspec.msgpack.encode(m) for m in LANE_ANSWERS]),
    "to_engine": (engine_messages.to_engine_decoder, [msgspec.msgpack.encode(m) for m in TO_ENGINE]),
    "kv_events": (kv_events.block_changes_decoder, [kv_events.encode_batch(1.5, KV_EVENTS, 1)]),
    "from_engine": (engine_messages.from_engine_decoder, [msgspec.msgpack.encode(m) for m in FROM_ENGINE]),
}
_with_every_decoder = pytest.mark.parametrize("name", DECODERS)


def test_the_corpus_has_every_engine_message() -> None:
    assert {type(message) for message in TO_ENGINE} == set(engine_messages.ToEngine.__args__)
    assert {type(message) for message in FROM_ENGINE} == set(engine_messages.FromEngine.__args__)


def check_frame(decoder: TypedDecoder[Any], frame: bytes) -> None:
    message = outcome(lambda: decoder.decode(frame), msgspec.MsgspecError)
    if message is not None:  # what was let in is sound: it can be sent on as it is
        again = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.encode(decoder.decode(again)) == again


@_with_every_decoder
@given(seed=seeds)
@fuzz_batches
def test_frames_are_messages_or_msgspec_errors(name: str, seed: int) -> None:
    decoder, corpus = DECODERS[name]
    batch(seed, lambda rng: damage(rng, corpus, MSGPACK_PARTS), lambda frame: check_frame(decoder, frame))


@_with_every_decoder
@given(seed=seeds)
@fuzz_batches
def test_a_promised_length_allocates_nothing(name: str, seed: int) -> None:
    decoder, corpus = DECODERS[name]

    def check(frame: bytes) -> None:
        peak = peak_bytes(lambda: outcome(lambda: decoder.decode(frame), msgspec.MsgspecError))
        assert peak < 64_000 + 100 * len(frame)

    batch(seed, lambda rng: damage(rng, corpus, HUGE_LENGTHS), check, count=BATCH // 10)


@_with_every_decoder
@pytest.mark.parametrize("part", [b"\x91", b"\x81\xa1k", b"\x81\x91", b"\xdc\x00\x01"])
def test_deep_nesting_in_a_field_that_nobody_knows_is_refused(name: str, part: bytes) -> None:
    decoder, corpus = DECODERS[name]
    deep = part * (messages.MAX_MESSAGE_BYTES // 2 // len(part)) + b"\xc0"
    for frame in corpus:
        if frame[0] & 0xF0 == 0x90:  # an array of so many fields, and one more
            longer = bytes([frame[0] + 1]) + frame[1:] + deep
        else:
            longer = bytes([frame[0] + 1]) + frame[1:] + b"\xa1?" + deep
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(longer)


@pytest.mark.parametrize(
    "union", [messages.ToPrefill, messages.ToDecode, BootstrapInfo, lane.FromWriter, lane.LaneAnswer]
)
def test_every_field_of_a_message_is_bounded(union: Any) -> None:
    unbounded: list[str] = []

    def look(path: str, info: inspect.Type) -> None:
        match info:
            case inspect.IntType() | inspect.FloatType():
                low = info.ge if info.ge is not None else info.gt
                high = info.le if info.le is not None else info.lt
                is_bounded = low is not None and high is not None
            case inspect.StrType() | inspect.BytesType():
                is_bounded = info.max_length is not None
            case inspect.UnionType():
                is_bounded = True
                for one in info.types:
                    look(path, one)
            case inspect.VarTupleType():
                is_bounded = info.max_length is not None
                look(f"{path}[]", info.item_type)
            case inspect.StructType():
                is_bounded = True
                for field in info.fields:
                    look(f"{path}.{field.name}", field.type)
            case inspect.BoolType() | inspect.EnumType() | inspect.NoneType():
                is_bounded = True
            case _:
                is_bounded = False
        if not is_bounded:
            unbounded.append(f"{path}: {info}")

    for message in getattr(union, "__args__", (union,)):
        look(message.__name__, inspect.type_info(message))
    assert not unbounded


# --- what the prefill node does with a message that decodes --------------------------------------------

AUX = AuxLayout(GEOMETRY.num_index_layers, GEOMETRY.index_topk)
NUM_SLOTS = 512
_ITEMS = {
    RegionKind.KV_HOST: GEOMETRY.num_layers * GEOMETRY.item_bytes,
    RegionKind.KV_DEVICE: GEOMETRY.num_layers * GEOMETRY.item_bytes,
    RegionKind.INDEX: GEOMETRY.num_index_layers * GEOMETRY.index_item_bytes,
    RegionKind.ROW_CHECKS: GEOMETRY.num_layers * ROW_CHECK_BYTES,
    RegionKind.AUX: AUX.slot_bytes,
}
REGISTER = Register(
    PROTOCOL_VERSION,
    "node",
    "10.0.0.2:15001",
    GEOMETRY,
    tuple(
        Region(kind, (number + 1) << 32, NUM_SLOTS * item_bytes, NUM_SLOTS)
        for number, (kind, item_bytes) in enumerate(_ITEMS.items())
    ),
)
_REGISTERED = messages.encoder.encode(REGISTER)
_ALLOWED = PeerList.parse(["10.0.0.0/24"])


@given(seed=seeds)
@fuzz_batches
def test_registrations_that_stand_lie_in_memory_and_in_the_list(seed: int) -> None:
    def check(frame: bytes) -> None:
        register = outcome(lambda: messages.to_prefill_decoder.decode(frame), msgspec.MsgspecError)
        table = Registrations(GEOMETRY, "tcp", _ALLOWED)
        if not isinstance(register, Register) or table.why_refused(register) is not None:
            return
        peer, _ = table.register(b"identity", register, 0.0)
        assert _ALLOWED.allows(register.session.rpartition(":")[0])
        for kind, view in peer.regions.items():
            assert view.num_bytes == view.num_slots * _ITEMS[kind]
            assert 1 <= view.base_addr <= view.base_addr + view.num_bytes < 2**63

    batch(seed, lambda rng: damage(rng, [_REGISTERED], MSGPACK_PARTS), check)


_slots = st.integers(0, NUM_SLOTS + 2) | st.integers(0, 2**48 - 1)
_extents = st.lists(st.builds(Extent, _slots, st.integers(1, 8) | st.integers(1, 2**48 - 1)), max_size=4).map(
    tuple
)


_prompts = st.integers(1, 40).map(lambda num_tokens: pack_token_ids(range(num_tokens)))


@given(
    st.builds(
        Bootstrap,
        st.just(1),
        _extents,
        _extents,
        _slots,
        _prompts,
        st.just(ROOT),
        num_held_tokens=st.integers(0, 40),
        hisparse=st.booleans(),
    )
)
@fuzz
def test_a_landing_zone_that_stands_lies_in_its_regions(message: Bootstrap) -> None:
    table = Registrations(GEOMETRY, "tcp")
    peer, _ = table.register(b"identity", REGISTER, 0.0)
    if why_not_landing(message, peer, GEOMETRY.page_size) is not None:
        return
    assert message.aux_slot < NUM_SLOTS
    for extents in (message.kv_extents, message.index_extents):
        slots = [slot for extent in extents for slot in range(extent.start, extent.end)]
        assert len(set(slots)) == len(slots) >= message.num_computed_tokens - message.num_held_tokens
        assert max(slots, default=0) < NUM_SLOTS


def test_the_strategy_for_landing_zones_finds_some_that_stand() -> None:
    table = Registrations(GEOMETRY, "tcp")
    peer, _ = table.register(b"identity", REGISTER, 0.0)
    assert why_not_landing(BOOTSTRAP, peer, GEOMETRY.page_size) is None
    assert Registrations(GEOMETRY, "tcp", _ALLOWED).why_refused(REGISTER) is None


# --- the bootstrap endpoint's answer -------------------------------------------------------------------

_INFO = msgspec.json.encode(BootstrapInfo(1, "inst", "10.0.0.1", 7000, GEOMETRY, True))
_JSON_PARTS = (
    b'"\\ud800"',
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"-1",
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"\xff",
    b'"tcp://x y"',
    b'"a/b"',
    b"70000",
    b"null",
    b'"' + b"x" * 300 + b'"',
)


def check_info(body: bytes) -> None:
    info = outcome(lambda: bootstrap.parse_info(body, "http://h:1"), BootstrapLookupError)
    if info is None:
        return
    assert 1 <= info.control_port <= 65535
    endpoint = info.control_endpoint("h")
    assert endpoint.startswith("tcp://")
    assert not set(endpoint.removeprefix("tcp://")) & set(" /?#@,;\n\t\0")


@given(seeds)
@fuzz_batches
def test_bootstrap_information_is_usable_or_refused(seed: int) -> None:
    batch(seed, lambda rng: damage(rng, [_INFO], _JSON_PARTS), check_info)


# --- the aux record, in memory that a peer writes --------------------------------------------------------

ROOM = 2**62 + 3
_LAYOUT = AuxLayout(num_index_groups=2, index_topk=4)
_RECORD = bytearray(_LAYOUT.slot_bytes)
_LAYOUT.pack_into(_RECORD, ROOM, np.arange(8).reshape(2, 4))


def check_record(content: bytes, *, repairs_checksum: bool) -> None:
    slot = bytearray(_LAYOUT.slot_bytes)
    slot[: len(content)] = content[: len(slot)]
    if repairs_checksum:
        _sign(slot)
    record = outcome(lambda: _LAYOUT.unpack(slot, ROOM), AuxMismatch)
    if record is None:
        return
    assert record.room == ROOM
    assert record.hint is None or record.hint.shape == (2, 4)
    if not repairs_checksum:
        assert slot[: _LAYOUT.record_bytes] == _RECORD[: _LAYOUT.record_bytes]


@pytest.mark.parametrize("repairs_checksum", [False, True])
@given(seed=seeds)
@fuzz_batches
def test_aux_records_are_the_rooms_own_or_refused(seed: int, repairs_checksum: bool) -> None:
    batch(
        seed,
        lambda rng: damage(rng, [bytes(_RECORD)], MSGPACK_PARTS),
        lambda content: check_record(content, repairs_checksum=repairs_checksum),
    )


def _sign(slot: bytearray) -> None:
    """Give whatever stands in the slot the right magic, room and checksum."""
    record = memoryview(slot)[: _LAYOUT.record_bytes]
    record[:8] = _RECORD[:4] + _RECORD[4:6] + record[6:8]
    struct.pack_into("<QI", record, 8, ROOM, 0)
    struct.pack_into("<I", record, 16, zlib.crc32(record))
