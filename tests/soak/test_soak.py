"""`make soak`: a deployment under load for SOAK_SECS while its nodes, memory and transport fail.

There are two prefill nodes, whose transport also fails by itself, two decode nodes with canaries in their
free slots, a router, and clients that leave in storms. Nodes are killed, stopped and started again; prefill
node 0 comes back on the same control port, prefill node 1 on another, and all of them in new sessions. Every
request ends in the right tokens or in a clear error, and no stream that has begun ends in an error unless
both decode nodes were dead at once. In the end every pool is whole, every canary is intact, and no process,
shared memory, temporary file or listening socket is left.

Every process's memory, descriptors and threads are recorded. After SPARED_AFTER_SECS one node of each kind is
no longer killed, so that it lives long enough to show that it stays flat.

Every node has SOAK_RANKS ranks, and steps verify up to SOAK_DRAFTS drafts. SOAK_FLIPS is the number of bits
that flip each second in each decode engine's host pool; requests may then end with an error that names the
row, and the host pool has no canaries.

SOAK_SECS, SOAK_RANKS, SOAK_DRAFTS, SOAK_FLIPS, SOAK_BUFFER (``--device-buffer-size``), SOAK_CLIENTS and
SOAK_SEED are read from the environment; the summary goes to standard output and to SOAK_REPORT as JSON, with
the samples in a file beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse_pd.base.ports import free_port
from hisparse_pd.core.model.spec import load_spec
from tests.faults.transport import FaultRates
from tests.integration.harness import (
    Deployment,
    decode_service,
    is_empty,
    prefill_service,
    router_service,
    running,
    wait_until,
)
from tests.soak.chaos import Chaos, living
from tests.soak.flips import Flips
from tests.soak.load import Load, Prompt, body_of
from tests.soak.resources import Recorder, listening

SECS = float(os.environ.get("SOAK_SECS", "120"))
NUM_RANKS = int(os.environ.get("SOAK_RANKS", "1"))
NUM_DRAFTS = int(os.environ.get("SOAK_DRAFTS", "3"))
FLIPS_PER_SEC = float(os.environ.get("SOAK_FLIPS", "0"))
BUFFER = os.environ.get("SOAK_BUFFER", "200")
NUM_CLIENTS = int(os.environ.get("SOAK_CLIENTS", "24"))
REPORT = Path(os.environ.get("SOAK_REPORT", "out/soak.json"))

LENGTHS = (1, 2, 63, 64, 65, 100, 128, 200, 333, 600)
MAX_NEW_TOKENS = 40
SETTLE_SECS = 90.0
NUM_SAMPLES = 360
"""Samples of a process that lives throughout, at most one a second."""

HOST_POOL_TOKENS = 6016
NODE_OPTIONS = [
    *("--dp-size", str(NUM_RANKS)),
    *("--heartbeat-interval-secs", "3", "--room-timeout-secs", "30"),
]
PREFILL_OPTIONS = [
    *NODE_OPTIONS,
    # Prompts evict each other, and come back from main memory.
    *("--kv-pool-tokens", "1536", "--host-cache-tokens", "6144"),
]
DECODE_OPTIONS = [
    *("--quarantine-secs", "5"),
    # A hot buffer of 200 leaves long hisparse requests two drafts; short and dense ones have three. Without a
    # bound (0) hot buffers hold whole requests, and make room for others in a pool that is short of slots.
    *("--speculative-num-steps", str(NUM_DRAFTS), "--device-buffer-size", BUFFER),
    *("--host-pool-tokens", str(HOST_POOL_TOKENS), "--device-pool-tokens", "3072"),
    # Keys of held prefixes move to main memory and back.
    *("--index-pool-tokens", "5120", "--idle-keys", "host"),
    *("--max-running-requests", "16"),
]


@pytest.mark.soak
@pytest.mark.timeout(SECS + 600)
def test_soak(drafting_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED") or time.time_ns() % 1_000_000)
    checkpoint = drafting_checkpoint("v32")
    nodes = services(checkpoint, tmp_path)
    spec = load_spec(checkpoint, num_draft_layers=bool(NUM_DRAFTS))
    num_host_bytes = HOST_POOL_TOKENS * spec.num_kv_layers * spec.item_bytes
    flips = Flips(nodes.decode, FLIPS_PER_SEC, num_host_bytes, seed)
    over = threading.Event()
    survivors = [nodes.prefill[0], nodes.decode[0]]
    chaos = Chaos([*nodes.prefill, *nodes.decode], survivors, random.Random(seed), over, NUM_RANKS)
    recorder = Recorder(nodes.services, max(1.0, SECS / NUM_SAMPLES))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:  # short, as ipc sockets' paths must be
        for service in nodes.services:
            service.env["TMPDIR"] = scratch
            service.env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # importing torch makes it; it may stay
        try:
            with running(nodes.services), recorder.running():
                expected = answers_before(nodes)
                with flips.going_on():
                    load = asyncio.run(soak(nodes, expected, chaos, random.Random(seed + 1)))
                recorder.load_ends()
                serves_again(nodes, expected)
                settle(nodes, flips)
                chaos.process_groups.add(nodes.router.pid)
                stop_all(nodes)
        finally:
            over.set()
        left = {
            "processes": processes_left(chaos.process_groups),
            "files": sorted(str(path.relative_to(scratch)) for path in Path(scratch).rglob("*")),
            "shared_memory": recorder.shared_memory_left(),
            "ports": listening(
                [port for node in nodes.services for port in (node.port, node.bootstrap_port)]
            ),
        }
    canaries = canary_counts(tmp_path)
    summary: dict[str, Any] = {
        "seed": seed,
        "secs": round(time.monotonic() - started),
        "ranks": NUM_RANKS,
        "drafts": NUM_DRAFTS,
        "clients": NUM_CLIENTS,
        "flips": flips.num_flips,
        "pages_set_aside": flips.num_pages,
        "requests": dict(sorted(load.outcomes.items())),
        "tokens": load.num_tokens,
        "abort_storms": load.num_storms,
        "errors": dict(load.errors.most_common()),
        "lost_streams": lost_beside_a_living_node(load, chaos),
        "blackouts": len(chaos.blackouts),
        "events": dict(sorted(chaos.events.items())),
        "transport_faults": dict(sorted(Counter((tmp_path / "faults").read_text().splitlines()).items())),
        "canaries": canaries,
        "violations": load.violations[:20],
        "left": left,
        "resources": recorder.summary(),
        "not_flat": recorder.too_much(),
    }
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(summary, indent=1) + "\n")
    REPORT.with_suffix(".resources.json").write_text(json.dumps(recorder.series()) + "\n")
    print(json.dumps(summary, indent=1))
    assert load.violations == []
    assert summary["lost_streams"] == []
    assert canaries["findings"] == []
    assert canaries["bytes_checked"] > 0
    assert not any(left.values()), left
    assert summary["not_flat"] == []
    assert load.outcomes["right"] > load.outcomes["client left"] / 4, load.outcomes


def services(checkpoint: Path, directory: Path) -> Deployment:
    same_port = ["--control-port", str(first_of_free_ports(NUM_RANKS))]
    prefill = [
        prefill_service(checkpoint, directory, "prefill-0", [*PREFILL_OPTIONS, *same_port]),
        # One writes over shared memory, the other over TCP.
        prefill_service(checkpoint, directory, "prefill-1", [*PREFILL_OPTIONS, "--same-host-lane", "off"]),
    ]
    decode = [
        decode_service(checkpoint, directory, f"decode-{number}", [*NODE_OPTIONS, *DECODE_OPTIONS])
        for number in range(2)
    ]
    router = router_service(prefill, decode, directory, ["--health-interval-secs", "0.5"])
    for node in (*prefill, *decode):
        node.module = "tests.faults.node"
    for node in prefill:
        rates = FaultRates(
            str(directory / "faults"),
            dropped=0.01, partial=0.01, late=0.02, slow=0.04, twice=0.04, shuffled=0.04,
        )  # fmt: skip
        node.env["TRANSPORT_FAULTS"] = rates.to_json()
    for node in decode:
        node.env["CANARY_REPORT"] = str(directory / f"{node.name}-canaries.json")
        node.env["CANARY_POOLS"] = "device index aux" if FLIPS_PER_SEC else "host device index aux"
    return Deployment(prefill, decode, router)


def first_of_free_ports(num_ports: int) -> int:
    """The first of ``num_ports`` consecutive free ports, one for each rank."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            for port in range(first + 1, first + num_ports):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def answers_before(nodes: Deployment) -> dict[Prompt, list[int]]:
    """The right tokens of each prompt: those of both modes before anything fails."""
    prompts = [tuple(40 + (start + p) % 80 for p in range(length)) for length in LENGTHS for start in (0, 7)]
    with ThreadPoolExecutor(8) as threads:
        hisparse, dense = (
            list(threads.map(lambda prompt, mode=mode: ask_until_served(nodes.url, prompt, mode), prompts))
            for mode in (True, False)
        )
    assert hisparse == dense
    return dict(zip(prompts, hisparse, strict=True))


