"""An answer as a sequence of blocks, each of reasoning, of text, or one call of a tool.

Anthropic's messages and OpenAI's responses are both shown so, in a stream by events that open a block, let it
grow and close it. This module knows the blocks; a subclass writes them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

import msgspec
from msgspec import Raw

from hisparse_pd.api.answers import Dialect
from hisparse_pd.api.app import Work
from hisparse_pd.api.chat_format import Markup
from hisparse_pd.api.chat_reading import ChatReading, ends_for_calls
from hisparse_pd.api.detokenizer import TokenBytes
from hisparse_pd.api.message_parts import PartKind
from hisparse_pd.api.output import Delta, Finish, SampleOutput
from hisparse_pd.vocabulary import FinishReason

_NO_CHOICE = Raw(msgspec.json.encode(None))


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class Change(Enum):
    """What happens to a block."""

    OPENED = auto()
    GREW = auto()
    CLOSED = auto()


@dataclass(eq=False)
class Block:
    """``index``: among the blocks of the answer. ``name``: of a call's tool; its text is the arguments.

    ``is_cut``: the answer ended within it, for its length or in the middle of a call.
    """

    index: int
    kind: BlockKind
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]


class BlockAnswer(Dialect):
    """For requests of one sample."""

    def __init__(self, work: Work, token_bytes: TokenBytes, markup: Markup | None) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        reading = ChatReading(work, token_bytes, markup)
        self._parser = reading.parser()
        self._reasoning = reading.reasoning_tokens()
        self._has_begun = False

    def keep(self, output: SampleOutput, delta: Delta) -> None:
        for _ in self._changes(output, delta):
            pass

    def choice(self, output: SampleOutput) -> Raw:
        return _NO_CHOICE  # there is one, and ``whole`` shows it

    def pieces(self, output: SampleOutput, delta: Delta) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._begin(output)
        for change, block, text in self._changes(output, delta):
            yield from self._show(change, block, text)

    @abstractmethod
    def _begin(self, output: SampleOutput) -> Iterator[bytes]:
        """The events before the first block."""

    @abstractmethod
    def _show(self, change: Change, block: Block, text: str) -> Iterator[bytes]:
        """The events of a change; ``text``: by what the block grew."""

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.num_tokens

    def _calls_tools(self, finish: Finish) -> bool:
        """Whether the answer ended to have tools called."""
        return ends_for_calls(self._parser, finish)

    def _changes(self, output: SampleOutput, delta: Delta) -> Iterator[tuple[Change, Block, str]]:
        self._reasoning.count(output.token_ids[delta.first_token : delta.last_token])
        reason = delta.finish.reason if delta.finish is not None else None
        for part in self._parser.feed(delta.text, reason):
            match part.kind:
                case PartKind.REASONING:
                    yield from self._add(BlockKind.REASONING, part.text)
                case PartKind.CONTENT:
                    yield from self._add(BlockKind.TEXT, part.text)
                case PartKind.CALL:
                    yield from self._open_block(BlockKind.CALL, part.text)
                case PartKind.ARGUMENTS:
                    yield from self._grow(part.text)
                case PartKind.END_OF_CALL:
                    yield from self._close()
                case _:
                    assert_never(part.kind)
        if delta.finish is not None and self._open is not None:
            is_call = self._open.kind is BlockKind.CALL
            self._open.is_cut = is_call or delta.finish.reason is FinishReason.LENGTH
            yield from self._close()

    def _add(self, kind: BlockKind, text: str) -> Iterator[tuple[Change, Block, str]]:
        """To the open block if it is of this kind, else to a new one."""
        if self._open is None or self._open.kind is not kind:
            yield from self._open_block(kind)
        yield from self._grow(text)

    def _open_block(self, kind: BlockKind, name: str = "") -> Iterator[tuple[Change, Block, str]]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, name)
        self.blocks.append(self._open)
        yield Change.OPENED, self._open, ""

    def _grow(self, text: str) -> Iterator[tuple[Change, Block, str]]:
        assert self._open is not None
        self._open.pieces.append(text)
        yield Change.GREW, self._open, text

    def _close(self) -> Iterator[tuple[Change, Block, str]]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield Change.CLOSED, closed, ""
