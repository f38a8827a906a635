"""A front with engines of several ranks: which rank gets a sample, and what holds for all ranks together."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, root_of
from hisparse_pd.engine.messages import (
    Abort,
    EngineLoading,
    EngineReady,
    EngineStats,
    RequestFailed,
    Tokens,
)
from hisparse_pd.serving.http.engine_link import EngineLink, LinkState, rooms_at_work
from hisparse_pd.serving.http.http_errors import QueueFull
from hisparse_pd.serving.http.prefixes import BLOCK_BYTES
from hisparse_pd.serving.http.queue_limits import QueueLimits
from hisparse_pd.serving.http.rank_choice import ByPrefix, least_loaded
from tests.unit.http.links import by_room, group_of, make_link, sent


def test_it_serves_once_all_ranks_are_ready() -> None:
    link = EngineLink(["a", "b"], 5.0)
    link.handle(link.ranks[0], EngineLoading("weights", 1, 10))
    link.handle(link.ranks[1], EngineLoading("weights", 5, 10))
    assert link.loading == EngineLoading("weights", 1, 10), "of the one that has most left"
    link.handle(link.ranks[0], EngineReady(100, 90, 50))
    assert link.ready is None
    assert link.is_loading
    link.handle(link.ranks[1], EngineReady(100, 80, 60))
    assert link.state is LinkState.SERVING
    assert link.require_serving() == EngineReady(100, 80, 50), "what every rank can hold"


def test_samples_go_to_their_ranks_with_the_prompt_for_each() -> None:
    link = make_link(by_room)
    with link.open([group_of(range(4, 9))]) as group:
        shares = sent(link)
        assert [[sample.room for sample in share.samples] for (share,) in shares] == [[6], [4, 7], [5, 8]]  # type: ignore[union-attr]
        assert all(share.prompt == b"prompt" for (share,) in shares)  # type: ignore[union-attr]
        link.handle(link.ranks[1], Tokens("r4", (1,), finish_reason=FinishReason.STOP))
        assert group.live == {"r5", "r6", "r7", "r8"}
    aborts = [sorted(orders, key=lambda order: order.request_id) for orders in sent(link)]  # type: ignore[union-attr]
    assert aborts == [[Abort("r6")], [Abort("r7")], [Abort("r5"), Abort("r8")]]
    assert link.num_in_flight == 0


def test_samples_of_one_prompt_go_to_the_ranks_with_the_fewest_prompt_tokens() -> None:
    link = make_link(least_loaded)
    with link.open([group_of(range(1), 50)]):
        assert [len(messages) for messages in sent(link)] == [1, 0, 0]
        with link.open([group_of(range(4, 7), 5)]):
            assert [[len(share.samples) for share in messages] for messages in sent(link)] == [[], [2], [1]]  # type: ignore[union-attr]
    assert [rank.num_tokens_in_flight for rank in link.ranks] == [0, 0, 0]


def test_a_request_goes_to_the_rank_that_had_its_beginning_unless_others_have_much_less_to_do() -> None:
    link = make_link(ByPrefix())
    talk, other = bytes(BLOCK_BYTES) * 3, bytes([1]) * BLOCK_BYTES * 3

    def rank_of(number: int, prompt: bytes, num_tokens: int, stack: ExitStack) -> int:
        group = msgspec.structs.replace(group_of(range(number, number + 1), num_tokens), prompt=prompt)
        stack.enter_context(link.open([group]))
        (rank,) = (rank for rank, messages in enumerate(sent(link)) if messages)
        return rank

    with ExitStack() as first, ExitStack() as later:
        assert [rank_of(0, talk, 50, first), rank_of(1, other, 50, first)] == [0, 1]
        assert rank_of(2, talk[: 2 * BLOCK_BYTES] + other, 50, later) == 0, "although another rank is idle"
        assert rank_of(3, talk, 50, later) == 0
        assert rank_of(4, talk, 50, later) == 2, "it has 150, which is more than 1.25 times 67 and this one"
        later.close()
        sent(link)
        assert rank_of(5, talk, 50, later) == 2, "which had it last"
        assert rank_of(6, b"short", 10, later) == 1, "of equals the one that was given least"


def test_a_prompt_with_another_isolation_key_is_nothing_that_a_rank_had() -> None:
    link = make_link(ByPrefix())
    talk = bytes(BLOCK_BYTES) * 3
    ranks = []
    for number, root in enumerate([NO_ISOLATION, root_of("a"), NO_ISOLATION, root_of("a")]):
        group = group_of(range(number, number + 1))
        group = msgspec.structs.replace(group, prompt=talk, root=root)
        with link.open([group]):
            ranks += [rank for rank, messages in enumerate(sent(link)) if messages]
        sent(link)
    assert ranks == [0, 1, 0, 1]


def test_a_prompt_counts_for_each_rank_that_holds_it_until_all_is_said() -> None:
    link = make_link(by_room, limits=QueueLimits(100, 20))
    with pytest.raises(QueueFull), link.open([group_of(range(2), 7)]), link.open([group_of(range(2, 4), 7)]):
        pass
    assert [rank.num_tokens_in_flight for rank in link.ranks] == [0, 0, 0], "who is refused has no rank"
    with pytest.raises(QueueFull):
        link.require_place(1, 7)
    sent(link)
    link.require_place(1, 20)


def test_a_prefill_node_that_leaves_waits_for_rooms_of_which_no_front_knows() -> None:
    """It also waits for a report of each engine since its shutdown began, for rooms may have begun since the
    last."""
    link = make_link(by_room, num_ranks=2)

    def tell(rank: int, num_running: int, num_waiting: int) -> None:
        link.handle(link.ranks[rank], EngineStats({}, {}, num_running, num_waiting, 0, 0))

    tell(0, 2, 1)
    tell(1, 0, 0)
    assert rooms_at_work(link) == 3
    tell(0, 0, 0)
    assert rooms_at_work(link) == 0
    link.stop_accepting()
    assert rooms_at_work(link) == 2
    tell(0, 0, 0)
    tell(1, 1, 0)
    assert rooms_at_work(link) == 1
    tell(1, 0, 0)
    assert rooms_at_work(link) == 0


def test_one_rank_in_trouble_is_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    link = make_link(by_room)
    assert link.trouble() is None
    link.handle(link.ranks[2], EngineStats({}, {}, 0, 0, 0, 0, trouble="all slots are kept"))
    assert link.trouble() == "all slots are kept"
    now = link.ranks[1].reports.last_stats_at + 6
    monkeypatch.setattr("time.monotonic", lambda: now)
    for rank in (0, 2):
        link.handle(link.ranks[rank], EngineStats({}, {}, 0, 0, 0, 0))
    assert (link.stall() or "").startswith("rank 1: the engine has been silent for 6 s")


def test_who_waits_for_a_grammar_is_not_expected_to_get_further(monkeypatch: pytest.MonkeyPatch) -> None:
    link = make_link(by_room)
    now = link.ranks[0].reports.last_progress_at
    monkeypatch.setattr("time.monotonic", lambda: now)

    def stalls_after_a_while(num_running: int, num_without_grammar: int) -> bool:
        nonlocal now
        for _ in range(3):
            now += 4
            stats = EngineStats({}, {}, num_running, 0, 0, 7, num_without_grammar=num_without_grammar)
            for rank in link.ranks:
                link.handle(rank, stats)
        return "no progress" in (link.stall() or "")

    assert not stalls_after_a_while(2, 2)
    assert stalls_after_a_while(2, 1), "one of them has all that a step needs"


def test_the_death_of_one_engine_ends_the_requests_of_all() -> None:
    link = make_link(by_room)
    with link.open([group_of(range(3))]) as group:
        link.engine_died()
        failed = [group.events.popleft() for _ in range(3)]
    assert all(isinstance(event, RequestFailed) and event.status == 503 for event in failed)
    assert link.num_in_flight == 0
