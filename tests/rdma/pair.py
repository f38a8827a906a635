"""A pair across the machines: prefill node and router in the first, the decode node in the second.

All three are started by the command line, as an operator would. Requests come from this machine.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.protocol.messages import ROW_CHECK_BYTES
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


def generate(
    url: str, token_ids: Sequence[int], num_new_tokens: int, hisparse: bool, **fields: object
) -> dict[str, Any]:
    """Return the greedy answer of the router or the decode node at ``url``. ``fields``: further ones of the
    body."""
    params = {"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True}
    body = {"input_ids": list(token_ids), "sampling_params": params, "hisparse": hisparse, **fields}
    answer = httpx.post(f"{url}/generate", json=body, timeout=REQUEST_TIMEOUT_SECS)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


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
        """Return ``metrics`` once a counter, of all ranks together, has reached ``value``."""
        return self.wait_metrics(lambda metrics: sum(by_rank(metrics, name).values()) >= value)

    def wait_metrics(self, is_reached: Callable[[Mapping[str, float]], bool]) -> dict[str, float]:
        """Return ``metrics`` once they are as wanted: engines report them twice a second."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_SECS
        while not is_reached(metrics := self.metrics()):
            if time.monotonic() > deadline:
                raise CommandError(f"{self.url}: after {REQUEST_TIMEOUT_SECS:g} s still {metrics}")
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
    router: Service
    """Started once the nodes are healthy, because its health checks would slow their start."""

    def generate(self, token_ids: Sequence[int], num_new_tokens: int, hisparse: bool) -> dict[str, Any]:
        """Return the greedy answer to one request through the router."""
        return generate(self.router.url, token_ids, num_new_tokens, hisparse)


def num_cached(answer: Mapping[str, Any], tier: str) -> int:
    """Return how many tokens of a prompt the prefill node had from a tier."""
    count = answer["meta_info"]["cached_tokens_details"][tier]
    assert isinstance(count, int)
    return count


def token_bytes() -> int:
    """Return the bytes of one token's KV, indexer keys and row checks in all layers, the draft layer too."""
    spec = load_spec(RETRIEVAL_MODEL, "float32")
    item_bytes = spec.item_bytes + ROW_CHECK_BYTES
    return spec.num_kv_layers * item_bytes + spec.num_index_groups * spec.index_item_bytes


def by_rank(metrics: Mapping[str, float], name: str) -> dict[int, float]:
    """Return a metric of each rank, its other labels together. A node of one rank has rank 0."""
    found: dict[int, float] = {}
    for labelled, value in metrics.items():
        if labelled.partition("{")[0] == f"hisparse_pd:{name}":
            label = re.search(r'dp_rank="(\d+)"', labelled)
            rank = int(label[1]) if label else 0
            found[rank] = found.get(rank, 0.0) + value
    return found


def start_node(machine: Machine, kind: str, *options: str) -> Command:
    """Start a node that advertises its address on the network between the machines; the caller closes it."""
    command = (sys.executable, "-m", "hisparse_pd", kind, *_NODE, *_SIZES[kind])
    return machine.start(*command, "--advertise-host", machine.address, *options)


@contextlib.contextmanager
def running_node(machine: Machine, kind: str, *options: str) -> Iterator[Service]:
    """A node that ends with the context, and may not be healthy yet."""
    command = start_node(machine, kind, *options)
    try:
        yield Service(command, machine.url(NODE_PORT))
    finally:
        command.close()


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
    with (
        running_node(first, "prefill", *options) as prefill,
        running_node(second, "decode", *options, *decode_options) as decode,
        contextlib.ExitStack() as ends,
    ):
        for node in (prefill, decode):
            node.wait_healthy()
        command = first.start(*router)
        ends.callback(command.close)
        pair = Pair(prefill, decode, Service(command, first.url(ROUTER_PORT)))
        pair.router.wait_healthy()
        yield pair
