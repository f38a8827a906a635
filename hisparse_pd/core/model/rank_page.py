"""A page of shared memory, and sockets, by which the ranks of one machine agree on numbers in microseconds.

In an agreement a rank writes its numbers into its row of the page and reads the others' rows until all are
there. It polls for a moment and then sleeps at its socket to a rank whose row is missing, which sends a byte
when it has written. The same sockets show that a rank has ended.

Not all machines keep the order of two writes between processors (ARM does not), so nothing here depends on
it. Each word has 8 aligned bytes, is written and read as a whole, and carries a value and the number of its
agreement: a row is complete when all of its words carry the number. Two banks of rows alternate. A rank
writes into a bank again only when the others have spoken in the agreement between, for which they had to read
all of this bank. A row is therefore of this agreement or of the last but one, never newer, and some bits of
the number suffice to tell.

The page is a memfd, and the socket that hands it out has an abstract name: nothing is left when the ranks
have ended, in whatever way. A process that finds the name must also know the nonce.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

log = logging.getLogger(__name__)

WIDTH: Final = 4
"""Words of a row; more values take several rounds."""
NUMBER_BITS: Final = 16
MAX_VALUE: Final = (1 << (63 - NUMBER_BITS)) - 1
SPIN_SECS: Final = 200e-6
"""How long a rank polls before it sleeps, where each rank has a core; waking one takes some 30 us."""
SHORT_SPIN_SECS: Final = 20e-6
"""How long a rank polls where ranks share cores; it yields the core between two looks."""
LOOK_SECS: Final = 0.005
"""Longest sleep between two looks, because when a rank went to sleep, neither its note that it sleeps nor
another's numbers may have been visible to the other side yet."""
ANSWER_SECS: Final = 10.0
"""How long ranks wait for the page, when all know that it comes."""
_NUMBER_MASK: Final = (1 << NUMBER_BITS) - 1
_WORD_BYTES: Final = 8
_HELLO_BYTES: Final = 128


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
        self._ended: set[int] = set()
        self._lost = ""
        has_cores = len(os.sched_getaffinity(0)) >= self._size
        self._spin_secs = SPIN_SECS if has_cores else SHORT_SPIN_SECS

    def agree(self, values: Sequence[int], timeout_secs: float) -> list[tuple[int, ...]]:
        """Tell all ranks ``values``. Returns those of every rank, in the order of ranks.

        All ranks give equally many values, between -MAX_VALUE and MAX_VALUE. Raises RankLost, in each rank
        now or in its next agreement, and ValueError for a value out of bounds.
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
        said = [word >> NUMBER_BITS for word in self._all_of(bank, number, timeout_secs)]
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
            for rank, its_waker in enumerate(awaited):
                if its_waker == self._rank + 1 and rank != self._rank:
                    with contextlib.suppress(OSError):  # it has ended, or its socket is full
                        self._others[rank].send(b"!", socket.MSG_DONTWAIT)

    def _all_of(self, bank: memoryview, number: int, timeout_secs: float) -> list[int]:
        """Wait until all words of ``bank`` carry ``number``. Returns the words."""
        words = bank.tolist()
        if _are_all(words, number):
            return words
        started = time.monotonic()
        try:
            while True:
                waited_secs = time.monotonic() - started
                words = bank.tolist()
                if _are_all(words, number):
                    return words
                if waited_secs < self._spin_secs:
                    os.sched_yield()
                    continue
                missing = sorted(
                    {i // WIDTH for i, word in enumerate(words) if word & _NUMBER_MASK != number}
                )
                self._check(missing, waited_secs, timeout_secs)
                if self._awaited[self._rank] != missing[0] + 1:
                    self._awaited[self._rank] = missing[0] + 1  # then look once more
                else:
                    self._sleep(missing, min(LOOK_SECS, timeout_secs - waited_secs))
        finally:
            if self._awaited[self._rank]:  # others poll this word, so write only to change it
                self._awaited[self._rank] = 0

    def _check(self, missing: Sequence[int], waited_secs: float, timeout_secs: float) -> None:
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
                other.shutdown(socket.SHUT_RDWR)  # they need not wait, too
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


def _are_all(words: Sequence[int], number: int) -> bool:
    return [word & _NUMBER_MASK for word in words].count(number) == len(words)


# --- making and sharing the page ----------------------------------------------------------------------------


def share_page(rank: int, size: int, meet: Callable[[str, str], Mapping[int, str]]) -> RankPage | None:
    """Make the page and share it among all ranks. Returns None in every rank if one of them cannot have it.

    ``meet``: ``RankGroup.meet``, whose errors pass through.
    """
    with contextlib.ExitStack() as undo:
        offer: PageOffer | None = None
        request: PageRequest | None = None
        trouble = ""
        if rank == 0:
            offer, trouble = _tried(PageOffer, undo)
        word = meet("offered shared memory", "" if offer is None else offer.word)[0]
        if rank > 0:
            request, trouble = _tried(lambda: PageRequest(word, rank), undo)
        troubles = meet("asked for shared memory", trouble)
        source = offer or request
        if source is not None and not any(troubles.values()):
            page, trouble = _tried(lambda: source.share(size), undo)
            troubles = meet("got shared memory", trouble)
            if page is not None and not any(troubles.values()):
                undo.pop_all()
                source.close()
                log.info("the ranks agree through shared memory")
                return page
    who = min(rank for rank in troubles if troubles[rank])
    log.info("the ranks agree over the network: rank %d has no shared memory: %s", who, troubles[who])
    return None


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


def _tried(make: Callable[[], C], undo: contextlib.ExitStack) -> tuple[C | None, str]:
    """Return the result of ``make``, which ``undo`` closes, or None and the error."""
    try:
        return undo.enter_context(contextlib.closing(make())), ""
    except OSError as error:
        return None, str(error) or repr(error)


class PageOffer:
    """Rank 0's abstract socket, at which other ranks ask for the page."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._nonce = secrets.token_hex(16)
        name = f"hisparse-pd ranks {secrets.token_hex(16)}"
        self.word = f"{name} {self._nonce}"
        """The name and nonce for the other ranks; a secret between them."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind("\0" + name)
            self._listener.listen(socket.SOMAXCONN)
        except OSError:
            self.close()
            raise

    def share(self, size: int) -> RankPage:
        """Make the page and send it to all other ranks of ``range(size)``, which have asked for it.

        Raises OSError.
        """
        with contextlib.ExitStack() as stack:
            askers = self._askers(size, stack)
            fd = os.memfd_create("hisparse-pd ranks", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.ftruncate(fd, _num_bytes(size))
            to_others: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(size)}
            for rank in range(size):
                for other in range(rank):
                    ends = socket.socketpair()
                    to_others[rank][other], to_others[other][rank] = map(stack.enter_context, ends)
            for rank, asker in askers.items():
                ends_of_rank = [end.fileno() for _, end in sorted(to_others[rank].items())]
                socket.send_fds(asker, [b"page"], [fd, *ends_of_rank])
            own = {rank: end.dup() for rank, end in to_others[0].items()}
            return _page_of(0, size, fd, own)

    def _askers(self, size: int, stack: contextlib.ExitStack) -> dict[int, socket.socket]:
        """Return the connections of the other ranks. One without the nonce is ignored."""
        askers: dict[int, socket.socket] = {}
        ends_at = time.monotonic() + ANSWER_SECS
        while len(askers) < size - 1:
            self._listener.settimeout(max(0.001, ends_at - time.monotonic()))
            asker = stack.enter_context(self._listener.accept()[0])
            with contextlib.suppress(OSError, ValueError):
                nonce, rank = asker.recv(_HELLO_BYTES, socket.MSG_DONTWAIT).split()
                if secrets.compare_digest(nonce, self._nonce.encode()) and 0 < int(rank) < size:
                    asker.settimeout(ANSWER_SECS)
                    askers[int(rank)] = asker
        return askers

    def close(self) -> None:
        self._listener.close()


class PageRequest:
    """Another rank's connection to rank 0, until it has the page."""

    def __init__(self, word: str, rank: int) -> None:
        """Raises OSError, for example if rank 0 is on another machine or in another network namespace."""
        self._rank = rank
        name, _, nonce = word.rpartition(" ")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_SECS)
        try:
            self._socket.connect("\0" + name)
            self._socket.send(f"{nonce} {rank}".encode())
        except OSError:
            self.close()
            raise

    def share(self, size: int) -> RankPage:
        """Receive the page that rank 0 has made for the ranks of ``range(size)``. Raises OSError."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, _HELLO_BYTES, size)
        try:
            if len(descriptors) != size:
                raise OSError(f"{len(descriptors)} of {size} descriptors came with the page of rank 0")
            ranks = [rank for rank in range(size) if rank != self._rank]
            others = {rank: socket.socket(fileno=fd) for rank, fd in zip(ranks, descriptors[1:], strict=True)}
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        try:
            return _page_of(self._rank, size, descriptors[0], others)
        finally:
            os.close(descriptors[0])

    def close(self) -> None:
        self._socket.close()


def _num_bytes(size: int) -> int:
    return _WORD_BYTES * size * (2 * WIDTH + 1)


def _page_of(rank: int, size: int, fd: int, others: Mapping[int, socket.socket]) -> RankPage:
    try:
        return RankPage(rank, mmap.mmap(fd, _num_bytes(size)), others)
    except OSError:
        for other in others.values():
            other.close()
        raise
