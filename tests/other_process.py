"""A test module in a process of its own that answers lines, for tests of memory and of deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Self


class OtherProcess:
    """The process of ``python -m module *args``, run by the command ``wrapper``. It is killed in the end."""

    def __init__(self, module: str, *args: object, wrapper: Sequence[str] = ()) -> None:
        command = [*wrapper, sys.executable, "-m", module, *map(str, args)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        """Send ``line``; return the line that answers it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.read_line()

    def pause(self) -> None:
        """Stop the process. Returns when all its threads have stopped, which is after the signal was sent."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send the signal, without waiting for the end."""
        self.process.kill()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
