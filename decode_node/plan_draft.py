"""Keeps count of what one plan has given away so far, and of what it may still give. Pure.

``scheduler.py`` makes one ``PlanDraft`` for each plan. ``growth.py``, ``mode_choice.py``,
``making_room.py`` and ``free_slots.py`` decide, ask the draft whether that is allowed, and note it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Final, NamedTuple

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.decode_node.device_use import DeviceUse
from hisparse_pd.decode_node.held_matches import HeldMatch, HeldMatches
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.miss_cost import CHEAP, MissCost
from hisparse_pd.decode_node.plan_slots import PlanSlots
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.reserve import Claim, Place, Reserve, order_ends, slots_of
from hisparse_pd.decode_node.step_plan import Admission, Exchange, Fill, Growth

PATIENCE: Final = 0.5
"""A request must get slots within a time. For this part of it, it may be left waiting, because that is faster
for all, although others could make room for it."""


def is_urgent(request: Request, now: float) -> bool:
    """Return whether a request that waits for slots has waited for PATIENCE of its time."""
    return now - request.arrived_at >= PATIENCE * (request.deadline - request.arrived_at)


class Wanted(NamedTuple):
    """The device slots that a request of the queue wants."""

    request: Request
    num_slots: int
    """Slots for a hot buffer that holds its whole life, or for its pages if it must be dense."""
    must_be_dense: bool


class Queue:
    """The requests of the queue that a plan has not decided about so far, in order of arrival. They are read
    as they are needed, and once each: thousands may wait."""

    def __init__(self, waiting: Iterable[Request], limits: Limits) -> None:
        self._unread = iter(waiting)
        self._limits = limits
        self._read: deque[Wanted] = deque()

    def pop(self) -> Request | None:
        """Take the first request out; None if there is none."""
        return self._read.popleft().request if self._read else next(self._unread, None)

    def first(self, most: int) -> Iterator[Wanted]:
        """Iterate over up to ``most`` of the first requests."""
        self._read.extend(map(self._wanted, islice(self._unread, max(0, most - len(self._read)))))
        return islice(self._read, most)

    def _wanted(self, request: Request) -> Wanted:
        limits = self._limits
        if request.flag is HisparseFlag.FALSE:
            num_tokens = min(request.num_prompt_tokens + limits.growth_tokens, request.life_tokens)
            return Wanted(request, limits.in_pages(num_tokens), must_be_dense=True)
        return Wanted(request, limits.life_slots(request), must_be_dense=False)


class _Changed(NamedTuple):
    """The mode and slots of a running request once the plan is carried out."""

    mode: Mode
    owned: SlotCounts


class _Allowed(NamedTuple):
    """The slots of a plan with one more admission, the reserve that allows it, and its request's claim."""

    slots: PlanSlots
    reserve: Reserve
    claim: Claim


class Mark(NamedTuple):
    """The parts of a draft that change when running requests make room for others."""

    slots: PlanSlots
    exchanges: dict[Request, Exchange]
    changed: dict[Request, _Changed]
    reserve: Reserve | None
    reserve_is_strict: bool
    num_leaving: Mapping[Prefix, int]


