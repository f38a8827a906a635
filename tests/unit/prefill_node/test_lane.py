"""The prefill engine's lanes: they are chosen before the registration is answered, shown, kept and
released."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.core.memory.numa import ANYWHERE
from hisparse_pd.engine.messages import PeerLane
from hisparse_pd.engine.sockets import EngineSocket
from hisparse_pd.prefill_node.engine import PrefillEngine
from hisparse_pd.protocol.messages import HeartbeatAck, Registered, RoomFailed
from hisparse_pd.transfer.errors import TransferError, TransferSetupError
from hisparse_pd.transfer.lane_memory import Mapping
from hisparse_pd.transfer.transport import TCP
from tests.unit.prefill_node.support import (
    EngineThread,
    checkpoint,
    decode_peer,
    deliver,
    engine_thread,
    prompt,
)
from tests.waiting import wait_until

SAME = "both see the same memory"


@pytest.fixture
def network_fails(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writes over the network fail, so that all that arrives came over shared memory."""

    def write(*_: object) -> None:
        raise TransferError("over the network")

    monkeypatch.setattr(engine.engine.transfer, "write", write)


@pytest.mark.usefixtures("network_fails")
def test_rooms_land_over_the_lane_in_both_modes(engine: EngineThread) -> None:
    with decode_peer(engine, "shared") as peer:
        registered = peer.register(lane=peer.lane_host.offer)
        assert (registered.lane, registered.lane_reason) == ("shm", SAME)
        for room, hisparse in ((1, True), (2, False)):
            deliver(engine, peer, room, prompt(room, 100), hisparse=hisparse)
        lane = PeerLane(peer.transfer.session, "shm", SAME)
        stats = engine.next_stats()
        assert stats.lanes == (lane,)
        assert stats.gauges[lane.info_metric] == 1
        peer.reconnect()
        assert peer.register(lane=peer.lane_host.offer).lane == "shm"
        assert len(peer.lane_host.connections) == 1, "the same registration keeps its lane"


def test_a_node_that_has_lost_its_lane_fails_its_rooms_and_no_others(engine: EngineThread) -> None:
    with decode_peer(engine, "ending") as ending, decode_peer(engine, "staying") as staying:
        for peer in (ending, staying):
            assert peer.register(lane=peer.lane_host.offer).lane == "shm"
        mapping = engine.engine.lanes.pairs[ending.transfer.session].mapping
        assert mapping is not None
        ending.lane_host.close()
        wait_until(lambda: all(mapped.closed for mapped in mapping.maps), "the memory to be unmapped")
        ending.bootstrap(4, prompt(4, 20))
        failed = ending.expect(RoomFailed)
        assert "has ended" in failed.error
        assert failed.quiet or not failed.batch_failed
        deliver(engine, staying, 5, prompt(5, 30))


@pytest.mark.I1
def test_a_silent_node_that_comes_back_has_the_lane_that_it_had(tiny: Path, tmp_path: Path) -> None:
    with (
        engine_thread(tiny, tmp_path / "front") as engine,
        decode_peer(engine) as peer,
    ):
        lanes = engine.engine.lanes
        peer.client.send(peer.registration(lane=peer.lane_host.offer))
        wait_until(lambda: lanes.lane(peer.transfer.session) is not None, "the lane to be open")
        peer.reconnect()
        engine.wait_until_silent_nodes_are_lost()
        assert peer.register(lane=peer.lane_host.offer).lane == "shm"
        assert len(peer.lane_host.connections) == 1
        assert peer.lane_host.take_ended() == []


def test_a_node_hears_that_its_memory_is_being_opened(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is registered once the memory is open."""
    with decode_peer(engine, "slow") as peer:
        may_open = threading.Event()
        make = Mapping
        monkeypatch.setattr(
            "hisparse_pd.transfer.lane.Mapping", lambda *args: may_open.wait(60) and make(*args)
        )
        for _ in range(2):
            peer.client.send(peer.registration(lane=peer.lane_host.offer))
            assert peer.expect(HeartbeatAck) == HeartbeatAck(0, engine.ready.instance_id)
        may_open.set()
        assert peer.expect(Registered).lane == "shm"


def test_a_node_with_the_lane_off_says_so(tiny: Path, tmp_path: Path) -> None:
    with (
        engine_thread(tiny, tmp_path / "front", same_host_lane="off") as engine,
        decode_peer(engine) as peer,
    ):
        registered = peer.register(lane=peer.lane_host.offer)
        assert (registered.lane, registered.lane_reason) == ("tcp", "--same-host-lane is off")
        deliver(engine, peer, 6, prompt(6, 40))
        assert peer.lane_host.connections == set()


def test_a_node_of_a_machine_without_mooncake_starts_unless_the_lane_is_off(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise TransferSetupError("Mooncake cannot be imported; install it")

    def start_and_end(same_host_lane: Literal["auto", "off"]) -> None:
        settings = PrefillSettings(
            model_path=tiny, page_size=16, kv_pool_tokens=1024, same_host_lane=same_host_lane
        )
        with closing(EngineSocket([f"ipc://{tmp_path}/front"])) as front:
            PrefillEngine(settings, *checkpoint(tiny, None), front, TCP, ANYWHERE).close()

    monkeypatch.setattr("hisparse_pd.transfer.engine.new_mooncake_engine", missing)
    start_and_end("auto")
    with pytest.raises(TransferSetupError, match="install it"):
        start_and_end("off")
