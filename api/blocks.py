"""An answer as a sequence of blocks, each of reasoning, of text, or one call of a tool.

Anthropic's messages and OpenAI's responses are both shown so, in a stream by events that open a block, let it
grow and close it. This module knows the blocks; a subclass writes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec
from msgspec import Raw

from api.app import Work
from api.chat_message import ToolCall
from api.chat_reading import ReasoningTokens, begins_in_reasoning, parser_maker
from api.detokenizer import TokenBytes
from api.output import Delta, Finish, SampleOutput
from api.tool_markup import Markup
from service.http_errors import ApiError
from vocabulary import FinishReason

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
    """``index``: among the blocks of the answer. ``call``: in a block of one, whose text is the arguments.

    ``is_cut``: the answer ended for its length within it.
    """

    index: int
    kind: BlockKind
    call: ToolCall | None = None
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]


class BlockAnswer(ABC):
    """A dialect as of ``answers.Dialect``, for requests of one sample."""

    def __init__(self, work: Work, token_bytes: TokenBytes, markup: Markup | None) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._parser = parser_maker(work, token_bytes, markup)()
        in_reasoning = begins_in_reasoning(work, token_bytes)
        self._reasoning = ReasoningTokens(token_bytes, in_reasoning=in_reasoning)
        self._has_begun = False

    def keep(self, output: SampleOutput, delta: Delta) -> None:
        for _ in self._changes(output, delta):
            pass

    def choice(self, output: SampleOutput) -> Raw:
        return _NO_CHOICE  # there is one, and ``whole`` shows it

    @abstractmethod
    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        """As of ``Dialect``."""

    def pieces(self, output: SampleOutput, delta: Delta) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._begin(output)
        for change, block, text in self._changes(output, delta):
            yield from self._show(change, block, text)

    @abstractmethod
    def last_pieces(self, outputs: Sequence[SampleOutput]) -> Iterator[bytes]:
        """As of ``Dialect``."""

    def failed(self, error: ApiError) -> bytes | None:
        return None

    @abstractmethod
    def _begin(self, output: SampleOutput) -> Iterator[bytes]:
        """The events before the first block."""

    @abstractmethod
    def _show(self, change: Change, block: Block, text: str) -> Iterator[bytes]:
        """The events of a change; ``text``: by what the block grew."""

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.num_tokens

    def _calls_tools(self, finish: Finish | None) -> bool:
        """Whether the answer ended to have tools called."""
        return self._parser.has_calls and finish is not None and finish.reason is FinishReason.STOP

    def _changes(self, output: SampleOutput, delta: Delta) -> Iterator[tuple[Change, Block, str]]:
        self._reasoning.count(output.token_ids[delta.first_token : delta.last_token])
        parts = self._parser.feed(delta.text, is_last=delta.finish is not None)
        for kind, text in ((BlockKind.REASONING, parts.reasoning), (BlockKind.TEXT, parts.content)):
            if not text:
                continue
            if self._open is not None and self._open.kind is not kind:
                yield from self._close()
            if self._open is None:
                self._open = self._new(kind)
                yield Change.OPENED, self._open, ""
            self._open.pieces.append(text)
            yield Change.GREW, self._open, text
        for call in parts.calls:
            yield from self._close()
            self._open = self._new(BlockKind.CALL, call)
            yield Change.OPENED, self._open, ""
            self._open.pieces.append(call.arguments)
            yield Change.GREW, self._open, call.arguments
            yield from self._close()
        if delta.finish is not None and self._open is not None:
            self._open.is_cut = delta.finish.reason is FinishReason.LENGTH
            yield from self._close()

    def _new(self, kind: BlockKind, call: ToolCall | None = None) -> Block:
        block = Block(len(self.blocks), kind, call)
        self.blocks.append(block)
        return block

    def _close(self) -> Iterator[tuple[Change, Block, str]]:
        if self._open is not None:
            closed, self._open = self._open, None
            yield Change.CLOSED, closed, ""
