"""The whole answer that a parser found block by block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hisparse_pd.serving.api.answer_blocks import Block, BlockKind, Change


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Message:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(changes: Iterable[tuple[Change, Block, str]]) -> Message:
    message = Message()
    for change, block, text in changes:
        match change, block.kind:
            case Change.GREW, BlockKind.REASONING:
                message.reasoning += text
            case Change.GREW, BlockKind.TEXT:
                message.content += text
            case Change.OPENED, BlockKind.CALL:
                message.calls.append(Call(block.name))
            case Change.GREW, BlockKind.CALL:
                message.calls[-1].arguments += text
    return message
