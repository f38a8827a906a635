"""The tests' end of a command that ``agent.py`` runs in a machine."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

TIMEOUT_SECS = 600.0
"""Long, because a host without KVM interprets every instruction."""
_GREETING_TIMEOUT_SECS = 5.0


class CommandError(Exception):
    """A command did not do in time what a test waited for; the message has its output."""


class Command:
    """One command. ``close`` ends it and its children, and is safe to call twice."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self._name = name
        self._connection = connection
        self._changed = threading.Condition()
        self._num_lines_read = 0
        self._is_over = False
        self.stdout = ""
        self.stderr = ""
        self.status: int | None = None
        """Exit status as of subprocess (negative: a signal); None before the end, or if the link broke."""
        self._thread = threading.Thread(target=self._receive, name=f"output of {name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._is_over

    def read_line(self) -> str:
        """Return the next line of the standard output. Raises CommandError when there is none in time."""
        self._wait(lambda: self.stdout.count("\n") > self._num_lines_read, "a line of output")
        self._num_lines_read += 1
        return self.stdout.splitlines()[self._num_lines_read - 1]

    def write_line(self, line: str) -> None:
        """Write a line to the command's standard input."""
        self._send({"stdin": f"{line}\n"})

    def signal(self, number: int) -> None:
        """Send a signal to the command's first process."""
        self._send({"signal": number})

    def wait(self) -> int:
        """Return the exit status. Raises CommandError when there is none in time."""
        self._wait(lambda: self.status is not None, "its end")
        assert self.status is not None
        return self.status

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: condition() or self._is_over, TIMEOUT_SECS)
            if condition():
                return
            why = f"it ended with status {self.status}" if in_time else f"not within {TIMEOUT_SECS:g} s"
            output = f"{self.stdout[-3000:]}\n{self.stderr[-6000:]}"
        raise CommandError(f"{self._name}: waited for {what}: {why}\n{output}")

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    self.stdout += message.get("stdout", "")
                    self.stderr += message.get("stderr", "")
                    self.status = message.get("status")
                    self._changed.notify_all()
                if self.status is not None:
                    break
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _send(self, message: Mapping[str, object]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def start_command(port: int, key: str, name: str, command: list[str], directory: Path) -> Command:
    """Run ``command`` by the agent behind ``port`` of this machine. Raises OSError when no agent answers."""
    connection = socket.create_connection(("127.0.0.1", port), _GREETING_TIMEOUT_SECS)
    try:
        # QEMU takes a connection before the machine does, and drops it when nothing listens there.
        greeting = b""
        while not greeting.endswith(b"\n"):
            received = connection.recv(64)
            if not received:
                raise ConnectionRefusedError("no agent answers")
            greeting += received
        connection.settimeout(None)
        request = {"key": key, "command": command, "directory": str(directory)}
        connection.sendall(json.dumps(request).encode() + b"\n")
    except BaseException:
        connection.close()
        raise
    return Command(name, connection)
