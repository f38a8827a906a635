"""Control messages that do not fit and peers that vanish: they have documented outcomes; the node serves
on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hisparse_pd.base.access import PeerList
from hisparse_pd.engine.messages import Shutdown
from hisparse_pd.prefill_node.registrations import Registrations
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRoom,
    Extent,
    Geometry,
    Heartbeat,
    RegionKind,
    Registered,
    RegistrationRefused,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    encoder,
)
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.transfer import lane
from hisparse_pd.transfer.lane import Lane, Lanes
from tests.unit.prefill_node.support import (
    ControlPeer,
    DecodePeer,
    EngineThread,
    bootstrap_of,
    decode_peer,
    engine_thread,
    next_room,
    prompt,
)
from tests.waiting import wait_until

TOKENS = tuple(range(5, 26))
"""A prompt of which twenty tokens are computed."""


@pytest.fixture
def stranger(engine: EngineThread, node: DecodePeer) -> Iterator[DecodePeer]:
    """The module's decode node, unregistered on a new connection. Afterwards the engine must serve on."""
    node.reconnect()
    node.forget()
    engine.forget()
    yield node
    node.register()
    room = next_room()
    node.bootstrap(room, [5, 6, 7, 8, 9])
    assert node.expect(RoomDone, lambda done: done.room == room)
    engine.wait_until_idle()
    engine.assert_whole()


@pytest.fixture
def peer(stranger: DecodePeer) -> DecodePeer:
    stranger.register()
    return stranger


# --- registration ---------------------------------------------------------------------------------------


def test_registers_and_answers_heartbeats(engine: EngineThread, stranger: DecodePeer) -> None:
    registered = stranger.register()
    assert registered.protocol_version == PROTOCOL_VERSION
    assert registered.instance_id == engine.ready.instance_id
    assert registered.geometry == msgspec.msgpack.decode(engine.ready.geometry, type=Geometry)
    acknowledged = stranger.heartbeat(seq=7)
    assert (acknowledged.seq, acknowledged.instance_id) == (7, engine.ready.instance_id)
    gauges = engine.next_stats().gauges
    assert gauges["num_registered_peers"] == 1
    assert (engine.ready.transfer_protocol, engine.ready.transfer_devices) == ("tcp", ())
    assert gauges['transfer_info{protocol="tcp",devices="",reason="asked for"}'] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_version": 99}, ["speaks 99", f"prefill node {PROTOCOL_VERSION}"]),
        ({"model_fingerprint": "another"}, ["model_fingerprint", "'another'"]),
        ({"dtype": "bfloat16"}, ["dtype", "'bfloat16'", "'float32'"]),
        ({"num_layers": 61}, ["num_layers", "61", "3"]),
        ({"num_index_layers": 61}, ["num_index_layers"]),
        ({"item_bytes": 656}, ["item_bytes"]),
        ({"index_item_bytes": 132}, ["index_item_bytes"]),
        ({"index_topk": 2048}, ["index_topk"]),
        ({"index_rotation": "hadamard"}, ["index_rotation", "'hadamard'"]),
        ({"attention_split_tile_size": 0}, ["attention_split_tile_size: the decode node has 0", "None"]),
        ({"transfer_protocol": "rdma"}, ["the decode node is on 'rdma', this prefill node on 'tcp'"]),
        *(
            ({"session": session}, [repr(session), "HOST:PORT"])
            for session in ("10.0.0.2", "10.0.0.2:0", "10.0.0.2:70000", "10.0.0.2:x", "a b:1", "http://a:1")
        ),
        ({"session": ""}, ["session: the decode node names none"]),
        ({"session": "10.0.1.2:15001"}, ["'10.0.1.2'", "10.0.0.0/24, 2001:db8::/32", "--advertise-host"]),
        ({"session": "decode-0:15001"}, ["'decode-0' is not in --allowed-peers"]),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_both_values(
    peer: DecodePeer, changes: dict[str, Any], words: list[str]
) -> None:
    """With a list of allowed peers, sessions outside the list do not fit either."""
    table = Registrations(peer.geometry, "tcp", PeerList.parse(["10.0.0.0/24", "2001:db8::/32"]))
    in_geometry = {name: changes.pop(name) for name in list(changes) if hasattr(peer.geometry, name)}
    geometry = msgspec.structs.replace(peer.geometry, **in_geometry)
    fits = {"session": "[2001:db8::1]:15001", "transfer_protocol": "tcp"}
    assert table.why_refused(peer.registration(**fits)) is None
    error = table.why_refused(peer.registration(**{**fits, "geometry": geometry, **changes}))
    for word in words:
        assert word in str(error)


