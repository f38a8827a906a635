"""Fixtures that a file may replace: a checkpoint, transformers' tokens of a module's prompts, and a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hisparse_pd.decode_node.runner import DeviceRunner, Launched
from tests.unit.decode_node.failures_support import end_quarantine
from tests.unit.decode_node.oracle import Expected
from tests.unit.decode_node.speculation_support import Calls, harness
from tests.unit.decode_node.support import Checkpoint, EngineHarness, PrefillDouble, load_checkpoint


@pytest.fixture(scope="module", params=["v32"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    """A checkpoint of the kind that the module has as ``CHECKPOINT``.

    A "drafting" one has an MTP layer, whose drafts are right half of the time; in a "tied" one equal scores
    are the rule, and a wrong byte changes tokens.
    """
    kind = getattr(request.module, "CHECKPOINT", "tiny")
    path: Path = request.getfixturevalue(f"{kind}_checkpoint")(request.param)
    return load_checkpoint(path, num_draft_layers=int(kind == "drafting"))


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Expected:
    """The likeliest tokens after each prompt, as many as the module has as ``NUM_NEW``."""
    return Expected(checkpoint.path, request.module.NUM_NEW)


@pytest.fixture(scope="module")
def node(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHarness]:
    """A node whose host is a step behind, with the settings that the module has as ``NODE``."""
    settings = getattr(request.module, "NODE", {})
    with closing(harness(checkpoint, tmp_path_factory.mktemp("node"), **settings)) as node:
        yield node


@pytest.fixture(scope="module")
def shared_node(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHarness]:
    """A node with the same settings that reads each step before the next, as on CPUs."""
    ipc_dir = tmp_path_factory.mktemp("node")
    with closing(EngineHarness(checkpoint, ipc_dir, **request.module.NODE)) as node:
        yield node


@pytest.fixture
def resting_node(shared_node: EngineHarness) -> Iterator[EngineHarness]:
    """The shared node, whose prefill node delivers and has forgotten all Bootstraps; after a test no request
    is live, and all pools are whole without held prefixes."""
    shared_node.double.bootstraps.clear()
    shared_node.double.delivers = True
    yield shared_node
    shared_node.come_to_rest()


@pytest.fixture
def failing_node(checkpoint: Checkpoint, shared_node: EngineHarness) -> Iterator[EngineHarness]:
    """The shared node, and another prefill node for each test.

    Whatever a test does, every pool must be whole again soon after it (I2). The prefill node is closed before
    the check: what it never acknowledged is freed because it is gone.
    """
    queue, pools = shared_node.engine.queue_moves, shared_node.engine.requests.pools
    settings = queue.room_timeout_secs, queue.contact_timeout_secs
    shared_node.double.close()
    shared_node.double = PrefillDouble(checkpoint)
    with closing(shared_node.double):
        yield shared_node
    queue.room_timeout_secs, queue.contact_timeout_secs = settings

    def are_whole() -> bool:
        end_quarantine(shared_node)
        return pools.free == pools.totals

    shared_node.turn_until(are_whole)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A record of when steps of all nodes are launched, drawn, waited for and read."""
    calls = Calls()
    calls.watch(monkeypatch, DeviceRunner, "launch", "launch")
    for method, what in (("draw", "draw"), ("wait", "wait"), ("result", "read")):
        calls.watch(monkeypatch, Launched, method, what)
    return calls
