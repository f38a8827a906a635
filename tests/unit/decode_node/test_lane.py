"""Slots that a prefill node writes through shared memory are free when it has let go of it, and no sooner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, HisparseFlag
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.engine.messages import PeerLane
from hisparse_pd.protocol.messages import PROTOCOL_VERSION, Registered
from hisparse_pd.transfer.lane_memory import Mapping
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, PrefillDouble, random_prompt

PROMPT = random_prompt(11, 200)


@pytest.fixture
def node(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[EngineHarness]:
    """A node whose quarantine outlasts any test."""
    pools: dict[str, Any] = {"host_pool_tokens": 1024, "device_pool_tokens": 1024}
    with closing(EngineHarness(checkpoint, tmp_path, **pools, quarantine_secs=80_000.0)) as node:
        node.double.answers_aborts = False
        yield node


@pytest.fixture
def double(node: EngineHarness) -> PrefillDouble:
    return node.double


def land(node: EngineHarness) -> tuple[Answer, Mapping]:
    """Entrust a prefill node with a request; return that and the memory that the prefill node holds."""
    double = node.double
    answer = node.entrust(PROMPT, 4)
    (register,) = double.registered.values()
    assert register.lane is not None
    mapping = Mapping(register.lane, double.instance_id, "")
    mapping.promise_sole()
    return answer, mapping


def held(node: EngineHarness, stage: Stage) -> int:
    return node.engine.requests.pools.used(stage)[PoolKind.HOST]


@pytest.mark.I1
@pytest.mark.I7
def test_a_run_that_lets_go_is_lost_and_its_slots_are_free_at_once(
    node: EngineHarness, double: PrefillDouble
) -> None:
    answer, mapping = land(node)
    double.is_stopped = double.is_hung = True  # nothing else says that it has ended
    mapping.close()
    failure = node.failure_of(answer, status=502, error="let go of this node's memory")
    assert failure.code == PREFILL_NODE_FAILED
    pools = node.engine.requests.pools
    node.turn_until(lambda: pools.free == pools.totals)


@pytest.mark.I1
def test_slots_wait_for_as_long_as_the_run_holds_the_memory(
    node: EngineHarness, double: PrefillDouble
) -> None:
    answer, mapping = land(node)
    node.leave(answer)
    node.turn_until(lambda: double.aborts)
    num_held = held(node, Stage.QUARANTINED)
    assert num_held > 0
    double.is_stopped = True
    double.close_http()  # its front is gone, the run is over for certain, and yet it may write
    node.engine.peers.health_timeout_secs = 0.5  # silence after which a run is lost
    node.turn_until(lambda: node.stats is not None and not node.engine.peers.num_registered)
    node.turn_for(0.2)
    assert held(node, Stage.QUARANTINED) == num_held
    mapping.close()
    node.turn_until(lambda: held(node, Stage.QUARANTINED) == 0)


@pytest.mark.I1
def test_a_run_that_lets_go_frees_nothing_of_another(node: EngineHarness, checkpoint: Checkpoint) -> None:
    with closing(PrefillDouble(checkpoint)) as other:
        other.delivers = other.answers_aborts = False
        answer, mapping = land(node)
        waiting = node.generate(PROMPT, 4, HisparseFlag.TRUE, double=other)
        node.turn_until(lambda: other.bootstraps, other)
        node.double.is_stopped = True
        mapping.close()
        node.turn_until(lambda: answer.is_over, other)
        assert not waiting.is_over
        assert held(node, Stage.LANDING) > 0
        other.deliver(other.bootstraps[0])
        node.turn_until(lambda: waiting.is_over, other)
        assert waiting.failure is None


def test_the_lane_of_a_peer_is_shown(node: EngineHarness, double: PrefillDouble) -> None:
    land(node)[1].close()
    double.is_stopped = True
    answer = Registered(PROTOCOL_VERSION, double.instance_id, double.geometry, "shm", 'it is "here"')
    node.turn_until(lambda: not node.engine.peers.num_registered)
    double.is_stopped = False
    node.generate(PROMPT, 4, HisparseFlag.TRUE)
    node.turn_until(lambda: node.engine.peers.num_registered)
    double.say(answer)
    lane = PeerLane(double.name, "shm", 'it is "here"')
    node.turn_until(lambda: node.stats is not None and node.stats.lanes == (lane,))
    assert node.stats is not None
    name = f'lane_info{{peer="{double.name}",lane="shm",reason="it is \'here\'"}}'
    assert node.stats.gauges[name] == 1


def test_memory_stays_private_where_the_lane_is_off(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with closing(EngineHarness(checkpoint, tmp_path, same_host_lane="off")) as node:
        node.entrust(PROMPT, 4)
        (register,) = node.double.registered.values()
        assert register.lane is None
        memory: DecodeMemory = node.engine.memory
        assert memory.shared_memory() == ()
