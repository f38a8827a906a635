"""Plans a step: which requests are admitted and in which mode, which get slots, and whose hot buffer changes.

``NextPlan`` calls ``plan_step`` before each step, and ``RequestLife.carry_out`` does what it returns. It
looks at requests and at counts of free slots, and changes nothing. Its rules:

- A request is admitted with slots for its prompt, except for the pages that are held, and for
  ``growth_tokens`` more; it gets as many again before the step that needs them. No grant takes away a
  request's way to its end (``reserve.py``). A request that cannot get slots sits steps out and keeps its KV.
- Growth comes before admission, and nobody is admitted while a request sits out. Admissions leave a page free
  for each request that will grow.
- Admission is in order of arrival: while the first in the queue does not fit, nobody overtakes it,
  unless it waits for stuck slots, such as those in an unacknowledged quarantine, which may never be free.
- Further samples of a prompt wait while the first one's KV is on its way, and then share or copy it
  (``local_kv.py``). The rest of the queue overtakes them.
- ``auto`` is dense, with pages for its whole life, while device slots are plenty, and hisparse otherwise; it
  is dense, too, when hisparse lacks slots and the device pages are there.
- A dense request that cannot get its next page gives its pages up for a hot buffer, if the host has slots for
  it.
- While the first in the queue lacks only device slots for a hot buffer, hot buffers larger than their minimum
  shrink to it, those admitted last first. They get their full size back when nobody waits and
  ``AUTO_DENSE_MARGIN`` of the device pool stays free.
- Slots for drafts come with the others if they are free; nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.local_kv import local_modes, waits_for_landing
from hisparse_pd.decode_node.request import Request, RequestState
from hisparse_pd.decode_node.reserve import Claim, HeldMatch, HeldMatches, Place, Reserve, slots_of

MAX_LOOKED_AT = 256
"""Most requests of the queue that one plan looks at: those that it admits, and those that are overtaken
because they wait for stuck slots or for a first sample."""

_NONE = SlotCounts()

AUTO_DENSE_MARGIN = 0.25
"""Part of the device pool that must stay free for hot buffers if ``auto`` is to be dense."""


@dataclass(frozen=True)
class Admission:
    """An order to reserve ``need`` for a waiting request and to ask for its KV. ``hot_capacity``: entries of
    its hot buffer, 0 when dense."""

    request: Request
    mode: Mode
    need: SlotCounts
    hot_capacity: int
    num_shared_pages: int = 0
    """Held pages of its prompt: their KV is here, and nothing lands in them."""


@dataclass(frozen=True)
class Growth:
    """An order to give a running request ``need`` more slots, for its next tokens."""

    request: Request
    need: SlotCounts


@dataclass(frozen=True)
class Exchange:
    """An order to a running request to give up all device slots, and to go on as hisparse with a hot buffer
    of ``hot_capacity`` entries. ``need``: the host, index and lookup slots that a dense request lacks for
    that."""

    request: Request
    hot_capacity: int
    need: SlotCounts = _NONE


@dataclass(frozen=True)
class StepPlan:
    """What to do before the next step, in the order of the fields."""

    no_longer_local: tuple[Request, ...] = ()
    """Requests that wait without their prefill nodes, and need them after all: held pages are gone."""
    exchanges: tuple[Exchange, ...] = ()
    growths: tuple[Growth, ...] = ()
    admissions: tuple[Admission, ...] = ()


def plan_step(
    limits: Limits,
    free: SlotCounts,
    running: Sequence[Request],
    landing: Sequence[Request],
    waiting: Iterable[Request] | None,
    stuck: SlotCounts,
    held: PrefixTree,
) -> StepPlan:
    """Return what to do before the next step.

    ``free``: slots that can be given away, those of ``held`` prefixes without users included. ``waiting``:
    requests that ``refusal`` does not refuse, in order of arrival; None if nobody could be admitted last time
    and nothing has changed. ``stuck``: slots that may never be free again.
    """
    planner = _Planner(limits, free, running, landing, stuck, HeldMatches(held, landing, limits.page_size))
    planner.grow()
    if waiting is not None and not planner.is_short and planner.admit(waiting):
        planner.enlarge_hot_buffers()
    return StepPlan(
        tuple(planner.no_longer_local),
        tuple(planner.exchanges.values()),
        tuple(planner.growths),
        tuple(planner.admissions),
    )


@dataclass
class _Planner:
    """One plan in the making. ``grow`` comes first, then ``admit``, then ``enlarge_hot_buffers``."""

    limits: Limits
    available: SlotCounts
    """Slots that are free and that the plan has not given away so far."""
    running: Sequence[Request]
    landing: Sequence[Request]
    stuck: SlotCounts
    matches: HeldMatches
    no_longer_local: list[Request] = field(default_factory=list)
    exchanges: dict[Request, Exchange] = field(default_factory=dict)
    growths: list[Growth] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    is_short: bool = False
    """Whether a request sits the step out."""
    _reserve: Reserve | None = None
    """What can be given away so that all can still end. None until there is something to give away, which in
    most steps there is not."""
    _kept_for_growth: SlotCounts = _NONE
    """A page for each request that will grow; admissions leave it free."""
    _changed: dict[Request, tuple[Mode, SlotCounts]] = field(default_factory=dict)
    """Mode and slots, under this plan, of running requests that it grows or exchanges."""
    _admission_of: dict[Request, Admission] = field(default_factory=dict)
    """The admissions, by request."""
    _admitted_claims: list[Claim] = field(default_factory=list)
    """Claims of the requests that the plan admits."""

    def grow(self) -> None:
        """Give slots to requests that have none left for their next step."""
        # A request without a next step needs no slot, and may have none left: its life can fill its pages.
        short = {r for r in self.running if r.has_next_step and r.reserved_tokens < self._len_with_drafts(r)}
        if short:
            self._make_reserve(short)

    def _make_reserve(self, short: set[Request]) -> Reserve:
        """Return the plan's reserve. The first call makes it, and grows the ``short`` requests while it does:
        a request's growth must be decided in its place of the reserve's order (``Reserve.keep_all``)."""
        if self._reserve is None:
            self._reserve = self._new_reserve(self.matches.pinned, short)
            growing = [r for r in (*self.running, *self.landing) if r.reserved_tokens < r.life_tokens]
            num_dense, page = sum(r.mode is Mode.DENSE for r in growing), self.limits.page_size
            num_hisparse = len(growing) - num_dense
            self._kept_for_growth = SlotCounts(
                num_hisparse * page, num_dense * page, len(growing) * page, num_hisparse * page
            )
        return self._reserve

    def _new_reserve(self, pinned: Mapping[Prefix, int], short: Collection[Request] = ()) -> Reserve:
        claims = ((r, self._claim(r)) for r in self.running)
        reserve = Reserve(self.available, claims, pinned, self.limits.page_size)

        def grown(place: Place) -> Claim:
            return self._grow_one(place, reserve) if place.request in short else place.claim

        landing = [self._claim(request) for request in self.landing]
        reserve.keep_all(landing + self._admitted_claims, grown)
        return reserve

    def _claim(self, request: Request) -> Claim:
        mode, owned = self._changed.get(request, (request.mode, request.owned_slots))
        return self.limits.claim(request, mode, owned, request.num_shared_pages)

    def _grow_one(self, place: Place, reserve: Reserve) -> Claim:
        """Give a request more slots, or a hot buffer for its pages, and return its claim.

        Growth leaves the claim as it is: the request lacks fewer slots, and as many fewer are free.
        """
        request, owned = place.request, place.request.owned_slots
        for num_tokens in self._grown_lengths(request):
            need = _missing(self.limits.kv_slots(request.mode, num_tokens, request.num_shared_pages), owned)
            if self._may_give(need, reserve):
                self.growths.append(Growth(request, need))
                self._changed[request] = request.mode, owned + need
                self._give(need, reserve)
                return place.claim
        if request.has_slots_for_next:
            return place.claim  # only drafts lack slots, and nobody waits for those
        if request.may_leave_pages:
            # The hot buffer takes no more than its own pages, unless its minimum is larger.
            own = min(self.limits.max_capacity(request), owned.device)
            capacity = max(own, self.limits.min_capacity(request))
            for num_tokens in self._grown_lengths(request):
                need = _missing(self.limits.kv_slots(Mode.HISPARSE, num_tokens), owned)
                given = need + SlotCounts(device=self.limits.in_pages(capacity) - owned.device)
                if self._may_give(given, reserve):
                    self.exchanges[request] = Exchange(request, capacity, need)
                    self._changed[request] = Mode.HISPARSE, owned + given
                    self._give(given, reserve)
                    return Claim(place.claim.owned, place.claim.ways[1:])  # it can end in a hot buffer only
        self.is_short = True
        return place.claim

    def _grown_lengths(self, request: Request) -> Iterator[int]:
        """Yield the lengths, in tokens, to which a request's slots may grow, first choice first."""
        with_growth = min(request.next_seq_len - 1 + self.limits.growth_tokens, request.life_tokens)
        yield max(with_growth, self._len_with_drafts(request))
        if not request.has_slots_for_next:
            yield request.next_seq_len

    def _len_with_drafts(self, request: Request) -> int:
        """Return the length of the sequence in the next step, drafts included.

        With drafts it is one more, for the step after: it is launched before it is known how many are right.
        """
        num_behind = self.limits.max_drafts + 1 if self.limits.max_drafts else 0
        return min(request.next_seq_len + num_behind, self.limits.max_context)

    def admit(self, waiting: Iterable[Request]) -> bool:
        """Admit requests that wait. Returns whether only requests that lack stuck slots still wait."""
        some_wait_for_first = False
        usable = replace(self.limits, totals=self.limits.totals - self.stuck)
        for number, request in enumerate(waiting):
            if number == MAX_LOOKED_AT:
                return False
            if self.stuck != _NONE and refusal(usable, request):
                continue  # it fits only if stuck slots become free, which may never be
            if self._waits_for_first(request):
                some_wait_for_first = True
                continue
            modes: Collection[Mode] = tuple(Mode)
            if request.is_local and not (modes := self._local_modes(request, usable)):
                self.no_longer_local.append(request)
                continue
            admission = self._place(request, modes)
            if admission is None:
                return False
            self.admissions.append(admission)
            self._admission_of[request] = admission
            num_reserved = admission.need.index + admission.num_shared_pages * self.limits.page_size
            if num_reserved < request.life_tokens:
                self._kept_for_growth += self.limits.kv_slots(admission.mode, 1)
        return not some_wait_for_first

    def _waits_for_first(self, request: Request) -> bool:
        """Return whether ``request`` waits for the KV of the first sample, which lands or will."""
        first, page_size = request.first_sample, self.limits.page_size
        if first is None:
            return False
        if first.state is RequestState.LANDING:
            return waits_for_landing(request, first.mode, first.held_prefix_tokens, page_size)
        admission = self._admission_of.get(first)
        if admission is None:
            return False
        num_held = admission.num_shared_pages * page_size
        return waits_for_landing(request, admission.mode, num_held, page_size)

    def _local_modes(self, request: Request, usable: Limits) -> list[Mode]:
        """Return the modes in which ``request`` needs no prefill node."""

        def num_held(mode: Mode) -> int:
            return self.matches.find(request, mode).num_pages * self.limits.page_size

        return local_modes(request, usable, num_held)

    def _place(self, request: Request, modes: Collection[Mode]) -> Admission | None:
        """Admit ``request`` in one of ``modes`` that it allows; None if it fits in none."""
        if not (self.available.aux and self.available.req_row):
            return None
        match request.flag:
            case HisparseFlag.TRUE:
                return self._place_hisparse(request)
            case HisparseFlag.FALSE:
                start = request.num_prompt_tokens
                return self._place_dense(
                    request, (start + self.limits.growth_tokens, start + self.limits.page_size)
                )
            case HisparseFlag.AUTO:
                life = request.life_tokens
                if request.dense_refusal or Mode.DENSE not in modes:
                    return self._place_hisparse(request)
                if Mode.HISPARSE not in modes:
                    return self._place_dense(request, (life,))
                if self._is_comfortable(request):
                    return self._place_dense(request, (life,))
                return self._place_hisparse(request) or self._place_dense(request, (life,))
            case _:
                assert_never(request.flag)

    def _place_hisparse(self, request: Request) -> Admission | None:
        """Admit ``request`` with as large a hot buffer as is spare. If that is too small, others shrink, but
        only if nothing but device slots is missing."""
        num_tokens = request.num_prompt_tokens + self.limits.growth_tokens
        min_capacity = self.limits.min_capacity(request)
        held = self.matches.find(request, Mode.HISPARSE)
        beside_device = self._need(request, Mode.HISPARSE, num_tokens, held)
        if not self._may_land(request, Mode.HISPARSE, beside_device, held):
            return None
        if not self._spare_capacity(request):
            self._shrink_hot_buffers(self.limits.in_pages(min_capacity))
        for capacity in (self._spare_capacity(request), min_capacity):
            need = beside_device + SlotCounts(device=self.limits.in_pages(capacity))
            if capacity and (reserve := self._may_land(request, Mode.HISPARSE, need, held)):
                return self._land(Admission(request, Mode.HISPARSE, need, capacity), held, reserve)
        return None

    def _place_dense(self, request: Request, lengths: Iterable[int]) -> Admission | None:
        """Admit ``request`` with pages for the first of ``lengths``, in tokens, for which it may have
        them."""
        held = self.matches.find(request, Mode.DENSE)
        for num_tokens in lengths:
            need = self._need(request, Mode.DENSE, num_tokens, held)
            if reserve := self._may_land(request, Mode.DENSE, need, held):
                return self._land(Admission(request, Mode.DENSE, need, 0), held, reserve)
        return None

    def _need(self, request: Request, mode: Mode, num_tokens: int, held: HeldMatch) -> SlotCounts:
        """Return the slots, without a hot buffer's, that an admission with ``num_tokens`` of KV takes."""
        kv = self.limits.kv_slots(mode, min(num_tokens, request.life_tokens), held.num_pages)
        return kv + SlotCounts(aux=1, req_row=1)

    def _may_land(self, request: Request, mode: Mode, need: SlotCounts, held: HeldMatch) -> Reserve | None:
        """Return the reserve to admit ``request`` in with ``need``; None if it may not have that."""
        taken = need + held.taken
        if not taken.fits_in(self.available):
            return None
        reserve = self._make_reserve(set())
        if not (taken + self._kept_for_growth).fits_in(self.available):
            return None
        if self.matches.is_counted_on(held):
            reserve = self._new_reserve(self.matches.pinned_with(held))
        return reserve if reserve.allows_landing(self._landing_claim(request, mode, need, held)) else None

    def _landing_claim(self, request: Request, mode: Mode, need: SlotCounts, held: HeldMatch) -> Claim:
        """Return the request's claim. Held pages that were free count as its own: like its slots, they are
        taken from what is free, and nobody counts on them."""
        claim = self.limits.claim(request, mode, need, held.num_pages)
        return claim._replace(owned=slots_of(need + held.taken))

    def _land(self, admission: Admission, held: HeldMatch, reserve: Reserve) -> Admission:
        """Take what the admitted request gets from what is left for the rest of the plan."""
        request, mode, need = admission.request, admission.mode, admission.need
        claim = self._landing_claim(request, mode, need, held)
        reserve.give_landing(claim)
        self._reserve = reserve
        self._admitted_claims.append(claim)
        self.available -= need + held.taken
        self.matches.take(held)
        return replace(admission, num_shared_pages=held.num_pages)

    def _is_comfortable(self, request: Request) -> bool:
        """Return whether the device pool keeps its margin if the request gets pages for its whole life."""
        held = self.matches.find(request, Mode.DENSE)
        need = self._need(request, Mode.DENSE, request.life_tokens, held)
        return self._spare_device() - need.device - held.taken.device >= self._device_margin

    @property
    def _device_margin(self) -> float:
        return AUTO_DENSE_MARGIN * self.limits.totals.device

    def _spare_capacity(self, request: Request) -> int:
        """Return how many entries the spare device slots allow; 0 if they are fewer than the minimum."""
        spare = self._spare_device() // self.limits.page_size * self.limits.page_size
        capacity = min(self.limits.max_capacity(request), spare)
        return capacity if capacity >= self.limits.min_capacity(request) else 0

    def _shrink_hot_buffers(self, num_needed: int) -> None:
        """Shrink hot buffers to their minimum until ``num_needed`` device slots are spare; shrink none if
        that cannot be reached."""
        gains: list[tuple[Request, int]] = []
        spare = self._spare_device()
        for request in self._with_large_hot_buffers():
            gain = request.num_device_slots - self.limits.in_pages(self.limits.min_capacity(request))
            if gain > 0:
                gains.append((request, gain))
                spare += gain
            if spare >= num_needed:
                break
        if spare < num_needed:
            return
        for request, gain in gains:
            self.exchanges[request] = Exchange(request, self.limits.min_capacity(request))
            freed = SlotCounts(device=gain)
            self._changed[request] = request.mode, request.owned_slots - freed
            self.available += freed

    def _with_large_hot_buffers(self) -> list[Request]:
        """Return running requests whose hot buffers are larger than the smallest and which the plan leaves as
        they are so far; those admitted last come first."""
        smallest = self.limits.smallest_hot_buffer
        large = [r for r in self.running if r.hot_capacity > smallest and r not in self.exchanges]
        return sorted(large, key=_admission_order, reverse=True)

    def enlarge_hot_buffers(self) -> None:
        """Give hot buffers that are smaller than their request's sequence their full size, while slots last;
        those admitted first come first."""
        if self.exchanges or self.admissions or self.available.device <= self._device_margin:
            return
        full_size = self.limits.device_buffer_size
        small = [r for r in self.running if 0 < r.hot_capacity < min(full_size, r.next_seq_len)]
        for request in sorted(small, key=_admission_order):
            capacity = self.limits.max_capacity(request)
            gain = SlotCounts(device=self.limits.in_pages(capacity) - request.num_device_slots)
            if capacity > request.hot_capacity and request.has_next_step:
                reserve = self._make_reserve(set())
                is_spare = self._spare_device() - gain.device >= self._device_margin
                if is_spare and self._may_give(gain, reserve):
                    self.exchanges[request] = Exchange(request, capacity)
                    self._give(gain, reserve)

    def _may_give(self, slots: SlotCounts, reserve: Reserve) -> bool:
        return slots.fits_in(self.available) and reserve.allows(slots)

    def _give(self, slots: SlotCounts, reserve: Reserve) -> None:
        self.available -= slots
        reserve.give(slots)

    def _spare_device(self) -> int:
        """Return the free device slots beyond those that are left for growth."""
        self._make_reserve(set())
        return max(0, self.available.device - self._kept_for_growth.device)


def _missing(wanted: SlotCounts, owned: SlotCounts) -> SlotCounts:
    return SlotCounts(
        max(0, wanted.host - owned.host),
        max(0, wanted.device - owned.device),
        max(0, wanted.index - owned.index),
        max(0, wanted.lookup - owned.lookup),
    )


def _admission_order(request: Request) -> int:
    return request.admitted_seq
