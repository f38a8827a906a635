"""Tables at admission and retraction: one call a row, and host slots in scattered pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.extents import extents_to_pages
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.decode_node.memory import DecodeMemory, pages_tensor, slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.row_fills import RowFills
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.kernels import hot_entries, page_fill
from hisparse_pd.protocol.messages import Room
from tests.books import make_request
from tests.unit.kernels.table_rules import check_consistency
from tests.unit.model.model_specs import make_spec

PAGE_SIZE, NUM_GROUPS = 16, 3


class Node:
    """Pools in which every other host page is taken, and the tables over them."""

    def __init__(self, max_capacity: int = 32) -> None:
        self.spec = make_spec(
            num_layers=4, index_group_of_layer=(0, 1, 1, 2), context_length=500, index_topk=8, kv_lora_rank=4,
            qk_rope_head_dim=2,
        )  # fmt: skip
        self.pools = Pools(
            SlotCounts(host=640, device=256, index=640, lookup=1280, aux=1, req_row=2), PAGE_SIZE
        )
        holdings = [
            self.pools.reserve(Room(100 + n), SlotCounts(host=PAGE_SIZE, lookup=PAGE_SIZE)) for n in range(40)
        ]
        self.pools.give_up(holdings[1], [PoolKind.LOOKUP])
        for holding in holdings[::2]:
            self.pools.release(holding)
        self.memory = DecodeMemory(self.spec, self.pools.totals, PAGE_SIZE, torch.device("cpu"))
        self.memory.k_host.random_(generator=torch.Generator().manual_seed(1))
        self.hot = RequestTables(
            self.spec,
            self.memory,
            num_rows=2,
            num_lookup_slots=1280,
            max_capacity=max_capacity,
            page_size=PAGE_SIZE,
        )

    def request(self, hot_positions: list[Any] | None) -> Request:
        request = make_request(1, 100, 9)
        request.mode, request.hot_capacity = Mode.HISPARSE, 32
        need = SlotCounts(host=108, device=32, index=108, lookup=108, aux=0, req_row=1)
        request.holding = self.pools.reserve(request.room, need)
        request.output_token_ids.append(5)
        request.hot_positions = hot_positions
        return request


def hot_positions(node: Node, request: Request, group: int) -> list[int]:
    """Return the position at each hot_index, after checking its items; -1 where it is empty."""
    state, row, positions = node.hot.state, request.req_row, []
    pages = state.lookup_pages[row].tolist()
    device_slots = state.entry_slots(row)
    for entry, lookup_slot in enumerate(state.hot_to_lookup[group, device_slots].tolist()):
        if lookup_slot < 0:
            positions.append(-1)
            continue
        page, offset = pages.index(lookup_slot // PAGE_SIZE), lookup_slot % PAGE_SIZE
        positions.append(page * PAGE_SIZE + offset)
        device_slot = int(device_slots[entry])
        host_slot = int(state.host_pages[row, page]) * PAGE_SIZE + offset
        for layer in node.spec.layers_of_group[group]:
            item = node.memory.k_dev[layer, device_slot]
            assert torch.equal(item, node.memory.k_host[layer, host_slot])
    return positions


@pytest.mark.I3
def test_what_was_used_last_stays_hot_when_a_hot_buffer_shrinks_and_grows() -> None:
    node = Node()
    hints = [np.array([99, 3, 50 + group, 17], np.int32) for group in range(NUM_GROUPS)]
    request = node.request(list(hints))
    node.hot.start(request)
    state, row = node.hot.state, request.req_row
    for group, hint in enumerate(hints):
        assert hot_positions(node, request, group) == [*hint.tolist(), *[-1] * 28]
    device_slots = slots_tensor(request.owned[PoolKind.DEVICE])
    state.stamps[:, device_slots[[0, 2]]] = 6
    state.stamps[:, device_slots[3]] = 7
    state.step[:, row] = 7
    request.row_counters = SwapCounts(hits=2, misses=1)
    state.counters[row] = torch.tensor([2, 1, 0])
    node.hot.resize(request, num_before=32, capacity=4)
    check_consistency(state)
    for group in range(NUM_GROUPS):
        assert hot_positions(node, request, group)[:4] == [99, 17, 50 + group, -1]
    assert state.hot_pages[row].tolist() == [int(device_slots[0]) // PAGE_SIZE, -1]
    node.memory.k_dev[:, device_slots[4:]] = 0xFF
    node.hot.resize(request, num_before=4, capacity=32)
    check_consistency(state)
    for group in range(NUM_GROUPS):
        assert hot_positions(node, request, group) == [99, 17, 50 + group, *[-1] * 29]
    assert (int(state.capacity[row]), int(state.step[0, row])) == (32, 7)
    assert (request.row_counters, request.earlier_counters) == (SwapCounts(), SwapCounts(2, 1))
    assert state.counters[row].tolist() == [0, 0, 0], "it counts what its present size misses"


@pytest.mark.I3
def test_a_row_that_is_being_filled_is_filled_before_its_hot_buffer_shrinks() -> None:
    node = Node()
    node.hot.fills.slice_bytes = 1
    request = node.request(None)
    node.hot.start(request)
    assert not node.hot.is_ready(request)
    node.hot.resize(request, num_before=32, capacity=16)
    assert node.hot.is_ready(request)
    check_consistency(node.hot.state)
    for group in range(NUM_GROUPS):
        assert hot_positions(node, request, group) == [*range(99, 84, -1), *[-1] * 17], "the most recent ones"


class CopiesUnderWay:
    """Stands in for the event behind copies that were launched to fill a row or its pages."""

    is_waited_for = False

    def synchronize(self) -> None:
        self.is_waited_for = True


@pytest.mark.I1
@pytest.mark.parametrize(
    "take_away",
    [
        pytest.param(lambda tables, request: tables.release(request), id="release"),
        pytest.param(lambda tables, request: tables.stop_pages(request), id="stop_pages"),
        pytest.param(lambda tables, request: tables.retract(request), id="retract"),
        pytest.param(lambda tables, request: tables.resize(request, 32, 16), id="resize"),
    ],
)
def test_copies_to_a_row_are_over_before_others_get_its_slots(
    take_away: Callable[[RequestTables, Request], None],
) -> None:
    """They read host slots and write device slots, whoever has these by then."""
    node = Node()
    request = node.request(None)
    node.hot.start(request)
    copies: Any = CopiesUnderWay()
    node.hot.fills.ends[request.req_row] = copies
    take_away(node.hot, request)
    assert copies.is_waited_for
    assert node.hot.is_ready(request)


def grow_hot_buffer(node: Node, request: Request) -> None:
    node.pools.grow(request.owned, PoolKind.DEVICE, 32)
    node.hot.resize(request, num_before=32, capacity=64)


def enter_pages(node: Node, request: Request) -> None:
    give_pages(node, request, num_filled_tokens=0)
    node.hot.enter_pages(request)


def give_pages(node: Node, request: Request, num_filled_tokens: int) -> None:
    node.pools.grow(request.owned, PoolKind.DEVICE, 112)
    request.num_page_slots, request.num_filled_tokens = 112, num_filled_tokens


@pytest.mark.I1
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("move", "copying"),
    [(grow_hot_buffer, (hot_entries, "_move_items")), (enter_pages, (page_fill, "replay_misses"))],
)
def test_copies_behind_a_step_of_others_are_over_before_others_get_the_slots(
    monkeypatch: pytest.MonkeyPatch,
    move: Callable[[Node, Request], None],
    copying: tuple[ModuleType, str],
    fails: bool,
) -> None:
    """Also those that were launched before an error."""
    node, copies = Node(max_capacity=64), cast(Any, CopiesUnderWay())
    request = node.request(None)
    request.num_prompt_tokens = 60  # so that its hot buffer has room for all, each at its own hot_index
    node.hot.start(request)
    fills, copy, num_copies = node.hot.fills, getattr(*copying), 0

    def copy_once(*args: Any, **options: Any) -> None:
        nonlocal num_copies
        num_copies += 1
        copy(*args, **options)
        if fails:
            raise torch.OutOfMemoryError("32 MiB wanted")

    monkeypatch.setattr(*copying, copy_once)
    monkeypatch.setattr(fills, "note_end", lambda row: fills.ends.update({row: copies}))
    with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
        move(node, request)
    assert num_copies > 0
    assert fills.ends == {request.req_row: copies}
    node.hot.release(request)
    assert copies.is_waited_for


@pytest.mark.I1
def test_a_fill_begins_behind_steps_also_if_earlier_copies_of_its_row_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What steps have launched for the last owner of its pages comes first."""
    node = Node()
    request = node.request(None)
    node.hot.start(request)
    give_pages(node, request, request.num_kv_tokens)
    node.hot.fills.ends[request.req_row] = cast(Any, CopiesUnderWay())
    node.hot.fills.slice_bytes = 1
    node.hot.start_pages(request)
    are_first = []

    def beside_steps(row: int, *, is_first: bool) -> AbstractContextManager[None]:
        are_first.append(is_first)
        return nullcontext()

    monkeypatch.setattr(node.hot.fills, "beside_steps", beside_steps)
    while request.req_row in node.hot.fills.pages:
        node.hot.go_on()
    assert are_first == [True, *[False] * (node.spec.num_layers - 1)]


