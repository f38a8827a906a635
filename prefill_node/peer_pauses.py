"""Which decode nodes are not read from for a while: those whose last read failed, came late or was wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import WrongItem
from hisparse_pd.prefill_node.registrations import Peer

PAUSE_SECS: Final = 10.0
"""Time for which a decode node is not read from after an error, a wrong row or a late answer."""


class PeerPauses:
    """The pauses of one engine's decode nodes, by session. ``set_aside``: counts wrong rows."""

    def __init__(self, set_aside: SetAside, clock: Callable[[], float]) -> None:
        self._set_aside = set_aside
        self._clock = clock
        self._until: dict[str, float] = {}

    def is_paused(self, peer: Peer) -> bool:
        """Return whether a node is not to be read from now."""
        return self._clock() < self._until.get(peer.session, 0.0)

    def pause(self, peer: Peer) -> None:
        """Let a node alone for PAUSE_SECS."""
        now = self._clock()
        self._until = {session: until for session, until in self._until.items() if until > now}
        self._until[peer.session] = now + PAUSE_SECS

    def note_wrong(self, peer: Peer, items: Sequence[WrongItem]) -> None:
        """Count rows that came wrong from a node, which is let alone if there are any."""
        for item in items:
            self._set_aside.count_wrong(
                "decode",
                f"the KV of layer {item.layer}, position {item.position}, that decode node "
                f"{peer.node_id} holds is not what was written (decode): its check is "
                f"{item.actual:#010x}, expected {item.expected:#010x}",
            )
        if items:
            self.pause(peer)
