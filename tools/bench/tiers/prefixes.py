"""Sends turns behind prefixes that lie in a known tier, and keeps the times of those that were found there.

A turn is a prompt of a prefix and of tokens that no prompt had before. Before each turn its prefix is brought
to the tier that is measured:

- device: turns behind the other prefixes that are measured are sent first. All stay on the GPU, whose pool
  must hold them; what a CPU's caches have of the turn is what they have of it in other tiers.
- host: turns behind other prefixes are sent first, with as many tokens as the prefill node's KV pool has.
- decode: the same turns, and then /flush_cache, which empties the prefill node.
- storage, computed: /flush_cache. The pair's ``--read-held`` and ``--kv-store`` decide which of the three is
  found then.
- idle: dense turns behind other prefixes are sent first, with as many tokens as the larger of the decode
  node's device pool and index pool has. So the decode node has the prefix in main memory alone
  (``--idle-keys host``).

The decode node holds the prefix in every case, in the turn's mode. So the prefill node pushes the same in
each tier: the turn's own tokens, and what is behind the prefix's last whole page. A turn whose prefix was
found in another tier, or was not held, counts as ``astray``, and its time does not count.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import httpx

from hisparse_pd.engine.phases import DECODE_PHASES
from tools.bench.facts import spread
from tools.bench.pair import METRICS_TIMEOUT_SECS, Pair
from tools.bench.serve import row_of
from tools.bench.streamed_load import Client, EndpointError, Record
from tools.bench.tiers.prompts import PREFIX, TURN, Prompts

Tier = Literal["device", "host", "decode", "storage", "computed", "idle"]
ANSWER_TOKENS: Final = 4
POLL_SECS: Final = 0.2
FETCHED_COUNTER: Final = "held_fetched_tokens_total"
COUNTED_SECS: Final = 2.0
"""Longest time after which a node's counter shows what a turn has done."""


class Prefix(NamedTuple):
    """Prefixes of different numbers have nothing in common."""

    number: int
    num_tokens: int


class Cell(NamedTuple):
    """A case that is measured with several turns. ``hisparse``: a key of ``serve.HISPARSE``."""

    tier: Tier
    context: int
    hisparse: str


