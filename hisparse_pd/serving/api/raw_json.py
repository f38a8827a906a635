"""Splits, checks and decodes clients' JSON in bounded pieces, since the decoder lets no other thread run.

Readers of bodies keep large fields as ``Raw`` (undecoded JSON) and take them apart with these functions.
Large calls are made within ``taking_interpreter``: one at a time, with a pause for other threads after long
ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from hisparse_pd.protocol.decoding import NestedTooDeeply, check_nesting, decode_json
from hisparse_pd.serving.api.exact_numbers import read_float
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField
from hisparse_pd.serving.http.off_loop import taking_interpreter

MAX_FIELD_BYTES = 2 << 20
"""Size up to which a field's JSON may have any number of values. Decoding takes 0.2 s at worst; where the
spelling of numbers is kept it takes a second, in which other threads run."""

MAX_FIELD_VALUES = 1 << 16
"""Most values of a larger field, whose bytes are then mostly strings, such as images in base64; these decode
fast. Values are counted by the marks between them, even if a mark is within a string."""

_SPACE = (b" ", b"\t", b"\r", b"\n")

_TRUNCATED = "Input data was truncated"
"""msgspec's message for JSON that ends too early, and for a string that ends soon after half of a surrogate
pair."""

_SHORT_BYTES = 1 << 16
"""Size up to which a list is split whole, however many entries it has; that takes a millisecond."""

_decoder = msgspec.json.Decoder()
_spelled_decoder = msgspec.json.Decoder(float_hook=read_float)
_list_decoder = msgspec.json.Decoder(list[Raw])


def first_chars(value: bytes | Raw) -> tuple[bytes, bytes]:
    """Return the first two characters of a JSON value, without white space: they tell its type and that of a
    list's first entry."""
    view = memoryview(value)
    first = _next_char(view, 0)
    second = _next_char(view, first + 1)
    return bytes(view[first : first + 1]), bytes(view[second : second + 1])


def _next_char(view: memoryview, start: int) -> int:
    while bytes(view[start : start + 1]) in _SPACE:
        start += 1
    return start


def is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    try:
        return isinstance(decode_json(text), dict)
    except msgspec.DecodeError:
        return False


def split(name: str, value: Raw, max_items: int) -> list[Raw]:
    """Return the entries of a list, each as JSON. Raises ApiError for no list, or more than ``max_items``."""
    if first_chars(value)[0] != b"[":
        raise InvalidField(name, decode_item(name, value), "must be a list")
    try:
        items = split_list(value, max_items)
    except msgspec.MsgspecError as error:
        raise not_json(name, error) from error
    if items is None:
        raise FieldRefused(name, f"must have at most {max_items} entries; split the request")
    return items


def split_list(value: Raw, max_items: int) -> list[Raw] | None:
    """Return the entries of a JSON list, each as JSON; None for more than ``max_items``. Takes bounded memory
    whatever their number. Raises msgspec's errors for what is no JSON list."""
    if len(memoryview(value)) <= _SHORT_BYTES:
        items = _list_decoder.decode(value)
    else:
        with taking_interpreter(len(memoryview(value))):
            entries = _entries_decoder(max_items + 1).decode(value)
        items = [item for item in msgspec.structs.astuple(entries) if item is not UNSET]
    return None if len(items) > max_items else items


@cache
def _entries_decoder(max_items: int) -> msgspec.json.Decoder[Any]:
    """Return a decoder of a list as a structure with ``max_items`` fields: further entries take no memory."""
    fields = [(f"item_{index}", Raw | UnsetType, UNSET) for index in range(max_items)]
    return msgspec.json.Decoder(msgspec.defstruct("Entries", fields, array_like=True))


def decode_item(name: str, value: Raw, *, as_spelled: bool = False) -> Any:
    """Decode ``value``. Raises ApiError if it is no JSON, or too much; a string may have any length.

    With ``as_spelled`` the spelling of numbers is kept (``exact_numbers``), as schemas need it. Such a value
    must not be encoded again.
    """
    check_size(name, value)
    try:
        with taking_interpreter(len(memoryview(value))):
            return (_spelled_decoder if as_spelled else _decoder).decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise not_json(name, error) from error


def check_size(name: str, value: Raw) -> None:
    """Raise ApiError for a value that exceeds both MAX_FIELD_BYTES and MAX_FIELD_VALUES and is no string."""
    num_bytes = len(memoryview(value))
    if num_bytes <= MAX_FIELD_BYTES or first_chars(value)[0] == b'"':
        return
    text = bytes(value)
    if sum(text.count(mark) for mark in b",[{") > MAX_FIELD_VALUES:
        raise FieldRefused(name, f"has {num_bytes} bytes of JSON; {MAX_FIELD_BYTES} are the most for a field")


def check_text(body: bytes) -> None:
    """Raise ApiError for a body that is not UTF-8, or nested more deeply than ``check_nesting`` allows."""
    try:
        if not body.isascii():  # finding that out makes no copy
            with taking_interpreter(len(body)):
                body.decode()
        with taking_interpreter(len(body)):
            check_nesting(body)
    except UnicodeDecodeError as error:
        message = f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        raise ApiError(400, message, code="invalid_utf8") from error
    except NestedTooDeeply as error:
        raise not_json("", error) from error


def not_json(name: str, error: Exception) -> ApiError:
    """Return the error for a field that is not JSON, or for the body where ``name`` is ""."""
    what, why = f"{name}: is" if name else "the body is", str(error)
    if why == _TRUNCATED:
        why = "it ends too early, or a string has half of a surrogate pair, such as \\ud83d alone"
    return ApiError(400, f"{what} not valid JSON: {why}", param=name or None, code="invalid_json")
