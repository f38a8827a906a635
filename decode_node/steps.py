"""What a decode step is to the engine: a batch in, its tokens out.

``launch`` enqueues a step and returns; ``Launched.result`` waits for its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_node.request import Request
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.vocabulary import TokenLogprob


@dataclass(frozen=True)
class StepResult:
    """Of one request."""

    token_ids: list[int]
    """What it goes on with: the accepted drafts, and one token more."""
    logprobs: list[TokenLogprob | None]
    """Of each of these tokens."""
    error: str
    """Empty where the kernels found nothing."""
    counters: tuple[int, int, int]
    """Hits, misses and evictions of its row so far."""
    num_drafted: int
    """Drafts that were verified."""
    drafts: list[int]
    """What the draft layer guesses to follow; nothing after a step without drafts."""


class Launched(Protocol):
    """A step that was enqueued."""

    @property
    def batch(self) -> Sequence[Request]: ...

    @property
    def num_new(self) -> int:
        """As of ``NodeStep``."""

    @property
    def most_drafts(self) -> Sequence[int]:
        """Of each request, how many drafts it verifies at most: as long as it is in flight, nobody knows how
        many of them count."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next step may be launched before this one's result was taken."""

    def draw(self) -> None:
        """Enqueue the draws, and what follows from them. To be called once, when the step before is read:
        what grammars allow depends on its tokens. Where nobody has one, that was done at the launch.

        Raises what sampling raises.
        """

    def wait(self) -> None:
        """Until no memory of the step's requests is read or written by it any more. What ``draw`` is still to
        enqueue touches none, unless the step verifies drafts."""

    def result(self) -> list[StepResult]:
        """Of each request. Waits. To be taken once, before the step after the next is launched."""


class Runner(Protocol):
    def would_split(self, batch: Sequence[Request]) -> bool:
        """Whether the batch runs as micro-batches. Where one rank's does, all ranks' do."""

    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        """Enqueue one step, a token for each request, of which another rank may have more.

        Raises what the model raises.
        """


def next_index(request: Request) -> int:
    """Output tokens before the one that the next step samples; more where drafts in flight are right."""
    return len(request.output_token_ids) + request.num_in_flight


def is_plain_greedy(request: Request) -> bool:
    """Whether its next token is that of the largest logit, and nobody asks for more than that."""
    params = request.sampling
    if params.grammar:
        return False
    is_free = next_index(request) >= params.min_new_tokens and not request.changes_logits
    return params.temperature == 0 and params.num_logprobs is None and is_free
