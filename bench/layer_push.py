"""What does it bring that KV leaves layer by layer? TTFT through a pair, and the tail behind a forward.

    python -m bench.layer_push [--model-path DIR] [--push-layers 0 1 2] [--num-threads N] [--out DIR]

Part one: a prefill node, a decode node and a router for each value of ``--push-layers``, all running, asked
in turns for the first token of the same prompts of random tokens. 0 sends each chunk whole once it is
computed. The difference is taken request by request, because a shared machine drifts. Computing and sending
compete for the cores here.

Part two: the node's own push over the real transport to a peer process, of a chunk of a model as deep as
DeepSeek-V3.2, behind a forward that only sleeps, which is what it is to the CPU when a GPU computes. The tail
is the time from the end of the forward until everything has landed: what a client would wait for. At last
the same with a forward over many short prompts, where batches could become too small.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

if not __package__:  # run as a file, the folder of this file would hide the package `transfer`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import httpx
import numpy as np
from rich.console import Console

from bench.facts import OUT, ROOT, run_facts, spread
from bench.layer_push_report import draw, print_report
from bench.pair import Pair, running_pair
from bench.transfer import PAGE_SIZE, WAIT_SECS, Link, Zone, make_zone, open_link, timed
from prefill_node.push import MIN_BATCH_BYTES, Pusher, SourceRegions
from prefill_node.registrations import Peer
from prefill_node.rooms import RoomRecord, RoomState
from protocol.messages import Bootstrap, RegionKind, Room
from transfer.engine import quiet_mooncake_logs
from transfer.extents import slots_to_extents
from transfer.plan import RegionView
from transfer.sender import Sender

PUSH_LAYERS = (0, 1, 2)
SEED = 20261121
REQUEST_TIMEOUT_SECS = 300.0
PAIR_OPTIONS = {
    "--page-size": 64,
    "--chunked-prefill-size": 2048,
    "--kv-pool-tokens": 16384,
    "--host-pool-tokens": 16384,
    "--device-pool-tokens": 16384,
    "--disable-prefix-cache": True,
}

# DeepSeek-V3.2's: items in bf16, indexer keys in fp8 with their scale.
NUM_LAYERS = 61
ITEM_BYTES = 1152
INDEX_BYTES = 132
TAIL_PUSH_LAYERS = (0, 1, 2, 4, 8, 16)
TAIL_MIN_BYTES = (0, 64 << 10, MIN_BATCH_BYTES, 1 << 20)

T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """How much is measured. ``layer_millis``: one layer of the sleeping forward."""

    prompt_tokens: tuple[int, ...]
    requests: int
    tail_tokens: int
    tail_repetitions: int
    layer_millis: tuple[float, ...]


FULL = Scale((1024, 4096, 8128), 21, 2048, 11, (1.0, 4.0))
QUICK = Scale((256,), 2, 256, 2, (0.5,))


# --- part one: a pair --------------------------------------------------------------------------------------


def measure_ttft(
    model_path: Path, push_layers: Sequence[int], num_threads: int, scale: Scale, console: Console
) -> list[dict[str, Any]]:
    """Seconds to the first token by prompt length and ``push_layers``, whose first is the reference."""
    rng = np.random.default_rng(SEED)
    rows = []
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=REQUEST_TIMEOUT_SECS, trust_env=False))
        pairs = {}
        for layers in push_layers:
            options = {**PAIR_OPTIONS, "--push-layers": layers, "--num-threads": num_threads}
            pairs[layers] = stack.enter_context(running_pair(model_path, options, console))
        for num_tokens in scale.prompt_tokens:
            secs: dict[int, list[float]] = {layers: [] for layers in push_layers}
            for repetition in range(scale.requests + 2):
                prompt = rng.integers(3, 250, num_tokens).tolist()
                for layers in rotated(push_layers, repetition):
                    elapsed = first_token_secs(client, pairs[layers], prompt)
                    if repetition >= 2:
                        secs[layers].append(elapsed)
            rows += [
                {
                    "num_tokens": num_tokens,
                    "push_layers": layers,
                    "secs": spread(secs[layers]),
                    "saved_secs": quartiles(
                        [
                            before - after
                            for before, after in zip(secs[push_layers[0]], secs[layers], strict=True)
                        ]
                    ),
                }
                for layers in push_layers
            ]
    return rows


def first_token_secs(client: httpx.Client, pair: Pair, prompt: list[int]) -> float:
    body = {
        "model": model_name(client, pair),
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "hisparse": True,
    }
    started = time.perf_counter()
    with client.stream("POST", f"{pair.router_url}/v1/completions", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if line.startswith("data: ") and '"error"' in line:
                raise RuntimeError(line)
            if line.startswith("data: "):
                elapsed = time.perf_counter() - started
                break
        else:
            raise RuntimeError("the stream ended without an event")
        for _ in response.iter_lines():
            pass
    return elapsed


def model_name(client: httpx.Client, pair: Pair) -> str:
    models = client.get(f"{pair.router_url}/v1/models").raise_for_status().json()
    return str(models["data"][0]["id"])


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles: of differences between two noisy requests the extremes say little."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


# --- part two: the tail ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a batch carries at least; see ``Pusher``."""

    push_layers: int
    min_batch_bytes: int = MIN_BATCH_BYTES


