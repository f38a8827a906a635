"""Nodes of two machines: loopback addresses of this one that share nothing but the network."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from hisparse_pd.base.ports import free_port
from hisparse_pd.protocol.channels import ControlKeys
from tests.integration.harness import (
    Deployment,
    Service,
    at_once,
    decode_service,
    engine_pids,
    generate,
    is_empty,
    output_ids,
    prefill_service,
    router_service,
    wait_until,
)
from tests.oracle_beside import Oracle
from tests.port_scan import listening, scan
from tests.waiting import WAIT_SECS

LENGTHS = (1, 38, 129, 300)
NUM_NEW_TOKENS = 10
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
PREFILL = ("--page-size", "16", "--chunked-prefill-size", "230", "--kv-pool-tokens", "4096")
DECODE = ("--page-size", "16", "--device-buffer-size", "80", "--device-pool-tokens", "2048")


def machines(make: Callable[..., Service], checkpoint: Path, directory: Path, *options: str) -> list[Service]:
    """The two processes of one node; the first one has the port."""
    name = make.__name__.removesuffix("_service")
    meeting = f"{FIRST}:{free_port()}"
    common = [*options, "--dp-size", "2", "--nnodes", "2", "--dist-init-addr", meeting]
    return [
        make(
            checkpoint,
            directory,
            f"{name}-{rank}",
            [*common, "--node-rank", str(rank), "--host", host, "--heartbeat-interval-secs", "2"],
        )
        for rank, host in enumerate((FIRST, SECOND))
    ]


@contextmanager
def started(services: list[Service]) -> Iterator[None]:
    """Start services, and wait for those that serve HTTP: the router and the first machine of each node."""
    try:
        for service in services:
            service.start()
        for service in services:
            if not service.name.endswith("-1"):
                service.wait_healthy()
        yield
    finally:
        for service in reversed(services):
            service.kill()


@pytest.fixture(scope="module")
def nodes(
    tied_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Deployment, list[Service]]]:
    """A prefill node and a decode node of two machines each, which share a key, and their second machines."""
    directory = tmp_path_factory.mktemp("machines")
    keys = directory / "control.key"
    keys.write_bytes(ControlKeys.generate().secret)
    with_key = ("--control-key-file", str(keys))
    checkpoint = tied_checkpoint("v32")
    prefill = machines(prefill_service, checkpoint, directory, *PREFILL, *with_key)
    decode = machines(decode_service, checkpoint, directory, *DECODE, *with_key, "--api-server-count", "2")
    router = router_service(prefill[:1], decode[:1], directory)
    with started([*prefill, *decode, router]):
        yield Deployment(prefill[:1], decode[:1], router), [prefill[1], decode[1]]


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tokens_are_the_oracles_whichever_machine_has_a_request(
    nodes: tuple[Deployment, list[Service]], tied_checkpoint: Callable[[str], Path]
) -> None:
    pair, _ = nodes
    drawn = random.Random(11)
    prompts = [[drawn.randint(32, 126) for _ in range(length)] for length in LENGTHS]
    with closing(Oracle(tied_checkpoint("v32"), prompts, NUM_NEW_TOKENS)) as oracle:
        expected = oracle.tokens
    jobs = [(number, flag) for number in range(len(prompts)) for flag in (True, False, "auto")] * 2

    def answer(job: tuple[int, bool | str]) -> list[int]:
        number, flag = job
        params = {"max_new_tokens": NUM_NEW_TOKENS}
        return output_ids(pair.url, input_ids=prompts[number], hisparse=flag, params=params)

    answers = at_once(answer, jobs, 8)
    wrong = [(job, got) for job, got in zip(jobs, answers, strict=True) if got != expected[job[0]]]
    assert not wrong, f"{len(wrong)} of {len(jobs)} differ; first {wrong[0]}"
    metrics = httpx.get(pair.decode[0].url + "/metrics", timeout=WAIT_SECS).text
    for rank in (0, 1):
        assert f'hisparse_pd:requests_total{{dp_rank="{rank}"' in metrics
    pair.flush_prefix_caches()
    for node in (*pair.prefill, *pair.decode):
        wait_until(partial(is_empty, node), f"{node.name} is empty")


@pytest.mark.slow
def test_a_node_says_where_its_machines_are(nodes: tuple[Deployment, list[Service]]) -> None:
    pair, _ = nodes
    for node in (*pair.prefill, *pair.decode):
        info = httpx.get(node.url + "/server_info", timeout=WAIT_SECS).json()
        assert (info["nnodes"], [rank["dp_rank"] for rank in info["ranks"]]) == (2, [0, 1])


@pytest.mark.I7
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_port_scan_ends_nothing(nodes: tuple[Deployment, list[Service]]) -> None:
    """All ports are scanned: of fronts, bootstrap, control, engines' channels, ranks, KV and the router."""
    pair, others = nodes
    services = [*pair.services, *others]
    expected = output_ids(pair.url)
    addresses = listening(service.pid for service in services)
    assert len(addresses) > 2 * len(services), addresses
    at_once(lambda address: scan([address]), addresses, 8)
    for service in services:
        assert not service.has_ended(), f"{service.name} has ended:\n{service.log_tail()}"
    pair.flush_prefix_caches()
    for _ in range(4):  # on both ranks
        assert output_ids(pair.url) == expected
    for service in pair.services:
        assert httpx.get(service.url + "/health", timeout=60).status_code == 200


@pytest.mark.I7
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_leave_together(nodes: tuple[Deployment, list[Service]]) -> None:
    """A killed machine ends its node; a signal to all, as a cluster sends it, ends a node in order."""
    pair, (_, second_of_decode) = nodes
    second_of_decode.kill()
    assert pair.decode[0].exit_status() == 1, "a supervisor is to start it again"
    assert "rank 1, on another machine, is gone" in pair.decode[0].log_tail(20000)
    assert generate(pair.url, params={"max_new_tokens": 4}).status_code in (502, 503)
    for service in (second_of_decode, pair.decode[0]):
        service.start()
    pair.decode[0].wait_healthy()
    wait_until(lambda: generate(pair.url, params={"max_new_tokens": 4}).status_code == 200, "an answer")
    for service in (second_of_decode, pair.decode[0]):
        os.kill(service.pid, signal.SIGTERM)
    assert (pair.decode[0].exit_status(), second_of_decode.exit_status()) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_goes_with_the_first_one(tied_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    first, second = machines(decode_service, tied_checkpoint("v32"), tmp_path, *DECODE)
    with started([first, second]):
        assert len(engine_pids(second)) == 1
        first.kill()
        assert second.exit_status() == 1
        assert "is gone" in second.log_tail(20000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_with_other_settings_do_not_start(
    tied_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = machines(decode_service, tied_checkpoint("v32"), tmp_path, *DECODE)
    second.arguments += ["--max-running-requests", "77"]
    try:
        first.start()
        second.start()
        assert (first.exit_status(), second.exit_status()) == (1, 1)
        assert "max_running_requests is 77 on rank 1 and 64 on rank 0; start" in second.log_tail(20000)
    finally:
        first.kill()
        second.kill()
