"""Runs in a machine: a connection is a command, its input, its output and its end.

``AGENT_KEY=KEY python agent.py PORT``. Both sides speak lines of JSON. The agent greets with
``{"ready": true}``, gets ``{"key": "...", "command": [...], "directory": "..."}``, and sends
``{"stdout": text}`` and ``{"stderr": text}`` as they come and ``{"status": number}`` last.
``{"stdin": text}`` and ``{"signal": number}`` reach the command meanwhile. When the connection ends, so do
the command and its children.

The key is needed because everybody on the host can connect, and commands run as root and read all that QEMU's
user can read.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

_KEY = os.environ.pop("AGENT_KEY", "")


class Command(socketserver.StreamRequestHandler):
    """One connection."""

    def setup(self) -> None:
        super().setup()
        self._sending = threading.Lock()

    def handle(self) -> None:
        self._send({"ready": True})
        line = self.rfile.readline()
        if not line:
            return
        request = json.loads(line)
        if not hmac.compare_digest(request["key"], _KEY):
            return
        try:
            process = subprocess.Popen(
                request["command"],
                cwd=request["directory"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._send({"stderr": f"{error}\n"})
            self._send({"status": 127})
            return
        threading.Thread(target=self._report, args=(process,), daemon=True).start()
        for line in self.rfile:
            self._pass_on(process, json.loads(line))
        _end_group(process)

    def _report(self, process: subprocess.Popen[bytes]) -> None:
        """Send everything that the command prints, then its status."""
        pumps = [
            threading.Thread(target=self._pump, args=(name, stream), daemon=True)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for pump in pumps:
            pump.start()
        status = process.wait()
        _end_group(process)  # children that are left would keep the pipes open
        for pump in pumps:
            pump.join()
        self._send({"status": status})

    def _pump(self, name: str, stream: IO[bytes]) -> None:
        for line in stream:
            self._send({name: line.decode(errors="replace")})

    def _pass_on(self, process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
        with suppress(OSError):  # the command may have ended
            if "signal" in message:
                os.kill(process.pid, message["signal"])
            else:
                assert process.stdin is not None
                process.stdin.write(message["stdin"].encode())
                process.stdin.flush()

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):  # nobody listens any more
            self.wfile.write(json.dumps(message).encode() + b"\n")


class Agent(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    assert _KEY, "no AGENT_KEY in the environment"
    with Agent(("0.0.0.0", int(sys.argv[1])), Command) as agent:
        agent.serve_forever()
