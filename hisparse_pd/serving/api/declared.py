"""JSON objects of requests as declared types: decoded, or refused with what breaks the declaration.

A class under ``declared`` has a field for each annotation. One whose type takes None may be left out or null;
any other has to be there. Other fields are not decoded: a body of megabytes can be millions of objects, and
the decoder lets no other thread run. So large lists are ``Raw`` (``list_of``), and split by who reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints, overload

import msgspec
from msgspec import Meta, Raw, inspect

from hisparse_pd.serving.api.exact_numbers import read_float
from hisparse_pd.serving.api.raw_json import (
    MAX_FIELD_BYTES,
    check_size,
    check_text,
    decode_item,
    first_chars,
    not_json,
)
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField, shown
from hisparse_pd.serving.http.off_loop import taking_interpreter

T = TypeVar("T")
Schema = dict[str, object]

NOT_SUPPORTED = "is not supported by this service; leave the field out"


def declared(cls: type[T]) -> type[T]:
    """``cls`` as a msgspec structure. Its bases may be several, and are plain classes of annotations."""
    return _structure(cls)


def tagged(field: str, value: str) -> Callable[[type[T]], type[T]]:
    """A declared class that is told from others of a union by ``value`` in ``field``."""
    return lambda cls: _structure(cls, tag_field=field, tag=value)


def tag_of(value: object) -> str:
    """By what ``value``, of a tagged class, is told from others."""
    return str(cast("Any", value).__struct_config__.tag)


def _structure(cls: type[T], **options: Any) -> type[T]:
    hints = get_type_hints(cls, include_extras=True)
    fields = [(name, _read_as(kind), *([None] if _takes_none(kind) else [])) for name, kind in hints.items()]
    options |= {"module": cls.__module__, "namespace": {"__doc__": cls.__doc__}, "kw_only": True}
    return cast("type[T]", msgspec.defstruct(cls.__name__, fields, **options))


def _takes_none(kind: Any) -> bool:
    return NoneType in get_args(kind.__origin__ if get_origin(kind) is Annotated else kind)


def _read_as(kind: Any) -> Any:
    """msgspec has no ``Raw`` in unions: a null that is given for one becomes None after decoding."""
    if get_origin(kind) is Annotated and kind.__origin__ == Raw | None:
        return Annotated[Raw, *kind.__metadata__]
    return kind


# --- what annotations say beside bounds ------------------------------------------------------------------


def rule(text: str) -> Meta:
    """What errors say that a value must be, in the place of what its type says."""
    return Meta(extra={"rule": text})


AS_SPELLED = Meta(extra={"as_spelled": True})
"""Of a field in which no type says what numbers are: their spelling is kept (``exact_numbers``)."""


def unsupported(*harmless: object, why: str = NOT_SUPPORTED) -> Meta:
    """Of a known field, a ``Raw | None`` that may have these values only, which ask for nothing."""
    schema = {"deprecated": True, "enum": [None, *harmless], "description": "Not supported."}
    return Meta(extra={"harmless": harmless, "why": why}, extra_json_schema=schema)


def raw(**schema: object) -> Meta:
    """Of a ``Raw | None``, which is not decoded with the object: what the OpenAPI document says of it."""
    return Meta(extra_json_schema={"anyOf": [schema, {"type": "null"}]})


def list_of(max_items: int, *names: str, min_items: int = 1, besides: Schema | None = None) -> Meta:
    """Of a ``Raw`` field that is a list of these declared objects, or ``besides``. Who reads it splits it."""
    items: Schema = {"anyOf": [reference(name) for name in names]}
    schema: Schema = {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}
    return raw(**schema) if besides is None else raw(anyOf=[besides, schema])


def reference(name: str) -> Schema:
    """To the schema of a declared class, by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


# --- decoding --------------------------------------------------------------------------------------------


