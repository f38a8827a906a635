"""A decode node computes the short tail of a prompt in its steps, with the same rows and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.runner import DeviceRunner, make_runner
from hisparse_pd.decode_node.sizing import MAX_TAIL_STEPS
from hisparse_pd.engine.messages import CachedTokens
from tests.unit.decode_node.oracle import oracle_of
from tests.unit.decode_node.speculation_support import (
    MAX_DRAFTS,
    TOP_K,
    Calls,
    by_turns,
    drafts,
    exchange_in_every_step,
    harness,
    make_behind,
)
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    PrefillDouble,
    Prompt,
    computed,
    load_checkpoint,
    random_prompt,
)

CHECKPOINT = "drafting"
PAGE = 16
NUM_NEW = 4
NUM_DRAWN = 6
NUM_HELD = 5 * PAGE
HELD = random_prompt(3, NUM_HELD + 1)
MOST = MAX_TAIL_STEPS * (MAX_DRAFTS + 1)
"""Most tokens that may be missing."""
assert MOST == PAGE, "a whole page's tail can be computed"
MISSING = (2, 3, 4, 5, 8, 9, 13, 14, 15, 16)
"""Lengths of tails. A step takes up to four of their tokens, the last step one, two, three or four."""
PROMPTS: list[Prompt] = [(*HELD[:NUM_HELD], *random_prompt(100 + missing, missing)) for missing in MISSING]
NODE: dict[str, Any] = {"page_size": PAGE, "disable_prefix_cache": False, "host_pool_tokens": 16384}
FLAGS = [HisparseFlag.TRUE, HisparseFlag.FALSE]
SLOW = pytest.mark.slow
SAMPLED = [(make_runner, 3, 16), (make_runner, 0, 5), (make_behind, 3, 5), (make_behind, 0, 16)]
"""Runners, drafts and missing tokens of ``test_steps_take_as_many_tokens_as_they_verify`` in `make test`."""


@pytest.fixture
def make() -> Callable[..., DeviceRunner]:
    return make_behind


@pytest.fixture(scope="module")
def nodes(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., EngineHarness]]:
    """A node for each way to make a runner, started once."""
    with ExitStack() as stack:

        @cache
        def node(make: Callable[..., DeviceRunner]) -> EngineHarness:
            ipc_dir = tmp_path_factory.mktemp("node")
            return stack.enter_context(closing(harness(checkpoint, ipc_dir, make, **NODE)))

        yield node


@pytest.fixture
def node(nodes: Callable[..., EngineHarness], make: Callable[..., DeviceRunner]) -> EngineHarness:
    """A node that holds the whole pages of ``HELD`` in both modes, and nothing else."""
    node = nodes(make)
    node.flush()
    for flag in FLAGS:
        node.ask(HELD, 1, flag)
    return node


def finish(node: EngineHarness, answers: Sequence[Answer]) -> None:
    node.turn_until(lambda: all(answer.is_over for answer in answers))
    assert [answer.failure for answer in answers] == [None] * len(answers)
    node.turn_until(lambda: not node.engine.requests.select(RequestState.ENDING))
    node.engine.requests.pools.check_integrity()


def only_running(node: EngineHarness) -> Request:
    (request,) = node.engine.requests.select(RequestState.RUNNING)
    return request


@pytest.mark.I5
@pytest.mark.parametrize(
    ("make", "numbers", "flag"),
    [
        # Each runner and each mode, with drafts alone and by turns; in `make test-full` any three meet.
        pytest.param(make_behind, (3,), HisparseFlag.TRUE, id="behind, drafts, hisparse"),
        pytest.param(make_behind, (0,), HisparseFlag.FALSE, id="behind, none, dense", marks=SLOW),
        pytest.param(make_behind, (1, 0, 3, 2), HisparseFlag.TRUE, id="behind, any, hisparse", marks=SLOW),
        pytest.param(make_runner, (3,), HisparseFlag.FALSE, id="read first, drafts, dense", marks=SLOW),
        pytest.param(make_runner, (0,), HisparseFlag.TRUE, id="read first, none, hisparse", marks=SLOW),
        pytest.param(make_runner, (1, 0, 3, 2), HisparseFlag.FALSE, id="read first, any, dense"),
        pytest.param(make_behind, (3,), HisparseFlag.FALSE, id="behind, drafts, dense", marks=SLOW),
        pytest.param(make_behind, (0,), HisparseFlag.TRUE, id="behind, none, hisparse", marks=SLOW),
        pytest.param(make_behind, (1, 0, 3, 2), HisparseFlag.FALSE, id="behind, any, dense", marks=SLOW),
        pytest.param(make_runner, (3,), HisparseFlag.TRUE, id="read first, drafts, hisparse", marks=SLOW),
        pytest.param(make_runner, (0,), HisparseFlag.FALSE, id="read first, none, dense", marks=SLOW),
        pytest.param(
            make_runner, (1, 0, 3, 2), HisparseFlag.TRUE, id="read first, any, hisparse", marks=SLOW
        ),
    ],
)
def test_a_short_tail_needs_no_prefill_node(
    node: EngineHarness, expected: dict[Prompt, list[int]], flag: HisparseFlag, numbers: tuple[int, ...]
) -> None:
    """Tails are computed one after the other, then all at once, each at another place of its prompt."""
    num_before = len(node.double.bootstraps)
    with drafts(node, *numbers):
        for prompt in PROMPTS[::4]:
            answer = node.ask(prompt, NUM_NEW, flag)
            assert answer.token_ids == expected[prompt]
            assert answer.stats.num_held_tokens == NUM_HELD
            assert answer.stats.cached == CachedTokens(decode=NUM_HELD)
            assert answer.stats.transfer_bytes == 0
            assert answer.prefill == []
            assert answer.phases == ["queue", "landing", "first_step"]
        answers = [node.generate(prompt, NUM_NEW, flag) for prompt in PROMPTS]
        finish(node, answers)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == expected[prompt], f"{len(prompt) - NUM_HELD} tokens are missing"
    assert len(node.double.bootstraps) == num_before


@pytest.mark.I5
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("number", [3, pytest.param(0, marks=SLOW)])
def test_the_rows_are_those_of_a_prefill_node(
    node: EngineHarness, checkpoint: Checkpoint, flag: HisparseFlag, number: int
) -> None:
    """So are the draft layer's and the row checks."""
    prompt = PROMPTS[-2]
    ready = computed(checkpoint, prompt)
    memory = node.engine.tables.memory
    with drafts(node, number):
        answer = node.generate(prompt, NUM_NEW, flag)
        node.turn_until(lambda: answer.token_ids)
        node.engine.steps.settle()
    request = only_running(node)
    tail = slice(NUM_HELD, len(prompt) - 1)
    is_dense = request.mode is Mode.DENSE
    kind, pool = (PoolKind.DEVICE, memory.k_dev) if is_dense else (PoolKind.HOST, memory.k_host)
    assert memory.row_checks is not None
    for found, of, wanted in (
        (pool, kind, ready.kv),
        (memory.index, PoolKind.INDEX, ready.index),
        (memory.row_checks, PoolKind.INDEX, ready.row_checks),
    ):
        slots = slots_tensor(request.extents(of))[tail]
        assert torch.equal(found[:, slots], wanted[:, tail])
    finish(node, [answer])