class Tail:
    """One forward after another from this process to the peer, by the node's own pusher and sender."""

    def __init__(self, link: Link, zone: Zone, num_slots: int) -> None:
        self._link, self._zone = link, zone
        kv_bytes = NUM_LAYERS * num_slots * ITEM_BYTES
        self._views = [
            {
                kind: RegionView(base, num_bytes, num_layers, slots, item_bytes)
                for kind, base, num_bytes, num_layers, slots, item_bytes in (
                    (RegionKind.KV_HOST, addr, kv_bytes, NUM_LAYERS, num_slots, ITEM_BYTES),
                    (
                        RegionKind.INDEX,
                        addr + kv_bytes,
                        link.num_bytes - kv_bytes,
                        NUM_LAYERS,
                        num_slots,
                        INDEX_BYTES,
                    ),
                    (RegionKind.AUX, addr, 1024, 1, 1, 1024),
                )
            }
            for addr in (link.src_addr, link.dst_addr)
        ]
        self._done = threading.Event()
        self._sender = Sender(link.engine, self._done.set)
        self._num_rooms = 0

    @staticmethod
    def num_bytes(num_slots: int) -> int:
        return NUM_LAYERS * num_slots * (ITEM_BYTES + INDEX_BYTES)

    def run(self, setting: Setting, layer_secs: float, num_prompts: int) -> dict[str, float]:
        """One forward over the zone's tokens, those of ``num_prompts`` prompts; what it took, in seconds."""
        src, dst = self._views
        source = SourceRegions(
            src[RegionKind.KV_HOST], src[RegionKind.INDEX], src[RegionKind.AUX], tuple(range(NUM_LAYERS))
        )
        pusher = Pusher(
            self._sender, source, PAGE_SIZE, WAIT_SECS, setting.push_layers, setting.min_batch_bytes
        )
        num_tokens = int(self._zone.dst_slots.size) // num_prompts
        records = [
            self._record(dst, first, num_tokens) for first in range(0, num_prompts * num_tokens, num_tokens)
        ]

        started = time.perf_counter()
        pushes = [pusher.plan(record, 0, num_tokens) for record in records]
        planned = time.perf_counter()
        hook_secs = 0.0
        for layer in range(NUM_LAYERS):
            time.sleep(layer_secs)
            hook_secs += timed(partial(pusher.layer_written, pushes, layer))
        computed = time.perf_counter()
        for push in pushes:
            pusher.push_rest(push)
            pusher.push_aux(push.record)
        num_batches = sum(record.num_writes_pending for record in records)
        transport_secs = self._wait(num_batches)
        landed = time.perf_counter()
        return {
            "tail": landed - computed,
            "hooks": hook_secs,
            "plan": planned - started,
            "forward": computed - planned,
            "transport": transport_secs,
            "batches": float(num_batches),
        }

    def _record(self, regions: dict[RegionKind, RegionView], first: int, num_tokens: int) -> RoomRecord:
        """The room of a prompt that lies in the zone from its token ``first`` on."""
        self._num_rooms += 1
        room = Room(self._num_rooms)
        page_ids = self._zone.page_ids[first // PAGE_SIZE : -(-(first + num_tokens) // PAGE_SIZE)].tolist()
        extents = slots_to_extents(self._zone.dst_slots[first : first + num_tokens])
        record = RoomRecord(room, RoomState.COMPUTING, 0.0, page_ids=page_ids, aux_slot_src=0)
        record.peer = Peer("peer", self._link.session, b"", PAGE_SIZE, regions, 0.0)
        record.bootstrap = Bootstrap(room, num_tokens, extents, extents, 0, hisparse=True)
        return record

    def close(self) -> None:
        self._sender.close(WAIT_SECS)

    def _wait(self, num_batches: int) -> float:
        """Until all completions are there; returns the transport's time of all of them."""
        secs = 0.0
        while num_batches:
            if not self._done.wait(WAIT_SECS):
                raise TimeoutError(f"{num_batches} batches without completion after {WAIT_SECS} s")
            self._done.clear()
            for completion in self._sender.poll():
                if not completion.ok:
                    raise RuntimeError(completion.error)
                num_batches -= 1
                secs += completion.secs
        return secs


def measure_tails(scale: Scale) -> Iterator[dict[str, Any]]:
    num_slots = 2 * scale.tail_tokens
    num_prompts = scale.tail_tokens // PAGE_SIZE
    by_layers = [Setting(layers) for layers in TAIL_PUSH_LAYERS]
    by_bytes = [Setting(0), *(Setting(1, num_bytes) for num_bytes in TAIL_MIN_BYTES)]
    with open_link(Tail.num_bytes(num_slots)) as link:
        for kind in ("fresh", "fragmented"):
            tail = Tail(link, make_zone(kind, scale.tail_tokens, num_slots), num_slots)
            cases = [(1, millis, by_layers) for millis in scale.layer_millis]
            if kind == "fragmented":
                cases.append((num_prompts, max(scale.layer_millis), by_bytes))
            for prompts, millis, settings in cases:
                runs: dict[Setting, list[dict[str, float]]] = {setting: [] for setting in settings}
                for repetition in range(scale.tail_repetitions + 1):
                    for setting in rotated(settings, repetition):
                        measured = tail.run(setting, millis / 1e3, prompts)
                        if repetition >= 1:
                            runs[setting].append(measured)
                for setting, values in runs.items():
                    yield {
                        "zone": kind,
                        "num_tokens": scale.tail_tokens,
                        "num_prompts": prompts,
                        "num_layers": NUM_LAYERS,
                        "layer_millis": millis,
                        **asdict(setting),
                        **{name: spread([value[name] for value in values]) for name in values[0]},
                    }
            tail.close()


def rotated(values: Sequence[T], turn: int) -> list[T]:
    first = turn % len(values)
    return [*values[first:], *values[:first]]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m bench.layer_push", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model-path", type=Path, default=ROOT / ".cache" / "tiny-v32", help="checkpoint directory"
    )
    parser.add_argument(
        "--push-layers",
        type=int,
        nargs="+",
        default=list(PUSH_LAYERS),
        help="the nodes' settings to compare, the reference first",
    )
    parser.add_argument("--num-threads", type=int, default=1, help="torch threads of each engine")
    parser.add_argument("--no-pair", action="store_true", help="leave out part one")
    parser.add_argument("--quick", action="store_true", help="small sizes; the numbers mean nothing")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="directory of layer_push.json and layer_push.png"
    )
    options = parser.parse_args(arguments)
    quiet_mooncake_logs()
    console = Console(width=None if sys.stdout.isatty() else 150)
    started = time.monotonic()
    scale = QUICK if options.quick else FULL
    report: dict[str, Any] = {
        "facts": run_facts(),
        "scale": asdict(scale),
        "num_threads": options.num_threads,
        "ttft": [],
    }
    if not options.no_pair:
        report["ttft"] = measure_ttft(
            options.model_path.resolve(), options.push_layers, options.num_threads, scale, console
        )
    report["tails"] = list(measure_tails(scale))
    report["total_secs"] = time.monotonic() - started

    print_report(console, report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "layer_push.json").write_text(json.dumps(report, indent=1))
    draw(report, options.out / "layer_push.png")
    console.print(f"{report['total_secs']:.0f} s; wrote layer_push.json and layer_push.png to {options.out}")
    return report


if __name__ == "__main__":
    main()
