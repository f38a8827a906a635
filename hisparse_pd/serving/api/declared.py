"""Declarations of bodies: classes of typed fields, and annotations that add to their types.

``bodies.py`` and the ``*_parts.py`` beside it declare bodies with it; ``declared_decoding.py``,
``declared_errors.py`` and ``openapi.py`` read the declarations. A class under ``declared`` has a field for
each annotation. A field whose type takes None may be left out or null; any other is required. Fields that a
class does not declare are not decoded: a body of megabytes can be millions of objects, and the decoder holds
the interpreter. For the same reason large lists are ``Raw`` fields (``list_of``), which their readers split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Raw, inspect

T = TypeVar("T")
Schema = dict[str, object]

NOT_SUPPORTED = "is not supported by this service; leave the field out"


# --- classes ---------------------------------------------------------------------------------------------


def declared(cls: type[T]) -> type[T]:
    """Return ``cls`` as a msgspec structure. Its bases are plain classes of annotations."""
    return _msgspec_class(cls)


def tagged(field: str, value: str) -> Callable[[type[T]], type[T]]:
    """Declare a member of a union: an object is of this class if its ``field`` is ``value``."""
    return lambda cls: _msgspec_class(cls, tag_field=field, tag=value)


def tag_of(value: object) -> str:
    """Return the tag of the class that ``value`` is of."""
    return str(cast("Any", value).__struct_config__.tag)


def _msgspec_class(cls: type[T], **options: Any) -> type[T]:
    hints = get_type_hints(cls, include_extras=True)
    fields = [
        (name, _decodable(kind), *([None] if _takes_none(kind) else [])) for name, kind in hints.items()
    ]
    options |= {"module": cls.__module__, "namespace": {"__doc__": cls.__doc__}, "kw_only": True}
    return cast("type[T]", msgspec.defstruct(cls.__name__, fields, **options))


def _takes_none(kind: Any) -> bool:
    return NoneType in get_args(kind.__origin__ if get_origin(kind) is Annotated else kind)


def _decodable(kind: Any) -> Any:
    """Return the type that msgspec decodes a field of type ``kind`` as: ``kind`` itself, but ``Raw`` in place
    of ``Raw | None``, since msgspec has no ``Raw`` in unions. ``declared_decoding.decode`` then makes a null
    in such a field None."""
    if get_origin(kind) is Annotated and kind.__origin__ == Raw | None:
        return Annotated[Raw, *kind.__metadata__]
    return kind


# --- annotations -----------------------------------------------------------------------------------------

_RULE, _AS_SPELLED, _UNSUPPORTED = "rule", "as_spelled", "unsupported"


class Unsupported(NamedTuple):
    """How a field is refused: the values that are let through, and what the error says of any other."""

    harmless: tuple[object, ...]
    why: str


def rule(text: str) -> Meta:
    """Set the text that errors about a wrong value have, in place of the one that its type gives."""
    return Meta(extra={_RULE: text})


AS_SPELLED = Meta(extra={_AS_SPELLED: True})
"""Annotation of a field within which the spelling of numbers is kept (``exact_numbers``)."""


def unsupported(*harmless: object, why: str = NOT_SUPPORTED) -> Meta:
    """Refuse a known field, a ``Raw | None``, unless it is null or its value is one of ``harmless``, with
    which it asks for nothing. ``why``: the text of the error."""
    schema = {"deprecated": True, "enum": [None, *harmless], "description": "Not supported."}
    return Meta(extra={_UNSUPPORTED: Unsupported(harmless, why)}, extra_json_schema=schema)


def raw(**schema: object) -> Meta:
    """Describe a ``Raw | None``, which is not decoded with its object, in the OpenAPI document."""
    return Meta(extra_json_schema={"anyOf": [schema, {"type": "null"}]})


def list_of(max_items: int, *names: str, min_items: int = 1, besides: Schema | None = None) -> Meta:
    """Describe a ``Raw | None`` as a list of the declared classes ``names``, or as ``besides``."""
    items: Schema = {"anyOf": [reference(name) for name in names]}
    schema: Schema = {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}
    return raw(**schema) if besides is None else raw(anyOf=[besides, schema])


def reference(name: str) -> Schema:
    """Return a reference to the schema of the declared class ``name``."""
    return {"$ref": f"#/components/schemas/{name}"}


# --- reading declarations --------------------------------------------------------------------------------


def members_of(kind: inspect.Type) -> Sequence[inspect.Type]:
    """Return the members of a union, or ``kind`` alone, without their annotations."""
    if isinstance(kind, inspect.Metadata):
        return members_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [member for each in kind.types for member in members_of(each)]
    return (kind,)


def structures_of(kind: inspect.Type) -> list[inspect.StructType]:
    """Return those members of ``kind`` that are declared classes."""
    return [member for member in members_of(kind) if isinstance(member, inspect.StructType)]


def is_raw(kind: inspect.Type) -> bool:
    return any(isinstance(member, inspect.RawType) for member in members_of(kind))


def rule_of(kind: inspect.Type) -> str | None:
    """Return the text of ``rule``."""
    return cast("str | None", _extra_of(kind, _RULE))


def unsupported_of(kind: inspect.Type) -> Unsupported | None:
    """Return what ``unsupported`` says of a field."""
    return cast("Unsupported | None", _extra_of(kind, _UNSUPPORTED))


def keeps_spelling(structure: inspect.StructType) -> bool:
    """Whether a field of ``structure``, or of one within it, is AS_SPELLED."""
    return any(
        _extra_of(field.type, _AS_SPELLED) or any(map(keeps_spelling, structures_of(field.type)))
        for field in structure.fields
    )


def _extra_of(kind: inspect.Type, key: str) -> object:
    return (kind.extra or {}).get(key) if isinstance(kind, inspect.Metadata) else None
