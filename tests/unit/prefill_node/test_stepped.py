"""A prompt's tail behind its last whole page, and its resumed tokens, get the bits of a decode node's steps.

Steps round attention differently. A factor stands for that here, because a CPU sums in one way only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.attention import TORCH, TorchAttention
from hisparse_pd.kernels.kv_format import KvFormat
from hisparse_pd.prefill_node.compute import Computed, PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.prefill_node.short_forwards import ShortForwards, _Captured
from hisparse_pd.prefill_node.sizing import GraphSize
from hisparse_pd.protocol.messages import Room
from tests.unit.prefill_node.support import bootstrap_of, checkpoint, prompt

PAGE_SIZE = 16
NUM_TOKENS = 410
"""Tokens that are computed; the next one is the prompt's last."""
FIRST_STEPPED = {0: 400, 350: 48}
"""The first stepped position by the number of resumed tokens: where the page of the last other token begins.
350 are more than one call of attention takes."""


@dataclass
class StepAttention:
    kv_format: KvFormat
    reason: str = ""
    name: str = TORCH

    def attend(
        self,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        num_columns: Tensor | None = None,
    ) -> Tensor:
        exact = TorchAttention(self.kv_format)
        return 1.01 * exact.attend(q, layer_pool, device_slots, scale, num_columns)


