"""Placements carried out: by calls that only note what they are asked, and by this machine's kernel."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest

from hisparse_pd.core.memory import host as host_memory
from hisparse_pd.core.memory.host import PAGE_BYTES, allocate_host
from hisparse_pd.core.memory.numa import ANYWHERE, Placement, PoolPolicy
from hisparse_pd.core.memory.numa_binding import (
    bind_threads,
    mbind,
    place_memory,
    policy_fault,
    with_allowed_policy,
)
from tests.unit.memory.this_machine import HERE, needs_policies, numa_maps_line

ON_ONE = Placement("a test's", node=1, cpus=(4, 5), policy=PoolPolicy.BIND)
NUM_BYTES = 3 * PAGE_BYTES + 5


class FakeBinder:
    """Notes what it is asked; raises ``error`` if there is one."""

    def __init__(self, error: OSError | None = None) -> None:
        self.asked: list[tuple[int, int, PoolPolicy, int]] = []
        self._error = error

    def __call__(self, addr: int, num_bytes: int, policy: PoolPolicy, node: int) -> None:
        self.asked.append((addr, num_bytes, policy, node))
        if self._error is not None:
            raise self._error


# --- threads ----------------------------------------------------------------------------------------------


@pytest.fixture
def other_thread() -> Iterator[int]:
    """The kernel's number of a thread that waits."""
    ended, begun = threading.Event(), threading.Event()
    numbers: list[int] = []

    def run() -> None:
        numbers.append(threading.get_native_id())
        begun.set()
        ended.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    yield numbers[0]
    ended.set()
    thread.join()


def test_all_threads_are_bound_those_that_libraries_have_started_too(other_thread: int) -> None:
    bound: dict[int, tuple[int, ...]] = {}

    def set_affinity(thread: int, cpus: Collection[int]) -> None:
        bound[thread] = tuple(cpus)
        raise ProcessLookupError  # which does not spare the others

    bind_threads(ON_ONE, set_affinity)
    assert {threading.get_native_id(), other_thread} <= bound.keys()
    assert set(bound.values()) == {(4, 5)}


def test_a_kernel_that_refuses_cpus_does_not_end_the_start(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(thread: int, cpus: Collection[int]) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    bind_threads(ON_ONE, refuse)
    assert "CPUs of node 1 cannot be set" in caplog.text
    assert "--numa off" in caplog.text


def test_threads_are_bound_by_the_kernel_and_new_ones_inherit_it(other_thread: int) -> None:
    before = os.sched_getaffinity(0)
    one = (min(before),)
    try:
        bind_threads(replace(ON_ONE, cpus=one))
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other_thread) == set(one)
        inherited: list[set[int]] = []
        thread = threading.Thread(target=lambda: inherited.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert inherited == [set(one)]
    finally:
        bind_threads(replace(ON_ONE, cpus=tuple(before)))


# --- pools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("policy", [PoolPolicy.BIND, PoolPolicy.PREFERRED])
def test_a_pool_is_asked_for_from_its_node_before_it_is_touched(
    monkeypatch: pytest.MonkeyPatch, shared: bool, policy: PoolPolicy
) -> None:
    happened: list[tuple[object, ...]] = []

    def place(addr: int, num_bytes: int, placement: Placement, name: str) -> None:
        place_memory(addr, num_bytes, placement, name, lambda *asked: happened.append(asked))

    monkeypatch.setattr(host_memory, "place_memory", place)
    monkeypatch.setattr(host_memory, "touch_pages", lambda *part: happened.append(part))
    on_one = replace(ON_ONE, policy=policy)
    pool = allocate_host(NUM_BYTES, pinned=False, shared=shared, placement=on_one)
    addr = pool.tensor.data_ptr()
    assert happened == [(addr, NUM_BYTES, policy, 1), (addr, NUM_BYTES)]
    pool.close()


@pytest.mark.parametrize("placement", [ANYWHERE, replace(ON_ONE, policy=PoolPolicy.FIRST_TOUCH)])
def test_nothing_is_asked_of_the_kernel_where_nothing_is_placed(placement: Placement) -> None:
    binder = FakeBinder(OSError("asked"))
    place_memory(1 << 30, 1, placement, "a pool", binder)
    assert with_allowed_policy(placement, binder) is placement
    assert not binder.asked
    if placement is ANYWHERE:
        bind_threads(placement, lambda *_: pytest.fail("threads are bound"))


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (PermissionError(errno.EPERM, "Operation not permitted"), "--cap-add SYS_NICE"),
        (OSError(errno.ENOSYS, "Function not implemented"), "--cap-add SYS_NICE"),
        (OSError("libnuma.so.1: cannot open shared object file"), "libnuma1"),
        (OSError(errno.EINVAL, "Invalid argument"), "seccomp"),
    ],
)
def test_a_kernel_that_refuses_leaves_pools_to_first_touch_and_says_what_to_do(
    error: OSError, remedy: str
) -> None:
    placement = with_allowed_policy(ON_ONE, FakeBinder(error))
    assert (placement.node, placement.cpus, placement.policy) == (1, (4, 5), PoolPolicy.FIRST_TOUCH)
    assert remedy in placement.remedy
    assert "pools by first touch" in str(placement)


def test_a_pool_that_is_refused_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    place_memory(1 << 30, 1, ON_ONE, "pool kv_host", FakeBinder(OSError(errno.EINVAL, "Invalid argument")))
    assert "pool kv_host is where it is touched first" in caplog.text


# --- this machine's kernel --------------------------------------------------------------------------------


@needs_policies
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("policy", [PoolPolicy.BIND, PoolPolicy.PREFERRED])
def test_the_kernel_has_the_pages_of_a_pool_on_its_node(shared: bool, policy: PoolPolicy) -> None:
    placement = Placement("a test's", HERE, (0,), policy=policy)
    pool = allocate_host(NUM_BYTES, pinned=False, shared=shared, placement=placement)
    line = numa_maps_line(pool.tensor.data_ptr())
    assert re.search(rf" (bind|prefer( \(many\))?):{HERE} ", line), line
    assert ("bind" in line) is (policy is PoolPolicy.BIND)
    assert f"N{HERE}={-(-NUM_BYTES // PAGE_BYTES)}" in line
    assert not pool.tensor.any()
    pool.close()


@needs_policies
def test_the_kernel_refuses_a_node_that_is_not_there() -> None:
    pool = allocate_host(PAGE_BYTES, pinned=False, touch=False)
    with pytest.raises(OSError, match="mbind to NUMA node 777"):
        mbind(pool.tensor.data_ptr(), PAGE_BYTES, PoolPolicy.BIND, 777)
    assert "seccomp" in str(policy_fault(777))
