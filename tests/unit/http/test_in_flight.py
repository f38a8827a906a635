"""Several fronts of a node: what they share, and which of them hears what an engine says."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import zmq

from hisparse_pd.engine.messages import (
    Abort,
    EngineReady,
    EngineStats,
    FlushCache,
    FromEngine,
    GenerateGroup,
    RequestFailed,
    Shutdown,
    Tokens,
    front_of,
    request_prefix,
)
from hisparse_pd.engine.sockets import EngineSocket, FrontSocket
from hisparse_pd.http.board import Board
from hisparse_pd.http.engine_link import EngineLink, QueueLimits, RankChoice, by_room, least_loaded
from hisparse_pd.http.http_errors import QueueFull
from hisparse_pd.http.in_flight import InFlight, make_board
from protocol.polling import Poller
from tests.unit.http.links import group_of, make_link, sent

WAIT_SECS = 60.0
STATS = EngineStats({}, {}, 0, 0, 0, 1)


def two_fronts(
    limits: QueueLimits, num_ranks: int = 1, choose: RankChoice = least_loaded
) -> list[EngineLink]:
    board = make_board(num_ranks, 2)
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


def test_ranks_are_chosen_by_the_load_of_all_fronts_and_rooms_decide_on_each_alike() -> None:
    first, second = two_fronts(QueueLimits(100, 1000), num_ranks=3)
    with first.open(prompt(0, 50)), second.open(prompt(1, 20)), first.open(prompt(2, 30)):
        assert [rank.num_tokens_in_flight for rank in first.ranks] == [50, 20, 30]
        with second.open(prompt(3, 1)):
            assert [rank.num_tokens_in_flight for rank in first.ranks] == [50, 21, 30]
    assert [rank.num_given for rank in second.ranks] == [1, 2, 1]
    assert [rank.num_tokens_in_flight for rank in second.ranks] == [0, 0, 0]
    for link in two_fronts(QueueLimits(10, 100), num_ranks=3, choose=by_room):
        with link.open(prompt(4, 5)):
            assert [rank.num_tokens_in_flight for rank in link.ranks] == [0, 5, 0]


def _count(board: Board, front: int) -> None:
    for _ in range(1000):
        InFlight(board, front).add(3, 5)
        InFlight(board, front).add(-2, -4)


def test_processes_lose_no_count_of_each_other() -> None:
    board = make_board(1, 2)
    spawning = multiprocessing.get_context("spawn")
    other = spawning.Process(target=_count, args=(board, 1))
    other.start()
    _count(board, 0)
    other.join(WAIT_SECS)
    seen = InFlight(board, 0)
    assert (seen.num_samples, seen.num_prompt_tokens) == (2000, 2000)


def test_no_front_says_that_it_serves_before_all_do() -> None:
    board, cleaned_up = make_board(1, 2), []

    def link_of(front: int) -> EngineLink:
        def clean_up() -> None:
            cleaned_up.append(front)

        return EngineLink(["ipc://unused"], 5.0, on_connected=clean_up, board=board, front=front)

    links = [link_of(0), link_of(1)]
    links[0]._handle(links[0].ranks[0], EngineReady(100, 100, 100))
    assert links[0].trouble() == "the engine is loading"
    assert links[0].is_loading
    assert not cleaned_up, "the other one still needs the directory of its socket"
    links[1]._handle(links[1].ranks[0], EngineReady(100, 100, 100))
    assert [link.trouble() for link in links] == [None, None]
    links[0]._handle(links[0].ranks[0], STATS)
    links[0]._handle(links[0].ranks[0], STATS)
    assert cleaned_up == [1, 0], "each says so once"


def test_a_request_id_names_its_front() -> None:
    assert [front_of(request_prefix(front)) for front in (0, 1, 63, 255)] == [0, 1, 63, 255]
    assert request_prefix(1) != request_prefix(1)


class Sockets:
    """An engine's socket and its fronts'."""

    def __init__(self, directory: Path, num_fronts: int) -> None:
        endpoints = [f"ipc://{directory}/{front}" for front in range(num_fronts)]
        self.fronts = [FrontSocket(endpoint) for endpoint in endpoints]
        self.engine = EngineSocket(endpoints)

    def heard(self, front: int, num: int) -> list[FromEngine]:
        """By a front."""
        poller = Poller()
        poller.register(self.fronts[front])
        messages: list[FromEngine] = []
        while len(messages) < num and poller.wait(WAIT_SECS):
            messages += self.fronts[front].receive()
        return messages

    def close(self) -> None:
        self.engine.close()
        for front in self.fronts:
            front.close()


def test_what_is_about_a_request_goes_to_its_front_and_the_rest_to_all(tmp_path: Path) -> None:
    sockets = Sockets(tmp_path, 3)
    ids = [request_prefix(front) + "-0" for front in range(3)]
    messages = [Tokens(ids[2], (1,)), RequestFailed(ids[0], 503, "full"), Tokens(ids[2], (2,))]
    for message in messages:
        sockets.engine.send(message)
    sockets.engine.send(STATS)
    assert sockets.heard(0, 2) == [messages[1], STATS]
    assert sockets.heard(1, 1) == [STATS]
    assert sockets.heard(2, 3) == [messages[0], messages[2], STATS]
    sockets.close()


def test_an_engine_hears_all_fronts_and_leaves_when_all_have_said_so(tmp_path: Path) -> None:
    sockets = Sockets(tmp_path, 2)
    poller = Poller()
    for channel in sockets.engine.fronts:
        poller.register(channel)
    heard = []

    def hear(num: int) -> None:
        while len(heard) < num and poller.wait(WAIT_SECS):
            heard.extend(sockets.engine.receive())

    sockets.engine.send(STATS)
    assert [sockets.heard(front, 1) for front in range(2)] == [[STATS], [STATS]], "they are connected"
    assert sockets.fronts[0].send(Shutdown(0))
    assert sockets.fronts[0].send(Shutdown(0))
    assert sockets.fronts[1].send(FlushCache())
    hear(1)
    assert heard == [FlushCache()]
    assert sockets.fronts[1].send(Abort("x"))
    assert sockets.fronts[1].send(Shutdown(1))
    hear(3)
    assert heard == [FlushCache(), Abort("x"), Shutdown(1)]
    sockets.close()


class _Endless:
    """A socket at which there is always one more message."""

    num_received = 0

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    def recv_multipart(self, flags: int) -> list[bytes]:
        assert flags == zmq.NOBLOCK
        self.num_received += 1
        return [self._frame]


@pytest.mark.I7
@pytest.mark.I8
def test_a_flood_of_one_front_is_not_all_that_an_engine_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hisparse_pd.engine import messages as engine_messages

    sockets = Sockets(tmp_path, 2)
    floods = [_Endless(engine_messages.encoder.encode(Abort("x"))) for _ in range(2)]
    with monkeypatch.context() as patch:
        for channel, flood in zip(sockets.engine.fronts, floods, strict=True):
            patch.setattr(channel, "socket", flood)
        for _ in range(4):
            assert len(list(sockets.engine.receive())) == 256
    assert [flood.num_received for flood in floods] == [512, 512]
    sockets.close()
