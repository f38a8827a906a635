"""Greedy tokens through the real pair equal transformers' own, in every mode, alone and in batches.

Prompts have the lengths at which off-by-one errors live. Each pass sends all prompts
through router, prefill node and decode node; the passes differ in the flag, in how many requests share a
batch, and in whether the prefix cache is warm. Invariant I5.

The default run has 15 prompts of one model in short contexts and 6 new tokens each, because the longest
prompts take most of the oracle's time; batches have each prompt in every mode. The slow tests have each
model in longer contexts with up to 48 new tokens: both modes alone, and all flags in batches of up to 28
prompts with cold and warm caches.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import FLAGS, Deployment, at_once, deployment, generated, wait_until
from tests.oracle_beside import Oracle

SAMPLE = [pytest.param(("v32", 768, 15, 15, 6, 3), id="v32")]
"""The default run: model, context length, prompts, prompts that are drawn, new tokens, drafts of a step.

Three chunks fill the context.
"""
FULL = [
    pytest.param(("v32", 8192, 28, 60, 48, 0), id="v32"),
    pytest.param(("glm", 4096, 28, 40, 48, 0), id="glm"),
    pytest.param(("axk2", 2048, 22, 30, 32, 0), id="axk2"),
    pytest.param(("mistral", 2048, 22, 30, 32, 0), id="mistral"),
]
"""Runs in the model's own context, half of it and a quarter, with the first of the prompts that are drawn.

