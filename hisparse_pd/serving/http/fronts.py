"""The fronts of a node: processes that serve its HTTP port together, and how they start and end.

The first front (``first_front.py``) starts the engines and the other fronts, gets the signals, and decides
when all of them exit; ``Fronts`` is its view of the others. Each other front runs ``serve_further``, and
reads the first one's instruction on the ``Board``, which all fronts share. A front that exits by itself ends
the node, and a supervisor starts all of it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp

from hisparse_pd.base.process import die_with_parent
from hisparse_pd.serving.http.board import Board, Instruction
from hisparse_pd.serving.http.children import EXIT_SECS, Children
from hisparse_pd.serving.http.engine_link import EngineLink, LinkState
from hisparse_pd.serving.http.listening import Listener
from hisparse_pd.serving.http.metrics import FrontMetrics

log = logging.getLogger(__name__)

METRICS_SECS = 1.0
"""Interval at which a front publishes its metrics on the board."""
_POLL_SECS = 0.05
"""Interval at which the other fronts read the first front's instruction."""

SHUTTING_DOWN = "the node is shutting down; send the request again"
WHAT_DIED = {
    Instruction.ENGINE_DIED: str(LinkState.GONE),
    Instruction.FRONT_DIED: "a front process of the node has died",
}
"""Instructions that follow the loss of a process, with the words about it for clients and the log. The text
of ``LinkState.GONE`` is "the engine has died"."""


async def write_metrics(board: Board, front: int, metrics: FrontMetrics) -> None:
    """Publish a front's metrics every ``METRICS_SECS`` until cancelled, if the node has several fronts.

    Metrics that are too long are logged once.
    """
    is_logged = False
    while board.num_fronts > 1:
        try:
            board.write_metrics(front, metrics.pack())
        except ValueError as error:
            if not is_logged:
                log.error("%s: /metrics keeps this front's former counts; restart the node", error)
            is_logged = True
        await asyncio.sleep(METRICS_SECS)


class Fronts(Children):
    """The fronts but the first: its child processes, numbered from 1."""

    def __init__(self, board: Board, metrics: FrontMetrics) -> None:
        """``metrics``: the first front's own."""
        super().__init__()
        self._board = board
        self._metrics = metrics

    def start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start the other fronts. ``target(number, *arguments)`` runs one; the child imports it by name."""
        for number in range(1, self._board.num_fronts):
            self.spawn(f"{name} {number}", _run_front, target, number, *arguments)

    async def write_metrics(self) -> None:
        """Publish the first front's metrics until cancelled."""
        await write_metrics(self._board, 0, self._metrics)

    def stop_accepting(self) -> None:
        self._board.instruct(Instruction.STOP_ACCEPTING)

    async def leave(self, instruction: Instruction) -> None:
        """Tell the other fronts to exit, and wait for them for ``EXIT_SECS`` at most.

        ``instruction``: LEAVE, ENGINE_DIED or FRONT_DIED.
        """
        self._board.instruct(instruction)
        deadline = time.monotonic() + EXIT_SECS
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


async def serve_further(
    number: int, link: EngineLink, metrics: FrontMetrics, board: Board, listener: Listener, app: ASGIApp
) -> None:
    """Serve as front ``number`` until the first front tells it to exit. If the first front dies, the kernel
    ends this one."""
    link.start()
    server = listener.server(app, process=number)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    writing = asyncio.create_task(write_metrics(board, number, metrics))
    try:
        # LEAVE and the instructions above it all end this front.
        while (instruction := board.instruction) < Instruction.LEAVE and not serving.done():
            if instruction is Instruction.STOP_ACCEPTING and link.state is LinkState.SERVING:
                link.stop_accepting()
            await asyncio.sleep(_POLL_SECS)
        if instruction in WHAT_DIED:
            # Whichever process died, requests in flight end in the same way; only the words differ.
            link.engine_died(WHAT_DIED[instruction])
        elif instruction is Instruction.LEAVE:
            link.fail_all(503, SHUTTING_DOWN)
            await link.shut_engines_down()  # an engine exits once every front has asked it to
        server.should_exit = True
        await serving
    finally:
        writing.cancel()
        link.close()


def _run_front(target: Callable[..., None], number: int, *arguments: object) -> None:
    die_with_parent()
    target(number, *arguments)
