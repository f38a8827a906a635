"""What does a short prompt wait for behind long ones to the same decode node?

    python -m bench.fairness [--wire] [--out DIR]

Three prefixes of 5 GB are in the cache and leave at once; while they do, a prompt of 100 tokens is computed.
How long until its last byte has landed, after its forward? The node's own pusher and send queue say what goes
out in which order, with slices as shipped, and with whole batches, a batch a turn, as without them. Time is
a number here: a link moves bytes at its rate, and nothing else takes time. So the figures are the same on
every machine.

``--wire``: the same in small, over the real sender and Mooncake to a peer process; and what slices cost a
long prompt that has the link to itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, the folder of this file would hide the package `transfer`
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from bench.facts import OUT, run_facts, spread
from bench.transfer import PAGE_SIZE, WAIT_SECS, Link, open_link
from prefill_node.push import Pusher, SourceRegions
from prefill_node.registrations import Peer
from prefill_node.rooms import RoomRecord, RoomState
from protocol.messages import Bootstrap, Extent, RegionKind, Room
from transfer.engine import quiet_mooncake_logs
from transfer.plan import SLICE_BYTES, RegionView
from transfer.send_queue import Completion, Outcome, SendQueue, WriteBatch
from transfer.sender import Sender

# DeepSeek-V3.2's: items and indexer keys in fp8 with their scales.
NUM_LAYERS = 61
ITEM_BYTES = 656
INDEX_BYTES = 132
AUX_BYTES = 1 << 20
TOKEN_BYTES = NUM_LAYERS * (ITEM_BYTES + INDEX_BYTES)

NUM_LONG = 3
LONG_TOKENS = 104_000
SHORT_TOKENS = 100
FORWARD_SECS = 0.03
"""Of the short prompt, whose layers leave as they are computed."""
RATES = (0.5e9, 10e9, 50e9)
WHOLE = 1 << 60
"""Slices that cut nothing."""
SESSION = "peer"


@dataclass(frozen=True)
class WireScale:
    """How much goes over the wire."""

    long_tokens: int
    repetitions: int


FULL = WireScale(6_400, 7)
QUICK = WireScale(1_280, 1)


@dataclass(frozen=True)
class Discipline:
    """How batches are cut and how much of a room goes out in a turn; 0: a batch."""

    name: str
    slice_bytes: int
    turn_bytes: int


BATCHES = Discipline("whole batches", WHOLE, 0)
SLICES = Discipline("slices", SLICE_BYTES, SLICE_BYTES)


def make_pusher(sender: Any, base: int, num_slots: int, discipline: Discipline) -> Pusher:
    regions = make_regions(base, num_slots)
    source = SourceRegions(
        regions[RegionKind.KV_HOST],
        regions[RegionKind.INDEX],
        regions[RegionKind.AUX],
        tuple(range(NUM_LAYERS)),
    )
    return Pusher(
        sender,
        source,
        PAGE_SIZE,
        WAIT_SECS,
        layers_per_batch=1,
        slice_bytes=lambda session: discipline.slice_bytes,
    )


def make_regions(base: int, num_slots: int) -> dict[RegionKind, RegionView]:
    """KV, indexer keys and one aux slot, one behind the other."""
    shapes = (
        (RegionKind.KV_HOST, NUM_LAYERS, num_slots, ITEM_BYTES),
        (RegionKind.INDEX, NUM_LAYERS, num_slots, INDEX_BYTES),
        (RegionKind.AUX, 1, 1, AUX_BYTES),
    )
    regions = {}
    for kind, num_layers, slots, item_bytes in shapes:
        num_bytes = num_layers * slots * item_bytes
        regions[kind] = RegionView(base, num_bytes, num_layers, slots, item_bytes)
        base += num_bytes
    return regions


def num_bytes_of(num_slots: int) -> int:
    return num_slots * TOKEN_BYTES + AUX_BYTES


def make_record(
    room: int, num_tokens: int, session: str, regions: dict[RegionKind, RegionView]
) -> RoomRecord:
    """A room in fresh pages, on both sides."""
    pages = list(range(-(-num_tokens // PAGE_SIZE)))
    record = RoomRecord(Room(room), RoomState.COMPUTING, 0.0, page_ids=pages, aux_slot_src=0)  # type: ignore[arg-type]
    record.peer = Peer("peer", session, b"", PAGE_SIZE, regions, 0.0)
    whole = (Extent(0, num_tokens),)
    record.bootstrap = Bootstrap(room, num_tokens, whole, whole, 0, hisparse=True)
    return record


# --- in numbers -------------------------------------------------------------------------------------------


class VirtualLink:
    """A sender over a link of ``rate`` bytes per second, in virtual time."""

    def __init__(self, rate: float, turn_bytes: int) -> None:
        self.now = 0.0
        self.done_at: dict[Room, float] = {}
        """When the last batch of a room landed."""
        self.num_bytes = 0
        self._rate = rate
        self._queue = SendQueue(turn_bytes=turn_bytes)
        self.num_pending = self._queue.num_pending
        self.num_bytes_pending = self._queue.num_bytes_pending
        self.cancel = self._queue.cancel
        self._taken = self._queue.next(SESSION, 0.0)
        self._taken_until = 0.0

    def submit(self, session: str, batch: WriteBatch) -> None:
        self._queue.submit(session, batch)
        self._take()

    def poll(self) -> list[Completion]:
        return self._queue.take_completions(self.now)

    def overdue(self) -> list[Room]:
        return []

    def run_until(self, now: float) -> None:
        """Let the link work until ``now``, or until it has nothing to do."""
        while self._taken is not None and self._taken_until <= now:
            self.now = self._taken_until
            self.num_bytes += self._taken.writes.num_bytes
            self._queue.finish(self._taken, Outcome())
            self._taken = None
            self.done_at |= dict.fromkeys((end.room for end in self.poll()), self.now)
            self._take()
        self.now = max(self.now, now) if now < float("inf") else self.now

    def _take(self) -> None:
        if self._taken is None:
            self._taken = self._queue.next(SESSION, self.now)
            if self._taken is not None:
                self._taken_until = self.now + self._taken.writes.num_bytes / self._rate


def simulate(rate: float, discipline: Discipline) -> dict[str, Any]:
    """Seconds from the end of the short prompt's forward until it has landed, and what landed before it."""
    link = VirtualLink(rate, discipline.turn_bytes)
    num_slots = -(-LONG_TOKENS // PAGE_SIZE) * PAGE_SIZE
    pusher = make_pusher(link, 1 << 50, num_slots, discipline)
    regions = make_regions(1 << 51, num_slots)
    longs = [make_record(number, LONG_TOKENS, SESSION, regions) for number in range(NUM_LONG)]
    for record in longs:
        pusher.push_tokens(record, 0, LONG_TOKENS)
    short = make_record(NUM_LONG, SHORT_TOKENS, SESSION, regions)
    push = pusher.plan(short, 0, SHORT_TOKENS)
    for layer in range(NUM_LAYERS):
        link.run_until((layer + 1) / NUM_LAYERS * FORWARD_SECS)
        pusher.layer_written([push], layer)
    pusher.push_rest(push)
    pusher.push_aux(short)
    num_bytes_before = link.num_bytes
    while link.num_pending(short.room):
        link.run_until(link._taken_until)
    num_bytes_before = link.num_bytes - num_bytes_before
    link.run_until(float("inf"))
    return {
        "discipline": discipline.name,
        "rate": rate,
        "short_secs": link.done_at[short.room] - FORWARD_SECS,
        "bytes_until_short": num_bytes_before,
        "long_secs": [link.done_at[record.room] for record in longs],
    }


# --- on the wire ------------------------------------------------------------------------------------------


class Wire:
    """One run after another over the real sender to the peer process."""

    def __init__(self, link: Link, num_slots: int, discipline: Discipline) -> None:
        self._link = link
        self._long_tokens = num_slots
        self._sender = Sender(link.engine)
        self._sender._queue = SendQueue(turn_bytes=discipline.turn_bytes)
        self._pusher = make_pusher(self._sender, link.src_addr, num_slots, discipline)
        self._regions = make_regions(link.dst_addr, num_slots)
        self._num_rooms = 0

    def run(self, num_long: int, num_short_tokens: int) -> dict[str, float]:
        """Seconds until the short prompt, submitted whole behind the long ones, and all of them landed."""
        records = [self._record(self._long_tokens) for _ in range(num_long)]
        started = time.perf_counter()
        for record in records:
            self._pusher.push_tokens(record, 0, self._long_tokens)
        short = self._record(num_short_tokens)
        if num_short_tokens:
            self._pusher.push_tokens(short, 0, num_short_tokens)
            self._pusher.push_aux(short)
        short_secs = self._wait([short]) - started
        return {"short": short_secs, "all": self._wait(records) - started}

    def _wait(self, records: Sequence[RoomRecord]) -> float:
        while any(self._sender.num_pending(record.room) for record in records):
            time.sleep(0.0005)
        for completion in self._sender.poll():
            if not completion.ok:
                raise RuntimeError(completion.error)
        return time.perf_counter()

    def _record(self, num_tokens: int) -> RoomRecord:
        self._num_rooms += 1
        return make_record(self._num_rooms, num_tokens, self._link.session, self._regions)

    def close(self) -> None:
        self._sender.close(WAIT_SECS)


def measure_wire(scale: WireScale) -> dict[str, Any]:
    """In turns, because a shared machine drifts."""
    long_bytes = scale.long_tokens * TOKEN_BYTES
    with open_link(num_bytes_of(scale.long_tokens)) as link:
        wires = {how.name: Wire(link, scale.long_tokens, how) for how in (BATCHES, SLICES)}
        short: dict[str, list[float]] = {name: [] for name in wires}
        alone: dict[str, list[float]] = {name: [] for name in wires}
        for repetition in range(scale.repetitions + 1):
            for name, wire in wires.items():
                measured = wire.run(NUM_LONG, SHORT_TOKENS)["short"], wire.run(1, 0)["all"]
                if repetition:
                    short[name].append(measured[0])
                    alone[name].append(measured[1])
        for wire in wires.values():
            wire.close()
    return {
        "long_bytes": long_bytes,
        "short_secs": {name: spread(values) for name, values in short.items()},
        "alone_gb_per_sec": {
            name: spread([long_bytes / secs / 1e9 for secs in values]) for name, values in alone.items()
        },
    }


# --- the report -------------------------------------------------------------------------------------------


def print_report(console: Console, report: dict[str, Any]) -> None:
    title = (
        f"A prompt of {SHORT_TOKENS} tokens behind {NUM_LONG} prefixes of "
        f"{LONG_TOKENS * TOKEN_BYTES / 1e9:.1f} GB, from the end of its forward"
    )
    table = Table("GB/s", "", "short landed, s", "GB until then", "long ones landed, s", title=title)
    for row in report["simulated"]:
        table.add_row(
            f"{row['rate'] / 1e9:g}",
            row["discipline"],
            f"{row['short_secs']:.4f}",
            f"{row['bytes_until_short'] / 1e9:.3f}",
            ", ".join(f"{secs:.2f}" for secs in row["long_secs"]),
        )
    console.print(table)
    if (wire := report["wire"]) is not None:
        title = f"Over Mooncake on this machine, long ones of {wire['long_bytes'] / 1e6:.0f} MB"
        table = Table("", "short landed, ms", "one long alone, GB/s", title=title)
        for name, values in wire["short_secs"].items():
            table.add_row(name, figures(values, 1e3), figures(wire["alone_gb_per_sec"][name], 1.0))
        console.print(table)


def figures(values: dict[str, Any], unit: float) -> str:
    """Median and range."""
    median, low, high = (f"{values[name] * unit:,.2f}" for name in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__.splitlines()[0])
    parser.add_argument("--wire", action="store_true", help="also over Mooncake, which takes half a minute")
    parser.add_argument("--quick", action="store_true", help="a small wire; its numbers mean nothing")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of fairness.json")
    options = parser.parse_args(arguments)
    quiet_mooncake_logs()
    report: dict[str, Any] = {
        "facts": run_facts(),
        "slice_bytes": SLICE_BYTES,
        "simulated": [simulate(rate, how) for rate in RATES for how in (BATCHES, SLICES)],
        "wire": measure_wire(QUICK if options.quick else FULL) if options.wire else None,
    }
    print_report(Console(width=None if sys.stdout.isatty() else 150), report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fairness.json").write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
