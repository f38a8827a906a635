"""How many tokens a second one front and one router pass on, and how much later they arrive for it.

    python bench/text_rate.py [--streams 256] [--step-ms 80] [--secs 10] [--direct]

A decode engine that only emits tokens gives each of many streams one token a step, in messages of their own,
as a decode node at its full rate does. The tokens go through the decode node's real front and the real router
(``--direct``: the front alone) to a client in another process. A token's latency is from the beginning of its
step in the engine to its arrival at the client: the engine's own sending is in it. CPU time is of each
process, for each token; one that takes more than ``1 / rate`` is full, and latency then grows without bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts
from checkpoints.make_tiny import write_tokenizer
from decode_node.server import create_decode_app
from service.engine_link import least_loaded
from service.engine_messages import EngineReady, EngineStats, GenerateGroup, RequestStats, Shutdown, Tokens
from service.engine_sockets import EngineSocket
from service.ports import free_port
from service.settings import DecodeSettings, RouterSettings
from vocabulary import FinishReason, Mode, RankPlace

CONTEXT = 163_840
MAX_STEPS = 1 << 16
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT = "What is the code of the amber falcon?"


@dataclass(frozen=True)
class Load:
    """``step_began``: monotonic seconds, by step, written by the engine."""

    num_streams: int
    step_secs: float
    num_steps: int
    step_began: Any
    all_arrived: Event


def serve_decode(model_path: Path, port: int, load: Load) -> None:
    """The decode node's front with an engine that emits."""
    from api.node import run_front

    settings = DecodeSettings(
        model_path=model_path, served_model_name="tiny", port=port, max_queued_requests=8192
    )
    run_front(
        settings,
        role="decode",
        engine=_Emitter(load),
        holds_output=True,
        choose_rank=least_loaded,
        ports=[port],
        apps=_apps,
    )


def _apps(front: Any) -> list[Starlette]:
    return [create_decode_app(front)]


