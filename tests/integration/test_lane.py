"""Two prefill nodes and one decode node of one machine: one lane is shared memory, the other TCP.

Invariant I5: a request's tokens do not depend on the lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.harness import Deployment, Service, prefill_service, running

LENGTHS = (1, 2, 63, 64, 65, 200, 700)
FLAGS: tuple[bool | str, ...] = (True, False, "auto")
NUM_NEW_TOKENS = 12
SAME = "both see the same memory"


@pytest.fixture(scope="module")
def over_tcp(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A second prefill node for the decode node of ``pair``, without shared memory."""
    options = ["--served-model-name", "tiny", "--same-host-lane", "off"]
    node = prefill_service(tiny_checkpoint("v32"), tmp_path_factory.mktemp("lane"), "tcp", options)
    with running([node]):
        yield node


def ask(prefill: Service, decode: Service, room: int, prompt: list[int], hisparse: bool | str) -> list[int]:
    """Both legs, as a router sends them."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
        "hisparse": hisparse,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": room,
    }
    with ThreadPoolExecutor(2) as threads:
        legs = [
            threads.submit(httpx.post, f"{node.url}/generate", json=body, timeout=60)
            for node in (prefill, decode)
        ]
        answers = [leg.result() for leg in legs]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    tokens = answers[1].json()["output_ids"]
    assert isinstance(tokens, list)
    return tokens


def lanes_of(node: Service) -> dict[str, str]:
    """Lane by peer, as ``/server_info`` has it."""
    info: dict[str, Any] = httpx.get(f"{node.url}/server_info", timeout=10).json()
    return {lane["peer"]: f"{lane['lane']}: {lane['reason']}" for lane in info["lanes"]}


@pytest.mark.I5
def test_tokens_are_the_same_over_shared_memory_and_tcp_in_every_mode(
    pair: Deployment, over_tcp: Service
) -> None:
    (shm,), (decode,) = pair.prefill, pair.decode
    ways = list(itertools.product(FLAGS, (shm, over_tcp)))

    def ask_each_way(number: int) -> list[list[int]]:
        length, first_room = LENGTHS[number], 7_000_000 + number * len(ways)
        prompt = [32 + (7 * position * position + length) % 90 for position in range(length)]
        return [
            ask(prefill, decode, room, prompt, flag)
            for room, (flag, prefill) in enumerate(ways, start=first_room)
        ]

    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        for length, answers in zip(LENGTHS, threads.map(ask_each_way, range(len(LENGTHS))), strict=True):
            assert all(answer == answers[0] for answer in answers), (length, answers)
    by_peer = lanes_of(decode)
    assert by_peer[f"127.0.0.1:{shm.bootstrap_port}"] == f"shm: {SAME}"
    assert by_peer[f"127.0.0.1:{over_tcp.bootstrap_port}"] == "tcp: --same-host-lane is off"
    assert list(lanes_of(shm).values()) == [f"shm: {SAME}"]
    assert list(lanes_of(over_tcp).values()) == ["tcp: --same-host-lane is off"]
    shown = [name for name in shm.metrics() if name.startswith("hisparse_pd:lane_info{")]
    assert len(shown) == 1
    assert 'lane="shm"' in shown[0]
