"""Placement of ranks, with made-up sysfs trees."""

from __future__ import annotations

from pathlib import Path
from typing import Never

import pytest

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import (
    Placement,
    PoolPolicy,
    parse_cpus,
    place_ranks,
    read_nodes,
    show_cpus,
    with_pools,
)
from tests.unit.memory.numa_machines import GPUS, bus_id, two_sockets, with_gpus
from tests.unit.transfer.fake_machine import GIB, FakeMachine

SOCKETS = (parse_cpus("0-15,32-47"), parse_cpus("16-31,48-63"))


def nodes_of(placements: tuple[Placement, ...]) -> list[int | None]:
    return [placement.node for placement in placements]


def never() -> Never:
    raise AssertionError("the driver is asked")


# --- beside the GPU ---------------------------------------------------------------------------------------


def test_each_rank_is_on_the_node_of_its_gpu_with_the_cards_of_that_node(tmp_path: Path) -> None:
    placements = place_ranks("auto", GPUS, two_sockets(tmp_path).machine)
    assert nodes_of(placements) == [0] * 4 + [1] * 4
    for placement in placements:
        assert placement.node is not None
        assert placement.cpus == tuple(sorted(SOCKETS[placement.node]))
        assert placement.num_ranks == 4
        assert placement.nics == (("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3"))[placement.node]
        assert not placement.remedy
    told = "node 1, that of cuda:5 (0000:6B:00.0); CPUs 16-31,48-63; RDMA mlx5_2, mlx5_3; pools by"
    assert str(placements[5]) == f"{told} first touch"


def test_ranks_go_by_their_own_gpu_from_whichever_on(tmp_path: Path) -> None:
    assert nodes_of(place_ranks("auto", ["cuda:3", "cuda:4"], two_sockets(tmp_path).machine)) == [0, 1]
    assert nodes_of(place_ranks("auto", ["cuda"], two_sockets(tmp_path / "b").machine)) == [0]


def test_nothing_is_placed_on_a_machine_of_one_node_and_the_driver_is_not_asked(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path, gpu_bus_ids=never, allowed_cpus=never)
    assert place_ranks("auto", ["cuda:0"], fake.machine) == (Placement("one NUMA node"),)
    fake.add_numa_node(0, "0-63")
    assert place_ranks("auto", ["cuda:0", "cuda:1"], fake.machine) == (Placement("one NUMA node"),) * 2
    fake.add_numa_node(1, "")  # memory behind an expander card has no CPUs
    assert place_ranks("auto", ["cuda:0"], fake.machine) == (Placement("one NUMA node"),)


def test_off_reads_nothing() -> None:
    nothing = Machine(sys=Path("/nowhere"), gpu_bus_ids=never, allowed_cpus=never)
    assert place_ranks("off", ["cuda"], nothing) == (Placement("--numa off"),)


def test_a_rank_without_a_gpu_stays_where_it_is(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path, gpu_bus_ids=never).machine
    (placement,) = place_ranks("auto", ["cpu"], machine)
    assert (placement.node, placement.cpus, placement.nics, placement.remedy) == (None, (), (), "")


@pytest.mark.parametrize("local_cpus", ["", "0-63"])
def test_a_gpu_whose_node_is_not_known_places_nothing_and_says_what_to_do(
    tmp_path: Path, local_cpus: str
) -> None:
    fake = two_sockets(tmp_path)
    fake.put_pci(bus_id(0).lower(), -1, local_cpus)
    unknown, known = place_ranks("auto", ["cuda:0", "cuda:1"], fake.machine)
    assert (unknown.node, unknown.nics, known.node) == (None, (), 0)
    assert "cuda:0 (0000:1B:00.0)" in str(unknown)
    assert "--numa" in unknown.remedy


def test_cpus_beside_a_gpu_tell_its_node_where_the_number_does_not(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path)
    fake.put_pci(bus_id(0).lower(), -1, "16-31,48-63")
    assert nodes_of(place_ranks("auto", ["cuda:0"], fake.machine)) == [1]


def test_more_ranks_than_gpus_are_left_to_the_check_of_devices(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path)
    with_gpus(fake, 1)
    assert nodes_of(place_ranks("auto", ["cuda:0", "cuda:1"], fake.machine)) == [0, None]