def test_who_is_refused_is_not_registered_and_one_line_of_the_log(
    engine: EngineThread, stranger: DecodePeer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        stranger.client.send(stranger.registration(protocol_version=99))
        refused = stranger.expect(RegistrationRefused)
        assert refused.permanent
        assert "99" in refused.error
    assert caplog.text.count("refused decode node") == 1
    stranger.client.send(Heartbeat(1))
    assert not stranger.expect(RegistrationRefused).permanent


def test_without_a_network_a_decode_node_that_shares_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, engine: EngineThread, stranger: DecodePeer
) -> None:
    def over_network(lanes: Lanes, reason: str) -> Lane:
        return Lane("tcp", reason, refusal=f"{reason}; no Mooncake")

    monkeypatch.setattr(Lanes, "over_network", over_network)
    before = engine.num_dropped("refused")
    stranger.client.send(stranger.registration(node_id="apart", session="127.0.0.1:19"))
    refused = stranger.expect(RegistrationRefused)
    assert refused.permanent
    assert refused.error == "the decode node offers no shared memory; no Mooncake"
    stranger.client.send(Heartbeat(1))
    assert not stranger.expect(RegistrationRefused).permanent
    assert engine.num_dropped("refused") == before + 1
    stranger.register()


def test_regions_must_be_whole(peer: DecodePeer) -> None:
    host, device, index, checks, aux = peer.regions
    table = Registrations(peer.geometry, "tcp")

    def refusal(*regions: Any) -> str:
        return str(table.why_refused(peer.registration(regions=(*regions, checks))))

    shorter = msgspec.structs.replace(host, num_bytes=host.num_bytes - 1)
    error = refusal(shorter, device, index, aux)
    for word in ("kv_host", str(host.num_bytes - 1), str(host.num_bytes)):
        assert word in error
    other_aux = msgspec.structs.replace(aux, num_slots=aux.num_slots + 1)
    assert "region aux" in refusal(host, device, index, other_aux)
    assert "index is missing" in refusal(host, device, aux)
    assert "aux is missing" in refusal(host, device, index)
    assert "both missing" in refusal(index, aux)
    assert "registered 2 times" in refusal(host, host, index, aux)
    assert "no memory" in refusal(msgspec.structs.replace(host, base_addr=2**63 - 2), device, index, aux)
    assert "no memory" in refusal(host, device, msgspec.structs.replace(index, num_slots=0), aux)
    num_bytes = index.num_bytes // index.num_slots * 1023
    fewer = msgspec.structs.replace(index, num_slots=1023, num_bytes=num_bytes)
    error = refusal(host, device, fewer, aux)
    assert error == "region row_checks has 1024 slots, region index 1023; they must be equal"
    without = peer.registration(regions=(host, device, index, aux))
    assert "row_checks is missing" in str(table.why_refused(without))


def test_row_checks_go_to_who_verifies_rows(engine: EngineThread, stranger: DecodePeer) -> None:
    """A node that does not verify rows gets everything else. A prefill node that computes no checks refuses
    one that does."""
    host, device, index, _, aux = stranger.regions
    unverified = msgspec.structs.replace(stranger.geometry, has_row_checks=False)
    stranger.register(geometry=unverified, regions=(host, device, index, aux))
    stranger.bootstrap(next_room(), TOKENS)
    stranger.expect(RoomDone)
    assert not stranger.row_checks.any()
    assert stranger.kv_host[:, :20].any(dim=-1).all()
    error = str(Registrations(unverified, "tcp").why_refused(stranger.registration()))
    assert "verifies rows by checks that this prefill node does not compute" in error
    assert "--no-verify-rows" in error
    assert Registrations(stranger.geometry, "tcp").why_refused(stranger.registration()) is None


def test_a_page_size_of_its_own_is_legal_when_hisparse(engine: EngineThread, stranger: DecodePeer) -> None:
    stranger.register(geometry=msgspec.structs.replace(stranger.geometry, page_size=64))
    sparse, dense = next_room(), next_room()
    bootstrap = stranger.bootstrap(sparse, TOKENS)
    stranger.expect(RoomDone)
    stranger.assert_has(bootstrap)
    stranger.bootstrap(dense, TOKENS, hisparse=False)
    failed = stranger.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet) == (dense, 400, True)
    assert "64" in failed.error
    assert "16" in failed.error


