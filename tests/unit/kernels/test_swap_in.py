"""Kernel wrappers: exact results on small cases, precise errors, poisoned memory that must not be read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.checks import KernelArgumentError
from kernels.hot_state import HITS, MISSES, HotBufferError, HotBufferState, StepRequests
from kernels.indexer import gather_pages, index_topk
from kernels.miss_plan import MissPlan
from kernels.swap_in import (
    KernelUnavailableError,
    backup_newest,
    newest_slots,
    replay_misses,
    start_dense_row,
    swap_in,
)
from tests.unit.kernels.one_buffer import (
    HOST_PAGES,
    HOST_SLOTS,
    HOT_SLOTS,
    LOOKUP_PAGES,
    NUM_LAYERS,
    NUM_LOOKUP_SLOTS,
    PAGE_SIZE,
    ROW,
    Buffer,
)
from tests.unit.kernels.table_rules import check_consistency


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.I6
def test_short_request_is_identity_and_never_misses() -> None:
    buffer = Buffer()
    assert buffer.start(3, []) == 3
    assert buffer.swap_in(4, [3, 0, 2, -1]) == [HOT_SLOTS[3], HOT_SLOTS[0], HOT_SLOTS[2], -1]
    assert buffer.counters() == [3, 0, 0]
    for position in range(3):
        for layer in range(NUM_LAYERS):
            assert torch.equal(
                buffer.k_dev[layer, HOT_SLOTS[position]], buffer.k_host[layer, HOST_SLOTS[position]]
            )


def test_short_request_without_preload_misses_to_its_own_entries() -> None:
    buffer = Buffer()
    assert buffer.swap_in(4, [2, 0, -1, -1]) == [HOT_SLOTS[2], HOT_SLOTS[0], -1, -1]
    assert buffer.swap_in(5, [2, 0, -1, -1]) == [HOT_SLOTS[2], HOT_SLOTS[0], -1, -1]
    assert buffer.counters() == [2, 2, 1]
    assert torch.equal(buffer.k_dev[0, HOT_SLOTS[2]], buffer.k_host[0, HOST_SLOTS[2]])


@pytest.mark.I3
def test_newest_takes_the_last_entry_and_is_never_copied_from_host() -> None:
    buffer = Buffer()
    buffer.start(10, [7, 3, 7, -1, 1, 9])
    assert buffer.hot_positions()[:4] == [7, 3, 1, -1]
    buffer.k_dev[:, HOT_SLOTS[3]] = 77
    assert buffer.swap_in(11, [10, 7]) == [HOT_SLOTS[3], HOT_SLOTS[0]]
    assert (buffer.k_dev[:, HOT_SLOTS[3]] == 77).all()
    assert buffer.counters() == [2, 0, 0]
    # One step later the next token takes that entry, and the former newest comes back from the host.
    assert buffer.swap_in(12, [10, 11]) == [HOT_SLOTS[1], HOT_SLOTS[3]]
    assert torch.equal(buffer.k_dev[0, HOT_SLOTS[1]], buffer.k_host[0, HOST_SLOTS[10]])
    assert buffer.counters() == [3, 1, 2]


@pytest.mark.I3
def test_least_recently_used_goes_first_and_used_entries_stay() -> None:
    buffer = Buffer()
    buffer.start(10, [0, 1, 2])
    buffer.swap_in(11, [1])
    buffer.swap_in(12, [0])
    # Oldest stamp: entry 2, then entry 1; entry 0 is used in this very step.
    assert buffer.swap_in(13, [5, 0, 6]) == [HOT_SLOTS[2], HOT_SLOTS[0], HOT_SLOTS[1]]
    assert buffer.hot_positions()[:4] == [0, 6, 5, 12]


def test_equal_stamps_go_in_the_order_of_their_hot_index() -> None:
    buffer = Buffer()
    buffer.start(10, [0, 1, 2])
    assert buffer.swap_in(11, [2, 1]) == [HOT_SLOTS[2], HOT_SLOTS[1]]
    assert buffer.swap_in(12, [5]) == [HOT_SLOTS[0]]
    # Entries 1 and 2 were last used in the same step, whatever came first in the selection.
    assert buffer.swap_in(13, [6]) == [HOT_SLOTS[1]]
    assert buffer.swap_in(14, [7, 6]) == [HOT_SLOTS[2], HOT_SLOTS[1]]
    # Now entry 0 is the oldest; a free entry would be older still.
    assert buffer.swap_in(15, [8]) == [HOT_SLOTS[0]]
    buffer = Buffer()
    buffer.start(10, [0])
    assert buffer.swap_in(11, [5, 6, 7]) == [HOT_SLOTS[1], HOT_SLOTS[2], HOT_SLOTS[0]]


def test_duplicates_are_one_miss_and_one_copy() -> None:
    buffer = Buffer()
    assert buffer.swap_in(11, [4, 4, -1, 4]) == [HOT_SLOTS[0], HOT_SLOTS[0], -1, HOT_SLOTS[0]]
    assert buffer.counters()[MISSES] == 1
    assert int(buffer.plan.num_misses) == 1


def test_overflow_is_flagged_and_leaves_a_consistent_state() -> None:
    buffer = Buffer()
    assert buffer.swap_in(11, [1, 2, 3, 4]) == [HOT_SLOTS[0], HOT_SLOTS[1], HOT_SLOTS[2], -1]
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.TOO_MANY_MISSES
    assert buffer.swap_in(12, [1, 2, 3, -1]) == [*HOT_SLOTS[:3], -1]
    assert buffer.counters()[HITS] == 3


def test_bad_positions_and_missing_host_slots_are_flagged() -> None:
    buffer = Buffer()
    assert buffer.swap_in(5, [5, -3, 0, -1]) == [-1, -1, HOT_SLOTS[0], -1]
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.BAD_POSITION
    buffer.state.set_host_pages(ROW, 1, torch.tensor([-1]), torch.tensor([-1]))
    assert buffer.swap_in(9, [5, 1, -1, -1]) == [-1, HOT_SLOTS[1], -1, -1]
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.BAD_POSITION | HotBufferError.NO_HOST_SLOT
    assert buffer.counters() == [0, 2, 1]


@pytest.mark.I4
def test_without_a_host_slot_for_its_newest_token_a_row_takes_no_step() -> None:
    """It could not be backed up. With the page that it lacked it goes on as if nothing had been."""
    buffer = Buffer()
    buffer.start(8, [7, 3, 1])
    buffer.state.set_host_pages(ROW, 2, *[torch.full((3,), -1)] * 2)
    tables = ("lookup_to_hot", "hot_to_lookup", "stamps", "step", "counters")
    before = {name: getattr(buffer.state, name).clone() for name in tables}
    host, requests = buffer.k_host.clone(), buffer.requests(9)
    assert newest_slots(requests).tolist() == [-1]
    assert buffer.swap_in(9, [8, 7, 3, 99]) == [-1] * 4
    backup_newest(requests, **buffer.pools)
    assert int(buffer.state.error_flags[ROW]) == HotBufferError.NO_HOST_SLOT
    assert all(torch.equal(getattr(buffer.state, name), table) for name, table in before.items())
    assert torch.equal(buffer.k_host, host)
    buffer.state.set_host_pages(ROW, 2, torch.tensor(HOST_PAGES[2:]), torch.tensor(LOOKUP_PAGES[2:]))
    assert newest_slots(requests).tolist() == [HOT_SLOTS[3]]
    assert buffer.swap_in(9, [8, 7, 3, -1]) == [HOT_SLOTS[3], HOT_SLOTS[0], HOT_SLOTS[1], -1]


def test_a_started_row_has_all_its_tables() -> None:
    buffer = Buffer()
    assert buffer.start(10, [7, 3, 7, -1, 1, 9]) == 3
    assert buffer.state.host_pages[ROW].tolist() == HOST_PAGES
    assert buffer.state.lookup_pages[ROW].tolist() == LOOKUP_PAGES
    assert buffer.state.index_pages[ROW].tolist() == [4, 1, 0, 0, 0]
    assert buffer.state.capacity.tolist() == [0, 4, 0]
    buffer.state.set_index_pages(ROW, 2, torch.tensor([8]))
    start_dense_row(buffer.state, 0, pages=torch.tensor([5, 3]), index_pages=torch.tensor([6]))
    assert buffer.state.page_table[0].tolist() == [5, 3, -1, -1, -1]
    assert buffer.state.index_pages[:2].tolist() == [[6, 0, 0, 0, 0], [4, 1, 8, 0, 0]]
    with pytest.raises(KernelArgumentError, match=r"hints: expected values in \[0, 10\), got 3 to 10"):
        buffer.start(10, [7, 3, 10, -1])
    assert buffer.hot_positions() == [-1] * 6
    with pytest.raises(KernelArgumentError, match=r"num_tokens: expected a value in \[0, 21\), got 21"):
        buffer.start(21, [])


@pytest.mark.I3
def test_a_lookup_page_in_two_rows_is_seen() -> None:
    buffer = Buffer()
    buffer.state.assign_row(2, torch.tensor([20, 21]), torch.tensor(HOST_PAGES[:2]), torch.tensor([9, 8]))
    with pytest.raises(RuntimeError, match="lookup page 8 is in more than one place"):
        check_consistency(buffer.state)


@pytest.mark.I3
def test_shared_layer_replays_the_miss_plan() -> None:
    buffer = Buffer()
    slots = buffer.swap_in(11, [4, 8, -1, -1])
    before = buffer.k_dev[0].clone()
    assert not buffer.k_dev[1].any()
    replay_misses(buffer.plan, 1, **buffer.pools)
    for slot, position in zip(slots, (4, 8), strict=False):
        assert torch.equal(buffer.k_dev[1, slot], buffer.k_host[1, HOST_SLOTS[position]])
    assert torch.equal(buffer.k_dev[0], before)
    assert buffer.k_dev[1].any(dim=1).sum() == 2


@pytest.mark.I4
def test_backup_writes_newest_items_of_hisparse_rows_only() -> None:
    buffer = Buffer()
    buffer.state.set_pages(0, 0, torch.tensor([5, 3]))
    buffer.k_dev.random_(generator=torch.Generator().manual_seed(2))
    before = buffer.k_host.clone()
    seq_lens, rows = torch.tensor([3, 9, 7]), torch.tensor([0, ROW, ROW])
    num_real = torch.tensor([2], dtype=torch.int32)
    requests = StepRequests(buffer.state, seq_lens, rows, num_real)
    assert newest_slots(requests).tolist() == [22, HOT_SLOTS[3], -1]
    backup_newest(requests, **buffer.pools)
    before[:, HOST_SLOTS[8]] = buffer.k_dev[:, HOT_SLOTS[3]]
    assert torch.equal(buffer.k_host, before)


def slot_major(pool: Tensor) -> Tensor:
    """The same items with each slot's layers side by side."""
    return pool.transpose(0, 1).contiguous().transpose(0, 1)


