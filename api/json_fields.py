"""Typed, bounded access to the fields of one JSON object of a request.

A field that is absent or null has its default. Everything else is of the asked type and within the bounds, or
InvalidField says which field, which value and which bound. Fields that nobody asks for are ignored, and not
even decoded: a body of megabytes can be millions of objects, and the decoder lets no other thread run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard

import msgspec
from msgspec import UNSET, Raw, UnsetType

from service.http_errors import ApiError, InvalidField

MAX_FIELD_BYTES = 2 << 20
"""Of a field's JSON, strings and split lists aside: 0.2 s of decoding at the very worst."""

_decoder = msgspec.json.Decoder()
_object_decoder = msgspec.json.Decoder(dict[str, Raw])


class JsonFields:
    """The fields of the object at ``path`` ("" for the body itself)."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = dict(values)
        self._path = path

    @classmethod
    def of_body(cls, body: bytes) -> JsonFields:
        """Raises ApiError 400 unless ``body`` is a JSON object in UTF-8."""
        try:
            body.decode()
            return cls(_object_decoder.decode(body))
        except UnicodeDecodeError as error:
            raise ApiError(
                400, f"the body is not valid UTF-8: {error.reason} at byte {error.start}", code="invalid_utf8"
            ) from error
        except RecursionError as error:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
        except msgspec.ValidationError as error:
            raise ApiError(
                400, f"the body must be a JSON object, not {_kind(body)}", code="invalid_json"
            ) from error
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error

    @classmethod
    def of_item(cls, name: str, item: object) -> JsonFields:
        """Of ``item``, the entry of a list that errors call ``name``. Raises InvalidField for no object."""
        if isinstance(item, Raw):
            is_object = bytes(memoryview(item)[:1]) == b"{"
            item = _decode(name, item, _object_decoder) if is_object else decode_item(name, item)
        if not isinstance(item, dict):
            raise InvalidField(name, item, "must be an object")
        return cls(item, name)

    def name(self, field: str) -> str:
        """The field as errors call it: with the path to it."""
        return f"{self._path}.{field}" if self._path else field

    def invalid(self, field: str, rule: str) -> InvalidField:
        """The error that the value of ``field`` breaks ``rule``."""
        return InvalidField(self.name(field), self.raw(field), rule)

    def present(self, field: str) -> bool:
        value = self._values.get(field)
        return value is not None and not (isinstance(value, Raw) and bytes(memoryview(value)[:1]) == b"n")

    def raw(self, field: str) -> object:
        value = self._values.get(field)
        if isinstance(value, Raw):
            value = self._values[field] = decode_item(self.name(field), value)
        return value

    def undecoded(self, field: str) -> Raw | None:
        """The JSON of a field of the body; None when it is absent or null."""
        value = self._values.get(field)
        return value if isinstance(value, Raw) and self.present(field) else None

    def split(self, field: str, max_items: int) -> list[Raw] | None:
        """The entries of a list of the body, each as JSON, at most ``max_items``."""
        value = self.undecoded(field)
        if value is None:
            return None
        if bytes(memoryview(value)[:1]) != b"[":
            raise self.invalid(field, "must be a list")
        try:
            items = split_list(value, max_items)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _not_json(self.name(field), error) from error
        if items is None:
            raise ApiError(
                400,
                f"{self.name(field)}: must have at most {max_items} entries; split the request",
                param=self.name(field),
            )
        return items

    def to_dict(self) -> dict[str, object]:
        return {field: self.raw(field) for field in self._values}

    def require_unset(self, field: str, *harmless: object) -> None:
        """Refuse a known field whose value asks for something that is not supported."""
        if self.present(field) and self.raw(field) not in harmless:
            raise self.invalid(field, "is not supported by this service; leave the field out")

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(field, "must be true or false")
        return value

    def integer(self, field: str, low: int, high: int) -> int | None:
        """An integer in [low, high]."""
        value = self.raw(field)
        if value is None:
            return None
        if not is_integer(value):
            raise self.invalid(field, "must be an integer")
        return within(self.name(field), value, low, high)

    def number(self, field: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """A number in [low, high], or (low, high] with ``above_low``."""
        value = self.raw(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(field, "must be a number")
        if value < low or (above_low and value == low):
            raise self.invalid(field, f"must be {'above' if above_low else 'at least'} {low:g}")
        if value > high:
            raise self.invalid(field, f"must be at most {high:g}")
        return float(value)

    def text(self, field: str, max_chars: int) -> str | None:
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.invalid(field, "must be a string")
        if len(value) > max_chars:
            raise self.invalid(field, f"must have at most {max_chars} characters, it has {len(value)}")
        return value

    def needed_text(self, field: str, max_chars: int | None = None) -> str:
        """A string, with ``max_chars`` not an empty one."""
        value = self.raw(field)
        if not isinstance(value, str) or (max_chars is not None and not 0 < len(value) <= max_chars):
            bound = "" if max_chars is None else f" of 1 to {max_chars} characters"
            raise self.invalid(field, f"must be a string{bound}")
        return value

    def nested(self, field: str) -> JsonFields | None:
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(field, "must be an object")
        return JsonFields(value, self.name(field))

    def items(self, field: str, max_items: int) -> list[object] | None:
        """A list with at most ``max_items`` entries of any type."""
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.invalid(field, "must be a list")
        if len(value) > max_items:
            raise self.invalid(field, f"must have at most {max_items} entries, it has {len(value)}")
        return value

    def integers(self, field: str, max_items: int, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high]; () when the field is absent."""
        return tuple(checked_integers(self.name(field), self.items(field, max_items) or [], low, high))


