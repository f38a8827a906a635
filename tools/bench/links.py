"""Measures the links between main memory and the GPUs of a machine, alone and together.

    python -m tools.bench.links [--devices cuda:0 cuda:1 …] [--seconds 170] [--out STEM]

Each GPU has a process (``link_copies.py``) that copies large pinned blocks to it, back, and both at once. In
one measurement, a *cell*, the processes of all its GPUs start at the same time. Blocks lie on the GPU's own
NUMA node (``own``), on the one farthest from it (``remote``), or wherever unbound threads touch them
(``unbound``). Their pages are those of pools, in a memfd (``shared``, what prefill nodes map) or ``private``,
both with huge pages where the kernel gives them; pages of 4 KiB (``small``); or reserved huge pages, where
enough are free (``hugetlb``). Where the kernel does not name a GPU's node, each node is measured by its
number; ``--numa`` names the GPUs' nodes.

The first 1, 2, 3, 4 … GPUs of the order given are measured at once. With the first kind of block, shared
pages of their own nodes where these are known, each GPU is also measured alone, and so is every pair: two
that are slower together than others share a PCIe switch or a socket. The rates of main memory alone, by node,
come first. The JSON has the topology: ``nvidia-smi topo -m``, and for each GPU its node, its link and the
bridges above it.

A cell that fails is a row with its error, and one without time left is skipped; the JSON is written after
each kind of block. ``--devices cpu cpu`` tries the command without a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.machine import Machine, read_text
from hisparse_pd.core.memory.numa import (
    NumaNode,
    Placement,
    distances_of,
    gpu_number,
    is_gpu,
    pci_path,
    place_ranks,
    read_nodes,
    show_cpus,
)
from tools.bench.facts import OUT
from tools.bench.link_copies import Block, Copy, serve_copies, serve_host_rates
from tools.bench.report import make_console, table_of, write_report

DIRECTIONS = ("to_device", "to_host", "both")
AT_ONCE = (1, 2, 3, 4, 6, 8)
"""Numbers of GPUs that copy at the same time."""
START_SECS = 0.03
"""Time from an order to the start that it names; longer than the order takes to reach all processes."""
ANSWER_SECS = 60.0
"""Time limit for making and registering a block, and for copies; a process that takes longer is ended."""
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class Cell:
    """One measurement. ``place``: a name from ``blocks_by_place``. ``pages``: a kind from ``kinds_of_pages``.
    ``gpus``: the GPUs that copy, by their places in ``--devices``. ``direction``: one of DIRECTIONS."""

    place: str
    pages: str
    gpus: tuple[int, ...]
    direction: str


def plan(num_gpus: int, places: Sequence[str], pages: Sequence[str]) -> list[Cell]:
    """Return all cells to measure, those of one kind of block together, and the kinds in the order given.
    Blocks of the first kind are also measured for each GPU alone and each pair."""
    first_gpus = [tuple(range(count)) for count in AT_ONCE if count < num_gpus] + [tuple(range(num_gpus))]
    single_gpus = [(gpu,) for gpu in range(num_gpus)]
    cells = []
    for kind in pages:
        for place in places:
            groups = first_gpus
            if (place, kind) == (places[0], pages[0]):
                pairs = combinations(range(num_gpus), 2)
                groups = list(dict.fromkeys([*first_gpus, *single_gpus, *pairs]))
            cells += [Cell(place, kind, gpus, direction) for gpus in groups for direction in DIRECTIONS]
    return cells


def blocks_by_place(
    placements: Sequence[Placement], nodes: Mapping[int, NumaNode], machine: Machine
) -> dict[str, list[int | None]]:
    """Return the node of each GPU's block, by the name of the place: "own", "unbound" (None) and "remote".

    Where a GPU's node is not known, each node has a place of its own instead of "own" and "remote". With
    fewer than two nodes that have CPUs and memory, "unbound" is the only place.
    """
    usable = [number for number, node in nodes.items() if node.cpus and node.total_bytes]
    unbound: dict[str, list[int | None]] = {"unbound": [None] * len(placements)}
    if len(usable) < 2:
        return unbound
    own = [placement.node for placement in placements]
    if any(node not in usable for node in own):
        return {**unbound, **{f"node {number}": [number] * len(placements) for number in usable}}
    remote: list[int | None] = []
    for node in own:
        assert node is not None
        distances = distances_of(node, nodes, machine)
        remote.append(max((other for other in usable if other != node), key=lambda at: distances.get(at, 0)))
    return {"own": own, **unbound, "remote": remote}


def kinds_of_pages(num_bytes: int, machine: Machine) -> list[str]:
    """Return the kinds of pages that can be measured. ``num_bytes``: the bytes of all blocks together, for
    which enough reserved pages must be free."""
    reserved = machine.sys / "kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    free = int(read_text(reserved) or 0) * _HUGE_PAGE_BYTES
    return ["shared", "private", "small", *(["hugetlb"] if free >= num_bytes else [])]


def topology(
    devices: Sequence[str],
    placements: Sequence[Placement],
    nodes: Mapping[int, NumaNode],
    machine: Machine,
) -> dict[str, Any]:
    """Return how the GPUs are attached, as nvidia-smi and sysfs show it."""
    bus_ids = machine.gpu_bus_ids() if any(map(is_gpu, devices)) else ()
    transparent = machine.sys / "kernel/mm/transparent_hugepage"
    gpus = []
    for device, placement in zip(devices, placements, strict=True):
        gpu: dict[str, Any] = {"device": device, "placement": str(placement)}
        if is_gpu(device) and gpu_number(device) < len(bus_ids):
            path = pci_path(bus_ids[gpu_number(device)], machine)
            names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
            gpu |= {"bus_id": path.name, **{name: read_text(path / name) for name in names}}
            above = path.resolve().parts
            gpu["bridges"] = [part for part in above if ":" in part][:-1]  # the last one is the GPU itself
        gpus.append(gpu)
    return {
        "gpus": gpus,
        "nodes": [
            {
                "node": node.number,
                "cpus": show_cpus(node.cpus),
                "gib": node.total_bytes >> 30,
                "free_gib": node.free_bytes >> 30,
                "distances": distances_of(node.number, nodes, machine),
            }
            for node in nodes.values()
        ],
        "huge_pages": {name: read_text(transparent / name) for name in ("enabled", "shmem_enabled")},
        "nvidia_smi": output_of("nvidia-smi", "-L"),
        "nvidia_smi_topo": output_of("nvidia-smi", "topo", "-m"),
    }


def output_of(*command: str) -> str:
    """Return the output of a command, empty if the command is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


