"""Samples of one prompt: the KV of the first one serves all, and each has the bytes that prefill has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import KV_ROW_CORRUPT, HisparseFlag, Mode
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.protocol.messages import RoomDone
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, computed, random_prompt

CHECKPOINT = "tied"
PAGE, NUM_NEW = 16, 4
NODE: dict[str, Any] = {
    "disable_prefix_cache": False,
    "page_size": PAGE,
    "host_pool_tokens": 2048,
    "device_pool_tokens": 1536,
    "device_buffer_size": 48,
    "growth_pages": 1,  # so that dense requests do not share their pages
}
HISPARSE, DENSE, AUTO = HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO
PROMPT = random_prompt(6, 155)


@pytest.fixture
def node(resting_node: EngineHarness) -> Iterator[EngineHarness]:
    """The shared node; after a test everything is free again."""
    yield resting_node
    resting_node.come_to_rest()
    pools = resting_node.engine.requests.pools
    assert pools.free == pools.totals


def landed(node: EngineHarness, answers: Sequence[Answer]) -> list[Request]:
    """Let all samples land, and return them in order before any has a token."""
    node.begin_together(answers)
    return sorted(node.engine.requests.select(RequestState.RUNNING), key=lambda request: request.room)


def rows_of(node: EngineHarness, request: Request, num_tokens: int) -> list[list[bytes]]:
    """Return KV, indexer keys and row checks of a request's first positions."""
    memory = node.engine.tables.memory
    kv, kind = (
        (memory.k_host, PoolKind.HOST)
        if request.mode is Mode.HISPARSE
        else (
            memory.k_dev,
            PoolKind.DEVICE,
        )
    )
    assert memory.row_checks is not None
    kv_slots, index_slots = (
        extents_to_slots(request.extents(each))[:num_tokens] for each in (kind, PoolKind.INDEX)
    )
    return [
        [layer.tobytes() for layer in pool.numpy()[:, slots]]
        for pool, slots in ((kv, kv_slots), (memory.index, index_slots), (memory.row_checks, index_slots))
    ]


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.parametrize("flag", [HISPARSE, DENSE, AUTO])
def test_one_room_serves_all_samples_bit_for_bit(
    node: EngineHarness, checkpoint: Checkpoint, flag: HisparseFlag
) -> None:
    expected = node.ask(PROMPT, NUM_NEW, flag)
    node.flush()
    node.double.bootstraps.clear()
    answers = node.generate_samples(PROMPT, NUM_NEW, 4, flag)
    requests = landed(node, answers)
    prefill = computed(checkpoint, PROMPT)
    wanted = [
        [layer.tobytes() for layer in pool.numpy()]
        for pool in (prefill.kv, prefill.index, prefill.row_checks)
    ]
    for request in requests:
        assert rows_of(node, request, len(PROMPT) - 1) == wanted
    last_pages = [request.extents(PoolKind.INDEX)[-1].end for request in requests]
    assert len(set(last_pages)) == 4, "each writes to a last page of its own"
    assert [answer.token_ids for answer in answers] == [[]] * 4
    node.turn_until(lambda: all(answer.is_over for answer in answers))
    assert [answer.token_ids for answer in answers] == [expected.token_ids] * 4
    assert [bootstrap.room for bootstrap in node.double.bootstraps] == [requests[0].room]
    assert [answer.stats.num_held_tokens for answer in answers] == [0, 154, 154, 154]
    assert [answer.stats.transfer_bytes for answer in answers] == [1000, 0, 0, 0]
    counters = [(each.stats.hits, each.stats.misses) for each in answers]
    assert counters == [(expected.stats.hits, expected.stats.misses)] * 4, "the hint warms all of them up"