def in_wider_rows(pool: Tensor) -> Tensor:
    """The same items with other bytes between them."""
    base = torch.full((*pool.shape[:2], pool.shape[2] + 5), 0xA5, dtype=torch.uint8)
    base[:, :, 3:-2] = pool
    return base[:, :, 3:-2]


def slot_major_in_wider_rows(pool: Tensor) -> Tensor:
    return in_wider_rows(pool.transpose(0, 1)).transpose(0, 1)


def every_layer_of_two(pool: Tensor) -> Tensor:
    """The same items in every other layer of a larger pool."""
    base = torch.full((2 * pool.shape[0], *pool.shape[1:]), 0xA5, dtype=torch.uint8)
    base[1::2] = pool
    return base[1::2]


LAYOUTS = [slot_major, in_wider_rows, slot_major_in_wider_rows, every_layer_of_two]


@pytest.mark.parametrize("host_layout", LAYOUTS)
@pytest.mark.parametrize("dev_layout", LAYOUTS)
def test_strided_pools_are_as_good_as_contiguous_ones(
    host_layout: Callable[[Tensor], Tensor], dev_layout: Callable[[Tensor], Tensor]
) -> None:
    plain, strided = Buffer(), Buffer()
    strided.k_host, strided.k_dev = host_layout(strided.k_host), dev_layout(strided.k_dev)
    assert not strided.k_host.is_contiguous()
    assert not strided.k_dev.is_contiguous()
    for buffer in (plain, strided):
        buffer.start(10, [7, 3, 1])
        for seq_len, selected in ((11, [4, 10, 7, -1]), (12, [10, 8, 4, 11])):
            buffer.k_dev[:, HOT_SLOTS[3]] = seq_len
            buffer.swap_in(seq_len, selected)
            replay_misses(buffer.plan, 1, **buffer.pools)
            backup_newest(buffer.requests(seq_len), **buffer.pools)
    assert torch.equal(strided.k_dev, plain.k_dev)
    assert torch.equal(strided.k_host, plain.k_host)
    assert (strided.k_host[:, HOST_SLOTS[11]] == 12).all()
    for pool in (strided.k_host, strided.k_dev):
        is_item = torch.zeros(pool.untyped_storage().nbytes(), dtype=torch.bool)
        is_item.as_strided(pool.shape, pool.stride(), pool.storage_offset())[:] = True
        everything = torch.tensor(pool.untyped_storage(), dtype=torch.uint8)
        assert (everything[~is_item] == 0xA5).all(), "bytes between the items changed"


