"""Decides who is admitted, in which mode, who grows, who is retracted and who comes back. Pure planning.

``plan_step`` looks at counts of free slots and at requests, and changes nothing. Its rules:

- Admission is in order of arrival and strict: when the first in the queue does not fit, nobody overtakes it.
  Whoever runs ends within its max_new_tokens, so the first in the queue always gets its turn. Slots of an
  unresolved quarantine may never come back: whoever does not fit beside them holds nobody up until they do.
- ``auto`` is dense while that is comfortable, hisparse otherwise, and dense again when hisparse lacks host
  slots and the device pool has pages for its whole life: they would serve nobody while the queue stands.
- A request is admitted with everything that its whole life needs, or not at all. The one exception is a
  request that insists on dense while the device pool is short: it starts with the pages of its prompt and
  grows page by page, and has host slots for its whole life reserved, so that it can always be retracted.
- A page for a dense request that must grow comes before everything else. When none is free, the latest
  admitted request that can be retracted gives up its device slots, in the worst case the one that grows. A
  landing zone of a repeated batch cannot be given up for a while: a request may have to sit steps out for it.
- Retracted requests come back before anybody new is admitted, oldest first.
- While the first in the queue lacks nothing but device slots for a hot buffer, hot buffers larger than they
  have to be shrink to their minimum, latest admitted first.
- One page for every request that may grow is kept out of admissions, so that these do not cause retractions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from decode_node.pools import SlotCounts, round_up
from decode_node.request import Request
from protocol.engine_messages import HisparseFlag, Mode

_HEADROOM_PAGES = 1
"""Pages beyond its prompt that a growing dense request starts with."""

_NONE = SlotCounts()


@dataclass(frozen=True)
class Limits:
    """The sizes that planning goes by, in tokens; ``auto_dense_margin`` is a share of the device pool."""

    totals: SlotCounts
    page_size: int
    max_context: int
    index_topk: int
    device_buffer_size: int
    auto_dense_margin: float

    @property
    def max_life_hisparse(self) -> int:
        """Longest whole life that a hisparse request can have."""
        bound = min(self.totals.host, self.totals.index)
        if self.totals.device < round_up(self.index_topk + 1, self.page_size):
            bound = min(bound, self.totals.device)
        return bound

    @property
    def max_life_dense(self) -> int:
        """Longest whole life that a dense request can have."""
        return min(self.totals.device, self.totals.index)

    def min_capacity(self, request: Request) -> int:
        """Smallest hot buffer that works: the top-k of one step and the newest token, or the whole life."""
        return min(self.index_topk + 1, request.life_tokens)

    def max_capacity(self, request: Request) -> int:
        return max(self.min_capacity(request), min(self.device_buffer_size, request.life_tokens))


@dataclass(frozen=True)
class Admission:
    """Reserve ``need`` and let the KV land. ``hot_capacity`` is 0 when dense."""

    request: Request
    mode: Mode
    need: SlotCounts
    hot_capacity: int


@dataclass(frozen=True)
class Growth:
    """``num_slots`` more device slots, whole pages, for a dense request."""

    request: Request
    num_slots: int


@dataclass(frozen=True)
class Resumption:
    """Come back from retraction with a hot buffer of ``hot_capacity`` entries."""

    request: Request
    hot_capacity: int


@dataclass(frozen=True)
class StepPlan:
    """To be carried out in the order of the fields. A request may be retracted and resumed in one plan."""

    retractions: tuple[Request, ...] = ()
    growths: tuple[Growth, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    admissions: tuple[Admission, ...] = ()


def refusal(limits: Limits, request: Request) -> str:
    """Why ``request`` can never be admitted, with bound and remedy; empty when it can."""
    life = request.life_tokens
    hisparse = dense = ""
    if life > limits.max_life_hisparse:
        hisparse = (
            f"{life} tokens of KV exceed the {limits.max_life_hisparse} that a hisparse request can hold "
            f"here (host pool {limits.totals.host}, index pool {limits.totals.index}, device pool "
            f"{limits.totals.device} tokens); shorten the prompt or max_tokens"
        )
    if request.dense_refusal:
        dense = request.dense_refusal
    elif life > limits.max_life_dense:
        dense = (
            f"{life} tokens of KV exceed the {limits.max_life_dense} that a dense request can hold here "
            f"(device pool {limits.totals.device}, index pool {limits.totals.index} tokens); shorten the "
            "prompt or max_tokens, or allow hisparse"
        )
    match request.flag:
        case HisparseFlag.TRUE:
            return hisparse
        case HisparseFlag.FALSE:
            return dense
        case HisparseFlag.AUTO:
            return f"{hisparse}; {dense}" if hisparse and dense else ""
        case _:
            assert_never(request.flag)


def plan_step(
    limits: Limits,
    free: SlotCounts,
    running: Sequence[Request],
    retracted: Sequence[Request],
    waiting: Iterable[Request],
    stuck: SlotCounts = _NONE,
) -> StepPlan:
    """What to do before the next forward. ``waiting``: in order of arrival, every one of them admissible.

    ``stuck``: slots that may never be free again.
    """
    planner = _Planner(limits, free, running, stuck)
    planner.grow()
    if planner.resume(retracted):
        planner.admit(waiting)
    return planner.plan()


@dataclass
class _Planner:
    limits: Limits
    available: SlotCounts
    running: Sequence[Request]
    stuck: SlotCounts
    retractions: dict[Request, None] = field(default_factory=dict)
    """In order; a dict, because it is asked for membership."""
    growths: list[Growth] = field(default_factory=list)
    resumptions: list[Resumption] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.usable = replace(self.limits, totals=self.limits.totals - self.stuck)
        """The limits without the slots that may never be free again."""
        self._num_growing = sum(request.may_grow for request in self.running)
        """Requests for each of which a page is kept."""

    def plan(self) -> StepPlan:
        return StepPlan(
            tuple(self.retractions), tuple(self.growths), tuple(self.resumptions), tuple(self.admissions)
        )

    def grow(self) -> None:
        """Pages for the newest tokens of dense requests that have none left, oldest request first."""
        # Whose last token is in flight needs no page, and may have none left: its life can fill its pages.
        short = sorted(
            (r for r in self.running if r.has_next_step and not r.has_page_for_next), key=_admitted
        )
        if not short:
            return
        victims = sorted((r for r in self.running if r.is_retractable), key=_admitted)
        grown: set[Request] = set()
        for request in short:
            num_missing = request.next_seq_len - request.num_device_slots
            num_slots = round_up(num_missing, self.limits.page_size)
            while victims and self.available.device < num_slots and request not in self.retractions:
                victim = victims.pop()
                if victim not in grown:  # an older one, where this one cannot be retracted itself
                    self._retract(victim)
            if request not in self.retractions and self.available.device >= num_slots:
                grown.add(request)
                self.growths.append(Growth(request, num_slots))
                self._take(SlotCounts(device=num_slots))

    def resume(self, retracted: Sequence[Request]) -> bool:
        """Whether everybody who was retracted comes back, except who does not fit beside stuck slots."""
        for request in sorted([*retracted, *self.retractions], key=_admitted):
            capacity = self._hot_capacity(request)
            if not capacity:
                if self._in_pages(self.limits.min_capacity(request)) > self.usable.totals.device:
                    continue
                return False
            self.resumptions.append(Resumption(request, capacity))
            self._take(SlotCounts(device=round_up(capacity, self.limits.page_size)))
        return True

    def admit(self, waiting: Iterable[Request]) -> None:
        for request in waiting:
            if refusal(self.usable, request):
                continue  # it fits when the stuck slots are free again, which may be never
            admission = self._place(request)
            if admission is None:
                return
            self.admissions.append(admission)
            self._take(admission.need)
            self._num_growing += admission.mode is Mode.DENSE and admission.need.host > 0

    def _place(self, request: Request) -> Admission | None:
        match request.flag:
            case HisparseFlag.TRUE:
                return self._place_hisparse(request)
            case HisparseFlag.FALSE:
                return self._place_dense(request)
            case HisparseFlag.AUTO:
                if request.dense_refusal:
                    return self._place_hisparse(request)
                # Without host slots it is dense with all its pages or not at all.
                if self._is_comfortable(request) or request.life_tokens > self.available.host:
                    return self._place_dense(request)
                return self._place_hisparse(request)
            case _:
                assert_never(request.flag)

    def _place_hisparse(self, request: Request) -> Admission | None:
        life = request.life_tokens
        elsewhere = SlotCounts(host=self._in_pages(life), index=self._in_pages(life), aux=1, req_row=1)
        if not elsewhere.fits_in(self.available):
            return None
        if not self._hot_capacity(request):
            self._shrink_hot_buffers(self._in_pages(self.limits.min_capacity(request)))
        capacity = self._hot_capacity(request)
        if not capacity:
            return None
        need = elsewhere + SlotCounts(device=self._in_pages(capacity))
        return Admission(request, Mode.HISPARSE, need, capacity)

    def _place_dense(self, request: Request) -> Admission | None:
        """All pages at once if they are there, else the prompt's, and host slots to be retracted to."""
        life = request.life_tokens
        start = self._in_pages(request.num_prompt_tokens + 1) + _HEADROOM_PAGES * self.limits.page_size
        options = [SlotCounts(device=self._in_pages(life))]
        if start < life:
            options.append(SlotCounts(device=start, host=self._in_pages(life)))
        for option in options:
            need = option + SlotCounts(index=self._in_pages(life), aux=1, req_row=1)
            if need.fits_in(self.available) and need.device <= self._spare_device():
                return Admission(request, Mode.DENSE, need, 0)
        return None

    def _is_comfortable(self, request: Request) -> bool:
        """Whether the device pool keeps its margin when this request gets all pages of its whole life."""
        left = self._spare_device() - self._in_pages(request.life_tokens)
        return left >= self.limits.auto_dense_margin * self.limits.totals.device

    def _hot_capacity(self, request: Request) -> int:
        """Entries that the device slots at hand allow; 0 when they are fewer than the request needs."""
        spare = self._spare_device() // self.limits.page_size * self.limits.page_size
        capacity = min(self.limits.max_capacity(request), spare)
        return capacity if capacity >= self.limits.min_capacity(request) else 0

    def _shrink_hot_buffers(self, num_needed: int) -> None:
        """Retract and resume with the minimum, until ``num_needed`` device slots are spare; or nothing."""
        gains: list[tuple[Request, int]] = []
        spare = self._spare_device()
        for request in self._with_large_hot_buffers():
            gain = request.num_device_slots - self._in_pages(self.limits.min_capacity(request))
            if gain > 0:
                gains.append((request, gain))
                spare += gain
            if spare >= num_needed:
                break
        if spare < num_needed:
            return
        for request, gain in gains:
            self.retractions[request] = None
            self.resumptions.append(Resumption(request, self.limits.min_capacity(request)))
            self.available += SlotCounts(device=gain)

    def _with_large_hot_buffers(self) -> list[Request]:
        """Running requests that may have more than the minimum and stay as they are so far, latest first."""
        smallest = self.limits.index_topk + 1
        large = [r for r in self.running if r.hot_capacity > smallest and r not in self.retractions]
        return sorted(large, key=_admitted, reverse=True)

    def _retract(self, victim: Request) -> None:
        self.retractions[victim] = None
        self._num_growing -= victim.may_grow
        self.available += SlotCounts(device=victim.num_device_slots)

    def _take(self, need: SlotCounts) -> None:
        self.available -= need

    def _spare_device(self) -> int:
        """Free device slots beyond the page that is kept for each request that may grow."""
        return max(0, self.available.device - self._num_growing * self.limits.page_size)

    def _in_pages(self, num_tokens: int) -> int:
        return round_up(num_tokens, self.limits.page_size)


def _admitted(request: Request) -> int:
    return request.admitted_seq
