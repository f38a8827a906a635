"""Steps that verify drafts give the tokens of steps that do not (I5), in every mode, whatever happens.

The engine's own model and draft layer on the CPU, against a prefill double; about half of the drafts are
right. Expected tokens come from transformers, or, for drawn ones, from an engine without drafts.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.request_states import RequestState
from tests.unit.decode_node.speculation_support import (
    NUM_NEW,
    PROMPTS,
    TOP_K,
    by_turns,
    drafts,
    exchange_in_every_step,
    harness,
    num_drafts,
)
from tests.unit.decode_node.support import Checkpoint, EngineHarness, Prompt

CANARY = 0xCB
CHECKPOINT = "drafting"

BOTH = pytest.mark.parametrize(
    "checkpoint", ["v32", pytest.param("glm", marks=pytest.mark.slow)], indirect=True
)


@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.I6
@pytest.mark.parametrize(
    ("first", "numbers"),
    [
        *(pytest.param(first, (3,), marks=pytest.mark.slow) for first in (0, 1)),
        (2, (3, 0, 0, 1, 0, 2)),
    ],
)
@BOTH
def test_tokens_equal_the_oracle_with_any_number_of_drafts_in_a_mixed_batch(
    expected: dict[Prompt, list[int]], node: EngineHarness, first: int, numbers: tuple[int, ...]
) -> None:
    """Every fourth request wants no drafts; on a GPU steps without drafts overlap with the one before."""
    with drafts(node, *numbers):
        answers = [
            node.generate(prompt, NUM_NEW, by_turns(number), is_speculative=number % 4 != 1)
            for number, prompt in enumerate(PROMPTS, first)
        ]
        node.finish(answers, expected)
    for number, answer in enumerate(answers, first):
        assert (num_drafts(answer)[0] > 0) == (number % 4 != 1)
    drafted, accepted = num_drafts(*answers)
    assert 0 < accepted < drafted


@pytest.mark.I4
@pytest.mark.parametrize(
    "flag", [HisparseFlag.TRUE, pytest.param(HisparseFlag.FALSE, marks=pytest.mark.slow)]
)
@BOTH
def test_steps_without_drafts_leave_the_draft_layer_what_steps_with_drafts_do(
    node: EngineHarness, flag: HisparseFlag
) -> None:
    """This holds in micro-batches and after a drawn token, too: the next drafts are as good."""
    engine, prompts = node.engine, PROMPTS[6:9]
    memory, is_hisparse = engine.tables.memory, flag is HisparseFlag.TRUE
    kind = PoolKind.HOST if is_hisparse else PoolKind.DEVICE
    kv_pool = memory.k_host if is_hisparse else memory.k_dev
    found: list[list[tuple[list[int], torch.Tensor, torch.Tensor]]] = []
    for num_drafts_first in (0, 3):
        with drafts(node, num_drafts_first):
            answers = [
                node.generate(prompt, 40, flag, temperature=float(number == 0), seed=7)
                for number, prompt in enumerate(prompts)
            ]
            node.begin_together(answers)
            node.turn_until(lambda: all(len(each.token_ids) > 10 for each in answers))  # noqa: B023
        engine.steps.settle()
        requests = engine.requests.select(RequestState.RUNNING)
        requests.sort(key=lambda request: request.num_prompt_tokens)
        left = []
        for request in requests:
            num_tokens = request.num_prompt_tokens + 10
            slots, index_slots = (
                slots_tensor(request.extents(of))[:num_tokens] for of in (kind, PoolKind.INDEX)
            )
            kv = kv_pool[-1, slots].view(torch.float32).clone()
            keys = memory.index[-1, index_slots].view(torch.float32)
            left.append((request.output_token_ids[:10], kv, keys))
        found.append(left)
        for answer in answers:
            node.leave(answer)
        node.turn_until(lambda: engine.requests.pools.free == engine.requests.pools.totals)
    for without, with_drafts in zip(*found, strict=True):
        assert without[0] == with_drafts[0]
        for one, other in zip(without[1:], with_drafts[1:], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.I5
def test_drawn_tokens_are_those_of_their_seeds_with_any_number_of_drafts(node: EngineHarness) -> None:
    texts = []
    num_accepted = 0
    for numbers in ((0,), (3, 1, 2)):
        with drafts(node, *numbers):
            answers = [
                node.generate(
                    prompt,
                    NUM_NEW,
                    by_turns(seed),
                    temperature=(1.0, 0.3)[seed % 2],
                    top_p=0.9 if seed % 3 else 1.0,
                    repetition_penalty=1.2 if seed == 2 else 1.0,
                    seed=seed,
                )
                for prompt in PROMPTS[3:7:3]
                for seed in range(3)
            ]
            node.finish(answers)
        texts.append([answer.token_ids for answer in answers])
        num_accepted += num_drafts(*answers)[1]
    assert texts[1] == texts[0]
    assert len({tuple(text) for text in texts[0]}) == len(texts[0])
    assert num_accepted > 0


def test_logprobs_are_those_without_drafts(node: EngineHarness) -> None:
    logged = []
    for num_steps in (0, 3):
        with drafts(node, num_steps):
            answers = [
                node.generate(PROMPTS[4], NUM_NEW, by_turns(number), num_logprobs=number)
                for number in range(3)
            ]
            beside = node.generate(PROMPTS[5], NUM_NEW)
            node.finish([*answers, beside])
        assert [len(answer.logprobs) for answer in answers] == [NUM_NEW] * 3
        logged.append([logprob for answer in answers for logprob in answer.logprobs])
    for without, with_drafts in zip(*logged, strict=True):
        assert with_drafts.token_id == without.token_id
        assert with_drafts.logprob == pytest.approx(without.logprob, abs=1e-4)
        assert [token_id for token_id, _ in with_drafts.top] == [token_id for token_id, _ in without.top]


@pytest.mark.I2
def test_a_request_ends_at_its_stop_token_or_length_wherever_that_is_among_accepted_ones(
    expected: dict[Prompt, list[int]], node: EngineHarness
) -> None:
    prompt = PROMPTS[8]
    tokens = expected[prompt]
    stops = [number for number, token in enumerate(tokens[:9]) if token not in tokens[:number]]
    assert len(stops) > 5
    with drafts(node, 3):
        at_stops = [
            node.generate(prompt, NUM_NEW, by_turns(stop), stop_token_ids=(tokens[stop],)) for stop in stops
        ]
        lengths = [node.generate(prompt, 1 + number, by_turns(number)) for number in range(6)]
        node.finish([*at_stops, *lengths])
    for stop, answer in zip(stops, at_stops, strict=True):
        assert answer.token_ids == tokens[: stop + 1]
        assert answer.last is not None
        assert (answer.last.finish_reason, answer.last.matched_stop_token) == ("stop", tokens[stop])
    assert [answer.token_ids for answer in lengths] == [tokens[: 1 + number] for number in range(6)]
    assert [answer.last and answer.last.finish_reason for answer in lengths] == ["length"] * 6
    for answer in (*at_stops, *lengths):
        drafted, accepted = num_drafts(answer)
        assert accepted <= max(0, len(answer.token_ids) - 2)
        assert accepted <= drafted


def test_tokens_that_may_not_come_yet_are_forbidden_at_every_position(
    expected: dict[Prompt, list[int]], node: EngineHarness
) -> None:
    """min_tokens ends in the middle of a step: tokens that would stop a request earlier are not drawn."""
    prompt = PROMPTS[8]
    free = expected[prompt]
    stop_token_ids = tuple(set(free[1:9]) - {free[0]})
    texts = []
    for num_steps in (0, 3):
        with drafts(node, num_steps):
            bound = [
                node.generate(prompt, NUM_NEW, min_new_tokens=number, stop_token_ids=stop_token_ids)
                for number in range(2, 9, 3)
            ]
            node.finish(bound)
        texts.append([answer.token_ids for answer in bound])
    assert texts[0] == texts[1]
    assert all(len(text) >= number for number, text in zip(range(2, 9, 3), texts[0], strict=True))


@pytest.mark.I4
@pytest.mark.I5
def test_only_what_was_accepted_reaches_the_host_and_all_of_it_does(
    expected: dict[Prompt, list[int]], node: EngineHarness
) -> None:
    engine = node.engine
    k_host, k_dev = engine.tables.memory.k_host, engine.tables.memory.k_dev
    prompts = PROMPTS[4:]
    layers_of_group = engine.tables.spec.layers_of_group[:-1]  # without the draft layer's
    num_rejected = 0
    in_turn = cycle((1, 2))  # on a GPU steps overlap in all turns but the last
    with drafts(node, 3):
        answers = [node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in prompts]
        while not all(answer.is_over for answer in answers):
            num_turns = next(in_turn)
            running = engine.requests.select(RequestState.RUNNING)
            before = {}
            for request in running:
                kinds = (PoolKind.HOST, PoolKind.LOOKUP)
                slots, looked_up = (
                    slots_tensor(request.extents(kind))[request.num_kv_tokens :] for kind in kinds
                )
                k_host[:, slots] = CANARY
                before[request.request_id] = request.num_kv_tokens, slots, looked_up
            for _ in range(num_turns):
                node.turn()
            engine.steps.settle()
            for request in engine.requests.select(RequestState.RUNNING):
                if request.request_id not in before:
                    continue
                num_tokens, slots, looked_up = before[request.request_id]
                num_written = request.num_kv_tokens - num_tokens
                num_rejected += num_written < 4 * num_turns
                assert (k_host[:, slots[num_written:]] == CANARY).all(), "a rejected draft's"
                for group, layers in enumerate(layers_of_group):
                    hot = engine.tables.state.lookup_to_hot[group, looked_up[:num_written]]
                    is_hot = hot >= 0
                    assert is_hot[-1:].all()
                    at = engine.tables.state.entry_slots(request.req_row)[hot[is_hot]]
                    written = slots[:num_written][is_hot]
                    for layer in layers:
                        assert torch.equal(k_host[layer, written], k_dev[layer, at])
    assert num_rejected > NUM_NEW // 2
    node.finish(answers, expected)


@pytest.mark.I4
@pytest.mark.I5
def test_every_request_survives_another_hot_buffer_in_every_step(
    expected: dict[Prompt, list[int]], node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hot buffers, and pages of residents, are lost with all that they hold, rejected drafts included."""
    prompts = PROMPTS[4:]
    # The smallest, with room for no draft, then for one, two and three; 0: resident.
    sizes = cycle([TOP_K + 4, 0, 2 * TOP_K + 4, 0, 0, 3 * TOP_K + 4, 4 * TOP_K + 4])
    with drafts(node, 3):
        answers = [node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in prompts]
        num_exchanges = exchange_in_every_step(node, answers, sizes, monkeypatch)
    assert num_exchanges > len(prompts) * NUM_NEW // 3
    node.finish(answers, expected)


