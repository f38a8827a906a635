"""Held prefixes: their books, and an engine that goes on with them. The bytes are those that prefill has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from decode_node.held_prefixes import KV_POOL, HeldPrefixes, PromptKeys
from decode_node.live_requests import Landing, LiveRequests
from decode_node.memory import slots_tensor
from decode_node.pools import Holding, PoolKind, Pools, SlotCounts, Stage
from decode_node.request import PeerAddress, Request
from decode_node.scheduler import Admission
from protocol.messages import Room
from service.engine_messages import FlushCache, pack_token_ids
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    PrefillDouble,
    Prompt,
    computed,
    landing_slots,
    load_checkpoint,
    random_prompt,
)
from transfer.allocator import PoolExhausted, PoolIntegrityError
from transfer.extents import extents_to_slots
from vocabulary import HisparseFlag, Mode, SamplingParams

PAGE = 4
OTHER = {Mode.HISPARSE: Mode.DENSE, Mode.DENSE: Mode.HISPARSE}
PEER = PeerAddress("prefill", 8998)


def keys_of(prompt: Prompt, page_size: int = PAGE, identity: bytes = b"model") -> PromptKeys:
    return PromptKeys.of(identity, pack_token_ids(prompt), page_size)


# --- keys ----------------------------------------------------------------------------------------------


def test_a_key_is_of_all_tokens_before_it_and_of_what_makes_their_kv() -> None:
    one, other = keys_of((1, 2, 3, 4, 5, 6, 7, 8, 9)), keys_of((9, 2, 3, 4, 5, 6, 7, 8))
    assert (len(one.keys), one.num_tokens) == (2, 9)
    assert set(one.keys).isdisjoint(other.keys), "equal pages behind different ones are other KV"
    assert one.keys == keys_of((1, 2, 3, 4, 5, 6, 7, 8)).keys
    assert set(one.keys).isdisjoint(keys_of((1, 2, 3, 4, 5, 6, 7, 8), identity=b"another model").keys)


def test_output_goes_on_where_the_prompt_ended() -> None:
    conversation = tuple(range(30))
    for num_prompt_tokens in (1, 3, 4, 5, 8, 17):
        prompt, output = conversation[:num_prompt_tokens], conversation[num_prompt_tokens:]
        assert keys_of(prompt).with_output(output) == list(keys_of(conversation).keys)


# --- the books -----------------------------------------------------------------------------------------


def held(*rooms: int, num_pages: int = 3, mode: Mode = Mode.HISPARSE) -> tuple[Pools, HeldPrefixes]:
    """A prefix of ``num_pages`` pages of tokens ``room``, for each of ``rooms``, and nothing else."""
    pools = Pools(SlotCounts(host=40, device=40, index=80, aux=2, req_row=2), PAGE)
    prefixes = HeldPrefixes(pools)
    for room in rooms:
        hold(pools, prefixes, room, num_pages, mode)
    return pools, prefixes


def hold(pools: Pools, prefixes: HeldPrefixes, room: int, num_pages: int, mode: Mode) -> Holding:
    num_slots = num_pages * PAGE
    kv = SlotCounts(host=num_slots) if mode is Mode.HISPARSE else SlotCounts(device=num_slots)
    holding = pools.reserve(Room(room), kv + SlotCounts(index=num_slots))
    pools.move(holding, Stage.HELD)
    prefixes.add(holding, keys_of((room,) * num_slots).keys, mode)
    return holding


@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
def test_a_prefix_is_taken_as_far_as_it_is_the_same(mode: Mode) -> None:
    pools, prefixes = held(1, 2, mode=mode)
    wanted = keys_of((1,) * 8 + (7,) * 8).keys
    holding, source = taken(prefixes.take(wanted, mode, SlotCounts(index=16)))
    assert source is None
    assert (holding.room, holding.num_slots(PoolKind.INDEX)) == (1, 8)
    assert prefixes.num_tokens == 12, "what is behind it was given up, and the other one is still held"
    assert prefixes.take(wanted, mode, SlotCounts()) is None, "it serves one request at a time"
    assert pools.free + prefixes.slots + pools.held_by([holding]) == pools.totals
    prefixes.check_integrity()


@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
def test_what_the_other_mode_left_is_taken_apart(mode: Mode) -> None:
    """Its indexer keys are the request's; its KV is to be copied."""
    pools, prefixes = held(1, mode=mode)
    keys = keys_of((1,) * 9).keys
    hold(pools, prefixes, 1, 1, OTHER[mode])
    assert taken(prefixes.take(keys[:1], OTHER[mode], SlotCounts()))[1] is None, (
        "equally long, without a copy"
    )
    whole = SlotCounts(host=36, device=36)
    assert prefixes.take(keys, OTHER[mode], whole) is None, "there is no place for both"
    holding, source = taken(prefixes.take(keys, OTHER[mode], SlotCounts(host=9, device=9, index=9)))
    assert source is not None
    assert (list(holding.extents), holding.num_slots(PoolKind.INDEX)) == ([PoolKind.INDEX], 8)
    assert (list(source.extents), source.num_slots(KV_POOL[mode])) == ([KV_POOL[mode]], 8)
    assert (source.stage, len(prefixes)) == (Stage.HELD, 0)


