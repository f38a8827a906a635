"""Clients that are programs, run to their end in a directory of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TIMEOUT_SECS = 240.0


def run(directory: Path, *command: str, **environment: str) -> str:
    """Run a program; return its output. Raises AssertionError with the output if it fails."""
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECS,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout
