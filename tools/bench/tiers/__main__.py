"""Measures the time to the first token by where a prompt's beginning lies, and conversations with tiers and
without.

    python -m tools.bench.tiers --model-path DIR --context 65536 131072 --token-range 300 32000 \\
        --pairs tiers none store --host-cache-tokens 1310720 --conversations 16 \\
        --pair-options="--device cuda --kv-pool-tokens 270336"

It starts the ``--pairs`` one after the other, with ``--pair-options`` and:

| pair | options | measured |
| --- | --- | --- |
| tiers | --host-cache-tokens, --read-held all | prefixes on the device, in main memory, at the decode node |
| none | --host-cache-tokens 0, --read-held off | prefixes that are computed |
| store | as tiers, but --read-held off, --kv-store | prefixes in a store of its own on loopback, over TCP |

A turn has ``--turn-tokens`` new tokens behind a prefix of ``--context`` tokens, which the decode node holds
in every case, so that the turn alone is pushed. The usage says in which tier the prefix was found; turns
that found it elsewhere are counted as "astray", and not measured. "outside engines" is the part of the TTFT
in which the decode engine did not have the request: client, router, HTTP, JSON and token ids. "phases" are
the medians of the phases of docs/operations.md; those of the prefill node are within "landing". ``--tiers``
leaves others out. Host and decode need a KV pool that holds two prefixes: a prefill node reads no more than
half of its pool at a time. "idle" is measured if ``--tiers`` names it: the decode node, which
``--pair-options`` give ``--idle-keys host``, has the prefix in main memory alone.

``--conversations`` are held with the first two pairs. Each begins with ``--conversation-tokens``, and each
later turn has all that was said before and ``--turn-tokens`` more. Results are written after every cell.
Nothing begins after ``--seconds``, and what runs is cut. The status is 1 where something is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.prefill_node.sizing import bytes_per_token
from tools.bench.facts import OUT, gpus
from tools.bench.pair import METRICS_TIMEOUT_SECS, Pair, PairError, counters_in, running_pair
from tools.bench.report import make_console, table_of, write_report
from tools.bench.serve import HISPARSE, INTERRUPTED, add_number_option, add_token_range, at_least
from tools.bench.streamed_load import Client, EndpointError
from tools.bench.tiers import conversations
from tools.bench.tiers.prefixes import Cell, Tier, Turns, rows_of
from tools.bench.tiers.prompts import Prompts
from tools.bench.tiers.store import StoreMissingError, running_store

STOP_SECS: Final = 10.0
"""Part of --seconds in which the last pair stops."""
LEAST_SECS: Final = 20.0
"""A pair that would have less time is not started."""
TIERS_OF_PAIR: Final[dict[str, tuple[Tier, ...]]] = {
    "tiers": ("device", "host", "decode", "idle"),
    "none": ("computed",),
    "store": ("storage",),
}
ALL_TIERS: Final = tuple(tier for tiers in TIERS_OF_PAIR.values() for tier in tiers)


@dataclass
class Run:
    """One run: its time, and what it has found."""

    options: argparse.Namespace
    console: Console
    deadline: float
    """The time of ``time.monotonic`` at which the last pair has to stop."""
    found: dict[str, Any] = field(
        default_factory=lambda: {"token_bytes": 0, "link_bytes_per_sec": 0.0, "nodes": {}}
    )
    cells: list[dict[str, Any]] = field(default_factory=list)
    conversations: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """The parts that were not measured, and why."""

    @property
    def secs_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows_of(self.cells, self.found["token_bytes"], self.found["link_bytes_per_sec"])

    def write(self) -> None:
        report = {
            "gpus": gpus(),
            "options": vars(self.options),
            **self.found,
            "rows": self.rows,
            "missing": self.missing,
            "prefixes": self.cells,
            "conversations": self.conversations,
        }
        write_report(self.options.out, report)

    def miss(self, what: str) -> None:
        self.missing.append(what)
        self.console.print(what, style="yellow", markup=False, highlight=False)

    # --- pairs ---------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Start the pairs and measure with each what is measured with it."""
        for name in self.options.pairs:
            if self.secs_left < LEAST_SECS:
                self.miss(f"pair {name}: no time is left for it")
                self.write()
                continue
            try:
                with ExitStack() as services:
                    options = self.words(name, services)
                    start = running_pair(self.options.model_path, options, self.console, self.secs_left)
                    pair = services.enter_context(start)
                    asyncio.run(self.measure_with(name, pair))
            except (PairError, StoreMissingError, EndpointError, httpx.HTTPError) as error:
                self.miss(f"pair {name}: {type(error).__name__}: {error}")
            self.write()

    def words(self, name: str, services: ExitStack) -> list[str]:
        """Return the options of a pair. Starts the store that it needs. Raises StoreMissingError."""
        words = shlex.split(self.options.pair_options)
        host = f"--host-cache-tokens={self.options.host_cache_tokens if name != 'none' else 0}"
        words += [host, f"--read-held={'all' if name == 'tiers' else 'off'}"]
        if name == "store":
            address = services.enter_context(running_store(self.options.store_gib))
            words += [f"--kv-store={address}", "--kv-store-gib=0"]
        return words

    async def measure_with(self, name: str, pair: Pair) -> None:
        """Measure everything that one pair is for, until there is no time. Raises EndpointError."""
        settings = self._look_at(name, pair)
        url = f"{pair.router_url}/v1"
        async with Client(url, self.options.timeout_secs, asks_phases=True) as client:
            prompts = Prompts(await client.first_model(), self.options.token_range, self.options.seed)
            if self.options.context:
                turns = Turns(
                    client,
                    prompts,
                    pair,
                    self.options.turn_tokens,
                    page_size=settings["page_size"],
                    pool_tokens=settings["kv_pool_tokens"],
                    contexts=self.options.context,
                    device_tokens=max(settings[f"{pool}_pool_tokens"] for pool in ("device", "index")),
                )
                try:
                    async with asyncio.timeout(self.secs_left):
                        await self._measure_prefixes(name, turns)
                except TimeoutError:
                    self.miss(f"pair {name}: the time was over before all prefixes were measured")
            if self.options.conversations and name != "store":
                await self._converse(name, client, prompts)

    def _look_at(self, name: str, pair: Pair) -> dict[str, Any]:
        """Note what the nodes say of themselves. Returns the settings of both; where both have one, the
        prefill node's."""
        nodes = {"prefill": pair.prefill_url, "decode": pair.decode_url}
        said = {
            kind: httpx.get(f"{url}/server_info", timeout=METRICS_TIMEOUT_SECS, trust_env=False).json()
            for kind, url in nodes.items()
        }
        self.found["nodes"][name] = said
        settings: dict[str, Any] = said["decode"]["settings"] | said["prefill"]["settings"]
        spec = load_spec(
            self.options.model_path,
            settings["dtype"],
            settings["kv_cache_dtype"],
            device=settings["device"],
            indexer_cache_dtype=settings["indexer_cache_dtype"],
            load_format=settings["load_format"],
            has_row_checks=settings["verify_rows"],
        )
        self.found["token_bytes"] = bytes_per_token(spec)
        if self.options.link_gb_per_s is None:
            text = httpx.get(f"{pair.decode_url}/metrics", timeout=METRICS_TIMEOUT_SECS, trust_env=False).text
            gauge = "host_link_bytes_per_second"
            self.found["link_bytes_per_sec"] = counters_in(text, (gauge,))[gauge]
        else:
            self.found["link_bytes_per_sec"] = self.options.link_gb_per_s * 1e9
        return settings

    # --- cells ---------------------------------------------------------------------------------------

    async def _measure_prefixes(self, name: str, turns: Turns) -> None:
        tiers = [tier for tier in TIERS_OF_PAIR[name] if tier in self.options.tiers]
        await turns.lay(self.options.hisparse, with_others="host" in tiers)
        if "storage" in tiers:
            await turns.wait_for_store()
        for tier in tiers:
            for context in self.options.context:
                for mode in self.options.hisparse:
                    index = len(self.cells)
                    async for figures in turns.measure(Cell(tier, context, mode), self.options.repeats):
                        self.cells[index:] = [figures]
                    line = self.rows[-1]
                    text = ", ".join(f"{key} {value}" for key, value in line.items() if value is not None)
                    self.console.print(text, markup=False, highlight=False, soft_wrap=True)
                    self.write()

    async def _converse(self, name: str, client: Client, prompts: Prompts) -> None:
        plan = conversations.Plan(
            self.options.conversations,
            self.options.turns,
            self.options.conversation_tokens,
            self.options.turn_tokens,
            self.options.output_tokens,
            self.options.hisparse[0],
        )
        found = await conversations.converse(client, prompts, plan, self.deadline)
        self.conversations.append({"pair": name, **found})
        if not found["is_whole"]:
            self.miss(f"pair {name}: {found['num_ok']} turns of conversations were answered, not all")
        self.write()

    # --- on the console ------------------------------------------------------------------------------

    def show(self) -> None:
        if self.cells:
            rate = self.found["link_bytes_per_sec"] / 1e9
            title = f"Turns of {self.options.turn_tokens} tokens; {self.found['token_bytes']:,} bytes a token"
            title += f", link {rate:.1f} GB/s" if rate else ", no link known"
            self.console.print(table_of(title, self.rows))
        said = [conversations.row(each["pair"], each) for each in self.conversations if each["num_ok"]]
        if said:
            title = f"{self.options.conversations} conversations of {self.options.turns} turns"
            self.console.print(table_of(title, said))
        for what in self.missing:
            self.console.print(what, style="yellow", markup=False, highlight=False)


