"""What a chat answer consists of: pieces of reasoning, content and calls, in the order in which they came."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class PartKind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    """A call begins; the part's text is the name of its tool."""
    ARGUMENTS = auto()
    """Of the last call, as JSON text, which goes on where the part before ended."""
    END_OF_CALL = auto()
    """All arguments of the last call have come."""


@dataclass(frozen=True, slots=True)
class Part:
    kind: PartKind
    text: str = ""


_JOINED = (PartKind.REASONING, PartKind.CONTENT, PartKind.ARGUMENTS)


class PartList:
    """Parts as they are found; neighbours of a kind become one part."""

    def __init__(self) -> None:
        self._found: list[tuple[PartKind, list[str]]] = []

    def add(self, kind: PartKind, text: str = "") -> None:
        """Without text, only the parts that need none are added."""
        if kind not in _JOINED:
            self._found.append((kind, [text]))
        elif text and self._found and self._found[-1][0] is kind:
            self._found[-1][1].append(text)
        elif text:
            self._found.append((kind, [text]))

    def take(self) -> list[Part]:
        """All of them, which are forgotten here."""
        taken = [Part(kind, "".join(pieces)) for kind, pieces in self._found]
        self._found.clear()
        return taken
