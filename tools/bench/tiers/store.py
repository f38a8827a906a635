"""Starts a Mooncake Store on loopback: its master, and a client of its own that lends it main memory.

The bytes lie with that client, not with the prefill node, so that they come from another process by TCP.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hisparse_pd.base.ports import free_port

START_SECS = 20.0
STOP_SECS = 10.0
LOG_CHARS = 3000


class StoreMissingError(Exception):
    """The store is not installed, or did not start."""


@contextmanager
def running_store(lent_gib: int) -> Iterator[str]:
    """Start a store of so many GiB and yield its master's address. Raises StoreMissingError."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-store-") as directory:
        master = _start(
            Path(directory),
            "mooncake_master",
            *(f"--rpc_port={port}", f"--metrics_port={free_port()}"),
            *("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--logtostderr"),
        )
        processes = [master]
        try:
            _wait_for(port, master, Path(directory) / "mooncake_master.log")
            client_port = free_port()
            lender = _start(
                Path(directory),
                "mooncake_client",
                *(f"--master_server_address={address}", "--metadata_server=P2PHANDSHAKE"),
                *("--host=127.0.0.1", f"--port={client_port}", f"--global_segment_size={lent_gib}GB"),
                "--logtostderr",
            )
            processes.append(lender)
            _wait_for(client_port, lender, Path(directory) / "mooncake_client.log")
            yield address
        finally:
            for process in reversed(processes):
                _stop(process)


def _start(directory: Path, program: str, *options: str) -> subprocess.Popen[bytes]:
    spec = importlib.util.find_spec("mooncake")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    path = next((folder / program for folder in folders if (folder / program).is_file()), None)
    if path is None:
        raise StoreMissingError(f"{program} is not installed; it comes with mooncake-transfer-engine*")
    with (directory / f"{program}.log").open("wb") as log:
        return subprocess.Popen([path, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a process listens on a port. Raises StoreMissingError."""
    deadline = time.monotonic() + START_SECS
    while True:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise StoreMissingError(
                f"{log.stem} did not start: {log.read_text(errors='replace')[-LOG_CHARS:]}"
            )
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