The prompts are chosen: where two indexer scores at the boundary of a selection differ by less than float32
rounds, transformers and this project may select differently, both rightly. These have no such scores.
"""
CHUNK = 300
"""Size of a chunk, no multiple of the page; a third of the prompts is longer."""
PAGE_SIZE = 32
HOT_BUFFER = 160
INDEX_TOPK = 64
BATCH = 16

pytestmark = pytest.mark.timeout(1200)
"""Each test sends hundreds of requests, and each request may take REQUEST_TIMEOUT_SECS."""

CRITICAL_LENGTHS = (
    *(1, 2, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 3 * PAGE_SIZE + 7),
    *(INDEX_TOPK - 1, INDEX_TOPK, INDEX_TOPK + 1),
    *(HOT_BUFFER - 1, HOT_BUFFER, HOT_BUFFER + 1),
)

Prompt = tuple[int, ...]


def make_prompts(
    seed: int, context_length: int, num_prompts: int, num_drawn: int, num_new_tokens: int
) -> list[Prompt]:
    """Make prompts of byte tokens: half random, half with repetitions, all without a common prefix."""
    generator = random.Random(seed)
    most = context_length - num_new_tokens
    outgrowing = HOT_BUFFER - num_new_tokens // 2  # a request outgrows its hot buffer while it is decoded
    lengths = [length for length in (*CRITICAL_LENGTHS, outgrowing, 1500) if length < most]
    lengths += [context_length // 2, most]
    lengths += [generator.randint(3, 700) for _ in range(num_drawn - len(lengths))]
    prompts: list[Prompt] = []
    for number, length in enumerate(lengths[:num_prompts]):
        period = length if number % 2 else max(1, length // 3)
        motif = [generator.randint(32, 126) for _ in range(period)]
        motif[0] = 128 + number  # its own first byte, so that nothing is shared by chance
        prompts.append(tuple((motif * (length // period + 1))[:length]))
    return prompts


@dataclass(frozen=True)
class Subject:
    """One model: its running pair, the prompts and what transformers answers to them."""

    pair: Deployment
    prompts: list[Prompt]
    oracle: Oracle
    num_new_tokens: int
    num_drafts: int

    @property
    def expected(self) -> list[list[int]]:
        return self.oracle.tokens[: len(self.prompts)]


@pytest.fixture(scope="module")
def subject(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[str], Path],
    drafting_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    variant, context_length, num_prompts, num_drawn, num_new_tokens, num_drafts = request.param
    checkpoint = (drafting_checkpoint if num_drafts else tiny_checkpoint)(variant)
    prompts = make_prompts(7, context_length, num_prompts, num_drawn, num_new_tokens)
    oracle = Oracle(checkpoint, prompts, num_new_tokens)
    log_dir = tmp_path_factory.mktemp(f"oracle-{variant}")
    common = ["--page-size", str(PAGE_SIZE), "--context-length", str(context_length)]
    with (
        closing(oracle),
        deployment(
            checkpoint,
            log_dir,
            prefill_options=[*common, "--chunked-prefill-size", str(CHUNK), "--kv-pool-tokens", "65536"],
            # The margin makes auto choose both modes within a batch of 16.
            decode_options=[
                *common,
                *("--device-buffer-size", str(HOT_BUFFER), "--host-pool-tokens", "65536"),
                *("--device-pool-tokens", "16384", "--idle-keys", "host"),
                *("--micro-batch-min-bs", "4", "--speculative-num-steps", str(num_drafts)),
            ],
        ) as pair,
    ):
        yield Subject(pair, prompts, oracle, num_new_tokens, num_drafts)


def generate(
    url: str, prompt: Prompt, hisparse: bool | str, num_new_tokens: int, **fields: bool
) -> dict[str, Any]:
    params = {"max_new_tokens": num_new_tokens}
    answer: dict[str, Any] = generated(url, input_ids=prompt, hisparse=hisparse, params=params, **fields)
    return answer


def send_all(
    subject: Subject, flag_of: Callable[[int], bool | str], num_concurrent: int, **fields: bool
) -> list[dict[str, Any]]:
    def ask(number: int) -> dict[str, Any]:
        prompt, flag = subject.prompts[number], flag_of(number)
        return generate(subject.pair.url, prompt, flag, subject.num_new_tokens, **fields)

    return at_once(ask, range(len(subject.prompts)), num_concurrent)


def check_tokens(subject: Subject, answers: list[dict[str, Any]]) -> None:
    wrong = [
        (len(subject.prompts[number]), answer["meta_info"]["hisparse"], answer["output_ids"], expected)
        for number, (answer, expected) in enumerate(zip(answers, subject.expected, strict=True))
        if answer["output_ids"] != expected
    ]
    assert not wrong, (
        f"{len(wrong)} of {len(answers)} differ; first (length, mode, got, expected): {wrong[0]}"
    )


def check_cached(subject: Subject, answers: list[dict[str, Any]], warm: bool) -> None:
    """A warm cache serves every full page but the one that holds the last token; a cold one nothing. The
    prefill node computes one token at least, where it takes part."""
    for prompt, answer in zip(subject.prompts, answers, strict=True):
        meta = answer["meta_info"]
        num_cacheable = (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        if meta["held_tokens"] < len(prompt) - 1:
            num_cacheable = max(0, len(prompt) - 2) // PAGE_SIZE * PAGE_SIZE
        assert meta["cached_tokens"] == (num_cacheable if warm else 0)


def modes(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["meta_info"]["hisparse"]["mode"] for answer in answers]


def swap_in_counters(pair: Deployment) -> tuple[float, float]:
    samples = pair.decode[0].metrics()
    return (
        samples["hisparse_pd:swap_in_misses_total"],
        samples["hisparse_pd:swap_in_evictions_total"],
    )


def check_swap_in(
    subject: Subject, flag_of: Callable[[int], bool | str], answers: list[dict[str, Any]]
) -> None:
    """Check that a hisparse request that fits its hot buffer never misses, and that any other one hits.

    One of ``auto`` that left its pages for a hot buffer misses what had no room there.
    """
    for number, (prompt, answer) in enumerate(zip(subject.prompts, answers, strict=True)):
        usage = answer["meta_info"]["hisparse"]
        if usage["mode"] == "hisparse":
            fits = len(prompt) + subject.num_new_tokens + subject.num_drafts <= HOT_BUFFER
            never_misses = fits and flag_of(number) is True
            assert (usage["misses"] == 0) if never_misses else (usage["hits"] > 0), (len(prompt), usage)


def check_pass(
    subject: Subject, flag_of: Callable[[int], bool | str], num_concurrent: int, *, warm: bool, **fields: bool
) -> list[dict[str, Any]]:
    """Send all prompts once; check every answer, and that there were misses and evictions."""
    if not warm:
        subject.pair.flush_prefix_caches()
    before = swap_in_counters(subject.pair)
    answers = send_all(subject, flag_of, num_concurrent, **fields)
    check_tokens(subject, answers)
    check_cached(subject, answers, warm)
    check_swap_in(subject, flag_of, answers)
    flags = [flag_of(number) for number in range(len(subject.prompts))]
    for flag, mode in zip(flags, modes(answers), strict=True):
        assert mode == {True: "hisparse", False: "dense", "auto": mode}[flag]
    if True in flags:
        wait_until(
            lambda: all(map(operator.gt, swap_in_counters(subject.pair), before)), "misses and evictions"
        )
    return answers


def in_turn(shift: int) -> Callable[[int], bool | str]:
    """Return the flags in turn, so that over three shifts each prompt meets each flag."""
    return lambda number: FLAGS[(number + shift) % len(FLAGS)]


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.parametrize("subject", SAMPLE, indirect=True)
def test_mixed_batches_of_16_in_every_mode(subject: Subject) -> None:
    """Passes with drafts, of which a node verifies as many as its clock suggests, and one without."""
    for shift in range(2):
        for answer in check_pass(subject, in_turn(shift), BATCH, warm=shift > 0):
            of_drafts = answer["meta_info"]
            assert of_drafts.get("spec_accept_token_num", 0) <= of_drafts.get("spec_draft_token_num", 0)
    counters = subject.pair.decode[0].metrics()
    accepted = counters["hisparse_pd:accepted_draft_tokens_total"]
    assert 0 < accepted < counters["hisparse_pd:drafted_tokens_total"]
    plain = check_pass(subject, in_turn(2), BATCH, warm=True, speculative=False)
    assert all("spec_draft_token_num" not in answer["meta_info"] for answer in plain)


@pytest.mark.I5
@pytest.mark.parametrize("subject", SAMPLE, indirect=True)
def test_conversations_behind_what_the_decode_node_holds(subject: Subject) -> None:
    """A turn's prompt is the last one with its answer, so the oracle's tokens say what comes next. Turns of a
    conversation have different flags, and find what those before have left, in whichever mode."""
    subject.pair.flush_prefix_caches()
    num_held = [0] * len(subject.prompts)
    turn_tokens = subject.num_new_tokens // 3
    for said in range(0, subject.num_new_tokens, turn_tokens):

        def turn(number: int, said: int = said) -> tuple[int, dict[str, Any]]:
            prompt = (*subject.prompts[number], *subject.oracle.tokens[number][:said])
            flag = FLAGS[(number + said // turn_tokens) % len(FLAGS)]
            return len(prompt), generate(subject.pair.url, prompt, flag, turn_tokens)

        answers = at_once(turn, range(len(subject.prompts)), BATCH)
        for number, (num_prompt_tokens, answer) in enumerate(answers):
            expected = subject.oracle.tokens[number][said : said + turn_tokens]
            assert answer["output_ids"] == expected, (num_prompt_tokens, answer["meta_info"])
            assert answer["meta_info"]["held_tokens"] == num_held[number]
            num_held[number] = (num_prompt_tokens + turn_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    samples = subject.pair.decode[0].metrics()
    assert samples["hisparse_pd:held_hits_total"] > 0


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.parametrize("subject", FULL, indirect=True)
@pytest.mark.parametrize("hisparse", [True, False], ids=["hisparse", "dense"])
def test_each_alone(subject: Subject, hisparse: bool) -> None:
    """Prompts have the critical lengths. There is no auto: alone on the node it would be dense."""
    check_pass(replace(subject, prompts=subject.prompts[:BATCH]), lambda _: hisparse, 1, warm=False)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.parametrize("subject", FULL, indirect=True)
@pytest.mark.parametrize("hisparse", FLAGS, ids=["hisparse", "dense", "auto"])
def test_batches_of_16_of_one_flag(subject: Subject, hisparse: bool | str) -> None:
    for warm in (False, True):
        check_pass(subject, lambda _: hisparse, BATCH, warm=warm)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.parametrize("subject", FULL, indirect=True)
def test_mixed_batches_of_16_without_drafts(subject: Subject) -> None:
    for shift in range(3):
        check_pass(subject, in_turn(shift), BATCH, warm=shift > 0)
