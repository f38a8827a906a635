"""A decode engine has its pools in main memory on the NUMA node that it was given, and says so."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hisparse_pd.core.memory.numa import ANYWHERE, Placement, PoolPolicy
from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import EngineReady, Shutdown
from tests.unit.decode_node.support import Checkpoint, EngineHarness
from tests.unit.memory.this_machine import HERE, needs_policies, numa_maps_line
from tests.waiting import WAIT_MS

ON_HERE = Placement("a test's", HERE, (0,), policy=PoolPolicy.BIND)


@needs_policies
@pytest.mark.parametrize("placement", [ON_HERE, ANYWHERE])
def test_all_pools_are_asked_for_from_the_node(
    checkpoint: Checkpoint, tmp_path: Path, placement: Placement
) -> None:
    with closing(EngineHarness(checkpoint, tmp_path, placement=placement)) as node:
        addrs = [memory.addr for memory in node.engine.memory.shared_memory()]
        assert len(addrs) == 5
        policy = f" bind:{HERE} " if placement is ON_HERE else " default "
        for addr in addrs:
            assert policy in numa_maps_line(addr)


@pytest.mark.parametrize("placement", [ON_HERE, ANYWHERE])
def test_the_front_hears_where_the_engine_is(
    checkpoint: Checkpoint, tmp_path: Path, placement: Placement
) -> None:
    with closing(EngineHarness(checkpoint, tmp_path, placement=placement)) as node:
        node.send(Shutdown())
        node.engine.run()
        ready = None
        while not isinstance(ready, EngineReady):
            assert node.front.poll(WAIT_MS), "the engine did not say that it is ready"
            ready = engine_messages.from_engine_decoder.decode(node.front.recv())
        assert (ready.numa_node, ready.numa_placement) == (placement.node, str(placement))
