"""How a chat's answer is read: as blocks, each of reasoning, of text, or one call of a tool, as they grow.

This module knows the blocks; the dialects of ``answers.py`` and ``blocks.py`` write them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

from hisparse_pd.api.app import Work
from hisparse_pd.api.chat_format import MARKUPS, ChatFormat, ThinkMarks
from hisparse_pd.api.chat_message import MessageParser
from hisparse_pd.api.detokenizer import TokenBytes
from hisparse_pd.api.message_parts import PartKind
from hisparse_pd.api.output import Delta, Finish, SampleOutput
from hisparse_pd.api.prompts import ChatPrompt
from hisparse_pd.api.tool_schemas import ToolSchemas
from hisparse_pd.vocabulary import FinishReason


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
    """``index``: among the blocks of the answer; ``number``: among those of its kind.

    ``name``: of a call's tool; its text is the arguments. ``is_cut``: the answer ended within it, for its
    length or in the middle of a call.
    """

    index: int
    number: int
    kind: BlockKind
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]


def chat_readings(work: Work, token_bytes: TokenBytes, chat_format: ChatFormat) -> list[ChatReading]:
    """One for each sample of a chat. Tool calls stay text where it is not known how the model writes them."""
    (prompt,) = work.request.prompts
    assert isinstance(prompt, ChatPrompt)
    tools = prompt.all_tools
    markup = MARKUPS[chat_format.markup] if tools and chat_format.markup is not None else None
    openings = markup.openings if markup is not None and markup.ends_reasoning else ()
    schemas = ToolSchemas(tools)
    in_reasoning = chat_format.opens_reasoning(work.samples[0].prompt, token_bytes.of)
    return [
        ChatReading(
            MessageParser(
                in_reasoning=in_reasoning,
                separates_reasoning=prompt.separate_reasoning,
                think=chat_format.think,
                markup=markup,
                schemas=schemas,
            ),
            ReasoningTokens(token_bytes, chat_format.think, openings, in_reasoning=in_reasoning),
        )
        for _ in work.samples
    ]


class ChatReading:
    """Reads one sample of a chat."""

    def __init__(self, parser: MessageParser, reasoning: ReasoningTokens) -> None:
        self._parser = parser
        self._reasoning = reasoning
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._num_of: Counter[BlockKind] = Counter()
        self._changes: list[tuple[Change, Block, str]] = []
        """By the present delta."""

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.num_tokens

    def of_kind(self, kind: BlockKind) -> list[Block]:
        return [block for block in self.blocks if block.kind is kind]

    def calls_tools(self, finish: Finish) -> bool:
        """Whether an answer, all of which was read, ended to have its calls made, none of them cut off."""
        parser = self._parser
        return parser.has_calls and not parser.is_in_call and finish.reason is FinishReason.STOP

    def feed(self, output: SampleOutput, delta: Delta) -> list[tuple[Change, Block, str]]:
        """What ``delta`` changes, in order; the text is by what a block grew."""
        self._reasoning.count(output.token_ids[delta.first_token : delta.last_token])
        self._changes = []
        reason = delta.finish.reason if delta.finish is not None else None
        for part in self._parser.feed(delta.text, reason):
            match part.kind:
                case PartKind.REASONING:
                    self._add(BlockKind.REASONING, part.text)
                case PartKind.CONTENT:
                    self._add(BlockKind.TEXT, part.text)
                case PartKind.CALL:
                    self._begin(BlockKind.CALL, part.text)
                case PartKind.ARGUMENTS:
                    self._grow(part.text)
                case PartKind.END_OF_CALL:
                    self._close()
                case _:
                    assert_never(part.kind)
        if delta.finish is not None and self._open is not None:
            is_call = self._open.kind is BlockKind.CALL
            self._open.is_cut = is_call or delta.finish.reason is FinishReason.LENGTH
            self._close()
        return self._changes

    def _add(self, kind: BlockKind, text: str) -> None:
        """To the open block if it is of this kind, else to a new one."""
        if self._open is None or self._open.kind is not kind:
            self._begin(kind)
        self._grow(text)

    def _begin(self, kind: BlockKind, name: str = "") -> None:
        self._close()
        self._open = Block(len(self.blocks), self._num_of[kind], kind, name)
        self._num_of[kind] += 1
        self.blocks.append(self._open)
        self._changes.append((Change.OPENED, self._open, ""))

    def _grow(self, text: str) -> None:
        assert self._open is not None
        self._open.pieces.append(text)
        self._changes.append((Change.GREW, self._open, text))

    def _close(self) -> None:
        if self._open is not None:
            self._changes.append((Change.CLOSED, self._open, ""))
            self._open = None


class ReasoningTokens:
    """Counts the tokens of an answer up to the one that ends its reasoning: with its closing mark, or one of
    ``interruptions``."""

    def __init__(
        self, token_bytes: TokenBytes, think: ThinkMarks, interruptions: Sequence[str], *, in_reasoning: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._opening = think.opening.encode()
        self._ends = tuple(end.encode() for end in (think.closing, *interruptions))
        self._num_kept_bytes = max(map(len, self._ends))
        self._seen = self._opening if in_reasoning else b""
        """Of the answer, as if it began with what opens reasoning: its last bytes."""
        self._num_tokens = 0
        self._is_open: bool | None = True if in_reasoning else None
        """None until it is known whether the answer begins with reasoning."""

    def count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_open is False:
                return
            self._num_tokens += 1
            self._seen += self._token_bytes.of(token_id)
            if self._is_open is None:
                self._seen = self._seen.lstrip()
                if self._seen.startswith(self._opening):
                    self._is_open = True
                elif not self._opening.startswith(self._seen):
                    self._is_open, self._num_tokens = False, 0
            if self._is_open:
                self._is_open = not any(end in self._seen for end in self._ends)
                self._seen = self._seen[-self._num_kept_bytes :]

    @property
    def num_tokens(self) -> int:
        """0 while it is not known that the answer begins with reasoning."""
        return 0 if self._is_open is None else self._num_tokens
