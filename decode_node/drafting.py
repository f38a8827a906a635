"""How many drafts of a request a step can verify.

A draft is accepted while it is what the model draws itself, with that position's own random number. So the
tokens are those of steps without drafts, at any temperature.
"""

from __future__ import annotations

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.decode_node.request import Request

NO_DRAFT = -1
"""In place of a draft: equal to no token that is drawn."""


def smallest_buffer(num_drafts: int, top_k: int) -> int:
    """Entries that a hisparse request of any length needs where steps verify so many drafts at most: the
    top-k of one position, the newest token, and the drafts behind it."""
    return top_k + 1 + num_drafts


def full_buffer(num_drafts: int, top_k: int) -> int:
    """Entries with which a hisparse request of any length can have so many drafts verified in a step: what
    all positions may select, and themselves."""
    num_new = num_drafts + 1
    return num_new * top_k + num_new


def drafts_with_room(capacity: int, *, top_k: int, max_new: int) -> int:
    """Drafts of a step for which a hot buffer of ``capacity`` entries has room; below 0 where it has none to
    spare."""
    return (capacity - max_new) // top_k - 1


def max_verifiable(request: Request, num_drafts: int, *, top_k: int, max_new: int, max_context: int) -> int:
    """Drafts, up to ``num_drafts``, that the request's next step can verify.

    They need slots below the end of the context, and its hot buffer room for what all positions may select,
    unless it holds the whole sequence. ``max_new``: positions of a step at most.
    """
    if not request.is_speculative:
        return 0
    first_new = request.next_seq_len - 1
    num_drafts = min(num_drafts, min(request.reserved_tokens, max_context) - first_new - 1)
    if request.mode is Mode.HISPARSE and first_new + max_new > request.hot_capacity:
        num_drafts = min(num_drafts, drafts_with_room(request.hot_capacity, top_k=top_k, max_new=max_new))
    return max(0, num_drafts)
