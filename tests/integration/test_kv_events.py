"""A pair that publishes KV events behind a router that follows them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import httpx
import msgspec
import pytest

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.base.ports import free_port, reserve
from hisparse_pd.protocol.kv_events import BlockStored, kv_events_decoder
from tests.integration.harness import Service, deployment, generated, wait_until
from tests.unit.event_subscriber import replay, replay_socket
from tests.waiting import WAIT_SECS

PAGE = 16
IDS = [32 + (7 * position * position) % 90 for position in range(400)]


def two_ports() -> int:
    """Return a port that is kept for its caller, as the one behind it is."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError):
            reserve(port + 1)
            return port


def events_at(port: int, replay_port: int) -> list[str]:
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}"}
    return ["--page-size", str(PAGE), "--kv-events-config", json.dumps(config)]


def published_ids(replay_port: int) -> list[list[int]]:
    """Return the token ids of what a rank has stored, event by event."""
    config = KvEventsConfig(publisher="zmq", replay_endpoint=f"tcp://127.0.0.1:{replay_port}")
    with replay_socket(config) as sock:
        batches = [kv_events_decoder.decode(payload) for _, payload in replay(sock)]
    return [event.token_ids for batch in batches for event in batch.events if isinstance(event, BlockStored)]


def num_known(router: Service, node: Service, kind: str) -> float:
    return router.metrics()[f'hisparse_pd:router_known_pages{{kind="{kind}",node="{node.url}"}}']


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_router_knows_what_nodes_have(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    ports = [two_ports() for _ in range(4)]
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        prefill_options=[*events_at(*ports[:2]), "--dp-size", "2"],
        decode_options=[*events_at(*ports[2:]), "--device-buffer-size", "128"],
        router_options=["--policy", "cache_aware"],
    ) as pair:
        (prefill,), (decode,) = pair.prefill, pair.decode
        answer = generated(pair.url, input_ids=IDS, hisparse=True, params={"max_new_tokens": 20})
        num_prefill, num_decode = (len(IDS) - 1) // PAGE, (len(IDS) + 19) // PAGE
        wait_until(lambda: num_known(pair.router, prefill, "prefill") == num_prefill)
        wait_until(lambda: num_known(pair.router, decode, "decode") == num_decode)
        by_rank = [[*chain(*published_ids(ports[1] + rank))] for rank in range(2)]
        assert sorted(by_rank) == [[], IDS[: num_prefill * PAGE]]
        assert [*chain(*published_ids(ports[3]))] == (IDS + answer["output_ids"])[: num_decode * PAGE]
        salted = {"input_ids": IDS[::-1], "cache_salt": "a secret", "sampling_params": {"max_new_tokens": 2}}
        given = httpx.post(f"{pair.url}/generate", json=salted, timeout=WAIT_SECS)
        assert given.status_code == 200
        assert "x-hisparse-pd-pages" not in given.headers
        asked = httpx.post(
            f"{decode.url}/generate",
            json={
                "input_ids": IDS,
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": prefill.bootstrap_port,
                "bootstrap_room": 77,
                "sampling_params": {"max_new_tokens": 2},
            },
            headers={"x-hisparse-pd-pages": "1"},
            timeout=WAIT_SECS,
        )
        page_size, num_tokens, names = msgspec.json.decode(asked.headers["x-hisparse-pd-pages"])
        assert (page_size, num_tokens) == (PAGE, len(IDS))
        assert [number for number, _ in names] == [1, 2, 4, 8, 16, num_prefill]
        pair.flush_prefix_caches()
        wait_until(lambda: num_known(pair.router, prefill, "prefill") == 0)
        wait_until(lambda: num_known(pair.router, decode, "decode") == 0)
        for node in (prefill, decode):
            assert node.metrics()["hisparse_pd:kv_event_batches_dropped_total"] == 0
