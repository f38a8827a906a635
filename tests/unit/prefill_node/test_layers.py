"""KV that leaves layer by layer while the forward runs: a real engine, model and transport."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.prefill_node.compute import layer_hook
from hisparse_pd.protocol.messages import Bootstrap, Extent, RoomDone, RoomFailed, RoomQuiet
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    StuckTransport,
    Submission,
    deliver,
    engine_thread,
    next_room,
    prompt,
)
from tests.waiting import WAIT_SECS

AUX = "aux record"
WHOLE = 1 << 40
"""A minimum size of batches with which all layers of a chunk leave together."""


@pytest.fixture(scope="module", params=[WHOLE, 0])
def served(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineThread]:
    """An engine that sends whole chunks, and one that sends single layers, of which there are four."""
    ipc_path = tmp_path_factory.mktemp("prefill") / "front"
    with engine_thread(tiny_checkpoint("glm"), ipc_path) as engine:
        engine.life.pusher.min_batch_bytes = request.param
        yield engine


def sends_layers(engine: EngineThread) -> bool:
    return engine.life.pusher.min_batch_bytes == 0


def covered(submissions: Sequence[Submission]) -> dict[tuple[int, int], list[int]]:
    """Return the layers that left, in order of submission, by positions [start, stop). Asserts that the aux
    record is last."""
    tags = [submission.batch.tag for submission in submissions]
    assert tags[-1] == AUX
    layers: dict[tuple[int, int], list[int]] = {}
    for tag in tags[:-1]:
        start, stop, first, last = map(int, re.findall(r"\d+", tag))
        layers.setdefault((start, stop), []).extend(range(first, last))
    return layers


@pytest.mark.I1
def test_no_layer_leaves_before_it_is_written(
    engine: EngineThread, peer: DecodePeer, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_end: list[bytes] = []
    push_aux = engine.life.pusher.push_aux

    def look(record: Any) -> None:  # the prompt is computed, and its pages stand
        at_the_end.extend(Submission.bytes_of(sent.batch) for sent in engine.submitted[room])
        push_aux(record)

    monkeypatch.setattr(engine.life.pusher, "push_aux", look)
    deliver(engine, peer, room, prompt(1, 100))
    submissions = engine.submitted[room]
    assert len(at_the_end) == len(submissions) - 1
    for sent, final in zip(submissions, at_the_end, strict=False):
        assert sent.source == final, f"{sent.batch.tag} left before it was written"
    assert covered(submissions) == {chunk: [0, 1, 2, 3] for chunk in ((0, 48), (48, 96), (96, 99))}


def test_layers_leave_while_the_next_ones_compute(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    num_submitted: list[int] = []
    engine.after_layer = lambda layer: num_submitted.append(len(engine.submitted.get(room, ())))
    deliver(engine, peer, room, prompt(2, 40))
    if sends_layers(engine):
        assert num_submitted[0] == 1
        assert num_submitted[3] > num_submitted[0], "the last layer waits for the end of the forward"
    else:
        assert num_submitted[:3] == [0, 0, 0]


def test_on_a_gpu_every_layer_leaves_with_an_event_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the hook runs, the layer's bytes may not be stored yet; the event comes after the kernels that
    store them."""
    recorded: list[object] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            recorded.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    told: list[tuple[int, object, int]] = []
    hook = layer_hook(lambda layer, ready: told.append((layer, ready, len(recorded))), torch.device("cuda"))
    assert hook is not None
    hook(0)
    hook(1)
    assert told == [(0, recorded[0], 1), (1, recorded[1], 2)]


@pytest.mark.I1
def test_a_forward_that_raises_midway_keeps_its_pages_until_its_layers_are_back(
    engine: EngineThread, peer: DecodePeer, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = StuckTransport(engine, monkeypatch)

    def fail(layer: int) -> None:
        if layer == 2:
            assert not sends_layers(engine) or transport.started.wait(WAIT_SECS)
            raise RuntimeError("a bad kernel")

    engine.after_layer = fail
    peer.bootstrap(room, prompt(8, 40))
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.batch_failed) == (room, 500, False)
    assert "a bad kernel" in failed.error
    assert failed.quiet is not sends_layers(engine)
    if not failed.quiet:
        peer.assert_nothing_more()
        assert engine.num_used_pages == 3
        transport.release.set()
        assert peer.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False)
        assert transport.num_started == 1, "a batch of a failed room was started"
    transport.release.set()
    engine.after_layer = lambda layer: None
    done = deliver(engine, peer, next_room(), prompt(8, 40))
    assert done.num_cached_tokens == 0, "pages of a failed forward must not be cached"


def test_prompts_that_arrive_during_a_forward_are_read_meanwhile(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """Their keys are computed while the device is busy, and they are computed after it."""
    room, other = next_room(), next_room()
    has_begun = threading.Event()
    read_during: list[bool] = []

    def hold(layer: int) -> None:
        if not has_begun.is_set():
            has_begun.set()
            assert engine.engine.control.socket.poll(int(1e3 * WAIT_SECS)), "no message has come"

    def noted(message: Bootstrap) -> Sequence[PageKey]:
        if message.room == other:
            read_during.append(room not in engine.computed)
        return keys_of(message)

    keys_of = engine.life.pages.keys_of
    engine.after_layer = hold
    with patch.object(engine.life.pages, "keys_of", noted):
        sent = [peer.bootstrap(room, prompt(21, 40))]
        assert has_begun.wait(WAIT_SECS)
        engine.after_layer = lambda layer: None
        sent.append(
            peer.bootstrap(other, prompt(22, 50), kv=(Extent(512, 49),), index=(Extent(512, 49),), aux_slot=1)
        )
        assert [peer.expect(RoomDone).room for _ in sent] == [room, other]
    assert read_during == [True]
    peer.assert_has(sent[1])  # the other's last page may have gone to this one
