"""The decode engine against a prefill double: greedy tokens equal those of transformers' generate (I5).

Real model, real Mooncake over TCP, real control sockets; only the prefill node's decisions are the test's.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node import scheduler
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState, RunStage
from tests.unit.decode_node.speculation_support import exchange_in_every_step
from tests.unit.decode_node.support import TIMES, Checkpoint, EngineHarness, Prompt, random_prompt

NUM_NEW = 10
HOT_BUFFER = 128
TOP_K = 64
NODE: dict[str, Any] = {"device_buffer_size": HOT_BUFFER}
LENGTHS = [1, 63, 64, 65, 66, HOT_BUFFER - 1, HOT_BUFFER, HOT_BUFFER + 1, 200, 387]
PROMPTS: list[Prompt] = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]

EACH_MODEL = pytest.mark.parametrize(
    "checkpoint",
    ["v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm", "mistral"))],
    indirect=True,
)
"""Checkpoints whose layers share indexers and hot buffers in different ways."""


def small_node(checkpoint: Checkpoint, tmp_path: Path, **pools: Any) -> EngineHarness:
    return EngineHarness(checkpoint, tmp_path, **NODE, page_size=4, **pools)


@pytest.mark.I2
@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.I6
@pytest.mark.parametrize(
    "flag", [HisparseFlag.TRUE, HisparseFlag.FALSE, pytest.param(HisparseFlag.AUTO, marks=pytest.mark.slow)]
)
@EACH_MODEL
def test_greedy_tokens_of_a_batch_equal_the_oracle(
    expected: dict[Prompt, list[int]], shared_node: EngineHarness, flag: HisparseFlag
) -> None:
    before = shared_node.engine.tables.totals(())
    answers = [shared_node.generate(prompt, NUM_NEW, flag) for prompt in PROMPTS]
    shared_node.finish(answers, expected)
    each = [(stats.hits, stats.misses, stats.evictions) for stats in (answer.stats for answer in answers)]
    assert shared_node.engine.tables.totals(()) == tuple(map(sum, zip(before, *each, strict=True)))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.phases == ["queue", "landing", "first_step"]
        assert answer.prefill == ([TIMES] if len(prompt) > 1 else []), "one token needs no prefill node"
        stats = answer.stats
        match flag:
            case HisparseFlag.TRUE:
                assert stats.mode is Mode.HISPARSE
                assert stats.hits > 0
                # A hot buffer that holds the whole life never misses; one that does not must.
                if len(prompt) + NUM_NEW <= HOT_BUFFER:
                    assert stats.misses == 0
                if len(prompt) > 2 * HOT_BUFFER:
                    assert stats.misses > 0
                    assert stats.evictions > 0
            case HisparseFlag.FALSE | HisparseFlag.AUTO:
                assert stats.mode is Mode.DENSE
                assert (stats.hits, stats.misses) == (0, 0)


@pytest.mark.I6
def test_index_pages_may_be_scattered(
    checkpoint: Checkpoint, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    """A request gets the pages that a short one left between two long ones, and the rest of the pool."""
    before, between, after, prompt = (PROMPTS[LENGTHS.index(length)] for length in (66, 129, 65, 200))
    with closing(
        EngineHarness(checkpoint, tmp_path, **NODE, page_size=4, index_pool_tokens=128 + 132 + 128 + 100)
    ) as node:
        long_lived = [node.generate(before, 14, HisparseFlag.TRUE)]
        short_lived = node.generate(between, 2, HisparseFlag.TRUE)
        long_lived.append(node.generate(after, 14, HisparseFlag.TRUE))
        node.begin_together([*long_lived, short_lived])
        node.turn_until(lambda: short_lived.is_over)
        answer = node.generate(prompt, NUM_NEW, HisparseFlag.TRUE)
        node.begin_together([*long_lived, answer])
        (scattered,) = (r for r in node.engine.requests.all() if r.num_prompt_tokens == len(prompt))
        assert len(scattered.owned[PoolKind.INDEX]) == 2
        node.finish([*long_lived, answer])
        assert answer.token_ids == expected[prompt]


@pytest.mark.I5
@EACH_MODEL
def test_mixed_modes_share_a_batch_under_pressure(
    checkpoint: Checkpoint, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    """The device pool is too small: hot buffers shrink for the next in the queue, requests come and go."""
    flags = [HisparseFlag.FALSE, HisparseFlag.TRUE, HisparseFlag.TRUE, HisparseFlag.AUTO]
    prompts = sorted(PROMPTS, key=lambda prompt: len(prompt) % 200, reverse=True)
    with closing(
        EngineHarness(
            checkpoint, tmp_path, **NODE, page_size=4, device_pool_tokens=680, max_running_requests=10
        )
    ) as node:
        answers = [
            node.generate(prompt, NUM_NEW, flags[number % len(flags)])
            for number, prompt in enumerate(prompts)
        ]
        node.begin_together(answers)
        node.finish(answers, expected)
        node.stats = None
        node.turn_until(lambda: node.stats)
        assert node.stats is not None
        misses = node.stats.counters["swap_in_misses_total"]
        assert misses > 0
        layers_per_group = checkpoint.spec.num_kv_layers / checkpoint.spec.num_hot_groups
        bytes_per_miss = checkpoint.spec.item_bytes * layers_per_group
        assert node.stats.counters["swap_in_bytes_total"] == misses * bytes_per_miss
        assert node.stats.counters["retractions_total"] > 0


@pytest.mark.I4
@pytest.mark.I5
@EACH_MODEL
def test_a_growing_dense_request_is_spilled_and_goes_on_as_hisparse(
    checkpoint: Checkpoint, expected: dict[Prompt, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for almost two requests of 200 tokens, which grow side by side to 212 slots each."""
    prompt = PROMPTS[LENGTHS.index(200)]
    with closing(
        EngineHarness(checkpoint, tmp_path, **NODE, page_size=4, device_pool_tokens=412, growth_pages=1)
    ) as node:
        tables = node.engine.tables
        memory, retract = tables.memory, tables.retract

        def retract_and_compare(request: Request) -> None:
            retract(request)
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids) - 1
            host_slots, device_slots = (
                slots_tensor(request.owned[kind])[:num_tokens] for kind in (PoolKind.HOST, PoolKind.DEVICE)
            )
            assert torch.equal(memory.k_host[:, host_slots], memory.k_dev[:, device_slots])

        monkeypatch.setattr(tables, "retract", retract_and_compare)
        answers = [node.generate(prompt, NUM_NEW, HisparseFlag.FALSE) for _ in range(2)]
        node.begin_together(answers)
        node.finish(answers, expected)
        kept, spilled = sorted((answer.stats for answer in answers), key=lambda stats: stats.num_retractions)
        assert [kept.num_retractions, spilled.num_retractions] == [0, 1]
        assert spilled.mode is Mode.HISPARSE
        assert spilled.hits > 0


