"""Steps that verify drafts give the tokens of steps that do not (I5), in every mode, whatever happens.

The engine's own model and draft layer on the CPU, against a prefill double; about half of the drafts are
right. What is expected comes from transformers, or, for drawn tokens, from an engine without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import decode_node.engine
from checkpoints.make_tiny import LIKELY_DRAFTS, write_checkpoint
from checkpoints.oracle import greedy_tokens
from decode_node.graph_runner import GraphRunner
from decode_node.hot_buffers import HotBuffers
from decode_node.runner import make_runner
from decode_node.steps import Runner
from model.attention_kernels import AttentionKernels
from model.dsa import DsaModel
from service.settings import DecodeSettings
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    PrefillDouble,
    Prompt,
    load_checkpoint,
    random_prompt,
)
from vocabulary import HisparseFlag

NUM_NEW = 20
TOP_K = 64
MAX_DRAFTS = 3
HOT_BUFFER = (MAX_DRAFTS + 1) * TOP_K + MAX_DRAFTS + 1
"""In which all positions of a step find what they select."""
LENGTHS = [1, 63, 64, 65, HOT_BUFFER - 22, HOT_BUFFER - 3, HOT_BUFFER - 1, HOT_BUFFER, 387, 700]
PROMPTS: list[Prompt] = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]


MakeRunner = Callable[[DecodeSettings, DsaModel, HotBuffers], Runner]


def make_graph_runner(settings: DecodeSettings, model: DsaModel, hot_buffers: HotBuffers) -> Runner:
    """What a GPU has, without graphs."""
    return GraphRunner(
        model,
        hot_buffers,
        AttentionKernels.reference(model.spec),
        max_reqs=settings.max_running_requests,
        graph_batches=(),
        min_split_reqs=3,
    )


@pytest.fixture(scope="module", params=["v32", "glm"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("speculation") / request.param
    write_checkpoint(path, request.param, draft_gain=LIKELY_DRAFTS)
    return load_checkpoint(path, num_draft_layers=1)


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> dict[Prompt, list[int]]:
    return dict(zip(PROMPTS, greedy_tokens(checkpoint.path, PROMPTS, NUM_NEW), strict=True))


@pytest.fixture(scope="module")
def double(checkpoint: Checkpoint) -> Iterator[PrefillDouble]:
    double = PrefillDouble(checkpoint)
    yield double
    double.close()


@pytest.fixture(scope="module", params=[make_runner, make_graph_runner], ids=["host", "graph"])
def node(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHarness]:
    with closing(harness(checkpoint, tmp_path_factory.mktemp("node"), request.param)) as node:
        yield node


def harness(
    checkpoint: Checkpoint, ipc_dir: Path, make: MakeRunner = make_runner, **settings: Any
) -> EngineHarness:
    settings = {"device_buffer_size": HOT_BUFFER, "speculative_num_steps": MAX_DRAFTS, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_node.engine, "make_runner", make)
        return EngineHarness(checkpoint, ipc_dir, **settings)


@contextmanager
def drafts(node: EngineHarness, choose: Callable[[int], int]) -> Iterator[None]:
    """Every step verifies so many, by the number of its requests."""
    choice = node.engine._draft_choice
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "choose", choose)
        yield


def finish(node: EngineHarness, answers: list[Answer], double: PrefillDouble) -> None:
    node.turn_until(lambda: all(answer.is_over for answer in answers), double)
    assert [answer.failure for answer in answers] == [None] * len(answers)
    assert node.engine.requests.pools.free == node.engine.requests.pools.totals


def num_drafts(answer: Answer) -> tuple[int, int]:
    assert answer.last is not None
    assert answer.last.stats is not None
    return answer.last.stats.num_drafted, answer.last.stats.num_accepted


@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.I6
@pytest.mark.parametrize("num_steps", range(MAX_DRAFTS + 1))
@pytest.mark.parametrize("flag", [HisparseFlag.TRUE, HisparseFlag.FALSE])
def test_tokens_equal_the_oracle_with_any_number_of_drafts(
    expected: dict[Prompt, list[int]],
    double: PrefillDouble,
    node: EngineHarness,
    flag: HisparseFlag,
    num_steps: int,
) -> None:
    with drafts(node, lambda num_reqs: num_steps):
        answers = [node.generate(double, prompt, NUM_NEW, flag) for prompt in PROMPTS]
        finish(node, answers, double)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == expected[prompt], f"{flag}, {len(prompt)} prompt tokens"
    drafted, accepted = (sum(column) for column in zip(*map(num_drafts, answers), strict=True))
    if num_steps:
        assert 0 < accepted < drafted
    else:
        assert drafted == 0