@dataclass(frozen=True)
class _Emitter:
    load: Load

    def __call__(self, settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
        emit(endpoints, self.load)


def emit(endpoints: Sequence[str], load: Load) -> None:
    """One token for each stream in each step, once all streams are there."""
    socket = EngineSocket(endpoints)
    socket.send(EngineReady(CONTEXT, CONTEXT, CONTEXT))
    request_ids: list[str] = []
    step = -1
    next_stats = 0.0
    while step < load.num_steps:
        for message in socket.receive():
            if isinstance(message, GenerateGroup):
                request_ids += [sample.request_id for sample in message.samples]
            elif isinstance(message, Shutdown):
                return
        now = time.monotonic()
        if now >= next_stats:
            next_stats = now + 0.4
            socket.send(EngineStats({}, {}, 0, 0, 0, max(step, 0)))
        if step < 0:
            if len(request_ids) < load.num_streams:
                time.sleep(0.001)
                continue
            load.all_arrived.set()
            step, next_step = 0, now + 0.5
        if now < next_step:
            time.sleep(min(0.001, next_step - now))
            continue
        next_step = max(next_step + load.step_secs, now)
        load.step_began[step] = now
        is_last = step == load.num_steps - 1
        finish = FinishReason.LENGTH if is_last else None
        for request_id in request_ids:
            socket.send(Tokens(request_id, (97 + step % 26,), (), finish, stats=RequestStats(Mode.HISPARSE)))
        step += 1
        if is_last:
            break
    while not any(isinstance(message, Shutdown) for message in socket.receive()):
        time.sleep(0.01)


def serve_prefill(port: int) -> None:
    """The prefill node's side of the contract: every prompt is delivered at once."""

    async def generate(request: Request) -> Response:
        await request.body()
        return Response(b"{}", media_type="application/json")

    async def health(request: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        return Response(json.dumps({"object": "list", "data": [{"id": "tiny"}]}))

    routes = [
        Route("/v1/completions", generate, methods=["POST"]),
        Route("/health", health),
        Route("/v1/models", models),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="error")


def serve_router(port: int, prefill_port: int, decode_port: int) -> None:
    from router.server import run

    run(
        RouterSettings(
            port=port,
            prefill=((f"http://127.0.0.1:{prefill_port}", 8998),),
            decode=(f"http://127.0.0.1:{decode_port}",),
        )
    )


async def read_streams(port: int, load: Load) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Arrival of each token, [num_streams, num_steps], in monotonic seconds; NaN for one that never came."""
    arrived = np.full((load.num_streams, load.num_steps), np.nan)
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": load.num_steps,
            "stream": True,
            "ignore_eos": True,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 8998,
        }
    )

    async def read(stream: int) -> None:
        with_room = body[:-1] + f', "bootstrap_room": {stream + 1}}}'
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(with_room)}\r\n\r\n"
        writer.write((head + with_room).encode())
        step, rest = 0, b""
        while chunk := await reader.read(1 << 16):
            now = time.monotonic()
            text = rest + chunk
            num_tokens = text.count(b'"text":"') - rest.count(b'"text":"')
            rest = text[-16:]
            arrived[stream, step : step + num_tokens] = now
            step += num_tokens
            if b"[DONE]" in text:
                break
        writer.close()

    await asyncio.gather(*map(read, range(load.num_streams)))
    return arrived


def run_client(port: int, load: Load, results: Any) -> None:
    arrived = asyncio.run(read_streams(port, load))
    results.put(arrived)


def cpu_secs(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=80.0)
    parser.add_argument("--secs", type=float, default=10.0)
    parser.add_argument("--direct", action="store_true", help="without the router")
    parser.add_argument("--out", type=Path, default=OUT / "text_rate")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    num_steps = min(MAX_STEPS, max(2, round(options.secs * 1e3 / options.step_ms)))
    load = Load(
        options.streams,
        options.step_ms / 1e3,
        num_steps,
        context.Array("d", num_steps, lock=False),
        context.Event(),
    )
    decode_port, prefill_port, router_port = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        (Path(name) / "config.json").write_text('{"vocab_size": 256, "model_type": "deepseek_v32"}')
        processes = {
            "front": context.Process(target=serve_decode, args=(Path(name), decode_port, load)),
        }
        if not options.direct:
            processes["prefill"] = context.Process(target=serve_prefill, args=(prefill_port,), daemon=True)
            ports = (router_port, prefill_port, decode_port)
            processes["router"] = context.Process(target=serve_router, args=ports, daemon=True)
        for process in processes.values():
            process.start()
        try:
            report = measure(
                context, options, load, processes, decode_port if options.direct else router_port
            )
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.join(20)
    show(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(
        json.dumps({"facts": run_facts(), **report}, indent=1, default=str) + "\n"
    )


def measure(
    context: Any, options: argparse.Namespace, load: Load, processes: dict[str, SpawnProcess], port: int
) -> dict[str, Any]:
    wait_for_health(port)
    results = context.Queue()
    client = context.Process(target=run_client, args=(port, load, results), daemon=True)
    client.start()
    if not load.all_arrived.wait(120):
        raise SystemExit("not all streams reached the engine within 120 s")
    pids = {name: process.pid for name, process in processes.items() if name != "prefill"}
    pids |= {"engine": children_of(pids["front"])[-1], "client": client.pid}
    before = {name: cpu_secs(pid) for name, pid in pids.items()}
    while load.step_began[load.num_steps - 1] == 0.0:
        time.sleep(0.05)
    time.sleep(0.5)
    used = {name: cpu_secs(pid) - before[name] for name, pid in pids.items()}
    arrived = results.get(timeout=120)
    began = np.array(load.step_began[:])
    latency_ms = (arrived - began[None, :]) * 1e3
    num_tokens = int(np.isfinite(arrived).sum())
    secs = float(np.nanmax(arrived) - began[0])
    return {
        "streams": load.num_streams,
        "step_ms": load.step_secs * 1e3,
        "through": "front" if options.direct else "front and router",
        "offered_tokens_a_second": load.num_streams / load.step_secs,
        "tokens_a_second": num_tokens / secs,
        "lost": int(arrived.size - num_tokens),
        "latency_ms": {p: float(np.nanpercentile(latency_ms, p)) for p in (50, 90, 99, 100)},
        "cpu_us_a_token": {name: spent * 1e6 / num_tokens for name, spent in used.items()},
    }


def wait_for_health(port: int) -> None:
    import httpx

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"nobody serves at port {port} within 120 s")


def show(report: dict[str, Any]) -> None:
    table = Table(*("through", "streams", "step, ms", "offered/s", "tokens/s", "p50", "p99", "max, ms"))
    latency = report["latency_ms"]
    table.add_row(
        report["through"],
        str(report["streams"]),
        f"{report['step_ms']:.0f}",
        f"{report['offered_tokens_a_second']:,.0f}",
        f"{report['tokens_a_second']:,.0f}",
        *(f"{latency[p]:.1f}" for p in (50, 99, 100)),
    )
    console = Console(width=140)
    console.print(table)
    console.print(
        "CPU, us a token: " + ", ".join(f"{n} {v:.1f}" for n, v in report["cpu_us_a_token"].items())
    )


if __name__ == "__main__":
    main()
