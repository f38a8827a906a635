"""What every kind of test shares: scheduling, tiny checkpoints, and random ones with tied scores."""

import fcntl
import functools
import gc
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.examples import num_examples
from tests.preloaded import Preloaded

# Several processes share the cores; with a thread pool each, the tiny matrices take many times longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As engines are started: where a pool has several threads all the same, waiting ones yield the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# As on the nodes (kernels.row_math.fix_arithmetic); it counts from the first product of any test.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# How long an example takes, or is drawn, says nothing on a machine that is busy with others.
# In `make test` half of hypothesis' own number of examples, in `make test-full` all of them.
hypothesis.settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=num_examples(50, 100),
)
hypothesis.settings.load_profile("busy machine")


REPO = Path(__file__).parents[1]
SHARED_PAIRS = ("pair", "trained_pair")
"""Fixtures of ``tests.integration.conftest``."""
OF_EACH_MODEL = "tests/integration/test_oracle.py"
"""A file that would take half of `make test-full` in one process."""
OF_THE_TREE = ("tests/unit/test_architecture.py", "tests/unit/test_docs.py")
"""Files that read all sources; one process parses them once for both."""
LAST = "tests/integration/test_live_page.py"
"""A file that runs last, because it takes a node away from the pair that it shares."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep garbage collection away from what tests import: it took a third of this time, and more later.

    Later it comes less often than by default, because tests make little garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the router's tests, which mostly wait, beside those that compute instead of alone at the end."""
    items.sort(key=lambda item: (item.path.match(LAST), not item.nodeid.startswith("tests/unit/router/")))


@functools.cache
def shared_pair(file: str) -> str | None:
    """Return the shared pair that the tests of ``file`` ask for, or None."""
    text = (REPO / file).read_text() if file.startswith("tests/integration/") else ""
    asked = (
        name for name in SHARED_PAIRS if f" {name}: Deployment" in text or f"({name}: Deployment" in text
    )
    return next((name for name in asked if f"def {name}(" not in text), None)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """With ``--dist loadfile``, fork pytest's processes from one that has imported torch.

    Not beside a GPU, whose libraries may start threads when they are imported, nor where coverage is
    measured, which begins with a process.
    """
    is_plain = shutil.which("nvidia-smi") is None and "COVERAGE_PROCESS_CONFIG" not in os.environ
    if is_plain and config.getoption("dist") == "loadfile":
        directory = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for spec in specs:
            spec.python = shlex.join([sys.executable, "-m", "tests.forked_worker", str(directory)])


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, send all files of a shared pair to one process, which alone starts it.

    The tests of ``OF_EACH_MODEL`` go to one process a model, by the end of their names, and those of
    ``OF_THE_TREE`` to one.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            if file == OF_EACH_MODEL:
                return file + re.split(r"[-[]", nodeid.rstrip("]"))[-1]
            if file in OF_THE_TREE:
                return OF_THE_TREE[0]
            return shared_pair(file) or file

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def processes_hear_hangups() -> Iterator[None]:
    """Give processes that tests start the default of SIGHUP, also where the tests run under ``nohup``.

    An ignored signal stays ignored in a program that is started; a handled one gets its default.
    """
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Read the machine's certificates once: every client of httpx reads them, in 17 ms."""
    import httpx

    with pytest.MonkeyPatch.context() as patch:
        name = "httpx._transports.default.create_ssl_context"
        patch.setattr(name, functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """A process to fork services from. All processes of a test run share it; the first service starts it."""
    with closing(Preloaded(_shared_directory(tmp_path_factory))) as preloaded:
        yield preloaded


def _shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary directory that all processes of a test run have in common."""
    directory = tmp_path_factory.getbasetemp()
    return directory.parent if "PYTEST_XDIST_WORKER" in os.environ else directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the tiny checkpoint of one of make_tiny's VARIANTS, written once a test run."""
    from tools.checkpoints.make_tiny import write_checkpoint

    return _written_once(tmp_path_factory, "tiny", write_checkpoint)


@pytest.fixture(scope="session")
def drafting_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the tiny checkpoint of a variant with an MTP layer, written once a test run.

    V3.2 has two layers here, one dense and one with experts, and the MTP layer is a third one.
    """
    from tools.checkpoints.make_tiny import LIKELY_DRAFTS, write_checkpoint

    def write(path: Path, variant: str) -> None:
        write_checkpoint(path, variant, draft_gain=LIKELY_DRAFTS)
        if variant == "v32":
            from tests.checkpoint_edits import drop_layer

            drop_layer(path, 2)

    return _written_once(tmp_path_factory, "drafting", write)


@pytest.fixture(scope="session")
def sharing_checkpoint(
    drafting_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``drafting_checkpoint`` whose later drafts share the first one's selection, written once a test run."""

    def write(path: Path, variant: str) -> None:
        from tests.checkpoint_edits import edit_config

        shutil.copytree(drafting_checkpoint(variant), path)
        edit_config(path, index_share_for_mtp_iteration=True)

    return _written_once(tmp_path_factory, "sharing", write)


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the tied checkpoint of "v32", "glm" or "mistral", written once a test run."""
    from tests.tied_checkpoint import write_tied_checkpoint

    return _written_once(tmp_path_factory, "tied", write_tied_checkpoint)


def _written_once(
    tmp_path_factory: pytest.TempPathFactory, kind: str, write: Callable[[Path, str], None]
) -> Callable[[str], Path]:
    """A function that writes a checkpoint at its first call in any process of a test run."""
    checkpoints = _shared_directory(tmp_path_factory) / "checkpoints"
    checkpoints.mkdir(exist_ok=True)

    @functools.cache
    def directory(variant: str) -> Path:
        path = checkpoints / f"{kind}-{variant}"
        with open(checkpoints / f"{path.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=checkpoints) as unfinished:
                    write(Path(unfinished, path.name), variant)
                    Path(unfinished, path.name).rename(path)
        return path

    return directory
