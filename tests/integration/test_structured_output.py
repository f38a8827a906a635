"""The real pair with a small model that knows nothing: what it says is what it was asked for, in each API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.integration.harness import Deployment, at_once, generated
from tests.structured_checks import CHECKS_OF_CHATS, Served

NO_WHITE_SPACE = {"logit_bias": {str(byte): -100 for byte in b" \t\n\r"}}
"""A model that knows nothing writes it by the dozen, wherever a form lets it."""


@pytest.fixture(scope="module")
def served(pair: Deployment) -> Iterator[Served]:
    with closing(Served(pair.url, NO_WHITE_SPACE)) as served:
        yield served


def test_clients_get_what_they_asked_for(served: Served) -> None:
    """At once, so that they share steps; of all checks these, the others run against an engine that plays a
    script."""
    at_once(lambda check: check(served), CHECKS_OF_CHATS, len(CHECKS_OF_CHATS))


def test_constrained_and_free_samples_share_a_batch(pair: Deployment) -> None:
    """A free answer is what it would be alone, at temperature 0, whatever runs beside it."""
    free = {"max_new_tokens": 20, "temperature": 0}
    alone = generated(pair.url, text="two", params=free)
    constrained, beside = generated(
        pair.url,
        text=["one", "two"],
        sampling_params=[{"regex": "[ab]{20}", "max_new_tokens": 30}, free | {"ignore_eos": True}],
    )
    assert set(constrained["text"]) <= {"a", "b"}
    assert len(constrained["text"]) == 20
    assert beside["output_ids"] == alone["output_ids"]
