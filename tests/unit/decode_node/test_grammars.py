"""Requests that follow a grammar, beside others that do not, in every mode and with any number of drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import torch

import hisparse_pd.decode_node.step_draws
import hisparse_pd.decode_node.step_masks
from hisparse_pd.base.vocabulary import FinishReason, HisparseFlag
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import Grammar
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.runner import Launched
from hisparse_pd.decode_node.step_buffers import StepBuffers
from hisparse_pd.decode_node.step_masks import has_grammar
from hisparse_pd.engine.lockstep import NodeStep
from tests.unit.decode_node.speculation_support import Calls, drafts, harness, num_drafts
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, Prompt, raising, random_prompt

PROMPTS = [random_prompt(seed, num_tokens) for seed, num_tokens in enumerate((1, 40, 64, 65, 90), 38)]
"""Prompts around the number of tokens that a layer selects at most."""
NUM_NEW = 100
NUM_PLAIN = 12
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -99, "maximum": 99},
        "s": {"type": "string", "pattern": "^[a-z]{2,4}$"},
        "k": {"type": "array", "items": {"enum": ["a", None]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["n", "s", "k"],
    "additionalProperties": False,
}
GRAMMAR = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
WORD = 'start: "{" /[a-z]{3}/ ("," /[0-9]+/)? "}"'
LONGER_WORD = 'start: "{" /[a-z]{9}/ "}"'
PLAIN = PROMPTS[3]
CHECKPOINT = "drafting"
NODE = {"page_size": 4}


@pytest.fixture(scope="module")
def plain_node(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    """A node without drafts, whose host is a step behind."""
    ipc_dir = tmp_path_factory.mktemp("plain")
    with closing(harness(checkpoint, ipc_dir, page_size=4, speculative_num_steps=0)) as node:
        yield node


def ask(
    node: EngineHarness,
    prompt: Prompt,
    flag: HisparseFlag = HisparseFlag.TRUE,
    grammar: str = GRAMMAR,
    **sampling: Any,
) -> Answer:
    options = {"grammar": grammar, "ignore_eos": False, **sampling}
    return node.generate(prompt, NUM_NEW, flag, **options)


def text_of(answer: Answer, checkpoint: Checkpoint) -> str:
    """Return the answer's text before the token that ended it."""
    assert answer.last is not None
    assert answer.last.finish_reason is FinishReason.STOP
    *body, end = answer.token_ids
    assert (end,) == checkpoint.spec.eos_token_ids
    return bytes(body).decode()


@pytest.mark.parametrize(("num", "ignore_eos"), [pytest.param(0, False, marks=pytest.mark.slow), (3, True)])
def test_outputs_are_what_the_schema_wants_and_neighbours_what_they_are_alone(
    checkpoint: Checkpoint, node: EngineHarness, num: int, ignore_eos: bool
) -> None:
    with drafts(node, num):
        alone = node.generate(PLAIN, NUM_PLAIN, HisparseFlag.TRUE)
        node.finish([alone])
        flags = [HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO]
        neighbours = [node.generate(PLAIN, NUM_PLAIN, flag) for flag in flags]
        seeds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 5},
            {"temperature": 2.0, "seed": 6},
        ]
        answers = [
            ask(node, PROMPTS[index], flag, ignore_eos=ignore_eos, **seed)
            for index, (flag, seed) in enumerate(zip(flags, seeds, strict=True))
        ]
        node.finish([*neighbours, *answers])
    for answer in answers:
        jsonschema.validate(json.loads(text_of(answer, checkpoint)), SCHEMA)
    assert [neighbour.token_ids for neighbour in neighbours] == [alone.token_ids] * len(flags)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 1.5, "seed": 12, "top_k": 40, "top_p": 0.9},
]


