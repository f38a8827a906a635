"""How many drafts of a request a step can verify, and the hot buffers that this takes. Pure.

``StepLine`` and the runner ask for the number of drafts (``RequestTables.max_verifiable``). ``sizing.py``,
``limits.py`` and ``split_choice.py`` take the sizes of hot buffers from here.

A draft is accepted if the model itself draws it, with that position's own random number, and all drafts
before it are accepted. So the tokens are those of steps without drafts, at any temperature. A step with
drafts runs several positions of a request, and its hot buffer must hold what all of them select.
"""

from __future__ import annotations

from hisparse_pd.decode_node.request import Request

NO_DRAFT = -1
"""Stands where there is no draft; equal to no token that is drawn."""


def smallest_buffer(num_drafts: int, top_k: int) -> int:
    """Return the entries that a hisparse request of any length needs where steps verify up to ``num_drafts``:
    the top-k of one position, the newest token, and the drafts behind it."""
    return top_k + 1 + num_drafts


def full_buffer(num_drafts: int, top_k: int) -> int:
    """Return the entries with which a hisparse request of any length can have ``num_drafts`` verified in a
    step: what all new positions may select, and these themselves."""
    num_new = num_drafts + 1
    return num_new * top_k + num_new


def drafts_with_room(capacity: int, *, top_k: int, max_new: int) -> int:
    """Return the number of drafts for which a hot buffer of ``capacity`` entries has room in a step; -1
    or less if it cannot hold even the newest token's top-k beside ``max_new`` new entries."""
    return (capacity - max_new) // top_k - 1


def max_verifiable(request: Request, num_drafts: int, *, top_k: int, max_new: int, max_context: int) -> int:
    """Return how many drafts, up to ``num_drafts``, the request's next step can verify.

    Drafts need slots below the end of the context. A hot buffer needs room for what all new positions may
    select, unless it holds the whole sequence. ``max_new``: the most new positions of a step.
    """
    if not request.is_speculative:
        return 0
    first_new = request.next_seq_len - 1
    num_drafts = min(num_drafts, min(request.reserved_tokens, max_context) - first_new - 1)
    if 0 < request.hot_capacity < first_new + max_new:
        num_drafts = min(num_drafts, drafts_with_room(request.hot_capacity, top_k=top_k, max_new=max_new))
    return max(0, num_drafts)
