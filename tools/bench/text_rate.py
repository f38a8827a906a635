"""How many tokens a second a node's fronts and a router pass on, and how much later they arrive for it.

    python -m tools.bench.text_rate [--streams 1024] [--step-ms 80] [--secs 10] [--ranks 8] [--fronts 4]
        [--clients 8] [--direct]

Decode engines that only emit tokens, one a rank, give each of many streams one token a step, all of a step at
once. They go through the decode node's real fronts and the real router (``--direct``: the fronts alone) to
clients in other processes. A token's latency is from the beginning of its step to its arrival at the client.
CPU time is for each token, all processes of a kind together. A process that is busy all the time is full, so
the machine needs a core for each process that is listed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from hisparse_pd.base.ports import free_port
from hisparse_pd.base.settings import DecodeSettings, RouterSettings
from hisparse_pd.base.vocabulary import FinishReason, Mode, RankPlace
from hisparse_pd.decode_node.server import create_decode_app
from hisparse_pd.engine.messages import (
    Abort,
    EngineReady,
    EngineStats,
    GenerateGroup,
    RequestStats,
    Shutdown,
    Tokens,
)
from hisparse_pd.engine.sockets import EngineSocket
from hisparse_pd.serving.http.engine_link import least_loaded
from tools.bench.facts import OUT
from tools.bench.pair import wait_healthy
from tools.bench.report import make_console, table_of, write_report
from tools.checkpoints.make_tiny import write_tokenizer

CONTEXT = 163_840
Arrivals: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""Monotonic seconds."""
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT = "What is the code of the amber falcon?"
PAUSE_SECS = 1.0
"""Between the last stream's arrival and the first step."""


@dataclass(frozen=True)
class Load:
    """``num_arrived``: streams at each rank. ``began_at``: of the first step, monotonic; 0: not yet."""

    num_streams: int
    step_secs: float
    num_steps: int
    num_ranks: int
    num_arrived: Any
    began_at: Any
    engine_pids: Any
    all_arrived: Event


def serve_decode(model_path: Path, port: int, num_fronts: int, load: Load) -> None:
    """The decode node's fronts with engines that emit."""
    from hisparse_pd.serving.api.node import run_front

    settings = DecodeSettings(
        model_path=model_path,
        served_model_name="tiny",
        port=port,
        dp_size=load.num_ranks,
        api_server_count=num_fronts,
        max_queued_requests=8192,
        log_level="warning",
    )
    run_front(
        settings,
        role="decode",
        engine=partial(emit, load),
        holds_output=True,
        choose_rank=least_loaded,
        ports=[port],
        apps=apps,
    )


def apps(front: Any) -> list[Starlette]:
    return [create_decode_app(front)]


