"""Starts real node and router processes through the command line, and talks to them over HTTP."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import httpx

from hisparse_pd.base.ports import free_port
from hisparse_pd.router.supervisor import Health, ProgressTimeout, probe
from tests import waiting
from tests.preloaded import NAME as PRELOADED
from tests.preloaded import ForkedService, Preloaded
from tests.stream_events import events_in
from tests.tls_files import TlsFiles

if TYPE_CHECKING:
    import openai

Item = TypeVar("Item")
Result = TypeVar("Result")

REQUEST_TIMEOUT_SECS = 200.0
REPO = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("HISPARSE_PD_TEST_DEVICE", "cpu")
"""Device of nodes whose own options name none; what nodes are compared with stays on the CPU."""
START_TIMEOUT_SECS = 90.0 if DEVICE == "cpu" else 240.0
"""Limit without progress of a node that loads, or compiles the kernels that it does not find."""
PROMPT = "Nodes come and go without a restart of the rest. " * 8
FORKED_MODULES = ("hisparse_pd", "tests.faults.node")
NO_FAULTS: Mapping[str, str] = MappingProxyType({})
FLAGS: tuple[bool | str, ...] = (True, False, "auto")
NODE_OPTIONS = ("--num-threads", "1", "--debug-checks", "--device", DEVICE, "--dtype", "float32")
wait_until = functools.partial(waiting.wait_until, poll_secs=0.05)
_RANK_LABEL = re.compile(r'(?<=[{,])dp_rank="\d+",?')


@dataclass
class Service:
    """One process of the product, and its log."""

    name: str
    arguments: list[str]
    port: int
    log_path: Path
    bootstrap_port: int = 0
    module: str = "hisparse_pd"
    health_path: str = "/health"
    env: dict[str, str] = field(default_factory=dict)
    tls: TlsFiles | None = None
    """Certificate of a service that serves https."""
    process: subprocess.Popen[bytes] | ForkedService | None = field(default=None, repr=False)

    preloaded: ClassVar[Preloaded | None] = None
    """Process from which services are forked; None: they are started by the command."""

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.env}
        with self.log_path.open("ab") as log:
            if self.preloaded is not None and self.module in FORKED_MODULES:
                self.process = self.preloaded.start(self.module, self.arguments, environment, log)
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments],
                stdout=log,
                stderr=log,
                cwd=REPO,
                env=environment,
                start_new_session=True,
            )

    def put_in(self, faults: Mapping[str, str]) -> None:
        """Put in faults from the next start on; without any, the service is the product unchanged."""
        self.module, self.env = ("tests.faults.node", dict(faults)) if faults else ("hisparse_pd", {})

    def is_healthy(self) -> bool:
        with self._client() as client:
            return self._health(client).is_healthy

    def wait_healthy(self) -> None:
        """Wait for as long as the service makes progress."""
        limit = ProgressTimeout(START_TIMEOUT_SECS)
        with self._client() as client:
            while not (health := self._health(client)).is_healthy:
                limit.note(self.name, health.loading)
                if limit.is_over:
                    raise TimeoutError(
                        f"{self.name} healthy: no progress for {START_TIMEOUT_SECS} s\n{self.log_tail()}"
                    )
                time.sleep(0.05)

    def _client(self) -> httpx.Client:
        verify = True if self.tls is None else self.tls.trusting()
        return httpx.Client(timeout=waiting.WAIT_SECS, verify=verify)

    def _health(self, client: httpx.Client) -> Health:
        if self.has_ended():
            raise RuntimeError(f"{self.name} exited with {self.exit_status()}\n{self.log_tail()}")
        return probe(client, self.url + self.health_path)

    def exit_status(self, timeout_secs: float = waiting.WAIT_SECS) -> int:
        """Wait for the end of a service that ends by itself or was told to; return its exit status."""
        assert self.process is not None
        return self.process.wait(timeout_secs)

    def has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def signal_group(self, signal_number: int) -> None:
        """Send a signal to the service's processes, front and engine."""
        os.killpg(self.pid, signal_number)

    def stop(self) -> int:
        """Send SIGTERM, as an operator would. Returns the exit status."""
        if self.process is None:
            return 0
        if (status := self.process.poll()) is None:
            self.process.terminate()
            try:
                status = self.process.wait(waiting.WAIT_SECS)
            except subprocess.TimeoutExpired:
                self.signal_group(signal.SIGKILL)
                self.process.wait()
                raise RuntimeError(
                    f"{self.name} did not stop within {waiting.WAIT_SECS} s\n{self.log_tail()}"
                ) from None
        return status

    def kill(self) -> None:
        """Send SIGKILL to front and engine at once, like a machine's death."""
        if self.process is not None and self.process.poll() is None:
            self.signal_group(signal.SIGKILL)
            self.process.wait()

    def log_tail(self, num_bytes: int = 6000) -> str:
        return self.log_path.read_bytes()[-num_bytes:].decode(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics, by name with labels, summed over the ranks of a node."""
        return samples_of(httpx.get(self.url + "/metrics", timeout=waiting.WAIT_SECS).text)


def samples_of(text: str) -> dict[str, float]:
    """Return the samples of Prometheus text by name with labels, summed over the ranks of a node."""
    samples: dict[str, float] = {}
    for match in re.finditer(r"^([^#\s]\S*(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE):
        name = _RANK_LABEL.sub("", match[1]).replace(",}", "}").removesuffix("{}")
        samples[name] = samples.get(name, 0.0) + float(match[2])
    return samples


def is_empty(node: Service) -> bool:
    """Whether nothing runs or waits, and no pool holds anything, prefix cache and quarantine included."""
    held = {"pool_used_tokens", "quarantined_tokens"}
    held |= {"num_running_reqs", "num_queue_reqs", "num_transfer_queue_reqs"}
    return not any(
        value for name, value in node.metrics().items() if name.split("{")[0].rpartition(":")[2] in held
    )


def is_idle(node: Service) -> bool:
    """Whether no request runs or waits."""
    samples = node.metrics()
    return samples["hisparse_pd:num_running_reqs"] == 0 and samples["hisparse_pd:num_queue_reqs"] == 0


def pool_usage(node: Service) -> float:
    """Return the tokens in use or in quarantine over all pools, without the prefix cache."""
    return sum(
        value
        for name, value in node.metrics().items()
        if name.startswith("hisparse_pd:pool_used_tokens") or name == "hisparse_pd:quarantined_tokens"
    )


def engine_pids(node: Service) -> list[int]:
    """Return the engines among the front's children, by rank; the other child is multiprocessing's own."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return sorted(pid for pid in commands if "spawn_main" in commands[pid] or PRELOADED in commands[pid])


def at_once(ask: Callable[[Item], Result], items: Iterable[Item], num_threads: int) -> list[Result]:
    """Return what ``ask`` returns for each item, ``num_threads`` at a time."""
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(ask, items))


