"""Rows of KV that are not what was written: no token is made from one, and no request gets its memory.

A wrong row ends the requests that read it, and no other; what a client got until then is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hisparse_pd.base.vocabulary import KV_ROW_CORRUPT, HisparseFlag
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.decode_node import scrub
from hisparse_pd.engine import prefix_scrub
from hisparse_pd.engine.messages import ReleasePage, RequestFailed
from hisparse_pd.kernels.row_check import WrongItem, wrong_items
from hisparse_pd.protocol.messages import RoomDone
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    Prompt,
    raising,
    random_prompt,
)

PAGE = 16
CHECKPOINT = "tied"
NODE = {
    "disable_prefix_cache": False,
    "page_size": PAGE,
    "host_pool_tokens": 2048,
    "device_pool_tokens": 1024,
    "device_buffer_size": 70,
}
HISPARSE, DENSE = HisparseFlag.TRUE, HisparseFlag.FALSE
IN_EACH_MODE = pytest.mark.parametrize(
    ("checkpoint", "flag"),
    [
        ("v32", HISPARSE),
        ("v32", DENSE),
        pytest.param("glm", DENSE, marks=pytest.mark.slow),
        pytest.param("glm", HISPARSE, marks=pytest.mark.slow),
    ],
    indirect=["checkpoint"],
)
EACH_MODEL = pytest.mark.parametrize(
    "checkpoint", ["v32", pytest.param("glm", marks=pytest.mark.slow)], indirect=True
)
"""Checkpoints with a layer for each indexer, and with layers that share one."""


@pytest.fixture
def node(resting_node: EngineHarness) -> Iterator[EngineHarness]:
    """The shared node; after a test all is free but what was set aside, which is then released."""
    yield resting_node
    resting_node.come_to_rest()
    requests = resting_node.engine.requests
    for page in requests.set_aside.shown():
        resting_node.send(ReleasePage(page.pool, page.start))
    resting_node.turn_until(lambda: not requests.set_aside)
    assert requests.pools.free == requests.pools.totals


def right_tokens(node: EngineHarness, prompt: Prompt, num_new: int) -> list[int]:
    """Return the tokens of a request without a wrong row."""
    return node.ask(prompt, num_new, DENSE).token_ids


def first_held(node: EngineHarness) -> Prefix:
    """Return the first run of what is held, which may be two runs where the scrub has just read one."""
    return next(prefix for prefix in node.engine.requests.held if prefix.parent is None)


def num_found(node: EngineHarness) -> dict[str, int]:
    """Return the wrong rows that the node has found, by kind."""
    return dict(node.engine.requests.set_aside.num_found)


class Corruption:
    """Effects of a wrong row: an error, one more of its kind, a page set aside."""

    def __init__(self, node: EngineHarness, kind: str) -> None:
        self._node, self._kind = node, kind
        self._before = num_found(node)

    def was_found(
        self, failure: RequestFailed | None, pool: PoolKind, layer: int, position: int, slot: int
    ) -> None:
        node = self._node
        assert num_found(node) == {**self._before, self._kind: self._before[self._kind] + 1}
        if failure is not None:
            assert (failure.status, failure.code) == (500, KV_ROW_CORRUPT)
            place = f"layer {layer}, position {position}, in slot {slot} of the {pool} pool"
            assert place in failure.error
            assert f"not what was written ({self._kind})" in failure.error
        start = slot // PAGE * PAGE
        (page,) = node.engine.requests.set_aside.shown()
        assert (page.pool, page.start, page.num_slots) == (pool, start, PAGE)
        assert f"layer {layer}, position {position}" in page.error


def flip(node: EngineHarness, pool: PoolKind, layer: int, slot: int, byte: int = 5, bit: int = 1) -> None:
    memory = node.engine.tables.memory
    (memory.k_host if pool is PoolKind.HOST else memory.k_dev)[layer, slot, byte] ^= 1 << bit


def write_and_wait(node: EngineHarness, prompt: Prompt, num_new: int, flag: HisparseFlag) -> Answer:
    """Send a request whose KV has landed without the node having been told."""
    answer = node.entrust(prompt, num_new, flag)
    node.double.write(node.double.bootstraps[-1])
    node.double.delivers = True
    return answer


def say_done(node: EngineHarness) -> None:
    node.double.say(RoomDone(node.double.bootstraps[-1].room, 1000, 0, 0.001))


@pytest.mark.I9
@IN_EACH_MODE
def test_a_bit_that_flips_between_write_and_admission(
    node: EngineHarness,
    flag: HisparseFlag,
) -> None:
    """A short prompt is verified when it is warmed up, a dense one in a pass of its own: it gets no token.

    Other requests that run meanwhile are not disturbed.
    """
    prompt, other = random_prompt(1, 50), random_prompt(2, 60)
    right = right_tokens(node, other, 6)
    corruption = Corruption(node, "landing")
    neighbour = node.generate(other, 6, HISPARSE)
    node.turn_until(lambda: neighbour.token_ids)
    answer = write_and_wait(node, prompt, 4, flag)
    slot = int(extents_to_slots(node.double.bootstraps[-1].kv_extents)[33])
    pool = PoolKind.HOST if flag is HISPARSE else PoolKind.DEVICE
    flip(node, pool, 1, slot)
    say_done(node)
    failure = node.failure_of(answer, status=500)
    corruption.was_found(failure, pool, 1, 33, slot)
    node.turn_until(lambda: neighbour.is_over)
    assert neighbour.token_ids == right
    assert answer.token_ids == []


def running(node: EngineHarness, prompt: Prompt, num_new: int, num_tokens: int) -> Answer:
    """Send a hisparse request; return it once it has ``num_tokens`` of its tokens."""
    answer = node.generate(prompt, num_new, HISPARSE)
    node.turn_until(lambda: len(answer.token_ids) >= num_tokens)
    assert not answer.is_over
    return answer


def only_request(node: EngineHarness) -> Any:
    (request,) = node.engine.requests.all()
    return request


def host_slot(node: EngineHarness, position: int) -> int:
    request = only_request(node)
    state = node.engine.tables.state
    return int(state.host_pages[request.req_row, position // PAGE]) * PAGE + position % PAGE


@pytest.mark.I9
@pytest.mark.parametrize(
    ("checkpoint", "first", "stop", "kind"),
    [
        ("v32", 0, 150, "page-in"),
        ("v32", 151, 155, "newest"),
        pytest.param("glm", 151, 155, "newest", marks=pytest.mark.slow),
    ],
    indirect=["checkpoint"],
)
def test_bits_that_flip_while_a_request_runs(
    node: EngineHarness,
    first: int,
    stop: int,
    kind: str,
) -> None:
    """The first of these positions that is paged in ends the request; its tokens until then are right."""
    prompt = random_prompt(5, 150)
    before = num_found(node)
    answer = running(node, prompt, 300, 7)
    for position in range(first, stop):
        for layer in range(node.engine.tables.spec.num_layers):
            flip(node, PoolKind.HOST, layer, host_slot(node, position), byte=position % 7)
    failure = node.failure_of(answer, status=500, error=f"({kind})")
    assert failure.code == KV_ROW_CORRUPT
    assert num_found(node) == {**before, kind: before[kind] + 1}
    assert 7 <= len(answer.token_ids) < 300
    assert answer.token_ids == right_tokens(node, prompt, len(answer.token_ids))


@pytest.mark.I9
def test_a_row_that_nobody_reads_ends_nobody(node: EngineHarness) -> None:
    """All rows are hot, so the host pool is not read."""
    prompt = random_prompt(6, 40)
    right = right_tokens(node, prompt, 5)
    answer = running(node, prompt, 5, 2)
    for position in range(40):
        flip(node, PoolKind.HOST, 0, host_slot(node, position))
    node.turn_until(lambda: answer.is_over)
    assert answer.token_ids == right


@pytest.mark.I9
@IN_EACH_MODE
def test_a_held_prefix_with_a_wrong_row_is_dropped(node: EngineHarness, flag: HisparseFlag) -> None:
    prompt = random_prompt(7, 50)
    right = node.ask(prompt, 4, flag)
    prefix = first_held(node)
    kind, _ = prefix.kinds
    slot = prefix.extents(kind)[0].start + 20
    corruption = Corruption(node, "landing")
    with patch.object(prefix_scrub.PrefixScrub, "verify_next"):  # the scrub would find it first
        flip(node, kind, 1, slot)
        failure = node.failure_of(node.generate(prompt, 4, flag), status=500)
    corruption.was_found(failure, kind, 1, 20, slot)
    assert not node.engine.requests.held
    again = node.ask(prompt, 4, flag)
    assert again.stats.num_held_tokens == 0, "nothing of it is used any more"
    assert again.token_ids == right.token_ids
    assert node.ask(prompt, 1, flag).stats.num_held_tokens == 48, "held anew, elsewhere"
    owned = [extent for prefix in node.engine.requests.held for extent in prefix.extents(kind)]
    assert not any(extent.start <= slot < extent.start + extent.length for extent in owned)


@pytest.mark.I7
@pytest.mark.I9
def test_a_wrong_row_that_cannot_be_told_ends_its_request_only(node: EngineHarness) -> None:
    """No page of its prompt is found any more, though none is set aside."""
    prompt, other = random_prompt(7, 50), random_prompt(2, 60)
    right, before = node.ask(prompt, 4, HISPARSE).token_ids, num_found(node)
    kind, _ = first_held(node).kinds
    slot = first_held(node).extents(kind)[0].start + 20
    unreadable = raising(torch.OutOfMemoryError("1 MiB wanted"))
    with (
        patch.object(prefix_scrub.PrefixScrub, "verify_next"),  # the scrub would find it first
        patch.object(node.engine.tables, "wrong_row", unreadable),
    ):
        flip(node, kind, 1, slot)
        doomed, spared = node.generate(prompt, 4, HISPARSE), node.generate(other, 6, HISPARSE)
        failure = node.failure_of(doomed, status=500, error="cannot be told from the others: 1 MiB wanted")
        assert len(node.tokens_of(spared)) == 6
    assert (failure.code, doomed.token_ids) == (KV_ROW_CORRUPT, [])
    assert num_found(node) == before
    again = node.ask(prompt, 4, HISPARSE)
    assert (again.stats.num_held_tokens, again.token_ids) == (0, right)


@pytest.mark.I7
def test_a_stretch_that_cannot_be_verified_ends_no_engine(node: EngineHarness) -> None:
    """It is verified when its turn comes again."""
    prompt = random_prompt(8, 90)
    node.ask(prompt, 2, HISPARSE)
    (prefix,) = node.engine.requests.held
    kind, _ = prefix.kinds
    slot = prefix.extents(kind)[0].start + 70
    corruption = Corruption(node, "scrub")
    num_calls = 0

    def out_of_memory(*args: Any) -> list[WrongItem]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            flip(node, kind, 1, slot)
            raise torch.OutOfMemoryError("4 MiB wanted")
        return wrong_items(*args)

    with patch.object(prefix_scrub, "wrong_items", out_of_memory):
        node.turn_until(lambda: not node.engine.requests.held)
    corruption.was_found(None, kind, 1, 70, slot)


def test_a_device_that_is_lost_while_idle_ends_the_engine(node: EngineHarness) -> None:
    node.ask(random_prompt(8, 90), 2, HISPARSE)
    lost = raising(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with (
        patch.object(prefix_scrub, "wrong_items", lost),
        pytest.raises(torch.AcceleratorError, match="illegal memory access"),
    ):
        node.turn_until(lambda: not node.engine.requests.held)


@pytest.mark.I9
@IN_EACH_MODE
def test_idle_time_goes_through_what_is_held(node: EngineHarness, flag: HisparseFlag) -> None:
    with patch.object(prefix_scrub, "STRETCH_BYTES", 1 << 14):
        prompt = random_prompt(8, 90)
        node.ask(prompt, 2, flag)
        (prefix,) = node.engine.requests.held
        kind, _ = prefix.kinds
        slot = prefix.extents(kind)[0].start + 70
        corruption = Corruption(node, "scrub")
        flip(node, kind, 1, slot)
        node.turn_until(lambda: not node.engine.requests.held)
    corruption.was_found(None, kind, 1, 70, slot)
    assert node.ask(prompt, 1, flag).stats.num_held_tokens == 0


@pytest.mark.I9
@EACH_MODEL
def test_hot_buffers_are_gone_through_while_they_are_used(node: EngineHarness) -> None:
    """The scrub verifies every entry of every layer, except drafts' and the newest token's."""
    prompt = random_prompt(9, 60)
    with patch.object(scrub, "STEPS_BETWEEN", 1):
        answer = running(node, prompt, 200, 5)
        corruption = Corruption(node, "scrub")
        request = only_request(node)
        slot = int(node.engine.tables.state.entry_slots(request.req_row)[11])
        layer = node.engine.tables.spec.num_layers - 1
        flip(node, PoolKind.DEVICE, layer, slot)
        failure = node.failure_of(answer, status=500)
    position = int(failure.error.split("position ")[1].split(",")[0])
    corruption.was_found(failure, PoolKind.DEVICE, layer, position, slot)
    num_right = len(answer.token_ids) - node.engine.tables.spec.num_index_groups
    assert answer.token_ids[:num_right] == right_tokens(node, prompt, num_right), (
        "until the flip, and so before it was gone through"
    )


def test_a_node_that_verifies_no_rows(checkpoint: Checkpoint, node: EngineHarness, tmp_path: Path) -> None:
    """It has no memory for checks, and is served by prefill nodes that have them."""
    unverified = Checkpoint(checkpoint.path, replace(checkpoint.spec, has_row_checks=False), checkpoint.model)
    prompt = random_prompt(11, 100)
    right = right_tokens(node, prompt, 4)
    with closing(EngineHarness(unverified, tmp_path, page_size=PAGE, device_buffer_size=70)) as other:
        assert other.engine.tables.memory.row_checks is None
        assert other.ask(prompt, 4, HISPARSE).token_ids == right
