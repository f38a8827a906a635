"""The process of a node's further machines, which run engines and no front.

``serving/api/node.py`` calls ``follow`` on every machine but the first. The engines connect to the fronts on
the first machine, which shut them down. When one engine ends, the whole node ends.
"""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import closing
from multiprocessing.connection import wait

from hisparse_pd.base.process import setup_logging, stop_signals
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.serving.http.first_front import EngineProcesses, EngineTarget, S

log = logging.getLogger(__name__)


def follow(settings: S, role: str, target: EngineTarget[S]) -> int:
    """Run this machine's engines until the node ends. Returns the exit status, 0 if the fronts ended it.

    A cluster sends its signal to all machines at once, but the first machine has requests to finish. After a
    signal, this machine therefore ends with the first one, when the time to finish is over, or at a second
    signal.
    """
    setup_logging(settings.log_level, f"{role} machine {settings.node_rank}")
    wakeup_reader, wakeup_writer = socket.socketpair()
    with closing(wakeup_reader), closing(wakeup_writer):
        wakeup_writer.setblocking(False)
        signal.set_wakeup_fd(wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in stop_signals():
            signal.signal(number, lambda *_: None)  # the byte that Python writes to the socket is enough
        try:
            engines = EngineProcesses(target, settings, f"{role}-engine")
        except StartError as error:
            log.error("cannot start: %s", error)
            return 1
        try:
            engines.start()
            ranks = settings.ranks_here
            log.info("ranks %d to %d, meeting at %s", ranks[0], ranks[-1], settings.dist_init_addr)
            if wakeup_reader in wait([wakeup_reader, *engines.sentinels]):
                wakeup_reader.recv(1)
                log.info("told to end: leaving with the node, in %g s at most", settings.drain_timeout_secs)
                wait([wakeup_reader, *engines.sentinels], settings.drain_timeout_secs)
            engines.wait()
            log.info("%s", engines.exits())
            return 0 if engines.have_succeeded else 1
        finally:
            engines.stop(graceful=False)
            signal.set_wakeup_fd(-1)
