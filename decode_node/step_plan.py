"""The orders that a step's plan has: what the scheduler decides, and ``PlanMoves.carry_out`` does. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.request import Request

_NONE = SlotCounts()


@dataclass(frozen=True)
class Admission:
    """An order to reserve ``need`` for a waiting request and to get its KV."""

    request: Request
    mode: Mode
    need: SlotCounts
    hot_capacity: int
    """Entries of its hot buffer; 0 when dense."""
    num_shared_pages: int = 0
    """Held pages of its prompt: their KV is here, and nothing lands in them."""


@dataclass(frozen=True)
class Growth:
    """An order to give a running request ``need`` more slots, for its next tokens."""

    request: Request
    need: SlotCounts


@dataclass(frozen=True)
class Exchange:
    """An order to a running request to give up all device slots, and to go on as hisparse with a new hot
    buffer."""

    request: Request
    hot_capacity: int
    """Entries of the new hot buffer."""
    need: SlotCounts = _NONE
    """The host, index and lookup slots that a dense request lacks to become hisparse."""


@dataclass(frozen=True)
class StepPlan:
    """What to do before the next step, in the order of the fields."""

    no_longer_local: tuple[Request, ...] = ()
    """Requests that wait without their prefill nodes, and need them after all: held pages are gone."""
    exchanges: tuple[Exchange, ...] = ()
    growths: tuple[Growth, ...] = ()
    admissions: tuple[Admission, ...] = ()
