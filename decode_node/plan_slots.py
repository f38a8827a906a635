"""Counts the slots that are free in the course of one plan. Pure.

``PlanDraft`` notes here what its plan takes and gives back. ``StepPlan.carry_out`` has the order of a plan's
moves, by which slots come and go in three parts:

- Admissions use held pages first, so that nothing evicts these. Pages without users are free until then.
- Exchanges follow, one after the other. Each takes slots, and gives others back.
- Fills, growths and the slots of admissions come last. They take, and give nothing back.

A plan can be carried out if none of its moves takes more than is free when its turn comes. What is free at
its end does not tell that, because an exchange takes some slots before it gives others back. These are the
index slots of a request that begins over a shared or held prefix:

==================================  ====================================================================
when                                index slots
==================================  ====================================================================
it is admitted                      its own, for what lies behind the prefix
it shares pages with index slots    none for them; if they had no users, theirs are free no more
it shares pages that moved down     as many as they have tokens, once: others that share them take none
it is dense, and main memory has    as many as these have tokens, once, and as many device slots
pages that are brought up for it
its own pages become shared         none; its copies of pages that others have shared already are free
it leaves its pages, and was        as many as the prefix has tokens, for copies of it or for pages in the
dense                               host pool that have moved down (``Request.copies_of_shared``). Then it
                                    lets go of the prefix; those of pages without other users are free
==================================  ====================================================================

It gets its hot buffer behind that, so it finds the device slots of the pages that it has left.
"""

from __future__ import annotations

from typing import NamedTuple

from hisparse_pd.core.paging.pools import SlotCounts


class PlanSlots(NamedTuple):
    """Numbers of free slots at certain times of a plan, as far as it is made."""

    at_end: SlotCounts
    """Those that are free once the plan is carried out."""
    behind_exchanges: SlotCounts
    """Those that are free when the last of its exchanges is carried out."""
    least: SlotCounts
    """The fewest that are free in each pool up to the end of any exchange."""

    @classmethod
    def of(cls, free: SlotCounts) -> PlanSlots:
        """Return the slots of an empty plan, before which ``free`` are free."""
        return cls(free, free, free)

    @property
    def suffice(self) -> bool:
        """Whether the plan can be carried out."""
        return _NONE.fits_in(self.least) and _NONE.fits_in(self.at_end)

    def with_used(self, held: SlotCounts) -> PlanSlots:
        """Return them if a request of the plan uses pages with the slots ``held``, which nobody used."""
        return PlanSlots(*(free - held for free in self))

    def with_exchange(self, given: SlotCounts, freed: SlotCounts) -> PlanSlots:
        """Return them if one more exchange takes ``given``, of which slots that its request gives back count
        as negative. ``freed``: slots of pages that nobody uses once it has left them."""
        behind = self.behind_exchanges - given + freed
        before_it_lets_go = behind - freed + SlotCounts(device=freed.device)
        return PlanSlots(self.at_end - given + freed, behind, self.least.least(before_it_lets_go))

    def with_given(self, slots: SlotCounts) -> PlanSlots:
        """Return them if ``slots`` are given away behind the exchanges."""
        return self._replace(at_end=self.at_end - slots)


_NONE = SlotCounts()