@pytest.mark.I3
def test_dense_rows_go_through_the_page_table() -> None:
    buffer = Buffer()
    buffer.state.set_pages(0, 0, torch.tensor([5, 3]))
    lens, rows, num_real = (torch.tensor(of, dtype=torch.int32) for of in ([7, 11], [0, ROW], [2]))
    slots = swap_in(
        torch.tensor([[6, 0, -1], [3, 2, 10]], dtype=torch.int32),
        StepRequests(buffer.state, lens, rows, num_real),
        group=0,
        layer=0,
        **buffer.pools,
    )
    assert slots[0].tolist() == [3 * 4 + 2, 5 * 4, -1]
    assert slots[1].tolist() == [HOT_SLOTS[1], HOT_SLOTS[0], HOT_SLOTS[3]]
    assert buffer.state.counters[0].tolist() == [0, 0, 0]


def test_padding_and_empty_batches_touch_nothing() -> None:
    buffer = Buffer()
    before = buffer.state.hot_to_lookup.clone()
    slots = swap_in(
        torch.zeros((2, 3), dtype=torch.int32),
        StepRequests(
            buffer.state,
            torch.tensor([4, 4]),
            torch.tensor([ROW, ROW]),
            torch.tensor([0], dtype=torch.int32),
        ),
        group=0,
        layer=0,
        **buffer.pools,
    )
    assert (slots == -1).all()
    assert torch.equal(buffer.state.hot_to_lookup, before)


