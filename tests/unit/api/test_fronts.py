"""A node of one front or several in processes of their own, with engines that speak slowly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from hisparse_pd.base.ports import free_port
from tests.preloaded import NAME as PRELOADED
from tests.preloaded import ForkedService, Preloaded
from tests.unit.api.support import BODY
from tests.unit.api.tiny_tokenizer import write_checkpoint
from tests.waiting import NEVER_SECS, WAIT_SECS, wait_until

NUM_STREAMS = 8
STREAM = {**BODY, "max_tokens": 8, "stream": True}


@dataclass
class NodeProcess:
    process: ForkedService
    client: httpx.Client
    scratch: Path
    num_fronts: int

    def children(self) -> dict[int, str]:
        """Return the child processes in the order of their start: the engines, then the fronts."""
        pid = self.process.pid
        pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        forked = [pid for pid in pids if PRELOADED.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return {
            pid: "engine" if number < self.num_fronts else "front"
            for number, pid in enumerate(sorted(forked))
        }

    @contextlib.contextmanager
    def streams(self, num: int) -> Iterator[list[Iterator[str]]]:
        """Return the lines of streams, from the second event on."""
        with contextlib.ExitStack() as stack:
            answers = [
                stack.enter_context(self.client.stream("POST", "/v1/completions", json=STREAM))
                for _ in range(num)
            ]
            assert {answer.status_code for answer in answers} == {200}
            lines: list[Iterator[str]] = [filter(None, answer.iter_lines()) for answer in answers]
            assert all(next(of_one).startswith("data: ") for of_one in lines)
            yield lines

    @contextlib.contextmanager
    def streams_of_each_front(self, num: int) -> Iterator[list[Iterator[str]]]:
        """Return the lines of ``num`` streams at each of two fronts, which takes them while the other one is
        stopped."""
        (front,) = (pid for pid, kind in self.children().items() if kind == "front")
        with contextlib.ExitStack() as stack:
            lines: list[Iterator[str]] = []
            for other in (front, self.process.pid):
                os.kill(other, signal.SIGSTOP)
                try:
                    wait_until(lambda other=other: is_stopped(other), "the front is stopped")  # type: ignore[misc]
                    lines += stack.enter_context(self.streams(num))
                finally:
                    os.kill(other, signal.SIGCONT)
            yield lines

    def statuses(self, num: int) -> set[int]:
        """Return the statuses of so many answers as they begin."""
        found = set()
        for _ in range(num):
            with self.client.stream("POST", "/v1/completions", json=STREAM) as answer:
                found.add(answer.status_code)
        return found

    def until(self, path: str, says: str, *, no_more: bool = False) -> None:
        deadline = time.monotonic() + WAIT_SECS
        while time.monotonic() < deadline:
            assert self.process.poll() is None
            with contextlib.suppress(httpx.TransportError):
                if (says in self.client.get(path).text) is not no_more:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{path} does not say {says!r}")


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process have stopped."""
    states = [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


NodeFactory = Callable[..., contextlib.AbstractContextManager[NodeProcess]]


@pytest.fixture
def node(preloaded: Preloaded, tmp_path: Path) -> NodeFactory:
    """A context in which a node runs that has as many engines as fronts."""

    @contextlib.contextmanager
    def running(
        num_fronts: int = 2, drain_timeout_secs: float = NEVER_SECS, role: str = "decode"
    ) -> Iterator[NodeProcess]:
        model_path = write_checkpoint(tmp_path / "tiny")
        port = free_port()
        arguments = [role, *map(str, (model_path, port, num_fronts, drain_timeout_secs))]
        limits = httpx.Limits(max_keepalive_connections=0)
        with (
            tempfile.TemporaryDirectory() as scratch,  # short: an ipc socket's path may have 107 characters
            httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SECS, trust_env=False, limits=limits
            ) as client,
            (tmp_path / "node.log").open("wb") as log,
        ):
            environment = {**os.environ, "TMPDIR": scratch}
            process = preloaded.start("tests.unit.api.slow_node", arguments, environment, log)
            started = NodeProcess(process, client, Path(scratch), num_fronts)
            try:
                started.until("/health", '"ok"')
                yield started
            finally:
                process.kill()
                process.wait(WAIT_SECS)
            assert list(Path(scratch).iterdir()) == []

    return running


def error_of(line: str) -> str:
    return str(json.loads(line.removeprefix("data: "))["error"]["message"])