def with_drafts(node: EngineHarness, *numbers: int, grammar: str = GRAMMAR) -> list[Answer]:
    with drafts(node, *numbers):
        answers = [
            ask(node, prompt, flag, grammar, **sampling)
            for prompt, flag, sampling in zip(
                PROMPTS[2:], [HisparseFlag.TRUE, HisparseFlag.FALSE] * 2, SAMPLINGS, strict=False
            )
        ]
        node.finish(answers)
    return answers


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.slow
def test_any_number_of_drafts_gives_the_same_tokens(node: EngineHarness) -> None:
    without = with_drafts(node, 0)
    answers = with_drafts(node, 3, 3, 0, 1, 0, 2)
    assert tokens(answers) == tokens(without)
    assert num_drafts(*answers)[1] > 0, "no draft was right: nothing was tried"


def test_a_step_is_launched_before_the_tokens_that_it_needs_for_its_masks_are_read(
    checkpoint: Checkpoint, plain_node: EngineHarness, calls: Calls
) -> None:
    answer = ask(plain_node, PROMPTS[1], grammar=LONGER_WORD)
    plain = plain_node.generate(PLAIN, 8)
    plain_node.finish([answer, plain])
    assert re.fullmatch("{[a-z]{9}}", text_of(answer, checkpoint))
    pairs = [(one, two) for one, two in pairwise(calls.steps) if has_grammar(two.batch)]
    assert len(pairs) >= len(answer.token_ids) - 2
    for one, two in pairs:
        assert calls.at("launch", two) < calls.at("read", one) < calls.at("draw", two)