@pytest.mark.I7
def test_a_wait_for_copies_is_bounded_where_other_ranks_may_keep_a_step_from_its_end() -> None:
    """The copies may be behind that step."""
    waits: list[str] = []

    class Ranks:
        @contextmanager
        def bounded_wait(self) -> Iterator[None]:
            waits.append("bound")
            yield
            waits.append("unbound")

    class Copies:
        def synchronize(self) -> None:
            waits.append("wait")

    fills = RowFills(torch.device("cpu"), cast(Any, Ranks()))
    fills.ends[0] = cast(Any, Copies())
    fills.wait(0)
    assert waits == ["bound", "wait", "unbound"]


@pytest.mark.I3
def test_slices_fill_a_row_as_one_call_does() -> None:
    """Each slice fills at least one layer's items, and the row is not ready before the last."""
    nodes = Node(), Node()
    hints = [np.arange(group, group + 20, dtype=np.int32) for group in range(NUM_GROUPS)]
    for node, slice_bytes in zip(nodes, (1, 1 << 20), strict=True):
        node.hot.fills.slice_bytes = slice_bytes
    sliced, whole = (node.request(list(hints)) for node in nodes)
    nodes[0].hot.start(sliced)
    num_turns = 0
    while not nodes[0].hot.is_ready(sliced):
        assert nodes[0].hot.go_on() == {}
        num_turns += 1
    assert num_turns == nodes[0].spec.num_layers - 1
    nodes[1].hot.start(whole)
    assert nodes[1].hot.is_ready(whole)
    one, other = (node.hot.state for node in nodes)
    for name in ("lookup_to_hot", "hot_to_lookup", "stamps", "hot_pages", "capacity", "host_pages"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(nodes[0].memory.k_dev, nodes[1].memory.k_dev)


def test_many_rows_are_filled_in_order_and_the_faster_the_more_there_is_to_do() -> None:
    node = Node()
    node.hot.fills.slice_bytes = 1
    filled: list[int] = []

    class Start:
        num_left_bytes: int | None = 1600

        def __init__(self, row: int) -> None:
            self.row = row

        def launch_slice(self, most_bytes: int | None) -> int:
            assert self.num_left_bytes is not None
            num_bytes = min(self.num_left_bytes, max(100, (most_bytes or 1600) // 100 * 100))
            self.num_left_bytes = self.num_left_bytes - num_bytes or None
            filled.append(self.row)
            return num_bytes

    node.hot.fills.rows = {row: Start(row) for row in (1, 0)}  # type: ignore[misc]
    num_turns = 0
    while node.hot.fills.rows:
        node.hot.go_on()
        num_turns += 1
    assert filled == sorted(filled, reverse=True)
    assert 8 < num_turns < 32, "with 100 in each turn it would be 32"


def test_a_row_that_is_not_filled_to_its_end_is_empty_when_it_is_released() -> None:
    node = Node()
    node.hot.fills.slice_bytes = 1
    request = node.request(None)
    node.hot.start(request)
    assert not node.hot.is_ready(request)
    node.hot.release(request)
    assert node.hot.is_ready(request)
    assert node.hot.go_on() == {}
    assert (node.hot.state.lookup_to_hot == -1).all()
    assert (node.hot.state.host_pages == -1).all()


@pytest.mark.I3
def test_pages_are_filled_behind_rows_by_what_misses_leave_of_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_fill, "CHUNK_TOKENS", 50)
    node = Node()
    request = node.request(None)
    node.hot.start(request)
    node.pools.grow(request.owned, PoolKind.DEVICE, 112)
    request.num_page_slots, request.num_filled_tokens = 112, request.num_kv_tokens
    node.hot.start_pages(request)
    fill, row = node.hot.fills.pages[request.req_row], request.req_row
    item_bytes, num_layers = node.spec.item_bytes, node.spec.num_layers
    num_all_bytes = num_layers * 100 * item_bytes
    assert fill.num_left_bytes == num_all_bytes

    class Beginning:
        """Another row, which begins."""

        num_left_bytes: int | None = 1

        def launch_slice(self, most_bytes: int | None) -> int:
            self.num_left_bytes = None
            return 1

    node.hot.fills.rows[1 - row] = Beginning()  # type: ignore[assignment]
    node.hot.fills.slice_bytes = 4 * 50 * item_bytes
    num_left_bytes = num_all_bytes
    for link_share, num_chunks in ((0.0, 0), (1.0, 0), (0.5, 2), (0.0, 4)):
        assert node.hot.go_on(link_share) == {}
        num_left_bytes -= num_chunks * 50 * item_bytes
        assert fill.num_left_bytes == num_left_bytes
        assert not node.hot.is_ready(request)
    node.hot.go_on()
    assert node.hot.is_ready(request)
    request.output_token_ids += [5, 5, 5]  # steps wrote three more to the host
    node.hot.enter_pages(request)
    state = node.hot.state
    assert int(state.capacity[row]) == 0
    assert (state.lookup_to_hot == -1).all()
    host, pages = slots_tensor(request.owned[PoolKind.HOST]), slots_tensor(request.page_extents)
    assert torch.equal(node.memory.k_dev[:, pages[:103]], node.memory.k_host[:, host[:103]])
    assert state.page_table[row, :7].tolist() == pages_tensor(request.page_extents, PAGE_SIZE).tolist()


@pytest.mark.I3
@pytest.mark.parametrize("mode", [Mode.HISPARSE, Mode.DENSE])
@pytest.mark.parametrize(("capacity", "first"), [(32, 80), (5, 96), (112, 0)])
def test_the_items_of_the_last_positions_stay_where_they_are_when_a_request_leaves_its_pages(
    mode: Mode, capacity: int, first: int
) -> None:
    """It has 100 tokens in seven pages, of which the one behind the hot positions may be a free entry's."""
    node = Node(max_capacity=112)
    request = node.request(None)
    request.mode, request.hot_capacity = mode, 0
    node.pools.grow(request.owned, PoolKind.DEVICE, 80)
    host, device = (slots_tensor(request.owned[kind])[:100] for kind in (PoolKind.HOST, PoolKind.DEVICE))
    node.memory.k_dev[:, device] = node.memory.k_host[:, host]
    if mode is Mode.DENSE:
        node.memory.k_host[:, host] = 0
    node.hot.start(request)
    node.hot.retract(request)
    node.pools.release(node.pools.split(request.owned, [PoolKind.DEVICE], first))
    request.mode, request.hot_capacity = Mode.HISPARSE, min(capacity, 112 - first)
    node.hot.grow(request)
    node.hot.enter_hot_buffer(request, first)
    check_consistency(node.hot.state)
    state, row = node.hot.state, request.req_row
    assert (int(state.capacity[row]), int(state.step[0, row])) == (request.hot_capacity, 0)
    assert (state.page_table[row] == -1).all()
    num_hot = 100 - first
    for group in range(NUM_GROUPS):
        positions = hot_positions(node, request, group)
        assert positions == [*range(first, 100), *[-1] * (112 - num_hot)]


def test_pages_that_are_given_up_are_in_no_table() -> None:
    node = Node()
    node.hot.fills.slice_bytes = 1
    request = node.request(None)
    node.hot.start(request)
    node.hot.fills.launch_all(request.req_row)
    node.pools.grow(request.owned, PoolKind.DEVICE, 112)
    request.num_page_slots, request.num_filled_tokens = 112, request.num_kv_tokens
    node.hot.start_pages(request)
    node.hot.go_on()
    state, row = node.hot.state, request.req_row
    assert int(state.page_table[row, 0]) >= 0
    tables = [table.clone() for table in (state.lookup_to_hot, state.hot_pages, state.host_pages)]
    node.hot.stop_pages(request)
    assert (state.page_table[row] == -1).all()
    assert node.hot.is_ready(request)
    for before, table in zip(tables, (state.lookup_to_hot, state.hot_pages, state.host_pages), strict=True):
        assert torch.equal(before, table)


@pytest.mark.parametrize("mode", [Mode.HISPARSE, Mode.DENSE])
def test_a_row_grows_in_its_own_pools(mode: Mode) -> None:
    node = Node()
    request = node.request(None)
    request.mode, kv_pool = mode, PoolKind.HOST if mode is Mode.HISPARSE else PoolKind.DEVICE
    if mode is Mode.DENSE:
        node.pools.grow(request.owned, PoolKind.DEVICE, 80)
    node.hot.start(request)
    state, row = node.hot.state, request.req_row
    table = state.host_pages if mode is Mode.HISPARSE else state.page_table
    assert (table[row] >= 0).sum() == 7
    node.pools.grow(request.owned, kv_pool, 2 * PAGE_SIZE)
    node.pools.grow(request.owned, PoolKind.INDEX, PAGE_SIZE)
    tables = [(table[row], kv_pool, 9), (state.index_pages[row], PoolKind.INDEX, 8)]
    if mode is Mode.HISPARSE:
        node.pools.grow(request.owned, PoolKind.LOOKUP, 2 * PAGE_SIZE)
        tables.append((state.lookup_pages[row], PoolKind.LOOKUP, 9))
    node.hot.grow(request)
    for pages, kind, num_pages in tables:
        assert pages[:num_pages].tolist() == extents_to_pages(request.owned[kind], PAGE_SIZE)
    if mode is Mode.HISPARSE:
        check_consistency(state)