def taken(found: tuple[Holding, Holding | None] | None) -> tuple[Holding, Holding | None]:
    assert found is not None
    return found


@pytest.mark.I2
def test_the_least_recently_used_go_first_and_from_their_ends() -> None:
    pools, prefixes = held(1, 2)
    prefixes.make_room(pools.free + SlotCounts(host=PAGE))
    assert [prefixes.find(keys_of((room,) * 12).keys, Mode.HISPARSE)[1] for room in (1, 2)] == [2, 3]
    prefixes.make_room(pools.free + SlotCounts(host=3 * PAGE))
    assert prefixes.find(keys_of((1,) * 12).keys, Mode.HISPARSE) is None
    assert prefixes.find(keys_of((2,) * 12).keys, Mode.HISPARSE)[1] == 2
    assert (prefixes.num_evicted_tokens, len(prefixes)) == (16, 1)
    prefixes.check_integrity()
    prefixes.flush()
    assert (pools.free, prefixes.num_evicted_tokens) == (pools.totals, 16)


def test_nothing_is_given_up_for_slots_that_it_does_not_have() -> None:
    pools, prefixes = held(1)
    prefixes.make_room(pools.free + SlotCounts(aux=1))
    prefixes.make_room(pools.free + SlotCounts(device=1))
    assert prefixes.num_tokens == 12
    hold(pools, prefixes, 2, 2, Mode.DENSE)
    prefixes.make_room(pools.free + SlotCounts(device=1))
    assert prefixes.slots == SlotCounts(host=12, device=4, index=16)


@pytest.mark.I2
def test_a_prefix_that_somebody_owns_cannot_be_held() -> None:
    pools, prefixes = held(1)
    holding = pools.reserve(Room(2), SlotCounts(host=8, index=4))
    with pytest.raises(PoolIntegrityError, match="not 2 pages to hold"):
        prefixes.add(holding, keys_of((2,) * 8).keys, Mode.HISPARSE)


# --- requests ------------------------------------------------------------------------------------------


def make_request(room: int, prompt: Prompt, max_new_tokens: int = 6) -> Request:
    return Request(
        f"id-{room}",
        Room(room),
        len(prompt),
        SamplingParams(max_new_tokens=max_new_tokens),
        HisparseFlag.TRUE,
        PEER,
        arrived_at=0.0,
        prompt_keys=keys_of(prompt),
    )


