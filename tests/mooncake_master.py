"""The programs of a real Mooncake Store, and its master on this machine, for tests of the cluster's store."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hisparse_pd.base.ports import free_port
from tests.waiting import wait_until


def store_program(name: str) -> str:
    """Return the path of one of Mooncake's programs; skip the test where it is not installed."""
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return program


class Master:
    """The program on a port of loopback. ``directory``: of its log."""

    def __init__(self, directory: Path) -> None:
        self._program = store_program("mooncake_master")
        self._log = directory / "master.log"
        self.port, self._metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start the program, which knows nothing of what an earlier one knew, and wait until it answers."""
        options = [f"--rpc_port={self.port}", f"--metrics_port={self._metrics_port}", "--logtostderr"]
        options += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([self._program, *options], stdout=log, stderr=log)
        wait_until(self._answers, "mooncake_master to answer")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process inside the block: connections are taken, and nothing is answered."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
