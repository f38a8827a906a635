"""Rows that arrive wrong at a decode node, or are wrong at a prefill node (``tests/faults/rows.py``).

Each request is right, or refused with the row that is the reason, and all are right afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import gt
from pathlib import Path

import httpx
import pytest

from tests.faults.rows import report_of
from tests.integration.harness import DEVICE, Deployment, at_once, deployment, generate, is_idle, wait_until
from tests.integration.wrong_rows import assert_names_a_row, num_found, release_pages

NUM_NEW = 4
MODES = (True, False)
Case = tuple[tuple[int, ...], bool]
COMPUTED, ADMITTED = "hisparse_pd:prompt_tokens_total", "hisparse_pd:requests_total"
UNNOTICED = ("neighbours", "repeated")


@dataclass
class Nodes:
    pair: Deployment
    order: Path
    """File that says which rows are damaged."""
    expected: dict[tuple[int, ...], list[int]]

    def ask(self, case: Case) -> httpx.Response:
        prompt, hisparse = case
        params = {"max_new_tokens": NUM_NEW, "ignore_eos": True}
        return generate(self.pair.url, input_ids=prompt, hisparse=hisparse, params=params)

    def ask_all(self) -> list[tuple[Case, httpx.Response]]:
        cases = [(prompt, hisparse) for prompt in self.expected for hisparse in MODES]
        return list(zip(cases, at_once(self.ask, cases, len(cases)), strict=True))

    def damage(self, kind: str, share: float) -> None:
        self.order.write_text(f"{kind} {share}")

    def num_damaged(self, kind: str) -> int:
        report = report_of(self.order)
        return report.read_text().splitlines().count(kind) if report.exists() else 0

    def num_reported(self) -> float:
        """Return the wrong rows that both nodes have found up to now, which their metrics have later.

        Once a node's metrics count a request more, and then again, they have at least the first of two new
        ones, and all that was before it.
        """
        case = (next(iter(self.expected)), True)
        for _ in range(2):
            before = self._counted()
            assert self.is_right(case, self.ask(case))
            wait_until(
                lambda before=before: all(map(gt, self._counted(), before)),  # type: ignore[misc]
                "both nodes' reports",
            )
        return num_found(*self.pair.prefill, *self.pair.decode)

    def _counted(self) -> tuple[float, float]:
        """Return what each node's metrics have of its requests."""
        (prefill,), (decode,) = self.pair.prefill, self.pair.decode
        admitted = (value for name, value in decode.metrics().items() if name.startswith(ADMITTED))
        return prefill.metrics()[COMPUTED], sum(admitted)

    def is_right(self, case: Case, got: httpx.Response) -> bool:
        """Whether the request was served. Raises AssertionError for wrong tokens."""
        if got.status_code != 200:
            return False
        tokens, expected = got.json()["output_ids"], self.expected[case[0]]
        same = [mine == right for mine, right in zip(tokens, expected, strict=True)]
        assert all(same), (
            f"wrong tokens with a 200: {len(case[0])} prompt tokens, hisparse {case[1]}, from new token "
            f"{same.index(False)} on: {got.json()}, expected {expected}"
        )
        return True


@pytest.fixture(scope="module")
def nodes(
    tied_checkpoint: Callable[[str], Path],
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Nodes]:
    """A pair whose decode node holds nothing, so that each request has rows to land, and to damage.

    Scores are full of ties except on a GPU, where a prompt's bits may depend on its batch.
    """
    directory = tmp_path_factory.mktemp("wrong-landings")
    checkpoint = (tied_checkpoint if DEVICE == "cpu" else tiny_checkpoint)("v32")
    options = ["--disable-prefix-cache", "--device-buffer-size", "70", "--host-pool-tokens", "6400"]
    order = directory / "order"
    faults = {"ROW_FAULTS": str(order)}
    numbers = random.Random(11)
    prompts = [tuple(numbers.randrange(33, 120) for _ in range(90 + 70 * i)) for i in range(3)]
    with deployment(
        checkpoint, directory, decode_options=options, prefill_faults=faults, decode_faults=faults
    ) as pair:
        started = Nodes(pair, order, {prompt: [] for prompt in prompts})
        for (prompt, hisparse), got in started.ask_all():
            tokens = got.json()["output_ids"]
            assert hisparse or tokens == started.expected[prompt]
            started.expected[prompt] = tokens
        yield started


@pytest.mark.I9
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "share", "is_cached"),
    [
        ("flipped landing", 0.7, False),
        pytest.param("other layer", 0.5, True, marks=pytest.mark.slow),
        pytest.param("other positions", 0.5, False, marks=pytest.mark.slow),
        ("early", 1.0, False),
        ("cached", 1.0, True),
        pytest.param("neighbours", 1.0, False, marks=pytest.mark.slow),
        ("repeated", 1.0, True),
    ],
)
def test_each_request_is_right_or_refused(nodes: Nodes, kind: str, share: float, is_cached: bool) -> None:
    """``is_cached``: whether the prefill node has the prompts' whole pages before.

    Damage to its own cache or to unused memory, or a batch sent twice, is noticed by no request.
    """
    (prefill,), (decode,) = nodes.pair.prefill, nodes.pair.decode
    nodes.pair.flush_prefix_caches()  # else what an earlier test damaged may be found in this one
    if is_cached:
        nodes.ask_all()
    before = nodes.num_reported() if kind in UNNOTICED else num_found(prefill, decode)
    num_damaged = nodes.num_damaged(kind)
    nodes.damage(kind, share)
    try:
        damaged = nodes.ask_all()
    finally:
        nodes.order.unlink()
    num_right = 0
    for case, got in damaged:
        if nodes.is_right(case, got):
            num_right += 1
        else:
            assert_names_a_row(got)
    assert nodes.num_damaged(kind) > num_damaged

    if kind in ("cached", *UNNOTICED):
        assert num_right == len(damaged), [got.text for _, got in damaged]
    fewest = max(1, len(damaged) - num_right)
    if kind in UNNOTICED:
        assert nodes.num_reported() == before
    else:
        wait_until(
            lambda: num_found(prefill, decode) - before >= fewest, f"{fewest} wrong rows in the metrics"
        )
    wait_until(lambda: is_idle(decode), "the decode node is idle")
    for node in (prefill, decode):
        release_pages(node)
    assert all(nodes.is_right(case, got) for case, got in nodes.ask_all())
