"""Fixtures of an engine, a decode node and a room, which the files of this folder share or replace in
part."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hisparse_pd.engine.messages import ReleasePage
from tests.checkpoint_edits import edit_config
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    decode_peer,
    engine_thread,
    next_room,
)
from tools.checkpoints.make_tiny import GLM_INDEXERS


@pytest.fixture(scope="session")
def tiny(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM's tiny checkpoint without its last layer. The second one shares the indexer of the first, so that
    index layers and layers differ."""
    path = shutil.copytree(tiny_checkpoint("glm"), tmp_path_factory.mktemp("tiny") / "glm")
    edit_config(path, num_hidden_layers=3, indexer_types=GLM_INDEXERS[:3])
    return path


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    with engine_thread(tiny, tmp_path_factory.mktemp("prefill") / "front") as engine:
        yield engine


@pytest.fixture
def engine(served: EngineThread) -> Iterator[EngineThread]:
    """The module's engine with an empty cache. It takes back the pages that the test set aside; after that
    nothing may be in use."""
    served.flush()
    served.forget()
    yield served
    served.before_run = lambda batch: None
    served.after_layer = lambda layer: None
    served.wait_until_idle()
    for page in served.life.set_aside.shown():
        served.send(ReleasePage(page.pool, page.start))
    served.wait_until(lambda: not served.life.set_aside, "the pages to be taken back")
    served.assert_whole()


@pytest.fixture(scope="module")
def node(served: EngineThread) -> Iterator[DecodePeer]:
    with decode_peer(served) as node:
        yield node


@pytest.fixture
def peer(engine: EngineThread, node: DecodePeer) -> DecodePeer:
    """The module's decode node, registered and blank."""
    node.register()
    node.forget()
    return node


@pytest.fixture
def room() -> int:
    return next_room()
