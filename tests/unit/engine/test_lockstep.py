"""Ranks in threads that agree on their forwards, with work and rings that come at random times."""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass, field

import pytest
import torch

from hisparse_pd.core.model.rank_bells import RankBells
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.engine.lockstep import Lockstep, NodeStep

NUM_RANKS = 3
MEETING_SECS = 60.0


class Meeting:
    """The same as RankGroup.agree, for threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=MEETING_SECS)
        self._said: list[tuple[int, ...]] = [()] * NUM_RANKS

    def agree(self, rank: int, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        self._said[rank] = values
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class Bells(RankBells):
    def __init__(self) -> None:
        self.num_rings = 0
        self.rings: list[int] = []
        self.others_inboxes: list[queue.SimpleQueue[int | str]] = []

    def ring(self, number: int) -> None:
        self.num_rings += 1
        for inbox in self.others_inboxes:
            inbox.put(number)

    def heard(self) -> list[int]:
        rings, self.rings = self.rings, []
        return rings


class Group(RankGroup):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.step_tokens = rank, NUM_RANKS, 0
        self.num_agreements = 0
        self.bells: Bells = Bells()
        self._meeting = meeting

    def agree(self, *values: int) -> list[tuple[int, ...]]:
        self.num_agreements += 1
        return self._meeting.agree(self.rank, tuple(int(value) for value in values))


@dataclass
class Rank:
    """An engine's loop: messages, work, agreement, forward."""

    number: int
    group: Group
    inbox: queue.SimpleQueue[int | str] = field(default_factory=queue.SimpleQueue)
    steps: list[NodeStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lockstep = Lockstep(self.group)
        self.bells: Bells = self.group.bells
        self.thread = threading.Thread(target=self.run)

    def hear(self, number: int) -> None:
        self.bells.rings.append(number)
        self.lockstep.read_rings()

    def run(self) -> None:
        num_left, is_stopping = 0, False
        while True:
            try:
                is_waiting = num_left == 0 and not is_stopping and not self.lockstep.is_due
                message = self.inbox.get(timeout=MEETING_SECS if is_waiting else None) if is_waiting else None
                while message is not None or not self.inbox.empty():
                    if message is None:
                        message = self.inbox.get_nowait()
                    match message:
                        case int():
                            self.hear(message)
                        case "work":
                            num_left += 3
                        case _:
                            is_stopping = True
                    message = None
            except queue.Empty:
                raise AssertionError(f"rank {self.number} waits for ever") from None
            step = self.lockstep.agree(1 + self.number if num_left else 0, is_stopping=is_stopping)
            if step.is_last:
                return
            if step.num_tokens:
                self.steps.append(step)
                assert self.group.step_tokens == step.num_tokens
                num_left = max(num_left - 1, 0)


def make_ranks() -> list[Rank]:
    meeting = Meeting()
    ranks = [Rank(number, Group(number, meeting)) for number in range(NUM_RANKS)]
    for rank in ranks:
        rank.bells.others_inboxes = [other.inbox for other in ranks if other is not rank]
    return ranks


@pytest.mark.parametrize("seed", range(20))
def test_all_make_the_same_steps_whenever_work_comes(seed: int) -> None:
    drawn = random.Random(seed)
    ranks = make_ranks()
    for rank in ranks:
        rank.thread.start()
    num_works = 40
    for _ in range(num_works):
        drawn.choice(ranks).inbox.put("work")
        if drawn.random() < 0.3:  # a ring that is late, or belongs to no forward
            drawn.choice(ranks).inbox.put(drawn.randrange(3) - 1)
    for rank in drawn.sample(ranks, NUM_RANKS):
        rank.inbox.put("stop")
    for rank in ranks:
        rank.thread.join(2 * MEETING_SECS)
        assert not rank.thread.is_alive(), f"rank {rank.number} hangs"
    assert ranks[0].steps == ranks[1].steps == ranks[2].steps
    assert len({rank.group.num_agreements for rank in ranks}) == 1


def test_nobody_agrees_while_all_are_idle() -> None:
    ranks = make_ranks()
    for rank in ranks:
        assert rank.lockstep.agree(0) == NodeStep(0)
        assert rank.group.num_agreements == rank.bells.num_rings == 0


def test_a_ring_for_an_agreement_that_was_made_is_for_nothing() -> None:
    ranks = make_ranks()
    threads = [
        threading.Thread(target=rank.lockstep.agree, args=(number,))
        for number, rank in enumerate(ranks[1:], 1)
    ]
    ranks[0].hear(0)
    for thread in threads:
        thread.start()
    assert ranks[0].lockstep.agree(0) == NodeStep(2)
    for thread in threads:
        thread.join(MEETING_SECS)
    assert ranks[0].lockstep.is_due, "work goes on"
    threads = [threading.Thread(target=rank.lockstep.agree, args=(0,)) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    assert ranks[0].lockstep.agree(0) == NodeStep(0)
    for thread in threads:
        thread.join(MEETING_SECS)
    ranks[0].hear(0)
    ranks[0].hear(1)
    assert not ranks[0].lockstep.is_due


def test_a_node_of_one_rank_asks_nobody() -> None:
    lockstep = Lockstep(None)
    lockstep.read_rings()
    assert lockstep.agree(5, is_split=True) == NodeStep(5, is_split=True)
    assert lockstep.agree(0, is_stopping=True).is_last


def test_an_error_in_a_step_ends_the_engine_where_others_wait_or_the_device_is_lost() -> None:
    alone, beside_others = Lockstep(None), Lockstep(Group(0, Meeting()))
    failed, lost = ValueError("too long"), torch.AcceleratorError("the device is lost")
    assert [alone.ends_engine(error) for error in (failed, lost)] == [False, True]
    assert [beside_others.ends_engine(error) for error in (failed, lost)] == [True, True]


def test_all_ranks_take_the_most_positions_that_one_wants() -> None:
    class Said(Group):
        def agree(self, *values: int) -> list[tuple[int, ...]]:
            return [values, (7, 0, 0, 4), (3, 0, 0, 2)]

    lockstep = Lockstep(Said(0, Meeting()))
    assert lockstep.agree(5, num_new=1) == NodeStep(7, num_new=4)
    assert Lockstep(None).agree(5, num_new=3) == NodeStep(5, num_new=3)
