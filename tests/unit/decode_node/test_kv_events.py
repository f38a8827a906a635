"""A subscriber of a real decode engine knows which prefixes it holds, in either mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.paging.prompt_keys import root_of
from tests.event_follower import Blocks, blocks_of
from tests.unit.decode_node.support import Checkpoint, EngineHarness, random_prompt
from tests.unit.event_subscriber import config_in, follow

PAGE = 16
CHECKPOINT = "tied"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> KvEventsConfig:
    return config_in(tmp_path_factory.mktemp("events"))


@pytest.fixture(scope="module")
def shared(
    checkpoint: Checkpoint, config: KvEventsConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHarness]:
    with closing(
        EngineHarness(
            checkpoint,
            tmp_path_factory.mktemp("node"),
            disable_prefix_cache=False,
            page_size=PAGE,
            host_pool_tokens=256,
            device_pool_tokens=512,
            device_buffer_size=48,
            kv_events_config=config.model_dump_json(),
        )
    ) as node:
        yield node


@pytest.fixture
def node(shared: EngineHarness) -> EngineHarness:
    shared.flush()
    return shared


def check(node: EngineHarness, config: KvEventsConfig) -> Blocks:
    """Turn until a subscriber knows what the node holds, and return that."""
    node.turn_until(lambda: not node.engine.requests)
    runs = [run for run in node.engine.requests.held if run.is_reported]
    held = blocks_of((run.kinds, key) for run in runs for key in run.keys)
    node.turn_until(lambda: follow(config, PAGE).blocks == held)
    return held


@pytest.mark.parametrize(("flag", "medium"), [(HisparseFlag.TRUE, "CPU_PINNED"), (HisparseFlag.FALSE, "GPU")])
def test_prompt_and_answer_are_published_where_they_are(
    node: EngineHarness, config: KvEventsConfig, flag: HisparseFlag, medium: str
) -> None:
    """The follower computes the hashes of the answer's pages from the tokens that it gets."""
    prompt = random_prompt(1, 85)
    node.ask(prompt, 14, flag)
    held = check(node, config)
    assert {name for name, hashes in held.items() if hashes} == {medium}
    assert len(held[medium]) == (85 + 14 - 1) // PAGE
    node.flush()
    assert not any(check(node, config).values())


def test_what_others_need_is_published_as_gone(node: EngineHarness, config: KvEventsConfig) -> None:
    node.ask(random_prompt(2, 150), 5, HisparseFlag.TRUE)
    first = check(node, config)["CPU_PINNED"]
    node.ask(random_prompt(3, 150), 5, HisparseFlag.TRUE)
    assert 0 < len(first & check(node, config)["CPU_PINNED"]) < len(first)


def test_a_prompt_with_an_isolation_key_is_not_published(node: EngineHarness, config: KvEventsConfig) -> None:
    node.ask(random_prompt(4, 40), 2, HisparseFlag.TRUE, root=root_of("a salt"))
    assert node.engine.requests.held.num_tokens == 32
    assert not any(check(node, config).values())


def test_a_request_keeps_its_prompt_only_where_it_is_published(
    node: EngineHarness, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    prompt = random_prompt(5, 40)
    with closing(EngineHarness(checkpoint, tmp_path, page_size=PAGE, disable_prefix_cache=False)) as silent:
        for each, num_kept in ((silent, 1), (node, 40)):
            answer = each.generate(prompt, 4, HisparseFlag.TRUE)
            each.turn_until(partial(getattr, answer, "token_ids"))
            (request,) = each.engine.requests.all()
            assert len(request.prompt) == 4 * num_kept
            each.tokens_of(answer)
