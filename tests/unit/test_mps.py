"""``pair --mps`` runs a control daemon for as long as the nodes run. A script stands in for the driver's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hisparse_pd.base.settings_sources import SettingsError
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.commands import mps, pair
from hisparse_pd.commands.mps import CONTROL, running_mps
from hisparse_pd.commands.pair import pair_settings
from hisparse_pd.router import supervisor
from tests.unit.settings_support import MODEL

DAEMON = f"""#!{sys.executable}
import os, signal, sys
pipes, out = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["MPS_TEST_OUT"]
if sys.argv[1:] == ["-f"]:
    # Blocked first: whoever sees the pipe may send the signal at once.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    open(out, "a").write("started\\n")
    open(pipes + "/control", "w").write(str(os.getpid()))
    signal.sigwait([signal.SIGUSR1])
    open(out, "a").write("stopped\\n")
else:
    assert sys.stdin.read() == "quit\\n"
    os.kill(int(open(pipes + "/control").read()), signal.SIGUSR1)
"""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on the PATH, and return the file to which it writes what it does."""
    script = tmp_path / "bin" / CONTROL
    script.parent.mkdir()
    script.write_text(DAEMON)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MPS_TEST_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def test_the_daemon_runs_for_as_long_as_it_is_needed(out: Path) -> None:
    with running_mps() as variables:
        pipes = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert (pipes / "control").exists()
        assert Path(variables["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert out.read_text() == "started\n"
    assert out.read_text() == "started\nstopped\n"
    assert not pipes.exists()


def test_a_daemon_that_cannot_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match=rf"--mps: {CONTROL} cannot be run .*NVIDIA's driver"), running_mps():
        pass


def test_a_daemon_that_ends_at_once_is_named(out: Path) -> None:
    (out.parent / "bin" / CONTROL).write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(StartError, match=f"{CONTROL} exited with 3"), running_mps():
        pass


def test_a_daemon_that_does_not_listen_or_quit_is_killed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "START_SECS", 0.1)
    monkeypatch.setattr(mps, "STOP_SECS", 0.1)
    (out.parent / "bin" / CONTROL).write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 60; done\n")
    with pytest.raises(StartError, match=f"{CONTROL} did not listen within 0.1 s"), running_mps():
        pass


def test_the_nodes_of_a_pair_are_its_clients(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[supervisor.Child] = []
    seen: list[str] = []

    class Recorder:
        def __init__(self, given: list[supervisor.Child], startup_timeout_secs: float) -> None:
            children.extend(given)

        def run(self, on_healthy: object) -> int:
            seen.append(out.read_text())
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Recorder)
    monkeypatch.setattr(pair, "setup_logging", lambda *_: None)
    assert pair.run(*pair_settings({**MODEL, "device": "cuda", "mps": True})) == 0
    assert seen == ["started\n"]
    assert ["CUDA_MPS_PIPE_DIRECTORY" in child.environment for child in children] == [True] * 3
    assert out.read_text() == "started\nstopped\n"
    children.clear()
    assert pair.run(*pair_settings({**MODEL, "device": "cuda"})) == 0
    assert [child.environment for child in children] == [{}] * 3


def test_nodes_that_share_no_gpu_have_no_use_for_it() -> None:
    for devices in ({"device": "cpu"}, {"device": "cuda:0", "decode_device": "cuda:1"}):
        with pytest.raises(
            SettingsError, match=r"--mps is for nodes that share a GPU; .*, or leave --mps out"
        ):
            pair_settings({**MODEL, **devices, "mps": True})
