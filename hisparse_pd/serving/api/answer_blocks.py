"""What a chat's answer consists of: blocks, each of reasoning, of text, or one call of a tool, as they grow.

``chat_message.py`` and ``call_reader.py`` find them; the dialects of ``answers.py`` and ``blocks.py`` write
them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto


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

    ``name``: of a call's tool; its text is the arguments, as JSON. ``is_cut``: the answer ended within it,
    for its length or in the middle of a call.
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


class BlockList:
    """The blocks of one answer. One at most is open, the last one."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self.num_of: Counter[BlockKind] = Counter()
        """By kind."""
        self._changes: list[tuple[Change, Block, list[str]]] = []

    def add(self, kind: BlockKind, text: str) -> None:
        """Reasoning or text goes to the open block if it is of this kind, else to a new one."""
        if text and (self._open is None or self._open.kind is not kind):
            self.begin(kind)
        self.grow(text)

    def begin(self, kind: BlockKind, name: str = "") -> None:
        """Open a new block; ``name``: of a call's tool."""
        self.close()
        self._open = Block(len(self.blocks), self.num_of[kind], kind, name)
        self.num_of[kind] += 1
        self.blocks.append(self._open)
        self._changes.append((Change.OPENED, self._open, []))

    def grow(self, text: str) -> None:
        """The open block goes on where it ended. Neighbours become one change."""
        if not text:
            return
        assert self._open is not None
        self._open.pieces.append(text)
        change, block, pieces = self._changes[-1] if self._changes else (None, None, [])
        if change is Change.GREW and block is self._open:
            pieces.append(text)
        else:
            self._changes.append((Change.GREW, self._open, [text]))

    def close(self, *, is_cut: bool = False) -> None:
        """The open block is complete, if there is one, or cut off."""
        if self._open is not None:
            self._open.is_cut = is_cut
            self._changes.append((Change.CLOSED, self._open, []))
            self._open = None

    def end(self, *, is_cut: bool) -> None:
        """The answer has ended; ``is_cut``: where it would have gone on."""
        self.close(is_cut=is_cut or (self._open is not None and self._open.kind is BlockKind.CALL))

    def take(self) -> list[tuple[Change, Block, str]]:
        """What has changed since the last call, in order; the text is by what a block grew."""
        taken = [(change, block, "".join(pieces)) for change, block, pieces in self._changes]
        self._changes.clear()
        return taken
