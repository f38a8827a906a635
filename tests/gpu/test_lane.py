"""A GPU's writes to another process: to main memory that both have registered, and to the other's GPU memory.

With two GPUs the other process has the second. Measurements are printed with ``pytest -m gpu -s``.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hisparse_pd.core.memory.gpu_copies import word_bytes
from hisparse_pd.core.memory.peer import GpuWriter
from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.transfer.lane import Lane, Lanes
from hisparse_pd.transfer.plan import (
    DESCRIPTOR_COST_BYTES,
    LONG_BYTES,
    MOST_LONG,
    PIECE_BYTES,
    LayerWrites,
    RegionView,
    SlicedWrites,
    descriptors,
)
from tests.gpu.lane_peer import LanePeer
from tests.gpu.support import needs_gpu
from tests.slot_plans import plan_slots

pytestmark = needs_gpu

NUM_BYTES = 512 << 20
WAIT_SECS = 120.0
SESSION = "peer"


class NoNetwork:
    """A network that must not be used. It does not check sources."""

    fault = "there is none"

    def write(self, *_: object, **__: object) -> None:
        raise AssertionError("over the network")

    read = write

    def check_sources(self, writes: object) -> None:
        pass

    check_destinations = check_sources


def lanes_from(source: Tensor) -> Lanes:
    """Return the lanes of a node whose KV is in ``source``, on the first GPU."""
    gpu = GpuWriter(torch.device("cuda:0"), [source])
    return Lanes(NoNetwork(), "tcp", "run", gpu=gpu)  # type: ignore[arg-type]


class Writer:
    """This process, with KV on the first GPU, an aux record in main memory, and a lane to the peer."""

    def __init__(self, peer: LanePeer) -> None:
        self.peer = peer
        generator = torch.Generator().manual_seed(3)
        self.content = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)
        self.source = self.content.to("cuda:0")
        self.aux = torch.arange(100, dtype=torch.uint8)
        self.landed = {where: np.zeros(NUM_BYTES, np.uint8) for where in ("host", "gpu")}
        started = time.monotonic()
        self.lanes = lanes_from(self.source)
        self.lanes.register(SESSION, peer.offer, peer.regions)
        while (lane := self.lanes.lane(SESSION)) is None:
            assert time.monotonic() - started < WAIT_SECS
            time.sleep(0.01)
        assert lane == Lane("shm", "both see the same memory"), "the other GPU's memory as well"
        self.open_secs = time.monotonic() - started

    def write(self, src: ArrayLike, dst: ArrayLike, lengths: ArrayLike, where: str) -> None:
        """Write; offsets count from the source and from the peer's memory."""
        base = self.peer.host_addr if where == "host" else self.peer.gpu_addr
        self.lanes.write(SESSION, (np.asarray(src) + self.source.data_ptr(), np.asarray(dst) + base, lengths))


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    device = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    with LanePeer(NUM_BYTES, device) as peer:
        made = Writer(peer)
        yield made
        made.lanes.close()


