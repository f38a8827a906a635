"""NVIDIA's Multi-Process Service (MPS) for the two nodes of a pair that share GPUs.

Without it a GPU serves one process at a time: while steps run, a prompt's kernels wait, and the other way
round. Clients of an MPS server run beside each other. ``pair.py`` starts the nodes within ``running_mps``,
which has a control daemon of its own, apart from any other of the machine.
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.router.supervisor import end_with_parent

log = logging.getLogger(__name__)

CONTROL: Final = "nvidia-cuda-mps-control"
"""The daemon, and the client that tells it to quit. The driver brings it."""
START_SECS: Final = 10.0
STOP_SECS: Final = 10.0
_POLL_SECS: Final = 0.05


@contextmanager
def running_mps() -> Iterator[Mapping[str, str]]:
    """Run a control daemon, which starts a server for its first client. Yields the variables that make a
    process its client. Raises StartError."""
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-mps-") as name:
        pipes, logs = Path(name, "pipes"), Path(name, "logs")
        pipes.mkdir()
        logs.mkdir()
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        environment = os.environ | variables
        try:
            daemon = subprocess.Popen(
                [CONTROL, "-f"],
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the parent alone: its nodes need the daemon to the end
                preexec_fn=end_with_parent(),
            )
        except OSError as error:
            raise StartError(
                f"--mps: {CONTROL} cannot be run ({error}); it comes with NVIDIA's driver: put it on the "
                "PATH, or leave the option out"
            ) from error
        try:
            _wait_until_listening(daemon, pipes)
            log.info("MPS control daemon started, pid %d", daemon.pid)
            yield variables
        finally:
            _stop(daemon, environment)


def _wait_until_listening(daemon: subprocess.Popen[bytes], pipes: Path) -> None:
    deadline = time.monotonic() + START_SECS
    while not (pipes / "control").exists():
        if (status := daemon.poll()) is not None:
            raise StartError(f"--mps: {CONTROL} exited with {status}; its output is above")
        if time.monotonic() > deadline:
            raise StartError(f"--mps: {CONTROL} did not listen within {START_SECS:g} s")
        time.sleep(_POLL_SECS)


def _stop(daemon: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    """Let the daemon and its server quit; kill the daemon if it does not."""
    try:
        if daemon.poll() is None:
            subprocess.run([CONTROL], input=b"quit\n", env=environment, timeout=STOP_SECS, check=False)
        daemon.wait(STOP_SECS)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("%s did not quit within %g s, and is killed: %s", CONTROL, STOP_SECS, error)
        daemon.kill()
        daemon.wait()