@pytest.mark.I2
def test_reset_row_forgets_everything() -> None:
    buffer = Buffer()
    empty = HotBufferState.create(1, 3, 20, 6, PAGE_SIZE, NUM_LOOKUP_SLOTS)
    buffer.start(10, [7, 3, 1])
    buffer.swap_in(11, [1, 2, 3, 4])
    buffer.state.reset_row(ROW)
    for name in ("lookup_to_hot", "hot_to_lookup", "stamps", "step", "hot_slots", "capacity", "page_table",
                 "host_pages", "lookup_pages", "index_pages", "counters", "error_flags"):  # fmt: skip
        assert torch.equal(getattr(buffer.state, name), getattr(empty, name)), name


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("lookup_to_hot", "which maps to hot_index -1"),
        ("hot_to_lookup", "has stamp|used entries"),
        ("stamps", "has stamp -1"),
    ],
)
def test_check_consistency_sees_a_broken_table(table: str, message: str) -> None:
    buffer = Buffer()
    buffer.swap_in(11, [4, 5, -1, -1])
    tensor = getattr(buffer.state, table)
    values = tensor[0] if table == "lookup_to_hot" else tensor[0, ROW]
    values[int((values != -1).nonzero()[0])] = -1
    with pytest.raises(RuntimeError, match=message):
        check_consistency(buffer.state)


