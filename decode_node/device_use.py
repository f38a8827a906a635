"""Keeps count of who has which device slots once a plan is carried out. Pure.

``PlanDraft`` makes one ``DeviceUse`` for a plan that gives device slots away, and notes its exchanges and
admissions there. ``mode_choice.py`` and the modules that it calls ask for answers about each request that the
plan decides about, beside hundreds of others. An answer is therefore a number that is kept, or a sum of such
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.request import Request, admission_order
from hisparse_pd.decode_node.step_plan import Admission, Exchange


class HotSlots(NamedTuple):
    """The device slots of a hisparse request, in whole pages: its own, and those of pages that it alone uses
    of what residents share."""

    num_slots: int
    life_slots: int
    """Those of a hot buffer that holds its whole life."""
    is_resident: bool = False
    num_page_slots: int = 0
    """Those of its own pages that are being filled, beside its hot buffer."""

    def beyond(self, most_slots: int) -> int:
        """Return how many it has beyond a hot buffer of at most ``most_slots``; negative if it has fewer."""
        return self.num_slots - min(self.life_slots, most_slots)

    def given_up(self, most_slots: int) -> int:
        """Return how many it gives up if its hot buffer may have at most ``most_slots``; negative if it gets
        more. Pages that are being filled are given up, and the hot buffer beside them does not grow."""
        if not self.num_page_slots:
            return self.beyond(most_slots)
        return max(self.num_page_slots, self.beyond(most_slots))


class DeviceUse:
    """The device slots of all requests that run, land or are admitted."""

    def __init__(
        self,
        limits: Limits,
        running: Iterable[Request],
        landing: Sequence[Request],
        exchanges: Mapping[Request, Exchange],
        num_left: Callable[[Request], int],
        may_leave: Callable[[Request], bool],
    ) -> None:
        """``exchanges``: those of the plan so far. ``num_left``: returns the device slots that a running
        dense or resident request gives up if it leaves its pages. ``may_leave``: whether a dense one may, to
        make room for others."""
        self._limits = limits
        self.hisparse: dict[Request, HotSlots] = {}
        """The running requests that are hisparse, those admitted last first; behind them those that leave
        their pages in this plan."""
        self.leaving: dict[Request, int] = {}
        """The dense requests that may leave their pages and have more slots in them than a hot buffer of the
        full size, with the number of these slots; those admitted last come first."""
        self.num_hisparse = 0
        """The number of hisparse requests. Here and in the next four, those that land or are admitted count,
        too."""
        self.hisparse_slots = 0
        """The device slots of hot buffers that hold the whole lives of the hisparse ones."""
        self.num_never_dense = 0
        """The hisparse requests that could not be dense."""
        self.num_dense = 0
        self.dense_slots = 0
        """The device slots of the dense ones, those of pages that several share counted once. What this plan
        lets them share is left out."""
        self._dense_prefixes: set[Prefix] = set()
        """The prefixes whose slots are counted there."""
        self._coming: list[HotSlots] = []
        """The slots of hisparse requests that land or are admitted."""
        self._beyond: dict[int, int] = {}
        """By a number of slots: how many all running hisparse requests together have beyond hot buffers of at
        most that size. An answer is kept until the next exchange, because most requests of a queue ask for
        the same size."""
        full_size = limits.hot_slots(limits.device_buffer_size)
        for request in sorted(running, key=admission_order, reverse=True):
            num_slots = request.owned_slots.device
            if (exchange := exchanges.get(request)) is not None:
                self._note_exchange(exchange)
            elif request.mode is Mode.HISPARSE:
                life_slots, is_resident = limits.life_slots(request), request.is_resident
                num_slots = num_left(request) if is_resident else num_slots
                self._note_hisparse(
                    request, HotSlots(num_slots, life_slots, is_resident, request.num_page_slots)
                )
            else:
                self._note_dense(request, num_slots)
                num_slots = num_left(request) if may_leave(request) else 0
                if num_slots > min(limits.life_slots(request), full_size):
                    self.leaving[request] = num_slots
        for request in landing:
            self._note_coming(request, request.mode, request.owned_slots.device)

    def _note_hisparse(self, request: Request, hot: HotSlots) -> None:
        self.hisparse[request] = hot
        self._beyond.clear()
        self._count_hisparse(request, hot)

    def _note_exchange(self, exchange: Exchange) -> None:
        request, num_slots = exchange.request, self._limits.in_pages(exchange.hot_capacity)
        self._note_hisparse(request, HotSlots(num_slots, self._limits.life_slots(request)))

    def _count_hisparse(self, request: Request, hot: HotSlots) -> None:
        self.num_hisparse += 1
        self.hisparse_slots += hot.life_slots
        self.num_never_dense += not self._limits.may_be_dense(request)

    def _note_dense(self, request: Request, num_slots: int) -> None:
        self.num_dense += 1
        self.dense_slots += num_slots
        for part in request.prefix.chain() if request.prefix is not None else ():
            if part in self._dense_prefixes:
                break  # those before it are counted, too
            self._dense_prefixes.add(part)
            self.dense_slots += len(part.keys) * self._limits.page_size

    def _note_coming(self, request: Request, mode: Mode, num_slots: int) -> None:
        if mode is Mode.DENSE:
            self._note_dense(request, num_slots)
            return
        hot = HotSlots(num_slots, self._limits.life_slots(request))
        self._coming.append(hot)
        self._count_hisparse(request, hot)

    def admit(self, admission: Admission) -> None:
        """Note that the plan admits a request."""
        num_slots = self._limits.in_pages(admission.need.device)
        self._note_coming(admission.request, admission.mode, num_slots)

    def exchange(self, exchange: Exchange) -> None:
        """Note that a running request gets a hot buffer for its device slots."""
        request = exchange.request
        if (hot := self.hisparse.get(request)) is not None:
            self.num_hisparse -= 1
            self.hisparse_slots -= hot.life_slots
            self.num_never_dense -= not self._limits.may_be_dense(request)
        else:
            self.num_dense -= 1
            self.dense_slots -= self.leaving.pop(request)
        self._note_exchange(exchange)

    def num_lacked(self, most_slots: int) -> int:
        """Return how many more device slots hisparse requests need for hot buffers of at most ``most_slots``;
        negative if they have more than that together.

        What a running one has beyond that, others can get. One that stays resident needs no more than it has.
        Slots of one whose KV is on its way cannot be taken back.
        """
        if (beyond := self._beyond.get(most_slots)) is None:
            beyond = self._beyond[most_slots] = sum(
                max(0, hot.beyond(most_slots)) if hot.is_resident else hot.beyond(most_slots)
                for hot in self.hisparse.values()
            )
        return sum(max(0, -hot.beyond(most_slots)) for hot in self._coming) - beyond
