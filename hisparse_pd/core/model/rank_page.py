"""A page of shared memory, and sockets, by which the ranks of one machine agree on numbers in microseconds.

``RankGroup.agree`` uses it before every step; over a network it uses gloo instead. ``page_sharing.py`` makes
the page. In an agreement a rank writes its numbers into its row of the page and reads the others' rows until
all are there. It polls for a moment and then sleeps at its socket to a rank whose row is missing, which sends
a byte when it has written. The same sockets show that a rank has ended.

Not all machines keep the order of two writes between processors (ARM does not), so nothing here depends on
it. Each word has 8 aligned bytes, is written and read as a whole, and carries a value and the number of its
agreement: a row is complete when all of its words carry the number. Agreements use two banks of rows in turn.
A rank writes into a bank again in the agreement after the next. It gets there only when the others have
written their rows of the next one, and before that they had to read all of this bank. A row therefore belongs
to this agreement or to the last but one, never to a newer one, and the low bits of the number suffice to
tell.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

WIDTH: Final = 4
"""Words of a row; more values take several rounds."""
NUMBER_BITS: Final = 16
"""Low bits of a word, which carry the number of its agreement; the other bits carry a value."""
MAX_VALUE: Final = (1 << (63 - NUMBER_BITS)) - 1
SPIN_SECS: Final = 200e-6
"""How long a rank polls before it sleeps, where each rank has a core; waking one takes some 30 us."""
SHORT_SPIN_SECS: Final = 20e-6
"""How long a rank polls where ranks share cores; it yields the core between two looks."""
LOOK_SECS: Final = 0.005
"""Longest sleep between two looks. A wake-up may be missed: when a rank goes to sleep, its entry in
``_awaited`` may not yet be visible to the others, nor their numbers to it."""
_NUMBER_MASK: Final = (1 << NUMBER_BITS) - 1
_WORD_BYTES: Final = 8


class RankLost(RuntimeError):
    """A rank has ended, or has not spoken in time."""


class RankPage:
    """One rank's view of the page. Only one thread may use it at a time."""

    def __init__(self, rank: int, memory: mmap.mmap, others: Mapping[int, socket.socket]) -> None:
        """``others``: a connection to each other rank. ``close`` closes these and ``memory``."""
        self._rank, self._size = rank, len(others) + 1
        self._memory, self._others = memory, others
        words = memoryview(memory).cast("q")  # native format: one 8-byte access for each item
        num_words = self._size * WIDTH
        self._banks = words[:num_words], words[num_words : 2 * num_words]
        self._awaited = words[2 * num_words : 2 * num_words + self._size]
        """Entry i is 1 + the rank that must wake rank i, or 0 while rank i is awake."""
        self._views = words, *self._banks, self._awaited
        self._number = 0
        """Number of the last agreement, from 1."""
        self._ended: set[int] = set()
        self._lost = ""
        """Why an agreement failed, after which all later ones fail too; empty before."""
        has_cores = len(os.sched_getaffinity(0)) >= self._size
        self._spin_secs = SPIN_SECS if has_cores else SHORT_SPIN_SECS

    def agree(self, values: Sequence[int], timeout_secs: float) -> list[tuple[int, ...]]:
        """Tell all ranks ``values``. Returns those of every rank, in the order of ranks.

        All ranks give equally many values, between -MAX_VALUE and MAX_VALUE. Raises RankLost if a rank has
        ended or is silent for ``timeout_secs``: in each rank, now or in its next agreement. Raises ValueError
        for a value out of bounds.
        """
        if len(values) > WIDTH:
            first, rest = (self.agree(part, timeout_secs) for part in (values[:WIDTH], values[WIDTH:]))
            return [some + others for some, others in zip(first, rest, strict=True)]
        if self._lost:
            raise RankLost(self._lost)
        for value in values:
            if not -MAX_VALUE <= value <= MAX_VALUE:
                raise ValueError(f"a rank cannot say {value}; at most {MAX_VALUE}, and as far below 0")
        self._number += 1
        number = self._number & _NUMBER_MASK
        bank = self._banks[self._number & 1]
        for index in range(WIDTH):
            value = values[index] if index < len(values) else 0
            bank[self._rank * WIDTH + index] = value << NUMBER_BITS | number
        self.wake_others()
        said = [word >> NUMBER_BITS for word in self._wait_for_words(bank, number, timeout_secs)]
        return [tuple(said[start : start + len(values)]) for start in range(0, len(said), WIDTH)]

    def close(self) -> None:
        """Close the page and the connections, so that the others see this rank as ended. May be called
        again."""
        for view in reversed(self._views):
            view.release()
        self._memory.close()
        for other in self._others.values():
            other.close()

    def wake_others(self) -> None:
        """Wake the ranks that sleep until this one has spoken."""
        awaited = self._awaited.tolist()
        if any(awaited):
            for rank, waker in enumerate(awaited):
                if waker == self._rank + 1 and rank != self._rank:
                    with contextlib.suppress(OSError):  # it has ended, or its socket is full
                        self._others[rank].send(b"!", socket.MSG_DONTWAIT)

    def _wait_for_words(self, bank: memoryview, number: int, timeout_secs: float) -> list[int]:
        """Wait until all words of ``bank`` carry ``number``. Returns the words."""
        words = bank.tolist()
        if _have_number(words, number):
            return words
        started = time.monotonic()
        try:
            while True:
                waited_secs = time.monotonic() - started
                words = bank.tolist()
                if _have_number(words, number):
                    return words
                if waited_secs < self._spin_secs:
                    os.sched_yield()
                    continue
                missing = sorted(
                    {i // WIDTH for i, word in enumerate(words) if word & _NUMBER_MASK != number}
                )
                self._raise_if_lost(missing, waited_secs, timeout_secs)
                if self._awaited[self._rank] != missing[0] + 1:
                    self._awaited[self._rank] = missing[0] + 1  # look once more before the sleep
                else:
                    self._sleep(missing, min(LOOK_SECS, timeout_secs - waited_secs))
        finally:
            if self._awaited[self._rank]:  # others poll this word, so write only to change it
                self._awaited[self._rank] = 0

    def _raise_if_lost(self, missing: Sequence[int], waited_secs: float, timeout_secs: float) -> None:
        """Raise RankLost if one of ``missing`` has ended, or the time is up."""
        if ended := [rank for rank in missing if rank in self._ended]:
            self._lost = f"rank {ended[0]} has ended, or has given up"
        elif waited_secs >= timeout_secs:
            names = " and ".join(map(str, missing))
            self._lost = f"no word from rank {names} within {timeout_secs:g} s"
        else:
            return
        for other in self._others.values():
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)  # so that the other ranks stop waiting, too
        raise RankLost(self._lost)

    def _sleep(self, missing: Sequence[int], secs: float) -> None:
        """Sleep until one of ``missing`` has sent a byte or ended."""
        poll = select.poll()
        ranks = {self._others[rank].fileno(): rank for rank in missing}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(math.ceil(1e3 * secs)):
            rank = ranks[descriptor]
            try:
                has_ended = not self._others[rank].recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                has_ended = False
            except OSError:
                has_ended = True
            if has_ended:
                self._ended.add(rank)


def page_bytes(size: int) -> int:
    """Return the bytes of a page for ``size`` ranks: two banks of rows, and ``_awaited``."""
    return _WORD_BYTES * size * (2 * WIDTH + 1)


def _have_number(words: Sequence[int], number: int) -> bool:
    return [word & _NUMBER_MASK for word in words].count(number) == len(words)
