"""Sizes of pools: from a GPU's free memory, and the error when it is not enough."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs
from pydantic import ValidationError

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.vocabulary import CheckpointError, StartError
from hisparse_pd.core.memory.device import DeviceMemory, check_devices
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.core.model.token_counts import TokenCounts
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node import sizing
from hisparse_pd.decode_node.attention_parts import MissCopies
from hisparse_pd.decode_node.engine import DecodeEngine
from hisparse_pd.decode_node.memory import DecodeMemory, num_host_bytes
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.sizing import (
    device_demand,
    entry_bytes,
    make_limits,
    size_device_pool,
    table_bytes,
)
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.prefill_node import sizing as prefill_sizing
from hisparse_pd.prefill_node.sizing import size_kv_pool
from tests.unit.model.model_specs import make_spec

GIB = 1 << 30
GPU = torch.device("meta")
"""A device whose tensors' memory is counted and not taken."""


def decode(**changes: Any) -> DecodeSettings:
    return DecodeSettings(model_path=Path("/m"), **{"device": "cuda", "device_pool_tokens": 0, **changes})


def prefill(**changes: Any) -> PrefillSettings:
    return PrefillSettings(model_path=Path("/m"), **{"device": "cuda", "kv_pool_tokens": 0, **changes})


# --- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_format", "index_format", "item_bytes", "index_item_bytes"),
    [
        ("float32", "float32", 2304, 512),
        ("bfloat16", "bfloat16", 1152, 256),
        ("fp8_e4m3", "fp8_e4m3", 656, 132),
        ("fp8_e4m3", "bfloat16", 656, 256),
    ],
)
def test_items_of_every_format(
    kv_format: str, index_format: str, item_bytes: int, index_item_bytes: int
) -> None:
    spec = make_spec(kv_format=kv_format, index_format=index_format)
    assert (spec.item_bytes, spec.index_item_bytes) == (item_bytes, index_item_bytes)
    geometry = spec.geometry(64)
    assert (geometry.dtype, geometry.item_bytes) == (kv_format, item_bytes)
    assert geometry.index_item_bytes == index_item_bytes