def test_errors_name_argument_expectation_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer()
    one = buffer.requests(5)
    lens, rows, num_real = one.seq_lens, one.req_rows, one.num_real_reqs
    selected = torch.zeros((1, 2), dtype=torch.int32)
    good = {"group": 0, "layer": 0, **buffer.pools}

    def failure(*arguments: Tensor, **changed: object) -> str:
        given, *requests = arguments or (selected, lens, rows, num_real)
        with pytest.raises(KernelArgumentError) as caught:
            swap_in(given, StepRequests(buffer.state, *requests), **{**good, **changed})  # type: ignore[arg-type]
        return str(caught.value)

    assert failure(selected.long(), lens, rows, num_real) == (
        "selected: expected dtype torch.int32, got torch.int64"
    )
    assert failure(selected, lens[:0], rows, num_real) == "req_rows: expected shape [0], got [1]"
    assert failure(selected, lens, rows.float(), num_real).startswith("req_rows: expected dtype")
    assert failure(selected, lens, rows + 2, num_real) == "req_rows: expected values in [0, 3), got 3 to 3"
    assert (
        failure(selected, lens + 16, rows, num_real) == "seq_lens: expected values in [1, 20], got 21 to 21"
    )
    assert failure(selected, lens, rows, num_real + 1) == "num_real_reqs: expected a value in [0, 1], got 2"
    assert failure(group=1) == "group: expected a value in [0, 1), got 1"
    assert failure(layer=2) == "layer: expected a value in [0, 2), got 2"
    assert failure(k_host=buffer.k_host[:, :, :7]) == "k_host: expected shape [2, *, 8], got [2, 40, 7]"
    assert failure(k_dev=buffer.k_dev.int()) == "k_dev: expected dtype torch.uint8, got torch.int32"
    assert failure(k_dev=buffer.k_dev[:, :, ::2]) == (
        "k_dev: expected contiguous items (last stride 1), got strides (192, 8, 2)"
    )
    assert failure(k_dev=buffer.k_dev[:, :1].expand(-1, 24, -1)) == (
        "k_dev: expected items that do not overlap (a stride of at least 8), "
        "got shape [2, 24, 8] and strides (192, 0, 1)"
    )
    assert failure(k_host=buffer.k_host[:1].expand(2, -1, -1)).endswith("strides (0, 8, 1)")
    flat = torch.zeros(1000, dtype=torch.uint8)
    assert failure(k_host=flat.as_strided((2, 40, 8), (312, 8, 1))) == (
        "k_host: expected items that do not overlap (a stride of at least 320), "
        "got shape [2, 40, 8] and strides (312, 8, 1)"
    )
    assert "at least 16)" in failure(k_host=flat.as_strided((2, 40, 8), (8, 15, 1)))
    assert failure(out=selected[:, :1]) == "out: expected shape [1, 2], got [1, 1]"
    assert failure(miss_plan=MissPlan.create(1, 1)) == "miss_plan: expected room for 2 misses, got 1"
    two = torch.zeros((2, 1), dtype=torch.int32)
    assert failure(two, torch.tensor([5, 5]), torch.tensor([1, 1]), num_real + 1) == (
        "req_rows: expected distinct rows, got [1, 1]"
    )
    with pytest.raises(KernelArgumentError, match="capacity: expected a value in"):
        buffer.state.assign_row(0, torch.arange(7), torch.arange(3), torch.arange(3))
    with pytest.raises(
        KernelArgumentError, match=r"lookup_pages highest: expected a value in \[0, 12\), got 12"
    ):
        buffer.state.assign_row(0, torch.arange(3), torch.tensor([0, 9]), torch.tensor([0, 12]))
    monkeypatch.setattr("tests.unit.kernels.one_buffer.HOST_PAGES", [7, 3, 6, 2, 10])
    with pytest.raises(
        KernelArgumentError, match=r"host_pages highest: expected a value in \[0, 10\), got 10"
    ):
        buffer.start(3, [])
    with pytest.raises(KernelArgumentError, match="lookup_pages: expected shape"):
        buffer.state.assign_row(0, torch.arange(3), torch.arange(2), torch.arange(3))
    with pytest.raises(
        KernelArgumentError, match=r"number of host_pages: expected a value in \[0, 6\), got 6"
    ):
        buffer.state.assign_row(0, torch.arange(3), torch.arange(6), torch.arange(6))
    with pytest.raises(KernelArgumentError, match="num_lookup_slots: expected whole pages of 4, got 42"):
        HotBufferState.create(1, 3, 20, 6, 4, 42)


