"""The address of a prefill node's rank, by which requests, quarantined rooms and connections name it."""

from __future__ import annotations

from typing import NamedTuple


class PeerAddress(NamedTuple):
    """The address of one rank of a prefill node: the node's bootstrap endpoint and the rank's number."""

    host: str
    port: int
    rank: int = 0

    @property
    def node(self) -> tuple[str, int]:
        """The bootstrap endpoint, which all ranks of the node share."""
        return self.host, self.port

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" rank {self.rank}" if self.rank else "")