class Books:
    """Live requests without an engine."""

    def __init__(self) -> None:
        totals = SlotCounts(host=48, device=32, index=64, aux=2, req_row=2)
        self.rooms = LiveRequests(Pools(totals, PAGE), quarantine_secs=5.0)
        self._num_rooms = 0

    def land(self, prompt: Prompt, mode: Mode, num_slots: int = 0) -> Request:
        self._num_rooms += 1
        request = make_request(self._num_rooms, prompt)
        num_slots = num_slots or len(prompt) + 4
        kv = SlotCounts(host=num_slots, device=8) if mode is Mode.HISPARSE else SlotCounts(device=num_slots)
        self.rooms.open(request)
        self.rooms.queue(request, 9.0)
        need = kv + SlotCounts(index=num_slots, aux=1, req_row=1)
        admission = Admission(request, mode, need, 8 if mode is Mode.HISPARSE else 0)
        self.rooms.admit(admission, "run", 9.0)
        self.rooms.check_integrity()
        return request

    def run(self, request: Request, num_output_tokens: int = 1, lands_until: float = 0.0) -> Request:
        self.rooms.start(request, lands_until)
        request.output_token_ids += [77] * num_output_tokens
        return request

    def end(self, request: Request, landing: Landing = Landing.QUIET, *, is_sound: bool = True) -> None:
        self.rooms.end(request, landing, 0.0, is_sound=is_sound)
        self.rooms.check_integrity()


PROMPT = tuple(range(100, 110))


@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("num_output_tokens", "num_held"), [(1, 8), (2, 8), (3, 12), (6, 12), (7, 16)])
def test_whole_pages_of_what_exists_are_held(mode: Mode, num_output_tokens: int, num_held: int) -> None:
    """The newest token's KV does not exist."""
    books = Books()
    request = books.land(PROMPT, mode, 16)
    slots = extents_to_slots(request.owned[PoolKind.INDEX])[:num_held].tolist()
    books.end(books.run(request, num_output_tokens))
    assert books.rooms.held.num_tokens == num_held
    assert books.rooms.available == books.rooms.pools.totals
    following = books.land((*PROMPT, *[77] * num_output_tokens, 5), mode)
    assert following.held_prefix_tokens == num_held
    assert extents_to_slots(following.owned[PoolKind.INDEX])[:num_held].tolist() == slots


@pytest.mark.I1
@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("landing", list(Landing))
def test_of_a_room_that_did_not_land_only_what_was_held_before_is_held(mode: Mode, landing: Landing) -> None:
    """And of that nothing is quarantined: no write was to land there."""
    books = Books()
    books.end(books.run(books.land(PROMPT, mode)))
    request = books.land((*PROMPT, 1, 2, 3, 4), mode)
    assert request.held_prefix_tokens == 8
    prefix = set(extents_to_slots(request.owned[PoolKind.INDEX])[:8].tolist())
    books.end(request, landing)
    rooms = books.rooms
    assert rooms.held.num_tokens == 8
    assert {s for p in rooms.held._prefixes for s in extents_to_slots(p.holding[PoolKind.INDEX])} == prefix
    is_quiet = landing is Landing.QUIET
    assert (rooms.pools.used(Stage.QUARANTINED).index == 0) is is_quiet
    assert (rooms.available == rooms.pools.totals) is is_quiet


@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("is_copied", [True, False])
def test_what_is_copied_is_held_again_and_what_is_not_is_nobodys(mode: Mode, is_copied: bool) -> None:
    books = Books()
    books.end(books.run(books.land(PROMPT, mode), 3))
    request = books.land((*PROMPT, 77, 77, 1), OTHER[mode])
    assert (request.held_prefix_tokens, request.owned.num_slots(PoolKind.INDEX)) == (12, 20)
    assert request.source is not None
    assert books.rooms.available_now + books.rooms.pools.held_by([request.source]) == books.rooms.available
    if is_copied:
        books.rooms.copied(request)
        books.rooms.check_integrity()
        assert books.rooms.available == books.rooms.available_now
    books.end(request)
    assert books.rooms.held.num_tokens == 12 * is_copied
    assert books.rooms.available_now == books.rooms.pools.totals


@pytest.mark.I1
def test_what_may_land_once_more_is_not_held() -> None:
    books = Books()
    books.end(books.run(books.land(PROMPT, Mode.HISPARSE), lands_until=3.0))
    assert books.rooms.held.num_tokens == 0
    assert books.rooms.pools.used(Stage.QUARANTINED).host == 16


