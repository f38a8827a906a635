"""Rows of the prefill node's own pool that change before it reads them again: no such row is used.

A prompt whose cached prefix has such a row is computed anew; one that is partly computed fails and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from hisparse_pd.engine import prefix_scrub
from hisparse_pd.engine.prefix_scrub import PrefixScrub
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.protocol.messages import Extent, RoomDone, RoomFailed
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    decode_peer,
    deliver,
    engine_thread,
    next_room,
    prompt,
)

PAGE = 16


def flip(engine: EngineThread, room: int, position: int, layer: int = 1) -> int:
    """Flip a bit of a token's row. Return its slot."""
    slot = int(engine.slots(room, position + 1)[position])
    engine.memory.kv[layer, slot, 7] ^= 4
    return slot


def num_found(engine: EngineThread, kind: str) -> int:
    return engine.life.set_aside.num_found[kind]


@pytest.mark.I9
@pytest.mark.parametrize("num_chunks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_prompt_whose_cached_prefix_is_damaged_is_computed_anew(
    engine: EngineThread, peer: DecodePeer, num_chunks: int
) -> None:
    """Its bytes are right, as are those of prompts with the same beginning. No room gets the page until an
    operator gives it back."""
    tokens = prompt(1, 100)
    others = [prompt(2, 60), tokens[:64] + prompt(3, 48 * num_chunks)]
    rooms = [next_room() for _ in range(6)]
    with patch.object(PrefixScrub, "verify_next"):  # the scrub would find the row first
        deliver(engine, peer, rooms[0], tokens)
        deliver(engine, peer, rooms[1], others[0])
        before = num_found(engine, "cached")
        slot = flip(engine, rooms[0], 37)
        again = deliver(engine, peer, rooms[2], others[1])
    assert again.num_cached_tokens == 0
    assert num_found(engine, "cached") == before + 1
    (page,) = engine.life.set_aside.shown()
    assert (page.pool, page.start, page.is_in_use) == ("device", slot // PAGE * PAGE, False)
    assert f"layer 1, position 37, in slot {slot} of the device pool" in page.error
    assert deliver(engine, peer, rooms[3], tokens).num_cached_tokens == 64, "what was computed anew"
    assert deliver(engine, peer, rooms[4], others[0]).num_cached_tokens == 48, "others are not concerned"
    used = {page_id for room in rooms[2:5] for page_id in engine.page_ids[room]}
    assert slot // PAGE not in used
    stats = engine.next_stats()
    assert stats.gauges["set_aside_tokens"] == PAGE
    assert stats.set_aside == (page,)


@pytest.mark.I9
def test_rows_of_a_former_room_match_no_check_once_another_has_their_pages(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """A row that is sent before the new one is written is then found out where it lands."""
    former, room = next_room(), next_room()
    deliver(engine, peer, former, prompt(14, 100))
    former_slots = engine.slots(former, 99)
    num_wrong: list[tuple[int, int]] = []

    def look(batch: Sequence[tuple[PrefillRequest, Chunk]]) -> None:
        first_positions = np.arange(0, 96, PAGE)  # of the six whole pages
        page_ids = former_slots[first_positions] // PAGE
        is_shared = np.isin(page_ids, engine.page_ids[room])
        pages = np.stack((page_ids, first_positions, np.full(6, PAGE)), axis=1)[is_shared]
        wrong = engine.memory.wrong_items(pages.astype(np.int32), PAGE)
        num_wrong.append((len(wrong), len(pages) * PAGE))

    engine.flush()
    engine.before_run = look
    deliver(engine, peer, room, prompt(15, 40))
    ((num_void, num_shared),) = num_wrong
    assert num_void == num_shared > 0


@pytest.mark.I9
def test_a_row_of_an_earlier_chunk_ends_its_room_and_no_other(engine: EngineThread, peer: DecodePeer) -> None:
    tokens, other = prompt(4, 100), prompt(5, 40)
    room, other_room = next_room(), next_room()

    def damage(layer: int) -> None:
        if layer == engine.spec.num_layers - 1 and room not in engine.computed:
            flip(engine, room, 20)

    engine.after_layer = damage
    landing = {"kv": (Extent(512, 99),), "index": (Extent(512, 99),), "aux_slot": 1}
    peer.bootstrap(room, tokens, **landing)
    deliver(engine, peer, other_room, other)
    told = peer.expect(RoomFailed)
    assert (told.room, told.status) == (room, 502)
    assert "layer 1, position 20, in slot" in told.error
    assert "see /quarantine of the prefill node" in told.error
    assert deliver(engine, peer, next_room(), tokens).num_cached_tokens == 0


@pytest.mark.I9
def test_rooms_that_have_begun_with_a_prefix_end_when_it_is_damaged(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """A waiting room that would have begun with the same prefix computes it instead."""
    begins = prompt(6, 64)
    tokens, other = begins + prompt(7, 100), begins + prompt(8, 20)
    first, room, other_room = (next_room() for _ in range(3))
    with patch.object(PrefixScrub, "verify_next"):
        deliver(engine, peer, first, [*begins, 9, 9])

        def damage(layer: int) -> None:
            if layer == 0 and room not in engine.computed:
                flip(engine, first, 50)
                peer.bootstrap(other_room, other)
                engine.wait_for_message()

        engine.after_layer = damage
        peer.bootstrap(room, tokens, kv=(Extent(512, 163),), index=(Extent(512, 163),), aux_slot=1)
        told = peer.expect(RoomFailed)
        assert (told.room, told.status) == (room, 502)
        done = peer.expect(RoomDone)
    assert (done.room, done.num_cached_tokens) == (other_room, 0)
    assert engine.computed[other_room][0][0] == 0


@pytest.mark.I9
def test_idle_time_goes_through_what_is_cached(engine: EngineThread, peer: DecodePeer) -> None:
    tokens, room = prompt(9, 100), next_room()
    with patch.object(prefix_scrub, "STRETCH_BYTES", 1 << 14):
        deliver(engine, peer, room, tokens)
        before = num_found(engine, "scrub")
        slot = flip(engine, room, 70)
        engine.wait_until(lambda: len(engine.life.set_aside) == 1, "the scrub to find it")
    assert num_found(engine, "scrub") == before + 1
    (page,) = engine.life.set_aside.shown()
    assert page.start == slot // PAGE * PAGE
    assert deliver(engine, peer, next_room(), tokens).num_cached_tokens == 0


@pytest.mark.I8
def test_a_prompt_that_does_not_fit_beside_pages_that_are_set_aside(tiny: Path, tmp_path: Path) -> None:
    """The prompt is refused at once; prompts that fit are served."""
    with (
        engine_thread(tiny, tmp_path / "front", kv_pool_tokens=8 * PAGE) as engine,
        decode_peer(engine) as peer,
        patch.object(PrefixScrub, "verify_next"),
    ):
        peer.register()
        tokens = prompt(10, 60)
        room = next_room()
        deliver(engine, peer, room, tokens)
        flip(engine, room, 20)
        deliver(engine, peer, next_room(), tokens)
        peer.bootstrap(next_room(), prompt(12, 8 * PAGE))
        failure = peer.expect(RoomFailed)
        assert failure.status == 503
        assert "the KV pool has 7 (112 tokens)" in failure.error
        assert "1 pages are set aside, see /quarantine of the prefill node" in failure.error
        deliver(engine, peer, next_room(), prompt(13, 7 * PAGE + 1))
