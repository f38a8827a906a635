"""Logprobs of prompts, and rooms that are the prefill node's alone, in a real engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse_pd.base.vocabulary import FinishReason, SamplingParams
from hisparse_pd.core.model import prompt_scores
from hisparse_pd.engine.messages import (
    Abort,
    FlushCache,
    Generate,
    GenerateGroup,
    PrefillFinished,
    PromptScores,
    RequestFailed,
    Tokens,
    WantedScores,
    pack_token_ids,
    score_dtype,
)
from hisparse_pd.protocol.messages import RoomFailed
from tests.identities import ANY
from tests.unit.prefill_node.support import (
    GREEDY,
    TIMEOUT_SECS,
    DecodePeer,
    EngineThread,
    engine_thread,
    next_room,
    own_pools,
    prompt,
    wait_for,
)
from tools.checkpoints.make_tiny import write_checkpoint

NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0)
ONE = SamplingParams(max_new_tokens=1, temperature=0.0, num_logprobs=2)
CHUNK, PAGE_SIZE = 48, 16


@pytest.fixture(scope="module", params=["plain", "drafting"])
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


def ask(
    engine: EngineThread,
    tokens: Sequence[int],
    scores: WantedScores | None,
    sampling: SamplingParams = NOTHING,
    *,
    room: int | None = None,
    is_alone: bool = True,
) -> Generate:
    room = next_room() if room is None else room
    generate = Generate(
        f"request-{room}",
        room,
        len(tokens),
        sampling,
        "127.0.0.1",
        1,
        scores=scores,
        is_prefill_only=is_alone,
    )
    engine.send(GenerateGroup((generate,), ANY, pack_token_ids(tokens)))
    return generate


@contextmanager
def held_in_forward(engine: EngineThread, number: int) -> Iterator[threading.Event]:
    """The engine waits before its forward ``number`` from now until the end; it sets what is yielded."""
    reached, may_go = threading.Event(), threading.Event()
    forwards = itertools.count(1)

    def wait(batch: object) -> None:
        if next(forwards) == number:
            reached.set()
            assert may_go.wait(TIMEOUT_SECS)

    engine.before_run = wait
    try:
        yield reached
    finally:
        may_go.set()


@dataclass
class Scored:
    rows: np.ndarray[Any, Any]
    num_messages: int
    end: Tokens | PrefillFinished


def receive(engine: EngineThread, generate: Generate) -> Scored:
    """What came of a request, to its end."""
    kind = Tokens if generate.is_prefill_only else PrefillFinished
    end: Any = engine.expect(kind, lambda message: message.request_id == generate.request_id)
    messages = [
        message
        for message in engine._inbox
        if isinstance(message, PromptScores) and message.request_id == generate.request_id
    ]
    engine._inbox = [message for message in engine._inbox if message not in messages]
    num_top = generate.scores.num_top if generate.scores else 0
    rows = np.frombuffer(b"".join(message.rows for message in messages), score_dtype(num_top))
    return Scored(rows, len(messages), end)


def logprobs_of(engine: EngineThread, tokens: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab]: one forward of the whole prompt over pools of its own, with all logits."""
    kv, _, _ = own_pools(engine.spec, len(tokens), PAGE_SIZE)
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
@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
@pytest.mark.parametrize("sampling", [NOTHING, ONE], ids=["nothing", "one token"])
def test_scores_are_those_of_one_forward_of_the_whole_prompt(
    engine: EngineThread, num_tokens: int, sampling: SamplingParams
) -> None:
    tokens, wanted = prompt(num_tokens, num_tokens), WantedScores(1, 3)
    generate = ask(engine, tokens, wanted, sampling)
    scored = receive(engine, generate)
    check_rows(engine, tokens, wanted, scored)
    assert scored.num_messages == -(-(num_tokens - 1) // CHUNK), "more than one a forward"
    assert isinstance(scored.end, Tokens)
    assert scored.end.finish_reason is FinishReason.LENGTH
    assert scored.end.stats is not None
    assert scored.end.stats.mode is None
    first_token = int(logprobs_of(engine, tokens)[-1].argmax())
    assert scored.end.token_ids == ((first_token,) if sampling is ONE else ())
    assert len(scored.end.logprobs) == len(scored.end.token_ids)


@pytest.mark.parametrize("first", [1, 2, PAGE_SIZE, PAGE_SIZE + 1, CHUNK + 1, CHUNK + 2, 99, 100, 101])
def test_scores_begin_where_they_are_wanted(engine: EngineThread, first: int) -> None:
    tokens, wanted = prompt(5, 100), WantedScores(first, 1)
    scored = receive(engine, ask(engine, tokens, wanted))
    check_rows(engine, tokens, wanted, scored)


@pytest.mark.I5
def test_scores_depend_on_no_neighbour_and_on_no_cache(engine: EngineThread) -> None:
    """Prompts of one batch want different numbers of tokens, or none; then all is in the cache."""
    prompts = [prompt(seed, length) for seed, length in ((1, 20), (2, 100), (3, 7), (4, 60))]
    wanted = [WantedScores(1, 2), WantedScores(3 * PAGE_SIZE, 0), None, WantedScores(1, 5)]
    alone = [
        receive(engine, ask(engine, tokens, scores)).rows.tobytes()
        for tokens, scores in zip(prompts, wanted, strict=True)
    ]
    engine.send(FlushCache())
    for is_warm in (False, True):
        asked = [ask(engine, tokens, scores) for tokens, scores in zip(prompts, wanted, strict=True)]
        for generate, tokens, scores, of_one in zip(asked, prompts, wanted, alone, strict=True):
            scored = receive(engine, generate)
            assert scored.rows.tobytes() == of_one, "other bits than alone"
            if scores is None:
                assert scored.num_messages == 0
            else:
                check_rows(engine, tokens, scores, scored)
            assert isinstance(scored.end, Tokens)
            assert scored.end.stats is not None
            computed_from = len(tokens) - 1 if scores is None else scores.first - 1
            cached = computed_from // PAGE_SIZE * PAGE_SIZE if is_warm else 0
            assert scored.end.stats.num_cached_tokens == cached
            assert engine.computed[generate.room][0][0] == cached


def test_logits_come_in_slices(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", 5 * 4 * engine.spec.vocab_size)
    num_rows: list[int] = []
    logits = type(engine.model).logits

    def counted(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return logits(model, hidden)

    monkeypatch.setattr(type(engine.model), "logits", counted)
    tokens, wanted = prompt(6, 70), WantedScores(1, 2)
    scored = receive(engine, ask(engine, tokens, wanted))
    assert max(num_rows) == 5
    monkeypatch.undo()
    check_rows(engine, tokens, wanted, scored)


def test_scores_beside_a_delivery(engine: EngineThread, peer: DecodePeer) -> None:
    """The decode node gets what it gets without them; held and cached tokens are computed all the same."""
    tokens, wanted = prompt(8, 100), WantedScores(1, 1)
    receive(engine, ask(engine, tokens, None))
    room = next_room()
    bootstrap = peer.bootstrap(room, len(tokens), num_held_tokens=0)
    generate = ask(engine, tokens, wanted, GREEDY, room=room, is_alone=False)
    scored = receive(engine, generate)
    check_rows(engine, tokens, wanted, scored)
    peer.assert_has(bootstrap)
    assert peer.aux_record(bootstrap).first_token == int(logprobs_of(engine, tokens)[-1].argmax())


def test_a_room_without_a_decode_node_sends_nothing_and_keeps_its_pages_in_the_cache(
    engine: EngineThread,
) -> None:
    tokens = prompt(9, 5 * PAGE_SIZE)
    generate = ask(engine, tokens, WantedScores(1, 0))
    receive(engine, generate)
    assert generate.room not in engine.submitted
    wait_for(lambda: engine.num_cached_pages == 5, "the pages to be in the cache")
    again = ask(engine, tokens, None, room=generate.room)
    failed = engine.expect(RequestFailed)
    assert (failed.request_id, failed.status) == (again.request_id, 400)
    assert "served before" in failed.error


def test_no_decode_node_may_take_part_in_such_a_room(engine: EngineThread, peer: DecodePeer) -> None:
    early, late = next_room(), next_room()
    peer.bootstrap(early, 20)
    peer.heartbeat()
    ask(engine, prompt(1, 20), None, room=early)
    assert engine.expect(RequestFailed).status == 400
    assert "no decode node may take part" in peer.expect(RoomFailed).error

    with held_in_forward(engine, 1) as reached:
        generate = ask(engine, prompt(2, 100), None, room=late)
        assert reached.wait(TIMEOUT_SECS)
        peer.bootstrap(late, 100)
    receive(engine, generate)
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.quiet) == (late, True)


def test_an_abort_ends_such_a_room(engine: EngineThread) -> None:
    with held_in_forward(engine, 2) as reached:
        generate = ask(engine, prompt(3, 4 * CHUNK), WantedScores(1, 0))
        assert reached.wait(TIMEOUT_SECS)
        engine.send(Abort(generate.request_id))
    engine.wait_until_idle()
    assert engine.computed[generate.room][-1] == (CHUNK, 2 * CHUNK)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [(WantedScores(0, 0), "position 0 has no logprob"), (WantedScores(1, 21), "21 logprobs a token")],
)
def test_what_the_front_would_not_ask_for_is_refused(
    engine: EngineThread, wanted: WantedScores, said: str
) -> None:
    generate = ask(engine, prompt(4, 20), wanted)
    failed = engine.expect(RequestFailed)
    assert (failed.request_id, failed.status) == (generate.request_id, 400)
    assert said in failed.error
