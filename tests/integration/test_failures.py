"""Two prefill nodes and their lanes: which node gets a request, and nodes that hang, stop or lose an engine.

Invariants I1, I2, I5 and I7. The tests share the nodes and leave them healthy; the last one stops some.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.harness import (
    FLAGS,
    Deployment,
    Service,
    at_once,
    decode_service,
    engine_pids,
    generate,
    generate_by,
    is_idle,
    pool_usage,
    prefill_service,
    router_service,
    running,
    wait_until,
)
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.slow

PAGE_SIZE = 64
LENGTHS = (1, 65, 300)
NUM_NEW_TOKENS = 5
SAME = "both see the same memory"
HEARTBEATS = ["--heartbeat-interval-secs", "2.5"]
DECODE = ["--device-buffer-size", "128", "--quarantine-secs", "2", *HEARTBEATS]
ROUTER = ["--health-interval-secs", "0.5"]


@pytest.fixture(scope="module")
def nodes(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Two prefill nodes, over shared memory and over TCP, with one decode node; heartbeats are quick.

    The decode node is a process as operators start it, not a fork.
    """
    checkpoint, directory = tiny_checkpoint("v32"), tmp_path_factory.mktemp("nodes")
    prefill = [
        prefill_service(checkpoint, directory, f"prefill-{lane}", [*HEARTBEATS, "--same-host-lane", lane])
        for lane in ("auto", "off")
    ]
    decode = [decode_service(checkpoint, directory, "decode", DECODE)]
    router = router_service(prefill, decode, directory, ROUTER)
    decode[0].preloaded = None  # type: ignore[misc]
    with running([*prefill, *decode, router]):
        yield Deployment(prefill, decode, router)


def test_every_turn_of_a_conversation_finds_the_ones_before_it(nodes: Deployment, tmp_path: Path) -> None:
    """A ``cache_aware`` router sends a conversation to the prefill node that has its turns cached."""
    router = router_service(nodes.prefill, nodes.decode, tmp_path, ["--policy", "cache_aware"])
    talks: list[list[dict[str, str]]] = [[] for _ in range(3)]
    seen = [0] * len(talks)
    used = set()
    with running([router]):
        for turn in range(3):
            for number, talk in enumerate(talks):
                question = f"Talk {number}, turn {turn}. " + "Tell me more. " * 40
                talk.append({"role": "user", "content": question})
                answer = httpx.post(
                    f"{router.url}/v1/chat/completions",
                    json={"messages": talk, "max_tokens": 8, "temperature": 0},
                    timeout=60,
                )
                assert answer.status_code == 200, answer.text
                used.add(answer.headers["x-hisparse-pd-prefill"])
                usage = answer.json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= seen[number]
                seen[number] = usage["prompt_tokens"] // PAGE_SIZE * PAGE_SIZE
                content = answer.json()["choices"][0]["message"]["content"]
                talk.append({"role": "assistant", "content": content})
    assert min(seen) > 3 * 500
    assert used == {node.url for node in nodes.prefill}


def ask(prefill: Service, decode: Service, room: int, prompt: list[int], hisparse: bool | str) -> list[int]:
    params = {"max_new_tokens": NUM_NEW_TOKENS}
    answer = generate_by(prefill, decode, room, input_ids=prompt, hisparse=hisparse, params=params)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["output_ids"]
    return tokens


def lanes_of(node: Service) -> dict[str, str]:
    """Return the lane of each peer, as ``/server_info`` has it."""
    info: dict[str, Any] = httpx.get(f"{node.url}/server_info", timeout=WAIT_SECS).json()
    return {lane["peer"]: f"{lane['lane']}: {lane['reason']}" for lane in info["lanes"]}


@pytest.mark.I5
def test_tokens_are_the_same_over_shared_memory_and_tcp_in_every_mode(nodes: Deployment) -> None:
    (shm, over_tcp), (decode,) = nodes.prefill, nodes.decode
    ways = list(itertools.product(FLAGS, (shm, over_tcp)))

    def ask_each_way(number: int) -> list[list[int]]:
        length, first_room = LENGTHS[number], 7_000_000 + number * len(ways)
        prompt = [32 + (7 * position * position + length) % 90 for position in range(length)]
        return [
            ask(prefill, decode, room, prompt, flag)
            for room, (flag, prefill) in enumerate(ways, start=first_room)
        ]

    found = at_once(ask_each_way, range(len(LENGTHS)), len(LENGTHS))
    for length, answers in zip(LENGTHS, found, strict=True):
        assert all(answer == answers[0] for answer in answers), (length, answers)
    by_peer = lanes_of(decode)
    assert by_peer[f"127.0.0.1:{shm.bootstrap_port}"] == f"shm: {SAME}"
    assert by_peer[f"127.0.0.1:{over_tcp.bootstrap_port}"] == "tcp: --same-host-lane is off"
    assert list(lanes_of(shm).values()) == [f"shm: {SAME}"]
    assert list(lanes_of(over_tcp).values()) == ["tcp: --same-host-lane is off"]
    shown = [name for name in shm.metrics() if name.startswith("hisparse_pd:lane_info{")]
    assert len(shown) == 1
    assert 'lane="shm"' in shown[0]


@pytest.mark.I7
def test_requests_of_a_stopped_prefill_node_go_on_with_another(nodes: Deployment, tmp_path: Path) -> None:
    """After SIGSTOP a node accepts connections and never answers; every request is served in time."""
    stopped, other = nodes.prefill
    decode = nodes.decode[0]
    # Another router, almost without health checks, so that it keeps choosing both.
    router = router_service(nodes.prefill, [decode], tmp_path, ["--health-interval-secs", "600"])
    with running([router]):
        served_by = [generate(router.url).headers["x-hisparse-pd-prefill"] for _ in range(4)]
        assert set(served_by) == {stopped.url, other.url}
        stopped.signal_group(signal.SIGSTOP)
        try:
            answers = at_once(lambda _: generate(router.url), range(6), 6)
            assert [answer.status_code for answer in answers] == [200] * len(answers), answers[0].text
            assert {answer.headers["x-hisparse-pd-prefill"] for answer in answers} == {other.url}
            assert router.metrics()["hisparse_pd:router_prefill_retries_total"] >= 1
            assert decode.is_healthy()
            assert other.is_healthy()
        finally:
            stopped.signal_group(signal.SIGCONT)
        wait_until(lambda: is_idle(decode) and pool_usage(decode) == 0, "quarantine lifted")
        wait_until(
            lambda: all(generate(router.url).status_code == 200 for _ in range(2)),
            "the woken node serves again",
        )


def test_sigterm_stops_every_service_with_status_0(nodes: Deployment) -> None:
    """The last test, because it stops one service of each kind."""
    wait_until(lambda: generate(nodes.url).status_code == 200, "service")
    stopped = (nodes.prefill[0], nodes.decode[0])
    engines = [engine_pids(node)[0] for node in stopped]
    assert [service.stop() for service in (*stopped, nodes.router)] == [0, 0, 0]
    for engine in engines:
        wait_until(lambda engine=engine: not Path(f"/proc/{engine}").exists(), "engine gone")  # type: ignore[misc]


def test_an_engine_that_dies_ends_the_node(nodes: Deployment) -> None:
    """The last test, after the one that stopped the others."""
    node = nodes.prefill[1]
    os.kill(engine_pids(node)[0], signal.SIGKILL)
    assert node.exit_status() != 0