def emit(load: Load, settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    """One token for each stream in each step, once all streams are at their ranks."""
    rank = place.rank
    load.engine_pids[rank] = os.getpid()
    socket = EngineSocket(endpoints)
    socket.send(EngineReady(CONTEXT, CONTEXT, CONTEXT))
    request_ids: dict[str, None] = {}
    step = 0
    next_stats = 0.0
    while step < load.num_steps:
        for message in socket.receive():
            match message:
                case GenerateGroup():
                    request_ids |= dict.fromkeys(sample.request_id for sample in message.samples)
                case Abort():
                    request_ids.pop(message.request_id, None)
                case Shutdown():
                    return
        load.num_arrived[rank] = len(request_ids)
        now = time.monotonic()
        if now >= next_stats:
            next_stats = now + 0.4
            socket.send(EngineStats({}, {}, 0, 0, 0, step))
        if load.began_at.value == 0.0:
            if rank == 0 and sum(load.num_arrived[:]) >= load.num_streams:
                load.began_at.value = now + PAUSE_SECS
                load.all_arrived.set()
            time.sleep(0.001)
            continue
        next_step = load.began_at.value + step * load.step_secs
        if now < next_step:
            time.sleep(min(0.001, next_step - now))
            continue
        finish = FinishReason.LENGTH if step == load.num_steps - 1 else None
        for request_id in request_ids:
            socket.send(Tokens(request_id, (97 + step % 26,), (), finish, stats=RequestStats(Mode.HISPARSE)))
        step += 1
    while not any(isinstance(message, Shutdown) for message in socket.receive()):
        socket.send(EngineStats({}, {}, 0, 0, 0, step))
        time.sleep(0.05)
    socket.close()


async def deliver(scope: Scope, receive: Receive, send: Send) -> None:
    """The prefill node's side of the contract, whatever it is asked: every prompt is delivered at once."""
    while (await receive()).get("more_body"):
        continue
    await JSONResponse({"object": "list", "data": [{"id": "tiny"}]})(scope, receive, send)


def serve_prefill(port: int) -> None:
    uvicorn.run(deliver, host="127.0.0.1", port=port, log_level="error", lifespan="off")


def serve_router(port: int, prefill_port: int, decode_port: int) -> None:
    from hisparse_pd.router.process import run

    run(
        RouterSettings(
            port=port,
            prefill=((f"http://127.0.0.1:{prefill_port}", 8998),),
            decode=(f"http://127.0.0.1:{decode_port}",),
            log_level="warning",
        )
    )


class Stream(asyncio.Protocol):
    """One request, and when its tokens come."""

    def __init__(self, request: bytes, arrived: Arrivals) -> None:
        """``arrived``: monotonic seconds by step, to be filled."""
        self._request = request
        self._arrived = arrived
        self._step = 0
        self._rest = b""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        text = self._rest + data
        num_tokens = text.count(b'"text":"') - self._rest.count(b'"text":"')
        self._rest = text[-16:]
        self._arrived[self._step : self._step + num_tokens] = now
        self._step += num_tokens
        if b"[DONE]" in text:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def read_streams(port: int, load: Load, first: int, stop: int) -> Arrivals:
    """Of streams [first, stop): when each token came, [num_streams, num_steps]; NaN: it did not."""
    arrived = np.full((stop - first, load.num_steps), np.nan)
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": load.num_steps,
        "stream": True,
        "ignore_eos": True,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 8998,
    }
    streams = []
    for stream in range(first, stop):
        content = json.dumps(body | {"bootstrap_room": stream + 1})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        opened = Stream((head + content).encode(), arrived[stream - first])
        await asyncio.get_running_loop().create_connection(lambda made=opened: made, "127.0.0.1", port)
        streams.append(opened.closed)
    await asyncio.wait(streams)
    return arrived


def run_client(port: int, load: Load, first: int, stop: int, results: Any) -> None:
    results.put(asyncio.run(read_streams(port, load, first, stop)))