def test_what_a_failed_step_left_is_not_held() -> None:
    books = Books()
    books.end(books.run(books.land(PROMPT, Mode.HISPARSE)), is_sound=False)
    assert books.rooms.pools.free == books.rooms.pools.totals


@pytest.mark.I2
def test_held_slots_are_as_good_as_free() -> None:
    books = Books()
    for first in (1, 2, 3):
        books.end(books.run(books.land((first,) * 12, Mode.HISPARSE)))
    assert books.rooms.pools.free.host == 12
    request = books.land((9,) * 10, Mode.HISPARSE, 48)
    assert request.owned.num_slots(PoolKind.HOST) == 48
    assert books.rooms.held.num_tokens == 0
    with pytest.raises(PoolExhausted, match="room 5, host pool: 4 token slots needed, 0 of 48 free"):
        books.land((9,) * 4, Mode.HISPARSE, 4)
    books.end(books.run(request))
    books.end(books.run(books.land((8,) * 12, Mode.HISPARSE)))
    running = books.run(books.land((9,) * 10, Mode.HISPARSE, 12))
    assert books.rooms.held.num_tokens > 0
    books.rooms.grow(running, SlotCounts(host=36, index=36))
    assert running.owned.num_slots(PoolKind.HOST) == 48


@pytest.mark.I2
def test_what_is_taken_is_not_given_up_for_the_rest() -> None:
    """Of 48 slots the prefix has 8, and the request that begins with it needs all."""
    books = Books()
    for first in (1, 2, 3):
        books.end(books.run(books.land((first,) * 8, Mode.HISPARSE)))
    request = books.land((1,) * 9, Mode.HISPARSE, 48)
    assert request.held_prefix_tokens == 8
    assert books.rooms.held.num_tokens == 0


# --- the engine ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["v32", pytest.param("glm", marks=pytest.mark.slow)])
def checkpoint(request: pytest.FixtureRequest, tied_checkpoint: Callable[[str], Path]) -> Checkpoint:
    """Equal scores are the rule in it: a byte that is not as it should be changes tokens."""
    return load_checkpoint(tied_checkpoint(request.param))


@pytest.fixture(scope="module")
def double(checkpoint: Checkpoint) -> Iterator[PrefillDouble]:
    with closing(PrefillDouble(checkpoint, 16)) as double:
        yield double