@pytest.mark.parametrize(
    ("make", "number", "missing"),
    [
        # Each runner with and without drafts; in `make test-full` any three meet.
        pytest.param(make, number, missing, marks=() if (make, number, missing) in SAMPLED else SLOW)
        for make, number, missing in product((make_runner, make_behind), (3, 0), (2, 4, 5, 13, 16))
    ],
)
def test_steps_take_as_many_tokens_as_they_verify(
    node: EngineHarness, calls: Calls, missing: int, number: int
) -> None:
    """No draft counts as verified meanwhile, and nobody is told of anything before the first token."""
    prompt = PROMPTS[MISSING.index(missing)]
    calls.all.clear()
    with drafts(node, number):
        answer = node.generate(prompt, 1, HisparseFlag.FALSE)
        finish(node, [answer])
    entries = [entry for step in calls.steps for entry in step.entries]
    assert [entry.num_sure for entry in entries[:-1]] == [number + 1] * (len(entries) - 1)
    assert sum(entry.num_sure for entry in entries) == missing
    assert [len(entry.drawn_at) for entry in entries] == [0] * (len(entries) - 1) + [1]
    assert len(entries) == -(-missing // (number + 1))
    assert (answer.stats.num_drafted, answer.stats.num_accepted) == (0, 0)
    assert len(answer.token_ids) == 1


def test_a_longer_tail_goes_to_a_prefill_node(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without drafts a step takes one token. What is missing must begin where the last whole page ends."""
    without_drafts = load_checkpoint(checkpoint.path)
    prompts = [(*HELD[:NUM_HELD], *random_prompt(7, missing)) for missing in (4, 5)]
    with closing(EngineHarness(without_drafts, tmp_path, **NODE)) as node:
        node.ask(HELD, 1, HisparseFlag.TRUE)
        answers = [node.ask(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in prompts]
        assert [bootstrap.num_held_tokens for bootstrap in node.double.bootstraps] == [0, NUM_HELD]
        node.ask(HELD[: NUM_HELD - PAGE] + (9,) * (PAGE + 1), 1, HisparseFlag.TRUE)
        assert node.double.bootstraps[-1].num_held_tokens == NUM_HELD - PAGE, "a page is missing"
        few = random_prompt(8, 4)
        assert node.ask(few, NUM_NEW, HisparseFlag.TRUE).stats.num_held_tokens == 0
        assert len(node.double.bootstraps) == 3, "a prompt of few tokens needs none"
    oracle = oracle_of(checkpoint.path)
    assert all(oracle.are_likeliest(answer.prompt, answer.token_ids) for answer in answers)


@pytest.mark.I5
@pytest.mark.parametrize(
    "make", [make_behind, pytest.param(make_runner, marks=SLOW)], ids=["behind", "read first"]
)
def test_draws_are_those_behind_a_prompt_that_a_prefill_node_computed(
    node: EngineHarness, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """This holds for seeds, penalties, logprobs, grammars, tokens that may not come yet and resumed ones,
    beside requests that draft."""
    num_before = len(node.double.bootstraps)
    wanted: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"frequency_penalty": 0.5, "num_logprobs": 2},
        {"min_new_tokens": 5, "num_logprobs": 0},
        {"temperature": 1.0, "seed": 6, "num_resumed_tokens": 3, "frequency_penalty": 0.5},
        {"grammar": 'start: "{" /[a-z]{3}/ ("," /[0-9]+/)? "}"', "ignore_eos": False},
        {},
    ]
    (tmp_path / "other").mkdir()
    settings = {**NODE, "disable_prefix_cache": True}
    given: list[list[Answer]] = []
    with closing(harness(checkpoint, tmp_path / "other", **settings)) as other:
        for each in (other, node):
            with drafts(each, 3, 0, 2):
                beside = each.generate(PROMPTS[0], 20, HisparseFlag.FALSE)
                each.turn_until(lambda: beside.token_ids)  # noqa: B023
                given.append(
                    [
                        each.generate(prompt, NUM_DRAWN, by_turns(number), **sampling)
                        for number, (prompt, sampling) in enumerate(zip(PROMPTS[1:8], wanted, strict=True))
                    ]
                )
                finish(each, [beside, *given[-1]])
    assert len(node.double.bootstraps) == num_before
    for one, two in zip(*given, strict=True):
        assert one.token_ids == two.token_ids
        assert [logprob.token_id for logprob in one.logprobs] == [each.token_id for each in two.logprobs]
        for logprob, same in zip(one.logprobs, two.logprobs, strict=True):
            assert logprob.logprob == pytest.approx(same.logprob, abs=1e-4)


@pytest.mark.I4
@pytest.mark.parametrize("flag", [HisparseFlag.TRUE, pytest.param(HisparseFlag.FALSE, marks=SLOW)])
def test_a_hot_buffer_may_change_after_every_step(
    node: EngineHarness,
    expected: dict[Prompt, list[int]],
    flag: HisparseFlag,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = PROMPTS[6:]
    smallest = TOP_K + MAX_DRAFTS + 1
    with drafts(node, 2, 1):
        answers = [node.generate(prompt, NUM_NEW, flag) for prompt in prompts]
        node.turn_until(lambda: node.engine.requests.select(RequestState.RUNNING))
        if flag is HisparseFlag.FALSE:  # one that shares pages never becomes hisparse
            finish(node, answers)
        else:
            num_exchanges = exchange_in_every_step(
                node, answers, cycle([smallest, 2 * smallest]), monkeypatch
            )
            assert num_exchanges > len(prompts) * MAX_TAIL_STEPS
    assert [answer.token_ids for answer in answers] == [expected[prompt] for prompt in prompts]


@pytest.mark.I2
@pytest.mark.parametrize(
    ("make", "flag"),
    [
        pytest.param(make_behind, HisparseFlag.TRUE, id="behind, hisparse"),
        pytest.param(make_runner, HisparseFlag.FALSE, id="read first, dense", marks=SLOW),
        pytest.param(make_behind, HisparseFlag.FALSE, id="behind, dense", marks=SLOW),
        pytest.param(make_runner, HisparseFlag.TRUE, id="read first, hisparse", marks=SLOW),
    ],
)
def test_a_client_may_leave_at_any_step_of_a_tail(
    node: EngineHarness, expected: dict[Prompt, list[int]], flag: HisparseFlag
) -> None:
    """What it leaves serves the next request of the same prompt. A step takes three of nine tokens."""
    prompt, requests = PROMPTS[MISSING.index(9)], node.engine.requests
    with drafts(node, 2):
        for num_turns in range(5):
            answer = node.generate(prompt, NUM_NEW, flag)
            node.turn_until(lambda: requests.select(RequestState.RUNNING))
            for _ in range(num_turns):
                node.turn()
            node.leave(answer)
            node.turn_until(lambda: not len(requests))
            requests.pools.check_integrity()
            assert node.ask(prompt, 2, flag).token_ids == expected[prompt][:2]


@pytest.mark.I7
def test_a_short_tail_is_computed_while_the_prefill_node_is_down(
    node: EngineHarness, checkpoint: Checkpoint, expected: dict[Prompt, list[int]]
) -> None:
    away = PrefillDouble(checkpoint, PAGE)
    away.close()
    for prompt, flag in zip(PROMPTS, FLAGS, strict=False):
        assert node.ask(prompt, NUM_NEW, flag, double=away).token_ids == expected[prompt]


def test_samples_of_one_prompt_share_what_is_held(
    node: EngineHarness, expected: dict[Prompt, list[int]]
) -> None:
    num_before = len(node.double.bootstraps)
    for flag in FLAGS:
        answers = node.generate_samples(PROMPTS[5], NUM_NEW, 3, flag)
        finish(node, answers)
        assert [answer.token_ids for answer in answers] == [expected[PROMPTS[5]]] * 3
    assert len(node.double.bootstraps) == num_before
