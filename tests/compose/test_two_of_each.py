"""Two nodes of each kind in containers: all of them serve, one dies, and each is replaced in its turn."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.compose.deployment import BASE, PROMPT, Deployment, wait_until
from tests.integration.harness import samples_of
from tests.stream_events import said_in

pytestmark = [pytest.mark.compose, pytest.mark.timeout(7200)]

NODES = ("prefill", "decode", "prefill-2", "decode-2")


@pytest.fixture(scope="module")
def scaled(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment with two nodes of each kind behind its router."""
    deployment.files = (*BASE, "compose.scale.yml")
    deployment.configure(PROMETHEUS_TARGETS="./targets")
    deployment.up(*NODES, "router", "prometheus")
    yield deployment
    deployment.configure(PROMETHEUS_TARGETS="./monitoring/targets")
    deployment.files = BASE
    deployment.compose("up", "-d", "--remove-orphans", "prefill", "decode", "router", "prometheus")
    deployment.wait_healthy("prefill", "decode", "router")


def test_a_node_that_dies_is_used_again_once_it_is_back(scaled: Deployment) -> None:
    used: set[str] = set()
    numbers = itertools.count()

    def all_are_used() -> bool:
        # Each prompt is another, because those that begin alike stay with one prefill node.
        answer = scaled.complete(4, prompt=f"Request {next(numbers)}.", hisparse=True)
        assert answer.status_code == 200, answer.text
        used.update(answer.headers[f"x-hisparse-pd-{kind}"] for kind in ("prefill", "decode"))
        return len(used) == len(NODES)

    wait_until(all_are_used, "every node has had a request")
    expected = {**dict.fromkeys((f"{node}:30000" for node in NODES), "up"), "router:8000": "up"}
    wait_until(lambda: scaled.targets() == expected, "all targets are up")
    num_restarts = scaled.inspect("decode-2")["RestartCount"]
    scaled.crash("decode-2")
    answers = [scaled.complete(4) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    wait_until(
        lambda: scaled.inspect("decode-2")["RestartCount"] > num_restarts, "Docker starts decode-2 again"
    )
    scaled.wait_healthy("decode-2")
    used.clear()
    wait_until(all_are_used, "every node has had a request again")


STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": PROMPT, "temperature": 0, "hisparse": True}),
    ("/v1/completions", {"prompt": PROMPT[7:], "temperature": 0.9, "seed": 3, "hisparse": False}),
    ("/v1/completions", {"prompt": PROMPT[11:], "temperature": 0.8, "seed": 4, "frequency_penalty": 0.5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "seed": 5, "n": 2}),
)


class Streams:
    """Clients that each ask for a stream of their own over and over, and compare its answers."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._expected = [self._said(stream) for stream in range(len(STREAMS))]
        self._is_over = threading.Event()
        self.num_right = [0] * len(STREAMS)
        self.errors: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(stream,)) for stream in range(len(STREAMS))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def wait_for_one_of_each(self) -> None:
        before = list(self.num_right)
        wait_until(
            lambda: self.errors or all(now > then for now, then in zip(self.num_right, before, strict=True)),
            "a further answer to each client",
        )

    def _said(self, stream: int) -> Any:
        """Ask for a stream; return its answer. Raises httpx.TransportError, AssertionError."""
        path, body = STREAMS[stream]
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": "retrieval", "max_tokens": 240, "ignore_eos": True, **body, **usage}
        answer = self._deployment.post(path, body)
        assert answer.status_code == 200, answer.text
        return said_in(path, answer.text)

    def _ask(self, stream: int) -> None:
        while not self._is_over.is_set():
            try:
                assert self._said(stream) == self._expected[stream], "another answer"
            except (httpx.TransportError, AssertionError) as error:
                self.errors[f"{STREAMS[stream][0]}: {type(error).__name__}: {error}"] += 1
            else:
                self.num_right[stream] += 1


def test_every_node_is_replaced_while_streams_go_on(scaled: Deployment) -> None:
    """No client sees an error, and every stream says what it would have said."""

    def of_router(path: str) -> httpx.Response:
        return httpx.get(scaled.url + path, timeout=30, trust_env=False)

    def told_of(name: str) -> dict[str, Any]:
        """Return what the router knows of a node."""
        networks = scaled.inspect(name)["NetworkSettings"]["Networks"].values()
        addresses = [network["IPAMConfig"]["IPv4Address"] for network in networks]
        nodes: list[dict[str, Any]] = of_router("/health").json()["nodes"]
        (told,) = [node for node in nodes if any(f"//{address}:" in node["url"] for address in addresses)]
        return told

    def num_moved() -> float:
        return samples_of(of_router("/metrics").text)['hisparse_pd:router_resumes_total{reason="moved"}']

    streams = Streams(scaled)
    with streams.running():
        for name in NODES:
            if name.startswith("decode"):
                wait_until(lambda name=name: told_of(name)["in_flight"], f"streams at {name}")  # type: ignore[misc]
            before = num_moved()
            scaled.compose("stop", name)
            assert scaled.state(name)["ExitCode"] == 0
            assert num_moved() > before or name.startswith("prefill")
            scaled.compose("start", name)
            scaled.wait_healthy(name)
            wait_until(lambda name=name: told_of(name)["healthy"], f"the router uses {name} again")  # type: ignore[misc]
            streams.wait_for_one_of_each()
    assert streams.errors == {}