def generate_body(**change: Any) -> dict[str, Any]:
    """Make a body for 16 greedy tokens after PROMPT. ``change``: other fields, and ``params`` of sampling."""
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **change.pop("params", {})}
    prompt = {} if "input_ids" in change else {"text": PROMPT}
    return {**prompt, "sampling_params": params, **change}


def generate(url: str, **change: Any) -> httpx.Response:
    """Return the answer to ``generate_body``."""
    return httpx.post(f"{url}/generate", json=generate_body(**change), timeout=REQUEST_TIMEOUT_SECS)


def generated(url: str, **change: Any) -> Any:
    """Return the body of the answer of ``generate``, which must be a 200."""
    answer = generate(url, **change)
    assert answer.status_code == 200, answer.text
    return answer.json()


def output_ids(url: str, **change: Any) -> list[int]:
    found: list[int] = generated(url, **change)["output_ids"]
    return found


def openai_client(url: str) -> openai.OpenAI:
    import openai  # late: every process of a test run imports this module

    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)


def streamed(url: str, body: Mapping[str, Any]) -> list[Any]:
    """Return the events of a streamed answer, decoded."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=REQUEST_TIMEOUT_SECS) as answer:
        assert answer.status_code == 200, answer.read()
        text = "".join(answer.iter_text())
    assert text.endswith("data: [DONE]\n\n")
    return events_in(text)


def generate_by(prefill: Service, decode: Service, room: int, **change: Any) -> httpx.Response:
    """Return the decode node's answer to a ``generate`` that names the prefill node, as a router's does."""
    room_fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
    return generate(decode.url, **room_fields, bootstrap_room=room, **change)


@dataclass
class Load:
    """Clients that send requests one after the other until told to stop, and keep every answer."""

    url: str
    num_clients: int
    max_new_tokens: int = 0
    """New tokens of each request; 0: from 8 to 24, in turn."""
    answers: list[httpx.Response] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _counter: Iterator[int] = field(default_factory=itertools.count)

    def _client(self) -> None:
        while not self._over.is_set():
            number = next(self._counter)
            text = f"{number} {PROMPT}" if number % 3 else PROMPT
            params = {"max_new_tokens": self.max_new_tokens or 8 + number % 17}
            answer = generate(self.url, text=text, hisparse=FLAGS[number % 3], params=params)
            self.answers.append(answer)
            if answer.status_code != 200:
                self._over.wait(0.1)  # refusals come at once, and would take a core from nodes that start

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._client) for _ in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, num_answers: int) -> None:
        """Wait until so many further requests came back with a 200."""
        target = self.num_ok + num_answers
        wait_until(lambda: self.num_ok >= target, f"{num_answers} further answers")

    @property
    def num_ok(self) -> int:
        return sum(answer.status_code == 200 for answer in list(self.answers))


@dataclass
class Deployment:
    """Prefill nodes, decode nodes and a router."""

    prefill: list[Service]
    decode: list[Service]
    router: Service

    @property
    def services(self) -> list[Service]:
        return [*self.prefill, *self.decode, self.router]

    @property
    def url(self) -> str:
        return self.router.url

    def num_rooms(self) -> int:
        """Return how many rooms prefill nodes have served. A decode node's front counts a room before its
        answer ends, while engines report their counters some time later."""
        served = 'hisparse_pd:request_phase_seconds_count{phase="transfer"}'
        return int(sum(node.metrics().get(served, 0) for node in self.decode))

    def flush_prefix_caches(self) -> None:
        """Drop what prefill nodes have cached and decode nodes hold."""
        for node in (*self.prefill, *self.decode):
            httpx.post(node.url + "/flush_cache", timeout=waiting.WAIT_SECS).raise_for_status()


def prefill_service(checkpoint: Path, log_dir: Path, name: str, options: Sequence[str] = ()) -> Service:
    port, bootstrap_port = free_port(), free_port()
    arguments = ["prefill", "--model-path", str(checkpoint), "--port", str(port)]
    arguments += ["--bootstrap-port", str(bootstrap_port), *NODE_OPTIONS, *options]
    return Service(name, arguments, port, log_dir / f"{name}.log", bootstrap_port)


def decode_service(checkpoint: Path, log_dir: Path, name: str, options: Sequence[str] = ()) -> Service:
    port = free_port()
    arguments = ["decode", "--model-path", str(checkpoint), "--port", str(port)]
    arguments += [*NODE_OPTIONS, *options]
    return Service(name, arguments, port, log_dir / f"{name}.log")


class HasUrl(Protocol):
    """A decode node, or what stands before one."""

    @property
    def url(self) -> str: ...


def router_service(
    prefill: Sequence[Service], decode: Sequence[HasUrl], log_dir: Path, options: Sequence[str] = ()
) -> Service:
    port = free_port()
    arguments = ["router", "--port", str(port), *options]
    for node in prefill:
        arguments += ["--prefill", node.url, str(node.bootstrap_port)]
    for behind in decode:
        arguments += ["--decode", behind.url]
    return Service("router", arguments, port, log_dir / "router.log")


@contextmanager
def running(services: Sequence[Service]) -> Iterator[None]:
    """Start the services, wait until all are healthy, and stop them in the end."""
    try:
        for service in services:
            service.start()
        for service in services:
            service.wait_healthy()
        yield
    finally:
        for service in reversed(services):
            service.kill()


@contextmanager
def deployment(
    checkpoint: Path,
    log_dir: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    prefill_faults: Mapping[str, str] = NO_FAULTS,
    decode_faults: Mapping[str, str] = NO_FAULTS,
) -> Iterator[Deployment]:
    """Run nodes and a router. ``prefill_faults``, ``decode_faults``: what ``tests.faults.node`` puts in."""
    prefill = [
        prefill_service(checkpoint, log_dir, f"prefill-{i}", prefill_options) for i in range(num_prefill)
    ]
    decode = [decode_service(checkpoint, log_dir, f"decode-{i}", decode_options) for i in range(num_decode)]
    for nodes, faults in ((prefill, prefill_faults), (decode, decode_faults)):
        for node in nodes:
            node.put_in(faults)
    router = router_service(prefill, decode, log_dir, router_options)
    with running([*prefill, *decode, router]):
        yield Deployment(prefill, decode, router)
