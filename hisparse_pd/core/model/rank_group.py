"""The ranks of a node as one of them sees them. Only this module imports torch.distributed.

A rank is an engine process with its own GPU, or its share of the CPU. Ranks share the model's routed experts,
so they make their forwards together: every rank calls the same operations in the same order. An operation
that a rank does not join fails everywhere when its time is up or the connection breaks.

An engine makes one ``RankGroup`` at its start. It then calls ``check_same``, loads the model, and compiles
kernels in a ``rehearsal``, in which it does not wait for others, because compiling may take longer than an
operation may. From then on each step begins with ``agree`` (through ``engine/lockstep.py``), and each layer
of experts calls ``gather`` and ``sum_own``. ``meet`` is for the start, where some ranks take minutes longer
than others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hisparse_pd.base.vocabulary import RankPlace, StartError
from hisparse_pd.core.model import rank_exchange
from hisparse_pd.core.model.page_sharing import share_page
from hisparse_pd.core.model.rank_bells import RankBells
from hisparse_pd.core.model.rank_page import RankPage
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.protocol.names import interface_of, own_address_towards

_LAST_WORDS_SECS = 10.0
"""How long rank 0, whose process serves the store, waits for others to read why the node does not start."""


class RankGroupError(StartError):
    """The ranks of a node cannot, or can no longer, work together."""


class RankGroup:
    """The operations of all ranks, which raise RankGroupError. A process has one group."""

    def __init__(
        self,
        place: RankPlace,
        device: torch.device,
        *,
        agree_secs: float,
        forward_secs: float,
        start_secs: float = 300.0,
        over_memory: bool = True,
    ) -> None:
        """Waits for the other ranks.

        ``start_secs``: how long to wait here and in ``meet``; ``agree_secs``: in an agreement;
        ``forward_secs``: in a forward, where a rank may compute a chunk, or compile a kernel, while others
        have nothing to do. ``over_memory``: GPUs of one machine exchange over each other's memory if all
        ranks want and can, else by NCCL.
        """
        self.rank, self.size = place.rank, place.size
        self.step_tokens = 0
        """Tokens of the rank that has most in the current forward, to which the others pad theirs; 0: all
        ranks have equally many."""
        self.exchange: rank_exchange.RankExchange | None = None
        """The exchange over GPUs' memory, or None. NCCL carries what the exchange does not take."""
        self._is_rehearsal = False
        self._agree_secs = agree_secs
        self._page: RankPage | None = None
        """The shared memory of ``agree``; None where ranks agree over the network."""
        self._forward_secs = forward_secs
        self._start_secs = start_secs
        self._device = device
        self._stream = SideStream(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast, which fails on a split fabric
        try:
            own_address = _use_network(place)
            self._store = _open_store(place, start_secs)
            self.bells = RankBells(_bell_of(place, own_address))  # wake ranks out of an idle wait
        except (OSError, RuntimeError) as error:
            raise RankGroupError(f"rank {self.rank} finds no other rank: {error}") from error
        is_one_machine = not place.meeting_host
        self._find_others(is_one_machine)
        self._start_collectives(device)
        if device.type == "cuda" and is_one_machine:
            self.exchange = rank_exchange.connect(
                self.meet, device, self.rank, self.size, forward_secs, is_wanted=over_memory
            )

    def _find_others(self, is_one_machine: bool) -> None:
        """Connect to the bells of the other ranks, and share a page with them if they are on this machine."""
        try:
            bells = self.meet("started", self.bells.endpoint)
            self.bells.connect({rank: bell for rank, bell in bells.items() if rank != self.rank})
            if is_one_machine:
                self._page = share_page(self.rank, self.size, self.meet)
        except RankGroupError:
            self.bells.close()
            raise

    def _start_collectives(self, device: torch.device) -> None:
        """Make torch's process group: gloo, and NCCL for a GPU."""
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._forward_secs),
                device_id=device if device.type == "cuda" else None,
            )
            self.gather(torch.zeros((1, 1), device=device))  # NCCL connects with its first operation
        except (OSError, RuntimeError, ValueError) as error:
            raise RankGroupError(f"rank {self.rank} does not reach the other ranks: {error}") from error

    def meet(self, what: str, word: str = "") -> dict[int, str]:
        """Wait until all ranks have done ``what``, for longer than an operation waits.

        ``what``: a participle for errors ("loaded"), which is used for one meeting only, because its words
        stay in the store. Returns the ``word`` of each rank.
        """
        keys = {rank: f"{what} {rank}" for rank in range(self.size)}
        try:
            self._store.set(keys[self.rank], word)
            self._store.wait(list(keys.values()), timedelta(seconds=self._start_secs))
            return {rank: self._store.get(key).decode() for rank, key in keys.items()}
        except dist.DistNetworkError as error:
            raise RankGroupError(
                f"rank {self.rank} has {what}, and rank 0 of this node, where ranks meet, has ended before "
                "all have; see its log"
            ) from error
        except RuntimeError as error:
            raise RankGroupError(
                f"rank {self.rank} has {what}, and another rank of this node has not "
                f"{self._start_secs:g} s later; see its log"
            ) from error

    def check_same(self, mine: Mapping[str, object]) -> None:
        """Raise RankGroupError where another rank has other values of these settings."""
        words = self.meet("been configured", json.dumps(mine, sort_keys=True))
        self._store.set(f"compared {self.rank}", "")
        of_all = {rank: json.loads(word) for rank, word in words.items()}
        for rank, theirs in of_all.items():
            for name, value in of_all[self.rank].items():
                if theirs.get(name) != value:
                    self._wait_for_readers()
                    raise RankGroupError(
                        f"{name} is {value!r} on rank {self.rank} and {theirs.get(name)!r} on rank {rank}; "
                        "start the node with the same settings and the same release on all machines"
                    )

    def _wait_for_readers(self) -> None:
        """Wait on rank 0, with whose process the store ends, until all other ranks have read its words."""
        if self.rank == 0:
            others = [f"compared {rank}" for rank in range(1, self.size)]
            with suppress(RuntimeError):  # this rank's own error says more
                self._store.wait(others, timedelta(seconds=_LAST_WORDS_SECS))

    def share_of(self, num_experts: int) -> range:
        """Return the numbers of this rank's experts."""
        return range(num_experts * self.rank // self.size, num_experts * (self.rank + 1) // self.size)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one machine and agree through its memory."""
        return self._page is not None

    def agree(self, *values: int) -> list[tuple[int, ...]]:
        """Tell all ranks ``values``. Returns those of every rank, in the order of ranks."""
        page = self._page
        if page is None:
            return self.agree_over_network(*values)
        said: list[tuple[int, ...]] = self._together(lambda: page.agree(values, self._agree_secs))
        return said

    def agree_over_network(self, *values: int) -> list[tuple[int, ...]]:
        """Do ``agree`` by gloo, even if the ranks share a page."""
        mine = torch.tensor(values, dtype=torch.int64)
        of_all = mine.new_empty(self.size * len(values))
        timeout = timedelta(seconds=self._agree_secs)
        self._together(lambda: _all_gather(of_all, mine, async_op=True).wait(timeout))
        return [tuple(row) for row in of_all.view(self.size, -1).tolist()]

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Let this rank make forwards alone, with its own tensors in the place of other ranks'; the results
        mean nothing.

        At the end all ranks ``meet``. A process may rehearse once.
        """
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False
        self.meet("rehearsed")

    def gather(self, x: Tensor) -> Tensor:
        """Return ``x`` [n, …] of every rank, in the order of ranks: [size * n, …]."""
        if self._is_rehearsal:
            return torch.cat([x] * self.size)
        of_all = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        exchange = self.exchange
        if exchange is not None and exchange.gathers(x):
            self._in_order(lambda: exchange.gather(of_all, x))
        else:
            self._in_order(lambda: _all_gather(of_all, x))
        return of_all

    def sum_own(self, x: Tensor) -> Tensor:
        """Return this rank's part of ``x`` [size * n, …], summed over all ranks: [n, …].

        With an ``exchange``, parts are added in the order of ranks whatever ``n`` is, so that a token's bits
        do not depend on other tokens. With NCCL and more than two ranks, the order depends on ``n``.
        """
        if self._is_rehearsal:
            return x[: x.shape[0] // self.size].clone()
        own = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        exchange = self.exchange
        if exchange is not None and exchange.sums(x):
            self._in_order(lambda: exchange.sum_own(own, x))
        else:
            self._in_order(lambda: _reduce_scatter(own, x))
        return own

    @contextmanager
    def bounded_wait(self) -> Iterator[None]:
        """Bound a wait for the device, which another rank may block for ever: this process ends when it takes
        too long."""
        faulthandler.dump_traceback_later(self._forward_secs, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def leave(self) -> None:
        """Leave the group. On a GPU this process ends here, with status 0.

        NCCL waits until CUDA graphs with its operations are gone, so that an orderly exit would never end.
        """
        if self._device.type == "cpu":
            dist.destroy_process_group()
            self.bells.close()
            if self._page is not None:
                self._page.close()
            return
        sys.stdout.flush()
        os._exit(0)

    def _in_order(self, operation: Callable[[], Any]) -> None:
        """Run an operation on the group's own stream, after the current stream's work so far and before its
        later work.

        All ranks must make operations in the same order, which concurrent streams of a rank would not keep.
        """
        with self._stream.behind_current():
            self._together(operation)
        self._stream.join()

    def _together(self, operation: Callable[[], Any]) -> Any:
        """Return what an operation of all ranks returns. Raises RankGroupError if one does not join."""
        try:
            return operation()
        except RuntimeError as error:
            raise RankGroupError(
                f"rank {self.rank}: another rank of this node has died, or stands still: {error}"
            ) from error


def _use_network(place: RankPlace) -> str:
    """Set gloo's and NCCL's network interface. Returns this machine's address on it, or an empty string if
    all ranks are on this machine."""
    if not place.meeting_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        return ""
    address = own_address_towards(place.meeting_host)
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return address


def _open_store(place: RankPlace, start_secs: float) -> Any:
    """Return the store in which ranks leave words before they are connected: a file, or a server of rank
    0."""
    if not place.meeting_host:
        return dist.FileStore(place.meeting_path, place.size)  # type: ignore[attr-defined]
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.meeting_host,
        place.meeting_port,
        is_master=place.rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=start_secs),
    )


def _bell_of(place: RankPlace, own_address: str) -> str:
    if not own_address:
        return f"ipc://{place.meeting_path}-bell-{place.rank}"
    return f"tcp://[{own_address}]:*" if ":" in own_address else f"tcp://{own_address}:*"


# torch 2.13 has new names for both and warns about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
