"""Host names become addresses here, within a time limit.

The system's resolver has none that a caller could set, and it blocks. ZMQ asks it in the one thread that
moves the messages of all connections, so that one name server that does not answer would stall them all.
"""

from __future__ import annotations

import queue
import socket
import threading
import time

from protocol.access import parse_address

MAX_ADDRESSES = 8
_MAX_THREADS = 16
_free_threads = threading.BoundedSemaphore(_MAX_THREADS)
"""A name server that does not answer holds a thread for up to a minute, whoever waits for it."""


def is_address(host: str) -> bool:
    """Whether ``host`` needs no resolver."""
    return parse_address(host) is not None


def resolve(host: str, deadline: float) -> list[str]:
    """The addresses of ``host``, the first ones of many, best first; an address is its own.

    ``deadline``: of ``time.monotonic``. Raises OSError, also when the resolver has not answered by then.
    """
    if is_address(host):
        return [host]
    late = OSError("not resolved in time; look at this machine's name servers")
    if not _free_threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise late
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()
    threading.Thread(target=_ask, args=(host, answers), name=f"resolve {host}", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise late from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _ask(host: str, answers: queue.SimpleQueue[list[str] | Exception]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answers.put(list(dict.fromkeys(str(entry[4][0]) for entry in found))[:MAX_ADDRESSES])
    except (OSError, UnicodeError) as error:
        answers.put(error if isinstance(error, OSError) else OSError(str(error)))
    finally:
        _free_threads.release()
