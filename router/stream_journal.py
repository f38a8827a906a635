"""The journal of a stream: what the router remembers of it, so that another decode node can continue it.

``ResumableStream`` feeds a ``StreamJournal`` with all that the node sends, and shows the client what ``feed``
returns; the relay sends ``fields`` to the next node. All journals share one ``JournalBudget``. The decode
node sends lines between the events, which record the tokens that these are made of (``journal_lines.py``).
The events before a line are shown only once the line is here, so the journal is never behind the client. Only
nodes read the records: the router passes them to the next node as they came. For example, of

    data: {"choices": ...}      an event, which is shown once the next line is here
    :journal [...]              a line with the record of the event's tokens
    data: {"choices": ...}      an event that is never shown if the node dies here

the client gets the first event, and the next node makes the second one again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Raw

from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.serving.api.frame import PINGS
from hisparse_pd.serving.http.journal_lines import LEAVING, MARK, OVER

_MAX_JOURNAL_BYTES = MAX_BODY_BYTES - (1 << 20)
"""Limit for one journal, which the next node gets in the body of a request."""
_BLOCK_BYTES = 1 << 16
"""Bytes of records at which a block is full. A node decodes a block at a time."""
_MIN_TAKEN_BYTES = 1 << 10
"""Fewest bytes that are taken from the budget for records, so that not every record asks for its own."""
_LINE = b"\n" + MARK
_PINGS = frozenset(PINGS.values())
_MAX_PING_BYTES = max(map(len, _PINGS))


@dataclass
class JournalBudget:
    """The bytes that all journals of a router may have together."""

    max_bytes: int
    num_bytes: int = 0
    num_dropped: int = 0
    """Journals that were given up for lack of room; their streams cannot resume."""

    def take(self, num_bytes: int) -> bool:
        """Take bytes if they are left. Returns whether they were."""
        if self.num_bytes + num_bytes > self.max_bytes:
            return False
        self.num_bytes += num_bytes
        return True


class StreamJournal:
    """The journal of one stream, which reads what its nodes send, one node after the other."""

    def __init__(self, num_body_bytes: int, budget: JournalBudget) -> None:
        """``num_body_bytes``: size of the request's body, which is kept for as long and counts, too."""
        self._budget = budget
        self._blocks: list[bytearray] = []
        """Records, with a comma after each."""
        self._num_bytes = 0
        """Bytes taken from the budget."""
        self._num_free = 0
        """Bytes of those taken last that no record fills yet."""
        self._head: dict[str, object] = {
            "id": secrets.token_hex(16),
            "created": int(time.time()),
            "seed": secrets.randbits(63),
        }
        """Values drawn once for the answer, which every node of it must use."""
        self.num_records = 0
        """Records that have come, kept or not: the relay asks whether there were any, and whether one came
        since the last loss."""
        self.is_kept = True
        """False once it was given up for lack of room; the stream cannot resume then."""
        self.is_over = False
        """Whether the client has the end of the stream."""
        self._unshown = _Unshown()
        self.is_leaving = False
        """Whether the present node said that it shuts down."""
        self._grow(num_body_bytes)

    def fields(self, *, may_move: bool, num_resumes: int) -> Mapping[str, object]:
        """Return the body fields that let a node resume this stream."""
        head = self._head | {"may_move": may_move and self.is_kept, "num_resumes": num_resumes}
        records = b",".join(b"[" + block[:-1] + b"]" for block in self._blocks)
        return {"journal": head, "journal_records": Raw(b"[" + records + b"]")}

    @property
    def unshown(self) -> bytes:
        """The bytes that the present node sent after its last line. If its stream ends without the line OVER,
        this is the event with its error, if it could send one."""
        return bytes(self._unshown.data)

    def next_node(self) -> None:
        """Continue with another node. What the old one sent after its last line is never shown."""
        self._unshown = _Unshown()
        self.is_leaving = False

    def feed(self, chunk: bytes) -> bytes:
        """Read a chunk of a node's stream, which may be cut anywhere. Returns what the client may have
        now."""
        if self.is_over:
            return b""
        self._unshown.add(chunk)
        shown = bytearray()
        while (line := self._unshown.take_line()) is not None:
            shown += line.events_before
            if line.content == OVER:
                self.is_over = True
                break
            if line.content == LEAVING:
                self.is_leaving = True
            elif line.content.startswith(b"["):  # a record; other lines are of a later release
                self._add(line.content)
        shown += self._unshown.take_ping()
        return bytes(shown)

    def _add(self, record: bytes) -> None:
        self.num_records += 1
        num_bytes = len(record) + 1
        if self._num_free < num_bytes and not self._make_room(num_bytes):
            return
        self._num_free -= num_bytes
        block = self._blocks[-1]
        block += record
        block += b","

    def _make_room(self, num_bytes: int) -> bool:
        """Take room for a record of ``num_bytes``, and begin a block if the last one is full. Returns False
        if the budget has no such room. What was left of the room before stays unused."""
        num_bytes = max(num_bytes, _MIN_TAKEN_BYTES)
        if not self._grow(num_bytes):
            return False
        self._num_free = num_bytes
        if not self._blocks or len(self._blocks[-1]) >= _BLOCK_BYTES:
            self._blocks.append(bytearray())
        return True

    def close(self) -> None:
        """Give the journal's bytes back. May be called twice."""
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = self._num_free = 0
        self._blocks.clear()
        self.is_kept = False

    def _grow(self, num_bytes: int) -> bool:
        """Take bytes from the budget. Gives the journal up and returns False if there are not enough."""
        if not self.is_kept:
            return False
        if self._num_bytes + num_bytes > _MAX_JOURNAL_BYTES or not self._budget.take(num_bytes):
            self._budget.num_dropped += 1
            self.close()
            return False
        self._num_bytes += num_bytes
        return True


class _Line(NamedTuple):
    """A whole line of the journal."""

    events_before: bytes
    content: bytes
    """The bytes between ``MARK`` and the empty line."""


class _Unshown:
    """The bytes that a node sent after its last line. They begin where an event or a line begins, and may end
    anywhere."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._num_searched = 0
        """Bytes, from the start, at which no ``_LINE`` begins."""

    def add(self, chunk: bytes) -> None:
        self.data += chunk

    def take_line(self) -> _Line | None:
        """Take off the next line and the events before it; None if no line is whole."""
        data = self.data
        if data.startswith(MARK):
            mark = 0
        elif (before := data.find(_LINE, self._num_searched)) >= 0:
            mark = before + 1
        else:
            self._num_searched = max(self._num_searched, len(data) - len(_LINE) + 1)  # the rest may begin one
            return None
        if (end := data.find(b"\n\n", mark)) < 0:
            return None
        line = _Line(bytes(data[:mark]), bytes(data[mark + len(MARK) : end]))
        del data[: end + 2]  # cheap: a bytearray drops its front without moving the rest
        self._num_searched = 0
        return line

    def take_ping(self) -> bytes:
        """Take off all that is left if it is a ping, which has no line after it."""
        if len(self.data) > _MAX_PING_BYTES or bytes(self.data) not in _PINGS:
            return b""
        ping = bytes(self.data)
        self.data.clear()
        self._num_searched = 0
        return ping
