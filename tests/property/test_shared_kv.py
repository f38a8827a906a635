"""Tables of any model whose layers share indexers and KV: what is paged in, and for whom."""

from __future__ import annotations

from contextlib import closing
from itertools import accumulate, combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.model.spec import ModelSpec
from tests.tied_checkpoint import write_tied_checkpoint
from tests.unit.decode_node.support import EngineHarness, load_checkpoint, random_prompt
from tests.unit.model.model_specs import make_spec

NUM_LAYERS, NUM_NEW = 5, 12
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((1, 37, 60, 130, 301))]


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    num_layers = draw(st.integers(1, 12))
    begins = [0, *draw(st.lists(st.integers(0, 1), min_size=num_layers - 1, max_size=num_layers - 1))]
    groups = tuple(accumulate(begins))
    sources: list[int] = []
    for layer in range(num_layers):
        owners = [owner for owner, source in enumerate(sources) if owner == source]
        sources.append(draw(st.sampled_from([*owners, layer])))
    num_drafts = draw(st.integers(0, 1))
    return make_spec(
        num_layers=num_layers,
        index_group_of_layer=groups + (groups[-1] + 1,) * num_drafts,
        kv_source_layers=tuple(sources),
        num_draft_layers=num_drafts,
    )


@given(spec=specs())
def test_every_layer_finds_what_its_group_selected(spec: ModelSpec) -> None:
    """Each KV layer of an index group's entries gets the misses once by the group's end, and before a layer
    attends to it."""
    for group, layers in enumerate(spec.layers_of_group):
        filled: list[int] = []
        for layer in layers:
            filled += spec.kv_layers_filled_at[layer]
            assert spec.kv_layer_of_layer[layer] in filled
        of_entries = spec.kv_layers_of_hot_group[spec.hot_group_of_index_group[group]]
        assert sorted(filled) == list(of_entries)


@given(spec=specs())
def test_no_two_hot_groups_have_entries_in_one_kv_layer(spec: ModelSpec) -> None:
    every = [layer for layers in spec.kv_layers_of_hot_group for layer in layers]
    assert sorted(every) == list(range(spec.num_kv_layers))
    hot_groups = [spec.hot_group_of_index_group[group] for group in spec.index_group_of_layer]
    for one, other in combinations(range(len(hot_groups)), 2):
        if spec.kv_layer_of_layer[one] == spec.kv_layer_of_layer[other]:
            assert hot_groups[one] == hot_groups[other]


@given(spec=specs())
def test_layers_that_share_nothing_have_hot_groups_of_their_own(spec: ModelSpec) -> None:
    num_own = len(set(spec.kv_layer_of_layer))
    assert spec.num_kv_layers == num_own <= spec.num_layers + spec.num_draft_layers
    if num_own == spec.num_layers + spec.num_draft_layers:
        assert spec.hot_group_of_index_group == tuple(range(spec.num_index_groups))
        assert spec.kv_layers_of_hot_group == spec.layers_of_group


@st.composite
def patterns(draw: st.DrawFn) -> dict[str, Any]:
    """Draw which layers of a configuration have rope, an indexer and KV of their own."""
    with_rope: list[int] = draw(st.lists(st.integers(0, 1), min_size=NUM_LAYERS, max_size=NUM_LAYERS))
    kinds: list[str] = draw(
        st.lists(st.sampled_from(("full", "shared")), min_size=NUM_LAYERS - 1, max_size=NUM_LAYERS - 1)
    )
    sources: list[int] = []
    for layer, rope in enumerate(with_rope):
        owners = [each for each in range(layer) if sources[each] == each and with_rope[each] == rope]
        sources.append(draw(st.sampled_from([layer, *owners])))
    return {
        "no_rope_layers": with_rope,
        "indexer_types": ["full", *kinds],
        "kv_source_layers": sources,
    }


@pytest.mark.slow
@pytest.mark.I3
@pytest.mark.I5
@settings(max_examples=6)
@given(pattern=patterns())
def test_any_pattern_of_layers_gives_the_same_tokens_in_every_mode(pattern: dict[str, Any]) -> None:
    """Each row that is paged in is verified, and hot buffers of 48 hold little of the longer prompts."""
    with TemporaryDirectory() as directory:
        path = Path(directory)
        write_tied_checkpoint(path / "model", "mistral", **pattern)
        checkpoint = load_checkpoint(path / "model")
        limits: dict[str, Any] = {
            "device_pool_tokens": 1024,
            "device_buffer_size": 48,
            "max_running_requests": 16,
        }
        with closing(EngineHarness(checkpoint, path, page_size=16, **limits)) as node:
            jobs = [
                (prompt, node.generate(prompt, NUM_NEW, flag)) for flag in HisparseFlag for prompt in PROMPTS
            ]
            node.turn_until(lambda: all(answer.is_over for _, answer in jobs))
    by_prompt: dict[Any, set[tuple[int, ...]]] = {}
    for prompt, answer in jobs:
        assert answer.failure is None, answer.failure
        assert len(answer.token_ids) == NUM_NEW
        by_prompt.setdefault(prompt, set()).add(tuple(answer.token_ids))
    assert [len(tokens) for tokens in by_prompt.values()] == [1] * len(PROMPTS)
