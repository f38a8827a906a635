"""Decodes JSON objects of requests as declared classes; an error says what breaks the declaration.

``schemas.py`` and ``tokens.py`` decode bodies with it, and the readers of messages, items and tools their
objects. Large objects are split first, since a decoder lets no other thread run.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, NamedTuple, TypeVar, overload

import msgspec
from msgspec import Raw, inspect

from hisparse_pd.serving.api.declared import is_raw, keeps_spelling, structures_of, unsupported_of
from hisparse_pd.serving.api.declared_errors import BadEntry, Complaint, explain, field_path
from hisparse_pd.serving.api.exact_numbers import read_float
from hisparse_pd.serving.api.raw_json import (
    MAX_FIELD_BYTES,
    check_size,
    check_text,
    decode_item,
    first_chars,
    not_json,
)
from hisparse_pd.serving.http.http_errors import ApiError, InvalidField
from hisparse_pd.serving.http.off_loop import taking_interpreter

T = TypeVar("T")
Json = bytes | Raw


@overload
def decode(kind: type[T], text: Json, name: str = "") -> T: ...
@overload
def decode(kind: UnionType, text: Json, name: str = "") -> Any: ...
def decode(kind: Any, text: Json, name: str = "") -> Any:
    """Decode ``text`` as an object of a declared class, or of a union of tagged ones. Raises ApiError 400.

    Errors begin with ``name``, the path to the object, which is "" for the body itself. A field is refused if
    it exceeds both MAX_FIELD_BYTES of JSON and MAX_FIELD_VALUES values; strings and ``Raw`` fields may do so.
    """
    try:
        value = _decode_object(_declaration_of(kind), text, name)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise not_json(name, error) from error
    _check_raw_fields(value, name)
    return value


def decode_body(kind: type[T], body: bytes) -> T:
    """Decode a request's body. Raises ApiError 400 unless it is a JSON object in UTF-8, nested no deeper than
    allowed, and as declared."""
    check_text(body)
    return decode(kind, body)


def _decode_object(declaration: _Declaration, text: Json, name: str) -> Any:
    """Decode ``text``. If it is large, its ``Raw`` fields are taken out first and set afterwards.

    A null in a ``Raw`` field may come out as JSON, which ``_check_raw_fields`` makes None. Raises ApiError if
    ``text`` is not as declared, and MsgspecError if it is not JSON.
    """
    is_large = len(memoryview(text)) > MAX_FIELD_BYTES
    split = declaration.split(text, name) if is_large else _SplitObject(text, {})
    try:
        value = declaration.decode(split.others)
    except msgspec.ValidationError as error:
        raise _refusal(declaration, text, name, error) from error
    for field, given in split.raw_fields.items():
        setattr(value, field, given)
    return value


class _SplitObject(NamedTuple):
    """A JSON object in two parts."""

    others: Json
    """The object without ``raw_fields``."""
    raw_fields: dict[str, Raw]
    """``Raw`` fields that are neither absent nor null."""


class _Declaration:
    """A declared class, or a union of tagged ones, with its decoders."""

    def __init__(self, kind: Any) -> None:
        self.type = inspect.type_info(kind)
        structures = structures_of(self.type)
        fields = [field for structure in structures for field in structure.fields]
        self.tag_fields = {structure.tag_field for structure in structures if structure.tag_field is not None}
        self._raw_fields = {field.name for field in fields if is_raw(field.type)}
        is_spelling_kept = any(map(keeps_spelling, structures))
        self._decoder = msgspec.json.Decoder(kind, float_hook=read_float if is_spelling_kept else None)
        # A second decoder leaves the fields as they stand.
        names = sorted({field.name for field in fields} | self.tag_fields)
        as_raw = msgspec.defstruct("Fields", [(name, Raw, None) for name in names], kw_only=True)
        self._fields_decoder = msgspec.json.Decoder(as_raw)

    def decode(self, text: Json) -> Any:
        """Decode ``text``. Raises MsgspecError."""
        with taking_interpreter(len(memoryview(text))):
            return self._decoder.decode(text)

    def given_fields(self, text: Json) -> dict[str, Raw]:
        """Return the declared fields that are neither absent nor null, as JSON. Raises MsgspecError."""
        with taking_interpreter(len(memoryview(text))):
            fields = msgspec.structs.asdict(self._fields_decoder.decode(text))
        return {name: value for name, value in fields.items() if value is not None and not _is_null(value)}

    def split(self, text: Json, name: str) -> _SplitObject:
        """Take the ``Raw`` fields out of ``text``. Raises MsgspecError, and ApiError where another field is
        too large."""
        others = self.given_fields(text)
        raw_fields = {field: others.pop(field) for field in self._raw_fields & others.keys()}
        for field, value in others.items():
            check_size(field_path(name, field), value)
        return _SplitObject(msgspec.json.encode(others) if raw_fields else text, raw_fields)


@cache
def _declaration_of(kind: Any) -> _Declaration:
    return _Declaration(kind)


def _is_null(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"n"


# --- ``Raw`` fields --------------------------------------------------------------------------------------


def _check_raw_fields(value: msgspec.Struct, name: str) -> None:
    """Replace JSON nulls in ``Raw`` fields by None, in structures within ``value`` too. Raises InvalidField
    if an unsupported field has a value that is not harmless."""
    for field in _fields_to_check(type(value)):
        match getattr(value, field.name):
            case msgspec.Struct() as inner:
                _check_raw_fields(inner, field_path(name, field.name))
            case Raw() as given if _is_null(given):
                setattr(value, field.name, None)
            case Raw() as given if (refused := unsupported_of(field.type)) is not None:
                path = field_path(name, field.name)
                asked = decode_item(path, given)
                if asked not in refused.harmless:
                    raise InvalidField(path, asked, refused.why)


@cache
def _fields_to_check(structure: type[msgspec.Struct]) -> list[inspect.Field]:
    """Return the fields that are ``Raw``, and those that are structures with such fields."""
    (info,) = structures_of(inspect.type_info(structure))
    return [
        field
        for field in info.fields
        if is_raw(field.type) or any(_fields_to_check(inner.cls) for inner in structures_of(field.type))
    ]


# --- errors ----------------------------------------------------------------------------------------------


def _refusal(declaration: _Declaration, text: Json, name: str, error: msgspec.ValidationError) -> ApiError:
    """Return the error for ``text``, which is not as declared. Raises MsgspecError if it is no JSON."""
    if first_chars(text)[0] != b"{":
        if name:
            return InvalidField(name, decode_item(name, Raw(bytes(text))), "must be an object")
        return ApiError(400, f"the body must be a JSON object: {error}", code="invalid_json")
    complaint = Complaint.of(error)
    # Only the fields that the explanation needs are decoded.
    needed = declaration.tag_fields.union(map(str, complaint.steps[:1]))
    given = {field: value for field, value in declaration.given_fields(text).items() if field in needed}
    fields = {field: decode_item(field_path(name, field), value) for field, value in given.items()}
    return explain(complaint, declaration.type, fields, name, _bad_entry(declaration, fields, complaint))


def _bad_entry(declaration: _Declaration, fields: dict[str, object], complaint: Complaint) -> BadEntry | None:
    """Return the first entry that causes this complaint; None if it is not about an entry.

    msgspec does not say which entry of an object without declared fields it means, so each is decoded alone.
    """
    if not complaint.is_about_an_entry:
        return None
    for field, entries in fields.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            try:
                declaration.decode(msgspec.json.encode({field: {key: value}}))
            except msgspec.ValidationError as error:
                if Complaint.of(error) == complaint:
                    return BadEntry(key, value)
    return None
