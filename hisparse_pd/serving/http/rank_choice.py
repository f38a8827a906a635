"""Chooses the rank that gets each sample of a prompt, by load or by prefix.

``EngineLink`` calls the ``RankChoice`` that it was made with: ``least_loaded``, or a ``ByPrefix``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hisparse_pd.engine.messages import GenerateGroup
from hisparse_pd.serving.http.prefixes import LOAD_BOUND, PrefixIndex, block_keys
from hisparse_pd.serving.http.rank_link import RankLink

RankChoice = Callable[[Sequence[RankLink], GenerateGroup], Iterator[RankLink]]
"""Yields the rank of each sample of a prompt. Each sample is counted before the next rank is chosen."""


def least_loaded(ranks: Sequence[RankLink], prompt: GenerateGroup) -> Iterator[RankLink]:
    """Choose the rank with the fewest prompt tokens in flight; among equals, the one that was given the
    fewest samples so far."""
    for _ in prompt.samples:
        yield min(ranks, key=lambda rank: (rank.num_tokens_in_flight, rank.num_samples_given))


class ByPrefix:
    """Chooses the rank that had a prompt with the same beginning last, and may still keep its KV.

    If that rank has more tokens in flight than LOAD_BOUND times the mean plus this prompt, the least loaded
    one is chosen.
    """

    def __init__(self) -> None:
        self._prefixes: PrefixIndex[int] = PrefixIndex()

    def __call__(self, ranks: Sequence[RankLink], prompt: GenerateGroup) -> Iterator[RankLink]:
        keys = block_keys(prompt.prompt, prompt.root) if len(ranks) > 1 else []
        for sample, least in zip(prompt.samples, least_loaded(ranks, prompt), strict=True):
            rank = least
            if (found := self._prefixes.find(keys)) is not None:
                mean = sum(each.num_tokens_in_flight for each in ranks) / len(ranks)
                if ranks[found].num_tokens_in_flight <= LOAD_BOUND * mean + sample.num_prompt_tokens:
                    rank = ranks[found]
            self._prefixes.note(keys, rank.rank)
            yield rank
