"""Prefixes that requests of a decode node share: their books, and an engine that goes on from them.

The bytes are those that prefill has.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, PromptKeys, root_of
from hisparse_pd.decode_node.growth import exchanges_of_pages
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.plan_moves import bootstrap_of
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import StepPlan
from hisparse_pd.engine.messages import pack_token_ids
from tests.books import end, land, make_request
from tests.unit.decode_node.support import (
    Checkpoint,
    EngineHarness,
    Prompt,
    computed,
    random_prompt,
)

PAGE = 4
CHECKPOINT = "tied"
NODE = {
    "disable_prefix_cache": False,
    "page_size": 16,
    "host_pool_tokens": 1024,
    "device_pool_tokens": 768,
    "device_buffer_size": 48,
}


def keys_of(prompt: Prompt, page_size: int = PAGE, root: PageKey = NO_ISOLATION) -> PromptKeys:
    return PromptKeys.of(root, pack_token_ids(prompt), page_size)


# --- requests ------------------------------------------------------------------------------------------


class Books:
    """Live requests without an engine."""

    def __init__(self) -> None:
        totals = SlotCounts(host=48, device=48, index=64, lookup=96, aux=3, req_row=3)
        self.rooms = LiveRequests(Pools(totals, PAGE), quarantine_secs=5.0)
        self._num_rooms = 0

    def land(self, prompt: Prompt, mode: Mode, num_slots: int = 0, num_resumed: int = 0) -> Request:
        """Land a request with ``num_slots`` for KV, which include those of all that is held of its prompt."""
        self._num_rooms += 1
        sampling = SamplingParams(6, num_resumed_tokens=num_resumed)
        request = make_request(self._num_rooms, len(prompt), prompt_keys=keys_of(prompt), sampling=sampling)
        land(self.rooms, request, mode, num_slots or len(prompt) + 4)
        self.rooms.check_integrity()
        return request

    def run(self, request: Request, num_output_tokens: int = 1) -> Request:
        self.rooms.start(request)
        request.output_token_ids += [77] * num_output_tokens
        return request

    def end(self, request: Request, *, is_sound: bool = True) -> None:
        end(self.rooms, request, is_sound=is_sound)
        self.rooms.check_integrity()


PROMPT = tuple(range(100, 110))


@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("num_output_tokens", "num_held"), [(1, 8), (2, 8), (3, 12), (6, 12), (7, 16)])
def test_whole_pages_of_what_exists_are_held(mode: Mode, num_output_tokens: int, num_held: int) -> None:
    """The newest token has no KV yet, so it is not held."""
    books = Books()
    request = books.land(PROMPT, mode, 16)
    slots = extents_to_slots(request.extents(PoolKind.INDEX))[:num_held].tolist()
    books.end(books.run(request, num_output_tokens))
    assert books.rooms.held.num_tokens == num_held
    assert books.rooms.available == books.rooms.pools.totals
    following = books.land((*PROMPT, *[77] * num_output_tokens, 5), mode)
    assert following.held_prefix_tokens == num_held
    assert extents_to_slots(following.extents(PoolKind.INDEX))[:num_held].tolist() == slots


@pytest.mark.I1
@pytest.mark.I2
@pytest.mark.parametrize("mode", list(Mode))
def test_pages_that_a_prefill_node_may_read_stay_in_use_until_its_room_is_quiet(mode: Mode) -> None:
    """A slot that is used again has rows with right checks, which would pass for the prompt's."""
    books = Books()
    books.end(books.run(books.land(PROMPT, mode)))
    request = books.land((*PROMPT, *range(8)), mode)
    assert request.held_prefix_tokens == 8
    prefix = request.prefix
    books.end(request)
    assert prefix is not None
    assert (prefix.num_users, books.rooms.held.num_tokens) == (1, 8)
    books.rooms.held.flush()
    assert books.rooms.held.num_tokens == 8
    books.rooms.quarantine.quiet(request.room, batch_failed=False, now=1.0)
    books.rooms.check_integrity()
    assert prefix.num_users == 0
    assert books.rooms.available == books.rooms.pools.totals


@pytest.mark.parametrize("mode", list(Mode))
def test_a_bootstrap_says_where_held_pages_are_and_which_steps_computed(mode: Mode) -> None:
    books = Books()
    first = books.land(PROMPT, mode)
    assert bootstrap_of(first).held is None
    books.end(books.run(first, 7))
    prompt = (*PROMPT, *[77] * 7, 5, 6, 7)
    request = books.land(prompt, mode)
    request.prompt = pack_token_ids(prompt)
    assert request.held_prefix_tokens == 16
    message = bootstrap_of(request)
    assert message.held is not None
    kv_pool = KV_POOLS[mode][0]
    for held, landing, pool in (
        (message.held.kv_extents, message.kv_extents, kv_pool),
        (message.held.index_extents, message.index_extents, PoolKind.INDEX),
    ):
        slots = extents_to_slots((*held, *landing)).tolist()
        assert slots == extents_to_slots(request.extents(pool))[: len(prompt) - 1].tolist()
        assert sum(extent.length for extent in held) == message.num_held_tokens == 16
    assert message.held.num_prefilled_tokens == 8, "the block of the prompt's last token is of steps, too"
    # What a prefill node has sent since is held in the place of what steps have computed, once that is gone.
    books.run(request)
    books.end(request)
    books.rooms.held.flush()
    books.end(books.run(books.land(prompt, mode)))
    again = books.land((*prompt, 1), mode)
    assert (again.held_prefix_tokens, again.num_prefilled_tokens) == (20, 16)