@pytest.mark.I5
@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "num_rooms"), [(DENSE, 155, 1), (HISPARSE, 16, 1), (HISPARSE, 17, 3)]
)
def test_without_held_prefixes_all_of_a_dense_prompt_is_copied_and_little_of_a_hisparse_one(
    checkpoint: Checkpoint, tmp_path: Path, flag: HisparseFlag, num_prompt_tokens: int, num_rooms: int
) -> None:
    prompt = PROMPT[:num_prompt_tokens]
    with closing(EngineHarness(checkpoint, tmp_path, **{**NODE, "disable_prefix_cache": True})) as node:
        expected = node.ask(prompt, NUM_NEW, flag)
        node.double.bootstraps.clear()
        answers = node.generate_samples(prompt, NUM_NEW, 3, flag)
        node.finish(answers, {prompt: expected.token_ids})
        assert len(node.double.bootstraps) == num_rooms


@pytest.mark.I2
@pytest.mark.I7
def test_when_the_first_one_leaves_before_its_kv_is_here_each_other_gets_a_room(node: EngineHarness) -> None:
    node.double.delivers = False
    answers = node.generate_samples(PROMPT, NUM_NEW, 3, HISPARSE)
    node.turn_until(lambda: node.double.bootstraps)
    node.double.delivers = True
    node.leave(answers[0])
    node.turn_until(lambda: all(answer.is_over for answer in answers[1:]))
    assert answers[1].token_ids == answers[2].token_ids != []
    assert len(node.double.bootstraps) == 3


@pytest.mark.I2
@pytest.mark.parametrize("flag", [HISPARSE, DENSE])
def test_a_sample_that_is_admitted_when_the_first_one_is_over_gets_a_room(
    checkpoint: Checkpoint, tmp_path: Path, flag: HisparseFlag
) -> None:
    """Only one of them can run at a time."""
    with closing(EngineHarness(checkpoint, tmp_path, **{**NODE, "max_running_requests": 1})) as node:
        answers = node.generate_samples(PROMPT, NUM_NEW, 2, flag)
        node.turn_until(lambda: all(answer.is_over for answer in answers))
        assert [answer.failure for answer in answers] == [None, None]
        assert answers[0].token_ids == answers[1].token_ids
        assert [bootstrap.num_held_tokens for bootstrap in node.double.bootstraps] == [0, 144]


@pytest.mark.I1
@pytest.mark.I2
def test_the_others_go_on_when_the_first_one_leaves(node: EngineHarness) -> None:
    answers = node.generate_samples(PROMPT, NUM_NEW, 3, HISPARSE)
    landed(node, answers)
    node.leave(answers[0])
    other = node.generate(random_prompt(9, 150), NUM_NEW, HISPARSE)  # takes the slots of the first one
    node.turn_until(lambda: other.is_over and all(answer.is_over for answer in answers[1:]))
    assert answers[1].token_ids == answers[2].token_ids == node.ask(PROMPT, NUM_NEW, HISPARSE).token_ids


@pytest.mark.I9
@pytest.mark.parametrize("flag", [HISPARSE, DENSE])
def test_a_wrong_row_is_copied_with_its_check_and_makes_no_token(
    checkpoint: Checkpoint, tmp_path: Path, flag: HisparseFlag
) -> None:
    """The row is in the first one's last page, which the others copy."""
    prompt = PROMPT[:40]
    with closing(EngineHarness(checkpoint, tmp_path, **NODE)) as node:
        node.double.delivers = False
        answers = node.generate_samples(prompt, NUM_NEW, 3, flag)
        node.turn_until(lambda: node.double.bootstraps)
        (bootstrap,) = node.double.bootstraps
        node.double.write(bootstrap)
        memory = node.engine.tables.memory
        pool = memory.k_host if flag is HISPARSE else memory.k_dev
        pool[1, int(extents_to_slots(bootstrap.kv_extents)[35]), 5] ^= 2
        node.double.say(RoomDone(bootstrap.room, 1000, 0, 0.001))
        for answer in answers:
            assert node.failure_of(answer, status=500).code == KV_ROW_CORRUPT
            assert answer.token_ids == []