@pytest.mark.I8
def test_a_process_that_registers_anew_is_looked_up_once_by_the_transport(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """A decode node that was lost, or that closes an idle connection, comes back under another node id. The
    transport never forgets a name, so each would cost memory for good."""
    names = engine.engine.transfer.names
    found = list[str]()
    for number, run in enumerate(("first", "first", "second", "second", "", "")):
        peer.register(node_id=f"decode-0-{number}", instance_id=run)
        bootstrap = peer.bootstrap(next_room(), TOKENS)
        peer.expect(RoomDone)
        peer.assert_has(bootstrap)
        found.append(names.of(peer.transfer.session))
    assert found[0] == found[1] != found[2] == found[3]
    assert len(set(found[3:])) == 3, "runs that do not say which they are may all be others"


@pytest.mark.I8
def test_lanes_to_nodes_that_are_lost_are_forgotten(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "FORGET_SECS", 0.0)
    with closing(ControlPeer(engine)) as other:
        for port in range(9, 12):
            other.client.send(peer.registration(node_id="decode-1", session=f"127.0.0.1:{port}"))
            other.expect(Registered)
    peer.register()
    sessions = set(engine.engine.lanes.pairs)
    assert sessions == {peer.transfer.session, "127.0.0.1:11"}, "those that are registered"


# --- rooms ----------------------------------------------------------------------------------------------


def test_before_register_everything_is_refused(engine: EngineThread, stranger: DecodePeer) -> None:
    before = engine.num_dropped("unregistered")
    room = next_room()
    messages = (
        bootstrap_of(room, TOKENS),
        AbortRoom(room, ""),
        Heartbeat(1),
    )
    for message in messages:
        stranger.client.send(message)
        refused = stranger.expect(RegistrationRefused)
        assert not refused.permanent
        assert type(message).__name__ in refused.error
    assert engine.num_dropped("unregistered") == before + 3
    assert not engine.has_room(room)


def test_malformed_messages_are_dropped_and_counted(engine: EngineThread, peer: DecodePeer) -> None:
    before = engine.num_dropped("malformed")
    valid = encoder.encode(bootstrap_of(1, TOKENS))
    for frame in (b"", valid[:-3], encoder.encode([3, -1, 1, [], [], 0])):
        peer.client.socket.send(frame)
    peer.client.socket.send_multipart([valid, b"one frame too many"])
    peer.heartbeat()
    counters = engine.next_stats().counters
    assert counters['control_messages_dropped_total{reason="malformed"}'] == before + 4


@pytest.mark.I7
def test_a_second_bootstrap_is_dropped_and_the_first_stands(engine: EngineThread, peer: DecodePeer) -> None:
    before = engine.num_dropped("duplicate")
    room = next_room()
    with engine.admission_paused():
        first = peer.bootstrap(room, TOKENS)
        peer.bootstrap(room, TOKENS, kv=(Extent(500, 20),), aux_slot=3)
        peer.assert_nothing_more()
        assert engine.num_dropped("duplicate") == before + 1
    peer.expect(RoomDone)
    peer.assert_has(first)
    assert not peer.kv_host[:, 500:].any()


def test_messages_about_rooms_that_are_over_or_unknown_are_answered(
    engine: EngineThread, peer: DecodePeer
) -> None:
    before = engine.num_dropped("late")
    room = next_room()
    peer.bootstrap(room, TOKENS)
    peer.expect(RoomDone)
    peer.bootstrap(room, TOKENS)
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet, failed.batch_failed) == (room, 400, True, False)
    peer.client.send(AbortRoom(room, "too late"))
    assert peer.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False)
    assert engine.num_dropped("late") == before + 2
    before, unknown = engine.num_dropped("unknown_room"), next_room()
    peer.client.send(AbortRoom(unknown, "never heard of it", attempt=7))
    assert peer.expect(RoomQuiet) == RoomQuiet(unknown, batch_failed=False, attempt=7)
    assert engine.num_dropped("unknown_room") == before + 1


