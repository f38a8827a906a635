"""Requests that lack nothing of their prompts: they need no prefill node, and get one if pages go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, HisparseFlag, Mode
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Admission
from hisparse_pd.engine.messages import FlushCache
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, PrefillDouble, random_prompt

PAGE, NUM_NEW = 16, 3
NODE: dict[str, Any] = {
    "disable_prefix_cache": False,
    "page_size": PAGE,
    "host_pool_tokens": 1024,
    "device_pool_tokens": 1024,
    "device_buffer_size": 70,
}
HISPARSE, DENSE, AUTO = HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO
PROMPT = random_prompt(8, 5 * PAGE + 1)


@pytest.fixture
def node(shared_node: EngineHarness) -> Iterator[EngineHarness]:
    """The shared node, which has registered with its prefill node."""
    node = shared_node
    node.flush()
    node.ask(random_prompt(9, 20), 1, HISPARSE)
    node.double.bootstraps.clear()
    yield node
    node.turn_until(lambda: not node.engine.requests)
    node.engine.requests.check_integrity()


@pytest.fixture
def away(checkpoint: Checkpoint) -> PrefillDouble:
    """A prefill node that is down."""
    double = PrefillDouble(checkpoint, PAGE)
    double.close()
    return double


@pytest.mark.I6
@pytest.mark.I7
@pytest.mark.parametrize(
    ("num_prompt_tokens", "flag"),
    [
        # Each length and each flag; in `make test-full` any two meet.
        *((1, DENSE), (len(PROMPT), HISPARSE), (len(PROMPT), AUTO)),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in ((1, HISPARSE), (1, AUTO), (len(PROMPT), DENSE))
        ),
    ],
)
def test_a_prompt_that_lacks_nothing_is_answered_while_its_prefill_node_is_down(
    node: EngineHarness, away: PrefillDouble, flag: HisparseFlag, num_prompt_tokens: int
) -> None:
    prompt = PROMPT[:num_prompt_tokens]
    expected = node.ask(prompt, NUM_NEW, flag)
    answers = [node.generate(prompt, NUM_NEW, flag, double=away) for _ in range(2)]
    assert [node.tokens_of(answer) for answer in answers] == [expected.token_ids] * 2
    assert all(answer.stats.num_held_tokens == num_prompt_tokens - 1 for answer in answers)


@pytest.mark.I7
def test_auto_takes_the_mode_whose_pages_are_held(node: EngineHarness, away: PrefillDouble) -> None:
    """It would be dense, since device memory is plenty."""
    expected = node.ask(PROMPT, NUM_NEW, HISPARSE)
    assert node.ask(random_prompt(7, 30), 1, AUTO).stats.mode is Mode.DENSE
    answer = node.ask(PROMPT, NUM_NEW, AUTO, double=away)
    assert answer.stats.mode is Mode.HISPARSE
    assert answer.token_ids == expected.token_ids


def test_the_page_size_of_a_prefill_node_matters_to_those_who_need_it_alone(
    node: EngineHarness, checkpoint: Checkpoint
) -> None:
    expected = node.ask(PROMPT, NUM_NEW, DENSE)
    with closing(PrefillDouble(checkpoint, 2 * PAGE)) as other:
        refused = node.generate(random_prompt(3, 40), NUM_NEW, DENSE, double=other)
        assert "dense needs equal pages" in node.failure_of(refused, other, status=400).error
        answer = node.generate(PROMPT, NUM_NEW, DENSE, double=other)
        node.turn_until(lambda: answer.is_over, other)
    assert answer.token_ids == expected.token_ids


def waiting_locally(node: EngineHarness, prefill: PrefillDouble) -> tuple[Answer, Answer]:
    """Hold a prompt; return a running request, and one that lacks nothing and waits for its end."""
    node.ask(PROMPT, NUM_NEW, HISPARSE)
    running = node.generate(random_prompt(2, 40), 8, HISPARSE)
    node.turn_until(lambda: running.token_ids)
    answer = node.generate(PROMPT, NUM_NEW, HISPARSE, double=prefill)
    with node.without_steps():
        node.turn_until(lambda: node.engine.requests.select(RequestState.WAITING))
    (request,) = node.engine.requests.waiting()
    assert request.is_local
    return running, answer


@pytest.fixture
def narrow(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[EngineHarness]:
    """A node that runs one request at a time."""
    with closing(EngineHarness(checkpoint, tmp_path, **NODE, max_running_requests=1)) as node:
        yield node


@pytest.mark.I2
@pytest.mark.I5
def test_a_request_whose_pages_are_evicted_while_it_waits_gets_a_room(narrow: EngineHarness) -> None:
    running, answer = waiting_locally(narrow, narrow.double)
    narrow.double.bootstraps.clear()
    narrow.send(FlushCache("00"))
    narrow.turn_until(lambda: answer.is_over and running.is_over)
    assert answer.failure is None
    assert [bootstrap.num_held_tokens for bootstrap in narrow.double.bootstraps] == [0]
    assert answer.token_ids == narrow.ask(PROMPT, NUM_NEW, HISPARSE).token_ids


@pytest.mark.I7
def test_a_request_whose_pages_are_evicted_fails_as_others_do_if_its_node_is_down(
    narrow: EngineHarness, away: PrefillDouble
) -> None:
    running, answer = waiting_locally(narrow, away)
    narrow.send(FlushCache("00"))
    narrow.engine.queue_moves.contact_timeout_secs = 0.0
    narrow.turn_until(lambda: running.is_over)
    failure = narrow.failure_of(answer, status=503, error="no contact with prefill node")
    assert failure.code == PREFILL_NODE_FAILED
    assert narrow.engine.requests.available == narrow.engine.requests.pools.totals


@pytest.mark.I7
def test_the_loss_of_a_prefill_node_ends_nobody_who_can_do_without_it(narrow: EngineHarness) -> None:
    """Both wait; when they came, nothing of the prompt was held."""
    first = narrow.entrust(PROMPT, NUM_NEW)
    others = [narrow.generate(prompt, NUM_NEW, HISPARSE) for prompt in (PROMPT, random_prompt(5, 40))]
    requests = narrow.engine.requests
    narrow.turn_until(lambda: len(requests.select(RequestState.WAITING)) == 2)
    narrow.double.deliver(narrow.double.bootstraps[-1])
    narrow.turn_until(lambda: first.token_ids)
    narrow.double.close()
    narrow.turn_until(lambda: all(answer.is_over for answer in (first, *others)))
    assert others[0].token_ids == first.token_ids
    assert others[1].failure is not None


@pytest.mark.I1
@pytest.mark.I2
def test_a_sample_that_was_to_copy_from_one_that_fails_in_the_same_plan_waits_for_its_node(
    narrow: EngineHarness,
) -> None:
    plan_moves, requests = narrow.engine.plan_moves, narrow.engine.requests
    narrow.ask(PROMPT, NUM_NEW, HISPARSE)
    running, answer = waiting_locally(narrow, narrow.double)
    (request,) = requests.waiting()
    reserve = plan_moves.reserve

    def fails_first(admission: Admission, now: float) -> object:
        request.held_prefix_tokens = PAGE  # as if the rest were to be copied
        return reserve(admission, now)

    with patch.object(plan_moves, "reserve", fails_first):
        narrow.turn_until(lambda: not request.is_local)
    requests.check_integrity()
    assert request.prefix is None
    narrow.turn_until(lambda: running.is_over and answer.is_over)
    assert answer.failure is None
