"""What answers say of drafts, for what shows or measures a pair that makes some."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRAINED_DRAFTS = 3
"""Of a step, that the retrieval model's MTP layer was trained to make."""


def has_draft_layer(model_path: Path) -> bool:
    """Whether the checkpoint's configuration declares an MTP layer. Raises OSError and ValueError."""
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("num_nextn_predict_layers"))


def drafts_of(usage: Mapping[str, Any]) -> tuple[int, int]:
    """Drafts that were verified, and those of them that were accepted; zeros where there were none.

    ``usage``: a usage object of OpenAI's endpoints, or ``meta_info`` of ``/generate``.
    """
    if "spec_draft_token_num" in usage:
        return usage["spec_draft_token_num"], usage["spec_accept_token_num"]
    details = usage.get("completion_tokens_details") or {}
    num_accepted = details.get("accepted_prediction_tokens") or 0
    return num_accepted + (details.get("rejected_prediction_tokens") or 0), num_accepted


def tokens_per_step(num_tokens: int, num_accepted: int, num_answers: int = 1) -> float | None:
    """Of the decode steps of so many answers with ``num_tokens`` together; None when there were no steps.

    An answer's first token is the prefill node's. Each other one is a step's own, or an accepted draft.
    """
    num_decoded = num_tokens - num_answers
    num_steps = num_decoded - num_accepted
    return num_decoded / num_steps if num_steps > 0 else None