@pytest.mark.I7
def test_an_abort_that_comes_late_over_a_lost_connection_ends_no_later_attempt(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """The network has kept a Register and an AbortRoom of the earlier connection. Meanwhile the abort was
    repeated over the next one, and answered, and another request has the room."""
    before, room = engine.num_dropped("late"), next_room()
    with engine.admission_paused(), closing(ControlPeer(engine)) as earlier:
        bootstrap = peer.bootstrap(room, TOKENS, attempt=2)
        peer.heartbeat()
        earlier.client.send(peer.registration())
        earlier.client.send(AbortRoom(room, "the request has ended", attempt=1))
        assert earlier.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False, attempt=1)
        assert engine.num_dropped("late") == before + 1
        peer.register()
    assert peer.expect(RoomDone).room == room
    peer.assert_has(bootstrap)


@pytest.mark.I1
def test_a_bootstrap_that_comes_late_over_a_lost_connection_writes_nothing(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """Its abort was answered over the next connection, so its slots may have another owner. The next attempt
    of the room is served."""
    before, room = engine.num_dropped("late"), next_room()
    peer.client.send(AbortRoom(room, "the request has ended", attempt=1))
    peer.expect(RoomQuiet)
    with closing(ControlPeer(engine)) as earlier:
        earlier.client.send(peer.registration())
        late = earlier.bootstrap(room, TOKENS, attempt=1)
        failed = earlier.expect(RoomFailed)
        assert (failed.room, failed.quiet, failed.attempt) == (room, True, late.attempt)
    assert engine.num_dropped("late") == before + 1
    assert not peer.kv_host.any()
    peer.register()
    bootstrap = peer.bootstrap(room, TOKENS, attempt=2)
    peer.expect(RoomDone)
    peer.assert_has(bootstrap)


@pytest.mark.I7
def test_one_peer_cannot_abort_the_room_of_another(engine: EngineThread, peer: DecodePeer) -> None:
    room = next_room()
    with engine.admission_paused(), closing(ControlPeer(engine)) as other:
        peer.bootstrap(room, TOKENS)
        peer.heartbeat()
        other.client.send(peer.registration(node_id="decode-1", session="127.0.0.1:9"))
        other.expect(Registered)
        other.client.send(AbortRoom(room, "mine now"))
        other.expect(RoomQuiet)
    assert peer.expect(RoomDone).room == room


@pytest.mark.I7
@pytest.mark.parametrize(
    ("landing", "error"),
    [
        ({"kv": (Extent(1020, 20),)}, "kv_host extent [1020, 1040) ends past the region's 1024 slots"),
        ({"kv": (Extent(2**47, 20),)}, "ends past the region's 1024 slots"),
        ({"kv": (Extent(0, 19),)}, "kv_host extents are of 19 tokens, the KV to land is of 20"),
        ({"kv": (Extent(0, 21),)}, "kv_host extents are of 21 tokens, the KV to land is of 20"),
        ({"kv": (Extent(0, 12), Extent(11, 8))}, "kv_host extents overlap at slot 11"),
        ({"index": (Extent(1020, 20),)}, "index extent [1020, 1040)"),
        ({"index": (Extent(0, 16),)}, "index extents are of 16 tokens, the KV to land is of at least 20"),
        ({"aux_slot": 8}, "aux_slot 8 is not in [0, 8)"),
        (
            {"num_held_tokens": 16, "kv": (Extent(0, 20),)},
            "kv_host extents are of 20 tokens, the KV to land is of 4",
        ),
        (
            {"num_held_tokens": 20, "kv": (Extent(0, 1),), "scores": WantedScores(1, 0)},
            "kv_host extents are of 1 tokens, the KV to land is of 0",
        ),
        ({"kv": (Extent(1020, 20),), "hisparse": False}, "kv_device extent [1020, 1040)"),
    ],
)
def test_a_landing_zone_outside_the_regions_is_refused(
    engine: EngineThread, peer: DecodePeer, landing: dict[str, Any], error: str
) -> None:
    check_refused(peer, error, **landing)


def check_refused(peer: DecodePeer, error: str, tokens: Sequence[int] = TOKENS, **changes: Any) -> None:
    """Assert that a Bootstrap is refused and opens no room: a correct one for the room is served
    afterwards."""
    before = peer.engine.counters()["failed_requests_total"]
    room = next_room()
    peer.bootstrap(room, tokens, **changes)
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet, failed.batch_failed) == (room, 400, True, False)
    assert error in failed.error
    assert peer.engine.counters()["failed_requests_total"] == before + 1
    peer.bootstrap(room, TOKENS)
    assert peer.expect(RoomDone).room == room


