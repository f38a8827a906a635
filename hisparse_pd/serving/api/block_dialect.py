"""Base of the dialects whose answers are a sequence of blocks: Anthropic's messages and OpenAI's responses.

Events of a stream open a block, let it grow and close it. The dialects in ``anthropic_answers.py`` and
``responses_answers.py`` write these events.

``answering.py`` calls a dialect's methods. For a stream it calls ``events`` with each delta. For a whole
answer it calls ``keep`` with each delta, which only reads it, and ``choice`` when the sample is finished.
Then it calls ``whole``, which each of the two dialects has: it shows all blocks that ``_reading`` has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import msgspec
from msgspec import Raw

from hisparse_pd.serving.api.answer_blocks import Block, Change
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.chat_reading import chat_readings
from hisparse_pd.serving.api.dialect import Dialect, Json
from hisparse_pd.serving.api.output import Delta, SampleOutput

_NO_CHOICE = Raw(msgspec.json.encode(None))


class BlockDialect(Dialect):
    """A dialect of requests with one sample. Subclasses have ``whole``, ``_begin`` and ``_show``."""

    end = b""  # the last event says by its type that it is the last

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        (self._reading,) = chat_readings(context, work)
        self._has_begun = False

    def keep(self, output: SampleOutput, delta: Delta) -> None:
        self._reading.feed(output, delta)

    def choice(self, output: SampleOutput) -> Raw:
        return _NO_CHOICE  # the dialect's ``whole`` shows the only sample, from ``_reading``

    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._begin(output)
        for change, block, text in self._reading.feed(output, delta):
            yield from self._show(change, block, text)

    @abstractmethod
    def _begin(self, output: SampleOutput) -> Iterator[Json]:
        """Return the events before the first block."""

    @abstractmethod
    def _show(self, change: Change, block: Block, text: str) -> Iterator[Json]:
        """Return the events of a change; ``text`` is what the block grew by."""