def cpu_secs(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def spawned_by(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(pid) for pid in listed if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=80.0)
    parser.add_argument("--secs", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=1, help="engines that emit")
    parser.add_argument("--fronts", type=int, default=1, help="--api-server-count of the decode node")
    parser.add_argument("--clients", type=int, default=1, help="processes that read the streams")
    parser.add_argument("--direct", action="store_true", help="without the router")
    parser.add_argument("--out", type=Path, default=OUT / "text_rate")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    load = Load(
        options.streams,
        options.step_ms / 1e3,
        max(2, round(options.secs * 1e3 / options.step_ms)),
        options.ranks,
        context.Array("q", options.ranks, lock=False),
        context.Value("d", 0.0, lock=False),
        context.Array("q", options.ranks, lock=False),
        context.Event(),
    )
    decode_port, prefill_port, router_port = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        (Path(name) / "config.json").write_text('{"vocab_size": 256, "model_type": "deepseek_v32"}')
        arguments = (Path(name), decode_port, options.fronts, load)
        processes = {"front": context.Process(target=serve_decode, args=arguments)}
        if not options.direct:
            processes["prefill"] = context.Process(target=serve_prefill, args=(prefill_port,), daemon=True)
            ports = (router_port, prefill_port, decode_port)
            processes["router"] = context.Process(target=serve_router, args=ports)
        for process in processes.values():
            process.start()
        try:
            port = decode_port if options.direct else router_port
            report = measure(context, options, load, processes, port)
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.join(20)
    show(report)
    write_report(options.out, report)


def measure(
    context: Any, options: argparse.Namespace, load: Load, processes: dict[str, SpawnProcess], port: int
) -> dict[str, Any]:
    if not wait_healthy(f"http://127.0.0.1:{port}", 120):
        raise SystemExit(f"nobody serves at port {port} within 120 s")
    results = context.Queue()
    bounds = np.linspace(0, load.num_streams, options.clients + 1).astype(int).tolist()
    clients = [
        context.Process(target=run_client, args=(port, load, first, stop, results), daemon=True)
        for first, stop in itertools.pairwise(bounds)
    ]
    for client in clients:
        client.start()
    if not load.all_arrived.wait(120):
        raise SystemExit(
            f"{sum(load.num_arrived[:])} of {load.num_streams} streams reached an engine in 120 s"
        )
    engine_pids = set(load.engine_pids[:])
    pids = {"engine": sorted(engine_pids), "client": [client.pid for client in clients]}
    for name in processes.keys() - {"prefill"}:
        pid = processes[name].pid
        assert pid is not None
        pids[name] = [pid, *(child for child in spawned_by(pid) if child not in engine_pids)]
    time.sleep(max(0.0, load.began_at.value - 0.1 - time.monotonic()))
    before = {pid: cpu_secs(pid) for of_kind in pids.values() for pid in of_kind}
    time.sleep(max(0.0, load.began_at.value + load.step_secs * (load.num_steps - 1) - time.monotonic()))
    used = {name: [cpu_secs(pid) - before[pid] for pid in of_kind] for name, of_kind in pids.items()}
    arrived = np.concatenate([results.get(timeout=120) for _ in clients])
    began = load.began_at.value + load.step_secs * np.arange(load.num_steps)
    latency_ms = (arrived - began[None, :]) * 1e3
    num_tokens = int(np.isfinite(arrived).sum())
    secs = load.step_secs * (load.num_steps - 1)
    return {
        "streams": load.num_streams,
        "step_ms": load.step_secs * 1e3,
        "ranks": load.num_ranks,
        "fronts": options.fronts,
        "router": not options.direct,
        "clients": options.clients,
        "cpus": len(os.sched_getaffinity(0)),
        "streams_by_rank": load.num_arrived[:],
        "offered_tokens_a_second": load.num_streams / load.step_secs,
        "tokens_a_second": num_tokens / (float(np.nanmax(arrived) - began[0]) + load.step_secs),
        "lost": int(arrived.size - num_tokens),
        "latency_ms": {p: float(np.nanpercentile(latency_ms, p)) for p in (50, 90, 99, 100)},
        "cpu_us_a_token": {name: sum(spent) * 1e6 / num_tokens for name, spent in used.items()},
        "busy_share": {name: [round(spent / secs, 3) for spent in of_kind] for name, of_kind in used.items()},
    }


def show(report: dict[str, Any]) -> None:
    console, latency = make_console(), report["latency_ms"]
    row = {
        "fronts": report["fronts"],
        "router": "yes" if report["router"] else "no",
        "streams": report["streams"],
        "step, ms": report["step_ms"],
        "offered/s": report["offered_tokens_a_second"],
        "tokens/s": report["tokens_a_second"],
        **{f"{name}, ms": latency[p] for name, p in (("p50", 50), ("p99", 99), ("max", 100))},
    }
    console.print(table_of("", [row]))
    kinds = report["cpu_us_a_token"]
    console.print("CPU, us a token: " + ", ".join(f"{name} {us:.1f}" for name, us in kinds.items()))
    shares = report["busy_share"].items()
    busy = (f"{name} " + " ".join(f"{share:.0%}" for share in of_kind) for name, of_kind in shares)
    console.print(f"busy share of each process, on {report['cpus']} CPUs: " + "; ".join(busy))
    if report["lost"]:
        console.print(f"[bold]{report['lost']} tokens never came[/bold]")


if __name__ == "__main__":
    main()
