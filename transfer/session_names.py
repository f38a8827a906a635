"""The names under which a transfer engine's Mooncake knows sessions over TCP.

Mooncake keeps what it looked up of a name for as long as it lives, and writes to the process that it found
there. Another process at the same session therefore needs another name: a zero in front of the port makes
one for the same address.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

MAX_REMEMBERED = 4096
"""Most sessions that are remembered; those used longest ago are forgotten. A session in use that is forgotten
costs another look-up, and nothing else."""


@dataclass(slots=True)
class _Session:
    """``num_zeros``: those in front of the port. ``instance_id``: the run of a node that has the session, as
    far as is known. ``is_used``: whether Mooncake was given the present name."""

    num_zeros: int
    instance_id: str = ""
    is_used: bool = False


class SessionNames:
    """Owns the names, none of which ever stands for two processes. Its methods may be called by any
    thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """The remembered sessions, those used longest ago first."""
        self._num_zeros = 0
        """Zeros of the next session. No forgotten one had a name with as many, so no name comes back."""

    def of(self, session: str) -> str:
        """Return the name for the next call of Mooncake."""
        with self._lock:
            known = self._find(session)
            known.is_used = True
            host, _, port = session.rpartition(":")
            return f"{host}:{'0' * known.num_zeros}{port}"

    def renew(self, session: str, instance_id: str) -> None:
        """Note which run of a node has ``session``, which gets a new name if that is another one than before.
        An empty ``instance_id``: that of a run which cannot be told from others."""
        with self._lock:
            known = self._find(session)
            if known.is_used and not (instance_id and known.instance_id == instance_id):
                known.num_zeros += 1
                known.is_used = False
            known.instance_id = instance_id

    def _find(self, session: str) -> _Session:
        known = self._sessions.setdefault(session, _Session(self._num_zeros))
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_REMEMBERED:
            _, forgotten = self._sessions.popitem(last=False)
            self._num_zeros = max(self._num_zeros, forgotten.num_zeros + 1)
        return known
