"""Journal lines: what a decode node writes into a stream so that a router can resume it at another node.

Each line is a comment of server-sent events, which the router takes out of what clients get. A line holds a
record or a word. A record has the tokens of which the events since the line before were made. These events
and their record are a unit: the router shows the events only once it has the record. A word stands after a
unit; routers skip words that they do not know. ``serving/api/request_journal.py`` makes the records, and
``router/stream_journal.py``, which has an example of a stream, reads the lines. A record's line and a word's,
each with an empty line behind it:

    :journal [...]

    :journal over

"""

from __future__ import annotations

JOURNAL_HEADER = b"x-hisparse-pd-journal"
"""Response header of a stream with such lines, with the value 1; clients never get it."""

MARK = b":journal "
"""Beginning of a line. No event has it at the beginning of a line, since JSON has no line breaks."""

OVER = b"over"
"""Word for the end: the stream is complete, or ended by an error that every node would give."""
LEAVING = b"leaving"
"""Word for a node that shuts down. The stream continues there unless the router moves it to another node.
This line directly follows a record's line, so that it stands between units."""


def journal_line(content: bytes) -> bytes:
    """Make a line. ``content`` is one of the words above, or a record as JSON, which only nodes read."""
    return MARK + content + b"\n\n"
