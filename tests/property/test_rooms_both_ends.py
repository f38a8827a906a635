"""The room protocol between both real ends, under everything that clients, networks and machines do to it.

Requests arrive at the decode node and are given up there; messages are late, lost with their connection or
said twice; writes are slow, fail, land after they failed, or never come back; nodes stop, die and start
again. Whatever happens, no byte lands in a slot that is not kept for the room of its write, and no request
runs on bytes that are not its own (``both_ends.World``). One prefill node writes over the network, the other
over shared memory, of which the kernel says when a dead writer has let go. In the end every request has
ended, once, and every pool of both nodes is whole.

ROOM_EXAMPLES in the environment sets the number of histories, new ones in every run.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse_pd.base.vocabulary import HisparseFlag, SamplingParams
from hisparse_pd.core.paging.prompt_keys import root_of
from hisparse_pd.engine.messages import Abort, Generate
from hisparse_pd.protocol.messages import Room, RoomDone, to_decode_decoder
from tests.examples import num_examples
from tests.property.both_ends import QUARANTINE_SECS, ROOM_TIMEOUT_SECS, PrefillNode, World
from tests.property.sim_network import Connection, SimClient
from tests.property.sim_nodes import NEXT_TOKEN, SimFront
from tests.property.sim_transport import WriteFate

pytestmark = pytest.mark.I7

_ASKED = os.environ.get("ROOM_EXAMPLES")
NUM_PREFILL = 2
NUM_SHARED = 1
"""The last of them writes over shared memory."""


class Arrival(NamedTuple):
    """``reused``: how many rooms ago this one was used. ``family``: of prompts that begin alike, where no
    ``prompt`` is given."""

    node: int
    flag: HisparseFlag
    family: int = 0
    num_tokens: int = 9
    max_new_tokens: int = 2
    reused: int | None = None
    salt: str = ""
    num_samples: int = 1
    prompt: tuple[int, ...] = ()


ARRIVALS = st.tuples(
    st.integers(0, NUM_PREFILL - 1),
    st.sampled_from(HisparseFlag),
    st.integers(0, 2),
    st.sampled_from([1, 3, 4, 5, 8, 9, 13, 17, 24]),
    st.sampled_from([1, 2, 5, 12]),
    st.sampled_from([*[None] * 6, 0, 1, 3]),
    st.sampled_from(["", "", "", "salt"]),
    st.sampled_from([1, 1, 2, 3]),
).map(lambda drawn: Arrival(*drawn))
DICE = st.integers(0, 3)
"""For rules that are to act at times only: at 0."""
MOSTLY = st.sampled_from([True, True, True, False])
FATES = st.sampled_from([WriteFate.WRITTEN, WriteFate.SLOW, *WriteFate])


class BothEndsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(NUM_PREFILL, NUM_SHARED)
        self.requests: dict[str, Generate] = {}
        self.taken: dict[str, SimFront] = {}
        """By request id, the front that took the request; a dead one owes nothing."""

    @initialize(num_index_slots=st.sampled_from([0, 0, 48]))
    def meet(self, num_index_slots: int) -> None:
        """The nodes have served before, so that few steps are spent on registrations. In some histories the
        decode node's index pool is short, and held prefixes move to main memory and back."""
        if num_index_slots:
            self.world.close()
            self.world = World(NUM_PREFILL, NUM_SHARED, num_index_slots)
        for node in range(NUM_PREFILL):
            self.request(Arrival(node, HisparseFlag.TRUE))
        self.work(6, [])

    # --- clients ------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=3))
    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.request(arrival)

    def request(self, arrival: Arrival) -> None:
        family = arrival.family
        prompt = arrival.prompt or tuple(
            (family + position // 6 * family) % 8 for position in range(arrival.num_tokens)
        )
        address = self.world.addresses[arrival.node]
        front = self.world.decode.front
        samples = []
        for _ in range(arrival.num_samples):
            number = len(self.requests)
            room = number if arrival.reused is None else max(0, number - 1 - arrival.reused)
            sample = Generate(
                f"request-{number}",
                room,
                len(prompt),
                SamplingParams(arrival.max_new_tokens, temperature=0.0, ignore_eos=True),
                address.host,
                address.port,
                arrival.flag,
            )
            samples.append(sample)
            self.requests[sample.request_id] = sample
            self.taken[sample.request_id] = front
        front.inbox.append(self.world.generate(prompt, *samples, salt=arrival.salt))

    @precondition(lambda self: self.world.decode.front.tokens)
    @rule(arrival=ARRIVALS, back=st.integers(0, 3), num_new=st.integers(1, 6))
    def go_on(self, arrival: Arrival, back: int, num_new: int) -> None:
        """With what a client has got so far, and some tokens more."""
        tokens = self.world.decode.front.tokens
        before = list(tokens)[-1 - back % len(tokens)]
        prompt = (*self.world.prompts[before], *tokens[before], *[arrival.family] * num_new)[:26]
        self.request(arrival._replace(prompt=prompt))

    @precondition(lambda self: self.requests)
    @rule(back=st.integers(0, 4))
    def abort(self, back: int) -> None:
        self.leave(f"request-{max(0, len(self.requests) - 1 - back)}")

    @precondition(lambda self: self.writing())
    @rule(data=st.data(), fates=st.lists(FATES, max_size=2), num_turns=st.integers(1, 3))
    def abort_in_a_write(self, data: st.DataObject, fates: list[WriteFate], num_turns: int) -> None:
        _, room = data.draw(st.sampled_from(self.writing()))
        self.leave_room(room)
        slow = itertools.chain(fates, itertools.repeat(WriteFate.SLOW))
        for _ in range(num_turns):
            self.world.work(slow, decode_first=True)

    def leave(self, request_id: str) -> None:
        front = self.taken[request_id]
        front.inbox.append(Abort(request_id))
        front.aborted.add(request_id)

    def leave_room(self, room: Room) -> None:
        """The client of a room that a prefill node writes for; it may have left before."""
        if (request := self.world.decode.engine.requests.get(room)) is not None:
            self.leave(request.request_id)

    def between_slices(self) -> list[tuple[PrefillNode, Room]]:
        nodes = [node for node in self.world.prefill.values() if not node.is_stopped]
        return [(node, room) for node in nodes for room in node.sender.between_slices]

    @precondition(lambda self: self.between_slices())
    @rule(data=st.data(), fates=st.lists(FATES, max_size=2))
    def abort_between_slices(self, data: st.DataObject, fates: list[WriteFate]) -> None:
        """While another room of the peer has its turn, with which nothing happens to it."""
        _, room = data.draw(st.sampled_from(self.between_slices()))
        self.leave_room(room)
        self.world.work(itertools.chain(fates, itertools.repeat(WriteFate.SLOW)), decode_first=True)

    @rule(num_aborted=st.integers(2, 5), num_turns=st.integers(0, 2))
    def abort_storm(self, num_aborted: int, num_turns: int) -> None:
        """Clients that all leave at once, and as many that come in their place."""
        for back in range(min(num_aborted, len(self.requests))):
            self.abort(back)
        for number in range(num_aborted):
            self.request(Arrival(number % NUM_PREFILL, list(HisparseFlag)[number % 3], number % 3))
        self.work(num_turns, [])

    # --- nodes --------------------------------------------------------------------------------------------

    @rule(num_turns=st.integers(1, 6), fates=st.lists(FATES, max_size=6), decode_first=st.booleans())
    def work(self, num_turns: int, fates: list[WriteFate], decode_first: bool = False) -> None:
        """Turns in which the first writes have these ``fates``, and the others succeed."""
        more = itertools.chain(fates, itertools.repeat(WriteFate.WRITTEN))
        for _ in range(num_turns):
            self.world.work(more, decode_first=decode_first)

    @rule(answers_lookups=st.booleans())
    def turn_decode(self, answers_lookups: bool) -> None:
        self.world.turn_decode(answers_lookups=answers_lookups)

    @rule(which=st.integers(0, NUM_PREFILL - 1), fails_at=st.sampled_from([None, None, None, 0, 2]))
    def turn_prefill(self, which: int, fails_at: int | None) -> None:
        node = self.world.prefill.get(self.world.addresses[which])
        if node is not None:
            self.world.forward_fails_at = fails_at
            self.world.turn_prefill(node)
            self.world.forward_fails_at = None

    @rule(which=st.integers(0, NUM_PREFILL - 1), same_port=st.booleans(), at_once=st.booleans(), dice=DICE)
    def kill_prefill(self, which: int, same_port: bool, at_once: bool, dice: int) -> None:
        """Or start it, when it is dead."""
        if dice:
            return
        address = self.world.addresses[which]
        node = self.world.prefill.get(address)
        if node is not None:
            port = self.world.kill_prefill(address).server.port
            if not at_once:
                return
            self.world.start_prefill(address, port if same_port else 0)
        else:
            self.world.start_prefill(address)

    @rule(which=st.integers(0, NUM_PREFILL - 1), dice=DICE)
    def stop_or_wake(self, which: int, dice: int) -> None:
        node = self.world.prefill.get(self.world.addresses[which])
        if node is not None and (node.is_stopped or dice == 0):
            node.is_stopped = not node.is_stopped

    @rule(dice=DICE)
    def restart_decode(self, dice: int) -> None:
        if dice == 0:
            self.world.restart_decode()

    @rule(
        secs=st.sampled_from(
            [0.4, 1.1, 1.1, 1.1, 2.6, 2.6, 5.5, 7.0, QUARANTINE_SECS, ROOM_TIMEOUT_SECS + 1]
        ),
        late_bytes_land=MOSTLY,
    )
    def pass_time(self, secs: float, late_bytes_land: bool) -> None:
        self.world.pass_time(secs, late_bytes_land=late_bytes_land)

    # --- the network --------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.network.connections)
    @rule(data=st.data(), num_frames=st.integers(1, 3))
    def deliver(self, data: st.DataObject, num_frames: int) -> None:
        network = self.world.network
        connection = data.draw(st.sampled_from(network.connections))
        connection.deliver(num_frames)

    @rule()
    def connect(self) -> None:
        self.world.network.connect()

    @precondition(lambda self: self.world.network.clients)
    @rule(data=st.data(), num_kept=st.integers(0, 3))
    def break_connection(self, data: st.DataObject, num_kept: int) -> None:
        network = self.world.network
        client = data.draw(st.sampled_from(network.clients))
        network.break_connection(client, num_kept)

    @precondition(lambda self: self.done_under_way())
    @rule(data=st.data())
    def lose_a_done(self, data: st.DataObject) -> None:
        """The connection breaks just when a delivery is reported."""
        self.world.network.break_connection(data.draw(st.sampled_from(self.done_under_way())), 0)

    def done_under_way(self) -> list[SimClient]:
        return [
            client
            for client in self.world.network.clients
            if client.connection is not None
            and any(isinstance(to_decode_decoder.decode(f), RoomDone) for f in client.connection.to_client)
        ]

    @precondition(lambda self: any(c.delivered_to_server for c in self.world.network.connections))
    @rule(data=st.data())
    def say_again_to_prefill(self, data: st.DataObject) -> None:
        connection, frame = self._delivered(data, "delivered_to_server")
        connection.server.inbox.append((connection.identity, frame))

    @precondition(lambda self: any(c.delivered_to_client for c in self.world.network.connections))
    @rule(data=st.data())
    def say_again_to_decode(self, data: st.DataObject) -> None:
        connection, frame = self._delivered(data, "delivered_to_client")
        connection.client.inbox.append(frame)

    def _delivered(self, data: st.DataObject, to_whom: str) -> tuple[Connection, bytes]:
        """Draw a frame that a connection has delivered already."""
        connections = [each for each in self.world.network.connections if getattr(each, to_whom)]
        connection = data.draw(st.sampled_from(connections))
        return connection, data.draw(st.sampled_from(list(getattr(connection, to_whom))))

    # --- the transport ------------------------------------------------------------------------------------

    def writing(self) -> list[tuple[PrefillNode, Room]]:
        return [
            (node, room)
            for node in self.world.prefill.values()
            if not node.is_stopped
            for room in node.sender.in_flight
        ]

    @precondition(lambda self: self.writing())
    @rule(data=st.data(), fate=FATES)
    def finish_write(self, data: st.DataObject, fate: WriteFate) -> None:
        node, room = data.draw(st.sampled_from(self.writing()))
        self.world.finish_write(node, room, fate)

    def reading(self) -> list[tuple[PrefillNode, Room]]:
        nodes = [node for node in self.world.prefill.values() if not node.is_stopped]
        return [(node, room) for node in nodes for room in node.reads.in_flight]

    @precondition(lambda self: self.reading())
    @rule(data=st.data(), fate=FATES)
    def finish_read(self, data: st.DataObject, fate: WriteFate) -> None:
        node, room = data.draw(st.sampled_from(self.reading()))
        self.world.finish_read(node, room, fate)

    @precondition(lambda self: self.reading())
    @rule(data=st.data(), is_late=st.booleans())
    def abort_in_a_read(self, data: st.DataObject, is_late: bool) -> None:
        """Or let the request lose patience."""
        _, room = data.draw(st.sampled_from(self.reading()))
        if is_late:
            self.world.pass_time(1.1, late_bytes_land=True)
        else:
            self.leave_room(room)
        self.world.work(itertools.repeat(WriteFate.SLOW), decode_first=True)

    @precondition(lambda self: self.world.decode.front.tokens)
    @rule(
        back=st.integers(0, 3),
        node=st.integers(0, NUM_PREFILL - 1),
        family=st.integers(0, 2),
        num_turns=st.integers(1, 4),
        fates=st.lists(FATES, max_size=4),
    )
    def go_on_elsewhere(
        self, back: int, node: int, family: int, num_turns: int, fates: list[WriteFate]
    ) -> None:
        """A conversation goes on as before, but its prefill node has it nowhere any more."""
        for prefill in self.world.prefill.values():
            prefill.engine.life.pages.prefixes.flush()
        tokens = self.world.decode.front.tokens
        before = list(tokens)[-1 - back % len(tokens)]
        prompt = (*self.world.prompts[before], *tokens[before], *[family] * 9)[:26]
        salt = "salt" if self.world.roots[before] == root_of("salt") else ""
        flag = self.requests[before].hisparse or HisparseFlag.TRUE
        self.request(Arrival(node, flag, salt=salt, prompt=prompt))
        self.work(num_turns, fates)

    @precondition(lambda self: self.world.late)
    @rule(data=st.data(), num_pieces=st.integers(1, 5), lands=MOSTLY)
    def late_bytes(self, data: st.DataObject, num_pieces: int, lands: bool) -> None:
        late = self.world.late
        for _ in range(min(num_pieces, len(late))):
            piece = late.pop(data.draw(st.integers(0, len(late) - 1)))
            if lands:
                self.world.land(piece)

    # --- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def pools_are_whole(self) -> None:
        self.world.decode.engine.requests.check_integrity()
        for node in self.world.prefill.values():
            node.engine.life.check_integrity()

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.world.close()

    def settle(self) -> None:
        """Once the world calms down, every request has ended and every slot and page is free."""
        world = self.world
        for address in world.addresses:
            if address in world.prefill:
                world.prefill[address].is_stopped = False
            else:
                world.start_prefill(address)
        for _ in range(120):
            self.work(2, [])
            world.pass_time(1.0, late_bytes_land=True)
            if not self.unsettled():
                break
        assert self.unsettled() == []
        rooms = world.decode.engine.requests
        rooms.settle_copies()
        assert rooms.available == rooms.pools.totals
        rooms.held.flush()
        assert rooms.pools.free == rooms.pools.totals
        for node in world.prefill.values():
            life = node.engine.life
            life.pages.prefixes.flush()
            assert life.pages.pools.free == life.pages.pools.totals
        self.check_answers()

    def unsettled(self) -> list[str]:
        world = self.world
        rooms = world.decode.engine.requests
        left = [f"decode: room {request.room} is {request.state}" for request in rooms.all()]
        left += [f"decode: room {entry.room} is quarantined" for entry in rooms.quarantine]
        for node in world.prefill.values():
            life = node.engine.life
            left += [f"prefill: room {request.room} is {request.state}" for request in life.requests]
            left += [f"prefill: a read of room {room}" for room in life.pages.decode_tier.parts._under_way]
            left += ["prefill: slots of a read in quarantine"] * life.pages.decode_tier.parts.num_quarantined
        return left + [f"bytes of room {piece.room} are in the transport" for piece in world.late]

    def check_answers(self) -> None:
        decode = self.world.decode
        num_taken = 0
        for request_id, front in self.taken.items():
            if front is decode.front:
                num_taken += 1
                if request_id not in front.aborted:
                    assert front.num_ends[request_id] == 1, f"{request_id} did not end"
        num_finished = sum(decode.front.num_ends.values()) - len(decode.front.errors)
        totals = decode.engine.metrics.totals
        num_others = sum(totals[f"{end}_requests_total"] for end in ("aborted", "failed"))
        assert num_finished + num_others == num_taken, "an end is counted twice or not at all"
        num_uses = Counter(request.room for request in self.requests.values())
        for request_id, failed in decode.front.errors.items():
            for fault in ("the decode step failed", "cannot be started", "cannot be retracted"):
                assert fault not in failed.error, f"{request_id}: {failed.error}"
            if num_uses[self.requests[request_id].room] == 1:
                assert "served before" not in failed.error, (
                    f"{request_id}: what became of it was not said again"
                )
        for request_id, front in self.taken.items():
            tokens = front.tokens.get(request_id, [])
            num_asked = self.requests[request_id].sampling.max_new_tokens
            assert tokens == [NEXT_TOKEN] * len(tokens)
            if front.num_ends[request_id] and request_id not in front.errors:
                assert len(tokens) == num_asked


TestBothEnds = pytest.mark.timeout(0 if _ASKED else 600)(BothEndsMachine.TestCase)
TestBothEnds.settings = settings(
    derandomize=_ASKED is None,
    database=None,
    max_examples=int(_ASKED or num_examples(6, 35)),
    stateful_step_count=40,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
