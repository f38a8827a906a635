"""Single histories of the room protocol between both real ends, where a peer dies, restarts or repeats
itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag, SamplingParams
from hisparse_pd.core.paging.pools import Stage
from hisparse_pd.decode_node.prefill_peers import LATE_MESSAGE_SECS
from hisparse_pd.engine.messages import Abort, Generate
from hisparse_pd.protocol.messages import Room
from tests.property.both_ends import LATE_SECS, PrefillNode, World
from tests.property.sim_network import SimClient
from tests.property.sim_nodes import NEXT_TOKEN
from tests.property.sim_transport import WriteFate

pytestmark = pytest.mark.I7


@contextmanager
def one_pair(num_shared: int = 0) -> Iterator[World]:
    world = World(1, num_shared)
    try:
        yield world
    finally:
        world.close()


def ask(world: World, request_id: str = "r", room: int = 1, num_tokens: int = 5) -> None:
    (address,) = world.addresses
    sampling = SamplingParams(1)
    request = Generate(request_id, room, num_tokens, sampling, address.host, address.port, HisparseFlag.TRUE)
    world.decode.front.inbox.append(world.generate(tuple(range(num_tokens)), request))


def write_slowly(world: World, num_tokens: int = 10) -> PrefillNode:
    """A request, of which a write is in flight."""
    (address,) = world.addresses
    ask(world, num_tokens=num_tokens)
    for _ in range(6):
        world.work(itertools.repeat(WriteFate.SLOW))
    assert world.prefill[address].sender.in_flight
    return world.prefill[address]


def finish_writes(world: World, node: PrefillNode, client: SimClient, fate: WriteFate) -> None:
    """Until the prefill node has something to say of it."""
    assert client.connection is not None
    while not client.connection.to_client:
        for room in list(node.sender.in_flight):
            world.finish_write(node, room, fate)
        world.turn_prefill(node)


@pytest.mark.parametrize("fate", [WriteFate.WRITTEN, WriteFate.FAILED])
def test_what_became_of_a_room_is_said_again_when_its_connection_broke(fate: WriteFate) -> None:
    """A RoomDone, or the RoomFailed of a room that drains: nobody else would ever say it."""
    with one_pair() as world:
        front, node = world.decode.front, write_slowly(world, 5)
        (client,) = world.network.clients
        if fate is WriteFate.FAILED:  # told while its write is in flight, which comes back later
            node.engine.life.fail(node.engine.life.requests.live(Room(1)), 502, "no", world.now)
        finish_writes(world, node, client, fate)
        world.network.break_connection(client, 0)
        for _ in range(8):
            world.pass_time(1.1, late_bytes_land=False)
            world.work(itertools.repeat(WriteFate.SLOW))
        assert front.num_ends["r"] == 1
        if fate is WriteFate.WRITTEN:
            assert not front.errors
            assert front.tokens["r"] == [NEXT_TOKEN]
        else:
            assert front.errors["r"].error == "no"


@pytest.mark.I1
def test_an_answer_that_is_older_than_the_run_says_nothing_of_it() -> None:
    """A refused look-up, given only when the next run of the prefill node answers, is about the last.

    Taken for the end of the new run, it would free slots in time to which that run still writes. Only another
    look-up finds that one.
    """
    with one_pair() as world:
        (address,) = world.addresses
        decode, network = world.decode.engine, world.network
        decode.peers.use(address, world.now)
        ask(world)
        for _ in range(4):
            world.work(itertools.repeat(WriteFate.WRITTEN))
        control_port = world.kill_prefill(address).server.port
        world.pass_time(9.0, late_bytes_land=False)
        world.turn_decode(answers_lookups=False)  # the look-up is refused, and its answer takes its time
        assert world.decode.lookups.pending
        world.start_prefill(address, control_port)
        new_run = world.prefill[address].instance_id
        ask(world, "again", 2)
        for answers_lookups in (False, False, True, True, True, True):
            network.deliver_all()
            world.turn_prefill(world.prefill[address])
            network.deliver_all()
            world.pass_time(1.0, late_bytes_land=False)
            world.turn_decode(answers_lookups=answers_lookups)
        assert decode.peers.is_registered(address)
        assert decode.peers.instance_id(address) == new_run


@pytest.mark.I1
def test_the_next_run_cannot_call_a_room_of_the_last_one_quiet() -> None:
    """It answers an abort that crosses its registration, and bytes of the dead run are still under way."""
    with one_pair() as world:
        (address,) = world.addresses
        write_slowly(world, 5)
        world.start_prefill(address, world.kill_prefill(address).server.port)
        node = world.prefill[address]
        world.pass_time(3.0, late_bytes_land=False)
        registered = len(node.engine.peers)
        while len(node.engine.peers) == registered:  # a heartbeat is refused, and then it registers again
            world.network.deliver_all()
            world.turn_prefill(node)
            if len(node.engine.peers) == registered:
                world.network.deliver_all()
                world.turn_decode()
        world.decode.front.inbox.append(Abort("r"))
        world.turn_decode()
        for _ in range(3):
            world.work(itertools.repeat(WriteFate.WRITTEN))
        assert Room(1) in world.decode.engine.requests.quarantine
        world.pass_time(LATE_SECS + 1, late_bytes_land=True)
        assert world.late == []


def turn_for_last_words(world: World) -> None:
    """The decode node turns, and once more when what a lane that has ended had said must be there."""
    world.turn_decode()
    world.pass_time(LATE_MESSAGE_SECS, late_bytes_land=False)
    world.turn_decode()


@pytest.mark.I1
def test_slots_of_a_killed_writer_to_shared_memory_are_free_at_once() -> None:
    with one_pair(num_shared=1) as world:
        pools = world.decode.engine.requests.pools
        write_slowly(world)
        assert pools.free != pools.totals
        world.turn_decode()
        world.kill_prefill(world.addresses[0])
        turn_for_last_words(world)
        assert world.decode.front.errors["r"].status == 502
        assert pools.free == pools.totals
        assert world.late == []


@pytest.mark.I1
def test_a_writer_to_shared_memory_that_lost_patience_keeps_the_slots_of_its_write_in_progress() -> None:
    """It keeps the memory open, and says when the last write is over to the decode node that came back."""
    with one_pair(num_shared=1) as world:
        pools, node = world.decode.engine.requests.pools, write_slowly(world)
        (client,) = world.network.clients
        world.network.break_connection(client, 0)
        world.pass_time(6.0, late_bytes_land=False)
        world.turn_prefill(node)
        assert len(node.engine.peers) == 0, "the decode node was silent for too long"
        world.decode.front.inbox.append(Abort("r"))
        for _ in range(3):
            world.work(itertools.repeat(WriteFate.SLOW))
            assert pools.used(Stage.QUARANTINED).host > 0
        for _ in range(3):
            world.work(itertools.repeat(WriteFate.WRITTEN))
        assert pools.used(Stage.QUARANTINED).host == 0


@pytest.mark.I7
def test_what_a_run_said_before_it_let_go_of_the_memory_counts() -> None:
    """A delivery, say: it comes over the network, while the kernel says at once that a process has ended."""
    with one_pair(num_shared=1) as world:
        node = write_slowly(world)
        (client,) = world.network.clients
        finish_writes(world, node, client, WriteFate.WRITTEN)
        world.lane_host.let_go(node.instance_id)
        world.turn_decode()
        world.network.deliver_all()
        turn_for_last_words(world)
        assert world.decode.front.errors == {}
        assert world.decode.front.tokens["r"] == [NEXT_TOKEN]


@pytest.mark.I1
def test_a_next_turn_reads_what_the_decode_node_holds() -> None:
    """What histories rely on (``test_rooms_both_ends.py``): a next turn reads what the decode node holds."""
    with one_pair() as world:
        (address,) = world.addresses
        fates = itertools.repeat(WriteFate.WRITTEN)
        ask(world, num_tokens=11)
        for _ in range(20):
            world.work(fates)
        world.prefill[address].engine.life.pages.prefixes.flush()
        ask(world, "next", room=2, num_tokens=16)
        for _ in range(20):
            world.work(fates)
        assert world.decode.front.num_ends == {"r": 1, "next": 1}
        assert not world.decode.front.errors
        assert world.num_read > 0
        assert world.prefill[address].engine.life.pages.decode_tier.counts.num_tokens == 8
