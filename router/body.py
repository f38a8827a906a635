"""The body of a client's request: checked as JSON, otherwise untouched, and joined with the bootstrap fields.

Only the top level is taken apart. Every value stays the bytes that the client sent, so unknown fields and
the way numbers are written survive.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec import Raw

from api.raw_json import first_chars, split_list
from router.errors import RouterError
from router.rooms import draw_room

MAX_PROMPTS = 4096
"""Prompts in one request at most: each adds about 60 bytes of bootstrap fields to the body."""

_OBJECT_DECODER = msgspec.json.Decoder(dict[str, Raw])


class Endpoint(StrEnum):
    """The paths that are relayed to a pair, the same on the nodes."""

    COMPLETIONS = "/v1/completions"
    CHAT_COMPLETIONS = "/v1/chat/completions"
    GENERATE = "/generate"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


_PROMPT_FIELDS = {
    Endpoint.COMPLETIONS: ("prompt",),
    Endpoint.CHAT_COMPLETIONS: ("messages",),
    Endpoint.GENERATE: ("text", "input_ids"),
    Endpoint.MESSAGES: ("system", "messages"),
    Endpoint.RESPONSES: ("instructions", "input"),
}
"""Of ``/generate`` a request has one; of other endpoints all, in the order that they have in the prompt."""


_WITH_LISTS = (Endpoint.COMPLETIONS, Endpoint.GENERATE)
"""Whose prompts may be lists of prompts."""


@dataclass(frozen=True)
class RequestBody:
    """``num_prompts`` is None for a single prompt and the length of a list of prompts otherwise.

    With a list the bootstrap fields become lists of that length. The samples of ``n`` > 1 share the
    prompt's room; the nodes derive theirs from it.
    """

    fields: dict[str, Raw]
    num_prompts: int | None
    prompt: memoryview
    """The values of the fields that have the prompt, as JSON; empty without one."""

    @classmethod
    def parse(cls, content: bytes, endpoint: Endpoint) -> RequestBody:
        """Raises RouterError 400 for anything that is not a JSON object in UTF-8."""
        try:
            content.decode()
            fields = _OBJECT_DECODER.decode(content)
        except UnicodeDecodeError as error:
            raise RouterError(
                400, f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
            ) from error
        except msgspec.ValidationError as error:
            raise RouterError(400, f"the body must be a JSON object: {error}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise RouterError(400, f"the body is not valid JSON: {error}") from error
        values = [memoryview(fields[name]) for name in _PROMPT_FIELDS[endpoint] if name in fields]
        if endpoint is Endpoint.GENERATE:
            values = [max(values, key=len, default=memoryview(b""))]  # the other is null, or both are refused
        prompt = values[0] if len(values) == 1 else memoryview(b"".join(values))
        try:
            num_prompts = _count_prompts(fields, endpoint)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RouterError(400, f"the prompts are not valid JSON: {error}") from error
        return cls(fields, num_prompts, prompt)

    def with_bootstrap(self, bootstrap_host: str, bootstrap_port: int | None, first_room: int) -> bytes:
        """The body for both nodes, as JSON. Bootstrap fields of the client are replaced.

        The prompts of a list after the first one get random rooms, and so spread over a node's ranks.
        """
        host: object = bootstrap_host
        port: object = bootstrap_port
        room: object = first_room
        if self.num_prompts is not None:
            host = [bootstrap_host] * self.num_prompts
            port = [bootstrap_port] * self.num_prompts
            room = [first_room, *(draw_room() for _ in range(self.num_prompts - 1))]
        return msgspec.json.encode(
            {**self.fields, "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        )


def _count_prompts(fields: dict[str, Raw], endpoint: Endpoint) -> int | None:
    if endpoint not in _WITH_LISTS:
        return None
    for name in _PROMPT_FIELDS[endpoint]:
        if name not in fields or first_chars(fields[name]) not in ((b"[", b'"'), (b"[", b"[")):
            continue  # a string, one list of token ids, or something that the nodes will refuse
        prompts = split_list(fields[name], MAX_PROMPTS)
        if prompts is None:
            raise RouterError(400, f"{name}: must have at most {MAX_PROMPTS} prompts; split the request")
        return len(prompts)
    return None
