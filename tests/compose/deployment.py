"""One compose project: a copy of the tree with its own .env and keys, brought up, used, and taken down."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hisparse_pd.base.ports import free_port
from tests import waiting
from tests.checkout import copy_of_checkout
from tests.compose.engine import CommandFailed, Engine, run
from tests.compose.images import BUILD_TIMEOUT_SECS, base_image, collect_wheels

REPO = Path(__file__).resolve().parents[2]
HEALTHY_TIMEOUT_SECS = 240.0
REQUEST_TIMEOUT_SECS = 120.0
wait_until = functools.partial(waiting.wait_until, timeout_secs=HEALTHY_TIMEOUT_SECS, poll_secs=0.2)
BASE = ("docker-compose.yml", "compose.monitoring.yml")
UNHURRIED = {"DRAIN_TIMEOUT_SECS": "280", "STOP_GRACE_PERIOD": "300s"}
"""Limits under which requests in flight finish before a drain is over, however slow this machine is."""

_NOT_COPIED = ("docs", "tests")
PROMPT = "The key of room 41 is 7. " * 40
_COMPLETION = {"model": "retrieval", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}


def copy_tree(directory: Path) -> None:
    """Copy the files that a deployment needs, without keys, .env and results."""
    copy_of_checkout(directory, *(f":!{name}" for name in _NOT_COPIED))


@dataclass
class Deployment:
    """A running project."""

    engine: Engine
    tree: Path
    project: str
    router_port: int
    prometheus_port: int
    values: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = BASE
    _command: list[str] = field(default_factory=list)

    @property
    def deploy(self) -> Path:
        return self.tree / "deploy"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router_port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {(self.deploy / 'secrets/api.key').read_text().strip()}"}

    def configure(self, **changes: str) -> None:
        """Write .env: the example with our own values, to which these changes are added."""
        self.values |= changes
        lines = (self.deploy / ".env.example").read_text().splitlines()
        kept = [line for line in lines if line.split("=", 1)[0] not in self.values]
        ours = [f"{name}={value}" for name, value in self.values.items()]
        (self.deploy / ".env").write_text("\n".join([*kept, *ours]) + "\n")

    # --- compose ---------------------------------------------------------------------------------------

    def compose(self, *arguments: str, timeout_secs: float = 300.0) -> str:
        self._command = self._command or self.engine.compose_command()
        files = [word for name in self.files for word in ("-f", name)]
        command = [*self._command, "-p", self.project, *files, *arguments]
        return run(command, self.engine.environment, timeout_secs, self.deploy)

    def up(self, *services: str) -> None:
        """Start services, and wait until all are healthy."""
        self.compose("up", "-d", *services, timeout_secs=BUILD_TIMEOUT_SECS)
        self.wait_healthy(*(name for name in services if name != "prometheus"))

    def container(self, service: str) -> str:
        """Return the id of a service's container, whatever state it is in."""
        labels = {
            "project": self.project,
            "service": service,
            "oneoff": "False",
        }  # not those of `compose run`
        filters = [
            word
            for name, value in labels.items()
            for word in ("--filter", f"label=com.docker.compose.{name}={value}")
        ]
        identifier = self.engine.docker("ps", "-aq", *filters).strip()
        assert len(identifier.split()) == 1, f"{service}: {identifier!r}"
        return identifier

    def inspect(self, service: str) -> dict[str, Any]:
        (description,) = json.loads(self.engine.docker("inspect", self.container(service)))
        assert isinstance(description, dict)
        return description

    def state(self, service: str) -> dict[str, Any]:
        state = self.inspect(service)["State"]
        assert isinstance(state, dict)
        return state

    def wait_healthy(self, *services: str) -> None:
        for service in services:
            try:
                wait_until(
                    lambda name=service: self.state(name).get("Health", {}).get("Status") == "healthy",  # type: ignore[misc]
                    f"{service} is healthy",
                )
            except TimeoutError as error:
                raise TimeoutError(f"{error}\n{self.logs(service)}") from error

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--tail", "60", service)

    def crash(self, service: str) -> None:
        """Kill all processes of a service at once, as a machine's death would; Docker starts it again."""
        with contextlib.suppress(CommandFailed):  # the shell that kills goes down with its container
            self.engine.docker("exec", self.container(service), "sh", "-c", "kill -KILL -1")

    def down(self) -> None:
        """Take the project down. Raises AssertionError when something of it is left."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")
        label = ["--filter", f"label=com.docker.compose.project={self.project}"]
        for listing in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q")):
            left = self.engine.docker(*listing, *label)
            assert left == "", f"`docker {' '.join(listing)}` still shows {left.split()}"

    # --- requests --------------------------------------------------------------------------------------

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(
            self.url + path,
            json=body,
            trust_env=False,
            **{"timeout": REQUEST_TIMEOUT_SECS, "headers": self.headers, **options},
        )

    def complete(self, max_tokens: int = 16, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {**_COMPLETION, "max_tokens": max_tokens, **fields})

    @contextlib.contextmanager
    def stream(self, max_tokens: int) -> Iterator[Iterator[str]]:
        """Yield the data of the events of a completion, as they come."""
        with httpx.stream(
            "POST",
            f"{self.url}/v1/completions",
            json={**_COMPLETION, "max_tokens": max_tokens, "stream": True},
            headers=self.headers,
            timeout=REQUEST_TIMEOUT_SECS,
            trust_env=False,
        ) as answer:
            answer.raise_for_status()
            yield (line.removeprefix("data: ") for line in answer.iter_lines() if line)

    def ask_prometheus(self, path: str, **parameters: str) -> dict[str, Any]:
        """Return what Prometheus's API answers. Raises httpx.HTTPError."""
        url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}"
        answer = httpx.get(url, params=parameters, timeout=REQUEST_TIMEOUT_SECS, trust_env=False)
        data = answer.raise_for_status().json()["data"]
        assert isinstance(data, dict)
        return data

    def targets(self) -> dict[str, str]:
        """Return the health of Prometheus's targets by instance; none while it starts."""
        try:
            targets = self.ask_prometheus("targets")["activeTargets"]
        except httpx.TransportError:
            return {}
        return {target["labels"]["instance"]: target["health"] for target in targets}

    def is_serving(self) -> bool:
        try:
            return self.complete(1).is_success
        except httpx.TransportError:
            return False