@pytest.mark.I4
@pytest.mark.I5
@EACH_MODEL
def test_every_running_request_survives_another_hot_buffer_in_every_step(
    expected: dict[Prompt, list[int]], shared_node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hot buffers give up is lost after each step, with all that it held: the host has everything by
    then (I4)."""
    prompts = PROMPTS[4:]
    answers = [shared_node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in prompts]
    num_exchanges = exchange_in_every_step(shared_node, answers, cycle((TOP_K + 1, HOT_BUFFER)), monkeypatch)
    assert num_exchanges > len(prompts) * NUM_NEW // 2
    undisturbed = [shared_node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in prompts]
    shared_node.finish([*answers, *undisturbed], expected)
    for answer, other in zip(answers, undisturbed, strict=True):
        num_selected = [each.stats.hits + each.stats.misses for each in (answer, other)]
        assert num_selected[0] == num_selected[1], "counts of rows that were given up"


def test_nobody_waits_for_messages_before_it_grows(
    shared_node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(shared_node.engine.limits, growth_tokens=1)
    monkeypatch.setattr(shared_node.engine.steps.next_plan, "limits", limits)
    answer = shared_node.generate(PROMPTS[LENGTHS.index(HOT_BUFFER - 1)], 16, HisparseFlag.TRUE)
    shared_node.turn_until(lambda: answer.token_ids)
    (request,) = shared_node.engine.requests.select(RequestState.RUNNING)
    waits: list[float] = []
    monkeypatch.setattr(shared_node.engine.poller, "wait", waits.append)
    num_growths = 0
    while request.state is RequestState.RUNNING:
        reserved = request.reserved_tokens
        shared_node.turn()
        num_growths += request.reserved_tokens > reserved
    assert num_growths >= 1
    assert set(waits) == {0.0}
    shared_node.turn_until(lambda: answer.is_over)


@pytest.mark.I8
def test_the_queue_goes_on_at_once_behind_a_plan_that_is_cut(
    shared_node: EngineHarness, expected: dict[Prompt, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_ADMITTED", 1)
    engine = shared_node.engine
    waits: list[tuple[bool, float]] = []
    wait = engine.poller.wait

    def noted(max_wait_secs: float) -> None:
        waits.append((engine.steps.is_plan_cut, max_wait_secs))
        wait(max_wait_secs)

    monkeypatch.setattr(engine.poller, "wait", noted)
    answers = [shared_node.generate(PROMPTS[3], NUM_NEW, HisparseFlag.TRUE) for _ in range(3)]
    shared_node.finish(answers, expected)
    assert {secs for is_cut, secs in waits if is_cut} == {0.0}


def test_a_request_that_sits_out_is_counted_and_goes_on_where_it_was(
    checkpoint: Checkpoint, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    """Two lives of 209 positions in a host pool of 416: one lacks slots until the other ends."""
    prompt = PROMPTS[LENGTHS.index(200)]
    with closing(
        EngineHarness(checkpoint, tmp_path, **NODE, page_size=4, growth_pages=1, host_pool_tokens=416)
    ) as node:
        answers = [node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for _ in range(2)]

        def sit_out() -> list[Request]:
            running = node.engine.requests.select(RequestState.RUNNING)
            return [request for request in running if request.run_stage is RunStage.SITS_OUT]

        node.begin_together(answers)
        node.turn_until(lambda: len(sit_out()) == 1)
        with node.without_steps():
            node.turn_until(lambda: node.stats and node.stats.gauges["num_paused_reqs"] == 1)
        node.finish(answers, expected)
        assert [answer.stats.num_retractions for answer in answers] == [0, 0]
