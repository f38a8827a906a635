"""Keys of held pages that go down to main memory and up again have the same bytes, behind the GPU's earlier
work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hisparse_pd.core.memory import gpu_copies
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.key_pages import KeyPages
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.protocol.messages import Extent
from hisparse_pd.transfer import plan
from tests.gpu.support import DEVICE, needs_gpu, no_waiting

pytestmark = needs_gpu

PAGE = 16
DOWN = (Extent(5 * PAGE, 3 * PAGE), Extent(0, 2 * PAGE), Extent(11 * PAGE, PAGE))
HOST = (Extent(38 * PAGE, PAGE), Extent(2 * PAGE, 4 * PAGE), Extent(0, PAGE))
UP = (Extent(14 * PAGE, 6 * PAGE),)


def slots_of(extents: tuple[Extent, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(extent.start, extent.end) for extent in extents])


@pytest.fixture
def memory(tiny_checkpoint: Callable[[str], Path]) -> Iterator[DecodeMemory]:
    totals = SlotCounts(host=40 * PAGE, device=4 * PAGE, index=24 * PAGE, aux=1)
    spec = load_spec(tiny_checkpoint("glm"))
    with closing(DecodeMemory(spec, totals, PAGE, torch.device(DEVICE))) as memory:
        yield memory


def num_same(pages: KeyPages) -> int:
    torch.cuda.synchronize()  # what wrote to the slots is over
    return pages.num_same(DOWN, HOST)


@pytest.mark.parametrize("most_ranges", [1, gpu_copies.MOST_RANGES])
def test_pages_come_back_as_they_went(
    memory: DecodeMemory, most_ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch for each range, or for all."""
    monkeypatch.setattr(gpu_copies, "MOST_RANGES", most_ranges)
    assert memory.row_checks is not None
    pools = (memory.index, memory.row_checks)
    for pool in pools:
        pool.view(torch.uint8).random_()
    before = [pool.clone() for pool in pools]
    with closing(KeyPages(memory)) as pages:
        down = pages.copy_down(DOWN, HOST)
        # The device gets others' bytes before the copy is looked at: ``HeldTier`` waits for the event.
        assert down is not None
        down.synchronize()
        for pool in pools:
            pool.zero_()
        assert torch.equal(pages.row_checks(slots_of(HOST)), before[1][:, slots_of(DOWN).to(DEVICE)].cpu())
        assert num_same(pages) == 0
        memory.row_checks.copy_(before[1])
        assert num_same(pages) == 6 * PAGE
        memory.row_checks[-1, slots_of(DOWN)[70]] += 1
        assert num_same(pages) == 70
        memory.row_checks.zero_()
        up = pages.copy_up(HOST, UP)
        assert up is not None
        up.synchronize()
        assert up.query()
        for pool, was in zip(pools, before, strict=True):
            expected = torch.zeros_like(was)
            expected[:, slots_of(UP).to(DEVICE)] = was[:, slots_of(DOWN).to(DEVICE)]
            assert torch.equal(pool, expected)


@pytest.mark.parametrize("long_bytes", [1, plan.LONG_BYTES])
def test_kv_goes_down_and_up_with_its_keys(
    memory: DecodeMemory, long_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To other slots, and from pages that are not adjacent, by the copy engine or the kernel; nothing else
    changes."""
    monkeypatch.setattr(plan, "LONG_BYTES", long_bytes)
    device, up_device = (Extent(2 * PAGE, PAGE), Extent(0, PAGE)), (Extent(2 * PAGE, 2 * PAGE),)
    host, index = (Extent(38 * PAGE, PAGE), Extent(3 * PAGE, PAGE)), DOWN[1:2]
    up = (Extent(14 * PAGE, 2 * PAGE),)
    for pool in (memory.k_dev, memory.index, memory.k_host):
        pool.view(torch.uint8).random_()
    kv, keys, was_host = memory.k_dev.cpu(), memory.index.cpu(), memory.k_host.clone()
    with closing(KeyPages(memory)) as pages:
        with no_waiting():
            down = pages.copy_down(index, host, device)
        assert down is not None
        down.synchronize()
        was_host[:, slots_of(host)] = kv[:, slots_of(device)]
        assert torch.equal(memory.k_host, was_host)
        memory.k_dev.zero_()
        memory.index.zero_()
        with no_waiting():
            event = pages.copy_up(host, up, up_device)
        assert event is not None
        event.synchronize()
    for pool, was, to, origin in ((memory.k_dev, kv, up_device, device), (memory.index, keys, up, index)):
        expected = torch.zeros_like(was)
        expected[:, slots_of(to)] = was[:, slots_of(origin)]
        assert torch.equal(pool.cpu(), expected)


def test_copies_wait_for_the_work_in_front(memory: DecodeMemory) -> None:
    """A step that was launched before may still read the pages that come up, or write those that go down. The
    engine's loop waits for neither."""
    down, up = (slots_of(extents).to(DEVICE) for extents in (DOWN, UP))
    with closing(KeyPages(memory)) as pages:
        memory.index.fill_(3)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # some 10 ms of the current stream
        memory.index[:, down] = 7
        with no_waiting():
            first = pages.copy_down(DOWN, HOST)
        assert first is not None
        first.synchronize()
        torch.cuda._sleep(20_000_000)
        read = memory.index[:, up].clone()
        with no_waiting():
            second = pages.copy_up(HOST, UP)
        assert second is not None
        second.synchronize()
        assert bool((read == 3).all())
        assert bool((memory.index[:, up] == 7).all())
