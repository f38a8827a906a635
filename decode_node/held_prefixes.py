"""Owns the held prefixes: KV and indexer keys of requests that have ended, for the next that begins alike.

Nothing is copied to hold a prefix, nor for a request of the same mode to use it. The slots that a request
leaves stay where they are: whole pages of KV, in the host pool or, of a dense request, the device pool, and
of its indexer keys. The next request with the same tokens takes them over as its own first pages, as many as
they have in common, and the prefill node writes only what is behind them. One of the other mode takes over
the indexer keys, and copies the KV (``prefix_copies.py``). So a prefix serves one request at a time (where a
position is in a hot buffer is looked up by host slot), and comes back, longer, when that one ends.

Held slots are as good as free: ``make_room`` gives up the least recently used ones, from their ends, before
anybody who needs slots is told that there are none. So nobody is admitted later, or otherwise, for what is
held. Only ``LiveRequests`` adds a prefix: no remote write may land in it.

A page is found by a hash of all tokens up to its end, and of the model and its geometry, page size included.
Pure bookkeeping, as in ``pools.py``.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from decode_node.pools import Holding, PoolKind, Pools, SlotCounts
from service.engine_messages import pack_token_ids
from transfer.allocator import PoolIntegrityError
from vocabulary import Mode

PageKey = bytes
"""Of one whole page: equal keys mean equal tokens up to its end."""

TOKEN_BYTES: Final = 4
_KEY_BYTES: Final = 16

KV_POOL: Final = {Mode.HISPARSE: PoolKind.HOST, Mode.DENSE: PoolKind.DEVICE}
"""Where the KV of a request is, and of the prefix that it leaves."""
_OTHER: Final = {Mode.HISPARSE: Mode.DENSE, Mode.DENSE: Mode.HISPARSE}


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Of a prompt's whole pages, and the packed tokens behind the last of them."""

    page_size: int
    start: PageKey
    keys: tuple[PageKey, ...]
    tail: bytes

    @classmethod
    def of(cls, identity: bytes, prompt: bytes, page_size: int) -> PromptKeys:
        """``identity``: of what makes KV of equal tokens equal; ``prompt``: as of ``pack_token_ids``."""
        start = _key(b"", identity)
        keys = _chain(start, prompt, page_size)
        return cls(page_size, start, tuple(keys), prompt[len(keys) * page_size * TOKEN_BYTES :])

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * self.page_size + len(self.tail) // TOKEN_BYTES

    def with_output(self, output_token_ids: Sequence[int]) -> list[PageKey]:
        """The keys of the whole pages of the prompt and ``output_token_ids``."""
        last = self.keys[-1] if self.keys else self.start
        return [*self.keys, *_chain(last, self.tail + pack_token_ids(output_token_ids), self.page_size)]


def _chain(last: PageKey, token_ids: bytes, page_size: int) -> list[PageKey]:
    num_bytes = page_size * TOKEN_BYTES
    keys = []
    for start in range(0, len(token_ids) - num_bytes + 1, num_bytes):
        last = _key(last, token_ids[start : start + num_bytes])
        keys.append(last)
    return keys


def _key(last: PageKey, page: bytes) -> PageKey:
    return hashlib.blake2b(last + page, digest_size=_KEY_BYTES).digest()


@dataclass(eq=False, slots=True)
class HeldPrefix:
    """Pages with ``keys``, in order: as many of KV as of indexer keys."""

    mode: Mode
    keys: list[PageKey]
    holding: Holding