@pytest.fixture
def landed(writer: Writer) -> dict[str, np.ndarray]:
    """The expected content of the peer's memory, to which the module's tests write one after the other."""
    return writer.landed


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize("item_bytes", [1, 3, 132, 656, 1152, 8 * 656 + 4, PIECE_BYTES + 16, LONG_BYTES + 64])
def test_rows_of_any_length_land_bitwise_and_nothing_else_changes(
    writer: Writer, landed: dict[str, np.ndarray], where: str, item_bytes: int
) -> None:
    num_slots = min(5000, (NUM_BYTES - 5) // item_bytes)
    rng = np.random.default_rng(item_bytes)
    src, dst = (rng.permutation(num_slots)[: num_slots // 2] * item_bytes for _ in range(2))
    src, dst = src + 5 % item_bytes, dst + 3 % item_bytes  # with and without alignment
    keep = (src + item_bytes <= NUM_BYTES) & (dst + item_bytes <= NUM_BYTES)
    src, dst = src[keep], dst[keep]
    writer.write(src, dst, np.full(src.size, item_bytes), where)
    content = writer.content.numpy()
    for start, to in zip(src.tolist(), dst.tolist(), strict=True):
        landed[where][to : to + item_bytes] = content[start : start + item_bytes]
    assert writer.peer.crc(where) == zlib.crc32(landed[where].data)


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize("item_bytes", [3, 656, 1152, LONG_BYTES + 64])
def test_rows_are_read_bitwise(
    writer: Writer, landed: dict[str, np.ndarray], where: str, item_bytes: int
) -> None:
    """What earlier tests have written there comes back to where this node's GPU has another row."""
    num_slots = min(5000, NUM_BYTES // item_bytes)
    rng = np.random.default_rng(item_bytes)
    src, dst = (rng.permutation(num_slots)[: num_slots // 2] * item_bytes for _ in range(2))
    base = writer.peer.host_addr if where == "host" else writer.peer.gpu_addr
    lengths = np.full(src.size, item_bytes)
    try:
        writer.lanes.read(SESSION, (src + base, dst + writer.source.data_ptr(), lengths))
        expected = writer.content.numpy().copy()
        for start, to in zip(src.tolist(), dst.tolist(), strict=True):
            expected[to : to + item_bytes] = landed[where][start : start + item_bytes]
        assert torch.equal(writer.source.cpu(), torch.from_numpy(expected))
    finally:
        writer.source.copy_(writer.content)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_layers_are_read_for_a_forward_that_waits_for_each(writer: Writer, where: str) -> None:
    """The copies begin after the forward was launched. Its layers are read as they arrive."""
    num_layers, num_slots, item_bytes = 8, 20_000, 656
    base = writer.peer.host_addr if where == "host" else writer.peer.gpu_addr
    shape, size = (num_layers, num_slots, item_bytes), num_layers * num_slots * item_bytes
    own = writer.source[size : 2 * size].view(shape)
    slots = np.random.default_rng(2).permutation(num_slots)[:9000]
    src, dst = (RegionView(at, size, *shape) for at in (base, own.data_ptr()))
    runs = plan_slots(slots, np.arange(9000))
    memory = writer.lanes.pinned(SESSION)
    assert memory is not None
    arrivals = LayerArrivals((num_layers,), writer.source.device)
    read = torch.empty((num_layers, 9000, item_bytes), dtype=torch.uint8, device=writer.source.device)
    try:
        expected = np.frombuffer(writer.content[:size].numpy().data, np.uint8).reshape(shape)
        for layer in range(num_layers):  # the peer gets what is read from it
            start = layer * num_slots * item_bytes
            writer.write([start], [start], [num_slots * item_bytes], where)
        torch.cuda.synchronize()
        for _ in range(3):
            own.zero_()
            with arrivals.stream.copying():
                torch.cuda._sleep(10_000_000)  # some 5 ms
                for part in range(arrivals.num_parts):
                    layers = arrivals.layers(part, num_layers)
                    memory.enqueue_reads(descriptors(runs, src, dst, layers), MOST_LONG)
                    arrivals.record(part)
            for layer in range(num_layers):
                arrivals.wait(layer, num_layers)
                read[layer].copy_(own[layer, :9000])
            assert torch.equal(read.cpu(), torch.from_numpy(expected[:, slots]))
    finally:
        memory.unpin()
        torch.cuda.synchronize()
        writer.source.copy_(writer.content)
        writer.landed[where][:size] = writer.content[:size].numpy()


def test_a_room_of_long_and_short_runs_lands_in_slices(writer: Writer, landed: dict[str, np.ndarray]) -> None:
    num_layers, num_slots, item_bytes = 4, 40_000, 656
    rng = np.random.default_rng(1)
    dst_slots = rng.permutation(num_slots)[:20_000]
    dst_slots[:9000] = np.arange(9000)
    dst_slots[9000:] = np.setdiff1d(np.arange(num_slots), dst_slots[:9000])[: 20_000 - 9000]
    dst_slots[9000:] = rng.permutation(dst_slots[9000:])
    src_slots = np.arange(20_000)
    for where, base in (("host", writer.peer.host_addr), ("gpu", writer.peer.gpu_addr)):
        src = RegionView(writer.source.data_ptr(), NUM_BYTES, num_layers, num_slots, item_bytes)
        dst = RegionView(base, NUM_BYTES, num_layers, num_slots, item_bytes)
        runs = plan_slots(src_slots, dst_slots)
        for slice_ in SlicedWrites([LayerWrites(runs, src, dst, 0, num_layers)]):
            writer.lanes.write(SESSION, slice_)
        shape, size = (num_layers, num_slots, item_bytes), num_layers * num_slots * item_bytes
        source = writer.content.numpy()[:size].reshape(shape)
        landed[where][:size].reshape(shape)[:, dst_slots] = source[:, src_slots]
        assert writer.peer.crc(where) == zlib.crc32(landed[where].data)


def test_what_is_in_main_memory_is_copied_by_the_cpu(writer: Writer, landed: dict[str, np.ndarray]) -> None:
    writer.lanes.write(SESSION, ([writer.aux.data_ptr()], [writer.peer.host_addr + 77], [100]))
    landed["host"][77:177] = writer.aux.numpy()
    assert writer.peer.crc("host") == zlib.crc32(landed["host"].data)


@pytest.mark.parametrize(("bits", "width"), [(0, 16), (656, 16), (1160, 8), (132, 4), (6, 1), (1, 1)])
def test_the_widest_word_that_fits_is_taken(bits: int, width: int) -> None:
    assert word_bytes(np.array([[4096], [bits]])) == width


def test_the_peers_death_lets_its_memory_go() -> None:
    with LanePeer(64 << 20, "cuda:0") as peer:
        lanes = lanes_from(torch.zeros(64, device="cuda:0"))
        lanes.register(SESSION, peer.offer, peer.regions)
        deadline = time.monotonic() + WAIT_SECS
        while lanes.lane(SESSION) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        mapping = lanes.pairs[SESSION].mapping
        assert mapping is not None
        peer.close()
        while not all(mapped.closed for mapped in mapping.maps):
            assert time.monotonic() < deadline, "the memory of a dead process is still mapped"
            time.sleep(0.01)
    torch.zeros(10, device="cuda:0").sum().item()  # the context lives on


@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize(
    ("name", "item_bytes"),
    [("runs of 2.7 MB", 2_700_000 // 656 * 656), ("pages of 64 tokens", 64 * 656), ("rows", 656)],
)
def test_how_fast(
    writer: Writer, capsys: pytest.CaptureFixture[str], where: str, name: str, item_bytes: int
) -> None:
    """Print the GB/s of slices as the sender makes them, without any assertion."""
    slice_bytes = writer.lanes.write_bytes(SESSION)
    most = (slice_bytes // DESCRIPTOR_COST_BYTES, slice_bytes // item_bytes, NUM_BYTES // 2 // item_bytes)
    num_items = min(most)
    stride = 2 * item_bytes
    src = np.arange(num_items) * stride
    dst = np.random.default_rng(0).permutation(num_items) * stride
    lengths = np.full(num_items, item_bytes)
    writer.write(src, dst, lengths, where)
    rates = []
    for _ in range(20):
        started = time.perf_counter()
        writer.write(src, dst, lengths, where)
        rates.append(num_items * item_bytes / (time.perf_counter() - started) / 1e9)
    with capsys.disabled():
        print(
            f"\n{name} of {item_bytes} B to the {where}: {np.median(rates):.1f} GB/s "
            f"({min(rates):.1f}-{max(rates):.1f}); {NUM_BYTES >> 20} MiB opened in {writer.open_secs:.2f} s"
        )
