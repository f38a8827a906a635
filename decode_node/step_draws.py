"""Draws the tokens of a step in which some request does not just take the likeliest ones.

The runner calls ``StepDraws.plan`` when it launches the step, before the requests enter it, and ``enqueue``
behind the forward. Number and kind of draws change from step to step, so they are in no CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hisparse_pd.core.model.sampling import Sampled, enqueue_sample
from hisparse_pd.core.model.token_counts import CountedRows, to_device
from hisparse_pd.decode_node.forward_results import Forward
from hisparse_pd.decode_node.row_counts import RowCounts
from hisparse_pd.decode_node.step_buffers import StepEntry
from hisparse_pd.decode_node.step_masks import has_grammar, masks_of


class _Place(NamedTuple):
    """A new position of a step, at which a token is drawn."""

    req: int
    """The request's number in the step."""
    num_before: int
    """The request's new positions before this one; as many of its drafts precede the token drawn here, or
    of its prompt's tokens."""


@dataclass(frozen=True)
class StepDraws:
    """The draws of one step, a row for each place."""

    entries: Sequence[StepEntry]
    places: list[_Place]
    output_indices: list[int]
    """The number of output tokens before each place, if all drafts before it are right."""
    counts: CountedRows | None
    """Counts of the tokens before each place; None if no request has penalties or biases."""

    @classmethod
    def plan(cls, entries: Sequence[StepEntry], counts: RowCounts) -> StepDraws | None:
        """Plan the draws of a step, before its requests enter it. Returns None if all requests take the
        likeliest tokens, or all prompts go on."""
        if all(entry.request.is_plain_greedy for entry in entries):
            return None
        places = [
            _Place(req, num_before) for req, entry in enumerate(entries) for num_before in entry.drawn_at
        ]
        if not places:
            return None
        requests = [entries[place.req].request for place in places]
        drafts_before: Sequence[Sequence[int]] = ()
        if any(entry.drafts for entry in entries):
            drafts_before = [_drafts_before(entries[place.req], place) for place in places]
        return cls(
            entries,
            places,
            output_indices=[
                request.next_index + place.num_before for request, place in zip(requests, places, strict=True)
            ],
            counts=counts.of(requests, drafts_before),
        )

    def enqueue(self, forward: Forward, masks: Tensor, eos_token_ids: Sequence[int]) -> Sampled:
        """Draw a token at each place, and put it where ``forward`` has the likeliest one.

        ``masks``: a buffer in main memory for the masks of tokens that grammars allow.
        """
        device, num_new = forward.logits.device, forward.num_new
        requests = [entry.request for entry in self.entries]

        logit_rows: slice | Tensor = slice(len(requests))  # without drafts, each request's only row
        if num_new > 1 or len(self.places) < len(requests):
            logit_rows = to_device([place.req * num_new + place.num_before for place in self.places], device)

        allowed = None
        if has_grammar(requests):
            # ``masks_of`` makes a row for each draft of a request, and one more: one for each place.
            drawing = [entry for entry in self.entries if entry.drawn_at]
            drafts = [entry.drafts[entry.drawn_at.start :] for entry in drawing]
            rows = masks_of([entry.request for entry in drawing], drafts, masks)
            allowed = rows.to(device, non_blocking=True)

        sampled = enqueue_sample(
            forward.logits[logit_rows],
            [requests[place.req].sampling for place in self.places],
            self.output_indices,
            eos_token_ids,
            counts=self.counts,
            masks=allowed,
        )
        forward.token_ids[logit_rows] = sampled.token_ids
        return sampled


def _drafts_before(entry: StepEntry, place: _Place) -> Sequence[int]:
    """Return the drafts before a place, without tokens of the prompt that took the places of drafts."""
    return entry.drafts[entry.drawn_at.start : place.num_before]
