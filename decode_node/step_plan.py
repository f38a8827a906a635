"""The orders of a step's plan: ``next_plan.py`` makes one before each step, ``PlanMoves.carry_out`` does it.

Orders are data. ``StepPlan.carry_out`` has the sequence in which they are carried out. Nothing here touches a
pool or a device.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """All slots that it gets, those of its hot buffer included."""
    hot_capacity: int
    """Entries of its hot buffer; 0 when dense, or resident from the start."""
    num_shared_pages: int = 0
    """Held pages of its prompt: their KV is here, and nothing lands in them."""


@dataclass(frozen=True)
class Growth:
    """An order to give a running request ``need`` more slots, for its next tokens."""

    request: Request
    need: SlotCounts


@dataclass(frozen=True)
class Exchange:
    """An order to give a running request a hot buffer for the device slots that it has.

    A dense request gives up its pages, and becomes hisparse, when device slots run out, and a resident one
    gives them up, too: the items of its last positions stay where they are. A hot buffer gets another size in
    place: a smaller one, to make room for others, or a larger one. If its request's pages are being filled,
    these are given up.
    """

    request: Request
    hot_capacity: int
    """Entries of the hot buffer, whose device slots are not in ``need``."""
    need: SlotCounts = _NONE
    """Further slots in the host, index and lookup pools for a request that leaves its pages. A dense one
    takes fewer if the host pool has a copy of pages that it shares (``DenseTier.use_host_copy``), on which no
    plan counts."""


@dataclass(frozen=True)
class Fill:
    """An order to give a request device pages for all of its tokens, beside its hot buffer, and to fill them
    beside its steps: then it becomes resident, until it gets a hot buffer again."""

    request: Request
    num_page_slots: int
    """Device slots of its own pages, whole pages."""
    num_resident_pages: int
    """Device pages of its prompt that it shares with other residents, and that are filled."""


@dataclass(frozen=True)
class StepPlan:
    """The work before the next step; ``carry_out`` has its order."""

    no_longer_local: tuple[Request, ...] = ()
    """Local requests, which waited without a prefill node, and need one after all: held pages on which they
    counted are gone, or they cannot copy from the first sample any more."""
    exchanges: tuple[Exchange, ...] = ()
    fills: tuple[Fill, ...] = ()
    growths: tuple[Growth, ...] = ()
    admissions: tuple[Admission, ...] = ()
    is_cut: bool = False
    """Whether the next plan comes at once: this one admits as many as a plan may, or has only made room for
    requests to grow into."""

    def carry_out(
        self,
        *,
        wait_for_node: Callable[[Request], object],
        use_held: Callable[[Admission], object],
        use_resident: Callable[[Fill], object],
        exchange_slots: Callable[[Exchange], object],
        begin_fill: Callable[[Fill], object],
        grow: Callable[[Growth], object],
        admit: Callable[[Admission], object],
    ) -> None:
        """Call a function for each order of the plan, in the order in which the slots suffice for all of it.

        The pages that admissions and fills share are marked as used first: the growth of others may evict
        held ones, and the end of others residents'. Exchanges free the device slots that fills, growths and
        admissions take.
        """
        for request in self.no_longer_local:
            wait_for_node(request)
        for admission in self.admissions:
            use_held(admission)
        for fill in self.fills:
            use_resident(fill)
        for exchange in self.exchanges:
            exchange_slots(exchange)
        for fill in self.fills:
            begin_fill(fill)
        for growth in self.growths:
            grow(growth)
        for admission in self.admissions:
            admit(admission)
