"""The real pair with an untrained model gives clients the form that they asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.integration.harness import Deployment, generated
from tests.structured_checks import Served, check_generate, check_required_tool

NO_WHITE_SPACE = {"logit_bias": {str(byte): -100 for byte in b" \t\n\r"}}
"""Bias against white space, which an untrained model writes by the dozen wherever a form allows it."""


@pytest.fixture(scope="module")
def served(pair: Deployment) -> Iterator[Served]:
    with closing(Served(pair.url, NO_WHITE_SPACE)) as served:
        yield served


@pytest.mark.parametrize("check", [check_generate, pytest.param(check_required_tool, marks=pytest.mark.slow)])
def test_clients_get_what_they_asked_for(served: Served, check: Callable[[Served], None]) -> None:
    """These and all others run against a scripted engine, too."""
    check(served)


def test_constrained_and_free_samples_share_a_batch(pair: Deployment) -> None:
    """At temperature 0 a free answer is what it would be alone, whatever runs beside it."""
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