@pytest.mark.I7
@pytest.mark.parametrize(
    ("tokens", "changes", "error"),
    [
        ([5], {}, "num_held_tokens 0 of 1 prompt tokens: nothing is left to compute before the last token"),
        (TOKENS, {"num_held_tokens": 20}, "num_held_tokens 20 of 21 prompt tokens: nothing is left"),
        (TOKENS, {"num_held_tokens": 2**32 - 1}, "num_held_tokens 4294967295 of 21"),
        (TOKENS, {"num_held_tokens": 21, "scores": WantedScores(1, 0)}, "num_held_tokens 21 of 21"),
        (TOKENS, {"num_resumed_tokens": 21}, "num_resumed_tokens 21 of 21 prompt tokens"),
        (TOKENS, {"num_resumed_tokens": 2**32 - 1}, "num_resumed_tokens 4294967295 of 21"),
        (TOKENS, {"scores": WantedScores(21, 0)}, "wanted from position 21 on, the prompt has 21 tokens"),
        ([5], {"scores": WantedScores(1, 0)}, "wanted from position 1 on, the prompt has 1 tokens"),
        ([5, 100_000], {}, "token id 100000 is not in [0, "),
        ([5, -1, 7], {}, "token id -1 is not in [0, "),
        ([5] * 1026, {}, "the 1025 tokens to compute need 65 pages"),
        ([5] * 8193, {}, "longer than the context of 8192"),
    ],
)
def test_what_can_never_be_computed_is_refused(
    peer: DecodePeer, tokens: list[int], changes: dict[str, Any], error: str
) -> None:
    check_refused(peer, error, tokens, **changes)


@pytest.mark.I7
@pytest.mark.parametrize("num_bytes", [5, 83])
def test_a_prompt_of_broken_ids_is_refused(peer: DecodePeer, num_bytes: int) -> None:
    message = bootstrap_of(next_room(), TOKENS)
    peer.client.send(msgspec.structs.replace(message, prompt=message.prompt[:num_bytes]))
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet) == (message.room, 400, True)
    assert f"the prompt has {num_bytes} bytes, which is no multiple of 4" in failed.error


def test_a_region_that_was_not_registered_is_refused(engine: EngineThread, stranger: DecodePeer) -> None:
    stranger.register(
        regions=tuple(region for region in stranger.regions if region.kind is not RegionKind.KV_DEVICE)
    )
    stranger.bootstrap(next_room(), TOKENS, hisparse=False)
    assert "has not registered a region kv_device" in stranger.expect(RoomFailed).error


# --- peers that come and go -----------------------------------------------------------------------------


def test_a_reconnected_peer_keeps_its_rooms(engine: EngineThread, peer: DecodePeer) -> None:
    room = next_room()
    with engine.admission_paused():
        bootstrap = peer.bootstrap(room, TOKENS)
        peer.heartbeat()
        peer.reconnect()
        peer.register()
    assert peer.expect(RoomDone).room == room
    peer.assert_has(bootstrap)


