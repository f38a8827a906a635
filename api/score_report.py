"""How a prompt's logprobs come into an answer.

The prefill node has them, and the decode node has the answer that they belong in. So the prefill node's front
writes them as the JSON text of lists, once a prompt, and whoever has both joins them: the router or, where no
decode node takes part, that front. Joining takes no list apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct

from protocol.decoding import TypedDecoder

REPORT_TYPE = "application/msgpack"
"""Content type of a packed Report."""


class PromptLists(Struct, frozen=True):
    """JSON of lists, without brackets, by field of a sample: of its choice, of the choice's ``logprobs``,
    where they come before the output's, or of its ``meta_info``."""

    choice: dict[str, bytes]
    logprobs: dict[str, bytes]
    meta_info: dict[str, bytes]


class Report(Struct, frozen=True):
    """``prompt_of``: of each sample the number of its prompt; ``answer``: lists of the whole answer."""

    prompt_of: tuple[int, ...]
    prompts: tuple[PromptLists, ...]
    answer: dict[str, bytes] = {}

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def of_sample(self, index: int) -> PromptLists:
        return self.prompts[self.prompt_of[index]]


report_decoder: TypedDecoder[Report] = TypedDecoder(Report)

_object_decoder: TypedDecoder[dict[str, Raw]] = TypedDecoder.json(dict[str, Raw])
_objects_decoder: TypedDecoder[list[dict[str, Raw]]] = TypedDecoder.json(list[dict[str, Raw]])


def join(report: Report, body: bytes) -> bytes:
    """The answer ``body``, in which samples are in their order, with the lists of ``report``.

    Raises msgspec.MsgspecError, KeyError and IndexError for a body of another shape.
    """
    if body[:1] == b"[":
        entries = _objects_decoder.decode(body)
        return _encode([_with_meta(entry, report.of_sample(i)) for i, entry in enumerate(entries)])
    fields = _object_decoder.decode(body)
    if "meta_info" in fields:
        return _encode(_with_meta(fields, report.of_sample(0)))
    choices = _objects_decoder.decode(fields["choices"])
    shown: dict[str, object] = {
        **fields,
        **_lists(report.answer),
        "choices": [_with_lists(choice, report.of_sample(i)) for i, choice in enumerate(choices)],
    }
    return _encode(shown)


def sglang_lists(report: Report, index: int) -> dict[str, Raw]:
    """What ``meta_info`` has of a sample's prompt, for routers that join it themselves."""
    return _lists(report.of_sample(index).meta_info)


_encode = msgspec.json.encode


def _with_meta(entry: dict[str, Raw], lists: PromptLists) -> dict[str, object]:
    return {**entry, "meta_info": {**_object_decoder.decode(entry["meta_info"]), **_lists(lists.meta_info)}}


def _with_lists(choice: dict[str, Raw], lists: PromptLists) -> dict[str, object]:
    shown: dict[str, object] = {**choice, **_lists(lists.choice)}
    if lists.logprobs:
        logprobs = _object_decoder.decode(choice["logprobs"])
        before = {name: _before(ours, logprobs[name]) for name, ours in lists.logprobs.items()}
        shown["logprobs"] = {**logprobs, **before}
    return shown


def _lists(lists: Mapping[str, bytes]) -> dict[str, Raw]:
    return {name: Raw(b"[%b]" % entries) for name, entries in lists.items()}


def _before(ours: bytes, theirs: Raw) -> Raw:
    """One list, of which ``theirs`` has brackets and may be empty."""
    inner = bytes(theirs)[1:-1].strip()
    return Raw(b"[%b]" % b",".join(part for part in (ours, inner) if part))
