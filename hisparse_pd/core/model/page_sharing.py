"""Makes the shared memory through which the ranks of one machine agree, and the sockets between them.

"Page" here is this memory (``rank_page.py``), and no page of a pool. At the socket between two ranks, one may
sleep until the other has written.

``RankGroup`` calls ``share_page`` once, at the start. The page is a memfd, and the socket that hands it out
has an abstract name: nothing is left when the ranks have ended, in whatever way. A process that finds the
name must also know the nonce.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

from hisparse_pd.core.model.rank_page import RankPage, page_bytes

log = logging.getLogger(__name__)

ANSWER_SECS: Final = 10.0
"""How long ranks wait for each other here, when all know that the page is on its way."""
_HELLO_BYTES: Final = 128
"""Most bytes of a message between the ranks: a nonce and a rank."""


def share_page(rank: int, size: int, meet: Callable[[str, str], Mapping[int, str]]) -> RankPage | None:
    """Make the page and share it among all ranks, which make this call together. Returns None in every rank
    if one of them cannot have it.

    The ranks meet three times. First rank 0 gives the others its socket's name and nonce, or "" without a
    socket. Then all tell what went wrong until the others had connected, and at last what went wrong when
    the page was handed over. ``meet(what, word)``: ``RankGroup.meet``, which waits until all ranks have done
    ``what``, and returns each rank's word; its errors pass through.
    """
    with contextlib.ExitStack() as undo:
        offer: PageOffer | None = None
        request: PageRequest | None = None
        trouble = ""
        if rank == 0:
            offer, trouble = _tried(PageOffer, undo)
        word = meet("offered shared memory", "" if offer is None else offer.word)[0]
        if rank > 0:
            # Without an offer all others fail to connect. Of all troubles the lowest rank's is logged: rank
            # 0's, which says why.
            request, trouble = _tried(lambda: PageRequest(word, rank), undo)
        troubles = meet("asked for shared memory", trouble)  # rank 0 tells why it has no socket
        source = offer or request
        if source is not None and not any(troubles.values()):
            page, trouble = _tried(lambda: source.share(size), undo)
            troubles = meet("got shared memory", trouble)
            if page is not None and not any(troubles.values()):
                undo.pop_all()  # the page stays open
                source.close()
                log.info("the ranks agree through shared memory")
                return page
    refusing = min(rank for rank in troubles if troubles[rank])
    log.info(
        "the ranks agree over the network: rank %d has no shared memory: %s", refusing, troubles[refusing]
    )
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
    """Rank 0's side: an abstract socket, at which other ranks ask for the page."""

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
        """Make the page and send it to all other ranks of ``range(size)``, with an end of a socket pair to
        each rank. They must have asked for it. Raises OSError.
        """
        with contextlib.ExitStack() as stack:
            askers = self._accept_ranks(size, stack)
            fd = os.memfd_create("hisparse-pd ranks", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.ftruncate(fd, page_bytes(size))
            sockets: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(size)}
            for rank in range(size):
                for other in range(rank):
                    ends = socket.socketpair()
                    sockets[rank][other], sockets[other][rank] = map(stack.enter_context, ends)
            for rank, asker in askers.items():
                ends_of_rank = [end.fileno() for _, end in sorted(sockets[rank].items())]
                socket.send_fds(asker, [b"page"], [fd, *ends_of_rank])
            own = {rank: end.dup() for rank, end in sockets[0].items()}  # ``stack`` closes the originals
            return _page_of(0, size, fd, own)

    def _accept_ranks(self, size: int, stack: contextlib.ExitStack) -> dict[int, socket.socket]:
        """Accept the connections of the other ranks. A connection without the nonce is ignored."""
        askers: dict[int, socket.socket] = {}
        ends_at = time.monotonic() + ANSWER_SECS
        while len(askers) < size - 1:
            self._listener.settimeout(max(0.001, ends_at - time.monotonic()))
            asker = stack.enter_context(self._listener.accept()[0])
            # All ranks sent their nonces before the second meeting. A connection without one is a stranger's,
            # and must not hold this loop up.
            with contextlib.suppress(OSError, ValueError):
                nonce, rank = asker.recv(_HELLO_BYTES, socket.MSG_DONTWAIT).split()
                if secrets.compare_digest(nonce, self._nonce.encode()) and 0 < int(rank) < size:
                    asker.settimeout(ANSWER_SECS)
                    askers[int(rank)] = asker
        return askers

    def close(self) -> None:
        self._listener.close()


class PageRequest:
    """Another rank's side: a connection to rank 0, until it has the page."""

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
            # As ``PageOffer.share`` sends them: the page's, then a socket's to each other rank, in order.
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


def _page_of(rank: int, size: int, fd: int, others: Mapping[int, socket.socket]) -> RankPage:
    """Map the page. Raises OSError, having closed ``others``."""
    try:
        return RankPage(rank, mmap.mmap(fd, page_bytes(size)), others)
    except OSError:
        for other in others.values():
            other.close()
        raise
