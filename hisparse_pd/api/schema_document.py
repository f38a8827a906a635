"""The schema of one tool's parameters as its readers walk through it, with a bound on what that costs.

References in a client's schemas can multiply without end. So what a reader does is paid for in steps of some
microseconds, of which the tools of one request have a known number together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_STEPS: Final = 1 << 17
"""Of one request: half a second. A tool takes a few for each of its parameters and listed values."""
MAX_DEPTH: Final = 32

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$defs", "definitions", "x-guidance"),
}


class TooManySteps(ValueError):
    """The tools take more steps than a request has. The message is about the field that asks for them."""


class Steps:
    """Those that are left of a number of them."""

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._most = self.num_left = most

    def spend(self, num_steps: int) -> None:
        """Raises TooManySteps, from then on always."""
        self.num_left -= num_steps
        if self.num_left < 0:
            raise TooManySteps(
                f"the schemas of all tools take more than {self._most} steps to read: use smaller or simpler "
                "ones, or fewer tools"
            )


class SchemaDocument:
    """``root``: the schema of all parameters. What is found out is kept, with the schema that it is of."""

    def __init__(self, root: Mapping[str, object], steps: Steps) -> None:
        self.root = root
        self.steps = steps
        self._targets: dict[str, object] = {}
        self._words: dict[int, tuple[object, frozenset[str]]] = {}

    def at(self, reference: str) -> object:
        """``#/$defs/name``; None where nothing is, as for other schemas than this one."""
        if reference not in self._targets:
            self.steps.spend(1 + len(reference) // 8)
            found: object = self.root if reference.startswith("#") else None
            for name in path_of(reference)[1:]:
                found = found.get(name) if isinstance(found, dict) else None
            self._targets[reference] = found
        return self._targets[reference]

    def words(self, schema: Mapping[str, object]) -> frozenset[str]:
        """What a schema says of values."""
        kept = self._words.get(id(schema))
        if kept is None:
            self.steps.spend(1 + len(schema) // 8)
            kept = self._words[id(schema)] = schema, frozenset(schema.keys() - _ANNOTATIONS)
        return kept[1]


def path_of(reference: str) -> list[str]:
    """The names in it, the document's first."""
    return [part.replace("~1", "/").replace("~0", "~") for part in reference.split("/")]
