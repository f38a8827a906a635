"""Transfer engines that outlive the nodes of a test: Mooncake needs a second to leave the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.transport import TCP, Transport

_idle: list[TransferEngine] = []


class _Lease:
    """One node's use of an engine. Closed, it has no memory any more, so that every write to it fails."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            for addr in list(self._engine._registered):
                self._engine.unregister(addr)
            _idle.append(self._engine)


def kept_engine(host: str, transport: Transport = TCP, *, needs_network: bool = True) -> TransferEngine:
    """One that nobody uses, or a new one. On loopback over TCP only: the idle ones are."""
    assert (host, transport) == ("127.0.0.1", TCP)
    return cast(TransferEngine, _Lease(_idle.pop() if _idle else TransferEngine(host, transport)))


@contextmanager
def kept_engines() -> Iterator[None]:
    """Nodes that are made meanwhile have such engines."""
    with patch("hisparse_pd.engine.loop.TransferEngine", kept_engine):
        yield