@given(
    num_layers=st.integers(1, 5),
    num_rows=st.integers(1, 9),
    context=st.integers(8, 5000),
    buffer=st.integers(9, 6000),
    page_size=st.sampled_from([1, 16, 64]),
    host=st.integers(64, 10_000),
    index=st.sampled_from([0, 64, 1000]),
    min_split=st.sampled_from([None, 0, 2, 64]),
    num_gib=st.floats(1.3, 200),
)
@example(1, 1, 785, 785, 1, 785, 0, 64, 71.15137075404881)  # once missed four bytes
def test_what_is_allocated_is_what_was_counted(
    num_layers: int,
    num_rows: int,
    context: int,
    buffer: int,
    page_size: int,
    host: int,
    index: int,
    min_split: int | None,
    num_gib: float,
) -> None:
    spec = make_spec(
        num_layers=num_layers,
        index_group_of_layer=tuple(layer // 2 for layer in range(num_layers)),
        index_topk=8,
        context_length=context,
        vocab_size=100,
    )
    settings = decode(
        max_running_requests=num_rows,
        device_buffer_size=buffer,
        page_size=page_size,
        host_pool_tokens=host,
        index_pool_tokens=index,
        micro_batch_min_bs=min_split,
        mem_fraction_static=0.5,
    )
    memory = DeviceMemory(int(2 * num_gib * GIB), GIB // 10)
    num_tokens = size_device_pool(settings, spec, memory)
    totals = make_limits(settings, spec, num_tokens).totals
    assert totals.device == num_tokens
    pools = DecodeMemory(spec, structs.replace(totals, host=1, aux=1), page_size, GPU)
    taken = pools.k_dev.nbytes + pools.index.nbytes + sizing.reserve_bytes(settings, spec)
    counts = TokenCounts.create(num_rows, spec.vocab_size, GPU)
    taken += table_bytes(settings, spec, num_tokens) + sum(table.nbytes for table in vars(counts).values())
    page_bytes = page_size * (
        num_layers * spec.item_bytes
        + entry_bytes(spec)
        + (spec.num_index_layers * spec.index_item_bytes if not index else 0)
    )
    slack = memory.budget(0.5) - taken
    # Less than a page is left; an index pool of a given size may end in a part of a page, which is not made.
    assert 0 <= slack < page_bytes + page_size * spec.num_index_layers * spec.index_item_bytes


@pytest.mark.parametrize("min_split", [0, 2])
def test_tables_are_counted_as_they_are_made(min_split: int) -> None:
    spec = make_spec(num_layers=2, index_group_of_layer=(0, 0), context_length=1000, index_topk=16)
    settings = decode(
        max_running_requests=3,
        device_buffer_size=64,
        page_size=16,
        host_pool_tokens=50,
        micro_batch_min_bs=min_split,
    )
    memory = DecodeMemory(spec, SlotCounts(48, 16, 16, 96, 1, 1), 16, torch.device("cpu"))
    hot = RequestTables(spec, memory, num_rows=3, num_lookup_slots=96, max_capacity=64, page_size=16)
    owners = [hot, hot.state, hot.miss_plan, *(MissCopies(hot, 3).miss_plans if min_split else ())]
    values = [value for owner in owners for value in vars(owner).values()]
    made = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    assert table_bytes(settings, spec, 16) == made
    demand = device_demand(settings, spec)
    assert made == demand.fixed["per-request tables"] + 16 * entry_bytes(spec)
    assert hot.state.hot_to_lookup.nbytes + hot.state.stamps.nbytes == (16 + 16) * entry_bytes(spec)


def test_the_tables_of_entries_grow_with_the_device_pool_and_not_with_rows_or_hot_buffers() -> None:
    """A device slot has a word of either table in each hot group; a row with a larger hot buffer only has the
    ids of more pages."""

    def sizes(**changes: Any) -> tuple[int, int]:
        """Return the bytes of all tables, and of those of entries."""
        fields = {"num_rows": 8, "buffer": 4096, "device": 6400, **changes}
        spec = make_spec(context_length=163_840)
        settings = decode(max_running_requests=fields["num_rows"], device_buffer_size=fields["buffer"])
        state = HotBufferState.create(
            spec.num_hot_groups, fields["num_rows"], spec.context_length, fields["buffer"], 64, 64,
            fields["device"], GPU,
        )  # fmt: skip
        of_entries = state.hot_to_lookup.nbytes + state.stamps.nbytes
        return table_bytes(settings, spec, fields["device"]), of_entries

    num_groups = make_spec().num_hot_groups
    all_bytes, entries_bytes = sizes()
    assert entries_bytes == 8 * num_groups * 6464
    assert sizes(num_rows=128)[1] == sizes(buffer=32_768)[1] == entries_bytes
    assert sizes(buffer=32_768)[0] - all_bytes == 8 * 4 * (32_768 - 4096) // 64
    added = 8 * num_groups * 6400
    assert sizes(device=12_800) == (all_bytes + added, entries_bytes + added)


def test_a_long_context_costs_a_row_page_ids_only() -> None:
    """Tables take at most 16 bytes a page and row, and 8 bytes a group for each token of the host pool."""

    def tables(**changes: int) -> int:
        fields = {"num_rows": 128, "context": 163_840, "host": 1 << 20, **changes}
        spec = make_spec(context_length=fields["context"])
        return table_bytes(
            decode(max_running_requests=fields["num_rows"], host_pool_tokens=fields["host"]), spec, 0
        )

    num_groups = make_spec().num_index_layers
    assert tables() - tables(context=81_920) == 128 * 16 * 81_920 // 64
    assert tables(host=2 << 20) - tables() == 2 * 4 * num_groups * (1 << 20)
    assert (tables(num_rows=256) - tables()) / 128 < 150_000


# --- a decode node's device pool --------------------------------------------------------------------------


def test_more_memory_or_a_larger_fraction_gives_more_tokens() -> None:
    spec, memory = make_spec(kv_format="fp8_e4m3", index_format="fp8_e4m3"), DeviceMemory(140 * GIB, 60 * GIB)
    sizes = [size_device_pool(decode(mem_fraction_static=f), spec, memory) for f in (0.6, 0.85, 0.95)]
    assert sizes == sorted(set(sizes))
    assert all(size % 64 == 0 for size in sizes)
    # 0.85 * 140 - 60 - keys of 262144 tokens 1.97 - tables 0.13 - counts 0.03 - reserve 1.2 GiB,
    # at 48556 bytes a token
    assert sizes[1] == pytest.approx(1.2300e6, rel=0.001)


def test_the_index_pool_covers_host_and_device_tokens() -> None:
    spec, memory = make_spec(), DeviceMemory(140 * GIB, 20 * GIB)
    settings = decode(host_pool_tokens=1000)
    totals = make_limits(settings, spec, size_device_pool(settings, spec, memory)).totals
    assert totals.index == 1024 + totals.device
    given_size = decode(host_pool_tokens=1000, index_pool_tokens=6400)
    assert make_limits(given_size, spec, 640).totals.index == 6400


def test_there_are_lookup_slots_for_every_host_slot_and_for_shared_ones() -> None:
    spec = make_spec()
    assert make_limits(decode(host_pool_tokens=1000), spec, 640).totals.lookup == 1984


@pytest.mark.parametrize("idle_keys", ["auto", "host", "device"])
@pytest.mark.parametrize(("index", "keeps_by_itself"), [(0, False), (500, True), (1000, False)])
def test_idle_keys_take_main_memory_where_the_index_pool_is_short(
    idle_keys: str, index: int, keeps_by_itself: bool
) -> None:
    """Only then running requests alone have lookup slots."""
    spec = make_spec()
    settings = decode(host_pool_tokens=1000, index_pool_tokens=index, idle_keys=idle_keys, page_size=16)
    keeps = {"auto": keeps_by_itself, "host": True, "device": False}[idle_keys]
    num_bytes = 992 * (spec.num_index_groups * spec.index_item_bytes + spec.row_check_bytes)
    assert DecodeEngine.other_host_bytes(settings, spec) == (num_bytes if keeps else 0)
    num_reserved = sizing.reserve_bytes(settings, spec) - sizing.reserve_bytes(decode(), spec)
    assert num_reserved == (73 << 19 if keeps else 0), "copies of three streams, and one comparison"
    num_lookups = 2 * min(1000, index or 1640) if keeps else 2000
    assert make_limits(settings, spec, 640).totals.lookup == num_lookups // 16 * 16
    off = settings.model_copy(update={"disable_prefix_cache": True})
    assert DecodeEngine.other_host_bytes(off, spec) == 0


def test_what_does_not_fit_is_named_with_bytes_and_options() -> None:
    memory = DeviceMemory(24 * GIB, 20 * GIB)
    with pytest.raises(StartError) as caught:
        size_device_pool(decode(), make_spec(), memory)
    budget = memory.budget(0.85)
    needed = device_demand(decode(), make_spec()).num_bytes(2112)
    for words in (
        "--device-pool-tokens 0",
        f"{needed} bytes",
        f"{budget} bytes",
        f"{20 * GIB} bytes (20.00 GiB) in use",
        "per-request tables",
        "counts of tokens",
        "2112 tokens",
        "--mem-fraction-static",
        "--max-running-requests",
        "--host-pool-tokens",
    ):
        assert words in str(caught.value)


def test_a_size_that_is_given_is_kept_and_checked() -> None:
    spec, settings = make_spec(), decode(device_pool_tokens=65536)
    needed = device_demand(settings, spec).num_bytes(65536)
    assert size_device_pool(settings, spec, DeviceMemory(needed + GIB, GIB)) == 65536
    with pytest.raises(StartError, match=rf"65536: {needed} bytes .* lower --device-pool-tokens"):
        size_device_pool(settings, spec, DeviceMemory(needed + GIB - 1, GIB))


def test_at_least_one_hot_buffer_has_to_fit() -> None:
    spec, settings = make_spec(), decode()
    demand = device_demand(settings, spec)
    least = DeviceMemory(int(demand.num_bytes(2112) / 0.85) + 2, 0)
    assert size_device_pool(settings, spec, least) == 2112
    with pytest.raises(StartError):
        size_device_pool(settings, spec, DeviceMemory(least.total_bytes - 16, 0))


def test_tables_and_reserve_have_room_for_drafts() -> None:
    spec = make_spec(num_layers=3, index_group_of_layer=(0, 1, 2), context_length=4096)
    plain, drafting = decode(), decode(speculative_num_steps=3)
    assert (
        table_bytes(drafting, spec, 0) - table_bytes(plain, spec, 0)
        >= plain.max_running_requests * 3 * 16 * 64
    )
    per_row = (sizing.reserve_bytes(plain, spec) - (1 << 30)) // plain.max_running_requests
    drawn = 4 * spec.vocab_size + 2 * spec.hidden_size + 8  # as Forwards keeps them
    num_rows = 4 * drafting.max_running_requests
    assert sizing.reserve_bytes(drafting, spec) == (1 << 30) + num_rows * (per_row + drawn)


@pytest.mark.parametrize(
    ("buffer", "num_drafts", "said"),
    [
        (0, 3, ""),
        (8196, 3, ""),
        (0, 7, ""),
        (16391, 7, "room for 6 of 7 drafts.*--device-buffer-size 16392"),
        (8195, 3, "room for 2 of 3 drafts.*--device-buffer-size 8196"),
        (4096, 3, "room for 0 of 3 drafts"),
        (4096, 1, "room for 0 of 1 drafts.*--device-buffer-size 4098"),
        (4096, 0, ""),
    ],
)
def test_a_hot_buffer_without_room_for_drafts_is_told(buffer: int, num_drafts: int, said: str) -> None:
    spec = make_spec(index_topk=2048, context_length=1 << 17)
    settings = decode(device_buffer_size=buffer, speculative_num_steps=num_drafts)
    assert re.search(said or "^$", sizing.drafts_without_room(settings, spec))
    short = dataclasses.replace(spec, context_length=4000)
    assert sizing.drafts_without_room(settings, short) == ""


@pytest.mark.parametrize(
    ("given", "num_drafts", "top_k", "expected"),
    [
        (0, 0, 2048, 4096),
        (0, 1, 2048, 4098),
        (0, 3, 2048, 8196),
        (0, 7, 2048, 16392),
        (0, 3, 64, 4096),
        (0, 0, 5000, 5001),
        (77, 3, 16, 77),
    ],
)
def test_without_a_number_a_hot_buffer_has_room_for_all_drafts(
    given: int, num_drafts: int, top_k: int, expected: int
) -> None:
    settings = decode(device_buffer_size=given, speculative_num_steps=num_drafts)
    spec = make_spec(index_topk=top_k, context_length=1 << 17)
    assert make_limits(settings, spec, 1 << 16).device_buffer_size == expected


def test_the_smallest_hot_buffer_has_room_for_the_new_positions() -> None:
    settings = decode(device_buffer_size=2050, speculative_num_steps=2, host_pool_tokens=4096)
    with pytest.raises(StartError, match="2 drafts; give at least 2051"):
        make_limits(settings, make_spec(index_topk=2048), 4096)


def test_without_a_gpu_the_size_is_the_settings() -> None:
    cpu = decode(device="cpu", device_pool_tokens=640)
    assert size_device_pool(cpu, make_spec(), None) == 640


def test_main_memory_is_known_before_the_gpu_is() -> None:
    spec, settings = make_spec(num_layers=1, index_group_of_layer=(0,)), decode(host_pool_tokens=100)
    unknown = make_limits(settings, spec, 0).totals
    known = make_limits(settings, spec, 6400).totals
    sizes = {num_host_bytes(spec, totals, 64, torch.device("cuda")) for totals in (unknown, known)}
    assert len(sizes) == 1
    assert sizes.pop() > 100 * spec.item_bytes


# --- a prefill node's KV pool -----------------------------------------------------------------------------


@given(st.integers(4 * GIB, 300 * GIB), st.floats(0, 0.2), st.sampled_from([1, 64, 256]))
def test_the_kv_pool_fills_its_share(total: int, used: float, page_size: int) -> None:
    spec, memory = (
        make_spec(num_layers=4, index_group_of_layer=(0, 1, 2, 3)),
        DeviceMemory(total, int(used * total)),
    )
    settings = prefill(page_size=page_size, chunked_prefill_size=512)
    try:
        num_tokens = size_kv_pool(settings, spec, memory)
    except StartError:
        num_tokens = 0
    token_bytes = 4 * (spec.item_bytes + spec.index_item_bytes)
    slack = memory.budget(0.85) - prefill_sizing.reserve_bytes(settings, spec) - num_tokens * token_bytes
    assert num_tokens % page_size == 0
    assert slack < page_size * token_bytes
    assert slack >= 0 or num_tokens == 0


def test_a_prefill_node_that_does_not_fit_says_so() -> None:
    with pytest.raises(StartError, match=r"--kv-pool-tokens 0: .*--chunked-prefill-size"):
        size_kv_pool(prefill(), make_spec(), DeviceMemory(24 * GIB, 23 * GIB))
    with pytest.raises(StartError, match=r"lower --kv-pool-tokens"):
        size_kv_pool(prefill(kv_pool_tokens=1 << 30), make_spec(), DeviceMemory(24 * GIB, GIB))


# --- formats of a checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({}, ("float32", "float32")),
        ({"dtype": "bfloat16"}, ("bfloat16", "bfloat16")),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("fp8_e4m3", "fp8_e4m3")),
        ({"kv_cache_dtype": "fp8_e4m3", "indexer_cache_dtype": "bfloat16"}, ("fp8_e4m3", "bfloat16")),
        ({"indexer_cache_dtype": "fp8_e4m3"}, ("float32", "fp8_e4m3")),
    ],
)
def test_indexer_keys_are_stored_like_items_unless_told(
    tiny_checkpoint: Callable[[str], Path], options: dict[str, str], formats: tuple[str, str]
) -> None:
    spec = load_spec(tiny_checkpoint("v32"), **options)  # type: ignore[arg-type]
    assert (spec.kv_format, spec.index_format) == formats


@pytest.mark.parametrize("name", ["kv_cache_dtype", "indexer_cache_dtype"])
def test_an_unknown_format_is_named_with_those_there_are(
    tiny_checkpoint: Callable[[str], Path], name: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is 'int4'; supported are auto, .*fp8_e4m3"):
        load_spec(tiny_checkpoint("v32"), **{name: "int4"})  # type: ignore[arg-type]


# --- devices ---------------------------------------------------------------------------------------------


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(("cpu", "cuda", "cuda:0", "cuda:1"))
    with pytest.raises(StartError, match="device cuda:2: this process sees 2 CUDA devices; check nvidia"):
        check_devices(("cuda:0", "cuda:2"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(StartError, match="device cuda: this process sees 0 CUDA devices"):
        check_devices(("cuda",))


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    check_devices(("cpu",))
    with pytest.raises(StartError, match=r"device cuda:1: torch .* is built without CUDA; .* --device cpu"):
        check_devices(("cuda:1",))


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cpu:1", "cuda:1 "])
def test_a_device_is_cpu_or_cuda(name: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        decode(device=name)