@pytest.mark.I1
@pytest.mark.I7
@pytest.mark.parametrize("is_at_its_session", [False, True])
def test_a_peer_with_another_session_or_memory_loses_the_rooms_that_there_were(
    engine: EngineThread, peer: DecodePeer, is_at_its_session: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's name does not matter: a session with other memory is another process."""
    room = next_room()
    transfer, had_room = engine.engine.transfer, list[bool]()
    renew = transfer.renew

    def recorded(session: str, instance_id: str) -> None:
        had_room.append(engine.has_room(room))
        renew(session, instance_id)

    monkeypatch.setattr(transfer, "renew", recorded)
    kept = tuple(region for region in peer.regions if region.kind is not RegionKind.KV_DEVICE)
    other = {"node_id": "decode-1", "regions": kept} if is_at_its_session else {"session": "127.0.0.1:9"}
    with engine.admission_paused(), closing(ControlPeer(engine)) as successor:
        peer.bootstrap(room, TOKENS)
        peer.heartbeat()
        successor.client.send(peer.registration(**other))
        successor.expect(Registered)
    ended = engine.between_turns(lambda: engine.life.requests.ended(Room(room)))
    assert ended is not None
    assert ended.status == 502
    assert "restarted" in ended.error
    assert had_room == [False], "what is written from now on goes to the memory of the next process"
    assert room not in engine.computed


@contextmanager
def waiting_room(
    tiny: Path, tmp_path: Path, peer: DecodePeer
) -> Iterator[tuple[EngineThread, ControlPeer, PrefillRequest]]:
    """Yield an engine, a node that is registered with it by ``peer``'s regions, and a room that is not
    admitted."""
    with (
        engine_thread(tiny, tmp_path / "front") as engine,
        closing(ControlPeer(engine)) as other,
        engine.admission_paused(),
    ):
        other.client.send(peer.registration())
        other.expect(Registered)
        room = next_room()
        other.bootstrap(room, TOKENS)
        other.heartbeat()
        request = engine.life.requests.get(Room(room))
        assert request is not None
        yield engine, other, request


@pytest.mark.I7
def test_rooms_that_wait_for_too_long_and_silent_peers_end(
    tiny: Path, tmp_path: Path, peer: DecodePeer, caplog: pytest.LogCaptureFixture
) -> None:
    with waiting_room(tiny, tmp_path, peer) as (engine, other, request):
        request.deadline_secs = -math.inf
        engine.wait_until_idle()
        told = other.expect(RoomFailed)
        assert (told.room, told.status, told.quiet) == (request.room, 504, True)
        assert "not begun within 360 s (--room-timeout-secs 300, and 60 s in which the decode" in told.error
        assert len(engine.engine.peers) == 1
        other.reconnect()
        engine.wait_until_silent_nodes_are_lost()
        assert "lost decode node" not in caplog.text, "it had no rooms"
        other.client.send(Heartbeat(2))
        assert not other.expect(RegistrationRefused).permanent
        other.client.send(peer.registration())
        other.expect(Registered)


@pytest.mark.I7
def test_a_decode_node_that_is_busy_keeps_its_rooms(
    tiny: Path, tmp_path: Path, peer: DecodePeer, caplog: pytest.LogCaptureFixture
) -> None:
    """The node sends nothing for long, but is connected; once the connection is gone, its rooms end."""
    with waiting_room(tiny, tmp_path, peer) as (engine, other, request):
        (known,) = engine.engine.peers.silent(math.inf, 0.0)
        long_ago = known.last_heard_secs - 1000.0
        known.last_heard_secs = long_ago
        wait_until(lambda: known.last_heard_secs >= long_ago + 3 * 30.0, "it to be found silent three times")
        assert engine.has_room(request.room)
        other.reconnect()
        engine.wait_until_silent_nodes_are_lost()
        ended = engine.between_turns(lambda: engine.life.requests.ended(request.room))
        assert ended is not None
        assert ended.status == 502
        assert "silent for more than 60 s" in ended.error
        wait_until(lambda: "and 1 rooms of it: it was silent" in caplog.text, "the loss to be logged")


@pytest.mark.I7
def test_a_full_node_says_so_and_serves_on(tiny: Path, tmp_path: Path) -> None:
    bounds = {"max_running_requests": 1, "max_queued_requests": 2}
    with engine_thread(tiny, tmp_path / "front", **bounds) as engine, decode_peer(engine) as peer:
        peer.register()
        rooms = [next_room() for _ in range(4)]
        with engine.admission_paused():
            for place, room in enumerate(rooms):
                peer.bootstrap(room, prompt(room, 21), kv=(Extent(20 * place, 20),), aux_slot=place)
            failed = peer.expect(RoomFailed)
            assert (failed.room, failed.status, failed.quiet) == (rooms[3], 429, True)
            assert (
                "3 rooms wait on this prefill node, and 3 may (--max-running-requests + --max" in failed.error
            )
            assert engine.next_stats().num_waiting == 3
        assert {peer.expect(RoomDone).room for _ in range(3)} == set(rooms[:3])
        peer.bootstrap(rooms[3], prompt(rooms[3], 21))
        assert peer.expect(RoomDone).room == rooms[3]


def test_a_shutdown_tells_everyone(tiny: Path, tmp_path: Path) -> None:
    with engine_thread(tiny, tmp_path / "front") as stopping, decode_peer(stopping) as peer:
        peer.register()
        with stopping.admission_paused():
            room = next_room()
            peer.bootstrap(room, TOKENS)
            peer.heartbeat()
            stopping.send(Shutdown())
            failed = peer.expect(RoomFailed)
        assert (failed.room, failed.status, failed.quiet) == (room, 503, True)
        assert "shutting down" in failed.error
