"""The prefixes on the device that waiting requests keep in use until they begin or end.

``HostTier`` and ``DecodeTier`` bring pages there for a waiting request, which must still find them when its
turn comes. Both share one ``Pins`` with their copies (``copies_up.py``); it owns these uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.protocol.messages import Room


@dataclass(eq=False, slots=True)
class _Pin:
    num_pages: int
    """Pages that the request's whole prompt needs on the device."""
    prefix: Prefix | None
    """The prefix that it keeps in use."""
    is_let_go: bool = False
    """Whether ``let_go_all`` has let go of that: no other request need wait for this one to begin."""


class Pins:
    """The pins of one engine's waiting requests."""

    def __init__(self, prefixes: PrefixTree) -> None:
        self._prefixes = prefixes
        self._pins: dict[Room, _Pin] = {}

    @property
    def hold_others_back(self) -> bool:
        """Whether a request that does not fit beside those that are pinned should wait for them to begin."""
        return not all(pin.is_let_go for pin in self._pins.values())

    def __contains__(self, room: Room) -> bool:
        """Whether a request is pinned."""
        return room in self._pins

    def fits(self, room: Room, num_pages: int, num_usable: int) -> bool:
        """Return whether a request whose prompt needs ``num_pages`` may be pinned: all pinned ones fit at
        once into ``num_usable`` pages, so that none of them waits for pages that another one keeps."""
        others = sum(pin.num_pages for other, pin in self._pins.items() if other != room)
        return others + num_pages <= num_usable

    def put(self, room: Room, num_pages: int, prefix: Prefix | None = None) -> None:
        """Pin a request, which uses ``prefix`` from now on. What it has kept until now is let go."""
        self.release(room)
        self._pins[room] = _Pin(num_pages, prefix)

    def keep(self, room: Room, prefix: Prefix | None) -> None:
        """Let a pinned request keep ``prefix``, which it uses from now on, instead of what it has kept."""
        self.put(room, self._pins[room].num_pages, prefix)

    def prefix(self, room: Room) -> Prefix | None:
        """Return what a request keeps in use, or None."""
        pin = self._pins.get(room)
        return None if pin is None else pin.prefix

    def release(self, room: Room) -> None:
        """Let go of what a request keeps, when it begins or ends."""
        self._let_go(self._pins.pop(room, None))

    def let_go_all(self) -> bool:
        """Let go of all that is kept. The requests stay pinned, so that nothing takes the place of their
        pages only to be let go of, too, but they hold no others back: nobody knows when they begin. Returns
        whether anything has changed."""
        has_changed = self.hold_others_back
        for pin in self._pins.values():
            self._let_go(pin)
            pin.is_let_go = True
        return has_changed

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes in use, once for each use."""
        yield from (pin.prefix for pin in self._pins.values() if pin.prefix is not None)

    def _let_go(self, pin: _Pin | None) -> None:
        if pin is not None:
            prefix, pin.prefix = pin.prefix, None
            self._prefixes.let_go(prefix)
