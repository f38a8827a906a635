"""Measures answers over HTTP: SGLang's server, then our router with a prefill and a decode node on one GPU.

``__main__.py`` calls ``http_turn`` for each turn, in which one engine has the GPU; ``Run`` gathers figures
and notes. ``tools.bench.serve`` is the client of both engines, with the same token ids. A turn starts one
server and measures points (``points``): for each number of clients once with prompts that are new to the
server, then with prompts that it has all seen. The latter are asked for twice, and the second time counts:
at the first some of SGLang's answers took 12 s. A point whose requests failed, or whose prompts
were cached otherwise than its name says, is no figure: it is dropped, and a line says so.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from hisparse_pd.base.ports import free_port
from tools.bench import serve
from tools.bench.beside_sglang.comparison import http_cell
from tools.bench.beside_sglang.guest import CHUNK, FIRST_ID, NUM_LAST_IDS, NUM_SPARE, tokens_of_request
from tools.bench.beside_sglang.run import Run, log_end, wait_for_gpu
from tools.bench.beside_sglang.turns import Turn
from tools.bench.pair import PairError, running_pair, wait_healthy
from tools.bench.streamed_load import EndpointError

LEAST_NEW: Final = 3
LEAST_CACHED: Final = 8
"""Least requests of a point: LEAST_NEW with new prompts, LEAST_CACHED with cached ones."""
CACHED_SHARE: Final = 0.95
"""Least share of cached tokens in prompts that were all seen; in new prompts it is at most 1 minus this."""
STOP_SECS: Final = 10.0
"""Part of a turn's time that is left for stopping the server."""
BUSY_SHARE: Final = 0.8
"""Share of its time that the client computes, above which it may be the limit itself."""


class ServerError(Exception):
    """A server did not start."""


@dataclass(frozen=True)
class Point:
    """Requests of one number of clients."""

    cached: Literal["nothing", "all"]
    """How much of its prompts the server has seen before."""
    num_clients: int
    num_requests: int
    num_prompts: int
    """Different prompts, which the requests have in turn."""
    seed: int
    """Seed of the prompts; points with the same one have the same prompts."""


WARM_UP: Final = Point("nothing", num_clients=2, num_requests=4, num_prompts=2, seed=1000)
"""Requests before the first point: two new prompts, and both again."""


def points(clients: Sequence[int]) -> list[Point]:
    """Return the points in order. Cached prompts are those of the last point with new ones."""
    new = [
        Point(
            cached="nothing",
            num_clients=number,
            num_requests=max(LEAST_NEW, number),
            num_prompts=max(LEAST_NEW, number),
            seed=seed,
        )
        for seed, number in enumerate(sorted(clients))
    ]
    return new + [
        replace(new[-1], cached="all", num_clients=number, num_requests=max(LEAST_CACHED, 2 * number))
        for number in sorted(clients)
    ]


def http_turn(run: Run, turn: Turn, secs: float) -> None:
    """Give ``turn`` the GPU, and add its points to ``run``."""
    deadline = time.monotonic() + secs - STOP_SECS
    server = _our_server if turn.engine == "ours" else _sglang_server
    with run.timed(turn.name):
        try:
            with server(run, turn, secs - STOP_SECS) as url:
                asyncio.run(measure_points(run, turn, url, deadline))
        except (ServerError, PairError) as error:
            run.note(f"{turn.name}: {error}")


@contextmanager
def _sglang_server(run: Run, turn: Turn, secs: float) -> Iterator[str]:
    """Run SGLang's server; yields its URL. Raises ServerError."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = run.guest_turn(turn, port)
    with run.started(turn.name, command, run.guest_environment()) as (process, path):
        if not wait_healthy(url, secs, lambda: process.poll() is not None):
            raise ServerError(f"not healthy after {secs:.0f} s or ended; {log_end(path)}")
        yield url


@contextmanager
def _our_server(run: Run, turn: Turn, secs: float) -> Iterator[str]:
    """Run our pair and its router; yields the router's URL. Raises PairError."""
    try:
        with running_pair(run.options.model, pair_options(run.options, turn), run.console, secs) as pair:
            yield pair.router_url
    finally:
        wait_for_gpu()  # for SGLang's server, ``Run.started`` does this