@pytest.mark.I5
@pytest.mark.parametrize("mode", list(Mode))
def test_resumed_tokens_are_the_requests_own_until_it_ends(mode: Mode) -> None:
    """What another request left of the same tokens may have been computed as a prompt."""
    books = Books()
    books.end(books.run(books.land((*PROMPT, *range(6)), mode)))
    assert books.rooms.held.num_tokens == 16
    resumed = books.land((*PROMPT, *range(6)), mode, 20, num_resumed=6)
    assert resumed.held_prefix_tokens == 8, "of the ten before the first that is resumed"
    landed = resumed.extents(PoolKind.INDEX)
    books.run(resumed)
    assert resumed.extents(PoolKind.INDEX) == landed
    books.end(resumed)
    assert books.rooms.held.num_tokens == 16
    assert books.rooms.available == books.rooms.pools.totals


@pytest.mark.I1
@pytest.mark.I2
@pytest.mark.parametrize("mode", Mode)
def test_a_prompt_is_shared_as_soon_as_it_has_landed(mode: Mode) -> None:
    books, kind = Books(), KV_POOLS[mode][0]
    first, late = (books.land(PROMPT, mode) for _ in range(2))
    assert first.prefix is late.prefix is None, "not while it lands"
    books.run(first)
    second = books.land(PROMPT, mode)
    assert second.held_prefix_tokens == 8
    assert second.prefix is first.prefix
    # Equal pages are kept once: the later request goes on with those of the first.
    num_free = books.rooms.pools.free
    books.run(late)
    books.rooms.check_integrity()
    assert late.prefix is first.prefix
    assert books.rooms.pools.free - num_free == SlotCounts.of(KV_POOLS[mode], 8) + SlotCounts(aux=1)
    assert late.reserved_tokens == 16
    books.end(first, is_sound=False)
    books.end(second)
    assert books.rooms.held.num_tokens == 8
    assert books.rooms.pools.used(Stage.QUARANTINED)[kind] == books.rooms.pools.used(Stage.HELD)[kind] == 8
    books.end(late)


def test_what_a_failed_step_left_is_not_held() -> None:
    """What landed before the step is held."""
    books = Books()
    books.end(books.run(books.land(PROMPT, Mode.HISPARSE, 20), 7), is_sound=False)
    assert books.rooms.held.num_tokens == 8
    books.end(books.run(books.land((5, *PROMPT), Mode.DENSE, 16), 4), is_sound=False)
    assert books.rooms.held.num_tokens == 16
    assert books.rooms.available == books.rooms.pools.totals


# --- the engine ----------------------------------------------------------------------------------------


EACH_MODEL = pytest.mark.parametrize(
    "checkpoint",
    ["v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm", "mistral"))],
    indirect=True,
)


@pytest.fixture
def node(shared_node: EngineHarness) -> EngineHarness:
    requests = shared_node.engine.requests
    shared_node.flush()
    assert requests.pools.free == requests.pools.totals
    shared_node.double.bootstraps.clear()
    shared_node.double.delivers = True
    return shared_node


@pytest.mark.I5
@pytest.mark.parametrize("flag", [HisparseFlag.TRUE, HisparseFlag.FALSE])
@EACH_MODEL
def test_what_decoding_leaves_is_bit_for_bit_what_prefill_computes(
    node: EngineHarness, checkpoint: Checkpoint, flag: HisparseFlag
) -> None:
    prompt = random_prompt(5, 85)
    answer = node.ask(prompt, 12, flag)
    memory = node.engine.tables.memory
    num_held = (85 + 11) // 16 * 16
    keys = PromptKeys.of(NO_ISOLATION, pack_token_ids((*prompt, *answer.token_ids)), 16).keys
    mode = Mode.HISPARSE if flag is HisparseFlag.TRUE else Mode.DENSE
    match = node.engine.requests.held.find(keys, KV_POOLS[mode])
    assert match is not None
    assert match.num_pages * 16 == num_held
    prefix = match.prefix
    alone = computed(checkpoint, (*prompt, *answer.token_ids)[: num_held + 1])
    kind, _ = prefix.kinds
    kv = memory.k_dev if mode is Mode.DENSE else memory.k_host
    assert kv[:, slots_tensor(prefix.extents(kind))].equal(alone.kv[:, :num_held])
    index_slots = slots_tensor(prefix.extents(PoolKind.INDEX))
    assert memory.index[:, index_slots].equal(alone.index[:, :num_held])
    assert memory.row_checks is not None
    assert memory.row_checks[:, index_slots].equal(alone.row_checks[:, :num_held])