class Load:
    """Clients that ask for the same completion over and over, in both modes, and count the answers."""

    def __init__(self, deployment: Deployment, num_clients: int = 3) -> None:
        self._deployment = deployment
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.texts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(bool(i % 2),)) for i in range(num_clients)]

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    @property
    def num_answered(self) -> int:
        with self._lock:
            return self.texts.total()

    def wait_answered(self, count: int) -> None:
        """Wait until ``count`` more requests are answered."""
        target = self.num_answered + count
        wait_until(lambda: self.num_answered >= target, f"{count} answers")

    def _ask(self, hisparse: bool) -> None:
        while not self._stop.is_set():
            try:
                answer = self._deployment.complete(hisparse=hisparse)
            except httpx.TransportError as error:
                outcome, texts = type(error).__name__, self.errors
            else:
                texts = self.texts if answer.is_success else self.errors
                body = answer.json()
                outcome = (
                    body["choices"][0]["text"]
                    if answer.is_success
                    else f"{answer.status_code} {body['error']}"
                )
            with self._lock:
                texts[outcome] += 1
            self._stop.wait(0.05)


@contextlib.contextmanager
def deployed(engine: Engine, directory: Path, project: str) -> Iterator[Deployment]:
    """Build the images, bring the project up, and take it down in the end."""
    tree = directory / "tree"
    copy_tree(tree)
    base = base_image(engine, directory, f"{project}-base:latest")
    has_wheels = collect_wheels(REPO, tree / "deploy/wheels")
    deployment = Deployment(engine, tree, project, free_port(), free_port())
    prometheus_image = f"{project}-prometheus:latest"
    deployment.configure(
        BASE_IMAGE=base,
        IMAGE=project,
        PIP_NO_INDEX="1" if has_wheels else "",
        ROUTER_PORT=f"127.0.0.1:{deployment.router_port}",
        PROMETHEUS_PORT=f"127.0.0.1:{deployment.prometheus_port}",
        PROMETHEUS_IMAGE=prometheus_image,
        DEVICE_BUFFER_SIZE=str(2 * _index_topk(tree / "tools/checkpoints/retrieval")),
        DECODE_ARGS="--speculative-num-steps 3",  # the dashboard has queries of drafts, too
        NUM_THREADS="1",
        **UNHURRIED,
    )
    try:
        # On a machine with nothing but Docker, setup.sh builds the image to make the keys.
        run(["sh", "setup.sh"], engine.environment, BUILD_TIMEOUT_SECS, deployment.deploy)
        deployment.compose("build", "prefill", timeout_secs=BUILD_TIMEOUT_SECS)
        if not _may_filter_sockets(engine, f"{project}:cpu"):
            deployment.configure(NODE_GUARD="")
        engine.docker(
            *("build", "-q", "-f", str(deployment.deploy / "prometheus.Dockerfile"), "-t", prometheus_image),
            *("--build-arg", f"BASE_IMAGE={base}", str(deployment.deploy / "targets")),
            timeout_secs=BUILD_TIMEOUT_SECS,
        )
        deployment.up("prefill", "decode", "router", "prometheus")
        yield deployment
    finally:
        deployment.files = BASE
        deployment.down()
        if not engine.is_own:
            _remove_images(engine, project)


def _index_topk(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["index_topk"])


_ATTACH_A_FILTER = """
import ctypes, socket, struct
program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFFFFFF))
with socket.create_server(("127.0.0.1", 0)) as server:
    server.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(program)))
"""


def _may_filter_sockets(engine: Engine, image: str) -> bool:
    """Whether this kernel lets an unprivileged container close its own ports to foreign addresses."""
    try:
        engine.docker(
            "run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", _ATTACH_A_FILTER
        )
    except CommandFailed as error:
        if "Operation not permitted" not in str(error):
            raise
        return False
    return True


def _remove_images(engine: Engine, project: str) -> None:
    names = engine.docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    ours = [name for name in names if name.startswith((f"{project}:", f"{project}-"))]
    if ours:
        engine.docker("rmi", "-f", *ours)
