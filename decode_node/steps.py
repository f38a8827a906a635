"""What a decode step is to the engine: a batch in, its tokens out; and what of it any runner needs.

``launch`` enqueues a step and returns; ``Launched.result`` waits for its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_node.hot_buffers import HotBuffers
from decode_node.request import Request
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.vocabulary import TokenLogprob
from kernels.hot_state import HotBufferError


@dataclass(frozen=True)
class StepResult:
    """A value for each request of the step's batch. ``errors``: empty where the kernels found nothing."""

    token_ids: list[list[int]]
    """What the request goes on with: the accepted drafts, and one token more."""
    logprobs: list[list[TokenLogprob | None]]
    """Of each of these tokens."""
    errors: list[str]
    counters: list[tuple[int, int, int]]
    num_drafted: list[int]
    """Drafts that were verified."""
    drafts: list[list[int]]
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

    def result(self) -> StepResult:
        """Waits. To be taken once, before the step after the next is launched."""


class Runner(Protocol):
    def would_split(self, batch: Sequence[Request]) -> bool:
        """Whether the batch runs as micro-batches. Where one rank's does, all ranks' do."""

    def launch(self, batch: Sequence[Request], step: NodeStep) -> Launched:
        """Enqueue one step, a token for each request, of which another rank may have more.

        Raises what the model raises.
        """


def take_drafts(
    batch: Sequence[Request], num_new: int, hot_buffers: HotBuffers, unread: Sequence[bool]
) -> tuple[list[list[int]], list[int]]:
    """What each request's next step of ``num_new`` positions verifies, and how many at most.

    ``unread``: of which requests the drafts are still on the device; none are listed for these.
    """
    drafts, most_drafts = [], []
    for request, is_unread in zip(batch, unread, strict=True):
        most = hot_buffers.max_verifiable(request, num_new - 1) if num_new > 1 else 0
        drafts.append(request.take_drafts(0 if is_unread else most))
        most_drafts.append(most if is_unread else len(drafts[-1]))
    return drafts, most_drafts


def step_result(
    token_ids: list[list[int]],
    logprobs: list[list[TokenLogprob | None]],
    row_results: list[list[int]],
    num_drafted: list[int],
    drafts: list[list[int]],
) -> StepResult:
    """``row_results``: as ``HotBuffers.row_results``."""
    return StepResult(
        token_ids,
        logprobs,
        [str(HotBufferError(flags).name) if flags else "" for flags, *_ in row_results],
        [(hits, misses, evictions) for _, hits, misses, evictions in row_results],
        num_drafted,
        drafts,
    )


def check_slots(batch: Sequence[Request]) -> None:
    """Raises RuntimeError when the newest token of a request has no slot."""
    for request in batch:
        if not request.has_slots_for_next:
            raise RuntimeError(
                f"room {request.room}: no slot for position {request.next_seq_len - 1}, it has "
                f"{request.reserved_tokens}"
            )


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