# --- processes --------------------------------------------------------------------------------------------


class Worker:
    """The process of one link. A process that does not answer in time is ended; later answers say why."""

    def __init__(self, device: str, home: Sequence[int]) -> None:
        """``home``: the CPUs of the device's node, from which the process copies."""
        context = get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=serve_copies, args=(theirs, device, home), name=f"copies of {device}"
        )
        self._process.start()
        theirs.close()
        self._why_gone = ""

    def send(self, order: Block | Copy) -> None:
        if not self._why_gone:
            try:
                self._orders.send(order)
            except OSError as error:
                self._give_up(f"its process has ended: {error}")

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last order; it has ``error`` if the order failed."""
        if not self._why_gone:
            try:
                answer: dict[str, Any] = received(self._orders, ANSWER_SECS)
                return answer
            except (EOFError, OSError) as error:
                self._give_up(f"its process has ended: {error}")
            except TimeoutError as error:
                self._give_up(str(error))
        return {"error": self._why_gone}

    def close(self) -> None:
        self._orders.close()
        self._process.join(5.0)
        self._process.kill()
        self._process.join()

    def _give_up(self, why: str) -> None:
        self._why_gone = why
        self._process.kill()


def received(connection: Connection, timeout_secs: float) -> Any:
    """Receive an object. Raises TimeoutError, and EOFError when the other end is gone."""
    if not connection.poll(timeout_secs):
        raise TimeoutError(f"no answer within {timeout_secs:g} s")
    return connection.recv()


def measure_host(nodes: Sequence[int | None], num_bytes: int, secs: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``serve_host_rates``, which runs in a process of its own, because it binds its
    threads to one node after the other."""
    context = get_context("spawn")
    answers, theirs = context.Pipe()
    process = context.Process(target=serve_host_rates, args=(theirs, nodes, num_bytes, secs))
    process.start()
    theirs.close()
    try:
        while (row := received(answers, ANSWER_SECS)) is not None:
            yield row
    except (EOFError, OSError) as error:
        yield {"error": f"its process has ended: {error}"}
    finally:
        process.kill()
        process.join()


def measure_cell(cell: Cell, workers: Sequence[Worker], secs: float) -> dict[str, Any]:
    """Return the cell's row: for each direction the GB/s of its GPUs, a list in their order, and their
    sum."""
    order = Copy(cell.direction, time.monotonic() + START_SECS, secs)
    active = [workers[gpu] for gpu in cell.gpus]
    for worker in active:
        worker.send(order)
    answers = [worker.answer() for worker in active]
    row: dict[str, Any] = {
        "place": cell.place,
        "pages": cell.pages,
        "gpus": list(cell.gpus),
        "direction": cell.direction,
    }
    errors = {gpu: found["error"] for gpu, found in zip(cell.gpus, answers, strict=True) if "error" in found}
    if errors:
        return {**row, "error": errors}
    for direction in DIRECTIONS[:2]:
        rates = [answer[direction] for answer in answers if direction in answer]
        row[f"{direction}_gb_s"] = rates
    row["all_gb_s"] = sum(sum(answer.values()) for answer in answers)
    return row


