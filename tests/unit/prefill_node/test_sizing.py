"""The host cache that ``--host-cache-tokens auto`` stands for: what main memory leaves, and to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import ANYWHERE, Placement, place_ranks
from hisparse_pd.prefill_node.engine import PrefillEngine
from hisparse_pd.prefill_node.sizing import bytes_per_token
from tests.unit.memory.numa_machines import two_sockets
from tests.unit.model.model_specs import make_spec
from tests.unit.transfer.fake_machine import GIB, FakeMachine

SPEC = make_spec()
PAGE = 64
PAGE_BYTES = PAGE * bytes_per_token(SPEC)


def settings_of(**options: Any) -> PrefillSettings:
    return PrefillSettings(
        model_path=Path("model"), device="cuda", host_cache_tokens="auto", page_size=PAGE, **options
    )


def sized(settings: PrefillSettings, machine: Machine, placement: Placement = ANYWHERE) -> PrefillSettings:
    return PrefillEngine.with_host_sizes(settings, SPEC, placement, machine)


def taken_bytes(settings: PrefillSettings) -> int:
    """Main memory of a rank whose sizes are numbers."""
    registered = PrefillEngine.registered_host_bytes(settings, SPEC)
    return registered + PrefillEngine.other_host_bytes(settings, SPEC)


@pytest.mark.parametrize("dp_size", [1, 4])
@pytest.mark.parametrize("neighbour_tokens", [0, 100_000])
@pytest.mark.parametrize("store", [{}, {"kv_store": "store:50051", "kv_store_gib": 1.0}])
def test_ranks_and_neighbours_together_leave_a_tenth_of_what_is_free(
    tmp_path: Path, dp_size: int, neighbour_tokens: int, store: dict[str, Any]
) -> None:
    settings = settings_of(dp_size=dp_size, neighbour_host_tokens=neighbour_tokens, **store)
    found = sized(settings.of_rank(dp_size - 1), FakeMachine(tmp_path).machine)  # 32 GiB are free
    assert found.num_host_cache_tokens % PAGE == 0
    taken = dp_size * taken_bytes(found) + neighbour_tokens * bytes_per_token(SPEC)
    assert 0 <= int(0.9 * 32 * GIB) - taken < dp_size * (PAGE_BYTES + 1)


def test_the_limit_of_the_container_counts(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.write("proc/self/cgroup", "0::/pod\n")
    for name, text in (("max", 8 * GIB), ("current", 6 * GIB), ("stat", f"inactive_file {GIB}")):
        fake.write(f"sys/fs/cgroup/pod/memory.{name}", f"{text}\n")
    taken = taken_bytes(sized(settings_of(), fake.machine))
    assert 0 <= int(0.9 * 3 * GIB) - taken < PAGE_BYTES


@pytest.mark.parametrize(("free_gib", "expected_gib"), [(900, (256, 128, 128)), (90, (30, 30, 30))])
def test_the_ranks_of_a_numa_node_share_its_memory_and_all_ranks_the_machine_s(
    tmp_path: Path, free_gib: int, expected_gib: tuple[int, ...]
) -> None:
    """256 GiB are free in each node."""
    fake = two_sockets(tmp_path)
    fake.write("proc/meminfo", f"MemAvailable: {free_gib << 20} kB\n")
    settings = settings_of(dp_size=3, numa="0,1,1")
    placements = place_ranks(settings.numa, settings.devices_here(), fake.machine)
    for rank, (placement, gib) in enumerate(zip(placements, expected_gib, strict=True)):
        taken = taken_bytes(sized(settings.of_rank(rank), fake.machine, placement))
        assert 0 <= int(0.9 * gib * GIB) - taken <= PAGE_BYTES


def test_what_is_chosen_is_logged_with_its_arithmetic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = settings_of(neighbour_host_tokens=GIB // bytes_per_token(SPEC) + 1)
    num_tokens = sized(settings, FakeMachine(tmp_path).machine).num_host_cache_tokens
    assert f"--host-cache-tokens auto: {num_tokens} tokens: 32.0 GiB free in the machine" in caplog.text
    assert "1.0 GiB of decode nodes here" in caplog.text


def test_a_number_stays_and_takes_no_look_at_the_machine(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.write("proc/meminfo", "")
    settings = settings_of().model_copy(update={"host_cache_tokens": 640})
    assert sized(settings, fake.machine) is settings
    with pytest.raises(StartError, match="meminfo does not tell how much main memory is free"):
        sized(settings_of(), fake.machine)


def test_too_little_memory_ends_the_start(tmp_path: Path) -> None:
    neighbours = 32 * GIB // bytes_per_token(SPEC)
    with pytest.raises(StartError, match=r"no page has room: 32\.0 GiB free in the machine"):
        sized(settings_of(neighbour_host_tokens=neighbours), FakeMachine(tmp_path).machine)


@pytest.mark.parametrize("has_store", [False, True])
def test_the_host_cache_is_counted_before_the_model_is_loaded(
    has_store: bool,
) -> None:
    """All of it is main memory, and only what a store reads is registered."""
    settings = settings_of(kv_store="store:50051" if has_store else "")
    without = settings.model_copy(update={"host_cache_tokens": 0})
    with_cache = settings.model_copy(update={"host_cache_tokens": 10 * PAGE + 5})
    num_registered = PrefillEngine.registered_host_bytes(with_cache, SPEC)
    assert taken_bytes(with_cache) - taken_bytes(without) == 10 * PAGE_BYTES
    assert num_registered - PrefillEngine.registered_host_bytes(without, SPEC) == has_store * 10 * PAGE_BYTES