# --- the command ------------------------------------------------------------------------------------------


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.tiers",
        description=" ".join((__doc__ or "").split("\n\n")[0].split()),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, add_number = parser.add_argument, partial(add_number_option, parser)
    add("--model-path", type=Path, required=True, metavar="DIR", help="checkpoint of both nodes")
    add(
        "--pair-options",
        default="",
        metavar="WORDS",
        help="further options of hisparse-pd pair, as in a shell; begin with --pair-options=",
    )
    add(
        "--context",
        nargs="*",
        type=at_least(1),
        default=[65536, 131072],
        metavar="N",
        help="tokens of prefixes; none: conversations alone",
    )
    add(
        "--hisparse",
        nargs="+",
        choices=HISPARSE,
        default=["true", "false"],
        help="values of the field hisparse; the first one also for conversations",
    )
    add_number("--turn-tokens", 700, 1, "new tokens of a turn")
    add_number("--repeats", 3, 1, "turns of a cell that are measured")
    add_number("--host-cache-tokens", 262144, 1, "main memory of the prefill node, in tokens")
    add(
        "--pairs",
        nargs="+",
        choices=TIERS_OF_PAIR,
        default=["tiers", "none"],
        help="pairs that are started, one after the other",
    )
    add(
        "--tiers",
        nargs="+",
        choices=ALL_TIERS,
        default=[tier for tier in ALL_TIERS if tier != "idle"],
        help="where prefixes lie that are measured, as far as the pairs are for that",
    )
    add_number("--store-gib", 8, 1, "main memory of the store, in GiB")
    add(
        "--link-gb-per-s",
        type=float,
        metavar="RATE",
        help="rate of the link between GPU and main memory; default: what the decode node measured",
    )
    add_number("--conversations", 0, 0, "conversations at once; 0: none are held")
    add_number("--turns", 8, 1, "turns of a conversation")
    add_number("--conversation-tokens", 24576, 1, "tokens of a conversation's first prompt")
    add_number("--output-tokens", 64, 1, "tokens of an answer in a conversation")
    add_token_range(parser)
    add_number("--seed", 0, 0, "seed of prompts")
    add("--timeout-secs", type=float, default=120.0, metavar="SECS", help="time limit of a request")
    add("--seconds", type=float, default=600.0, metavar="SECS", help="time limit of the whole run")
    add("--out", type=Path, default=OUT / "tiers", help="JSON file, without its suffix")
    options = parser.parse_args(words)
    if not options.context and (not options.conversations or options.pairs == ["store"]):
        parser.error("nothing would be measured; give --context or --conversations")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write a report. Returns the exit status."""
    started = time.monotonic()
    options = parse(words)
    run = Run(options, make_console(), started + options.seconds - STOP_SECS)
    try:
        run.measure()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        run.show()
    print(f"wrote {options.out}.json")
    return int(bool(run.missing))


if __name__ == "__main__":
    sys.exit(main())