def measure_cells(
    cells: Sequence[Cell],
    places: Mapping[str, Sequence[int | None]],
    workers: Sequence[Worker],
    arguments: argparse.Namespace,
    ends_at: float,
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield for each kind of block, as long as there is time, where the blocks lie and the rows of its
    cells. ``places``: as ``blocks_by_place`` returns them."""
    kinds = dict.fromkeys((cell.place, cell.pages) for cell in cells)
    for place, pages in kinds:
        if time.monotonic() > ends_at:
            return
        for worker, node in zip(workers, places[place], strict=True):
            worker.send(Block(node, pages, arguments.block_bytes))
        block_facts = [worker.answer() for worker in workers]
        rows = []
        for cell in (cell for cell in cells if (cell.place, cell.pages) == (place, pages)):
            if time.monotonic() < ends_at:
                rows.append(measure_cell(cell, workers, arguments.cell_seconds))
        yield {"place": place, "pages": pages, "blocks": block_facts}, rows


# --- the command ------------------------------------------------------------------------------------------


def line_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row as text for people."""

    def shown(rates: Sequence[float]) -> str:
        return " ".join(f"{rate:.1f}" for rate in rates)

    return {
        "place": row["place"],
        "pages": row["pages"],
        "gpus": " ".join(map(str, row["gpus"])),
        "direction": row["direction"],
        "to device, GB/s each": shown(row.get("to_device_gb_s", ())),
        "to host, GB/s each": shown(row.get("to_host_gb_s", ())),
        "all": f"{row['all_gb_s']:.1f}" if "all_gb_s" in row else str(row.get("error", ""))[:80],
    }


def print_report(report: Mapping[str, Any], console: Console) -> None:
    found = report["topology"]
    for part in ("nvidia_smi", "nvidia_smi_topo"):
        if found[part]:
            console.print(found[part], highlight=False, markup=False)
    for gpu in found["gpus"]:
        facts = {name: value for name, value in gpu.items() if name != "device"}
        console.print(f"{gpu['device']}: {facts}", highlight=False, markup=False)
    console.print(table_of("NUMA nodes", found["nodes"]))
    console.print(table_of("main memory by CPUs of a node, GB/s", report["host"]))
    lines = [line_of(row) for row in report["rows"]]
    console.print(table_of(f"links, blocks of {report['block_bytes'] >> 20} MiB", lines))
    console.print(f"cells left out, for time: {report['num_left_out']}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", nargs="+", help="devices such as cuda:0 cuda:1; default: all GPUs")
    parser.add_argument("--numa", default="auto", help="the GPUs' NUMA nodes, as for the services")
    parser.add_argument(
        "--block-bytes",
        type=int,
        default=512 << 20,
        help="bytes of each block, in GPU memory and in main memory",
    )
    parser.add_argument("--cell-seconds", type=float, default=0.3, help="seconds of one measurement")
    parser.add_argument("--seconds", type=float, default=170.0, help="time after which no cell begins")
    parser.add_argument("--out", type=Path, default=OUT / "links", help="JSON file, without its suffix")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    parser = _parser()
    arguments = parser.parse_args(argv)
    machine = Machine()
    devices = arguments.devices or [f"cuda:{number}" for number in range(len(machine.gpu_bus_ids()))]
    if not devices:
        parser.error("this machine shows no GPU; --devices cpu cpu tries the command without one")
    nodes = read_nodes(machine)
    try:
        placements = place_ranks(arguments.numa, devices, machine)
    except (StartError, ValueError) as error:
        parser.error(str(error))
    places = blocks_by_place(placements, nodes, machine)
    pages = kinds_of_pages(len(devices) * arguments.block_bytes, machine)
    report: dict[str, Any] = {
        "block_bytes": arguments.block_bytes,
        "topology": topology(devices, placements, nodes, machine),
        "host": [],
        "blocks": [],
        "rows": [],
    }
    usable = [number for number, node in nodes.items() if node.cpus and node.total_bytes]
    host_nodes: Sequence[int | None] = usable if len(usable) > 1 else [None]
    report["host"] = list(measure_host(host_nodes, arguments.block_bytes, arguments.cell_seconds))

    workers = [
        Worker(device, placement.cpus or sorted(machine.allowed_cpus()))
        for device, placement in zip(devices, placements, strict=True)
    ]
    try:
        cells = plan(len(devices), list(places), pages)
        report["num_left_out"] = len(cells)
        for blocks, rows in measure_cells(cells, places, workers, arguments, started + arguments.seconds):
            report["blocks"].append(blocks)
            report["rows"] += rows
            report["num_left_out"] = len(cells) - len(report["rows"])
            write_report(arguments.out, report)
    finally:
        for worker in workers:
            worker.close()
    print_report(report, make_console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
