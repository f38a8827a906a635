"""Reading JSON schemas that clients send: keywords, references, and a limit for the work.

Writers of grammars (``argument_forms.py``, ``json_grammars.py``, ``call_grammars.py``, ``schema_numbers.py``)
and the reader of calls (``tool_schemas.py``) share this module. All tools of a request share one ``Steps``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeGuard

MAX_STEPS: Final = 1 << 17
"""Most steps of one request, half a second. Each parameter and each listed value of a tool takes a few."""
MAX_DEPTH: Final = 32
"""Most schemas within each other, or references in a chain."""

ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$defs", "definitions", "x-guidance"),
}
"""Keywords that say nothing about values."""


class NotWritable(ValueError):
    """A grammar cannot enforce the schema. The message continues "the parameter x …" with the reason."""


class InexactNumber(NotWritable):
    """The schema has a number that would be enforced as another one.

    It is raised for tools that are not strict, too. Other keywords that cannot be enforced are left out for
    them, but a wrong number would be enforced.
    """


class TooManySteps(ValueError):
    """The tools take more steps than a request has.

    The message is without the name of the body's field, which ``grammars.py`` puts before it.
    """


class Steps:
    """A budget for reading schemas, in steps of some microseconds, which all tools of a request share.

    It is needed because references in a client's schemas can multiply the work without end.
    """

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._most = self.num_left = most

    def spend(self, num_steps: int) -> None:
        """Spend steps. Raises TooManySteps where none are left, and from then on always."""
        self.num_left -= num_steps
        if self.num_left < 0:
            raise TooManySteps(
                f"the schemas of all tools take more than {self._most} steps to read: use smaller or simpler "
                "ones, or fewer tools"
            )


def reference_path(reference: str) -> list[str]:
    """Return the parts of a JSON pointer, unescaped: ["#", "$defs", "x"] for ``#/$defs/x``.

    The first part stands for the document.
    """
    return [part.replace("~1", "/").replace("~0", "~") for part in reference.split("/")]


def types_of(schema: Mapping[str, object]) -> list[object]:
    """Return the types that the schema names, or that its other keywords imply."""
    names = schema.get("type")
    found: list[object] = [names] if isinstance(names, str) else as_list(names)
    if "type" not in schema and ("properties" in schema or "items" in schema):
        found = ["object" if "properties" in schema else "array"]
    return [*found, "null"] if found and schema.get("nullable") is True else found


def as_list(value: object) -> list[object]:
    """Return ``value`` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is a JSON integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
