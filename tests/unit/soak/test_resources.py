"""What the soak concludes from what processes had over time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import Service
from tests.soak.resources import History, Recorder, Usage, listening

SERVICE = """
import multiprocessing, os, sys, threading, time

def child(path):
    lock = multiprocessing.get_context("spawn").Lock()
    files = [open(os.devnull) for _ in range(50)]
    threads = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(7)]
    [thread.start() for thread in threads]
    open(path, "w").close()
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],)).start()
    time.sleep(600)
"""


def history(of_second: Callable[[float], Usage], secs: int = 1500) -> History:
    times = [float(at) for at in range(0, secs, 5)]
    return History("decode-0 engine #1", 1, times, [of_second(at) for at in times])


def recorder(*histories: History) -> Recorder:
    found = Recorder([], 1.0)
    found.histories.extend(histories)
    found.load_ended_at = 1500.0
    return found


def test_what_grows_while_it_warms_up_and_varies_later_is_flat() -> None:
    varying = history(lambda at: Usage(min(at, 290.0) + at % 15, 40 + int(at) % 35, 9))
    assert recorder(varying).too_much() == []
    growth = varying.growth(1500.0)
    assert growth is not None
    assert abs(growth["resident_mib"]) <= 5


@pytest.mark.parametrize(
    ("leaks", "kind"),
    [
        (lambda at: Usage(500 + at / 50, 40, 9), "resident_mib"),
        (lambda at: Usage(500, 40 + int(at / 80), 9), "descriptors"),
        (lambda at: Usage(500, 40, 9 + int(at / 150)), "threads"),
    ],
)
def test_what_keeps_growing_is_named(leaks: Callable[[float], Usage], kind: str) -> None:
    (found,) = recorder(history(lambda at: Usage(500, 40, 9)), history(leaks)).too_much()
    assert found.startswith(f"decode-0 engine #1: {kind} grew by ")


def test_a_prefill_engine_keeps_what_mooncake_does_not_close() -> None:
    leaking = history(lambda at: Usage(500, 40 + int(at / 80), 9))
    leaking.name = "prefill-0 engine #1"
    deaths = [
        History(f"decode-1 engine #{number}", 1, [400.0 + number], [Usage(1, 1, 1)]) for number in (2, 3)
    ]
    assert recorder(leaking).too_much() != []
    assert recorder(leaking, *deaths).too_much() == []


def test_of_a_short_life_or_of_the_time_after_the_load_nothing_is_said() -> None:
    short = history(lambda at: Usage(at, int(at), int(at)), secs=590)
    assert short.growth(1500.0) is None
    late = history(lambda at: Usage(500 if at < 1500 else 2000, 40, 9), secs=3000)
    assert recorder(late).too_much() == []


def test_every_process_of_a_service_is_looked_at(tmp_path: Path) -> None:
    """And the same service started again has other processes, with other numbers."""
    script, started = tmp_path / "service.py", tmp_path / "started"
    script.write_text(SERVICE)
    service = Service("decode-0", [], 0, tmp_path / "log")
    watch = Recorder([service], 1.0)
    watch.look()
    for _ in range(2):
        started.unlink(missing_ok=True)
        service.process = subprocess.Popen([sys.executable, str(script), started], start_new_session=True)
        try:
            while not started.exists():
                assert service.process.poll() is None
            watch.look()
        finally:
            service.kill()
        watch.look()
    by_name = {history.name: history for history in watch.histories}
    parts = ("front", "engine", "tracker")
    assert set(by_name) == {f"decode-0 {part} #{number}" for part in parts for number in (1, 2)}
    usage = by_name["decode-0 engine #2"].usages[0]  # one that was killed may be there for a moment longer
    assert usage.descriptors > 50
    assert usage.threads == 8
    assert usage.resident_mib > 1
    assert watch.summary()["decode-0 engine"]["processes"] == 2
    left = watch.shared_memory_left()  # the semaphores: killed with the one that would have removed them
    assert len(left) == 2
    for name in left:
        assert name.startswith("sem.mp-")
        Path("/dev/shm", name).unlink()
    assert watch.shared_memory_left() == []


def test_a_port_that_somebody_listens_on_is_found() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listening([port]) == [port]
    assert listening([port]) == []