def test_numbers_of_nodes_have_gaps_and_some_are_offline(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.write("sys/devices/system/node/online", "0,2\n")
    for number, cpus in ((0, "0-3"), (1, "4-7"), (2, "8-11")):
        fake.add_numa_node(number, cpus, distances="10 21")
    for number, node in enumerate((2, 1)):
        fake.put_pci(bus_id(number).lower(), node)
    with_gpus(fake, 2)
    assert list(read_nodes(fake.machine)) == [0, 2]
    on_two, on_offline = place_ranks("auto", GPUS[:2], fake.machine)
    assert (on_two.node, on_two.cpus) == (2, (8, 9, 10, 11))
    assert on_offline.node is None
    with pytest.raises(StartError, match="nodes 0, 2, and 1 is not one"):
        place_ranks("1", ["cuda:0"], fake.machine)


def test_of_a_socket_in_parts_a_rank_is_on_its_gpus_part_with_the_nearest_card(tmp_path: Path) -> None:
    """NPS4 and SNC: nodes of one socket are nearer to each other than those of the other one."""
    fake = FakeMachine(tmp_path)
    distances = ("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10")
    for number in range(4):
        fake.add_numa_node(number, f"{8 * number}-{8 * number + 7}", 128, 64, distances[number])
        fake.put_pci(bus_id(number).lower(), number)
    fake.put_nic("mlx5_0", 0)
    fake.put_nic("mlx5_1", 3)
    fake.put_nic("rxe0", -1)  # a software device hangs on nothing
    with_gpus(fake, 4)
    placements = place_ranks("auto", GPUS[:4], fake.machine)
    assert nodes_of(placements) == [0, 1, 2, 3]
    assert [placement.nics for placement in placements] == [("mlx5_0",)] * 2 + [("mlx5_1",)] * 2
    assert placements[1].cpus == tuple(range(8, 16))


# --- what the process may use -----------------------------------------------------------------------------


def test_of_a_node_only_the_allowed_cpus_are_taken(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path, allowed_cpus=lambda: {14, 15, 16, 17})
    first, last = place_ranks("auto", ["cuda:0", "cuda:7"], fake.machine)
    assert (first.cpus, last.cpus) == ((14, 15), (16, 17))


def test_a_gpu_beside_cpus_that_are_not_allowed_places_nothing(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path, allowed_cpus=lambda: {0, 1})
    near, far = place_ranks("auto", ["cuda:0", "cuda:7"], fake.machine)
    assert (near.node, far.node, far.cpus) == (0, None, ())
    for words in ("cuda:7", "CPUs 0-1, and none of node 1's", "16-31,48-63", "cpuset"):
        assert words in str(far)


def test_a_gpu_beside_memory_that_is_not_allowed_places_nothing(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path)
    fake.write("proc/self/status", "CapEff:\t0\nMems_allowed:\t1\nMems_allowed_list:\t0\n")
    near, far = place_ranks("auto", ["cuda:0", "cuda:7"], fake.machine)
    assert (near.node, far.node) == (0, None)
    assert "memory of the nodes 0, and not of node 1" in str(far)


# --- named nodes ------------------------------------------------------------------------------------------


def test_named_nodes_are_taken_one_for_all_or_one_a_rank(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path, gpu_bus_ids=never).machine
    assert nodes_of(place_ranks("1", GPUS[:3], machine)) == [1, 1, 1]
    placements = place_ranks("1,0,1", ["cpu"] * 3, machine)
    assert nodes_of(placements) == [1, 0, 1]
    assert [placement.num_ranks for placement in placements] == [2, 1, 2]
    assert placements[1].nics == ("mlx5_0", "mlx5_1")


@pytest.mark.parametrize(
    ("numa", "words"),
    [
        ("2", "--numa 2: this machine has the NUMA nodes 0, 1, and 2 is not one; name another node"),
        ("0,7", "--numa 0,7: this machine has the NUMA nodes 0, 1, and 7 is not one; .*auto or off"),
        ("1", "--numa 1: this process may use CPUs 0-7, and none of node 1's, which are 16-31,48-63; name"),
    ],
)
def test_a_named_node_that_cannot_be_had_ends_the_start(tmp_path: Path, numa: str, words: str) -> None:
    machine = two_sockets(tmp_path, allowed_cpus=lambda: range(8)).machine
    with pytest.raises(StartError, match=words):
        place_ranks(numa, GPUS[:2], machine)


def test_a_machine_of_one_node_takes_its_name_and_no_other(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.add_numa_node(0, "0-1")
    assert place_ranks("0", ["cpu"], fake.machine) == (Placement("one NUMA node"),)
    with pytest.raises(StartError, match="nodes 0, and 1 is not one"):
        place_ranks("1", ["cpu"], fake.machine)
    fake.add_numa_node(1, "")
    with pytest.raises(StartError, match="node 1 has no CPUs"):
        place_ranks("1", ["cpu"], fake.machine)


# --- pools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "gib_a_rank", "policy"),
    [
        (GPUS, 57, PoolPolicy.BIND),  # 256 are free, of which a twentieth of 512 stay so
        (GPUS, 58, PoolPolicy.PREFERRED),
        (GPUS[:1], 230, PoolPolicy.BIND),
        (GPUS[:1], 231, PoolPolicy.PREFERRED),
        (GPUS[3:5], 230, PoolPolicy.BIND),
    ],
)
def test_pools_are_bound_where_those_of_all_ranks_of_a_node_fit(
    tmp_path: Path, devices: list[str], gib_a_rank: int, policy: PoolPolicy
) -> None:
    machine = two_sockets(tmp_path).machine
    for placement in place_ranks("auto", devices, machine):
        pools = with_pools(placement, gib_a_rank * GIB, machine)
        assert pools.policy is policy
        assert bool(pools.remedy) is (policy is PoolPolicy.PREFERRED)
        if pools.remedy:
            needed = f"{placement.num_ranks * gib_a_rank}.0 GiB"
            for words in (needed, "256.0 GiB free", "--host-pool-tokens"):
                assert words in str(pools)


def test_pools_of_a_node_without_memory_are_where_they_are_touched(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.add_numa_node(0, "0-3", distances="10 20")
    fake.add_numa_node(1, "4-7", gib=0, free_gib=0, distances="20 10")
    fake.put_pci(bus_id(0).lower(), 1)
    fake.write("proc/self/status", "Mems_allowed_list:\t0\n")
    with_gpus(fake, 1)
    (placement,) = place_ranks("auto", ["cuda:0"], fake.machine)
    assert (placement.node, placement.cpus) == (1, (4, 5, 6, 7))
    assert with_pools(placement, GIB, fake.machine) == placement


def test_pools_that_are_placed_nowhere_read_nothing() -> None:
    nowhere = Placement("one NUMA node")
    assert with_pools(nowhere, GIB, Machine(sys=Path("/nowhere"))) == nowhere


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2,4", "0-15,32-47", "7,9-10"])
def test_lists_of_cpus_are_written_as_they_are_read(text: str) -> None:
    assert show_cpus(parse_cpus(f"{text}\n")) == text