@pytest.fixture(scope="module")
def shared_node(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    harness = EngineHarness(
        checkpoint,
        tmp_path_factory.mktemp("ipc"),
        disable_held_prefixes=False,
        page_size=16,
        host_pool_tokens=1024,
        device_pool_tokens=768,
        device_buffer_size=48,
    )
    with closing(harness):
        yield harness


@pytest.fixture
def node(shared_node: EngineHarness, double: PrefillDouble) -> EngineHarness:
    flush(shared_node, double)
    requests = shared_node.engine.requests
    assert requests.pools.free == requests.pools.totals
    double.bootstraps.clear()
    double.delivers = True
    return shared_node


def flush(node: EngineHarness, double: PrefillDouble) -> None:
    node.send(FlushCache())
    node.turn_until(lambda: not node.engine.requests.held, double)


def ask(
    node: EngineHarness, double: PrefillDouble, prompt: Prompt, num_new: int, flag: HisparseFlag, **more: Any
) -> Answer:
    answer = node.generate(double, prompt, num_new, flag, **more)
    node.turn_until(lambda: answer.is_over, double)
    assert answer.failure is None
    return answer


@pytest.mark.I5
@pytest.mark.parametrize("flag", [HisparseFlag.TRUE, HisparseFlag.FALSE])
def test_what_decoding_leaves_is_bit_for_bit_what_prefill_computes(
    node: EngineHarness, double: PrefillDouble, checkpoint: Checkpoint, flag: HisparseFlag
) -> None:
    prompt = random_prompt(5, 85)
    answer = ask(node, double, prompt, 60, flag)
    memory = node.engine.hot_buffers.memory
    (prefix,) = node.engine.requests.held._prefixes
    num_held = (85 + 59) // 16 * 16
    assert len(prefix.keys) * 16 == num_held
    alone = computed(checkpoint, (*prompt, *answer.token_ids)[:num_held], 16)
    kv, kind = (
        (memory.k_dev, PoolKind.DEVICE) if prefix.mode is Mode.DENSE else (memory.k_host, PoolKind.HOST)
    )
    assert kv[:, slots_tensor(prefix.holding[kind])].equal(alone.kv[:, :num_held])
    assert memory.index[:, slots_tensor(prefix.holding[PoolKind.INDEX])].equal(alone.index[:, :num_held])


@pytest.mark.I5
@pytest.mark.parametrize("flag", [HisparseFlag.TRUE, HisparseFlag.FALSE])
def test_a_conversation_goes_on_behind_what_is_held(
    node: EngineHarness, double: PrefillDouble, flag: HisparseFlag
) -> None:
    prompt = random_prompt(1, 50)
    turns: list[tuple[Prompt, list[int], int]] = []
    for turn in range(3):
        answer = ask(node, double, prompt, 20, flag)
        bootstrap = double.bootstraps[-1]
        assert answer.last is not None
        assert answer.last.stats is not None
        assert answer.last.stats.num_held_tokens == bootstrap.num_held_tokens
        assert len(landing_slots(bootstrap)) == len(prompt) - bootstrap.num_held_tokens
        turns.append((prompt, answer.token_ids, bootstrap.num_held_tokens))
        prompt = (*prompt, *answer.token_ids, *random_prompt(10 + turn, 30))
    assert [num_held for _, _, num_held in turns] == [
        0,
        *((len(p) + 19) // 16 * 16 for p, _, _ in turns[:-1]),
    ]
    for prompt, token_ids, _ in turns:  # each of them cold
        flush(node, double)
        assert ask(node, double, prompt, 20, flag).token_ids == token_ids
        assert double.bootstraps[-1].num_held_tokens == 0


@pytest.mark.I5
def test_a_conversation_may_change_its_mode(
    node: EngineHarness, double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV is copied from pool to pool in slices of some tokens, while others get theirs."""
    monkeypatch.setattr(node.engine.copies, "slice_bytes", 5 * node.engine._spec.item_bytes)
    prompt, other = random_prompt(6, 70), random_prompt(7, 30)
    turns: list[tuple[Prompt, list[int], HisparseFlag]] = []
    for flag in (HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.TRUE):
        beside = node.generate(double, other, 60, HisparseFlag.TRUE)
        node.turn_until(lambda beside=beside: beside.token_ids, double)
        answer = node.generate(double, prompt, 20, flag)
        node.turn_until(lambda answer=answer: answer.token_ids, double)
        if turns:
            assert node.engine.copies.is_busy, "the first token does not wait for the copy"
        num_before = len(beside.token_ids)
        node.turn_until(lambda answer=answer: answer.is_over, double)
        assert len(beside.token_ids) > num_before + 30 * bool(turns), "others step meanwhile"
        node.turn_until(lambda beside=beside: beside.is_over, double)
        turns.append((prompt, answer.token_ids, flag))
        prompt = (*prompt, *answer.token_ids, *random_prompt(40, 10))
    held = [bootstrap.num_held_tokens for bootstrap in double.bootstraps[1::2]]
    assert held == [0, *((len(before) + 19) // 16 * 16 for before, _, _ in turns[:-1])]
    for before, token_ids, flag in turns:
        flush(node, double)
        assert ask(node, double, before, 20, flag).token_ids == token_ids


@pytest.mark.I1
def test_a_client_that_leaves_while_its_prefix_is_copied(
    node: EngineHarness, double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.engine.copies, "slice_bytes", node.engine._spec.item_bytes)
    prompt = random_prompt(8, 70)
    ask(node, double, prompt, 2, HisparseFlag.TRUE)
    answer = node.generate(double, (*prompt, 1), 20, HisparseFlag.FALSE)
    node.turn_until(lambda: node.engine.copies.is_busy, double)
    node.leave(answer)
    requests = node.engine.requests
    node.turn_until(lambda: not requests and not len(requests.quarantine), double)
    assert not node.engine.copies.is_busy
    assert requests.pools.free == requests.pools.totals


def test_who_needs_the_slots_of_a_source_does_not_wait_for_turns(
    node: EngineHarness, double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.engine.copies, "slice_bytes", node.engine._spec.item_bytes)
    prompt = random_prompt(9, 330)
    ask(node, double, prompt, 2, HisparseFlag.TRUE)
    copying = node.generate(double, (*prompt, 1), 20, HisparseFlag.FALSE)
    node.turn_until(lambda: node.engine.copies.is_busy, double)
    assert node.engine.requests.pools.free.host < 900
    large = node.generate(double, random_prompt(10, 900), 20, HisparseFlag.TRUE)
    node.turn_until(lambda: len(double.bootstraps) == 3, double)
    assert not node.engine.copies.is_busy
    node.turn_until(lambda: copying.is_over and large.is_over, double)
    assert copying.failure is None
    assert large.failure is None


@pytest.mark.I5
def test_conversations_that_drive_each_other_out_get_the_same_tokens(
    node: EngineHarness, double: PrefillDouble
) -> None:
    """The host pool has 1,024 slots, and these want more."""
    talks: list[tuple[Prompt, ...]] = []
    for number in range(6):
        first = random_prompt(20 + number, 150)
        answer = ask(node, double, first, 12, HisparseFlag.TRUE)
        talks.append((first, (*first, *answer.token_ids, *random_prompt(30 + number, 9))))
    prompts = [following for _, following in talks for _ in range(2)]
    answers = [node.generate(double, prompt, 12, HisparseFlag.TRUE) for prompt in prompts]
    node.turn_until(lambda: all(answer.is_over for answer in answers), double)
    assert 0 < sum(bootstrap.num_held_tokens > 0 for bootstrap in double.bootstraps[6:]) < len(prompts)
    assert node.engine.requests.held.num_evicted_tokens > 0
    for one, other in pairwise(answers):
        if prompts[answers.index(one)] == prompts[answers.index(other)]:
            assert one.token_ids == other.token_ids
    for prompt, answer in list(zip(prompts, answers, strict=True))[::2]:
        flush(node, double)
        assert ask(node, double, prompt, 12, HisparseFlag.TRUE).token_ids == answer.token_ids


def test_a_client_that_leaves_while_tokens_come_leaves_a_prefix(
    node: EngineHarness, double: PrefillDouble
) -> None:
    prompt = random_prompt(2, 70)
    answer = node.generate(double, prompt, 200, HisparseFlag.TRUE)
    node.turn_until(lambda: len(answer.token_ids) > 20, double)
    node.leave(answer)
    node.turn_until(lambda: not node.engine.requests, double)
    assert node.engine.requests.held.num_tokens >= 80
    again = ask(node, double, prompt, 20, HisparseFlag.TRUE)
    assert again.token_ids == answer.token_ids[:20]
    assert double.bootstraps[-1].num_held_tokens == 64


@pytest.mark.I1
def test_a_client_that_leaves_before_the_kv_is_there_leaves_nothing_new(
    node: EngineHarness, double: PrefillDouble
) -> None:
    prompt = random_prompt(3, 70)
    ask(node, double, prompt[:40], 2, HisparseFlag.TRUE)
    double.delivers = False
    answer = node.generate(double, prompt, 20, HisparseFlag.TRUE)
    node.turn_until(lambda: len(double.bootstraps) == 2, double)
    assert double.bootstraps[-1].num_held_tokens == 32
    node.leave(answer)
    node.turn_until(lambda: not node.engine.requests and not len(node.engine.requests.quarantine), double)
    assert node.engine.requests.held.num_tokens == 32


def test_no_key_no_prefix(checkpoint: Checkpoint, double: PrefillDouble, tmp_path: Path) -> None:
    double.delivers = True
    with closing(EngineHarness(checkpoint, tmp_path, page_size=16)) as node:
        prompt = random_prompt(4, 40)
        for _ in range(2):
            ask(node, double, prompt, 2, HisparseFlag.TRUE)
        assert len(node.engine.requests.held) == 0
        assert node.engine.requests.pools.free == node.engine.requests.pools.totals
