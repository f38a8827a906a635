"""Finds the numbers of a schema that llguidance, which keeps doubles, would change.

``json_grammars.py`` makes one ``SchemaNumbers`` for a schema. It refuses a schema whose bounds llguidance
would shift, and finds the parts with a literal that llguidance would spell otherwise, with all parts that
contain or refer to these: in ``{"properties": {"a": {"const": 1.50}}}`` the root and ``a``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from hisparse_pd.serving.api.exact_numbers import (
    BOUNDS,
    LENGTHS,
    admits_excluded_integer,
    fault_of_bound,
    is_kept_by_llguidance,
    is_number,
    is_spelled_alike,
    spelling,
)
from hisparse_pd.serving.api.json_schemas import InexactNumber, Steps, as_list, reference_path, types_of

# Keywords whose value is one schema, a list of schemas, or schemas by name.
KEYWORDS_OF_ONE: Final = ("additionalProperties", "items", "additionalItems")
KEYWORDS_OF_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
KEYWORDS_OF_NAMES: Final = ("properties", "patternProperties")
DEFINITIONS: Final = ("$defs", "definitions")

Schema = Mapping[str, object]


class SchemaNumbers:
    """The parts of a schema that contain literal numbers which llguidance would spell otherwise or
    misread."""

    def __init__(self, root: Schema, steps: Steps) -> None:
        """``steps``: the budget that reading spends, about one step for a schema or for eight numbers.

        Raises InexactNumber for a bound that cannot be enforced exactly, and TooManySteps.
        """
        self.need_spelling = False
        """Whether a literal is spelled otherwise than llguidance spells it."""
        self.exceed_doubles = False
        """Whether llguidance would read a literal as another number."""
        self._root = root
        self._steps = steps
        self._literals: set[int] = set()
        """Ids of schemas with such a number in their own ``const`` or ``enum``; the root keeps them alive."""
        self._users: dict[int, list[int]] = {}
        """For each schema, by id, the schemas that contain it or refer to it."""
        self._scan(root)
        self._concerned = self._with_users(self._literals)

    def concern(self, schema: object) -> bool:
        """Whether the schema, or any that it contains or refers to, has such numbers."""
        return id(schema) in self._concerned

    def target(self, reference: object) -> object:
        """Return the schema at ``reference``; None if it is no path in this document, such as an anchor."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        self._steps.spend(1 + len(reference) // 8)
        found: object = self._root
        for name in reference_path(reference)[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _scan(self, root: Schema) -> None:
        """Look at every schema within the document: check its bounds, note its literals, and note it as a
        user of its parts."""
        seen, open_schemas = {id(root)}, [("#", root)]
        while open_schemas:
            place, schema = open_schemas.pop()
            self._steps.spend(1)
            self._check_bounds(place, schema)
            values = [*([schema["const"]] if "const" in schema else []), *as_list(schema.get("enum"))]
            numbers = [number for value in values for number in numbers_in(value)]
            self._steps.spend(len(numbers) // 8)
            if not all(map(is_spelled_alike, numbers)):
                self.need_spelling = True
                self._literals.add(id(schema))
                self.exceed_doubles |= not all(map(is_kept_by_llguidance, numbers))
            for part_place, part in self._parts(place, schema):
                self._users.setdefault(id(part), []).append(id(schema))
                if id(part) not in seen:
                    seen.add(id(part))
                    open_schemas.append((part_place, part))

    def _parts(self, place: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
        """Yield the schemas that ``schema`` contains or refers to, each after its place in the document."""
        found: list[tuple[str, object]] = [
            (f"{place}/{keyword}", schema.get(keyword)) for keyword in KEYWORDS_OF_ONE
        ]
        for keyword in KEYWORDS_OF_LISTS:
            found += [(f"{place}/{keyword}/{i}", part) for i, part in enumerate(as_list(schema.get(keyword)))]
        for keyword in KEYWORDS_OF_NAMES:
            found += _named(f"{place}/{keyword}", schema.get(keyword))
        if "$ref" in schema:
            reference = schema["$ref"]
            if isinstance(target := self.target(reference), dict):
                found.append((str(reference), target))
            else:  # not a path to a schema: it may be the anchor of any definition, so all of them count
                for keyword in DEFINITIONS:
                    found += _named(f"#/{keyword}", self._root.get(keyword))
        self._steps.spend(len(found) // 8)
        return ((where, part) for where, part in found if isinstance(part, dict))

    def _check_bounds(self, place: str, schema: Schema) -> None:
        """Raises InexactNumber for a bound or a length of ``schema`` that llguidance would not enforce
        exactly."""
        types = types_of(schema)
        of_integers = "integer" in types and "number" not in types
        for keyword in BOUNDS:
            value = schema.get(keyword)
            if is_number(value) and (fault := fault_of_bound(keyword, value, of_integers=of_integers)):
                raise InexactNumber(
                    f"has {keyword} {spelling(value):.80} at {place:.200}, which cannot be enforced exactly: "
                    f"{fault}; use such a bound, list the values in an enum, or leave it out"
                )
        for keyword, most in LENGTHS.items():
            value = schema.get(keyword)
            if is_number(value) and not (0 <= value <= most and value == int(value)):
                raise InexactNumber(
                    f"has {keyword} {spelling(value):.80} at {place:.200}; it must be an integer from 0 to "
                    f"{most}, or left out"
                )
        if not of_integers and admits_excluded_integer(schema):
            raise InexactNumber(
                f"has bounds at {place:.200} of which one excludes an integer and the other is before the "
                "next one, which cannot be enforced exactly; use a minimum or a maximum"
            )

    def _with_users(self, start: set[int]) -> set[int]:
        """Return ``start`` with all schemas that contain or refer to one of them."""
        found, open_schemas = set(start), list(start)
        while open_schemas:
            for user in self._users.get(open_schemas.pop(), ()):
                if user not in found:
                    found.add(user)
                    open_schemas.append(user)
        return found


def _named(place: str, schemas: object) -> list[tuple[str, object]]:
    return [(f"{place}/{name}", part) for name, part in schemas.items()] if isinstance(schemas, dict) else []


def numbers_in(value: object) -> Iterator[int | float]:
    """Yield all numbers within a JSON value."""
    open_values = [value]
    while open_values:
        match open_values.pop():
            case dict() as members:
                open_values += members.values()
            case list() as items:
                open_values += items
            case number if is_number(number):
                yield number
