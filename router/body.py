"""The body of a client's request: checked to be JSON, and passed on with the bootstrap fields added.

``server.py`` parses each body into a ``RequestBody``, and ``relay.py`` writes it for a decode node. Only the
top level is taken apart. Every value stays the bytes that the client sent, so unknown fields and the way
numbers are written survive.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
from msgspec import Raw

from hisparse_pd.router.nodes import draw_room
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.raw_json import check_text, first_chars, not_json, split_list
from hisparse_pd.serving.http.http_errors import ApiError
from hisparse_pd.serving.http.off_loop import taking_interpreter

MAX_PROMPTS = 4096
"""Limit of prompts in one request; each adds about 60 bytes of bootstrap fields to the body."""

MAX_SMALL_FIELD_BYTES = 1 << 20
"""Limit of all fields but the prompt and ``tools`` together. A body of nothing but small fields would take
seconds to decode, during which the event loop serves nobody."""

_OBJECT_DECODER = msgspec.json.Decoder(dict[str, Raw])
"""Decodes a body whose nesting was checked by ``check_text``."""

_PROMPT_FIELDS = {
    Endpoint.COMPLETIONS: ("prompt",),
    Endpoint.CHAT: ("messages",),
    Endpoint.GENERATE: ("text", "input_ids"),
    Endpoint.MESSAGES: ("system", "messages"),
    Endpoint.RESPONSES: ("instructions", "input"),
}
"""Fields whose content is the prompt, in the prompt's order. A body of ``/generate`` has only one of them."""

_ISOLATION_FIELDS = ("cache_salt", "extra_key")
"""Fields that keep prompts apart in the nodes' caches though they begin alike."""

_LARGE_FIELDS = {*itertools.chain(*_PROMPT_FIELDS.values()), "tools"}
_LARGE_DECODER = msgspec.json.Decoder(
    msgspec.defstruct("LargeFields", [(name, Raw, Raw()) for name in sorted(_LARGE_FIELDS)])
)
"""Decodes the large fields alone, to measure them, and makes no objects of the others."""

_OWN_FIELDS = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    *("journal", "journal_records"),
)
"""Fields by which the router tells the decode node something; a client's are replaced."""

_TAKE_PROMPT_LISTS = (Endpoint.COMPLETIONS, Endpoint.GENERATE)
"""Endpoints that take a list of prompts."""


@dataclass(frozen=True)
class RequestBody:
    """A client's body, taken apart at its top level.

    The samples of ``n`` > 1 share their prompt's room, from which the decode node derives theirs.
    """

    fields: dict[str, Raw]
    num_prompts: int | None
    """Length of a list of prompts, for which the bootstrap fields become lists, too; None for one prompt."""
    prompt: memoryview
    """The isolation fields and the prompt, as JSON. Bodies whose KV begins alike begin alike here."""

    @property
    def is_streamed(self) -> bool:
        return _has_value(self.fields, "stream", b"true")

    @property
    def num_bytes(self) -> int:
        return sum(len(memoryview(value)) for value in self.fields.values())

    @classmethod
    def parse(cls, content: bytes, endpoint: Endpoint) -> RequestBody:
        """Take a body apart. Raises ApiError 400 for anything that is not a JSON object in UTF-8."""
        check_text(content)
        try:
            # The decode of a large body holds the interpreter, so large bodies are decoded one at a time.
            if len(content) > MAX_SMALL_FIELD_BYTES:
                with taking_interpreter(len(content)):
                    _check_small_fields(content)
            with taking_interpreter(len(content)):
                fields = _OBJECT_DECODER.decode(content)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"the body must be a JSON object: {error}") from error
        except msgspec.DecodeError as error:
            raise not_json("", error) from error
        values = [memoryview(fields[name]) for name in _PROMPT_FIELDS[endpoint] if name in fields]
        if endpoint is Endpoint.GENERATE:
            # One of text and input_ids has the prompt. The other is null, or the node refuses the request.
            values = [max(values, key=len, default=memoryview(b""))]
        isolation = [memoryview(fields[name]) for name in _ISOLATION_FIELDS if _is_set(fields, name)]
        parts = isolation + values
        prompt = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        try:
            num_prompts = _count_prompts(fields, endpoint)
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the prompts are not valid JSON: {error}") from error
        return cls(fields, num_prompts, prompt)

    def with_bootstrap(
        self,
        bootstrap_host: str,
        bootstrap_port: int | None,
        first_room: int,
        journal: Mapping[str, object] = MappingProxyType({}),
    ) -> bytes:
        """Return the body for the decode node, as JSON, which names the prefill node and the prompts' rooms.

        The router's own fields in the client's body are replaced; ``journal`` has ``journal`` and
        ``journal_records`` where the router keeps a journal of this stream. In a list the prompts after the
        first one get random rooms, and so spread over the prefill node's ranks.
        """
        host: object = bootstrap_host
        port: object = bootstrap_port
        room: object = first_room
        if self.num_prompts is not None:
            host = [bootstrap_host] * self.num_prompts
            port = [bootstrap_port] * self.num_prompts
            room = [first_room, *(draw_room() for _ in range(self.num_prompts - 1))]
        theirs = {name: value for name, value in self.fields.items() if name not in _OWN_FIELDS}
        ours = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room, **journal}
        return msgspec.json.encode(theirs | ours)


def _check_small_fields(content: bytes) -> None:
    """Check the size of fields beside the prompt and ``tools``. Raises ApiError 400 or msgspec's errors."""
    large = msgspec.structs.astuple(_LARGE_DECODER.decode(content))
    num_bytes = len(content) - sum(len(memoryview(value)) for value in large)
    if num_bytes > MAX_SMALL_FIELD_BYTES:
        raise ApiError(
            400,
            f"the fields of the body that are neither the prompt nor tools have {num_bytes} bytes of JSON; "
            f"{MAX_SMALL_FIELD_BYTES} are the most",
        )


def _count_prompts(fields: dict[str, Raw], endpoint: Endpoint) -> int | None:
    if endpoint not in _TAKE_PROMPT_LISTS:
        return None
    for name in _PROMPT_FIELDS[endpoint]:
        if name not in fields or first_chars(fields[name]) not in ((b"[", b'"'), (b"[", b"[")):
            continue  # a string, one list of token ids, or something that the node will refuse
        prompts = split_list(fields[name], MAX_PROMPTS)
        if prompts is None:
            raise ApiError(400, f"{name}: must have at most {MAX_PROMPTS} prompts; split the request")
        return len(prompts)
    return None


def _is_set(fields: dict[str, Raw], name: str) -> bool:
    return name in fields and not _has_value(fields, name, b"null")


def _has_value(fields: dict[str, Raw], name: str, value: bytes) -> bool:
    """Whether a field's JSON is exactly ``value``."""
    return name in fields and memoryview(fields[name]) == value
