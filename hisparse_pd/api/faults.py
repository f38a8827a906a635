"""What is wrong with a JSON value that is not as its type was declared: the field, its value, the bound.

Called for what msgspec has refused. Types are those of ``msgspec.inspect``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import inspect

from hisparse_pd.http.http_errors import ApiError, InvalidField


def path_of(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


def structures_of(kind: inspect.Type) -> list[inspect.StructType]:
    """``kind`` itself, or those of a union."""
    return [inner for inner in _kinds(kind) if isinstance(inner, inspect.StructType)]


def is_raw(kind: inspect.Type) -> bool:
    return isinstance(kind.type if isinstance(kind, inspect.Metadata) else kind, inspect.RawType)


def fault_of(name: str, kind: Any, value: object) -> ApiError | None:
    """The error for the decoded ``value``, None when it is as the annotation ``kind`` says."""
    return _fault(name, inspect.type_info(kind), value)


def object_fault(
    name: str, structures: Sequence[inspect.StructType], value_of: Callable[[str], object]
) -> ApiError | None:
    """The error for the object whose fields ``value_of`` tells; of several ``structures`` each has a tag."""
    (structure, *others) = structures
    if tag_field := structure.tag_field:
        known = {str(candidate.tag): candidate for candidate in structures}
        tag = value_of(tag_field)
        if not isinstance(tag, str) or tag not in known:
            rule = f"must be {_either([*map(json.dumps, known)])}; others are not supported here"
            return InvalidField(path_of(name, tag_field), tag, rule)
        structure = known[tag]
    assert tag_field or not others, "which of them is meant?"
    for field in structure.fields:
        path = path_of(name, field.name)
        if is_raw(field.type):
            continue
        value = value_of(field.name)
        if value is None and field.required:
            return ApiError(400, f"{path}: the field is needed", param=path, code="missing_field")
        if value is not None and (fault := _fault(path, field.type, value)):
            return fault
    return None


def _fault(name: str, kind: inspect.Type, value: Any) -> ApiError | None:
    """The error for the decoded ``value``, None when it is as ``kind`` says."""
    if isinstance(kind, inspect.Metadata):
        fault = _fault(name, kind.type, value)
        rule = (kind.extra or {}).get("rule")
        return InvalidField(name, value, rule) if fault and rule else fault
    fitting = [inner for inner in _kinds(kind) if type(value) in _json_types(inner)]
    if not fitting:
        return InvalidField(name, value, f"must be {_either(_names(kind))}")
    match fitting[0]:
        case inspect.Metadata() as inner:
            return _fault(name, inner, value)
        case inspect.StructType():
            return object_fault(name, structures_of(kind), value.get)
        case inspect.LiteralType(values=values) if value not in values:
            return InvalidField(name, value, f"must be {_either(_names(kind))}")
        case inspect.IntType() | inspect.FloatType() as number:
            broken = _broken_bound(number, value)
            return InvalidField(name, value, broken) if broken else None
        case inspect.StrType() | inspect.ListType() | inspect.DictType() as sized:
            broken = _broken_length(sized, value)
            return InvalidField(name, value, broken) if broken else _entries_fault(name, sized, value)
    return None


def _broken_bound(kind: inspect.IntType | inspect.FloatType, value: float) -> str | None:
    shown = "{:g}".format if isinstance(kind, inspect.FloatType) else str
    if kind.ge is not None and value < kind.ge:
        return f"must be at least {shown(kind.ge)}"
    if kind.gt is not None and value <= kind.gt:
        return f"must be above {shown(kind.gt)}"
    if kind.le is not None and value > kind.le:
        return f"must be at most {shown(kind.le)}"
    return None


def _broken_length(kind: inspect.StrType | inspect.ListType | inspect.DictType, value: Any) -> str | None:
    if kind.min_length is not None and len(value) < kind.min_length:
        return "must not be empty"
    if kind.max_length is not None and len(value) > kind.max_length:
        unit = "characters" if isinstance(value, str) else "entries"
        return f"must have at most {kind.max_length} {unit}, it has {len(value)}"
    return None


def _entries_fault(name: str, kind: inspect.Type, value: Any) -> ApiError | None:
    faults: Iterator[ApiError | None] = iter(())
    if isinstance(kind, inspect.ListType):
        faults = (_fault(f"{name}[{index}]", kind.item_type, item) for index, item in enumerate(value))
    elif isinstance(kind, inspect.DictType):
        faults = (
            _fault(name, kind.key_type, _key(key)) or _fault(f"{name}.{key:.80}", kind.value_type, item)
            for key, item in value.items()
        )
    return next(filter(None, faults), None)


def _key(key: str) -> object:
    """A key of JSON, as the integer that it is where one is declared."""
    return int(key) if re.fullmatch(r"-?(0|[1-9][0-9]{0,18})", key) else key


# --- JSON types ------------------------------------------------------------------------------------------

_JSON: dict[type[inspect.Type], tuple[tuple[type, ...], list[str]]] = {
    inspect.NoneType: ((type(None),), []),
    inspect.BoolType: ((bool,), ["true", "false"]),
    inspect.IntType: ((int,), ["an integer"]),
    inspect.FloatType: ((int, float), ["a number"]),
    inspect.StrType: ((str,), ["a string"]),
    inspect.ListType: ((list,), ["a list"]),
    inspect.DictType: ((dict,), ["an object"]),
    inspect.StructType: ((dict,), ["an object"]),
    inspect.AnyType: ((type(None), bool, int, float, str, list, dict), []),
}
"""The types of decoded values, and what an error calls them."""


def _kinds(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _json_types(kind: inspect.Type) -> tuple[type, ...]:
    if isinstance(kind, inspect.Metadata):
        return tuple(known for inner in _kinds(kind.type) for known in _json_types(inner))
    if isinstance(kind, inspect.LiteralType):
        return tuple({type(value) for value in kind.values})
    return _JSON[type(kind)][0]


def _names(kind: inspect.Type) -> list[str]:
    match kind:
        case inspect.Metadata(type=inner):
            return _names(inner)
        case inspect.UnionType(types=types):
            return [name for inner in types for name in _names(inner)]
        case inspect.LiteralType(values=values):
            return [json.dumps(value) for value in values]
        case inspect.ListType(item_type=inspect.IntType() | inspect.StrType() as inner):
            (name,) = _names(inner)
            return [f"a list of {name.partition(' ')[2]}s"]
    return _JSON[type(kind)][1]


def _either(names: Sequence[str]) -> str:
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} or {last}" if most else last