@dataclass
class PlanDraft:
    """One plan in the making.

    ``reserve.py`` explains the words: a claim is what a request owns and lacks to end; the order is one in
    which all requests can end; a reserve gives slots away as long as that order stays possible.
    """

    limits: Limits
    slots: PlanSlots
    """Slots that are free, and that the plan has not given away so far."""
    running: Sequence[Request]
    landing: Sequence[Request]
    matches: HeldMatches
    queue: Queue
    miss_cost: MissCost = CHEAP
    now: float = 0.0
    """The time of the plan, of ``time.monotonic``."""
    num_recent: int = 0
    """The most requests that had slots at a time in the last moments (``recent_load.py``)."""
    exchanges: dict[Request, Exchange] = field(default_factory=dict)
    fills: list[Fill] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    admissions: dict[Request, Admission] = field(default_factory=dict)
    _reserve: Reserve | None = None
    """See ``reserve``. None until there is something to give away, which in most steps there is not."""
    _reserve_is_strict: bool = False
    """Whether a new reserve may allow more than ``_reserve``, which was made before hot buffers shrank. It
    expects what they give back at their requests' end, later than it is free."""
    num_orders: int = 0
    """How often the draft has looked for an order in which all requests can end: nothing else takes it as
    long."""
    _use: DeviceUse | None = None
    """See ``device_use``. None until a request of the queue asks for it."""
    _changed: dict[Request, _Changed] = field(default_factory=dict)
    """The running requests that the plan grows or exchanges, as it leaves them."""
    _admitted_claims: list[Claim] = field(default_factory=list)
    """Claims of the requests that the plan admits."""

    @property
    def available(self) -> SlotCounts:
        """Slots that are free once the plan is carried out."""
        return self.slots.at_end

    # --- the reserve ------------------------------------------------------------------------------

    @property
    def reserve(self) -> Reserve:
        """The reserve: it knows which slots can be given away so that all requests can still end."""
        if self._reserve is None:
            self._reserve = self._new_reserve(self.matches.pinned)
            self._reserve_is_strict = False
        return self._reserve

    def grow_running(self, grown: Callable[[Place, Reserve], Claim]) -> None:
        """Make the reserve. Meanwhile ``grown`` is called for each running request, in the order in which
        they can end: it may give the request slots, and returns its claim (``Reserve``). Nothing else may
        have been given away before."""
        self._use = None
        self._reserve = self._new_reserve(self.matches.pinned, grown)

    def _new_reserve(
        self,
        pinned: Mapping[Prefix, int],
        grown: Callable[[Place, Reserve], Claim] = lambda place, _: place.claim,
    ) -> Reserve:
        self.num_orders += 1
        running = ((r, self._claim(r)) for r in self.running)
        order = order_ends(self.available, running, pinned, self.limits.page_size)
        landing = [self._claim(request) for request in self.landing]
        return Reserve(order, landing + self._admitted_claims, grown)

    def _claim(self, request: Request) -> Claim:
        changed = self._changed.get(request)
        if changed is None:
            return self._unchanged_claims[request]
        num_shared_pages = request.num_shared_pages if request.mode is changed.mode else 0
        claim = self.limits.claim(request, changed.mode, changed.owned, num_shared_pages)
        if request not in self.exchanges:
            return claim
        # It shares no device pages any more.
        return claim._replace(prefixes=tuple(p for p in claim.prefixes if PoolKind.DEVICE not in p.kinds))

    @cached_property
    def _unchanged_claims(self) -> dict[Request, Claim]:
        """The claims of running and landing requests as they are."""
        return {
            request: self.limits.claim(request, request.mode, request.owned_slots, request.num_shared_pages)
            for request in (*self.running, *self.landing)
        }

    @cached_property
    def _kept_for_growth(self) -> SlotCounts:
        """A page for each request that will grow, which admissions leave free; ``land`` adds to it."""
        growing = [r for r in (*self.running, *self.landing) if r.reserved_tokens < r.life_tokens]
        num_dense, page = sum(r.mode is Mode.DENSE for r in growing), self.limits.page_size
        num_hisparse = len(growing) - num_dense
        return SlotCounts(
            host=num_hisparse * page,
            device=num_dense * page,
            index=len(growing) * page,
            lookup=num_hisparse * page,
        )

    # --- running requests -------------------------------------------------------------------------

    @property
    def device_use(self) -> DeviceUse:
        """The device slots of all requests once the plan is carried out. Growth must be decided before."""
        if self._use is None:
            self._use = DeviceUse(
                self.limits,
                self.running,
                self.landing,
                self.exchanges,
                self.num_left,
                self._may_leave_pages,
            )
            for admission in self.admissions.values():
                self._use.admit(admission)
        return self._use

    def may_give(self, slots: SlotCounts, reserve: Reserve) -> bool:
        """Return whether running requests may get ``slots``; negative counts are slots that they give
        back."""
        return slots.fits_in(self.available) and reserve.allows(slots)

    def reserve_sharing(self, match: HeldMatch) -> Reserve:
        """Return what can be given away if one more running request shares ``match``: nobody can count on
        these pages to be free when those have ended that use them now."""
        return self._new_reserve(self.matches.pinned_with(match))

    def give(self, slots: SlotCounts, reserve: Reserve) -> None:
        """Note that running requests get ``slots``, which ``may_give`` has allowed."""
        self.slots = self.slots.with_given(slots)
        reserve.give(slots)

    def note_change(self, request: Request, mode: Mode, owned: SlotCounts) -> None:
        """Note the mode and the slots that the plan leaves a running request with."""
        self._changed[request] = _Changed(mode, owned)

    def make_hot_buffer(self, exchange: Exchange, freed: SlotCounts) -> None:
        """Exchange a hisparse request's device slots for a smaller hot buffer. ``freed``: those of its own
        that it gives back; negative for a resident that gives back others alone, and takes some of them."""
        self.device_use.exchange(exchange)
        self._leave(exchange, SlotCounts() - freed, self._with_exchange(exchange, SlotCounts() - freed))
        self._reserve_is_strict = True

    def _may_leave_pages(self, request: Request) -> bool:
        """Return whether a running request of ``auto`` is dense and may leave its pages in this plan, to make
        room for others. Further samples of its prompt count on its pages."""
        return (
            request.mode is Mode.DENSE
            and request.flag is HisparseFlag.AUTO
            and not request.has_further_samples
            and request.has_next_step
            and request not in self._changed
        )

    def num_left(self, request: Request) -> int:
        """Return the device slots that a dense or resident request gives up if it leaves its pages: its own,
        and those of pages that nobody else uses."""
        return request.num_device_slots + self.matches.freed_without(request).device

    def leave_pages(self, exchange: Exchange, given: SlotCounts) -> bool:
        """Exchange a dense request's pages for a hot buffer, to make room for others, if the slots for that
        are free. Returns whether they are. ``given``: the slots that the exchange takes; those of its own
        that it gives back count as negative.

        One of the request's two ways to end is closed then. The caller asks ``all_can_end`` once everybody
        has left who is to leave, and calls ``undo`` if not.
        """
        slots = self._with_exchange(exchange, given)
        if not (slots.suffice and self._kept_for_growth.fits_in(slots.at_end)):
            return False
        self.device_use.exchange(exchange)
        self._leave(exchange, given, slots)
        self._reserve = None
        return True

    def leave_pages_to_grow(self, exchange: Exchange, given: SlotCounts, reserve: Reserve) -> bool:
        """Do ``leave_pages`` for a dense or resident request that can get no more slots in its pages, if
        ``reserve`` allows that, too."""
        slots = self._with_exchange(exchange, given)
        taken = self.available - slots.at_end
        if not (slots.suffice and reserve.allows(taken)):
            return False
        self._leave(exchange, given, slots)
        reserve.give(taken)
        return True

    def _with_exchange(self, exchange: Exchange, given: SlotCounts) -> PlanSlots:
        """Return the slots of the plan if it has one more exchange, which takes ``given``."""
        return self.slots.with_exchange(given, self.matches.freed_without(exchange.request))

    def _leave(self, exchange: Exchange, given: SlotCounts, slots: PlanSlots) -> None:
        """Note that a request gets a hot buffer for its device slots, and leaves the pages that it shares
        there. ``slots``: those of the plan with that exchange."""
        request = exchange.request
        self.slots = slots
        self.exchanges[request] = exchange
        self.note_change(request, Mode.HISPARSE, request.owned_slots + given)
        self.matches.leave(request)

    @property
    def all_can_end(self) -> bool:
        """Whether all requests can end as the plan leaves them."""
        return self.reserve.is_safe

    def mark(self) -> Mark:
        """Return what ``undo`` needs."""
        exchanges, changed = dict(self.exchanges), dict(self._changed)
        leaving = self.matches.num_leaving
        return Mark(self.slots, exchanges, changed, self._reserve, self._reserve_is_strict, leaving)

    def undo(self, mark: Mark) -> None:
        """Undo all exchanges since ``mark``. Nothing may have been given away or admitted meanwhile."""
        if len(self.exchanges) != len(mark.exchanges):
            self._use = None
        self.slots, self._reserve, self._reserve_is_strict = mark.slots, mark.reserve, mark.reserve_is_strict
        self.exchanges, self._changed = dict(mark.exchanges), dict(mark.changed)  # it may be used again
        self.matches.num_leaving = mark.num_leaving

    def spare_device(self) -> int:
        """Return the free device slots beyond those that are left for growth."""
        return max(0, self.available.device - self._kept_for_growth.device)

    def unheld_device(self) -> int:
        """Return the free device slots in which nothing is held, beyond those that are left for growth. The
        plan must have admitted nobody."""
        return max(0, self.available.device - self.matches.unused.device - self._kept_for_growth.device)

    # --- admissions -------------------------------------------------------------------------------

    def is_urgent(self, request: Request) -> bool:
        """Return whether a request of the queue has waited for so long that it is to wait for nothing but
        room."""
        return is_urgent(request, self.now)

    def may_land(self, admission: Admission, held: HeldMatch) -> bool:
        """Return whether the request may have what ``admission`` reserves. ``held``: the held pages that it
        is to share."""
        return self._allowed(admission, held) is not None

    def land(self, admission: Admission, held: HeldMatch) -> bool:
        """Add the admission to the plan if the request ``may_land``. Returns whether it may."""
        allowed = self._allowed(admission, held)
        if allowed is None:
            return False
        self.slots, self._reserve, claim = allowed
        self._reserve.give_landing(claim)
        self._admitted_claims.append(claim)
        request, need = admission.request, admission.need
        self.matches.take(held)
        self.admissions[request] = replace(admission, num_shared_pages=held.num_pages)
        if self._use is not None:
            self._use.admit(admission)
        # In either mode each position has an index slot.
        num_reserved = need.index + held.num_pages * self.limits.page_size
        if num_reserved < request.life_tokens:
            self._kept_for_growth += self.limits.kv_slots(admission.mode, 1)
        return True

    def _allowed(self, admission: Admission, held: HeldMatch) -> _Allowed | None:
        """Return what the plan has with the admission; None if no reserve allows it."""
        slots = self.slots.with_used(held.idle).with_given(admission.need + held.given)
        # Most requests that do not fit fail here, before the reserve and the pages for growth are worked out.
        if not (slots.suffice and self._kept_for_growth.fits_in(slots.at_end)):
            return None
        claim = self._landing_claim(admission, held)
        if self.matches.is_counted_on(held):
            # The present order counts on these pages to be free when their users have ended, which is no
            # longer so if they are shared: another order is needed.
            reserve = self._new_reserve(self.matches.pinned_with(held))
        else:
            reserve = self.reserve
            if self._reserve_is_strict and not reserve.allows_landing(claim):
                self._reserve = None
                reserve = self.reserve
        return _Allowed(slots, reserve, claim) if reserve.allows_landing(claim) else None

    def _landing_claim(self, admission: Admission, held: HeldMatch) -> Claim:
        """Return the request's claim. Held pages that were free count as its own: like its slots, they are
        taken from what is free, and nobody counts on them."""
        need = admission.need
        claim = self.limits.claim(admission.request, admission.mode, need, held.num_pages)
        return claim._replace(owned=slots_of(need + held.taken))
