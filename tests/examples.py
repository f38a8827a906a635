"""How many examples a test tries: few in `make test`, many in `make test-full`, which sets MANY_EXAMPLES."""

from __future__ import annotations

import os

_HAS_MANY = bool(os.environ.get("MANY_EXAMPLES"))


def num_examples(few: int, many: int) -> int:
    """Return ``many`` where the environment has MANY_EXAMPLES, else ``few``."""
    return many if _HAS_MANY else few
