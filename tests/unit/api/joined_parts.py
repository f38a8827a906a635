"""The whole answer of which a parser found parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hisparse_pd.api.message_parts import Part, PartKind


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Message:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(parts: Iterable[Part]) -> Message:
    message = Message()
    for part in parts:
        match part.kind:
            case PartKind.REASONING:
                message.reasoning += part.text
            case PartKind.CONTENT:
                message.content += part.text
            case PartKind.CALL:
                message.calls.append(Call(part.text))
            case PartKind.ARGUMENTS:
                message.calls[-1].arguments += part.text
    return message