@pytest.mark.I1
@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize("num_prompt_tokens", [85, 25])
def test_a_dense_request_that_leaves_shared_pages_needs_them_no_more(
    node: EngineHarness, checkpoint: Checkpoint, num_prompt_tokens: int
) -> None:
    """Whoever gets them next may write there at once. Of 25 tokens and the answer, the hot buffer has all."""
    prompt, engine = random_prompt(6, num_prompt_tokens), node.engine
    num_shared, num_held = num_prompt_tokens // 16 * 16, (num_prompt_tokens + 11) // 16 * 16
    first = node.ask(prompt, 12, HisparseFlag.FALSE)
    again = node.generate(prompt, 12, HisparseFlag.FALSE)
    node.turn_until(lambda: len(again.token_ids) > 3)
    engine.steps.settle()
    (request,) = engine.requests.select(RequestState.RUNNING)
    prefix, limits = request.prefix, engine.limits
    assert prefix is not None
    assert prefix.end_page * 16 == num_shared
    shared = {kind: slots_tensor(prefix.extents(kind)) for kind in prefix.kinds}
    exchange, _ = next(exchanges_of_pages(limits, request, limits.max_capacity(request)))
    assert (limits.first_kept(request, exchange.hot_capacity) is None) == (num_prompt_tokens == 25)
    engine.plan_moves.carry_out(StepPlan(exchanges=(exchange,)), 0.0)
    engine.requests.check_integrity()
    engine.requests.held.flush()
    memory = engine.tables.memory
    assert memory.row_checks is not None
    free = ~torch.isin(shared[PoolKind.DEVICE], slots_tensor(request.owned[PoolKind.DEVICE]))
    memory.k_dev[:, shared[PoolKind.DEVICE][free]] = 0xFF  # the hot buffer may have got some of them
    assert not set(shared[PoolKind.INDEX].tolist()) & set(
        slots_tensor(request.owned[PoolKind.INDEX]).tolist()
    )
    for pool in (memory.index, memory.row_checks):
        pool[:, shared[PoolKind.INDEX]] = 0xFF
    node.turn_until(lambda: again.is_over)
    assert (again.token_ids, again.stats.mode) == (first.token_ids, Mode.HISPARSE)
    node.turn_until(lambda: not engine.requests)
    keys = PromptKeys.of(NO_ISOLATION, pack_token_ids((*prompt, *again.token_ids)), 16).keys
    found = engine.requests.held.find(keys, KV_POOLS[Mode.HISPARSE])
    assert found is not None
    assert found.num_pages * 16 == num_held
    alone = computed(checkpoint, (*prompt, *again.token_ids)[: num_held + 1])
    assert memory.k_host[:, slots_tensor(found.prefix.extents(PoolKind.HOST))].equal(alone.kv[:, :num_held])
    index_slots = slots_tensor(found.prefix.extents(PoolKind.INDEX))
    assert memory.index[:, index_slots].equal(alone.index[:, :num_held])
    assert memory.row_checks[:, index_slots].equal(alone.row_checks[:, :num_held])


@pytest.mark.I5
def test_a_prefix_is_held_for_requests_with_its_isolation_key_only(node: EngineHarness) -> None:
    """Its mode must be the same, too. The Bootstrap has the tokens and the key."""
    prompt = random_prompt(12, 85)

    def num_held(root: PageKey, flag: HisparseFlag) -> int:
        answer = node.ask(prompt, 2, flag, root=root)
        bootstrap = node.double.bootstraps[-1]
        assert (bootstrap.root, bootstrap.prompt) == (root, pack_token_ids(prompt))
        return answer.stats.num_held_tokens

    roots = [NO_ISOLATION, root_of("a"), root_of(None, "a")]
    assert [num_held(root, HisparseFlag.TRUE) for root in roots] == [0, 0, 0]
    assert [num_held(root, HisparseFlag.TRUE) for root in roots] == [80, 80, 80]
    assert [num_held(root, HisparseFlag.FALSE) for root in [*roots, root_of("b"), *roots]] == [0] * 4 + [
        80
    ] * 3


def test_a_client_that_leaves_while_tokens_come_leaves_a_prefix(node: EngineHarness) -> None:
    prompt = random_prompt(2, 70)
    answer = node.generate(prompt, 200, HisparseFlag.TRUE)
    node.turn_until(lambda: len(answer.token_ids) > 10)
    node.leave(answer)
    node.turn_until(lambda: not node.engine.requests)
    assert node.engine.requests.held.num_tokens >= 80
    again = node.ask(prompt, 10, HisparseFlag.TRUE)
    assert again.token_ids == answer.token_ids[:10]
    assert node.double.bootstraps[-1].num_held_tokens == 64


def test_no_key_no_prefix(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with closing(EngineHarness(checkpoint, tmp_path, page_size=16)) as node:
        prompt = random_prompt(4, 40)
        for _ in range(2):
            node.ask(prompt, 2, HisparseFlag.TRUE)
        assert len(node.engine.requests.held) == 0
        assert node.engine.requests.pools.free == node.engine.requests.pools.totals