@pytest.mark.I1
def test_a_step_that_writes_behind_its_draws_is_launched_when_all_before_is_read(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a request that the step before ends would free slots that its drafts are still written to."""
    launches: list[tuple[int, bool]] = []
    runner = node.engine.steps.runner
    launch = runner.launch

    def recorded(batch: Sequence[Request], step: NodeStep) -> Launched:
        launches.append((step.num_new, node.engine.steps.in_flight is None))
        return launch(batch, step)

    monkeypatch.setattr(runner, "launch", recorded)
    with drafts(node, 0, 0, 2):
        answer = ask(node, PROMPTS[1], grammar=LONGER_WORD)
        node.finish([answer])
    assert {num_new for num_new, _ in launches} == {1, 3}
    assert all(is_alone for num_new, is_alone in launches if num_new > 1)


def test_who_needs_no_grammar_does_not_wait_for_one(
    checkpoint: Checkpoint, node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: Future[Grammar] = Future()
    compiler = node.engine.grammars
    compile_text = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda text, begun: slow if text == WORD else compile_text(text))
    waiting = ask(node, PROMPTS[0], grammar=WORD)
    others = [node.generate(PLAIN, 9), ask(node, PROMPTS[1], grammar=LONGER_WORD)]
    node.turn_until(lambda: all(other.is_over for other in others))
    assert waiting.token_ids == []
    slow.set_result(compile_text(WORD).result())
    node.finish([waiting])
    assert text_of(waiting, checkpoint)[0] == "{"


def test_who_waits_for_a_grammar_has_no_step_to_make_and_does_not_wait_for_ever(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    never: Future[Grammar] = Future()
    monkeypatch.setattr(node.engine.grammars, "compile", lambda text, begun: never)
    node.stats = None
    answer = ask(node, PROMPTS[0], grammar=WORD)

    def waits() -> bool:
        return node.stats is not None and node.stats.num_without_grammar == 1

    node.turn_until(waits)
    assert node.stats is not None
    assert node.stats.num_running == 1
    monkeypatch.setattr(hisparse_pd.decode_node.step_masks, "MAX_WAIT_SECS", 0.0)
    node.failure_of(answer, status=503, error="was not compiled within 0 s")


def test_a_grammar_that_cannot_be_had_ends_its_request_alone(node: EngineHarness) -> None:
    broken = ask(node, PROMPTS[0], grammar="start: (((")
    other = node.generate(PLAIN, 5)
    failure = node.failure_of(broken, status=400, error="cannot follow its grammar")
    assert "Expected token" in failure.error
    node.finish([other])


@pytest.mark.parametrize("num", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(node: EngineHarness, num: int) -> None:
    """Each row of the parser has more items than the one before."""
    with drafts(node, num):
        alone = node.generate(PLAIN, 16)
        node.finish([alone])
        neighbour = node.generate(PLAIN, 16)
        answer = ask(node, PROMPTS[1], grammar='start: ("{"{0,3000}){0,3000}')
        node.failure_of(answer, status=400, error="max is 500")
        node.finish([neighbour])
    assert neighbour.token_ids == alone.token_ids


def test_tokens_before_a_forbidden_one_are_given_and_counted(node: EngineHarness) -> None:
    answer = ask(node, PROMPTS[0], grammar=WORD)
    with node.without_steps():
        node.turn_until(
            lambda: any(request.matcher is not None for request in node.engine.requests.all()),
        )
        (request,) = node.engine.requests.all()
        metrics = node.engine.metrics
        before = dict(metrics.totals)
        node.engine.end_moves.emit(request, list(b"{a}"), [None] * 3, 0.0)
        node.failure_of(answer, status=400, error="cannot follow its grammar")
    assert answer.token_ids == list(b"{a")
    generated = f'generation_tokens_total{{mode="{request.mode}"}}'
    assert metrics.totals[generated] - before[generated] == 2
    assert metrics.totals["failed_requests_total"] - before["failed_requests_total"] == 1


def test_a_step_whose_draws_fail_ends_its_batch_and_no_more(
    checkpoint: Checkpoint, plain_node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = plain_node
    before = ask(node, PROMPTS[1], grammar=LONGER_WORD)  # which need not be compiled again
    node.finish([before])
    neighbour = node.generate(PLAIN, 200)
    node.turn_until(lambda: neighbour.token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(hisparse_pd.decode_node.step_draws, "masks_of", raising(GrammarError("no memory, say")))
        answer = ask(node, PROMPTS[1], grammar=LONGER_WORD)
        for failed in (answer, neighbour):
            node.failure_of(failed, status=500)
    after = ask(node, PROMPTS[1], grammar=LONGER_WORD)
    node.finish([after])
    assert text_of(after, checkpoint) == text_of(before, checkpoint)


def test_what_was_not_drawn_is_read_by_nobody(
    plain_node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an engine breaks off in the middle of a step and closes, the step's memory has older tokens."""
    node = plain_node
    answer = ask(node, PROMPTS[1])
    node.turn_until(lambda: len(answer.token_ids) >= 5)
    with monkeypatch.context() as patch:
        error = torch.AcceleratorError("the device is lost")
        patch.setattr(hisparse_pd.decode_node.step_draws, "masks_of", raising(error))
        with pytest.raises(torch.AcceleratorError):
            node.turn_until(lambda: answer.is_over)
    (request,) = node.engine.requests.all()
    given = list(request.output_token_ids)
    node.engine.steps.settle()
    assert request.output_token_ids == given
    node.failure_of(answer, error="not drawn")


@pytest.mark.I1
@pytest.mark.parametrize("num", [0, 2])
def test_a_step_whose_draws_break_off_is_waited_for_before_its_slots_are_others(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """Its forward, with or without drafts, and what follows it are over before slots are freed."""
    calls = Calls()
    with drafts(node, num), monkeypatch.context() as patch:
        patch.setattr(hisparse_pd.decode_node.step_draws, "masks_of", raising(ValueError("no memory, say")))
        calls.watch(patch, hisparse_pd.decode_node.step_draws, "masks_of", "draw")
        calls.watch(patch, StepBuffers, "mark_end", "mark")
        calls.watch(patch, node.engine.requests, "release", "end")
        answer = ask(node, PROMPTS[1])
        node.turn_until(lambda: answer.is_over)
    assert [what for what, _ in calls.all] == ["mark", "draw", "mark", "end"]
