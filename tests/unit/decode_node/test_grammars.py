"""Requests that follow a grammar, beside others that do not, in every mode and with any number of drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

import decode_node.runner
import decode_node.step_masks
from decode_node.request import Request
from decode_node.runner import Launched
from decode_node.step_buffers import StepBuffers
from decode_node.step_masks import masks_of
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.grammar.matcher import ALL_ALLOWED, GrammarError
from hisparse_pd.grammar.token_trie import Grammar
from hisparse_pd.vocabulary import FinishReason, HisparseFlag
from tests.unit.decode_node.speculation_support import (
    drafts,
    harness,
    num_drafts,
)
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    PrefillDouble,
    Prompt,
    finish,
    load_checkpoint,
    random_prompt,
)
from tools.checkpoints.make_tiny import LIKELY_DRAFTS, write_checkpoint

PROMPTS = [random_prompt(seed, num_tokens) for seed, num_tokens in enumerate((1, 40, 64, 65, 90))]
"""Around what a layer selects at most."""
NUM_NEW = 100
NUM_PLAIN = 30
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": -999, "maximum": 999},
        "name": {"type": "string", "pattern": "^[a-z]{2,4}$"},
        "kinds": {"type": "array", "items": {"enum": ["one", None]}, "minItems": 1, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["count", "name", "kinds", "ok"],
    "additionalProperties": False,
}
GRAMMAR = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
WORD = 'start: "{" /[a-z]{3}/ ("," /[0-9]+/)? "}"'
PLAIN = PROMPTS[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("grammars") / "v32"
    write_checkpoint(path, "v32", draft_gain=LIKELY_DRAFTS)
    return load_checkpoint(path, num_draft_layers=1)


@pytest.fixture(scope="module")
def double(checkpoint: Checkpoint) -> Iterator[PrefillDouble]:
    with closing(PrefillDouble(checkpoint, page_size=4)) as double:
        yield double


@pytest.fixture(scope="module")
def plain_double(checkpoint: Checkpoint) -> Iterator[PrefillDouble]:
    """Of ``plain_node``: to one double all nodes of a process are one."""
    with closing(PrefillDouble(checkpoint, page_size=4)) as double:
        yield double


@pytest.fixture(scope="module")
def node(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    ipc_dir = tmp_path_factory.mktemp("node")
    with closing(harness(checkpoint, ipc_dir, page_size=4)) as node:
        yield node


@pytest.fixture(scope="module")
def plain_node(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    """Without drafts, and a step behind."""
    ipc_dir = tmp_path_factory.mktemp("plain")
    with closing(harness(checkpoint, ipc_dir, page_size=4, speculative_num_steps=0)) as node:
        yield node


def ask(
    node: EngineHarness,
    double: PrefillDouble,
    prompt: Prompt,
    flag: HisparseFlag = HisparseFlag.TRUE,
    grammar: str = GRAMMAR,
    first: str = "{",
    **sampling: Any,
) -> Answer:
    """A request whose prefill node drew ``first``."""
    room = 1_000_000 + len(double.first_tokens)
    double.first_tokens[room] = ord(first)
    options = {"room": room, "grammar": grammar, "ignore_eos": False, **sampling}
    return node.generate(double, prompt, NUM_NEW, flag, **options)


def text_of(answer: Answer, checkpoint: Checkpoint) -> str:
    """What it says before the token that ended it."""
    assert answer.last is not None
    assert answer.last.finish_reason is FinishReason.STOP
    *body, end = answer.token_ids
    assert (end,) == checkpoint.spec.eos_token_ids
    return bytes(body).decode()


@pytest.mark.parametrize(("num", "ignore_eos"), [(0, False), (3, True)])
def test_outputs_are_what_the_schema_wants_and_neighbours_what_they_are_alone(
    checkpoint: Checkpoint, double: PrefillDouble, node: EngineHarness, num: int, ignore_eos: bool
) -> None:
    with drafts(node, num):
        alone = node.generate(double, PLAIN, NUM_PLAIN, HisparseFlag.TRUE)
        finish(node, [alone], double)
        flags = [HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO]
        neighbours = [node.generate(double, PLAIN, NUM_PLAIN, flag) for flag in flags]
        seeds = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 2.0, "seed": 6}]
        answers = [
            ask(node, double, PROMPTS[index], flag, ignore_eos=ignore_eos, **seed)
            for index, (flag, seed) in enumerate(zip(flags, seeds, strict=True))
        ]
        finish(node, [*neighbours, *answers], double)
    for answer in answers:
        jsonschema.validate(json.loads(text_of(answer, checkpoint)), SCHEMA)
    assert [neighbour.token_ids for neighbour in neighbours] == [alone.token_ids] * len(flags)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 1.5, "seed": 12, "top_k": 40, "top_p": 0.9},
]


def with_drafts(
    node: EngineHarness, double: PrefillDouble, *numbers: int, grammar: str = GRAMMAR
) -> list[Answer]:
    with drafts(node, *numbers):
        answers = [
            ask(node, double, prompt, flag, grammar, **sampling)
            for prompt, flag, sampling in zip(
                PROMPTS[2:], [HisparseFlag.TRUE, HisparseFlag.FALSE] * 2, SAMPLINGS, strict=False
            )
        ]
        finish(node, answers, double)
    return answers


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def test_any_number_of_drafts_gives_the_same_tokens(double: PrefillDouble, node: EngineHarness) -> None:
    without = with_drafts(node, double, 0)
    for numbers in [(1,), (2,), (3, 0, 1, 0, 2, 3, 3)]:
        answers = with_drafts(node, double, *numbers)
        assert tokens(answers) == tokens(without), numbers
        assert sum(num_drafts(answer)[0] for answer in answers) > 0
        assert sum(num_drafts(answer)[1] for answer in answers) > 0, "no draft was right: nothing was tried"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_mask_that_is_missing_at_one_position_shows(
    checkpoint: Checkpoint,
    double: PrefillDouble,
    node: EngineHarness,
    monkeypatch: pytest.MonkeyPatch,
    position: int,
) -> None:
    """The tests above would not go green without it."""

    def forgetful(batch: Sequence[Request], given: Sequence[Sequence[int]], masks: Tensor) -> Tensor:
        filled = masks_of(batch, given, masks)
        row = 0
        for of_req in given:
            if len(of_req) >= position:
                filled[row + position] = ALL_ALLOWED
            row += 1 + len(of_req)
        return filled

    expected = tokens(with_drafts(node, double, 2))
    monkeypatch.setattr(decode_node.runner, "masks_of", forgetful)
    with drafts(node, 2):
        answers = [
            ask(node, double, prompt, **sampling)
            for prompt, sampling in zip(PROMPTS[2:], SAMPLINGS, strict=False)
        ]
        node.turn_until(lambda: all(answer.is_over for answer in answers), double)
    assert tokens(answers) != expected


def test_a_step_is_launched_before_the_tokens_that_it_needs_for_its_masks_are_read(
    checkpoint: Checkpoint,
    plain_double: PrefillDouble,
    plain_node: EngineHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}
    runner = plain_node.engine.steps.runner
    launch = runner.launch

    def recorded_launch(batch: Sequence[Request], step: NodeStep) -> Launched:
        launched = launch(batch, step)
        numbers[id(launched)] = len(numbers)
        kept.append(launched)
        calls.append(("launch", numbers[id(launched)]))
        return launched

    kept: list[Launched] = []
    monkeypatch.setattr(runner, "launch", recorded_launch)
    kind: Any = decode_node.runner.Launched
    for name in ("draw", "result"):
        method = getattr(kind, name)

        def recorded(self: Launched, name: str = name, method: Any = method) -> Any:
            if id(self) in numbers:
                calls.append((name, numbers[id(self)]))
            return method(self)

        monkeypatch.setattr(kind, name, recorded)
    answer = ask(plain_node, plain_double, PROMPTS[1])
    plain = plain_node.generate(plain_double, PLAIN, 8)
    finish(plain_node, [answer, plain], plain_double)
    jsonschema.validate(json.loads(text_of(answer, checkpoint)), SCHEMA)
    for number in range(1, len(answer.token_ids) - 2):
        at = [
            calls.index((name, of))
            for name, of in (("launch", number), ("result", number - 1), ("draw", number))
        ]
        assert at == sorted(at)


@pytest.mark.I1
def test_a_step_that_writes_behind_its_draws_is_launched_when_all_before_is_read(
    double: PrefillDouble, node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request that ends by the step before gives up slots that its drafts are still written to."""
    launches: list[tuple[int, bool]] = []
    runner = node.engine.steps.runner
    launch = runner.launch

    def recorded(batch: Sequence[Request], step: NodeStep) -> Launched:
        launches.append((step.num_new, node.engine.steps.in_flight is None))
        return launch(batch, step)

    monkeypatch.setattr(runner, "launch", recorded)
    with drafts(node, 0, 0, 2):
        answer = ask(node, double, PROMPTS[1])
        finish(node, [answer], double)
    assert {num_new for num_new, _ in launches} == {1, 3}
    assert all(is_alone for num_new, is_alone in launches if num_new > 1)


