"""A child process ends with its parent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hisparse_pd.base.process import die_with_parent, parent_is_alive, setup_logging, stop_signals
from tests.waiting import wait_until

PARENT = """
    import multiprocessing, os, time
    from hisparse_pd.base.process import die_with_parent

    def child(pipe):
        die_with_parent()
        pipe.send(os.getpid())
        time.sleep(60)

    if __name__ == "__main__":
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=child, args=(there,))
        process.start()
        print(here.recv(), flush=True)
        time.sleep(60)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert _is_running(child_pid)
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not _is_running(child_pid))


def test_a_process_that_nobody_spawned_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    die_with_parent()
    assert parent_is_alive()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_nohup_outlives_its_terminal(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in stop_signals()) is (handler is signal.SIG_DFL)
        assert {signal.SIGTERM, signal.SIGINT} <= set(stop_signals())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_logging_names_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        setup_logging("warning", "decode-engine")
        logging.getLogger("hisparse_pd.decode_node.engine").warning("pool %d", 7)
        logging.getLogger("hisparse_pd.decode_node.engine").info("hidden")
        written = capsys.readouterr().err
        assert "decode-engine hisparse_pd.decode_node.engine: pool 7" in written
        assert "hidden" not in written
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_closed_standard_streams_are_no_ones_file(tmp_path: Path) -> None:
    """A file that the process opens gets no standard stream's number, and a child that prints succeeds."""
    code = """
        import subprocess, sys
        from hisparse_pd.commands import cli

        cli.main(["keygen", sys.argv[1] + "/key"])
        with open(sys.argv[1] + "/found", "w") as file:
            child = subprocess.run([sys.executable, "-c", "import os; os.write(1, b'x'); os.write(2, b'y')"])
            file.write(f"{file.fileno() > 2} {child.returncode}")
    """
    closed = 'exec "$0" -c "$1" "$2" 0<&- 1>&- 2>&-'
    arguments = [sys.executable, textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(["sh", "-c", closed, *arguments], timeout=60).returncode == 0
    assert (tmp_path / "found").read_text() == "True 0"