@overload
def decode(kind: type[T], text: bytes | Raw, name: str = "") -> T: ...
@overload
def decode(kind: UnionType, text: bytes | Raw, name: str = "") -> Any: ...
def decode(kind: Any, text: bytes | Raw, name: str = "") -> Any:
    """``text`` as an object of a declared class, or of a union of tagged ones.

    ``name``: the path to it, which errors begin with; "" for the body itself. Raises ApiError 400. A field
    takes at most MAX_FIELD_BYTES of JSON, or MAX_FIELD_VALUES values, strings and ``Raw`` aside.
    """
    try:
        small, large = text, None
        if len(memoryview(text)) > MAX_FIELD_BYTES:
            small, large = _without_raw(kind, text, name)
        try:
            with taking_interpreter(len(memoryview(small))):
                value = _decoder(kind).decode(small)
        except msgspec.ValidationError as error:
            raise _explained(kind, text, name, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise not_json(name, error) from error
    for field, given in (large or {}).items():
        setattr(value, field, given)
    _settle(value, name)
    return value


def decode_body(kind: type[T], body: bytes) -> T:
    """Raises ApiError 400 unless ``body`` is a JSON object in UTF-8, of bounded nesting, and as declared."""
    check_text(body)
    return decode(kind, body)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    if any(map(_keeps_spelling, _structures(kind))):
        return msgspec.json.Decoder(kind, float_hook=read_float)
    return msgspec.json.Decoder(kind)


def _keeps_spelling(structure: inspect.StructType) -> bool:
    """Whether a field of it is AS_SPELLED, or one of a structure within it."""
    return any(
        (isinstance(field.type, inspect.Metadata) and (field.type.extra or {}).get("as_spelled"))
        or any(map(_keeps_spelling, structures_of(field.type)))
        for field in structure.fields
    )


@cache
def _structures(kind: Any) -> list[inspect.StructType]:
    return structures_of(inspect.type_info(kind))


@cache
def _fields_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Of the object's declared fields, each as JSON."""
    names = {field.name for structure in _structures(kind) for field in structure.fields}
    names |= {structure.tag_field for structure in _structures(kind) if structure.tag_field}
    fields = [(name, Raw, None) for name in sorted(names)]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, kw_only=True))


def _given(kind: Any, text: bytes | Raw) -> dict[str, Raw]:
    """The fields that are neither absent nor null."""
    with taking_interpreter(len(memoryview(text))):
        fields = msgspec.structs.asdict(_fields_decoder(kind).decode(text))
    return {name: value for name, value in fields.items() if value is not None and not _is_null(value)}


