"""A decode node's memory in its own process: ``python -m tests.gpu.lane_peer NUM_BYTES DEVICE``.

It offers NUM_BYTES of main memory, registered with CUDA, and as many of the GPU over a lane. It prints the
offer and both addresses, answers each line, ``host`` or ``gpu``, with the CRC-32 of that memory, and ends at
the end of its input.
"""

from __future__ import annotations

import sys
import zlib

import msgspec
import torch

from hisparse_pd.core.memory.host import allocate_host
from hisparse_pd.core.memory.peer import ipc_handle
from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.transfer.lane_host import LaneHost, SharedMemory
from tests.other_process import OtherProcess


class LanePeer(OtherProcess):
    """The process, as a test controls it."""

    def __init__(self, num_bytes: int, device: str) -> None:
        super().__init__("tests.gpu.lane_peer", num_bytes, device)
        offer, host_addr, gpu_addr = self.read_line().split()
        self.offer = msgspec.json.decode(offer, type=LaneOffer)
        self.num_bytes, self.host_addr, self.gpu_addr = num_bytes, int(host_addr), int(gpu_addr)

    @property
    def regions(self) -> list[tuple[int, int]]:
        return [(self.host_addr, self.num_bytes), (self.gpu_addr, self.num_bytes)]

    def crc(self, where: str) -> int:
        return int(self.ask(where))


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
