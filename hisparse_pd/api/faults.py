"""What msgspec says of a JSON value that is not as its type was declared, as an error with field and value.

Its messages have the path, ``$.a[0]``, and the bound. The type in that place adds what they have not: the
values of a list of literals or tags, and the rule of ``declared.rule``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

from hisparse_pd.http.http_errors import ApiError, FieldRefused, InvalidField, shown

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


def names_no_entry(error: msgspec.ValidationError) -> bool:
    """Whether it is about a key or a value of an object without declared fields."""
    return "[...]" in str(error) or "`key`" in str(error)


def fault(
    name: str,
    kind: inspect.Type,
    value: Any,
    error: msgspec.ValidationError,
    entry: tuple[str, object] | None = None,
) -> ApiError:
    """The error for ``value``, the parts of it that ``error`` is about at least, which is not as ``kind``.

    ``entry``: at which it lies, where ``error`` does not name it.
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
