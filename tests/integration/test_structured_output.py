"""The real pair with a small model that knows nothing: what it says is what it was asked for, in each API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.integration.harness import Deployment
from tests.structured_checks import MESSAGES, Served, check_chats, check_tools

NO_WHITE_SPACE = {"logit_bias": {str(byte): -100 for byte in b" \t\n\r"}}
"""A model that knows nothing writes it by the dozen, wherever a form lets it."""


@pytest.fixture(scope="module")
def served(pair: Deployment) -> Iterator[Served]:
    with closing(Served(pair.url, NO_WHITE_SPACE)) as served:
        yield served


@pytest.mark.parametrize("check", [check_chats, check_tools])  # all run against an engine that plays a script
def test_clients_get_what_they_asked_for(check: Callable[[Served], None], served: Served) -> None:
    check(served)


def test_constrained_and_free_samples_share_a_batch(pair: Deployment) -> None:
    """A free answer is what it would be alone, at temperature 0, whatever runs beside it."""
    with closing(Served(pair.url, {})) as served:
        check_batch(served)


def check_batch(served: Served) -> None:
    shared = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    alone = served.post("/v1/chat/completions", **shared)
    both = served.post(
        "/generate",
        text=["one", "two"],
        sampling_params=[
            {"regex": "[ab]{20}", "max_new_tokens": 30},
            {"max_new_tokens": 20, "temperature": 0},
        ],
    )
    assert set(both[0]["text"]) <= {"a", "b"}
    assert len(both[0]["text"]) == 20
    assert served.post("/v1/chat/completions", **shared)["choices"] == alone["choices"]