@dataclass
class Turns:
    """Sends turns to one pair, one after the other."""

    client: Client
    prompts: Prompts
    pair: Pair
    turn_tokens: int
    page_size: int
    pool_tokens: int
    """Token slots of the prefill node's KV pool."""
    contexts: Sequence[int]
    device_tokens: int = 0
    """Token slots of the larger of the decode node's device pool and index pool."""
    num_sent: int = field(default=0, init=False)

    @property
    def prefixes(self) -> dict[int, Prefix]:
        """The prefixes that are measured, by their length."""
        return {context: Prefix(number, context) for number, context in enumerate(self.contexts)}

    def others(self, pool_tokens: int) -> list[Prefix]:
        """Prefixes of the longest context that fill a pool of so many tokens, so that it has no room for
        another one."""
        longest = max(self.contexts)
        count = -(-pool_tokens // longest)
        return [Prefix(len(self.contexts) + number, longest) for number in range(count)]

    async def send(self, prefix: Prefix, hisparse: str) -> Record:
        """Send a turn behind ``prefix``. Raises EndpointError if it fails."""
        self.num_sent += 1
        prompt = self.prompts.tokens(prefix.num_tokens, PREFIX, prefix.number)
        prompt += self.prompts.tokens(self.turn_tokens, TURN, self.num_sent)
        record = await self.client.send(self.prompts.body(prompt, ANSWER_TOKENS, hisparse))
        if record.error_class:
            raise EndpointError(record.error_class, f"{record.error_class}: {record.error}")
        return record

    # --- where prefixes lie --------------------------------------------------------------------------

    async def lay(self, modes: Sequence[str], *, with_others: bool) -> None:
        """Have the decode node hold all prefixes in these modes, and the prefill node cache them."""
        for prefix in self.prefixes.values():
            for mode in modes:
                await self.send(prefix, mode)
        for other in self.others(self.pool_tokens) if with_others else ():
            await self.send(other, modes[0])

    async def wait_for_store(self) -> None:
        """Wait until the prefixes have been written to the store."""
        num_tokens = sum(context // self.page_size * self.page_size for context in self.contexts)
        while self.pair.counter(self.pair.prefill_url, "store_put_tokens_total") < num_tokens:
            await asyncio.sleep(POLL_SECS)

    async def bring(self, cell: Cell) -> None:
        """Bring the prefix of a cell to the tier."""
        if cell.tier in ("device", "decode"):
            for context, prefix in self.prefixes.items():
                if context != cell.context:
                    await self.send(prefix, cell.hisparse)
        match cell.tier:
            case "device":
                pass
            case "host":
                for other in self.others(self.pool_tokens):
                    await self.send(other, cell.hisparse)
            case "idle":
                for other in self.others(self.device_tokens):
                    await self.send(other, "false")
            case _:
                url = f"{self.pair.prefill_url}/flush_cache"
                httpx.post(url, timeout=METRICS_TIMEOUT_SECS, trust_env=False).raise_for_status()

    # --- what is measured ----------------------------------------------------------------------------

    async def measure(self, cell: Cell, repeats: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the figures of a cell after each of its turns, until ``repeats`` turns found the prefix in
        the cell's tier, or twice as many were sent. A first turn warms up and does not count; prefixes that
        are computed need none, because ``lay`` has computed them."""
        prefix = self.prefixes[cell.context]
        if cell.tier != "computed":
            await self.bring(cell)
            await self.send(prefix, cell.hisparse)
        records: list[Record] = []
        come_back: list[int] = []
        num_right = 0
        while num_right < repeats and len(records) < 2 * repeats:
            await self.bring(cell)
            num_before = self._num_come_back(cell)
            records.append(await self.send(prefix, cell.hisparse))
            come_back.append(await self._come_back(cell, num_before))
            figures = self.figures(cell, records, come_back)
            num_right = len(records) - figures["astray"]
            yield figures

    def _num_come_back(self, cell: Cell) -> int:
        """Return how many tokens have come back to the decode node's device so far; 0 where that is not what
        a cell measures."""
        return self.pair.counter(self.pair.decode_url, FETCHED_COUNTER) if cell.tier == "idle" else 0

    async def _come_back(self, cell: Cell, num_before: int) -> int:
        """Return how many tokens have come back for a turn. The counter may be late."""
        deadline = time.monotonic() + COUNTED_SECS
        num_tokens = 0
        while cell.tier == "idle" and not num_tokens and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECS)
            num_tokens = self._num_come_back(cell) - num_before
        return num_tokens

    def figures(self, cell: Cell, records: Sequence[Record], come_back: Sequence[int] = ()) -> dict[str, Any]:
        """Return the figures of a cell, JSON-able. ``come_back``: tokens that came back to the decode node's
        device for each record; not needed for other tiers than "idle"."""
        num_tokens = cell.context // self.page_size * self.page_size
        counts = come_back or [0] * len(records)
        pairs = zip(records, counts, strict=True)
        right = [record for record, num in pairs if is_from(cell.tier, num_tokens, record, num)]
        return {
            **cell._asdict(),
            "prefix_tokens": num_tokens,
            "astray": len(records) - len(right),
            "ttft_secs": spread([record.ttft_secs for record in right]) if right else None,
            "outside_secs": spread(list(map(outside_secs, right))) if right else None,
            "phase_secs": {
                name: statistics.median(record.phase_secs.get(name, 0.0) for record in right)
                for name in dict.fromkeys(name for record in right for name in record.phase_secs)
            },
            "requests": [row_of(record) for record in records],
        }


def is_from(tier: Tier, num_tokens: int, record: Record, num_come_back: int = 0) -> bool:
    """Return whether a turn's prefix was found in this tier alone, while the decode node held it.
    ``num_come_back``: tokens of it that came back to the decode node's device."""
    answer = record.served
    if answer is None or answer.num_held_tokens < num_tokens:
        return False
    if tier == "idle":
        return num_come_back >= num_tokens
    found = {name: count for name, count in answer.cached_by_tier.items() if count}
    return found == ({} if tier == "computed" else {tier: num_tokens})


def outside_secs(record: Record) -> float:
    """Return the part of a turn's TTFT that it did not spend in the decode engine."""
    return record.ttft_secs - sum(record.phase_secs.get(name, 0.0) for name in DECODE_PHASES)


def rows_of(
    cells: Sequence[Mapping[str, Any]], token_bytes: int, link_bytes_per_sec: float
) -> list[dict[str, Any]]:
    """Return the table's rows. ``token_bytes``: of one token in all layers. ``link_bytes_per_sec``: 0 if it
    is not known.

    The column "bound" is a time that the TTFT should not exceed: 1.3 times that of the prefix on the link,
    plus the TTFT with the prefix on the device.
    """
    on_device = {
        (cell["context"], cell["hisparse"]): cell["ttft_secs"]["median"]
        for cell in cells
        if cell["tier"] == "device" and cell["ttft_secs"]
    }
    rows = []
    for cell in cells:
        ttft, num_bytes = cell["ttft_secs"], cell["prefix_tokens"] * token_bytes
        cached_secs = on_device.get((cell["context"], cell["hisparse"]))
        # An idle hisparse prefix brings its keys alone: a few of these bytes.
        comes = cell["tier"] in ("host", "decode") or (cell["tier"], cell["hisparse"]) == ("idle", "false")
        link_secs = num_bytes / link_bytes_per_sec if comes and link_bytes_per_sec else None
        bound_secs = None if link_secs is None or cached_secs is None else 1.3 * link_secs + cached_secs
        rows.append(
            {
                "context": cell["context"],
                "hisparse": cell["hisparse"],
                "prefix": cell["tier"],
                "TTFT, ms": _millis(ttft["median"] if ttft else None),
                "min": _millis(ttft["min"] if ttft else None),
                "max": _millis(ttft["max"] if ttft else None),
                "outside engines, ms": _millis(cell["outside_secs"]["median"] if ttft else None),
                "turns": len(ttft["values"]) if ttft else 0,
                "astray": cell["astray"],
                "MB": num_bytes / 1e6 if comes or cell["tier"] == "storage" else None,
                "on the link, ms": _millis(link_secs),
                "bound, ms": _millis(bound_secs),
                "phases, ms": " ".join(
                    f"{name} {secs * 1e3:.1f}" for name, secs in cell["phase_secs"].items()
                ),
            }
        )
    return rows


def _millis(secs: float | None) -> float | None:
    return None if secs is None else secs * 1e3
