"""Reads prompts that are text or token ids from the fields of bodies.

``schemas.py`` reads the prompts of completions and ``/generate`` with it, ``tokens.py`` those to tokenize.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import Raw

from hisparse_pd.engine.messages import num_packed_tokens, pack_token_ids
from hisparse_pd.serving.api import body_parts as parts
from hisparse_pd.serving.api.bodies import GenerateBody
from hisparse_pd.serving.api.declared_errors import Complaint
from hisparse_pd.serving.api.prompts import Prompt
from hisparse_pd.serving.api.raw_json import decode_item, first_chars, split
from hisparse_pd.serving.api.token_lists import read_list
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField

_IDS_BYTES = 64 << 10
"""Bytes of a list of token ids that are decoded at a time: up to 2 ms, in which no other thread runs."""
_PLAIN_BYTES = 8 << 10
"""Least size of a list that ``read_list`` reads faster than the decoder."""

_INTEGER_BEGINS = tuple(bytes((char,)) for char in b"-0123456789tf")
"""First characters of integers, and of true and false, which the error for a wrong token id names."""

_ids_decoder = msgspec.json.Decoder(list[parts.TokenId])


def generate_prompt(body: GenerateBody) -> tuple[str, Raw]:
    """Return the field of ``/generate`` that has the prompts, and its value."""
    given = [(name, value) for name in ("text", "input_ids") if (value := getattr(body, name)) is not None]
    if len(given) != 1:
        raise ApiError(400, "exactly one of text and input_ids is needed", param="text")
    return given[0]


class PlainPrompts(NamedTuple):
    """Texts, or packed token ids."""

    is_batch: bool
    """Whether the field is a list of prompts. A list of integers is a single prompt."""
    prompts: tuple[Prompt, ...]


def parse_prompts(field: str, value: Raw | None) -> PlainPrompts:
    """Read the prompts in ``field``. Raises ApiError 400."""
    takes_text, takes_ids = field != "input_ids", field != "text"  # ``prompt`` takes both
    shapes = ["a string", "a list of strings"] if takes_text else []
    shapes += ["a list of token ids", "a list of such lists"] if takes_ids else []
    if value is None:
        raise FieldRefused(field, "the field is needed", code="missing_field")
    match first_chars(value):  # the first two characters: of the value, and of a list's first entry
        case b'"', _ if takes_text:
            return PlainPrompts(is_batch=False, prompts=(_text(field, value),))
        case b"[", b"]":
            raise InvalidField(field, [], "must not be empty")
        case b"[", first if takes_ids and first in _INTEGER_BEGINS:
            return PlainPrompts(is_batch=False, prompts=(_packed_ids(field, value),))
        case b"[", b'"' if takes_text:
            return _batch(field, value, _text)
        case b"[", b"[" if takes_ids:
            return _batch(field, value, _packed_ids)
        case _:
            raise InvalidField(field, decode_item(field, value), f"must be {' or '.join(shapes)}")


def _batch(field: str, value: Raw, parse: Callable[[str, Raw], Prompt]) -> PlainPrompts:
    items = split(field, value, parts.MAX_PROMPTS)
    prompts = tuple(parse(f"{field}[{i}]", item) for i, item in enumerate(items))
    return PlainPrompts(is_batch=True, prompts=prompts)


def _text(name: str, value: Raw) -> str:
    text = decode_item(name, value)
    if not isinstance(text, str):
        raise InvalidField(name, text, "must be a string as the first prompt is")
    if not text:
        raise InvalidField(name, text, "must not be empty")
    return text


def parse_text(field: str, value: Raw) -> str:
    """Read a string of any length that is not empty. Raises ApiError 400."""
    if first_chars(value)[0] != b'"':
        raise InvalidField(field, decode_item(field, value), "must be a string")
    return _text(field, value)


def parse_token_ids(field: str, value: Raw | None) -> bytes:
    """Read a list of token ids, which may be empty, and return them packed. Raises ApiError 400."""
    if value is None:
        raise FieldRefused(field, "the field is needed", code="missing_field")
    match first_chars(value):
        case b"[", b"]":
            return b""
        case b"[", _:
            return _packed_ids(field, value)
        case _:
            raise InvalidField(field, decode_item(field, value), "must be a list of token ids")


def _packed_ids(name: str, value: Raw) -> bytes:
    """Read token ids in pieces of some ``_IDS_BYTES``, so that other threads run in between. What is no plain
    list of integers goes through the decoder, which checks the range of each id."""
    first, second = first_chars(value)
    if first != b"[":
        rule = "must be a list of token ids as the first prompt is"
        raise InvalidField(name, decode_item(name, value), rule)
    if second == b"]":
        raise InvalidField(name, [], "must not be empty")
    text = bytes(value)
    pieces: list[bytes] = []
    num_ids, start, end = 0, 1, len(text) - 1
    while start < end:
        stop = text.find(b",", start + _IDS_BYTES, end)
        stop = end if stop < 0 else stop
        entries = text[start:stop]
        packed = read_list(entries) if len(entries) >= _PLAIN_BYTES else None
        if packed is None:
            packed = _decoded_ids(name, b"[%b]" % entries, num_ids)
        pieces.append(packed)
        num_ids += num_packed_tokens(packed)
        start = stop + 1
    return b"".join(pieces)


def _decoded_ids(name: str, piece: bytes, first_index: int) -> bytes:
    try:
        return pack_token_ids(_ids_decoder.decode(piece))
    except msgspec.MsgspecError as error:
        raise _no_token_id(name, piece, first_index, error) from error


def _no_token_id(name: str, piece: bytes, first_index: int, error: msgspec.MsgspecError) -> ApiError:
    if isinstance(error, msgspec.ValidationError):
        with suppress(msgspec.MsgspecError):  # the piece may end within an entry that is a list or a string
            index = int(Complaint.of(error).steps[0])  # of the entry at fault
            path, value = f"{name}[{first_index + index}]", msgspec.json.decode(piece)[index]
            return InvalidField(path, value, f"must be a token id, an integer from 0 to {parts.MAX_TOKEN_ID}")
    return FieldRefused(name, "must have nothing but token ids")
