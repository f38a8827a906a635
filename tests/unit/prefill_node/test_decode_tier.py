"""Prompts that this node has nowhere come back from the decode node that holds them.

Engines and decode nodes are real, on CPUs; a decode node holds what it got of an earlier prompt. Reads that
take any time are those of ``tests/property/test_decode_tier.py``. """

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hisparse_pd.core.paging.extents import slice_extents
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.prefill_node import decode_tier
from hisparse_pd.prefill_node.host_tier import CACHE_POOLS
from hisparse_pd.protocol.messages import Bootstrap, Extent, FetchedTokens, HeldKv, RoomDone, RoomFailed
from hisparse_pd.transfer.errors import TransferError
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    all_delivered,
    assert_hint,
    computed_alone,
    decode_peer,
    engine_thread,
    next_room,
    prompt,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.I1, pytest.mark.I5, pytest.mark.I9]

PAGE = 16
SCATTERED = (Extent(64, 40), Extent(0, 8), Extent(512, 96))
"""Slots of a landing zone, whose parts do not begin where pages of the prefill node do."""


@pytest.fixture(autouse=True)
def eager(engine: EngineThread) -> Iterator[None]:
    """Nothing is computed too soon to be read, and earlier errors are forgotten."""
    engine.life.decode_tier._paused_until.clear()
    with patch.object(decode_tier, "LEAST_SECS", 0.0):
        yield


@pytest.fixture(params=["tcp", "shm"])
def peer(engine: EngineThread, node: DecodePeer, request: pytest.FixtureRequest) -> Iterator[DecodePeer]:
    """A decode node, over the network or over shared memory."""
    with closing(DecodePeer(engine, f"decode-{request.param}")) as peer:
        lane = peer.lane_host.offer if request.param == "shm" else None
        assert peer.register(lane=lane).lane == request.param
        yield peer
        engine.wait_until_idle()


def land(peer: DecodePeer, tokens: Sequence[int], **changes: Any) -> Bootstrap:
    """Let a prompt land at the decode node, which then holds it. Returns its Bootstrap."""
    kv = slice_extents(SCATTERED, 0, len(tokens) - 1)
    index = (Extent(PAGE * 40, -(-(len(tokens) - 1) // PAGE) * PAGE),)
    message = peer.bootstrap(next_room(), tokens, kv=kv, index=index, **changes)
    assert peer.expect(RoomDone).room == message.room
    return message


def next_turn(
    peer: DecodePeer, before: Bootstrap, tokens: Sequence[int], num_held: int, **changes: Any
) -> Bootstrap:
    """Send the Bootstrap of a prompt whose first tokens the decode node holds of ``before``."""
    num_landing = len(tokens) - 1 - num_held
    return peer.bootstrap(
        next_room(),
        tokens,
        kv=(Extent(800, num_landing),),
        index=(Extent(912, num_landing),),
        num_held_tokens=num_held,
        **{
            "hisparse": before.hisparse,
            "held": HeldKv(
                slice_extents(before.kv_extents, 0, num_held),
                slice_extents(before.index_extents, 0, num_held),
                num_held,
            ),
            **changes,
        },
    )


def deliver_turn(
    engine: EngineThread,
    peer: DecodePeer,
    before: Bootstrap,
    tokens: Sequence[int],
    num_held: int,
    **changes: Any,
) -> RoomDone:
    """Deliver a next turn, and compare all that is in the node's pools then with what is computed alone."""
    message = next_turn(peer, before, tokens, num_held, **changes)
    done = peer.expect(RoomDone)
    assert done.room == message.room
    assert engine.computed[message.room][0][0] == done.num_cached_tokens
    peer.assert_has(message)
    assert_hint(engine, peer, message, tokens)
    expected = computed_alone(engine, tokens)
    slots = engine.slots(message.room, len(tokens) - 1)
    for name, pool, other in (
        ("KV", engine.memory.kv, expected.kv),
        ("indexer keys", engine.memory.index, expected.index),
    ):
        assert torch.equal(pool[:, slots], other[:, : len(slots)]), name
    return done


@pytest.mark.parametrize("hisparse", [True, False])
def test_what_the_decode_node_holds_is_not_computed_again(
    engine: EngineThread, peer: DecodePeer, hisparse: bool
) -> None:
    tokens = prompt(1, 140)
    before = land(peer, tokens, hisparse=hisparse)
    engine.wait_until_idle()
    engine.flush()
    num_read, num_bytes = engine.life.decode_tier.num_read_tokens, engine.life.decode_tier.num_read_bytes
    done = deliver_turn(engine, peer, before, tokens[:132] + prompt(2, 30), num_held=128)
    assert (done.num_cached_tokens, done.fetched) == (128, FetchedTokens(decode=128))
    assert engine.life.decode_tier.num_read_tokens == num_read + 128
    per_token = sum(len(pool) * pool.shape[2] for pool in (peer.kv_host, peer.index, peer.row_checks))
    assert engine.life.decode_tier.num_read_bytes == num_bytes + 128 * per_token
    done = deliver_turn(engine, peer, before, tokens[:132] + prompt(3, 30), num_held=128)
    assert (done.num_cached_tokens, done.fetched) == (128, FetchedTokens()), "it is on the device now"
