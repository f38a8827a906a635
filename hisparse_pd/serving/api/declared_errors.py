"""Explains to the client what in a body breaks its declaration: field, value and bound.

``declared_decoding.py`` calls ``explain`` with an error of msgspec, which tells the place, such as
``$.a[0]``, and the bound. If the type declared for that place has a text from ``declared.rule``, that text
replaces msgspec's bound; for a literal or a tag, the list of its values does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from hisparse_pd.serving.api.declared import members_of, rule_of, structures_of
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField, shown

_PLACE_BEGINS = " - at "
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile("Object missing required field `(.*)`")


class Complaint(NamedTuple):
    """A ValidationError's text, in parts."""

    what: str
    """Such as "Expected `int` >= 0", or "Invalid enum value 'x'"."""
    place: str
    """Such as "`$.a[0]`", or "`key` in `$.a`"; "" for the object itself."""

    @classmethod
    def of(cls, error: msgspec.ValidationError) -> Complaint:
        what, begins, place = str(error).rpartition(_PLACE_BEGINS)
        return cls(what, place) if begins else cls(place, "")

    @property
    def steps(self) -> list[str | int]:
        """The fields and indices that lead to the place."""
        return [int(index) if index else field for field, index in _STEP.findall(self.place)]

    @property
    def is_about_an_entry(self) -> bool:
        """Whether it is about a key or a value of an object without declared fields."""
        return "[...]" in self.place or self.is_about_a_key

    @property
    def is_about_a_key(self) -> bool:
        return "`key`" in self.place

    @property
    def is_unknown_value(self) -> bool:
        """Whether the value has the right type, but is not one of a literal's or tag's known values."""
        return self.what.startswith("Invalid")

    @property
    def missing_field(self) -> str | None:
        """The required field that the object lacks."""
        found = _MISSING.match(self.what)
        return found and found[1]

    @property
    def rule(self) -> str:
        """The rule that the value breaks, such as "must be `int` >= 0"."""
        expected = self.what.partition(", got ")[0]
        said = expected.replace("Expected", "must be")
        return said if said != expected else f"is refused: {expected.lower()}"


class BadEntry(NamedTuple):
    """The entry of an object without declared fields that a complaint is about."""

    key: str
    value: object


def field_path(name: str, field: str) -> str:
    """Return the path to ``field`` of the object at ``name``, which is "" for the body."""
    return f"{name}.{field}" if name else field


def explain(
    complaint: Complaint,
    kind: inspect.Type,
    fields: Mapping[str, Any],
    name: str,
    bad_entry: BadEntry | None = None,
) -> ApiError:
    """Return the error for the object at ``name``, declared as ``kind``, that ``complaint`` is about.

    ``fields``: the object's fields, at least its tag and the field that leads to the place.
    """
    value: Any = fields
    for step in complaint.steps:
        kind, value = _kind_of_part(kind, step, value), _part(value, step)
        name = field_path(name, step) if isinstance(step, str) else f"{name}[{step}]"
    if (missing := complaint.missing_field) is not None:
        return FieldRefused(field_path(name, missing), "the field is needed", code="missing_field")
    if bad_entry is not None:
        key = shown(bad_entry.key)
        entry = f"the key {key}" if complaint.is_about_a_key else f"{shown(bad_entry.value)} for {key}"
        return InvalidField(name, value, f"has {entry}, which {complaint.rule}")
    known_values = _rule_of_known_values(kind) if complaint.is_unknown_value else None
    return InvalidField(name, value, rule_of(kind) or known_values or complaint.rule)


def _part(value: Any, step: str | int) -> Any:
    """Return the field or the item of ``value``. None if it has none: where the body gives a field twice,
    ``value`` has the last one, and the complaint may be about the first."""
    match value, step:
        case dict(), str(field):
            return value.get(field)
        case list(), int(index) if index < len(value):
            return value[index]
    return None


def _kind_of_part(kind: inspect.Type, step: str | int, value: Any) -> inspect.Type:
    """Return the declared type of the part of ``value`` to which ``step`` leads.

    A tag is no field of any member. For the tag of a union this is therefore ``kind`` itself, whose members
    have the tags.
    """
    for member in members_of(kind):
        match member:
            case inspect.ListType(item_type=item) if isinstance(step, int):
                return item
            case inspect.StructType() if isinstance(step, str):
                fields = {field.name: field.type for field in member.fields}
                is_meant = member.tag_field is None or _part(value, member.tag_field) == member.tag
                if is_meant and step in fields:
                    return fields[step]
    return kind


def _rule_of_known_values(kind: inspect.Type) -> str | None:
    """Return which values ``kind`` may have, or None if it has no list of them."""
    known: list[object] = [structure.tag for structure in structures_of(kind)]
    for member in members_of(kind):
        if isinstance(member, inspect.LiteralType):
            known += member.values
    if not known:
        return None
    *most, last = map(json.dumps, known)
    return f"must be {', '.join(most)} or {last}" if most else f"must be {last}"
