"""The first steps of every process: standard streams, logging, signals, and ending with its parent process.

``commands/cli.py`` calls ``occupy_standard_streams`` for all; each service and child process sets up its
logging, and children of ``multiprocessing`` call ``die_with_parent``. A node's first front starts engines on
a CPU with BRIEF_SPIN in their environment, unless ``openmp_wait_is_set``.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

log = logging.getLogger(__name__)

BRIEF_SPIN = {"GOMP_SPINCOUNT": "1000"}
"""Environment of engines on a CPU, of which several may share its cores. Between two parallel regions each
thread of GNU's OpenMP, which torch uses, would spin for some 10 ms and keep a core from threads with work."""
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which an operator chooses how long OpenMP's threads spin."""

SWITCH_SECS = 0.0005
"""Time for which a thread keeps the interpreter while another one waits for it (``share_interpreter``)."""

_STDERR = 2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_LOG_FORMAT = "%(asctime)s %(levelname)-7s {name} %(name)s: %(message)s"


def occupy_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 if they are closed, for this process and its children.

    Otherwise the next socket or pool would get one of these numbers, and with it what a library prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def share_interpreter() -> None:
    """Hand the interpreter to a thread that waits for it within SWITCH_SECS, in this process from now on.

    For loops with threads beside them: a loop gives the interpreter up in each system call and each larger
    call of numpy, and would then wait for Python's 5 ms while a thread computes.
    """
    sys.setswitchinterval(SWITCH_SECS)


def setup_logging(level: str, name: str) -> None:
    """Log to stderr from ``level`` ("debug" … "error") on. ``name`` is this process's name in the log."""
    log_format = _LOG_FORMAT.format(name=name)
    logging.basicConfig(level=level.upper(), format=log_format, stream=sys.stderr, force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def say(words: str) -> None:
    """Print on standard output, or log if that fails because nobody reads it or its disk is full."""
    try:
        print(words, flush=True)
    except OSError as error:
        log.error("standard output takes nothing: %s; %s", error.strerror, words)
        with open(os.devnull, "wb") as nowhere:  # without this, flushing the rest at exit would fail again
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def openmp_wait_is_set() -> bool:
    """Whether the environment already says how OpenMP's threads wait."""
    return any(name in os.environ for name in _WAIT_VARIABLES)


@contextmanager
def environment_of_children(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` for processes that are started in the context, so that they have them from the
    start."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a service in order.

    SIGHUP, for a terminal that is gone, is one of them, unless the service was started to ignore it
    (``nohup``).
    """
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _STOP_SIGNALS if not (ignores_hangup and number is signal.SIGHUP)]


def die_with_parent() -> None:
    """Make a child started by ``multiprocessing`` end with its parent, and leave signals to the parent.

    The kernel kills this process when the parent's starting thread ends in any way. A parent that died before
    the call is noticed here. Does nothing in a process that ``multiprocessing`` did not start.
    """
    if multiprocessing.parent_process() is None:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if threading.current_thread() is threading.main_thread():
        for number in _STOP_SIGNALS:  # terminals and supervisors send these to all processes of a service
            signal.signal(number, signal.SIG_IGN)
    if not parent_is_alive():
        raise SystemExit("the process that started this one is gone")


def parent_is_alive() -> bool:
    """Whether the process that started this one still runs; always true if ``multiprocessing`` did not start
    it."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.pid == os.getppid()
