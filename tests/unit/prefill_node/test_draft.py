"""The MTP layer on the prefill node: which of its bytes land at decode nodes that draft, and at others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hisparse_pd.protocol.messages import Geometry, RegionKind, RegistrationRefused
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    all_delivered,
    assert_hint,
    computed_alone,
    decode_peer,
    deliver,
    engine_thread,
    prompt,
)
from tools.checkpoints.make_tiny import write_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose numbers of layers, index layers and index groups differ."""
    directory = tmp_path_factory.mktemp("draft")
    write_checkpoint(directory, "glm", draft_gain=1.0)
    return directory


@pytest.fixture(scope="module", params=[0, 1 << 40])
def served(
    request: pytest.FixtureRequest, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineThread]:
    """An engine that sends single layers, of which there are five, and one that sends whole chunks."""
    ipc_path = tmp_path_factory.mktemp("prefill") / "front"
    with engine_thread(path, ipc_path) as engine:
        engine.life.pusher.min_batch_bytes = request.param
        yield engine


@pytest.fixture(scope="module")
def nodes(served: EngineThread) -> Iterator[dict[bool, DecodePeer]]:
    """A decode node that takes the draft layer, and one that does not."""
    with (
        decode_peer(served, "drafts") as drafts,
        decode_peer(served, "plain", takes_drafts=False) as plain,
    ):
        for node in (drafts, plain):
            node.register()
        yield {True: drafts, False: plain}


def landed(peer: DecodePeer, num_tokens: int, first_slot: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KV by layer and the indexer keys by group of all positions."""
    slots = slice(first_slot, first_slot + num_tokens)
    return peer.kv_host[:, slots], peer.index[:, slots]


@pytest.mark.I5
@pytest.mark.parametrize("num_tokens", [2, pytest.param(17, marks=pytest.mark.slow), 49, 100])
def test_the_draft_layers_bytes_are_those_of_one_forward(
    engine: EngineThread, nodes: dict[bool, DecodePeer], room: int, num_tokens: int
) -> None:
    """Chunks, of 48 tokens here, do not change the bytes; a decode node that does not draft gets the other
    layers alone."""
    tokens = prompt(num_tokens, num_tokens)
    alone = computed_alone(engine, tokens)
    for takes_drafts, peer in nodes.items():
        engine.flush()
        peer.forget()
        deliver(engine, peer, 2 * room + takes_drafts, tokens)
        kv, index = landed(peer, num_tokens - 1)
        assert (len(kv), len(index)) == (4 + takes_drafts, 2 + takes_drafts)
        assert torch.equal(kv, alone.kv[: len(kv)])
        assert torch.equal(index, alone.index[: len(index)])


def test_a_cached_prefix_brings_the_draft_layer_with_it(
    engine: EngineThread, nodes: dict[bool, DecodePeer], room: int
) -> None:
    """The draft layer's last cached row saw the first prompt's next token; its other rows are the same."""
    first, second = prompt(1, 64), [*prompt(1, 64)[:32], *prompt(2, 40)]
    deliver(engine, nodes[False], 2 * room, first)
    peer = nodes[True]
    peer.forget()
    done = deliver(engine, peer, 2 * room + 1, second)
    assert done.num_cached_tokens == 32
    alone, (kv, _) = computed_alone(engine, second), landed(peer, len(second) - 1)
    assert torch.equal(kv[:4], alone.kv[:4])
    assert torch.equal(kv[4, :31], alone.kv[4, :31])
    assert kv[4, 31:].any(dim=1).all()


def test_the_draft_layer_leaves_last(engine: EngineThread, nodes: dict[bool, DecodePeer], room: int) -> None:
    for takes_drafts, peer in nodes.items():
        engine.flush()
        peer.forget()
        deliver(engine, peer, 2 * room + takes_drafts, prompt(3, 40))
        tags = [submission.batch.tag for submission in engine.submitted[2 * room + takes_drafts]]
        assert tags[-1] == "aux record"
        layers = [tuple(map(int, re.findall(r"\d+", tag)))[2:] for tag in tags[:-1]]
        assert [layer for start, stop in layers for layer in range(start, stop)] == list(
            range(4 + takes_drafts)
        )


def test_prompts_of_one_forward_get_their_own_next_tokens(
    engine: EngineThread, nodes: dict[bool, DecodePeer], room: int
) -> None:
    """A whole prompt, the end of one and the middle of one are computed side by side."""
    peer = nodes[True]
    peer.forget()
    prompts = {3 * room + number: prompt(10 + number, 20 + 15 * number) for number in range(3)}
    bootstraps = peer.bootstrap_side_by_side(prompts)
    assert all_delivered(peer, len(prompts)).keys() == prompts.keys()
    for number, tokens in prompts.items():
        first_slot = bootstraps[number].index_extents[0].start
        alone, (kv, index) = computed_alone(engine, tokens), landed(peer, len(tokens) - 1, first_slot)
        assert torch.equal(kv, alone.kv)
        assert torch.equal(index, alone.index)
        assert_hint(engine, peer, bootstraps[number], tokens)


def test_a_node_without_the_layer_refuses_one_that_drafts(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, room: int
) -> None:
    with engine_thread(tiny_checkpoint("v32"), tmp_path / "front") as engine:
        assert engine.engine.geometry.num_draft_layers == 0
        with decode_peer(engine) as peer:
            wants: Geometry = msgspec.structs.replace(peer.geometry, num_draft_layers=1)
            peer.client.send(peer.registration(geometry=wants))
            refused = peer.expect(RegistrationRefused)
            assert refused.permanent
            assert "num_draft_layers: the decode node drafts with 1 MTP layer" in refused.error
            assert "one checkpoint on both" in refused.error
            assert "--speculative-num-steps 0" in refused.error
            peer.register()
            deliver(engine, peer, room, prompt(4, 50))


@pytest.mark.parametrize("kind", [RegionKind.KV_HOST, RegionKind.KV_DEVICE, RegionKind.INDEX, RegionKind.AUX])
def test_regions_are_measured_by_the_layers_that_the_decode_node_takes(
    engine: EngineThread, nodes: dict[bool, DecodePeer], kind: RegionKind
) -> None:
    def refused(peer: DecodePeer, regions: tuple[Any, ...]) -> str:
        return engine.engine.peers.why_refused(peer.registration(regions=regions)) or ""

    for peer, other in ((nodes[True], nodes[False]), (nodes[False], nodes[True])):
        mixed = tuple(
            of_other if of_other.kind is kind else own
            for own, of_other in zip(peer.regions, other.regions, strict=True)
        )
        assert f"region {kind.value}: the decode node registers" in refused(peer, mixed)
        assert not refused(peer, peer.regions)
