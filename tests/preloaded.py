"""Services as forks of a process that has imported torch, which spares them the seconds of the import.

``Preloaded`` is the tests' side. ``python -m tests.preloaded FD`` is the process, which has
imported what services import, and to which all processes of a test run connect. Each service is a fork of it
that goes on as ``python -m MODULE ARGUMENTS`` would, with a session, output and environment of its own. What
a service starts by ``multiprocessing``, its engines and further fronts, is forked as well, and gets what a
spawned child would get: the pickled process, no other descriptor, and no signal handler.

pytest-xdist's processes are forks, too (``tests/forked_worker.py``): each goes on as ``python -c CODE``
would.

Forks share what would differ between two interpreters, such as the seed of hashes. Therefore
``test_failures`` starts a decode node by the command, and ``test_wheel`` all services.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import popen_spawn_posix, reduction, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

NAME = "tests.preloaded"
REPO = Path(__file__).parents[1]
MODULES = (
    *(
        "hisparse_pd.commands.cli",
        "hisparse_pd.prefill_node.server",
        "hisparse_pd.decode_node.server",
        "hisparse_pd.router.process",
    ),
    *(
        "hisparse_pd.prefill_node.engine",
        "hisparse_pd.decode_node.engine",
        "transformers.models.auto.modeling_auto",
    ),
    *("transformers.modeling_utils", "transformers.generation.utils", "llguidance"),
    "transformers.models.deepseek_v32.modeling_deepseek_v32",  # of most tests' checkpoints
    "openai",  # of tests alone
)
MAX_ORDER_BYTES = 1 << 17
CONNECT_TIMEOUT_SECS = 60.0
"""Time after which a process without a connection ends."""


class ForkedService:
    """The part of ``subprocess.Popen`` that tests use, for a fork of the preloaded process."""

    def __init__(self, pid: int, exit_status: BinaryIO) -> None:
        """``exit_status``: a pipe that brings the exit status as a line once the service has ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._exit_status = exit_status

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._exit_status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(NAME, timeout or 0.0)
            with self._exit_status:
                self.returncode = int(self._exit_status.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """A connection to the process that is forked; the first service makes it, and starts that if need be.

    The process ends when the last connection is closed.
    """

    def __init__(self, directory: Path) -> None:
        """``directory`` must exist; all connections with the same one share the process."""
        self._directory = directory
        self._socket: socket.socket | None = None

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: BinaryIO
    ) -> ForkedService:
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        return self._order(order, [log.fileno()])

    def run_code(self, code: str, environment: Mapping[str, str]) -> ForkedService:
        """Start a fork that runs ``code`` with this process's input, output, errors and session."""
        return self._order({"code": code, "environment": dict(environment)}, [0, 1, 2])

    def _order(self, order: Mapping[str, Any], streams: list[int]) -> ForkedService:
        if self._socket is None:
            with open(self._directory / "preloaded.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._socket = self._connected() or self._started()
        reader, writer = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], [writer, *streams])
        finally:
            os.close(writer)
        told = open(reader, "rb")  # noqa: SIM115, the service closes it
        if not (pid := told.readline()):
            told.close()
            raise RuntimeError("the preloaded process has ended; its output says why")
        return ForkedService(int(pid), told)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    @property
    def _address(self) -> str:
        """An address in Linux's abstract namespace, where a name goes with its process."""
        return f"\0{self._directory}"

    def _connected(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(ConnectionError):
            connection.connect(self._address)
            if connection.recv(1):  # one that is about to end sends nothing
                return connection
        connection.close()
        return None

    def _started(self) -> socket.socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._address)
            listener.listen()
            command = [sys.executable, "-m", NAME, str(listener.fileno())]
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # not that of a process whose end is seen from the end of its output
                pass_fds=[listener.fileno()],
                cwd=REPO,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                check=True,
            )
        if (connection := self._connected()) is None:
            raise RuntimeError("the preloaded process has ended; its output says why")
        return connection


# --- the process ---------------------------------------------------------------------------------------


def main() -> None:
    """Fork a process for each order, until no connection is left."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a fork has none of the threads that an import started"
    gc.freeze()
    gc.enable()
    if os.fork() != 0:
        return  # the process that started this one waits no longer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of services
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the tests, too, which end first
    tests: list[socket.socket] = []
    while True:
        readable, _, _ = select.select([listener, *tests], [], [], CONNECT_TIMEOUT_SECS)
        for each in readable:
            if each is listener:
                tests.append(listener.accept()[0])
                tests[-1].send(b"\n")
                continue
            order, descriptors, *_ = socket.recv_fds(each, MAX_ORDER_BYTES, 4)
            if not order:
                tests.remove(each)
                each.close()
            elif os.fork() == 0:
                for ours in (listener, *tests):
                    ours.close()
                fork(json.loads(order), *descriptors)
                return
            else:
                close_all(*descriptors)
        if not tests:
            return


def fork(order: dict[str, Any], told: int, *streams: int) -> None:
    """Fork what is ordered; report its pid and, at its end, its exit status. Returns in the fork alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid != 0:
        close_all(*streams)
        _, status = os.waitpid(pid, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "module" in order:
        os.setsid()
    os.write(told, f"{os.getpid()}\n".encode())  # from here on the group of a service can be killed
    os.close(told)
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # as the environment has it
    if "module" in order:
        serve(order["module"], order["arguments"], *streams)
    else:
        run_code(order["code"], streams)


def serve(module: str, arguments: list[str], log: int) -> None:
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup pytest's processes, which are forks, ignore it
    spawning: Any = popen_spawn_posix.Popen
    spawning._launch = fork_instead_of_spawning
    sys.argv = [NAME, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_code(code: str, streams: Sequence[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    close_all(*streams)
    # pytest wants to rewrite the asserts of plugins, and this one is imported already.
    sys.modules["anyio"].__doc__ = "PYTEST_DONT_REWRITE"
    sys.argv = ["-c"]
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    exec(code, vars(main_module))


def fork_instead_of_spawning(popen: Any, process: BaseProcess) -> None:
    """Stands in for the method of ``Popen`` that starts an interpreter for a ``multiprocessing`` process."""
    pickled = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(process, pickled)
    finally:
        set_spawning_popen(None)
    sentinel, end_of_child = os.pipe()  # each is readable when the process at the other end has ended
    sentinel_of_parent, end_of_parent = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    popen.pid = os.fork()
    if popen.pid == 0:
        run_child(pickled.getvalue(), sentinel_of_parent, {*popen._fds, end_of_child, sentinel_of_parent})
    os.close(end_of_child)
    os.close(sentinel_of_parent)
    popen.sentinel = sentinel
    popen.finalizer = util.Finalize(popen, close_all, (sentinel, end_of_parent))


def close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def run_child(pickled: bytes, sentinel_of_parent: int, descriptors: set[int]) -> None:
    status = 1
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in descriptors:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(int(name))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main_module = sys.modules["__main__"].__spec__
        if main_module is not None and not main_module.name.endswith(".__main__"):
            runpy.run_module(main_module.name, run_name="__mp_main__", alter_sys=True)
        status = pickle.loads(pickled)._bootstrap(parent_sentinel=sentinel_of_parent)
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
