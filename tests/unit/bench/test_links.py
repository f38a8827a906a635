"""The benchmark of links: what it plans on which machine, and that it measures on CPUs and past failures."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import place_ranks, read_nodes
from tests.unit.memory.numa_machines import GPUS, bus_id, two_sockets
from tests.unit.transfer.fake_machine import FakeMachine
from tools.bench import link_copies, links
from tools.bench.link_copies import Block, allocated, where_it_is
from tools.bench.links import Cell, blocks_by_place, kinds_of_pages, plan, topology

PAGE = 4096


def places_of(devices: list[str], machine: Machine, numa: str = "auto") -> dict[str, list[int | None]]:
    return blocks_by_place(place_ranks(numa, devices, machine), read_nodes(machine), machine)


def test_every_number_of_links_is_measured_in_each_direction_and_pairs_where_pools_are() -> None:
    cells = plan(4, ["own", "unbound"], ["shared", "small"])
    assert len(cells) == len(set(cells))
    for place in ("own", "unbound"):
        for pages in ("shared", "small"):
            found = {cell.gpus for cell in cells if (cell.place, cell.pages) == (place, pages)}
            assert {(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)} <= found
            has_all = (place, pages) == ("own", "shared")
            assert len(found) == (4 + 6 + 2 if has_all else 4)
    for gpus in {cell.gpus for cell in cells}:
        directions = [cell.direction for cell in cells if cell.gpus == gpus and cell.place == "own"]
        assert set(directions) == {"to_device", "to_host", "both"}
    kinds = [(cell.place, cell.pages) for cell in cells]
    assert sum(a != b for a, b in pairwise(kinds)) == 3, "each block is made once"
    assert len(cells) * 0.33 + 4 * 3 < 120


def test_one_gpu_has_no_pairs() -> None:
    assert plan(1, ["unbound"], ["shared"]) == [
        Cell("unbound", "shared", (0,), direction) for direction in ("to_device", "to_host", "both")
    ]


def test_blocks_are_on_the_gpus_own_node_and_on_the_farthest(tmp_path: Path) -> None:
    machine = two_sockets(tmp_path).machine
    assert places_of(["cuda:0", "cuda:7"], machine) == {
        "own": [0, 1],
        "unbound": [None, None],
        "remote": [1, 0],
    }
    assert list(places_of(GPUS[:1], machine)) == ["own", "unbound", "remote"]
    assert places_of(["cpu"], machine, "1")["own"] == [1]


def test_where_the_node_of_a_gpu_is_not_known_each_node_is_measured(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path)
    fake.put_pci(bus_id(1).lower(), -1)
    expected = {"unbound": [None, None], "node 0": [0, 0], "node 1": [1, 1]}
    assert places_of(["cuda:0", "cuda:1"], fake.machine) == expected


def test_a_machine_of_one_node_has_one_place(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.add_numa_node(0, "0-3")
    fake.add_numa_node(1, "")
    assert places_of(["cpu", "cpu"], fake.machine) == {"unbound": [None, None]}


def test_reserved_pages_are_taken_where_there_are_enough(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    assert "hugetlb" not in kinds_of_pages(1, fake.machine)
    fake.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3\n")
    assert "hugetlb" in kinds_of_pages(6 << 20, fake.machine)
    assert "hugetlb" not in kinds_of_pages((6 << 20) + 1, fake.machine)


def test_the_tree_above_each_gpu_is_kept(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path)
    real = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:2b:00.0"
    fake.write(f"{real}/numa_node", "1\n")
    fake.write(f"{real}/current_link_width", "16\n")
    link = tmp_path / "sys/bus/pci/devices/0000:2b:00.0"
    for file in link.iterdir():
        file.unlink()
    link.rmdir()
    link.symlink_to(tmp_path / real)
    placements = place_ranks("auto", ["cuda:1"], fake.machine)
    tree = topology(["cuda:1"], placements, read_nodes(fake.machine), fake.machine)
    (gpu,) = tree["gpus"]
    assert gpu["bridges"] == ["pci0000:15", "0000:15:01.0", "0000:16:00.0"]
    assert (gpu["bus_id"], gpu["current_link_width"]) == ("0000:2b:00.0", "16")
    assert "node 1" in gpu["placement"]
    assert [(node["node"], node["distances"]) for node in tree["nodes"]] == [
        (0, {0: 10, 1: 21}),
        (1, {0: 21, 1: 10}),
    ]


@pytest.mark.parametrize("pages", ["shared", "private", "small"])
def test_a_block_is_where_it_is_said_to_be(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(link_copies, "stay_on", lambda cpus: bound.append(tuple(cpus)))
    with allocated(Block(None, pages, 3 * PAGE), [0], pinned=False) as block:
        assert (block.numel(), int(block.sum())) == (3 * PAGE, 0)
        facts = where_it_is(block.data_ptr())
    assert bound == [(0,)]
    if facts["on_nodes"]:
        assert sum(facts["on_nodes"].values()) == pytest.approx(1)
    assert facts["huge_share"] == 0


@pytest.mark.slow
def test_links_are_measured_on_cpus_and_a_process_that_fails_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third device is missing: cells with it say so, and the others have figures."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fake = FakeMachine(tmp_path)
    fake.add_numa_node(0, "0-1")
    monkeypatch.setattr(links, "Machine", lambda: replace(fake.machine, allowed_cpus=Machine().allowed_cpus))
    monkeypatch.setattr(links, "kinds_of_pages", lambda *_: ["shared"])
    out = tmp_path / "links"
    options = f"--devices cpu cpu cuda:999 --block-bytes {1 << 20} --cell-seconds 0.001 --out {out}"
    assert links.main(options.split()) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    (host,) = report["host"]
    assert host["read_gb_s"] > 0
    assert host["copied_gb_s"] > 0
    rows = {(tuple(row["gpus"]), row["direction"]): row for row in report["rows"]}
    assert len(rows) == 3 * len([(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
    assert report["num_left_out"] == 0
    for (gpus, direction), row in rows.items():
        if 2 in gpus:
            assert list(row["error"]) == ["2"]
            continue
        names = ("to_device", "to_host") if direction == "both" else (direction,)
        rates = [rate for name in names for rate in row[f"{name}_gb_s"]]
        assert len(rates) == len(gpus) * len(names)
        assert min(rates) > 0
        assert row["all_gb_s"] == pytest.approx(sum(rates))
    (blocks,) = report["blocks"]
    assert [("error" in lies) for lies in blocks["blocks"]] == [False, False, True]


@pytest.mark.slow
def test_what_there_is_no_time_for_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "measure_host", lambda *_: [])
    seen: list[int] = []
    monkeypatch.setattr(links, "print_report", lambda report, _: seen.append(report["num_left_out"]))
    assert links.main(["--devices", "cpu", "--seconds", "0", "--out", str(tmp_path / "links")]) == 0
    assert seen[0] >= 9


def test_a_machine_without_a_gpu_and_a_wrong_node_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(links, "Machine", lambda: FakeMachine(tmp_path).machine)
    with pytest.raises(SystemExit):
        links.main([])
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setattr(links, "Machine", lambda: two_sockets(tmp_path / "two").machine)
    with pytest.raises(SystemExit):
        links.main(["--devices", "cpu", "--numa", "9"])
    assert "--numa 9: this machine has the NUMA nodes 0, 1" in capsys.readouterr().err
