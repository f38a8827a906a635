"""Transfer engines that outlive a test's nodes, because Mooncake needs a second to leave the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.transport import TCP, Transport

_idle: list[TransferEngine] = []


class _Lease:
    """One node's use of an engine. Once it is closed it has no memory, and every write to it fails."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            for addr in list(self._engine.registered):
                self._engine.unregister(addr)
            _idle.append(self._engine)


def kept_engine(host: str, transport: Transport = TCP, *, needs_network: bool = True) -> TransferEngine:
    """Return an idle engine, or a new one; only for TCP on loopback, as all idle ones are."""
    assert (host, transport) == ("127.0.0.1", TCP)
    return cast(TransferEngine, _Lease(_idle.pop() if _idle else TransferEngine(host, transport)))


@contextmanager
def kept_engines() -> Iterator[None]:
    """Give kept engines to the nodes that are made in this context."""
    with patch("hisparse_pd.engine.loop.TransferEngine", kept_engine):
        yield