def test_who_needs_no_grammar_does_not_wait_for_one(
    checkpoint: Checkpoint, double: PrefillDouble, node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: Future[Grammar] = Future()
    compiler = node.engine._grammars
    ask_compiler = compiler.ask
    monkeypatch.setattr(compiler, "ask", lambda text: slow if text == WORD else ask_compiler(text))
    waiting = ask(node, double, PROMPTS[0], grammar=WORD)
    others = [node.generate(double, PLAIN, 9), ask(node, double, PROMPTS[1])]
    node.turn_until(lambda: all(other.is_over for other in others) and waiting.token_ids, double)
    assert len(waiting.token_ids) == 1
    slow.set_result(ask_compiler(WORD).result())
    finish(node, [waiting], double)
    assert text_of(waiting, checkpoint)[0] == "{"


def test_who_waits_for_a_grammar_has_no_step_to_make_and_does_not_wait_for_ever(
    double: PrefillDouble, node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    never: Future[Grammar] = Future()
    monkeypatch.setattr(node.engine._grammars, "ask", lambda text: never)
    node.stats = None
    answer = ask(node, double, PROMPTS[0], grammar=WORD)

    def waits() -> bool:
        return node.stats is not None and node.stats.num_without_grammar == 1

    node.turn_until(waits, double)
    assert node.stats is not None
    assert node.stats.num_running == 1
    monkeypatch.setattr(decode_node.step_masks, "MAX_WAIT_SECS", 0.0)
    node.failure_of(answer, double, status=503, error="was not compiled within 0 s")


def test_a_grammar_that_cannot_be_had_ends_its_request_alone(
    double: PrefillDouble, node: EngineHarness
) -> None:
    broken = ask(node, double, PROMPTS[0], grammar="start: (((")
    outside = ask(node, double, PROMPTS[1], first="x")
    other = node.generate(double, PLAIN, 5)
    node.turn_until(lambda: broken.is_over and outside.is_over, double)
    finish(node, [other], double)
    for answer, reason in [(broken, "Expected token"), (outside, "doesn't satisfy")]:
        assert answer.failure is not None
        assert answer.failure.status == 400
        assert "cannot follow its grammar" in answer.failure.error
        assert reason in answer.failure.error


@pytest.mark.parametrize("num", [0, 2])
def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(
    double: PrefillDouble, node: EngineHarness, num: int
) -> None:
    """Each row of the parser has more items than the one before."""
    with drafts(node, num):
        alone = node.generate(double, PLAIN, 30)
        finish(node, [alone], double)
        neighbour = node.generate(double, PLAIN, 30)
        answer = ask(node, double, PROMPTS[1], grammar='start: ("{"{0,3000}){0,3000}')
        node.turn_until(lambda: answer.is_over, double)
        finish(node, [neighbour], double)
    assert answer.failure is not None
    assert answer.failure.status == 400
    assert "max is 500" in answer.failure.error
    assert neighbour.token_ids == alone.token_ids


def test_a_step_whose_draws_fail_ends_its_batch_and_no_more(
    checkpoint: Checkpoint,
    plain_double: PrefillDouble,
    plain_node: EngineHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = plain_node

    def broken(*_: Any, **__: Any) -> Any:
        raise GrammarError("no memory, say")

    before = ask(node, plain_double, PROMPTS[1])  # its grammar need not be compiled again
    finish(node, [before], plain_double)
    neighbour = node.generate(plain_double, PLAIN, 200)
    node.turn_until(lambda: neighbour.token_ids, plain_double)
    with monkeypatch.context() as patch:
        patch.setattr(decode_node.runner, "masks_of", broken)
        answer = ask(node, plain_double, PROMPTS[1])
        node.turn_until(lambda: answer.is_over and neighbour.is_over, plain_double)
    for failed in (answer, neighbour):
        assert failed.failure is not None
        assert failed.failure.status == 500
    after = ask(node, plain_double, PROMPTS[1])
    finish(node, [after], plain_double)
    jsonschema.validate(json.loads(text_of(after, checkpoint)), SCHEMA)


def test_what_was_not_drawn_is_read_by_nobody(
    plain_double: PrefillDouble, plain_node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that breaks off in the middle of a step closes, and the step's memory has older tokens."""
    node = plain_node
    answer = ask(node, plain_double, PROMPTS[1])
    node.turn_until(lambda: len(answer.token_ids) >= 5, plain_double)

    def broken(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(decode_node.runner, "masks_of", broken)
        with pytest.raises(torch.AcceleratorError):
            node.turn_until(lambda: answer.is_over, plain_double)
    (request,) = node.engine.requests.all()
    given = list(request.output_token_ids)
    node.engine.steps.settle()
    assert request.output_token_ids == given
    node.failure_of(answer, plain_double, error="not drawn")


@pytest.mark.I1
@pytest.mark.parametrize("num", [0, 2])
def test_a_step_whose_draws_break_off_is_waited_for_before_its_slots_are_others(
    double: PrefillDouble, node: EngineHarness, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """Its forward, with drafts too, and whatever came behind that."""
    calls: list[str] = []
    mark = StepBuffers.mark

    def recorded(self: StepBuffers) -> None:
        calls.append("mark")
        mark(self)

    def broken(*_: Any, **__: Any) -> Any:
        calls.append("draw")
        raise ValueError("no memory, say")

    end = node.engine.requests.release

    def recorded_end(*args: Any, **options: Any) -> None:
        calls.append("end")
        end(*args, **options)

    with drafts(node, num), monkeypatch.context() as patch:
        patch.setattr(StepBuffers, "mark", recorded)
        patch.setattr(node.engine.requests, "release", recorded_end)
        patch.setattr(decode_node.runner, "masks_of", broken)
        answer = ask(node, double, PROMPTS[1])
        node.turn_until(lambda: answer.is_over, double)
    assert calls == ["mark", "draw", "mark", "end"]


def test_a_spilled_request_goes_on_in_its_grammar(
    checkpoint: Checkpoint, double: PrefillDouble, tmp_path: Path
) -> None:
    """Pages run out while two dense requests grow: one goes on as hisparse, where it was."""
    prompt = random_prompt(7, 200)
    with closing(
        harness(
            checkpoint,
            tmp_path,
            page_size=4,
            growth_pages=1,
            device_pool_tokens=420,
            speculative_num_steps=0,
            device_buffer_size=128,
        )
    ) as node:
        answers = [
            ask(node, double, prompt, HisparseFlag.FALSE, temperature=1.0, seed=seed) for seed in (1, 2)
        ]
        finish(node, answers, double)
    for answer in answers:
        jsonschema.validate(json.loads(text_of(answer, checkpoint)), SCHEMA)
    assert sum(answer.stats.num_retractions for answer in answers) == 1
