"""What a decode node says between the events of a stream to a router that keeps its journal.

Each line is a comment of server-sent events, which the router takes out. It ends a unit: the events between
two lines were made of the tokens that the second one names, and are shown once that is there. A line with
another word stands behind a unit, and a router that does not know it passes over it.
"""

from __future__ import annotations

JOURNAL_HEADER = b"x-hisparse-pd-journal"
"""Of a stream that has such lines, with the value 1; the router's alone."""

MARK = b":journal "
"""No event has it at the beginning of a line: in JSON there is no end of a line."""

OVER = b"over"
"""The stream is complete, or ended by an error that every node would give."""
LEAVING = b"leaving"
"""The node takes nothing new. The stream goes on here unless the router takes it to another node. This line
stands behind another one, with no event between them."""


def journal_line(content: bytes) -> bytes:
    """``content``: one of the words above, or a record as JSON, which is the nodes' affair."""
    return MARK + content + b"\n\n"
