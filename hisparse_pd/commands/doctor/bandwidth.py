"""Measures how fast one machine writes to another through the KV transport, by message size.

``command.py`` calls ``serve`` for ``doctor --serve`` and ``measure`` for ``doctor --peer``. The serving side
registers a buffer and answers questions (``channel.py``). The measuring side writes to that buffer as a
prefill node would, in batches of descriptors, and compares checksums at the end, since only bytes that have
arrived count. Between two doctors on one machine it measures shared memory, too (``lane.py``).
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hisparse_pd.commands.doctor.channel import (
    DOCTOR_VERSION,
    DoctorClient,
    DoctorError,
    DoctorServer,
    Offer,
    Question,
    QuestionRefused,
    Reply,
)
from hisparse_pd.commands.doctor.lane import lane_to
from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.transfer.engine import MAX_BATCH_DESCRIPTORS, TransferEngine, TransferError
from hisparse_pd.transfer.lane import Lane, LaneKind
from hisparse_pd.transfer.lane_host import SharedMemory
from hisparse_pd.transfer.plan import Descriptors
from hisparse_pd.transfer.sender import Writer

if TYPE_CHECKING:
    from torch import Tensor

    from hisparse_pd.core.memory.host import HostPool
    from hisparse_pd.core.memory.peer import GpuWriter

log = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20
"""Size of the offered buffer, in which the largest message and the longest batch fit."""
MESSAGE_BYTES = (1152, 4096, 65536, 1 << 20, 4 << 20)
"""Sizes of messages that are measured; the first is a token's item in bf16."""

MAX_ATTEMPTS = 2
"""Attempts at one batch, since a connection may fail once."""
_POLL_SECS = 0.2
"""Longest wait of ``serve`` for a question, after which it looks whether it is to stop."""
SEED = 20261121


class Buffer:
    """Registered and zeroed memory on a torch device. It must be closed before the engine is."""

    def __init__(
        self, engine: TransferEngine, num_bytes: int, device: str = "cpu", *, shared: bool = False
    ) -> None:
        """``shared``: use shared memory (a memfd) on the CPU if possible. Raises TransferError,
        DoctorError."""
        self.num_bytes = num_bytes
        self._engine = engine
        self._pool: HostPool | None = None
        try:  # imported here: on a machine with a broken torch, the doctor has to report it
            import torch

            from hisparse_pd.core.memory.host import allocate_host

            if device == "cpu" and shared:
                self._pool = allocate_host(num_bytes, pinned=False, shared=True, name="the doctor's buffer")
                self.memory: Tensor = self._pool.tensor
            else:
                self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except Exception as error:
            raise DoctorError(
                f"{num_bytes} bytes on device {device} cannot be allocated ({type(error).__name__}: {error})"
            ) from error
        self.base_addr = engine.register(self.memory)

    @property
    def shared_memory(self) -> tuple[SharedMemory, ...]:
        """The part of the buffer that other processes of this machine can map."""
        if self._pool is None:
            return ()
        return (SharedMemory(self.base_addr, self.num_bytes, self._pool.shared_fd),)

    def gpu_writer(self) -> GpuWriter | None:
        """Return the writer that copies from the buffer on a GPU; None if it is on the CPU."""
        if self.memory.device.type == "cpu":
            return None
        from hisparse_pd.core.memory.peer import GpuWriter

        return GpuWriter(self.memory.device, (self.memory,))

    def fill(self, content: NDArray[np.uint8]) -> None:
        """Fill the buffer with ``content``, whose shape is [num_bytes]."""
        import torch

        self.memory.copy_(torch.from_numpy(content))
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)

    def crc32(self, num_bytes: int) -> int:
        """Return the checksum of the first ``num_bytes``."""
        return zlib.crc32(self.memory[:num_bytes].cpu().numpy().tobytes())

    def close(self) -> None:
        self._engine.unregister(self.base_addr)
        if self._pool is not None:
            self._pool.close()


@dataclass(frozen=True)
class Rate:
    """A measurement: ``num_messages`` of ``message_bytes`` were written in ``secs`` over tcp, rdma or shm."""

    message_bytes: int
    num_messages: int
    secs: float
    over: LaneKind

    @property
    def bytes_per_sec(self) -> float:
        return self.message_bytes * self.num_messages / self.secs

    @property
    def secs_per_message(self) -> float:
        return self.secs / self.num_messages


def serve(
    server: DoctorServer,
    engine: TransferEngine,
    buffer: Buffer,
    deadline_secs: float,
    is_stopped: Callable[[], bool],
    lane: LaneOffer | None = None,
) -> None:
    """Answer questions about the buffer until ``deadline_secs`` on the monotonic clock, or ``is_stopped``.

    ``lane``: the offer to map the buffer, for processes of this machine.
    """

    def answer(question: Question) -> Reply:
        if why := _why_refused(question, engine.transport.protocol, buffer.num_bytes):
            return QuestionRefused(why)
        crc32 = buffer.crc32(question.num_bytes)
        return Offer(engine.session, buffer.base_addr, buffer.num_bytes, lane, crc32)

    while not is_stopped() and (left_secs := deadline_secs - time.monotonic()) > 0:
        server.serve_one(answer, min(_POLL_SECS, left_secs))


