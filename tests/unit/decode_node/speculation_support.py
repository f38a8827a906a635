"""A decode node whose steps verify drafts: its prompts, its runners, and how many drafts it verifies when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import decode_node.engine
from decode_node.hot_buffers import HotBuffers
from decode_node.runner import DeviceRunner
from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.model.dsa import DsaModel
from hisparse_pd.settings import DecodeSettings
from hisparse_pd.vocabulary import HisparseFlag
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    Prompt,
    random_prompt,
)

NUM_NEW = 20
TOP_K = 64
MAX_DRAFTS = 3
HOT_BUFFER = (MAX_DRAFTS + 1) * TOP_K + MAX_DRAFTS + 1
"""In which all positions of a step find what they select."""
LENGTHS = [1, 63, 64, 65, HOT_BUFFER - 22, HOT_BUFFER - 3, HOT_BUFFER - 1, HOT_BUFFER, 387, 700]
PROMPTS: list[Prompt] = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]


MakeRunner = Callable[[DecodeSettings, DsaModel, HotBuffers], DeviceRunner]


def make_behind(settings: DecodeSettings, model: DsaModel, hot_buffers: HotBuffers) -> DeviceRunner:
    """Steps as a GPU has them, one behind, without graphs."""
    return DeviceRunner(
        model,
        hot_buffers,
        AttentionKernels.reference(model.spec),
        max_reqs=settings.max_running_requests,
        graph_batches=(),
        min_split_reqs=3,
        is_behind=True,
    )


def harness(
    checkpoint: Checkpoint, ipc_dir: Path, make: MakeRunner = make_behind, **settings: Any
) -> EngineHarness:
    settings = {"device_buffer_size": HOT_BUFFER, "speculative_num_steps": MAX_DRAFTS, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_node.engine, "make_runner", make)
        return EngineHarness(checkpoint, ipc_dir, **settings)


@contextmanager
def drafts(node: EngineHarness, *numbers: int) -> Iterator[None]:
    """Steps verify so many by turns, where their requests can."""
    in_turn = cycle(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            node.engine.steps._draft_choice, "choose", lambda num_reqs, most: min(next(in_turn), most)
        )
        yield


def num_drafts(answer: Answer) -> tuple[int, int]:
    return answer.stats.num_drafted, answer.stats.num_accepted


def by_turns(number: int) -> HisparseFlag:
    return [HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO][number % 3]
