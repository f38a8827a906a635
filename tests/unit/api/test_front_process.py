"""The process of a node's front, and the engine that it starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import RankPlace, StartError
from hisparse_pd.serving.api import node
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.http import first_front
from hisparse_pd.serving.http.listening import Listener
from tests.waiting import wait_until

TROUBLES = {
    "port in use": "127.0.0.1:{port}",
    "no checkpoint": "missing: no such directory; give a local Hugging Face checkpoint",
    "bad defaults": "generation_config.json: top_p: 7 must be `float` <= 1.0; correct it, or start all",
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_front_that_cannot_start_says_why(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "setup_logging", lambda level, name: None)
    if trouble == "bad defaults":
        (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with Listener("127.0.0.1", 0).socket as taken:
        port = taken.getsockname()[1]
        model_path = tmp_path / "missing" if trouble == "no checkpoint" else tmp_path
        status = node.run_front(
            DecodeSettings(model_path=model_path, port=port),
            role="decode",
            engine=_never,
            check=SamplingDefaults.of,
            ports=(port,),
            apps=lambda _: contextlib.nullcontext(()),
        )
    assert status == 1
    (line,) = caplog.messages
    assert TROUBLES[trouble].format(port=port) in line


def test_nobody_else_reaches_the_socket_of_an_engine(tmp_path: Path) -> None:
    process = first_front.EngineProcesses(_never, DecodeSettings(model_path=tmp_path), "engine")
    directory = Path(process.endpoints_of(0)[0].removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    process.stop(graceful=False)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("device", "operators", "expected"),
    [
        ("cpu", {}, "1000"),
        ("cpu", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("cpu", {"OMP_WAIT_POLICY": "active"}, None),
        ("cuda", {}, None),
    ],
)
def test_engines_on_a_cpu_spin_briefly_unless_the_operator_says_how_they_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    operators: dict[str, str],
    expected: str | None,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in operators.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    settings = DecodeSettings(model_path=tmp_path, device=device)
    processes = first_front.EngineProcesses(_never, settings, "engine")
    others = multiprocessing.active_children()
    try:
        processes.start()
        assert dict(os.environ) == before, "other processes are none of its business"
        (engine,) = set(multiprocessing.active_children()) - set(others)
        process = Path(f"/proc/{engine.pid}")
        wait_until(lambda: "spawn_main" in (process / "cmdline").read_text(), "the interpreter of the engine")
        given = (process / "environ").read_text().split("\0")
        assert [entry for entry in given if entry.startswith("GOMP_SPINCOUNT=")] == (
            [] if expected is None else [f"GOMP_SPINCOUNT={expected}"]
        )
    finally:
        processes.stop(graceful=False)


def test_an_engine_that_cannot_start_says_so_under_its_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    processes = first_front.EngineProcesses(_fails, DecodeSettings(model_path=tmp_path), "decode-engine")
    others = set(multiprocessing.active_children())
    processes.start()
    wait_until(lambda: set(multiprocessing.active_children()) <= others, "the end of the engine")
    processes.stop(graceful=True)
    assert not processes.have_succeeded
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("decode-engine hisparse_pd.serving.http.first_front: cannot start: no memory")


def _never(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    raise AssertionError("no engine is started")


def _fails(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    raise StartError("no memory")
