"""Reads from an answer how it was served: tokens, cache, drafts, mode and hits.

The demo, ``accuracy`` and ``streamed_load`` use it for answers of any endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Served:
    """Figures of one answer; those that the answer does not have are empty or 0."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    """The same tokens by the tier that had them."""
    num_held_tokens: int = 0
    """Prompt tokens that the decode node held, and was not sent."""
    num_drafted: int = 0
    """Verified drafts, of which ``num_accepted`` were right."""
    num_accepted: int = 0
    mode: str = ""
    hits: int = 0
    misses: int = 0


def served(usage: Mapping[str, Any]) -> Served:
    """Return the figures in ``usage``: a usage object of OpenAI's endpoints, or ``meta_info`` of
    ``/generate``."""
    prompt, output, own = (
        usage.get(name) or {} for name in ("prompt_tokens_details", "completion_tokens_details", "hisparse")
    )
    tiers = usage.get("cached_tokens_details") or prompt.get("cached_tokens_details") or {}
    num_accepted = usage.get("spec_accept_token_num") or output.get("accepted_prediction_tokens") or 0
    num_rejected = output.get("rejected_prediction_tokens") or 0
    return Served(
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_output_tokens=usage.get("completion_tokens", 0),
        num_cached_tokens=usage.get("cached_tokens") or prompt.get("cached_tokens") or 0,
        cached_by_tier={tier: count for tier, count in tiers.items() if isinstance(count, int)},
        num_held_tokens=prompt.get("held_tokens") or 0,
        num_drafted=usage.get("spec_draft_token_num") or num_accepted + num_rejected,
        num_accepted=num_accepted,
        mode=own.get("mode", ""),
        hits=own.get("hits") or 0,
        misses=own.get("misses") or 0,
    )


def tokens_per_step(num_tokens: int, num_accepted: int) -> float | None:
    """Return the tokens that a decode step yields, or None without steps.

    Each of ``num_tokens`` is a step's own or one of the ``num_accepted`` drafts.
    """
    num_steps = num_tokens - num_accepted
    return num_tokens / num_steps if num_steps > 0 else None
