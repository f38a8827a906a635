"""A resumed prompt has the bits that the prompt's forward and the decode node's steps gave it.

Steps round attention differently. A factor stands for that here, because a CPU sums in one way only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

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
from hisparse_pd.protocol.messages import Room
from tests.unit.prefill_node.support import bootstrap_of, checkpoint, prompt

PAGE_SIZE = 16
NUM_TOKENS, FIRST_STEPPED = 400, 60
"""Tokens that are computed, and the first of them that steps had computed: the original prompt's last one.
The stepped tokens are more than one call of attention takes."""


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
        self.steps.kernels = replace(self.steps.kernels, attention=step_attention)

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


@pytest.fixture(scope="module")
def undisturbed(node: Node) -> tuple[Computed, tuple[Tensor, Tensor]]:
    """What the last step after a prompt selects, and the rows of prompt and steps."""
    node.prefill.run([node.part(0, 0, FIRST_STEPPED)])
    for position in range(FIRST_STEPPED, NUM_TOKENS):
        computed = node.steps.run([node.part(0, position, position + 1)])
    return computed, node.rows(0)


@pytest.mark.I5
@pytest.mark.parametrize(
    ("bounds", "has_neighbour"),
    [
        pytest.param((0, 400), False, id="alone"),
        pytest.param((0, 400), True, id="one forward"),
        pytest.param((0, 60, 400), True, id="cut there"),
        pytest.param((0, 61, 190, 399, 400), True, id="few rows"),
        pytest.param((0, 48, 112, 113, 400), True, id="cut before"),
    ],
)
def test_resumed_tokens_and_the_one_before_are_computed_as_in_steps(
    node: Node,
    undisturbed: tuple[Computed, tuple[Tensor, Tensor]],
    bounds: Sequence[int],
    has_neighbour: bool,
) -> None:
    """No other token is computed so, however forwards are cut, and beside a prompt that resumes nothing."""
    node.prefill.run([node.part(1, 0, NUM_TOKENS)])
    neighbour = node.rows(1)
    node.memory.kv.zero_()
    node.memory.index.zero_()
    num_resumed = NUM_TOKENS - FIRST_STEPPED  # the decode node computes the last of them
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


def test_other_attention_gives_other_rows(
    node: Node, undisturbed: tuple[Computed, tuple[Tensor, Tensor]]
) -> None:
    """This shows that the test above can fail."""
    node.prefill.run([node.part(0, 0, NUM_TOKENS)])
    kv, _ = node.rows(0)
    assert torch.equal(kv[:, :FIRST_STEPPED], undisturbed[1][0][:, :FIRST_STEPPED])
    assert not torch.equal(kv[:, FIRST_STEPPED:], undisturbed[1][0][:, FIRST_STEPPED:])