def ask_until_served(url: str, prompt: Prompt, hisparse: bool) -> list[int]:
    """Ask again until the answer is a 200, because the transport fails at times."""
    answers: list[httpx.Response] = []

    def is_served() -> bool:
        answers.append(
            httpx.post(f"{url}/generate", json=body_of(prompt, MAX_NEW_TOKENS, hisparse), timeout=120)
        )
        return answers[-1].status_code == 200

    wait_until(is_served, "an answer", SETTLE_SECS)
    tokens: list[int] = answers[-1].json()["output_ids"]
    return tokens


async def soak(
    nodes: Deployment, expected: dict[Prompt, list[int]], chaos: Chaos, generator: random.Random
) -> Load:
    load = Load(nodes.url, expected, NUM_CLIENTS, generator, rows_may_be_wrong=FLIPS_PER_SEC > 0)
    clients = asyncio.create_task(load.run())
    storms = asyncio.create_task(load.storms())
    chaos_ended = asyncio.create_task(asyncio.to_thread(chaos.run))
    try:
        await asyncio.wait([chaos_ended], timeout=SECS)
    finally:
        chaos.over.set()
        await chaos_ended  # raises if a node did not do as it must
        load.stop()
        await asyncio.gather(clients, storms)
    return load


def lost_beside_a_living_node(load: Load, chaos: Chaos) -> list[str]:
    """Errors of streams that were lost although a decode node lived all the time."""
    return [
        stream.error
        for stream in load.lost_streams
        if not any(start < stream.ended_at and stream.began_at < end for start, end in chaos.blackouts)
    ]


