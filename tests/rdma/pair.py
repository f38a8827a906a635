"""A pair across the machines: prefill node and router in the first, the decode node in the second.

All three are started by the command line, as an operator would. Requests come from this machine.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.rdma.command import Command, CommandError
from tests.rdma.machines import NODE_PORT, ROUTER_PORT, Machine
from tools.bench.documents import RETRIEVAL_MODEL

BOOTSTRAP_PORT = 8998
START_TIMEOUT_SECS = 2400.0
REQUEST_TIMEOUT_SECS = 600.0
"""Long, as are the nodes' own limits: without KVM a machine takes minutes for the work of seconds."""

_POLL_SECS = 2.0
"""Interval of questions; without KVM each answer takes much of the time that the start needs."""

HOT_BUFFER = 192
_PATIENT = (
    *("--heartbeat-interval-secs", "60"),
    *("--room-timeout-secs", "600"),
)
_NODE = (
    *("--model-path", str(RETRIEVAL_MODEL), "--dtype", "float32", "--num-threads", "1", "--debug-checks"),
    *("--host", "0.0.0.0", "--port", str(NODE_PORT), *_PATIENT),
)
_SIZES = {
    "prefill": (
        *("--bootstrap-port", str(BOOTSTRAP_PORT), "--chunked-prefill-size", "256"),
        *("--kv-pool-tokens", "4096"),
    ),
    "decode": (
        *("--device-buffer-size", str(HOT_BUFFER), "--host-pool-tokens", "4096"),
        # A prefill node computes the model's draft layer, and reads only from a node that has its KV.
        *("--device-pool-tokens", "4096", "--speculative-num-steps", "1"),
    ),
}


@dataclass
class Service:
    """A node or the router. ``url``: where this machine reaches it."""

    command: Command
    url: str

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECS
        while not self._is_healthy():
            if not self.command.is_running or time.monotonic() > deadline:
                raise CommandError(
                    f"{self.url}: not healthy, status {self.command.status}\n{self.command.stderr[-6000:]}"
                )
            time.sleep(_POLL_SECS)

    def server_info(self) -> dict[str, Any]:
        info = httpx.get(f"{self.url}/get_server_info", timeout=60).json()
        assert isinstance(info, dict)
        return info

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics, by name with labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        samples = re.finditer(r"^([^#\s{]+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        return {match[1]: float(match[2]) for match in samples}

    def wait_counted(self, name: str, value: float) -> dict[str, float]:
        """Return ``metrics`` once a counter has reached ``value``: engines report counters twice a second."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_SECS
        while (metrics := self.metrics())[f"hisparse_pd:{name}"] < value:
            if time.monotonic() > deadline:
                raise CommandError(f"{self.url}: {name} is {metrics[f'hisparse_pd:{name}']}, not {value}")
            time.sleep(_POLL_SECS)
        return metrics

    def flush(self) -> None:
        """Drop the prefixes that no request uses."""
        httpx.post(f"{self.url}/flush_cache", timeout=60).raise_for_status()

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=60).is_success
        except httpx.TransportError:
            return False


@dataclass
class Pair:
    prefill: Service
    decode: Service
    router: Service | None = None
    """Started once the nodes are healthy, because its health checks would slow their start."""

    def generate(self, token_ids: Sequence[int], num_new_tokens: int, hisparse: bool) -> dict[str, Any]:
        """Return the greedy answer to one request through the router."""
        assert self.router is not None
        answer = httpx.post(
            f"{self.router.url}/generate",
            json={
                "input_ids": list(token_ids),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": num_new_tokens,
                    "ignore_eos": True,
                },
                "hisparse": hisparse,
            },
            timeout=REQUEST_TIMEOUT_SECS,
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert isinstance(body, dict)
        return body


def start_node(machine: Machine, kind: str, *options: str) -> Command:
    """Start a node that advertises its address on the network between the machines; the caller closes it."""
    command = (sys.executable, "-m", "hisparse_pd", kind, *_NODE, *_SIZES[kind])
    return machine.start(*command, "--advertise-host", machine.address, *options)


@contextlib.contextmanager
def running_pair(
    machines: tuple[Machine, Machine], *options: str, decode_options: Sequence[str] = ()
) -> Iterator[Pair]:
    """A healthy pair with its router. ``options``: further options of both nodes."""
    first, second = machines
    router = (
        *(sys.executable, "-m", "hisparse_pd", "router", "--host", "0.0.0.0", "--port", str(ROUTER_PORT)),
        *("--prefill", f"http://{first.address}:{NODE_PORT}", str(BOOTSTRAP_PORT)),
        *("--decode", f"http://{second.address}:{NODE_PORT}"),
    )
    with contextlib.ExitStack() as ends:

        def started(machine: Machine, command: Command, port: int) -> Service:
            ends.callback(command.close)
            return Service(command, machine.url(port))

        pair = Pair(
            prefill=started(first, start_node(first, "prefill", *options), NODE_PORT),
            decode=started(second, start_node(second, "decode", *options, *decode_options), NODE_PORT),
        )
        for node in (pair.prefill, pair.decode):
            node.wait_healthy()
        pair.router = started(first, first.start(*router), ROUTER_PORT)
        pair.router.wait_healthy()
        yield pair
