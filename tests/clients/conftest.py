"""Two pairs, started by the project's command line; the clients live in environments of their own.

Nothing of the project is imported here or in the tests: its packages are not installed beside the clients.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROJECT_PYTHON = os.environ.get("PROJECT_PYTHON", str(REPO / ".venv" / "bin" / "python"))
RETRIEVAL_MODEL = REPO / "tools" / "checkpoints" / "retrieval"
STOP_TIMEOUT_SECS = 60.0
if not any(map(importlib.util.find_spec, ("anthropic", "litellm"))):
    collect_ignore_glob = ["test_*.py"]  # this is neither of the clients' environments
_SERVES = re.compile(r"^hisparse-pd serves (\S+) at (\S+)/v1$", re.MULTILINE)

# Options of `make demo`: hot buffers that long prompts overflow, and drafts.
DEMO_OPTIONS = (
    *("--page-size", "64", "--chunked-prefill-size", "512", "--kv-pool-tokens", "16384"),
    *("--device-buffer-size", "260", "--device-pool-tokens", "6656", "--host-pool-tokens", "32768"),
    *("--speculative-num-steps", "3"),
)

_DEAD_PROXY = "http://127.0.0.1:9"
OFFLINE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _DEAD_PROXY),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), _DEAD_PROXY),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Environment without a network; set before clients are imported, since some read it on import."""

os.environ.update(OFFLINE)


@dataclass(frozen=True)
class Served:
    """A running pair."""

    url: str
    """The router's address, without /v1."""
    model: str
    model_path: Path

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def _serving(model_path: Path, log_path: Path, *options: str) -> Iterator[Served]:
    """Run a pair on free ports."""
    ports = [word for name in ("", "prefill-", "decode-", "bootstrap-") for word in (f"--{name}port", "0")]
    command = ["hisparse_pd", "pair", "--model-path", str(model_path), *ports, "--num-threads", "1", *options]
    with running(command, log_path) as (model, url):
        yield Served(url, model, model_path)


@contextmanager
def running(command: Sequence[str], log_path: Path) -> Iterator[tuple[str, str]]:
    """Run a module of the project; yield the model's name and the router's address.

    Raises RuntimeError with its log if it does not start.
    """
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [PROJECT_PYTHON, "-m", *command],
            cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    try:
        yield _wait_serving(process, log_path)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_SECS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_serving(process: subprocess.Popen[bytes], log_path: Path) -> tuple[str, str]:
    """Wait with no limit of its own: a pair that gets no further ends by itself."""
    while (found := _SERVES.search(log := log_path.read_text(errors="replace"))) is None:
        if process.poll() is not None:
            raise RuntimeError(f"the pair does not serve; its log ends:\n{log[-6000:]}")
        time.sleep(0.1)
    return found[1], found[2]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The pair of the demo: its model looks up numbers in notes, and knows nothing else."""
    log_path = tmp_path_factory.mktemp("demo") / "pair.log"
    with _serving(RETRIEVAL_MODEL, log_path, *DEMO_OPTIONS) as served:
        yield served


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A pair with an untrained model, a token a byte, which writes anything that a grammar allows.

    It has no chat template, like DeepSeek-V3.2 as it is published, so chats may have tools.
    """
    directory = tmp_path_factory.mktemp("tiny")
    model_path = directory / "tiny"
    subprocess.run(
        [PROJECT_PYTHON, "-m", "tools.checkpoints.make_tiny", str(model_path)],
        cwd=REPO,
        check=True,
        timeout=120,
    )
    (model_path / "chat_template.jinja").unlink()
    with _serving(model_path, directory / "pair.log") as served:
        yield served