def first_chars(value: Raw) -> tuple[bytes, bytes]:
    """The first character of a JSON value and the next one, white space left out."""
    view = memoryview(value)
    start = 1
    while bytes(view[start : start + 1]) in (b" ", b"\t", b"\r", b"\n"):
        start += 1
    return bytes(view[:1]), bytes(view[start : start + 1])


def split_list(value: Raw, max_items: int) -> list[Raw] | None:
    """The entries of a JSON list, each as JSON; None for more than ``max_items``, whatever their number.

    Raises what msgspec raises for what is no JSON list.
    """
    entries = _entries_decoder(max_items + 1).decode(value)
    items = [item for item in msgspec.structs.astuple(entries) if item is not UNSET]
    return None if len(items) > max_items else items


@cache
def _entries_decoder(max_items: int) -> msgspec.json.Decoder[Any]:
    """Of a list as a structure with so many fields: what is behind the last one costs no memory."""
    fields = [(f"item_{index}", Raw | UnsetType, UNSET) for index in range(max_items)]
    return msgspec.json.Decoder(msgspec.defstruct("Entries", fields, array_like=True))


def decode_item(name: str, value: Raw) -> object:
    """The value. Raises ApiError for what is no JSON, or too much of it; a string may have any length."""
    if len(memoryview(value)) > MAX_FIELD_BYTES and bytes(memoryview(value)[:1]) != b'"':
        raise ApiError(
            400,
            f"{name}: has {len(memoryview(value))} bytes of JSON; {MAX_FIELD_BYTES} are the most for a field",
            param=name,
        )
    return _decode(name, value, _decoder)


def _decode(name: str, value: Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _not_json(name, error) from error


def _not_json(name: str, error: Exception) -> ApiError:
    return ApiError(400, f"{name}: is not valid JSON: {error}", param=name, code="invalid_json")


def checked_integers(
    name: str, values: Sequence[object], low: int, high: int, first_index: int = 0
) -> Iterator[int]:
    for index, value in enumerate(values, first_index):
        if not is_integer(value):
            raise InvalidField(f"{name}[{index}]", value, "must be an integer")
        yield within(f"{name}[{index}]", value, low, high)


def is_integer(value: object) -> TypeGuard[int]:
    """A JSON integer: true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def within(name: str, value: int, low: int, high: int) -> int:
    if value < low:
        raise InvalidField(name, value, f"must be at least {low}")
    if value > high:
        raise InvalidField(name, value, f"must be at most {high}")
    return value


def _kind(body: bytes) -> str:
    """Of a JSON value that is no object."""
    kinds = {b"n": "null", b"t": "a boolean", b"f": "a boolean", b'"': "a string", b"[": "a list"}
    return kinds.get(body.lstrip()[:1], "a number")