class Node:
    """The pages of two prompts of one length, and forwards over them."""

    def __init__(self, path: Path) -> None:
        self.spec, self.model = checkpoint(path, 0)
        self.pages_each = -(-NUM_TOKENS // PAGE_SIZE)
        num_slots = 2 * self.pages_each * PAGE_SIZE
        self.memory = PrefillMemory(self.spec, num_slots=num_slots, num_aux_slots=1, device="cpu")
        self.prefill, self.steps = (PromptRunner(self.model, self.memory, PAGE_SIZE) for _ in range(2))
        step_attention = StepAttention(self.spec.item_format)
        self.prefill.kernels = replace(self.prefill.kernels, step_attention=step_attention)
        self.steps.kernels = replace(
            self.steps.kernels, attention=step_attention, step_attention=step_attention
        )

    def part(self, number: int, start: int, stop: int, num_resumed: int = 0) -> tuple[PrefillRequest, Chunk]:
        """Return a chunk of the prompt with this number, and its room."""
        tokens = prompt(number, NUM_TOKENS + 1)
        bootstrap = bootstrap_of(number, tokens, num_resumed_tokens=num_resumed)
        request = PrefillRequest(Peer("", "", b"", PAGE_SIZE, {}, 0.0), bootstrap, 0.0)
        request.page_ids = list(range(number * self.pages_each, (number + 1) * self.pages_each))
        return request, Chunk(Room(number), start, stop, admits=start == 0)

    def rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the KV and the indexer keys of a prompt."""
        first = number * self.pages_each * PAGE_SIZE
        pools = self.memory.kv, self.memory.index
        kv, index_keys = (pool[:, first : first + NUM_TOKENS].clone() for pool in pools)
        return kv, index_keys


@pytest.fixture(scope="module")
def node(tiny: Path) -> Node:
    return Node(tiny)


@pytest.fixture(
    scope="module",
    params=[pytest.param(0, id="a tail"), pytest.param(350, id="resumed", marks=pytest.mark.slow)],
)
def num_resumed(request: pytest.FixtureRequest) -> int:
    num_resumed: int = request.param
    return num_resumed


@pytest.fixture(scope="module")
def undisturbed(node: Node, num_resumed: int) -> tuple[Computed, tuple[Tensor, Tensor]]:
    """What the last step after a prompt selects, and the rows of prompt and steps."""
    first = FIRST_STEPPED[num_resumed]
    node.prefill.run([node.part(0, 0, first)])
    for position in range(first, NUM_TOKENS):
        computed = node.steps.run([node.part(0, position, position + 1)])
    return computed, node.rows(0)


@pytest.mark.I5
@pytest.mark.parametrize(
    ("bounds", "has_neighbour"),
    [
        pytest.param((0, 410), False, id="alone"),
        pytest.param((0, 410), True, id="one forward"),
        pytest.param((0, 48, 400, 410), True, id="cut there", marks=pytest.mark.slow),
        pytest.param((0, 61, 190, 403, 409, 410), True, id="few rows"),
        pytest.param((0, 32, 112, 113, 399, 410), True, id="cut before"),
    ],
)
def test_the_last_tokens_are_computed_as_in_steps(
    node: Node,
    num_resumed: int,
    undisturbed: tuple[Computed, tuple[Tensor, Tensor]],
    bounds: Sequence[int],
    has_neighbour: bool,
) -> None:
    """No other token is computed so, however forwards are cut, and beside a prompt that resumes nothing."""
    node.prefill.run([node.part(1, 0, NUM_TOKENS)])
    neighbour = node.rows(1)
    node.memory.kv.zero_()
    node.memory.index.zero_()
    for start, stop in pairwise(bounds):
        batch = [node.part(0, start, stop, num_resumed)]
        if has_neighbour:
            batch.insert(start % 2, node.part(1, start, stop))
        computed = node.prefill.run(batch)
    expected, rows = undisturbed
    assert torch.equal(computed.hints[Room(0)], expected.hints[Room(0)])
    for found, wanted in zip(node.rows(0), rows, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(node.rows(1), neighbour, strict=True):
        assert not has_neighbour or torch.equal(found, wanted)


class StandInGraph:
    """Computes anew what a CUDA graph would replay."""

    def __init__(self, short: ShortForwards, size: GraphSize, replayed: list[GraphSize]) -> None:
        self.short, self.size, self.replayed = short, size, replayed

    def replay(self) -> None:
        self.replayed.append(self.size)
        captured = self.short._captured[self.size]
        captured.hidden.copy_(self.short._forward(captured.token_ids, captured.kv))


@pytest.mark.I5
@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        pytest.param((0, 410), {0: [(512, 15)], 350: []}, id="whole"),
        pytest.param(
            (0, 48, 400, 410), {0: [(64, 15), (512, 15), (16, 16)], 350: [(64, 15), (16, 16)]}, id="cut there"
        ),
        pytest.param(
            (0, 240, 400, 410),
            {0: [(512, 15)] * 2 + [(16, 16)], 350: [(512, 200), (512, 200), (16, 16)]},
            id="many stepped",
        ),
        pytest.param((0, 395, 410), {0: [(512, 15), (16, 15)], 350: [(16, 16)]}, id="both kinds"),
    ],
)
def test_graphs_of_short_forwards_give_the_same_rows(
    node: Node,
    num_resumed: int,
    undisturbed: tuple[Computed, tuple[Tensor, Tensor]],
    bounds: Sequence[int],
    sizes: dict[int, list[GraphSize]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph has room for so many tokens and stepped tokens. It attends to one of its padding as in steps if
    no other is stepped."""
    short, replayed = node.prefill.short, list[GraphSize]()
    monkeypatch.setattr(short, "_kernels", node.prefill.kernels)
    captured: dict[GraphSize, _Captured] = {}
    for size in (GraphSize(*each) for each in ((16, 16), (16, 15), (64, 15), (512, 15), (512, 200))):
        token_ids, kv = short._padding(size)
        hidden = torch.zeros((size.num_tokens, node.spec.hidden_size), dtype=node.spec.dtype)
        graph: Any = StandInGraph(short, size, replayed)
        captured[size] = _Captured(graph, token_ids, kv, hidden)
    monkeypatch.setattr(short, "_captured", captured)
    node.memory.kv.zero_()
    node.memory.index.zero_()
    for start, stop in pairwise(bounds):
        computed = node.prefill.run([node.part(0, start, stop, num_resumed)])
    assert replayed == sizes[num_resumed]
    expected, rows = undisturbed
    assert torch.equal(computed.hints[Room(0)], expected.hints[Room(0)])
    for found, wanted in zip(node.rows(0), rows, strict=True):
        assert torch.equal(found, wanted)


def test_other_attention_gives_other_rows(
    node: Node, num_resumed: int, undisturbed: tuple[Computed, tuple[Tensor, Tensor]]
) -> None:
    """This shows that the test above can fail."""
    prompt_only = replace(node.prefill.kernels, step_attention=node.prefill.kernels.attention)
    with patch.object(node.prefill, "kernels", prompt_only):
        node.prefill.run([node.part(0, 0, NUM_TOKENS)])
    (kv, _), first = node.rows(0), FIRST_STEPPED[num_resumed]
    assert torch.equal(kv[:, :first], undisturbed[1][0][:, :first])
    assert not torch.equal(kv[:, first:], undisturbed[1][0][:, first:])
