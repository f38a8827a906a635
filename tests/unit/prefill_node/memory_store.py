"""A store of objects in this process, which fails as a test asks: it stands in for Mooncake Store."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from hisparse_pd.transfer.page_store import Pieces, Result, StoreError
from tests.waiting import WAIT_SECS


class MemoryStore:
    """Objects by key. Nodes share one, each of them through its own ``StoreThreads``."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        """Cleared while every call blocks."""
        self.reset()

    def reset(self) -> None:
        """Become empty and well."""
        self.objects: dict[str, bytes] = {}
        self.is_lost = False
        """Whether every call fails."""
        self.is_full = False
        self.fails_get = False
        """Whether reads end in an error after which bytes may still land."""
        self.before_get: Callable[[Sequence[str]], None] = lambda keys: None
        """Called with the keys of each read, after somebody may have asked what exists."""
        self.goes_on.set()
        self.removed: list[str] = []
        self.num_closed = 0

    def connect(self) -> None:
        self._answer()

    def _answer(self) -> None:
        assert self.goes_on.wait(4 * WAIT_SECS)
        if self.is_lost:
            raise StoreError("the store is lost")

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._answer()
        return [key in self.objects for key in keys]

    def get(self, keys: Sequence[str], memory: Sequence[Pieces]) -> list[Result]:
        self.before_get(keys)
        self._answer()
        if self.fails_get:
            return [Result.FAILED] * len(keys)
        return [self._get(key, pieces) for key, pieces in zip(keys, memory, strict=True)]

    def _get(self, key: str, pieces: Pieces) -> Result:
        if key not in self.objects:
            return Result.ABSENT
        rest = self.objects[key]
        for addr, size in zip(*pieces, strict=True):
            ctypes.memmove(addr, rest[:size], min(size, len(rest)))
            rest = rest[size:]
        return Result.DONE

    def put(self, keys: Sequence[str], memory: Sequence[Pieces]) -> list[Result]:
        self._answer()
        if self.is_full:
            return [Result.FULL] * len(keys)
        for key, pieces in zip(keys, memory, strict=True):
            content = b"".join(ctypes.string_at(addr, size) for addr, size in zip(*pieces, strict=True))
            self.objects.setdefault(key, content)
        return [Result.DONE] * len(keys)

    def remove(self, keys: Sequence[str]) -> None:
        self._answer()
        for key in keys:
            self.removed.append(key)
            self.objects.pop(key, None)

    def close(self) -> None:
        self.num_closed += 1
