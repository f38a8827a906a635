"""Logprobs of prompts' own tokens, which a decode node gets in pieces, from a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse_pd.prefill_node import compute
from hisparse_pd.protocol.channels import ControlServer
from hisparse_pd.protocol.messages import Bootstrap, Extent, RoomDone, RoomFailed, RoomQuiet, RoomScores
from hisparse_pd.protocol.prompt_scores import WantedScores, score_dtype
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    assert_hint,
    deliver,
    engine_thread,
    next_room,
    prompt,
)
from tests.unit.prefilled import own_pools
from tools.checkpoints.make_tiny import write_checkpoint

CHUNK, PAGE_SIZE = 48, 16


@pytest.fixture(scope="module", params=[pytest.param("plain", marks=pytest.mark.slow), "drafting"])
def served(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineThread]:
    path = tiny_checkpoint("glm")
    if request.param == "drafting":
        path = tmp_path_factory.mktemp("draft")
        write_checkpoint(path, "glm", draft_gain=1.0)
    with engine_thread(
        path,
        tmp_path_factory.mktemp("prefill") / "front",
        chunked_prefill_size=CHUNK,
        page_size=PAGE_SIZE,
    ) as engine:
        yield engine


@dataclass
class Scored:
    bootstrap: Bootstrap
    pieces: list[RoomScores]
    done: RoomDone

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        num_top = self.pieces[0].num_top if self.pieces else 0
        return np.frombuffer(b"".join(piece.rows for piece in self.pieces), score_dtype(num_top))


def ask(
    peer: DecodePeer, tokens: Sequence[int], scores: WantedScores | None, place: int = 0, **changes: Any
) -> Bootstrap:
    """Send a Bootstrap that wants scores. Requests with different ``place`` have separate landing zones."""
    landing = (Extent(128 * place, len(tokens) - 1),)
    return peer.bootstrap(
        next_room(), tokens, kv=landing, index=landing, aux_slot=place, scores=scores, **changes
    )


def receive(peer: DecodePeer, bootstrap: Bootstrap) -> Scored:
    """Wait for the end of a room and return its scores, whose pieces must have come before, in order and
    without a gap."""
    done = peer.expect(RoomDone, lambda message: message.room == bootstrap.room)
    inbox = list(peer.inbox)
    pieces = [each for each in inbox if isinstance(each, RoomScores) and each.room == bootstrap.room]
    peer.inbox = [each for each in inbox if each not in pieces]
    first = bootstrap.scores.first if bootstrap.scores else 0
    for piece in pieces:
        assert piece.first == first
        first += len(piece.rows) // score_dtype(piece.num_top).itemsize
    assert first == (bootstrap.num_prompt_tokens if bootstrap.scores else 0)
    return Scored(bootstrap, pieces, done)


def logprobs_of(engine: EngineThread, tokens: Sequence[int]) -> torch.Tensor:
    """Return all logprobs, [num_tokens, vocab], from one forward of the whole prompt over its own pools."""
    kv = own_pools(engine.spec, len(tokens), PAGE_SIZE).access
    ids = torch.tensor(tokens)
    return torch.log_softmax(engine.model.forward(ids, kv.positions, kv, torch.arange(len(tokens))), dim=-1)


def check_rows(engine: EngineThread, tokens: Sequence[int], wanted: WantedScores, scored: Scored) -> None:
    logprobs = logprobs_of(engine, tokens)[wanted.first - 1 : -1]
    assert len(scored.rows) == len(logprobs)
    behind = torch.tensor(tokens)[wanted.first :, None]
    expected = logprobs.gather(1, behind)[:, 0]
    torch.testing.assert_close(torch.tensor(scored.rows["logprob"]), expected, rtol=0, atol=1e-4)
    order = logprobs.sort(dim=1, descending=True)
    if wanted.num_top:
        best = torch.tensor(scored.rows["top_logprobs"])
        torch.testing.assert_close(best, order.values[:, : wanted.num_top], rtol=0, atol=1e-4)
        assert scored.rows["top_ids"].tolist() == order.indices[:, : wanted.num_top].tolist()
    assert scored.rows["rank"].tolist() == ((order.indices == behind).nonzero()[:, 1] + 1).tolist()


@pytest.mark.I6
@pytest.mark.parametrize("num_tokens", [2, 3, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 7])
def test_scores_are_those_of_one_forward_of_the_whole_prompt(
    engine: EngineThread, peer: DecodePeer, num_tokens: int
) -> None:
    tokens, wanted = prompt(num_tokens, num_tokens), WantedScores(1, 3)
    scored = receive(peer, ask(peer, tokens, wanted))
    check_rows(engine, tokens, wanted, scored)
    assert len(scored.pieces) == -(-(num_tokens - 1) // CHUNK), "more than one a forward"
    peer.assert_has(scored.bootstrap)
    assert_hint(engine, peer, scored.bootstrap, tokens)


@pytest.mark.parametrize("first", [2, PAGE_SIZE, PAGE_SIZE + 1, CHUNK + 1, CHUNK + 2, 99])
def test_scores_begin_where_they_are_wanted(engine: EngineThread, peer: DecodePeer, first: int) -> None:
    tokens, wanted = prompt(5, 100), WantedScores(first, 1)
    check_rows(engine, tokens, wanted, receive(peer, ask(peer, tokens, wanted)))


def test_scores_come_in_pieces_of_bounded_size(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, wanted = prompt(15, 100), WantedScores(1, 2)
    most = 20 * score_dtype(2).itemsize + 1
    monkeypatch.setattr(compute, "MAX_ROWS_BYTES", most)
    scored = receive(peer, ask(peer, tokens, wanted))
    sizes = [len(piece.rows) // score_dtype(2).itemsize for piece in scored.pieces]
    assert sizes == [20, 20, 8, 20, 20, 8, 3]
    check_rows(engine, tokens, wanted, scored)


@pytest.mark.I5
def test_scores_depend_on_no_neighbour_and_on_no_cache(engine: EngineThread, peer: DecodePeer) -> None:
    """Prompts of one batch want different numbers of top tokens, or no scores; the second time all is
    cached."""
    prompts = [prompt(seed, length) for seed, length in ((1, 20), (2, 100), (3, 7), (4, 60))]
    wanted = [WantedScores(1, 2), WantedScores(3 * PAGE_SIZE, 0), None, WantedScores(1, 5)]
    alone = [
        receive(peer, ask(peer, tokens, scores)).rows.tobytes()
        for tokens, scores in zip(prompts, wanted, strict=True)
    ]
    engine.flush()
    for is_warm in (False, True):
        with engine.admission_paused():
            asked = [
                ask(peer, tokens, scores, place)
                for place, (tokens, scores) in enumerate(zip(prompts, wanted, strict=True))
            ]
            peer.heartbeat()
        for bootstrap, tokens, scores, of_one in zip(asked, prompts, wanted, alone, strict=True):
            scored = receive(peer, bootstrap)
            assert scored.rows.tobytes() == of_one, "other bits than alone"
            if scores is None:
                assert scored.pieces == []
            else:
                check_rows(engine, tokens, scores, scored)
            computed_from = len(tokens) - 2 if scores is None else scores.first - 1
            cached = computed_from // PAGE_SIZE * PAGE_SIZE if is_warm else 0
            assert scored.done.num_cached_tokens == cached
            assert engine.computed[bootstrap.room][0][0] == cached


@pytest.mark.parametrize("num_held", [40, pytest.param(98, marks=pytest.mark.slow), 99])
def test_scores_of_what_the_decode_node_holds(engine: EngineThread, peer: DecodePeer, num_held: int) -> None:
    """Held and cached tokens are computed again for their scores; where all is held only the aux record is
    written."""
    tokens, wanted = prompt(8, 100), WantedScores(1, 1)
    deliver(engine, peer, next_room(), tokens)
    peer.forget()
    landing = (Extent(0, 99 - num_held),) if num_held < 99 else ()
    bootstrap = peer.bootstrap(
        next_room(), tokens, kv=landing, index=landing, num_held_tokens=num_held, scores=wanted
    )
    scored = receive(peer, bootstrap)
    check_rows(engine, tokens, wanted, scored)
    assert engine.computed[bootstrap.room][0][0] == 0
    peer.assert_has(bootstrap)
    assert_hint(engine, peer, bootstrap, tokens)
    if num_held == 99:
        assert scored.done.num_bytes == peer.layout.slot_bytes
        assert [sent.batch.tag for sent in engine.submitted[bootstrap.room]] == ["aux record"]
        assert not peer.kv_host.any()


@pytest.mark.I7
def test_scores_that_cannot_be_sent_end_their_room_and_no_other(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending fails from the second forward on, as it does when the queue to the decode node is full."""
    send = ControlServer.send

    def send_first(server: ControlServer, identity: bytes, message: Any) -> bool:
        is_lost = isinstance(message, RoomScores) and message.first > CHUNK
        return not is_lost and send(server, identity, message)

    monkeypatch.setattr(ControlServer, "send", send_first)
    tokens, wanted = prompt(10, 200), WantedScores(1, 0)
    lost = peer.bootstrap(next_room(), tokens, scores=wanted)
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status) == (lost.room, 502)
    assert "logprobs of the prompt could not be sent" in failed.error
    if not failed.quiet:
        assert peer.expect(RoomQuiet) == RoomQuiet(lost.room, batch_failed=False)
    assert engine.computed[lost.room] == [(0, 48), (48, 96)], "computed on behind lost scores"
    assert peer.expect(RoomScores).first == 1
    deliver(engine, peer, next_room(), tokens)
    peer.assert_nothing_more()
