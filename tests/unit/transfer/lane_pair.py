"""A decode node's memory and the lanes of a prefill node in one process, for the tests of both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np

from hisparse_pd.core.memory.host import HostPool, allocate_host
from hisparse_pd.core.paging.extents import SlotArray
from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.transfer.errors import TransferError
from hisparse_pd.transfer.lane import Lane, Lanes
from hisparse_pd.transfer.lane_host import LaneHost, SharedMemory
from hisparse_pd.transfer.plan import Descriptors, Reads, Writes
from tests.waiting import WAIT_SECS, wait_until

SESSION = "127.0.0.1:15001"
POOL_BYTES = (300_001, 4096)


class Network:
    """A stand-in for a TransferEngine that records what it was told to send. ``source`` is its registered
    memory."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.source = np.random.default_rng(0).integers(0, 256, 400_000, np.uint8)
        self.sent: list[tuple[str, list[int]]] = []
        self.read_from: list[tuple[str, list[int]]] = []

    @property
    def addr(self) -> int:
        return int(self.source.ctypes.data)

    def write(self, session: str, writes: Writes, stop: Callable[[], str] | None = None) -> None:
        self.sent.append((session, np.asarray(writes[1]).tolist()))

    def read(self, session: str, reads: Reads, stop: Callable[[], str] | None = None) -> None:
        self.read_from.append((session, np.asarray(reads[0]).tolist()))

    def check_sources(self, writes: Descriptors) -> None:
        self._check(writes.src_addrs, writes.lengths)

    def check_destinations(self, reads: Descriptors) -> None:
        self._check(reads.dst_addrs, reads.lengths)

    def _check(self, addrs: SlotArray, num_bytes: SlotArray) -> None:
        if (addrs < self.addr).any() or (addrs + num_bytes > self.addr + self.source.nbytes).any():
            raise TransferError("not in registered memory")


class Pair:
    """A decode node that offers all or some of its memory, and the lanes of a prefill node."""

    def __init__(
        self,
        directory: str = "",
        *,
        covers_all: bool = True,
        why_off: str = "",
        network_fault: str = "",
    ) -> None:
        self.pools: list[HostPool] = [allocate_host(size, pinned=False, shared=True) for size in POOL_BYTES]
        self.memory = [pool.tensor.numpy() for pool in self.pools]
        self.regions = [(int(memory.ctypes.data), memory.nbytes) for memory in self.memory]
        offered = [
            SharedMemory(addr, num_bytes, pool.shared_fd)
            for (addr, num_bytes), pool in zip(self.regions, self.pools, strict=True)
            if pool.shared_fd is not None
        ]
        self.host = LaneHost(offered if covers_all else offered[:1], directory=directory)
        self.network = Network(network_fault)
        self.lanes = Lanes(
            self.network,  # type: ignore[arg-type]
            "tcp",
            "run",
            why_off=why_off,
            directory=directory,
        )

    def register(self, offer: LaneOffer | str | None = "own") -> Lane:
        """Register, and wait until the lane is chosen. Returns the lane."""
        lane = self.lanes.register(
            SESSION, self.host.offer if isinstance(offer, str) else offer, self.regions
        )
        wait_until(lambda: self.lanes.lane(SESSION) is not None, "the lane is decided")
        decided = self.lanes.lane(SESSION)
        assert decided is not None
        assert lane in (None, decided)
        return decided

    @property
    def is_opening(self) -> bool:
        return any(thread.name == f"lane to {SESSION}" for thread in threading.enumerate())

    @contextmanager
    def host_stands_still(self) -> Iterator[None]:
        """Keep the decode node's host from answering; its socket still takes connections."""
        may_go_on = threading.Event()
        welcome = self.host.welcome
        self.host.welcome = lambda *args: may_go_on.wait(WAIT_SECS) and welcome(*args)  # type: ignore
        try:
            yield
        finally:
            may_go_on.set()

    def write(self, src: list[int], dst: list[int], lengths: list[int]) -> None:
        """Write; offsets count from the source and from the first pool."""
        base = self.regions[0][0]
        self.lanes.write(
            SESSION, ([self.network.addr + at for at in src], [base + at for at in dst], lengths)
        )

    def read(self, src: list[int], dst: list[int], lengths: list[int]) -> None:
        """Read; offsets count from the first pool and from this side's memory."""
        base = self.regions[0][0]
        self.lanes.read(SESSION, ([base + at for at in src], [self.network.addr + at for at in dst], lengths))

    def ended_when_closed(self) -> list[str]:
        """Wait until no connection is left, and close the host. Returns the runs that it reported as ended,
        which it does behind the end of their connections."""
        wait_until(lambda: not self.host.connections, "the connections end")
        self.host.close()
        return self.host.take_ended()

    def close(self) -> None:
        self.lanes.close()
        self.host.close()
        for pool in self.pools:
            pool.close()


def pair_of(
    directory: str = "", *, covers_all: bool = True, why_off: str = "", network_fault: str = ""
) -> closing[Pair]:
    return closing(Pair(directory, covers_all=covers_all, why_off=why_off, network_fault=network_fault))