@pytest.mark.I7
def test_fronts_serve_as_one_until_sigterm_lets_them_finish(node: NodeFactory, tmp_path: Path) -> None:
    with node() as one:
        children = one.children()
        assert sorted(children.values()) == ["engine", "engine", "front"]
        for _ in range(8):
            assert one.client.post("/v1/completions", json={**BODY, "max_tokens": 1}).status_code == 200
        counted = 'num_requests_total{endpoint="/v1/completions",status="200"} 8.0'
        one.until("/metrics", counted)
        for _ in range(6):  # whichever front is asked
            metrics = one.client.get("/metrics").text
            assert counted in metrics
            assert "hisparse_pd:time_to_first_token_seconds_count 8.0" in metrics
            assert metrics.count('hisparse_pd:num_running_reqs{dp_rank="0"}') == 1
        for path in ("/server_info", "/get_load", "/v1/models"):
            assert len({one.client.get(path).text for _ in range(6)}) == 1
        with one.streams(NUM_STREAMS) as streams:
            assert one.client.post("/v1/completions", json={**BODY, "n": 3}).status_code == 429, (
                "of all fronts"
            )
            one.process.send_signal(signal.SIGTERM)
            one.until("/health", "shutting down")
            deadline = time.monotonic() + WAIT_SECS
            while one.statuses(6) != {
                503
            }:  # one that has not heard of it takes a request, whose client leaves
                assert time.monotonic() < deadline
            assert list(one.scratch.glob("hisparse-pd-*")) == [], "a kill leaves nothing behind"
            (tmp_path / "go_on").touch()
            ends = [list(lines)[-1] for lines in streams]
        assert set(ends) == {"data: [DONE]"}
        assert one.process.wait(WAIT_SECS) == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_front_alone_lets_them_finish_too(
    node: NodeFactory, tmp_path: Path, number: signal.Signals
) -> None:
    with node(num_fronts=1) as one:
        children = one.children()
        assert list(children.values()) == ["engine"]
        with one.streams(1) as streams:
            os.killpg(one.process.pid, number)  # as a terminal, or systemd, says it to all processes
            one.until("/health", "shutting down")
            (tmp_path / "go_on").touch()
            assert list(streams[0])[-1] == "data: [DONE]"
        assert one.process.wait(WAIT_SECS) == 0
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_a_prefill_node_that_leaves_finishes_the_rooms_in_hand(node: NodeFactory, tmp_path: Path) -> None:
    """The front knows of these rooms from the engine alone."""
    with node(num_fronts=1, role="prefill") as one:
        assert one.client.post("/v1/completions", json=BODY).status_code == 200
        one.until("/get_load", '"num_reqs":1')
        one.process.send_signal(signal.SIGTERM)
        one.until("/health", "shutting down")
        assert one.client.post("/v1/completions", json=BODY).status_code == 503
        for _ in range(10):  # the engine goes on, and so does the node
            (steps,) = re.findall(r"hisparse_pd:engine_steps_total \d.*", one.client.get("/metrics").text)
            one.until("/metrics", steps, no_more=True)
        (tmp_path / "go_on").touch()
        assert one.process.wait(WAIT_SECS) == 0


def test_what_does_not_finish_in_time_ends_with_an_error(node: NodeFactory, tmp_path: Path) -> None:
    with node(num_fronts=1, drain_timeout_secs=0.1) as one, one.streams(1) as streams:
        one.process.send_signal(signal.SIGTERM)
        assert "the node is shutting down" in error_of(list(streams[0])[-1])
        assert one.process.wait(WAIT_SECS) == 0


@pytest.mark.slow
def test_a_second_signal_ends_the_requests_of_all_fronts(node: NodeFactory, tmp_path: Path) -> None:
    with node() as one, one.streams(NUM_STREAMS) as streams:
        one.process.send_signal(signal.SIGTERM)
        one.until("/health", "shutting down")
        one.process.send_signal(signal.SIGTERM)
        ends = [error_of(list(lines)[-1]) for lines in streams]
        assert set(ends) == {"the node is shutting down; send the request again"}
        assert one.process.wait(WAIT_SECS) == 0


@pytest.mark.parametrize(
    ("victim", "num_fronts"),
    [("front", 2), ("engine", 1), pytest.param("engine", 2, marks=pytest.mark.slow)],
)
def test_the_death_of_a_child_ends_the_node(node: NodeFactory, victim: str, num_fronts: int) -> None:
    with node(num_fronts) as one:
        children = one.children()
        num_streams = 4 * num_fronts
        with one.streams_of_each_front(4) if num_fronts == 2 else one.streams(num_streams) as streams:
            os.kill(next(pid for pid, kind in children.items() if kind == victim), signal.SIGKILL)
            ends = []
            for lines in streams:
                try:
                    ends.append(error_of(list(lines)[-1]))
                except httpx.RemoteProtocolError:
                    ends.append("broken off")
        assert one.process.wait(WAIT_SECS) == 1
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        what = "a front process of the node has died" if victim == "front" else "the engine has died"
        num_lost = ends.count("broken off")
        assert num_lost == (4 if victim == "front" else 0), "those of the front that died, and no others"
        assert ends.count(f"{what}; the request is lost, send it again") == num_streams - num_lost
