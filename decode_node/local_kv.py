"""Decides whether a request can have all KV of its prompt without a prefill node. Pure.

There are three sources: held pages, a copy from the first sample of the same prompt, and the request's own
steps, which can compute a short tail.

The scheduler asks this module in each plan, ``QueueMoves`` when a request comes, and ``PlanMoves`` when the
request is admitted. A request whose KV these sources cover is local: it waits without its prefill node
(``Request.is_local``).

On a GPU a prefill and a step round differently, and a position must have the same bits whichever node
computes it. Steps may therefore compute only positions from ``Request.first_stepped`` on, for which a
prefill node rounds as steps do. All positions before must be held.

The KV of a prompt is computed and sent for the first of its samples alone. The others wait until it has
landed. Then each shares the whole pages that the first one lets others use, and gets the rest of the prompt's
rows by a copy from the first one's slots (``PlanMoves``), bit for bit: KV, indexer keys and row checks. A
sample asks a prefill node for what it lacks, as a request without further samples does:

- when the first one has ended or failed, or is in another mode;
- when a hisparse sample would have to copy a page or more, as where no pages are shared. The engine's thread
  copies main memory, and all requests wait for it; the device copies the pages of dense ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState

_MODES: Final = {
    HisparseFlag.TRUE: (Mode.HISPARSE,),
    HisparseFlag.FALSE: (Mode.DENSE,),
    HisparseFlag.AUTO: (Mode.DENSE, Mode.HISPARSE),
}


def local_modes(request: Request, limits: Limits, num_held: Callable[[Mode], int]) -> list[Mode]:
    """Return the modes in which ``request`` needs no prefill node, of those that it allows and in which it
    fits.

    ``num_held``: returns how many tokens of the prompt are held for a mode.
    """
    return [
        mode
        for mode in _MODES[request.flag]
        if request.life_tokens <= limits.max_life(mode) and _is_local(request, mode, num_held(mode), limits)
    ]


def _is_local(request: Request, mode: Mode, num_held: int, limits: Limits) -> bool:
    if request.scores is not None:  # only a prefill node gives logprobs of the prompt's tokens
        return False
    if num_held == request.num_landing_tokens or steps_compute_tail(request, num_held, limits):
        return True
    return copy_source(request, mode, num_held, limits.page_size) is not None


def steps_compute_tail(request: Request, num_held: int, limits: Limits) -> bool:
    """Return whether the request's own steps are to compute the prompt's positions from ``num_held`` up to
    its last token. False if all before the last token are held."""
    if request.scores is not None or request.num_prompt_tokens - num_held > limits.max_tail_tokens:
        return False
    return request.first_stepped(limits.page_size) <= num_held < request.num_landing_tokens


def copy_source(request: Request, mode: Mode, num_held: int, page_size: int) -> Request | None:
    """Return the sample from which ``request``, admitted in ``mode``, can copy all tokens behind the first
    ``num_held``.

    None: there is no such sample, or nothing is missing.
    """
    first = request.first_sample
    if first is None or first.state is not RequestState.RUNNING or first.mode is not mode:
        return None
    if first.prefix is not None and first.prefix.is_dropped:  # a row of it is wrong
        return None
    if first.num_tail_tokens:  # its steps count this down to 0, and until then rows are missing
        return None
    num_missing = request.num_landing_tokens - num_held
    return first if num_missing and _can_copy(request, mode, num_missing, page_size) else None


def waits_for_landing(request: Request, mode: Mode, num_held: int, page_size: int) -> bool:
    """Return whether ``request`` should wait for its first sample, whose KV is on its way.

    The first sample is in ``mode``. ``num_held``: how many tokens of the prompt, which both have, were held
    for the first sample when it was admitted; if that was all of them, no KV is on its way. ``request`` will
    share the first one's whole pages (``num_usable_pages``) and copy the rest, so it waits only if it may
    copy as much as that.
    """
    num_unshared = request.num_landing_tokens - request.num_usable_pages * page_size
    return num_held < request.num_landing_tokens and _can_copy(request, mode, num_unshared, page_size)


def _can_copy(request: Request, mode: Mode, num_missing: int, page_size: int) -> bool:
    return request.scores is None and (mode is Mode.DENSE or num_missing < page_size)
