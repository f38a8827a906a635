"""First tokens under grammars: whatever else is computed beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import Grammar
from hisparse_pd.engine.messages import Abort, RequestFailed
from hisparse_pd.prefill_node.scheduler import Waiting
from hisparse_pd.protocol.messages import RoomDone, RoomFailed
from tests.unit.prefill_node.support import (
    TIMEOUT_SECS,
    DecodePeer,
    EngineThread,
    all_delivered,
    next_room,
    prompt,
    reference,
)


def compiled_by_hand(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> tuple[Future[Grammar], Callable[[str], Future[Grammar]]]:
    """What the engine waits for in place of each grammar with a Q, and what compiles grammars as ever."""
    given: Future[Grammar] = Future()
    compiler = engine.engine._grammars
    ask = compiler.ask
    monkeypatch.setattr(compiler, "ask", lambda text, begun: given if "Q" in text else ask(text, begun))
    return given, ask


def test_the_first_token_is_one_that_its_grammar_begins_with(engine: EngineThread, peer: DecodePeer) -> None:
    """Beside a prompt without one, which has the token of the largest logit as ever."""
    rooms = [next_room() for _ in range(3)]
    tokens = prompt(8, 30)
    bootstraps = [peer.bootstrap(room, 30, aux_slot=slot) for slot, room in enumerate(rooms)]
    first = ["[XYZ]", "[0-9]+", ""]
    for room, regex in zip(rooms, first, strict=True):
        grammar = f"start: /{regex}/" if regex else ""
        engine.generate(room, tokens, SamplingParams(4, temperature=0.0, num_logprobs=1, grammar=grammar))
    all_delivered(engine, peer, len(rooms))
    records = [peer.aux_record(bootstrap) for bootstrap in bootstraps]
    assert chr(records[0].first_token) in "XYZ"
    assert chr(records[1].first_token) in "0123456789"
    assert records[2].first_token == reference(engine, tokens)[0]
    for record in records:
        assert record.logprob is not None
        assert record.logprob.token_id == record.first_token


def test_a_grammar_that_is_compiled_holds_up_its_own_room_alone(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, ask = compiled_by_hand(engine, monkeypatch)
    waiting, other, broken = (next_room() for _ in range(3))
    for slot, room in enumerate((waiting, other, broken)):
        peer.bootstrap(room, 20, aux_slot=slot)
    tokens = prompt(9, 20)
    engine.generate(waiting, tokens, SamplingParams(4, temperature=0.0, grammar='start: "Q"'))
    engine.generate(other, tokens)
    engine.generate(broken, tokens, SamplingParams(4, grammar="start: ((("))
    assert peer.expect(RoomDone).room == other
    failed = engine.expect(RequestFailed)
    assert (failed.request_id, failed.status) == (f"request-{broken}", 400)
    assert "Expected token" in failed.error
    assert peer.expect(RoomFailed).room == broken
    slow.set_result(ask('start: "Q"').result(TIMEOUT_SECS))
    assert peer.expect(RoomDone).room == waiting


def test_rooms_that_wait_hold_few_compiled_grammars(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None before they could be admitted, and then so many: whoever is behind waits for one of these."""
    slow, ask = compiled_by_hand(engine, monkeypatch)
    monkeypatch.setattr("hisparse_pd.prefill_node.room_life.MAX_WAITING_GRAMMARS", 1)
    first, second, plain, unpaired = (next_room() for _ in range(4))
    tokens = prompt(9, 20)
    for room, grammar in [(unpaired, "U"), (first, "Q"), (second, "R"), (plain, "")]:
        if room != unpaired:
            peer.bootstrap(room, 20, aux_slot=room % 4)
        sampling = SamplingParams(4, temperature=0.0, grammar=f'start: "{grammar}"' if grammar else "")
        engine.generate(room, tokens, sampling)
    assert peer.expect(RoomDone).room == plain
    records = {record.room: record for record in engine.life.rooms}
    assert {room for room, record in records.items() if record.grammar is not None} == {first}
    slow.set_result(ask('start: "Q"').result(TIMEOUT_SECS))
    assert {peer.expect(RoomDone).room for _ in range(2)} == {first, second}
    engine.send(Abort(f"request-{unpaired}"))


def test_a_room_does_not_wait_for_its_grammar_for_ever(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_by_hand(engine, monkeypatch)
    monkeypatch.setattr("hisparse_pd.prefill_node.room_life.MAX_WAIT_SECS", 0.0)
    room = next_room()
    peer.bootstrap(room, 20)
    engine.generate(room, prompt(9, 20), SamplingParams(4, grammar='start: "Q"'))
    assert peer.expect(RoomFailed).room == room
    failed = engine.expect(RequestFailed)
    assert (failed.status, "was not compiled within 0 s" in failed.error) == (503, True)


def test_a_grammar_that_comes_to_nothing_while_a_step_is_planned_is_in_no_batch(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is looked at twice in a turn, it may be compiled in between."""
    broken, _ = compiled_by_hand(engine, monkeypatch)
    life = engine.life
    candidates = life.candidates
    is_due = threading.Event()

    def late_candidates() -> Iterator[Waiting]:
        if is_due.is_set() and not broken.done():
            broken.set_exception(GrammarError("too complex"))
        return candidates()

    monkeypatch.setattr(life, "candidates", late_candidates)
    ungrammatical, other = next_room(), next_room()
    for slot, room in enumerate((ungrammatical, other)):
        peer.bootstrap(room, 20, aux_slot=slot)
    engine.generate(ungrammatical, prompt(9, 20), SamplingParams(4, grammar='start: "Q"'))
    is_due.set()
    engine.generate(other, prompt(10, 20))
    assert peer.expect(RoomFailed).room == ungrammatical
    failed = engine.expect(RequestFailed)
    assert (failed.status, "too complex" in failed.error) == (400, True)
    assert peer.expect(RoomDone).room == other
