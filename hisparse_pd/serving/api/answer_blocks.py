"""The blocks that a chat's answer consists of: each one is reasoning, text, or one call of a tool.

``chat_message.py`` and ``call_reader.py`` find them in the text and add them to a ``BlockList``.
``chat_message.py`` then takes its changes for the dialects, which write them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class Change(Enum):
    """The kinds of changes of a block."""

    OPENED = auto()
    GREW = auto()
    CLOSED = auto()


@dataclass(eq=False)
class Block:
    """Part of an answer. The text of a call is its arguments, as JSON."""

    index: int
    """Place among the blocks of the answer."""
    number: int
    """Place among the blocks of its kind."""
    kind: BlockKind
    name: str = ""
    """Name of a call's tool."""
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False
    """Whether the answer ended within this block, at its length limit or within a call."""

    @property
    def text(self) -> str:
        """The text so far, which replaces the pieces that it is joined from."""
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]


class BlockChange(NamedTuple):
    """A change of one block, and the text that it grew by."""

    change: Change
    block: Block
    text: str


class BlockList:
    """The blocks of one answer. Only the last one may be open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self.num_of: Counter[BlockKind] = Counter()
        """Number of blocks of each kind."""
        self._changes: list[tuple[Change, Block, list[str]]] = []
        """Changes that were not taken yet, each with the pieces of text that the block grew by."""

    def add(self, kind: BlockKind, text: str) -> None:
        """Add reasoning or text to the open block if that is of this ``kind``, else to a new one."""
        if text and (self._open is None or self._open.kind is not kind):
            self.begin(kind)
        self.grow(text)

    def begin(self, kind: BlockKind, name: str = "") -> None:
        """Open a new block; ``name`` is the tool of a call."""
        self.close()
        self._open = Block(len(self.blocks), self.num_of[kind], kind, name)
        self.num_of[kind] += 1
        self.blocks.append(self._open)
        self._changes.append((Change.OPENED, self._open, []))

    def grow(self, text: str) -> None:
        """Add ``text`` to the open block. Successive growth of a block is one change."""
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
        """Close the open block, if there is one."""
        if self._open is not None:
            self._open.is_cut = is_cut
            self._changes.append((Change.CLOSED, self._open, []))
            self._open = None

    def end(self, *, is_cut: bool) -> None:
        """End the answer. ``is_cut``: whether it would have gone on. An open call is cut in any case."""
        self.close(is_cut=is_cut or (self._open is not None and self._open.kind is BlockKind.CALL))

    def take(self) -> list[BlockChange]:
        """Return the changes since the last call, in order."""
        taken = [BlockChange(change, block, "".join(pieces)) for change, block, pieces in self._changes]
        self._changes.clear()
        return taken