def test_other_devices_are_refused_by_name() -> None:
    state = HotBufferState.create(1, 1, 4, 2, 4, 4, device="meta")
    ones = torch.ones(1, dtype=torch.int32, device="meta")
    with pytest.raises(KernelUnavailableError, match=r"newest_slots: no kernel for device 'meta'.*'cpu'"):
        newest_slots(StepRequests(state, ones, ones, ones))


@pytest.mark.I5
@pytest.mark.I6
@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 400])
def test_index_topk_matches_a_plain_loop(seq_len: int, generator: torch.Generator) -> None:
    num_heads, head_dim, top_k = 4, 16, 16
    num_tokens = min(seq_len, 50)
    q = torch.randn((num_tokens, num_heads, head_dim), generator=generator)
    weights = torch.randn((num_tokens, num_heads), generator=generator)
    keys = torch.randn((seq_len, head_dim), generator=generator)
    positions = torch.arange(seq_len - num_tokens, seq_len)
    selected = index_topk(q, weights, keys, positions, top_k)
    assert selected.shape == (num_tokens, top_k)
    assert selected.dtype == torch.int32
    for token in range(num_tokens):
        seen = keys[: int(positions[token]) + 1].double()
        scores = weights[token].double() @ torch.relu(q[token].double() @ seen.T * head_dim**-0.5)
        best = scores.topk(min(top_k, len(seen))).values
        row = selected[token].tolist()
        chosen = row[: len(best)]
        assert len(set(chosen)) == len(best)
        # By score, because rectified scores tie at 0 and any of those may be taken.
        torch.testing.assert_close(scores[chosen].sort(descending=True).values, best, rtol=1e-5, atol=1e-6)
        assert row[len(best) :] == [-1] * (top_k - len(best))


@pytest.mark.I6
def test_gather_pages_reads_a_partial_last_page() -> None:
    pool = torch.arange(24).view(12, 2)
    keys = gather_pages(pool, torch.tensor([2, 0, 1]), 4, 6)
    assert keys[:, 0].tolist() == [16, 18, 20, 22, 0, 2]
    with pytest.raises(KernelArgumentError, match="page_ids length: expected at least 2, got 1"):
        gather_pages(pool, torch.tensor([2]), 4, 6)


def test_transformers_does_not_take_our_kernels_for_its_optional_package() -> None:
    program = (
        "import kernels, transformers.integrations.hub_kernels\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(kernels.__file__, is_kernels_available())\n"
    )
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == [str(root / "kernels" / "__init__.py"), "False"]