def serves_again(nodes: Deployment, expected: dict[Prompt, list[int]]) -> None:
    """Every node answers right at the end; the router gives each pair of nodes requests in turn."""
    prompts = list(expected)[-4:]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            answers = threads.map(lambda prompt: ask_until_served(nodes.url, prompt, True), prompts)
            assert list(answers) == [expected[prompt] for prompt in prompts]


def settle(nodes: Deployment, flips: Flips) -> None:
    def flush_and_look() -> bool:
        nodes.flush_prefix_caches()
        flips.give_back()
        return all(is_empty(node) for node in (*nodes.decode, *nodes.prefill))

    wait_until(flush_and_look, "the nodes hold nothing", SETTLE_SECS)


def stop_all(nodes: Deployment) -> None:
    """Stop all as an operator would; what stays then is from an earlier kill, or is a leak."""
    for service in reversed(nodes.services):
        assert service.stop() == 0


def processes_left(process_groups: set[int]) -> list[str]:
    """Processes that are left after a wait, since a kill does not wait for the end."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not living(process_groups), "all processes end")
    return living(process_groups)


def canary_counts(directory: Path) -> dict[str, Any]:
    """Canary counts of all runs of the decode nodes together."""
    reports = [json.loads(path.read_text()) for path in directory.glob("decode-*-canaries-*.json")]
    totals: Counter[str] = Counter()
    for report in reports:
        totals.update({name: count for name, count in report.items() if name != "findings"})
    return {"runs": len(reports), **totals, "findings": [f for report in reports for f in report["findings"]]}
