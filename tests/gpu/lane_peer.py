"""A decode node's memory in a process of its own: ``python -m tests.gpu.lane_peer NUM_BYTES DEVICE``.

NUM_BYTES of main memory, registered with CUDA, and as many of the GPU, both offered over a lane. Prints the
offer and both addresses; answers each line, ``host`` or ``gpu``, with the CRC-32 of that memory, and
ends at the end of its input.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from kernels.host_memory import allocate_host
from kernels.peer_memory import ipc_handle
from protocol.lane import LaneOffer
from transfer.lane_host import LaneHost, SharedMemory


class LanePeer:
    """The other process, as a test sees it."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.lane_peer", str(num_bytes), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        offer, host_addr, gpu_addr = self.process.stdout.readline().split()
        self.offer = msgspec.json.decode(offer, type=LaneOffer)
        self.num_bytes, self.host_addr, self.gpu_addr = num_bytes, int(host_addr), int(gpu_addr)

    @property
    def regions(self) -> list[tuple[int, int]]:
        return [(self.host_addr, self.num_bytes), (self.gpu_addr, self.num_bytes)]

    def crc(self, where: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{where}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@contextmanager
def lane_peer(num_bytes: int, device: str) -> Iterator[LanePeer]:
    peer = LanePeer(num_bytes, device)
    try:
        yield peer
    finally:
        peer.close()


def main() -> None:
    num_bytes, device = int(sys.argv[1]), torch.device(sys.argv[2])
    torch.cuda.set_device(device)
    pool = allocate_host(num_bytes, pinned=True, shared=True)
    on_gpu = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    handle, offset = ipc_handle(on_gpu)
    memory = [
        SharedMemory(pool.tensor.data_ptr(), num_bytes, pool.shared_fd),
        SharedMemory(on_gpu.data_ptr(), num_bytes, None, handle, offset),
    ]
    host = LaneHost(memory)
    print(msgspec.json.encode(host.offer).decode(), pool.tensor.data_ptr(), on_gpu.data_ptr(), flush=True)
    for line in sys.stdin:
        content = pool.tensor if line.strip() == "host" else on_gpu.cpu()
        print(zlib.crc32(content.numpy().data), flush=True)


if __name__ == "__main__":
    main()
