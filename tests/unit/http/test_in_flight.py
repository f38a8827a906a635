"""Several fronts of a node: what they count together, and when they serve."""

from __future__ import annotations

import multiprocessing

import pytest

from hisparse_pd.engine.messages import EngineReady, EngineStats, GenerateGroup
from hisparse_pd.serving.http.board import Board, InFlightCounts
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.http_errors import QueueFull
from hisparse_pd.serving.http.queue_limits import QueueLimits
from hisparse_pd.serving.http.rank_choice import RankChoice, least_loaded
from tests.unit.http.links import group_of, make_link, sent
from tests.waiting import WAIT_SECS

STATS = EngineStats({}, {}, 0, 0, 0, 1)


def two_fronts(
    limits: QueueLimits, num_ranks: int = 1, choose: RankChoice = least_loaded
) -> list[EngineLink]:
    board = Board(num_ranks, 2)
    return [make_link(choose, num_ranks, limits, board, front) for front in range(2)]


def prompt(room: int, num_tokens: int) -> list[GenerateGroup]:
    return [group_of(range(room, room + 1), num_tokens)]


@pytest.mark.I7
@pytest.mark.I8
def test_the_limits_are_those_of_all_fronts_together() -> None:
    first, second = two_fronts(QueueLimits(2, 100))
    with first.open(prompt(0, 60)):
        with pytest.raises(QueueFull, match="prompts of 60 tokens"), second.open(prompt(1, 41)):
            pass
        with second.open(prompt(2, 40)), pytest.raises(QueueFull, match="2 requests"):
            first.require_place(1)
        sent(second)
        first.require_place(1, 40)
    sent(first)
    with second.open(prompt(3, 100)):
        pass
    sent(second)
    assert first.counts.num_samples == first.counts.num_prompt_tokens == 0


def test_ranks_are_chosen_by_the_load_of_all_fronts() -> None:
    first, second = two_fronts(QueueLimits(100, 1000), num_ranks=3)
    with first.open(prompt(0, 50)), second.open(prompt(1, 20)), first.open(prompt(2, 30)):
        assert [rank.num_tokens_in_flight for rank in first.ranks] == [50, 20, 30]
        with second.open(prompt(3, 1)):
            assert [rank.num_tokens_in_flight for rank in first.ranks] == [50, 21, 30]
    assert [rank.num_samples_given for rank in second.ranks] == [1, 2, 1]
    assert [rank.num_tokens_in_flight for rank in second.ranks] == [0, 0, 0]


def _count(board: Board, front: int) -> None:
    for _ in range(1000):
        InFlightCounts(board, front).add(3, 5)
        InFlightCounts(board, front).add(-2, -4)


def test_processes_lose_no_count_of_each_other() -> None:
    board = Board(1, 2)
    spawning = multiprocessing.get_context("spawn")
    other = spawning.Process(target=_count, args=(board, 1))
    other.start()
    _count(board, 0)
    other.join(WAIT_SECS)
    seen = InFlightCounts(board, 0)
    assert (seen.num_samples, seen.num_prompt_tokens) == (2000, 2000)


def test_no_front_says_that_it_serves_before_all_do() -> None:
    board, cleaned_up = Board(1, 2), []

    def link_of(front: int) -> EngineLink:
        def clean_up() -> None:
            cleaned_up.append(front)

        return EngineLink(["ipc://unused"], 5.0, on_connected=clean_up, board=board, front_number=front)

    links = [link_of(0), link_of(1)]
    links[0].handle(links[0].ranks[0], EngineReady(100, 100, 100))
    assert links[0].trouble() == "the engine is loading"
    assert links[0].is_loading
    assert not cleaned_up, "the other one still needs the directory of its socket"
    links[1].handle(links[1].ranks[0], EngineReady(100, 100, 100))
    assert [link.trouble() for link in links] == [None, None]
    links[0].handle(links[0].ranks[0], STATS)
    links[0].handle(links[0].ranks[0], STATS)
    assert cleaned_up == [1, 0], "each says so once"