class HeldPrefixes:
    """All held prefixes. Each is a holding of ``pools`` in Stage.HELD, and nobody else changes it."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._prefixes: OrderedDict[HeldPrefix, None] = OrderedDict()
        """Least recently used first."""
        self._by_key: dict[Mode, dict[PageKey, dict[HeldPrefix, None]]] = {mode: {} for mode in Mode}
        """Those that have a page. Who has it has all before it."""
        self._num_pages = dict.fromkeys(Mode, 0)
        self.num_evicted_tokens = 0
        """That were given up for somebody who needed the slots, since the start."""

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def slots(self) -> SlotCounts:
        """What all of them hold."""
        page_size, num_pages = self._pools.page_size, self._num_pages
        num_host, num_device = (page_size * num_pages[mode] for mode in (Mode.HISPARSE, Mode.DENSE))
        return SlotCounts(host=num_host, device=num_device, index=num_host + num_device)

    @property
    def num_tokens(self) -> int:
        return self.slots.index

    def find(self, keys: Sequence[PageKey], mode: Mode) -> tuple[HeldPrefix, int] | None:
        """The prefix of ``mode`` that has most of ``keys``, and how many; of equals the latest."""
        by_key = self._by_key[mode]
        num_pages = bisect_left(keys, True, key=lambda key: key not in by_key)
        if not num_pages:
            return None
        return next(reversed(by_key[keys[num_pages - 1]])), num_pages

    def take(
        self, keys: Sequence[PageKey], mode: Mode, need: SlotCounts
    ) -> tuple[Holding, Holding | None] | None:
        """The longest beginning of ``keys`` that is held, for one request; what is behind it is given up.

        When its KV is in the pool of the other mode, that is a holding of its own, the second one: HELD, for
        the request to copy it. It is taken if it is twice as long as what ``mode`` left, because copies take
        time as well, and if ``need`` fits beside it.
        """
        found = self.find(keys, mode)
        other = self.find(keys, _OTHER[mode])
        num_own = 0 if found is None else found[1]
        if other is not None and 2 * num_own <= other[1] and self._fits_beside(need, other):
            found = other
        if found is None:
            return None
        prefix, num_pages = found
        self._cut(prefix, num_pages)
        self._forget(prefix)
        if prefix.mode is mode:
            return prefix.holding, None
        kind = KV_POOL[prefix.mode]
        return prefix.holding, self._pools.split(prefix.holding, [kind], prefix.holding.num_slots(kind))

    def _fits_beside(self, need: SlotCounts, found: tuple[HeldPrefix, int]) -> bool:
        prefix, num_pages = found
        num_slots = num_pages * self._pools.page_size
        copied = SlotCounts(host=num_slots) if prefix.mode is Mode.HISPARSE else SlotCounts(device=num_slots)
        return (self._pools.rounded(need) + copied).fits_in(self._pools.free + self.slots)

    def add(self, holding: Holding, keys: Sequence[PageKey], mode: Mode) -> None:
        """Hold ``holding``, which is HELD, KV and indexer keys of as many whole pages as there are ``keys``.

        Raises PoolIntegrityError when it is not.
        """
        num_slots = len(keys) * self._pools.page_size
        wanted = {KV_POOL[mode]: num_slots, PoolKind.INDEX: num_slots}
        if {kind: holding.num_slots(kind) for kind in holding.extents} != wanted:
            raise PoolIntegrityError(
                f"room {holding.room}: {holding.extents} are not {len(keys)} pages to hold"
            )
        prefix = HeldPrefix(mode, list(keys), holding)
        self._prefixes[prefix] = None
        for key in prefix.keys:
            self._by_key[mode].setdefault(key, {})[prefix] = None
        self._num_pages[mode] += len(prefix.keys)

    def make_room(self, missing: SlotCounts) -> None:
        """Give up as little as makes ``missing`` free, least recently used first, if it is held at all."""
        while True:
            free, page_size = self._pools.free, self._pools.page_size
            short = {kind: -(-(missing[kind] - free[kind]) // page_size) for kind in PoolKind}
            if max(short.values()) <= 0:
                return
            for prefix in self._prefixes:
                num_pages = max(short[kind] for kind in prefix.holding.extents)
                if num_pages > 0:
                    num_left = max(0, len(prefix.keys) - num_pages)
                    self.num_evicted_tokens += (len(prefix.keys) - num_left) * page_size
                    self._cut(prefix, num_left)
                    break
            else:
                return

    def flush(self) -> None:
        """Give up everything."""
        for prefix in tuple(self._prefixes):
            self._cut(prefix, 0)

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless the index and the counts say what is held."""
        num_pages = dict.fromkeys(Mode, 0)
        num_entries = 0
        for prefix in self._prefixes:
            num_pages[prefix.mode] += len(prefix.keys)
            num_entries += len(prefix.keys)
            num_slots = len(prefix.keys) * self._pools.page_size
            kinds = {KV_POOL[prefix.mode]: num_slots, PoolKind.INDEX: num_slots}
            if kinds != {kind: prefix.holding.num_slots(kind) for kind in prefix.holding.extents}:
                raise PoolIntegrityError(f"held prefix of room {prefix.holding.room}: not {num_slots} slots")
            if any(prefix not in self._by_key[prefix.mode].get(key, ()) for key in prefix.keys):
                raise PoolIntegrityError(f"held prefix of room {prefix.holding.room}: a page cannot be found")
        num_found = sum(len(found) for by_key in self._by_key.values() for found in by_key.values())
        if num_pages != self._num_pages or num_entries != num_found:
            raise PoolIntegrityError(f"held pages {num_pages}, counted as {self._num_pages}")

    def _cut(self, prefix: HeldPrefix, num_pages: int) -> None:
        """Keep the first ``num_pages`` pages; of none, nothing."""
        for key in prefix.keys[num_pages:]:
            self._unlink(prefix, key)
        self._num_pages[prefix.mode] -= len(prefix.keys) - num_pages
        del prefix.keys[num_pages:]
        if num_pages:
            self._pools.trim(prefix.holding, num_pages * self._pools.page_size)
        else:
            del self._prefixes[prefix]
            self._pools.release(prefix.holding)

    def _forget(self, prefix: HeldPrefix) -> None:
        """Its holding is somebody's from now on."""
        for key in prefix.keys:
            self._unlink(prefix, key)
        self._num_pages[prefix.mode] -= len(prefix.keys)
        del self._prefixes[prefix]

    def _unlink(self, prefix: HeldPrefix, key: PageKey) -> None:
        by_key = self._by_key[prefix.mode]
        del by_key[key][prefix]
        if not by_key[key]:
            del by_key[key]