def _is_null(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"n"


def _without_raw(kind: Any, text: bytes | Raw, name: str) -> tuple[bytes | Raw, dict[str, Raw]]:
    """``text`` without its ``Raw`` fields, and those. Raises ApiError for another field that is too large."""
    given = _given(kind, text)
    raw_fields = {
        field.name: given.pop(field.name)
        for structure in _structures(kind)
        for field in structure.fields
        if is_raw(field.type) and field.name in given
    }
    for field, value in given.items():
        check_size(path_of(name, field), value)
    return (msgspec.json.encode(given) if raw_fields else text), raw_fields


# --- what is not supported -------------------------------------------------------------------------------


def _settle(value: msgspec.Struct, name: str) -> None:
    """Nulls of ``Raw`` fields become None, in structures within ``value`` too. Raises InvalidField for an
    unsupported field that asks for something."""
    for field, harmless, why in _to_settle(type(value)):
        given = getattr(value, field)
        if isinstance(given, msgspec.Struct):
            _settle(given, path_of(name, field))
        elif given is not None and _is_null(given):
            setattr(value, field, None)
        elif given is not None and harmless is not None:
            path = path_of(name, field)
            if (asked := decode_item(path, given)) not in harmless:
                raise InvalidField(path, asked, why)


@cache
def _to_settle(structure: type[msgspec.Struct]) -> list[tuple[str, Sequence[object] | None, str]]:
    """``Raw`` fields, with the only values that an unsupported one may have; structures with such fields."""
    found: list[tuple[str, Sequence[object] | None, str]] = []
    (info,) = _structures(structure)
    for field in info.fields:
        extra = (field.type.extra or {}) if isinstance(field.type, inspect.Metadata) else {}
        if is_raw(field.type) or any(_to_settle(inner.cls) for inner in structures_of(field.type)):
            found.append((field.name, extra.get("harmless"), extra.get("why", "")))
    return found


# --- errors ----------------------------------------------------------------------------------------------


def _explained(kind: Any, text: bytes | Raw, name: str, error: msgspec.ValidationError) -> ApiError:
    """The error for ``text``, which is not as declared. Of its fields those that matter are decoded."""
    if first_chars(text)[0] != b"{":
        if name:
            return InvalidField(name, decode_item(name, Raw(bytes(text))), "must be an object")
        return ApiError(400, f"the body must be a JSON object: {error}", code="invalid_json")
    wanted = {*steps_of(error)[:1], *(structure.tag_field for structure in _structures(kind))}
    given = {field: value for field, value in _given(kind, text).items() if field in wanted}
    value = {field: decode_item(path_of(name, field), of_field) for field, of_field in given.items()}
    return fault(name, inspect.type_info(kind), value, error, _bad_entry(kind, value, error))


def _bad_entry(kind: Any, value: Schema, error: msgspec.ValidationError) -> tuple[str, object] | None:
    """The first entry for which msgspec says ``error``, where that is about a key or a value of an object
    without declared fields: it names none."""
    if "[...]" not in str(error) and "`key`" not in str(error):
        return None
    for field, entries in value.items():
        for entry in entries.items() if isinstance(entries, dict) else ():
            try:
                _decoder(kind).decode(msgspec.json.encode({field: dict([entry])}))
            except msgspec.ValidationError as found:
                if str(found) == str(error):
                    return entry
    return None


_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile("Object missing required field `(.*)`")


def path_of(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


def structures_of(kind: inspect.Type) -> list[inspect.StructType]:
    """``kind`` itself, or those of a union."""
    return [inner for inner in _kinds(kind) if isinstance(inner, inspect.StructType)]


def is_raw(kind: inspect.Type) -> bool:
    return isinstance(kind.type if isinstance(kind, inspect.Metadata) else kind, inspect.RawType)


def steps_of(error: msgspec.ValidationError) -> list[str | int]:
    """The fields and indices that lead to what it is about."""
    where = str(error).rpartition(" - at ")[2] if " - at " in str(error) else ""
    return [int(index) if index else field for field, index in _STEP.findall(where)]


def fault(
    name: str,
    kind: inspect.Type,
    value: Any,
    error: msgspec.ValidationError,
    entry: tuple[str, object] | None = None,
) -> ApiError:
    """The error for ``value``, the parts of it that ``error`` is about at least, which is not as ``kind``.

    msgspec says the path, ``$.a[0]``, and the bound. The type in that place adds the values of a list of
    literals or tags, and the rule of ``rule``. ``entry``: at which it lies, where ``error`` does not name it.
    """
    for step in steps_of(error):
        kind, value = _declared(kind, step, value), _part(value, step)
        name = path_of(name, step) if isinstance(step, str) else f"{name}[{step}]"
    said, _, where = str(error).partition(" - at ")
    if missing := _MISSING.match(said):
        path = path_of(name, missing[1])
        return FieldRefused(path, "the field is needed", code="missing_field")
    rule = said.partition(", got ")[0].replace("Expected", "must be")
    if rule == said:
        rule = f"is refused: {said.lower()}"
    if entry is not None:
        key, of_key = map(shown, entry)
        entry_named = f"the key {key}" if "`key`" in where else f"{of_key} for {key}"
        return InvalidField(name, value, f"has {entry_named}, which {rule}")
    return InvalidField(name, value, _rule(kind) or _one_of(kind, said) or rule)


def _part(value: Any, step: str | int) -> Any:
    """None where a field comes twice, and this one is not the one that was refused."""
    match value, step:
        case dict(), str(field):
            return value.get(field)
        case list(), int(index) if index < len(value):
            return value[index]
    return None


def _declared(kind: inspect.Type, step: str | int, value: Any) -> inspect.Type:
    """The type of a part of ``value``; of what tells structures apart, their union."""
    for inner in _kinds(kind):
        match inner:
            case inspect.ListType(item_type=item) if isinstance(step, int):
                return item
            case inspect.StructType() if isinstance(step, str):
                fields = {field.name: field.type for field in inner.fields}
                is_meant = inner.tag_field is None or _part(value, inner.tag_field) == inner.tag
                if is_meant and step in fields:
                    return fields[step]
    return kind


def _rule(kind: inspect.Type) -> str | None:
    return (kind.extra or {}).get("rule") if isinstance(kind, inspect.Metadata) else None


def _one_of(kind: inspect.Type, said: str) -> str:
    """The values that are known, where another one was given."""
    if not said.startswith("Invalid"):
        return ""
    known: list[object] = [structure.tag for structure in structures_of(kind)]
    known += [
        value for inner in _kinds(kind) if isinstance(inner, inspect.LiteralType) for value in inner.values
    ]
    if not known:
        return ""
    *most, last = [json.dumps(value) for value in known]
    return f"must be {', '.join(most)} or {last}" if most else f"must be {last}"


def _kinds(kind: inspect.Type) -> Sequence[inspect.Type]:
    """``kind`` itself, or the members of a union, without what is said of them besides."""
    if isinstance(kind, inspect.Metadata):
        return _kinds(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [inner for member in kind.types for inner in _kinds(member)]
    return (kind,)