# --- other sizes ---------------------------------------------------------------------------------------


@pytest.mark.I5
def test_slots_that_come_one_by_one_and_pages_that_go(
    checkpoint: Checkpoint, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    """Pools are small: drafts lack slots, hot buffers shrink, dense requests are retracted, others wait."""
    prompts = PROMPTS[1:]
    pools: dict[str, Any] = {"host_pool_tokens": 1300, "device_pool_tokens": 1000, "max_running_requests": 10}
    small = harness(checkpoint, tmp_path, page_size=4, growth_pages=1, **pools)
    with closing(small) as node, drafts(node, 3, 3, 1):
        answers = [node.generate(prompt, NUM_NEW, by_turns(number)) for number, prompt in enumerate(prompts)]
        node.finish(answers, expected)
    assert num_drafts(*answers)[1] > 0


@pytest.mark.I6
@pytest.mark.parametrize("most_drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_context_can_be_filled_to_its_end(
    checkpoint: Checkpoint, expected: dict[Prompt, list[int]], tmp_path: Path, most_drafts: int
) -> None:
    """The last token may be one past the context, where no draft is placed, whether a page ends or not."""
    prompt = PROMPTS[3]  # 65 tokens
    for context_length in (65, 68, 64 + NUM_NEW):
        small = replace(checkpoint, spec=replace(checkpoint.spec, context_length=context_length))
        ipc_dir = tmp_path / str(context_length)
        ipc_dir.mkdir()
        settings: dict[str, Any] = {"page_size": 4, "speculative_num_steps": most_drafts}
        with closing(harness(small, ipc_dir, **settings)) as node, drafts(node, most_drafts):
            too_long = node.generate((*prompt, *[65] * (context_length - 64)), 1)
            answers = [node.generate(prompt, NUM_NEW, flag) for flag in HisparseFlag]
            node.finish(answers)
            node.failure_of(too_long, status=400, error=f"allowed are 1 to {context_length}")
        num_tokens = min(NUM_NEW, context_length + 1 - len(prompt))
        assert [answer.token_ids for answer in answers] == [expected[prompt][:num_tokens]] * 3
