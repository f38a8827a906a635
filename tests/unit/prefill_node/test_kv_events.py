"""A subscriber of a real prefill engine knows what its prefix cache has, on both levels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.core.paging.prompt_keys import root_of
from hisparse_pd.prefill_node import decode_tier
from hisparse_pd.protocol.messages import Extent, HeldKv
from tests.event_follower import Blocks, blocks_of
from tests.unit.event_subscriber import config_in, follow
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    deliver,
    engine_thread,
    next_room,
    prompt,
)
from tests.waiting import wait_until

PAGE = 16
NUM_PAGES = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> KvEventsConfig:
    return config_in(tmp_path_factory.mktemp("events"))


@pytest.fixture(scope="module")
def served(
    config: KvEventsConfig,
    tiny: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineThread]:
    with engine_thread(
        tiny,
        tmp_path_factory.mktemp("prefill") / "front",
        kv_pool_tokens=NUM_PAGES * PAGE,
        host_cache_tokens=2 * NUM_PAGES * PAGE,
        kv_events_config=config.model_dump_json(),
    ) as engine:
        yield engine


def cached(engine: EngineThread) -> Blocks:
    def look() -> Blocks:
        runs = [run for run in engine.life.pages.prefixes if not run.is_dropped and run.is_reported]
        return blocks_of((run.kinds, key) for run in runs for key in run.keys)

    return engine.between_turns(look)


def check(engine: EngineThread, config: KvEventsConfig) -> Blocks:
    """Wait until a subscriber knows what the engine has, and return that."""

    def is_known() -> bool:
        engine.wait_until_idle()
        return engine.life.pages.num_copies == 0 and follow(config, PAGE).blocks == cached(engine)

    wait_until(is_known, "a subscriber knows what the engine has")
    return cached(engine)


def test_prompts_come_go_and_come_back(
    engine: EngineThread, peer: DecodePeer, config: KvEventsConfig
) -> None:
    tokens = prompt(1, 130)
    deliver(engine, peer, next_room(), tokens)
    blocks = check(engine, config)
    assert {medium: len(hashes) for medium, hashes in blocks.items()} == {"GPU": 8, "CPU_PINNED": 8}
    deliver(engine, peer, next_room(), prompt(2, NUM_PAGES * PAGE - 20))
    assert len(check(engine, config)["GPU"] & blocks["GPU"]) < 8, "some had to go"
    num_fetched = engine.life.pages.tier.num_fetched_tokens
    deliver(engine, peer, next_room(), tokens)
    assert engine.life.pages.tier.num_fetched_tokens > num_fetched
    assert check(engine, config)["GPU"] >= blocks["GPU"]
    engine.wait_until_idle()
    engine.flush()
    wait_until(lambda: not any(check(engine, config).values()))


def test_what_is_read_from_a_decode_node_is_published(
    engine: EngineThread, peer: DecodePeer, config: KvEventsConfig
) -> None:
    tokens = prompt(30, 100)
    deliver(engine, peer, next_room(), tokens)
    engine.wait_until_idle()
    engine.flush()
    held, landing = (Extent(0, 96),), (Extent(512, 21),)
    with patch.multiple(decode_tier, LEAST_SECS=0.0, LEAST_WAIT_SECS=decode_tier.LONGEST_WAIT_SECS):
        done = deliver(
            engine,
            peer,
            next_room(),
            tokens[:98] + prompt(31, 20),
            kv=landing,
            index=landing,
            num_held_tokens=96,
            held=HeldKv(held, held, 96),
        )
    assert done.fetched.decode == 96
    assert check(engine, config)


def test_a_prompt_with_an_isolation_key_is_not_published(
    engine: EngineThread, peer: DecodePeer, config: KvEventsConfig
) -> None:
    deliver(engine, peer, next_room(), prompt(3, 100))
    deliver(engine, peer, next_room(), prompt(4, 60), root=root_of("a salt"))
    assert engine.num_cached_pages == 2 * (6 + 3)
    assert len(check(engine, config)["GPU"]) == 6


def test_batches_are_counted(engine: EngineThread, peer: DecodePeer, config: KvEventsConfig) -> None:
    num_before = engine.next_stats().counters["kv_event_batches_total"]
    deliver(engine, peer, next_room(), prompt(5, 100))
    check(engine, config)
    counters = engine.next_stats().counters
    assert counters["kv_event_batches_total"] > num_before
    assert counters["kv_event_batches_dropped_total"] == 0
