"""Typed, bounded access to the fields of one JSON object of a request.

A field that is absent or null has its default. Everything else is of the asked type and within the bounds, or
InvalidField says which field, which value and which bound. Fields that nobody asks for are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

import msgspec

from protocol.http_errors import ApiError, InvalidField

_decoder = msgspec.json.Decoder()


class JsonFields:
    """The fields of the object at ``path`` ("" for the body itself)."""

    def __init__(self, values: dict[str, object], path: str = "") -> None:
        self._values = values
        self._path = path

    @classmethod
    def of_body(cls, body: bytes) -> JsonFields:
        """Raises ApiError 400 unless ``body`` is a JSON object in UTF-8."""
        try:
            body.decode()
            value = _decoder.decode(body)
        except UnicodeDecodeError as error:
            raise ApiError(
                400, f"the body is not valid UTF-8: {error.reason} at byte {error.start}", code="invalid_utf8"
            ) from error
        except RecursionError as error:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(value, dict):
            raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
        return cls(value)

    @classmethod
    def of_item(cls, name: str, item: object) -> JsonFields:
        """Of ``item``, the entry of a list that errors call ``name``. Raises InvalidField for no object."""
        if not isinstance(item, dict):
            raise InvalidField(name, item, "must be an object")
        return cls(item, name)

    def name(self, field: str) -> str:
        """The field as errors call it: with the path to it."""
        return f"{self._path}.{field}" if self._path else field

    def invalid(self, field: str, rule: str) -> InvalidField:
        """The error that the value of ``field`` breaks ``rule``."""
        return InvalidField(self.name(field), self._values.get(field), rule)

    def present(self, field: str) -> bool:
        return self._values.get(field) is not None

    def raw(self, field: str) -> object:
        return self._values.get(field)

    def to_dict(self) -> dict[str, object]:
        return dict(self._values)

    def require_unset(self, field: str, *harmless: object) -> None:
        """Refuse a known field whose value asks for something that is not supported."""
        if self.present(field) and self._values[field] not in harmless:
            raise self.invalid(field, "is not supported by this service; leave the field out")

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(field, "must be true or false")
        return value

    def integer(self, field: str, low: int, high: int) -> int | None:
        """An integer in [low, high]."""
        value = self._values.get(field)
        if value is None:
            return None
        if not is_integer(value):
            raise self.invalid(field, "must be an integer")
        return within(self.name(field), value, low, high)

    def number(self, field: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """A number in [low, high], or (low, high] with ``above_low``."""
        value = self._values.get(field)
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
        value = self._values.get(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.invalid(field, "must be a string")
        if len(value) > max_chars:
            raise self.invalid(field, f"must have at most {max_chars} characters, it has {len(value)}")
        return value

    def nested(self, field: str) -> JsonFields | None:
        value = self._values.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(field, "must be an object")
        return JsonFields(value, self.name(field))

    def items(self, field: str, max_items: int) -> list[object] | None:
        """A list with at most ``max_items`` entries of any type."""
        value = self._values.get(field)
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


def checked_integers(name: str, values: Sequence[object], low: int, high: int) -> Iterator[int]:
    for index, value in enumerate(values):
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


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case _:
            return "a list"