def measure(
    client: DoctorClient,
    engine: TransferEngine,
    message_bytes: Sequence[int],
    secs_per_size: float,
    device: str = "cpu",
    directory: str = "",
) -> tuple[list[Rate], Lane]:
    """Measure writes to the other doctor's buffer, each size for ``secs_per_size`` and at least one batch.

    Returns the rates over the network and, if both doctors are on one machine, over shared memory; and the
    lane, which says why there is no shared memory if there is none. ``directory``: where the lane's sockets
    are. Raises DoctorError, TransferError.
    """
    offer = _ask(client, engine)
    if offer.num_bytes < max(message_bytes):
        raise DoctorError(
            f"the other doctor offers {offer.num_bytes} bytes, a message of {max(message_bytes)} does not fit"
        )
    # The longest batch has all bytes that are written: the batches of other sizes write only the first of
    # them, to the same place. So one checksum at the end covers all sizes.
    num_bytes = max(size * _batch_length(size, offer.num_bytes) for size in message_bytes)
    source = Buffer(engine, num_bytes, device)
    random = np.random.default_rng(SEED)

    def rates_over(kind: LaneKind, writer: Writer) -> list[Rate]:
        # New bytes each time: those that arrived over the network must not pass for shared memory's.
        source.fill(random.integers(0, 256, num_bytes, np.uint8))
        rates = [_measure_size(kind, writer, offer, source, size, secs_per_size) for size in message_bytes]
        arrived = _ask(client, engine, num_bytes).crc32
        if arrived != (sent := source.crc32(num_bytes)):
            raise DoctorError(
                f"the first {num_bytes} bytes arrived with checksum {arrived:#010x}, sent was {sent:#010x}; "
                "does another doctor write to the same one?"
            )
        return rates

    try:
        rates = rates_over(engine.transport.protocol, engine)
        region = (offer.base_addr, offer.num_bytes)
        gpu = source.gpu_writer()
        with lane_to(offer.lane, offer.session, region, engine, directory, gpu) as (writer, lane):
            if lane.kind == "shm":
                rates += rates_over("shm", writer)
    finally:
        source.close()
    return rates, lane


def _measure_size(
    over: LaneKind, writer: Writer, offer: Offer, source: Buffer, size: int, secs: float
) -> Rate:
    """Write batches of messages of ``size`` bytes for ``secs``, at least one. ``over``: the lane of
    ``writer``."""
    num_messages = _batch_length(size, offer.num_bytes)
    offsets = np.arange(num_messages, dtype=np.int64) * size
    lengths = np.full(num_messages, size, np.int64)
    writes = Descriptors(offsets + source.base_addr, offsets + offer.base_addr, lengths)
    _write(writer, offer.session, writes)  # not measured: it opens the connections
    start_secs = time.perf_counter()
    num_batches, took_secs = 0, 0.0
    while not num_batches or took_secs < secs:
        _write(writer, offer.session, writes)
        num_batches += 1
        took_secs = time.perf_counter() - start_secs
    return Rate(size, num_messages * num_batches, took_secs, over)


def _write(writer: Writer, session: str, writes: Descriptors) -> None:
    """Write, and try again if the transport failed, which makes a new connection.

    Raises TransferError: at once if the arguments were refused (no byte may land), else after the last
    attempt.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return writer.write(session, writes)
        except TransferError as error:
            if not error.may_still_land:
                raise
            if attempt == MAX_ATTEMPTS:
                raise TransferError(f"in {attempt} attempts: {error}", may_still_land=True) from error
            log.warning("%s; once more", error)


def _batch_length(message_bytes: int, buffer_bytes: int) -> int:
    """Return the number of messages in one batch: as many as a prefill node sends at once, or as fit in the
    buffer."""
    return min(MAX_BATCH_DESCRIPTORS, buffer_bytes // message_bytes)


def _why_refused(question: Question, transfer_protocol: str, buffer_bytes: int) -> str:
    if question.version != DOCTOR_VERSION:
        return (
            f"version: you speak {question.version}, this doctor {DOCTOR_VERSION}; run the same release "
            "on both"
        )
    if question.transfer_protocol != transfer_protocol:
        return (
            f"--transfer-protocol: you are on {question.transfer_protocol!r}, this doctor on "
            f"{transfer_protocol!r}; start both with the same, tcp or rdma"
        )
    if question.num_bytes > buffer_bytes:
        return f"checksum of {question.num_bytes} bytes: the buffer has {buffer_bytes}"
    return ""


def _ask(client: DoctorClient, engine: TransferEngine, num_bytes: int = 0) -> Offer:
    """Ask for the other doctor's offer, with the checksum of its first ``num_bytes``. Raises DoctorError."""
    answer = client.ask(Question(DOCTOR_VERSION, engine.transport.protocol, num_bytes))
    if isinstance(answer, QuestionRefused):
        raise DoctorError(f"the other doctor refuses: {answer.error}")
    return answer
