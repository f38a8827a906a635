"""A request's tokens depend on the request alone (I5): on checkpoints in which equal scores are the rule.

Each prompt is answered once alone, whole and without anything in memory: that is the answer. Then the prefill
side computes it in any chunks, pages, company, order and state of the prefix cache, and the decode node
decodes it in any mode, company, order and with too few pages, so that requests are retracted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse_pd.base.vocabulary import HisparseFlag, SamplingParams, TokenLogprob
from tests.examples import num_examples
from tests.sampling import sample
from tests.tied_checkpoint import INDEX_TOPK
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, Prompt, load_checkpoint
from tests.unit.model.paged_model import PagedModel
from tools.checkpoints.oracle import greedy_tokens

pytestmark = pytest.mark.I5

NUM_NEW = 4
LOGPROB_TOLERANCE = 1e-4
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, num_logprobs=2)
_LENGTHS = (1, INDEX_TOPK - 1, INDEX_TOPK + 1, 64, 130, 200)


def _prompts() -> list[Prompt]:
    """The last one begins as the one before it, as prompts do of which a cache has the beginning."""
    drawn = random.Random(11)
    prompts = [tuple(drawn.randint(32, 126) for _ in range(length)) for length in _LENGTHS]
    return [*prompts, prompts[-1][:150] + prompts[0] * 3 + prompts[1]]


PROMPTS = _prompts()


class Pool(PagedModel):
    """Pages of one layout, full of what others left there."""

    def __init__(self, checkpoint: Checkpoint, page_size: int) -> None:
        num_pages = sum(-(-(len(prompt) + NUM_NEW) // page_size) for prompt in PROMPTS)
        super().__init__(checkpoint.spec, checkpoint.model, num_pages, page_size)
        self._free = self.free_pages.tolist()

    def take(self, num_pages: int) -> Tensor:
        return torch.tensor([self._free.pop() for _ in range(num_pages)])

    def pages(self, prompt: Prompt, shared: Tensor | None = None) -> Tensor:
        """Return pages for ``prompt`` and its output, beginning with the ``shared`` pages of its prefix."""
        count = -(-(len(prompt) + NUM_NEW) // self.page_size) - (0 if shared is None else len(shared))
        own = self.take(count)
        return own if shared is None else torch.cat((shared, own))


@dataclass(frozen=True)
class Expected:
    token_ids: list[int]
    logprobs: list[TokenLogprob]


@pytest.fixture(
    scope="module",
    params=["v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm", "mistral"))],
)
def checkpoint(request: pytest.FixtureRequest, tied_checkpoint: Callable[[str], Path]) -> Checkpoint:
    return load_checkpoint(tied_checkpoint(request.param))


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> dict[Prompt, Expected]:
    """Return the answer to each prompt alone."""
    answers = {}
    for prompt in PROMPTS:
        pool = Pool(checkpoint, 64)
        page_ids = pool.pages(prompt)
        answer = Expected([], [])
        new, start = prompt, 0
        for _ in range(NUM_NEW):
            (token_id,), (logprob,) = sample(pool.extend([(page_ids, start, new)])[0], [GREEDY], [0], ())
            assert logprob is not None
            answer.token_ids.append(token_id)
            answer.logprobs.append(logprob)
            start, new = start + len(new), (token_id,)
        answers[prompt] = answer
    return answers


def check(prompt: Prompt, token_ids: list[int], logprobs: list[TokenLogprob], expected: Expected) -> None:
    assert token_ids == expected.token_ids[: len(token_ids)], f"{len(prompt)} prompt tokens"
    for got, wanted in zip(logprobs, expected.logprobs, strict=False):
        assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in wanted.top]
        for (_, value), (_, wanted_value) in zip(got.top, wanted.top, strict=True):
            assert abs(value - wanted_value) <= LOGPROB_TOLERANCE


def all_over(jobs: list[Answer]) -> bool:
    return all(job.is_over for job in jobs)


@pytest.mark.slow
def test_alone_they_are_transformers_own(checkpoint: Checkpoint, expected: dict[Prompt, Expected]) -> None:
    tokens = greedy_tokens(checkpoint.path, PROMPTS, NUM_NEW)
    assert [expected[prompt].token_ids for prompt in PROMPTS] == tokens


def test_scores_are_tied_at_the_boundary(
    checkpoint: Checkpoint, expected: dict[Prompt, Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule the answers of these prompts would be others: they can show that it is kept."""

    def highest_first(scores: Tensor, num_seen: Tensor, top_k: int) -> Tensor:
        seq_len = scores.shape[1]
        unseen = torch.arange(seq_len) >= num_seen[:, None]
        order = scores.masked_fill(unseen, float("-inf")).flip(1).sort(dim=1, descending=True, stable=True)
        chosen = (seq_len - 1 - order.indices[:, :top_k]).int()
        chosen = torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[1]), value=-1)
        return chosen.masked_fill(chosen >= num_seen[:, None], -1)

    for module in ("indexer", "paged_indexer"):
        monkeypatch.setattr(f"hisparse_pd.kernels.{module}.select_topk", highest_first)
    pool = Pool(checkpoint, 64)
    logits, _ = pool.extend([(pool.pages(prompt), 0, prompt) for prompt in PROMPTS])
    _, logprobs = sample(logits, [GREEDY] * len(PROMPTS), [0] * len(PROMPTS), ())
    moved = [
        abs(got.top[0][1] - expected[prompt].logprobs[0].top[0][1])
        for prompt, got in zip(PROMPTS, logprobs, strict=True)
        if got is not None
    ]
    assert max(moved) > 100 * LOGPROB_TOLERANCE


