"""Pages that go down to main memory and up again have the same bytes, behind the GPU's earlier work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.kernels.row_check import row_checks_of, rows_of_pages
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.protocol.messages import Extent
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu

PAGE = 16
DOWN = (Extent(5 * PAGE, 3 * PAGE), Extent(0, 2 * PAGE), Extent(11 * PAGE, PAGE))
HOST = (Extent(8 * PAGE, PAGE), Extent(2 * PAGE, 4 * PAGE), Extent(0, PAGE))
UP = (Extent(14 * PAGE, 6 * PAGE),)


def slots_of(extents: tuple[Extent, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(extent.start, extent.end) for extent in extents])


def test_pages_come_back_as_they_went(tiny_checkpoint: Callable[[str], Path]) -> None:
    spec = load_spec(tiny_checkpoint("glm"))
    memory = PrefillMemory(spec, num_slots=24 * PAGE, num_aux_slots=1, device=DEVICE)
    assert len(memory.sent) == 3
    for pool in memory.sent:
        pool.view(torch.uint8).random_()
    before = [pool.clone() for pool in memory.sent]
    with closing(HostPages(memory, 10 * PAGE)) as pages:
        down = pages.copy_down(DOWN, HOST)
        # The device gets others' bytes before the copy is looked at: work of the current stream that follows
        # must wait for the event, as ``HostTier`` does.
        assert down is not None
        down.synchronize()
        for pool in memory.sent:
            pool.zero_()
        up = pages.copy_up(HOST, UP)
        assert up is not None
        up.synchronize()
        assert up.query()
        for pool, was in zip(memory.sent, before, strict=True):
            expected = torch.zeros_like(was)
            expected[:, slots_of(UP).to(DEVICE)] = was[:, slots_of(DOWN).to(DEVICE)]
            assert torch.equal(pool, expected)
        assert pages.kv.is_pinned()
        assert torch.equal(pages.kv[:, slots_of(HOST)], before[0][:, slots_of(DOWN).to(DEVICE)].cpu())


def test_rows_are_verified_behind_their_copy(tiny_checkpoint: Callable[[str], Path]) -> None:
    """They are enqueued while the copy has not begun, and the host does not wait."""
    spec = load_spec(tiny_checkpoint("glm"))
    memory = PrefillMemory(spec, num_slots=24 * PAGE, num_aux_slots=1, device=DEVICE)
    slots, num_layers = slots_of(UP), len(memory.kv)
    rows = rows_of_pages((slots[::PAGE] // PAGE).tolist(), PAGE, 0, len(slots))
    found: list[torch.Tensor] = []
    memory.begin_check(rows, PAGE)  # compiles
    with closing(HostPages(memory, 10 * PAGE)) as pages:
        assert pages.row_checks is not None
        pages.kv.random_()
        checks = row_checks_of(pages.kv, slots_of(HOST).to(DEVICE), torch.arange(len(slots), device=DEVICE))
        pages.row_checks[:, slots_of(HOST)] = checks.cpu()
        for wrong_layer in (None, 0, num_layers - 1):
            if wrong_layer is not None:
                pages.kv[wrong_layer, slots_of(HOST)[-1], 3] ^= 1
            memory.kv.zero_()
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # some 10 ms of the current stream
            up = pages.copy_up(HOST, UP, behind=lambda: found.append(memory.begin_check(rows, PAGE)))
            assert up is not None
            assert not up.query()
            up.synchronize()
            assert bool(found[-1].item()) == (wrong_layer is not None)
            if wrong_layer is not None:
                pages.kv[wrong_layer, slots_of(HOST)[-1], 3] ^= 1


def test_a_copy_up_waits_for_the_work_in_front(tiny_checkpoint: Callable[[str], Path]) -> None:
    """A forward that was launched before may still read the slots."""
    spec = load_spec(tiny_checkpoint("glm"))
    memory = PrefillMemory(spec, num_slots=24 * PAGE, num_aux_slots=1, device=DEVICE)
    slots = slots_of(UP).to(DEVICE)
    with closing(HostPages(memory, 10 * PAGE)) as pages:
        pages.kv.fill_(7)
        memory.kv.fill_(3)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # some 10 ms of the current stream
        read = memory.kv[:, slots].clone()
        up = pages.copy_up(HOST, UP)
        assert up is not None
        up.synchronize()
        assert bool((read == 3).all())
        assert bool((memory.kv[:, slots] == 7).all())


@pytest.mark.parametrize("is_graph", [False, True])
def test_layers_wait_for_what_they_read(tiny_checkpoint: Callable[[str], Path], is_graph: bool) -> None:
    """Each layer is read behind its own copy, again and again, and without a copy under way, too."""
    spec = load_spec(tiny_checkpoint("glm"))
    memory = PrefillMemory(spec, num_slots=24 * PAGE, num_aux_slots=1, device=DEVICE)
    slots = slots_of(UP).to(DEVICE)
    arrivals = memory.layer_arrivals()
    assert arrivals is not None
    with closing(HostPages(memory, 10 * PAGE, arrivals)) as pages:
        pools = memory.kv, memory.index
        read = [torch.zeros_like(pool[:, slots]) for pool in pools]

        def forward() -> None:
            for pool, copies in zip(pools, read, strict=True):
                for layer in range(len(pool)):
                    arrivals.wait(layer, len(pool))
                    torch.index_select(pool[layer], 0, slots, out=copies[layer])

        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        for value in range(1, 20):
            pages.kv.fill_(value)
            pages.index.fill_(value)
            torch.cuda.synchronize()
            with pages._up.use():
                torch.cuda._sleep(5_000_000)  # some 3 ms, in front of the copies
            up = pages.copy_up(HOST, UP)
            assert up is not None
            for _ in range(2):
                graph.replay() if is_graph else forward()
                torch.cuda.current_stream().synchronize()
                assert all(bool((copies == value).all()) for copies in read)
            assert up.query()
