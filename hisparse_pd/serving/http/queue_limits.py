"""Limits of the samples and prompt tokens that a node takes at once, which its fronts check together.

``EngineLink`` checks each request against them and the shared counts (``board.py``) before it sends anything.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.serving.http.board import InFlightCounts
from hisparse_pd.serving.http.http_errors import ApiError, QueueFull

MAX_QUEUED_TOKENS = 64 << 20
"""Limit of prompt tokens in flight. Beside the requests' bodies, a decode node holds 9 bytes for each: 5 in
its engine (the id, and a share of its page's key) and 4 in a front."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of what may be in flight. A prompt counts once on each rank that has samples of it."""

    max_samples: int
    """Most samples that run and wait together."""
    max_prompt_tokens: int

    @classmethod
    def of(cls, settings: NodeSettings) -> QueueLimits:
        """Return the limits of a node with these settings."""
        max_running = settings.dp_size * settings.max_running_requests
        return cls(max_running + settings.max_queued_requests, MAX_QUEUED_TOKENS)

    def require_place(
        self,
        counts: InFlightCounts,
        num_samples: int,
        num_prompt_tokens: int = 0,
        *,
        are_counted: bool = False,
    ) -> None:
        """Check the limits. Raises QueueFull if these samples do not fit now, ApiError if they never do.

        ``are_counted``: whether these samples are part of the counts already.
        """
        for num, most, name in (
            (num_samples, self.max_samples, "samples"),
            (num_prompt_tokens, self.max_prompt_tokens, "prompt tokens"),
        ):
            if num > most:
                raise ApiError(400, f"{num} {name} are in this request, {most} fit in this node; split it")
        num_in_flight = counts.num_samples - num_samples * are_counted
        if num_in_flight + num_samples > self.max_samples:
            raise QueueFull(
                f"{num_in_flight} requests run or wait here, and {num_samples} more would exceed "
                f"{self.max_samples} (--max-running-requests + --max-queued-requests); try again later"
            )
        num_tokens_in_flight = counts.num_prompt_tokens - num_prompt_tokens * are_counted
        if num_tokens_in_flight + num_prompt_tokens > self.max_prompt_tokens:
            raise QueueFull(
                f"prompts of {num_tokens_in_flight} tokens run or wait here, and {num_prompt_tokens} more "
                f"would exceed {self.max_prompt_tokens}; try again later"
            )


NO_LIMITS = QueueLimits(sys.maxsize, sys.maxsize)
"""The default of ``EngineLink``, for tests and tools: nodes set the limits of their settings."""
