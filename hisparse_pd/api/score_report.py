"""How a prompt's logprobs come into an answer.

The prefill node has them, and the decode node has the answer that they belong in. So the prefill node's front
writes them as the JSON text of lists, once a prompt, and whoever has both joins them: the router or, where no
decode node takes part, that front. Joining neither takes a list apart nor copies it: lists have megabytes,
and an event loop does it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct

from protocol.decoding import TypedDecoder

REPORT_TYPE = "application/msgpack"
"""Content type of a packed Report."""


class PromptLists(Struct, frozen=True):
    """JSON of lists, without brackets, by field of a sample: of its choice, of the choice's ``logprobs``,
    where they come before the output's, or of its ``meta_info``. Of a decoded report they are views of it."""

    choice: dict[str, memoryview]
    logprobs: dict[str, memoryview]
    meta_info: dict[str, memoryview]


class Report(Struct, frozen=True):
    """``prompt_of``: of each sample the number of its prompt; ``answer``: lists of the whole answer."""

    prompt_of: tuple[int, ...]
    prompts: tuple[PromptLists, ...]
    answer: dict[str, memoryview] = {}

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def of_sample(self, index: int) -> PromptLists:
        return self.prompts[self.prompt_of[index]]


report_decoder: TypedDecoder[Report] = TypedDecoder(Report)

_object_decoder: TypedDecoder[dict[str, Raw]] = TypedDecoder.json(dict[str, Raw])
_objects_decoder: TypedDecoder[list[dict[str, Raw]]] = TypedDecoder.json(list[dict[str, Raw]])


def join(report: Report, body: bytes | bytearray) -> list[bytes | memoryview]:
    """The answer ``body``, in which samples are in their order, with the lists of ``report``: in pieces.

    Raises msgspec.MsgspecError, KeyError and IndexError for a body of another shape.
    """
    joined = _Joined(report)
    if body[:1] == b"[":
        entries = _objects_decoder.decode(body)
        return joined.pieces([joined.with_meta(entry, i) for i, entry in enumerate(entries)])
    fields = _object_decoder.decode(body)
    if "meta_info" in fields:
        return joined.pieces(joined.with_meta(fields, 0))
    choices = _objects_decoder.decode(fields["choices"])
    shown: dict[str, object] = {
        **fields,
        **joined.lists(report.answer),
        "choices": [joined.with_lists(choice, i) for i, choice in enumerate(choices)],
    }
    return joined.pieces(shown)


def sglang_lists(report: Report, index: int) -> dict[str, Raw]:
    """What ``meta_info`` has of a sample's prompt, for routers that join it themselves."""
    lists = report.of_sample(index).meta_info
    return {name: Raw(b"".join((b"[", entries, b"]"))) for name, entries in lists.items()}


class _Joined:
    """One answer. While the rest of it is encoded, a mark that nobody can guess stands for each list."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._mark = secrets.token_hex(16).encode()
        self._marked: list[memoryview] = []

    def with_meta(self, entry: dict[str, Raw], index: int) -> dict[str, object]:
        meta = _object_decoder.decode(entry["meta_info"])
        return {**entry, "meta_info": {**meta, **self.lists(self._report.of_sample(index).meta_info)}}

    def with_lists(self, choice: dict[str, Raw], index: int) -> dict[str, object]:
        lists = self._report.of_sample(index)
        shown: dict[str, object] = {**choice, **self.lists(lists.choice)}
        if lists.logprobs:
            logprobs = _object_decoder.decode(choice["logprobs"])
            before = {name: self._before(ours, logprobs[name]) for name, ours in lists.logprobs.items()}
            shown["logprobs"] = {**logprobs, **before}
        return shown

    def lists(self, lists: Mapping[str, memoryview]) -> dict[str, Raw]:
        return {name: Raw(b"[%b]" % self._marked_by(entries)) for name, entries in lists.items()}

    def pieces(self, shown: object) -> list[bytes | memoryview]:
        """``shown`` as JSON, with the lists in the places of their marks."""
        parts = re.split(self._mark + rb"([0-9]+);", msgspec.json.encode(shown))
        return [self._marked[int(part)] if i % 2 else part for i, part in enumerate(parts)]

    def _marked_by(self, entries: memoryview) -> bytes:
        self._marked.append(entries)
        return b"%b%d;" % (self._mark, len(self._marked) - 1)

    def _before(self, ours: memoryview, theirs: Raw) -> Raw:
        """One list, of which ``theirs`` has brackets; both may be empty."""
        inner = bytes(theirs)[1:-1].strip()
        return Raw(b"[%b]" % b",".join(part for part in (ours and self._marked_by(ours), inner) if part))
