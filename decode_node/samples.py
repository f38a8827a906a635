"""Says what further samples of a prompt take from the first one. Pure.

The KV of a prompt is computed and sent for the first of its samples alone. The others wait until it has
landed (``scheduler.py``). Then each shares the whole pages that the first one lets others use, and gets the
rest of the prompt's rows by a copy from the first one's slots (``RequestLife.admit``), bit for bit: KV,
indexer keys and row checks. A sample asks a prefill node for what it lacks, as a request without further
samples does:

- when the first one has ended or failed, or is in another mode;
- when a hisparse sample would have to copy a page or more, as where no pages are shared. The engine's thread
  copies main memory, and all requests wait for it; the device copies the pages of dense ones.
"""

from __future__ import annotations

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.decode_node.request import Request, RequestState


def copy_source(request: Request, mode: Mode, page_size: int) -> Request | None:
    """Return the sample from which ``request``, admitted in ``mode``, can copy all that it lacks.

    None: there is no such sample, or nothing is missing.
    """
    first = request.first_sample
    if first is None or first.state is not RequestState.RUNNING or first.mode is not mode:
        return None
    if first.prefix is not None and first.prefix.is_dropped:  # a row of it is wrong
        return None
    if first.num_tail_tokens:  # its steps are still to compute rows that this one can compute as well
        return None
    num_missing = request.num_landing_tokens - request.held_prefix_tokens
    return first if num_missing and _can_copy(request, mode, num_missing, page_size) else None


def waits_for_landing(request: Request, mode: Mode, num_held: int, page_size: int) -> bool:
    """Return whether ``request`` should wait for its first sample, whose KV is on its way.

    The first sample is in ``mode``, and nothing lands for its first ``num_held`` tokens.
    """
    num_unshared = request.num_landing_tokens - request.num_usable_pages * page_size
    return num_held < request.num_landing_tokens and _can_copy(request, mode, num_unshared, page_size)


def _can_copy(request: Request, mode: Mode, num_missing: int, page_size: int) -> bool:
    return request.scores is None and (mode is Mode.DENSE or num_missing < page_size)
