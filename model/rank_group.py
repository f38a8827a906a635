"""The ranks of a node: what one of them sees of the others. The only user of torch.distributed.

A rank is an engine process with its own GPU, or its share of the CPU. Ranks have the model's routed experts
in common, so they make their forwards together: every rank calls the same operations in the same order. An
operation in which a rank is missing fails everywhere when its time is up, or when the connection breaks.
What comes before, a start, takes some ranks minutes longer than others, so they meet before their first one.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.rank_bells import RankBells
from vocabulary import RankPlace


class RankGroupError(Exception):
    """The ranks of a node cannot work together, or not any more."""


class RankGroup:
    """The operations of all ranks, which raise RankGroupError. One object a process."""

    def __init__(
        self,
        place: RankPlace,
        device: torch.device,
        *,
        agree_secs: float,
        forward_secs: float,
        start_secs: float = 300.0,
    ) -> None:
        """Waits for the other ranks: ``start_secs`` at most here and in ``meet``, ``agree_secs`` in an
        agreement, ``forward_secs`` in a forward, where a rank may compute a chunk, or compile a kernel, while
        others have nothing to do.
        """
        self.rank, self.size = place.rank, place.size
        self.step_tokens = 0
        """Tokens of each rank in the forward that is made, padding included; 0: as many as are given."""
        self._agree_timeout = timedelta(seconds=agree_secs)
        self._forward_secs = forward_secs
        self._start_secs = start_secs
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # one more start-up that fails where fabrics are split
        self._store = dist.FileStore(place.meeting_path, place.size)  # type: ignore[attr-defined]
        self.bells = RankBells(place)
        try:
            self.meet("started")
        except RankGroupError:
            self.bells.close()
            raise
        try:
            self.bells.connect()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=self._store,
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=forward_secs),
                device_id=device if device.type == "cuda" else None,
            )
            self.gather(torch.zeros((1, 1), device=device))  # NCCL connects with its first operation
        except (OSError, RuntimeError, ValueError) as error:
            raise RankGroupError(f"rank {self.rank} does not reach the other ranks: {error}") from error

    def meet(self, what: str) -> None:
        """Wait until all ranks have done ``what``: no operation, and with more patience than one has."""
        self._store.set(f"{what} {self.rank}", "")
        try:
            self._store.wait(
                [f"{what} {rank}" for rank in range(self.size)], timedelta(seconds=self._start_secs)
            )
        except RuntimeError as error:
            raise RankGroupError(
                f"rank {self.rank} has {what}, and another rank of this node has not "
                f"{self._start_secs:g} s later; see its log, or raise startup_timeout_secs"
            ) from error

    def share_of(self, num_experts: int) -> range:
        """The experts of this rank."""
        return range(num_experts * self.rank // self.size, num_experts * (self.rank + 1) // self.size)

    def agree(self, *values: int) -> list[tuple[int, ...]]:
        """What every rank said, in the order of ranks."""
        mine = torch.tensor(values, dtype=torch.int64)
        of_all = mine.new_empty(self.size * len(values))
        self._together(lambda: _all_gather(of_all, mine, async_op=True).wait(self._agree_timeout))
        return [tuple(row) for row in of_all.view(self.size, -1).tolist()]

    def gather(self, x: Tensor) -> Tensor:
        """[size * n, …]: ``x`` [n, …] of every rank, in the order of ranks."""
        of_all = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._in_order(lambda: _all_gather(of_all, x))
        return of_all

    def sum_own(self, x: Tensor) -> Tensor:
        """[n, …]: this rank's part of ``x`` [size * n, …], summed over all ranks."""
        own = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        self._in_order(lambda: _reduce_scatter(own, x))
        return own

    @contextmanager
    def bounded_wait(self) -> Iterator[None]:
        """Around a wait for the device, which another rank may keep for ever: this process ends before."""
        faulthandler.dump_traceback_later(self._forward_secs, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def leave(self) -> None:
        """Done. On a GPU this process ends here, with status 0: NCCL waits for CUDA graphs that hold its
        operations to be gone, and so an orderly exit never ends.
        """
        if self._stream is None:
            dist.destroy_process_group()
            self.bells.close()
            return
        sys.stdout.flush()
        os._exit(0)

    def _in_order(self, operation: Callable[[], Any]) -> None:
        """Streams of one rank that run beside each other have to do these in the order of their calls: in one
        stream, between what the current one has and what it gets.
        """
        if self._stream is None:
            self._together(operation)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._together(operation)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _together(self, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except RuntimeError as error:
            raise RankGroupError(
                f"rank {self.rank}: another rank of this node has died, or stands still: {error}"
            ) from error


# torch 2.13 has new names for both, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
