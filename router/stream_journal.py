"""What the router remembers of a stream, so that it can go on at another node: body, records, what was shown.

The decode node says by lines between the events which tokens they are made of (``journal_lines``). What is
between two lines is shown once the second one is there, and so whatever the client has is in the journal.
Records are the nodes' own words, and go to the next node as they came.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Raw

from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.serving.api.frame import PINGS
from hisparse_pd.serving.http.journal_lines import LEAVING, MARK, OVER

_MAX_JOURNAL_BYTES = MAX_BODY_BYTES - (1 << 20)
"""Of one request; what is sent to the next nodes is a body."""
_BLOCK_BYTES = 1 << 16
"""Of records that a node decodes at a time."""
_PIECE_BYTES = 1 << 10
"""By which a journal grows; to ask for each record would cost as much as to keep it."""
_LINE = b"\n" + MARK
_PINGS = frozenset(PINGS.values())


@dataclass
class JournalBudget:
    """The bytes that all journals of a router may have together."""

    max_bytes: int
    num_bytes: int = 0
    num_dropped: int = 0
    """Journals for which there was no room, or not enough: their streams cannot go on."""

    def take(self, num_bytes: int) -> bool:
        fits = self.num_bytes + num_bytes <= self.max_bytes
        self.num_bytes += num_bytes * fits
        return fits


class StreamJournal:
    """The journal of one stream, which takes in what the nodes say, one after the other.

    ``num_body_bytes``: the size of its request, which is kept for as long.
    """

    def __init__(self, num_body_bytes: int, budget: JournalBudget) -> None:
        self._budget = budget
        self._blocks: list[bytearray] = []
        """Of records, with a comma behind each."""
        self._num_bytes = 0
        self._num_free = 0
        """Of these, for further records."""
        self._head: dict[str, object] = {
            "id": secrets.token_hex(16),
            "created": int(time.time()),
            "seed": secrets.randbits(63),
        }
        self.num_records = 0
        self.is_kept = True
        """False: it was too large, and the stream cannot go on."""
        self.is_over = False
        """The client has the end of the stream."""
        self.unshown = b""
        """What the node that has the stream now said behind its last line: its error, if it ended there."""
        self.is_leaving = False
        """The node that has the stream now is about to end, as it said itself."""
        self._grow(num_body_bytes)

    def fields(self, *, may_move: bool, num_resumes: int) -> Mapping[str, object]:
        """Of a body that says to the nodes with what to go on."""
        head = self._head | {"may_move": may_move and self.is_kept, "num_resumes": num_resumes}
        records = b",".join(b"[" + block[:-1] + b"]" for block in self._blocks)
        return {"journal": head, "journal_records": Raw(b"[" + records + b"]")}

    def next_node(self) -> None:
        """Another node has the stream; what the old one said behind its last line is not shown."""
        self.unshown, self.is_leaving = b"", False

    def feed(self, chunk: bytes) -> bytes:
        """What the client may have now of a node's stream, which comes in chunks that are cut anywhere."""
        if self.is_over:
            return b""
        data = self.unshown + chunk if self.unshown else chunk
        shown = b""
        start = 0
        while (mark := _next_line(data, start)) >= 0 and (end := data.find(b"\n\n", mark)) >= 0:
            content = data[mark + len(MARK) : end]
            shown = shown + data[start:mark] if shown else data[start:mark]
            start = end + 2
            if content == OVER:
                self.is_over = True
                break
            if content == LEAVING:
                self.is_leaving = True
            elif content.startswith(b"["):  # a record; what else there may be, this release does not know
                self._add(content)
        self.unshown = data[start:]
        if self.unshown and self.unshown in _PINGS:
            shown, self.unshown = shown + self.unshown, b""
        return shown

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
        num_bytes = max(num_bytes, _PIECE_BYTES)
        if not self._grow(num_bytes):
            return False
        self._num_free = num_bytes
        if not self._blocks or len(self._blocks[-1]) >= _BLOCK_BYTES:
            self._blocks.append(bytearray())
        return True

    def close(self) -> None:
        """The stream is over. May be called again."""
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = self._num_free = 0
        self._blocks.clear()
        self.is_kept = False

    def _grow(self, num_bytes: int) -> bool:
        if not self.is_kept:
            return False
        if self._num_bytes + num_bytes > _MAX_JOURNAL_BYTES or not self._budget.take(num_bytes):
            self._budget.num_dropped += 1
            self.close()
            return False
        self._num_bytes += num_bytes
        return True


def _next_line(data: bytes, start: int) -> int:
    """Where the next line of the journal begins, between ``start``, where an event or a line begins, and the
    end; -1: nowhere."""
    if data.startswith(MARK, start):
        return start
    before = data.find(_LINE, start)
    return before + 1 if before >= 0 else -1