def pair_options(options: argparse.Namespace, turn: Turn) -> list[str]:
    """Return the options of ``hisparse-pd pair`` whose pools hold as many requests as SGLang's."""
    largest, of_request = max(turn.batches), tokens_of_request(turn.context, options.output_tokens)
    num_tokens = (largest + NUM_SPARE) * of_request
    words: dict[str, Any] = {
        "device": "cuda",
        "mem-fraction-static": 0.42,  # two nodes share the GPU
        "kv-cache-dtype": "fp8_e4m3",
        "context-length": of_request,
        "max-running-requests": largest + NUM_SPARE,
        "chunked-prefill-size": CHUNK,
        "kv-pool-tokens": num_tokens,
        "device-pool-tokens": num_tokens,
        "host-pool-tokens": num_tokens,
        "device-buffer-size": options.buffer,
        "stream-interval": options.stream_interval,
    }
    return [*(f"--{name}={value}" for name, value in words.items()), "--mps"]


async def measure_points(run: Run, turn: Turn, url: str, deadline: float) -> None:
    """Add the cells of the turn's points to ``run``, those until ``deadline``."""
    planned = [point for point in points(turn.batches) if _can_be(turn, point)]
    if len(planned) < 2 * len(turn.batches):
        run.note(f"{turn.name}: nothing is cached in this mode, so there are no points with cached prompts")
    for point in (WARM_UP, *planned):
        name = f"{turn.name}, {point.cached} cached, {point.num_clients} clients"
        try:
            async with asyncio.timeout(deadline - time.monotonic()) as limit:
                for _ in range(2 if point.cached == "all" else 1):
                    found = await _measured(run, turn, point, url, deadline - time.monotonic())
        except EndpointError as error:
            run.note(f"{name}: {error}")
            continue
        except TimeoutError:
            assert limit.expired()
            run.note(f"{name}: the turn reached its limit")
            return
        if point is WARM_UP:
            continue
        if problem := problem_of(point, found):
            run.note(f"{name}: dropped, {problem}")
            continue
        if found["client_cpu_share"] > BUSY_SHARE:
            run.note(f"{name}: the client was busy for {found['client_cpu_share']:.0%} of the time")
        run.http.append(http_cell(turn, point.cached, found))


def _can_be(turn: Turn, point: Point) -> bool:
    """Return whether the server can have the point's prompts cached: SGLang's caches none with hisparse."""
    return point.cached == "nothing" or turn.engine == "ours" or turn.mode == "dense"


async def _measured(run: Run, turn: Turn, point: Point, url: str, secs: float) -> dict[str, Any]:
    words = {
        "url": f"{url}/v1",
        # "none" leaves the field out, which is one of our API.
        "hisparse": {"dense": "false", "hisparse": "true"}[turn.mode] if turn.engine == "ours" else "none",
        "concurrency": point.num_clients,
        "num-requests": point.num_requests,
        "distinct-prompts": point.num_prompts,
        "seed": point.seed,
        "warmup": 0,
        "input-tokens": turn.context,
        "output-tokens": run.options.output_tokens,
        "timeout-secs": max(1.0, secs),
    }
    options = serve.parse([f"--{name}={value}" for name, value in words.items()])
    options.token_range = [FIRST_ID, run.vocabulary - NUM_LAST_IDS]
    measured: dict[str, Any] = {"points": [], "requests": []}
    await serve.measure(options, measured, run.console)
    found: dict[str, Any] = measured["points"][0]
    return found


def problem_of(point: Point, found: Mapping[str, Any]) -> str:
    """Return why this is no figure of its point, or an empty string."""
    if found["errors"]:
        [(name, number), *_] = found["errors"].items()
        failed = found["num_requests"] - found["num_ok"]
        of_them = f"{failed} of {found['num_requests']} requests failed"
        return f"{of_them}, {number} x {name}: {found['error_samples'][name]}"
    share = found["mean_cached_tokens"] / found["mean_prompt_tokens"]
    is_as_planned = share >= CACHED_SHARE if point.cached == "all" else share <= 1 - CACHED_SHARE
    return "" if is_as_planned else f"{share:.1%} of the prompts' tokens were cached"