@settings(max_examples=num_examples(3, 6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prefill_in_any_chunks_pages_company_and_cache(
    checkpoint: Checkpoint, expected: dict[Prompt, Expected], data: st.DataObject
) -> None:
    page_size = data.draw(st.sampled_from([1, 7, 16, 64]), "page size")
    order = data.draw(st.permutations(PROMPTS), "order of arrival")
    budget = data.draw(st.sampled_from([1000, 300, 129, 64, 37]), "tokens of a forward")
    pool = Pool(checkpoint, page_size)
    source, follower = PROMPTS[-2:]
    if data.draw(st.booleans(), "cached") and page_size <= 150:
        num_cached = data.draw(st.integers(1, 150 // page_size), "cached pages") * page_size
        # The beginning of one prompt is computed; both of them go on behind it, on the same pages.
        shared = pool.take(num_cached // page_size)
        pool.extend([(shared, 0, source[:num_cached])])
    else:
        num_cached, shared = 0, None
    done = {prompt: num_cached if prompt in (source, follower) else 0 for prompt in order}
    page_ids = {prompt: pool.pages(prompt, shared if done[prompt] else None) for prompt in order}
    while any(done[prompt] < len(prompt) for prompt in order):
        parts, left = [], budget
        for prompt in order:
            size = min(left, len(prompt) - done[prompt])
            if size:
                parts.append((page_ids[prompt], done[prompt], prompt[done[prompt] : done[prompt] + size]))
                done[prompt] += size
                left -= size
        token_ids, logprobs = sample(pool.extend(parts)[0], [GREEDY] * len(parts), [0] * len(parts), ())
        for token_id, logprob, (ids, start, new) in zip(token_ids, logprobs, parts, strict=True):
            prompt = next(each for each in order if page_ids[each] is ids)
            if start + len(new) == len(prompt):
                assert logprob is not None
                check(prompt, [token_id], [logprob], expected[prompt])


@contextmanager
def small_node(checkpoint: Checkpoint, page_size: int, **limits: Any) -> Iterator[EngineHarness]:
    """A decode node with small hot buffers, for as many running requests as there are prompts."""
    limits |= {"device_buffer_size": 48, "max_running_requests": 7}
    with (
        TemporaryDirectory() as ipc_dir,
        closing(EngineHarness(checkpoint, Path(ipc_dir), page_size=page_size, **limits)) as node,
    ):
        yield node


@settings(max_examples=num_examples(2, 3), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_decode_in_any_mode_pages_company_and_retraction(
    checkpoint: Checkpoint, expected: dict[Prompt, Expected], data: st.DataObject
) -> None:
    page_size = data.draw(st.sampled_from([4, 16, 64]), "page size")
    order = data.draw(st.permutations(PROMPTS), "order of arrival")
    flags = data.draw(st.lists(st.sampled_from(HisparseFlag), min_size=len(order), max_size=len(order)))
    turns_between = data.draw(st.integers(0, 3), "turns between arrivals")
    pool_tokens = data.draw(st.sampled_from([512, 4096]), "pool tokens")
    slice_bytes = data.draw(st.sampled_from([1, 1 << 30]), "of a row that is filled, in a turn")
    with small_node(checkpoint, page_size, device_pool_tokens=pool_tokens) as node:
        node.engine.tables.fills.slice_bytes = slice_bytes
        answers = []
        for prompt, flag in zip(order, flags, strict=True):
            answers.append(node.generate(prompt, NUM_NEW, flag, num_logprobs=2))
            for _ in range(turns_between):
                node.turn()
        node.turn_until(lambda: all(answer.is_over for answer in answers))
    for prompt, answer in zip(order, answers, strict=True):
        assert answer.failure is None
        assert len(answer.token_ids) == NUM_NEW
        check(prompt, answer.token_ids, answer.logprobs, expected[prompt])


@settings(max_examples=num_examples(1, 2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_decode_behind_prefixes_that_are_held_or_given_up(
    checkpoint: Checkpoint, expected: dict[Prompt, Expected], data: st.DataObject
) -> None:
    """A prompt's beginning, the whole prompt, and then with part of its answer, whose KV decoding left."""
    page_size = data.draw(st.sampled_from([4, 16, 64]), "page size")
    order = data.draw(st.permutations(PROMPTS), "order of arrival")
    flag = st.sampled_from(HisparseFlag)
    rounds = data.draw(st.lists(st.lists(flag, min_size=7, max_size=7), min_size=3, max_size=3), "modes")
    pool_tokens = data.draw(st.sampled_from([512, 4096]), "pool tokens")
    num_said = data.draw(st.integers(1, NUM_NEW - 1), "tokens of the answer")
    pools = {"host_pool_tokens": pool_tokens, "device_pool_tokens": pool_tokens}
    with small_node(checkpoint, page_size, disable_prefix_cache=False, **pools) as node:
        for number, flags in enumerate(rounds):
            jobs = []
            for prompt, mode in zip(order, flags, strict=True):
                said = tuple(expected[prompt].token_ids[: num_said * (number == 2)])
                sent = prompt[: -(-len(prompt) // 2)] if number == 0 else (*prompt, *said)
                jobs.append(node.generate(sent, NUM_NEW - len(said), mode, num_logprobs=2))
            node.turn_until(partial(all_over, jobs))
            for prompt, job in zip(order, jobs, strict=True):
                assert job.failure is None
                if number:
                    wanted, first = expected[prompt], num_said * (number == 2)
                    rest = Expected(wanted.token_ids[first:], wanted.logprobs[first:])
                    check(prompt, job.token_ids, job.logprobs, rest)
        assert pool_tokens == 512 or any(each.num_held_tokens for each in node.double.bootstraps)
