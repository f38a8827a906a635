"""The rooms of the house and who may import whom: the rule of docs/architecture.md, read from the sources."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = (
    ("hisparse_pd.vocabulary",),
    ("protocol", "kernels", "hisparse_pd.grammar"),
    (
        "hisparse_pd.memory",
        "hisparse_pd.model",
        "hisparse_pd.paging",
        "hisparse_pd.settings",
        "hisparse_pd.process",
        "hisparse_pd.ports",
    ),
    ("transfer", "hisparse_pd.settings_sources", "hisparse_pd.tracing", "tools.checkpoints"),
    ("hisparse_pd.engine", "hisparse_pd.traces", "tools.training"),
    ("hisparse_pd.http",),
    ("hisparse_pd.api",),
    ("prefill_node", "decode_node", "router", "hisparse_pd.doctor", "hisparse_pd.bench"),
    ("hisparse_pd.cli", "tools.bench"),
    ("hisparse_pd.__main__",),
)
"""From the ground up. A room imports rooms of the floors below its own, and none beside it."""

TOP = ("hisparse_pd", "prefill_node", "decode_node", "router", "transfer", "kernels", "protocol")
"""The packages that are installed."""

OWNERS: dict[str, tuple[str, ...]] = {
    "mooncake": ("transfer/engine.py", "hisparse_pd/doctor/checks.py"),
    "llguidance": ("hisparse_pd/grammar/",),
    "cupy": ("kernels/", "hisparse_pd/memory/"),
    "cuda": ("kernels/", "hisparse_pd/memory/"),
    "triton": ("kernels/",),
    "sgl_kernel": ("kernels/",),
    "zmq": (
        "protocol/",
        "hisparse_pd/model/rank_bells.py",
        "hisparse_pd/engine/sockets.py",
        "hisparse_pd/doctor/channel.py",
    ),
    "starlette": (
        *("hisparse_pd/api/", "hisparse_pd/http/", "router/", "prefill_node/server.py", "decode_node/"),
        "tools/bench/",
    ),
    "uvicorn": ("hisparse_pd/http/", "router/", "tools/bench/"),
    "transformers": (
        *("hisparse_pd/model/", "hisparse_pd/api/text_codec.py", "hisparse_pd/bench/"),
        *("tools/bench/", "tools/checkpoints/"),
    ),
    "opentelemetry": ("hisparse_pd/tracing.py",),
    "torch.distributed": ("hisparse_pd/model/rank_group.py",),
    "torch": (
        *("kernels/", "hisparse_pd/model/", "hisparse_pd/memory/"),
        *("hisparse_pd/engine/start.py", "hisparse_pd/engine/held_rows.py"),
        *("prefill_node/", "decode_node/", "hisparse_pd/doctor/", "hisparse_pd/bench/", "tools/"),
    ),
}
"""The files that may import a library, late or at once."""

PURE = (
    *(
        "decode_node/scheduler.py",
        "decode_node/next_plan.py",
        "decode_node/reserve.py",
    ),
    *("decode_node/live_requests.py", "decode_node/quarantine.py", "decode_node/request.py"),
    *("prefill_node/scheduler.py", "prefill_node/rooms.py"),
    *(f"hisparse_pd/paging/{name}.py" for name in ("prompt_keys", "allocator", "pools", "prefix_tree")),
    *("transfer/plan.py", "transfer/send_queue.py"),
)
"""Schedulers, pools and plans: no tensors, no sockets, no HTTP."""

ROOMS = {room for floor in FLOORS for room in floor}


@cache
def sources() -> dict[str, Path]:
    """Module -> file, of everything but the tests and the packages' own pages."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for folder in (*TOP, "tools")
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "__init__.py"
    }


def room_of(name: str) -> str:
    """The room of a module, or of a name in one; of the packages that are only a roof, the one below."""
    first, *others = name.split(".")
    return ".".join((first, *others[:1])) if first in ("hisparse_pd", "tools") else first


def imported(file: Path) -> set[str]:
    """What a file imports, at its top, in a function or for types only: modules, and names of modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The modules that a module imports, by their full names."""
    return frozenset(
        name if name in sources() or "." not in name else name.rpartition(".")[0]
        for name in imported(sources()[module])
    )


def test_every_module_is_in_a_room() -> None:
    assert {room_of(module) for module in sources()} == ROOMS
    assert {file.parent.name for file in ROOT.glob("[!.]*/*.py")} == {*TOP, "tools", "deploy", "tests"}


def test_no_import_runs_upward_or_sideways() -> None:
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        for name in imports(module)
        if (room := room_of(name)) in ROOMS
        and room != (own := room_of(module))
        and floor_of[room] >= floor_of[own]
    ]
    assert not wrong


def test_nothing_that_is_installed_imports_the_tools() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        for name in imports(module)
        if name.startswith("tools.") and not module.startswith("tools.")
    ]
    assert not wrong


def test_no_circle() -> None:
    graph = {module: {name for name in imports(module) if name in sources()} for module in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        raise AssertionError(" imported by ".join(circle)) from None


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_its_owners(library: str) -> None:
    strangers = [
        str(file.relative_to(ROOT))
        for module, file in sources().items()
        if any(f"{name}.".startswith(f"{library}.") for name in imports(module))
        and not str(file.relative_to(ROOT)).startswith(OWNERS[library])
    ]
    assert not strangers


def test_no_test_module_is_imported() -> None:
    """What tests share is in a module of its own: `support.py`, or named after what it is."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in (ROOT / "tests").rglob("*.py")
        for name in imported(file)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert not wrong


@pytest.mark.parametrize("path", PURE)
def test_schedulers_pools_and_plans_are_pure(path: str) -> None:
    module = path.removesuffix(".py").replace("/", ".")
    assert not {name.split(".")[0] for name in imports(module)} & OWNERS.keys()


def test_the_page_names_every_room_in_this_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| `")]
    floors = [[room for room in floor if room != "hisparse_pd.__main__"] for floor in FLOORS]
    named = [re.findall(r"`([\w/]+?)/?(?:\.py)?`", line.split("|")[1]) for line in table]
    said = [{room.replace("/", ".") for room in rooms} for rooms in reversed(named)]
    assert said == [set(floor) for floor in floors if floor]


def test_the_walk_of_the_page_names_files_that_exist_and_goes_forward() -> None:
    """Files in the order in which a request meets them, each once."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = re.findall(r"^\d+\. .*?`([\w/]+\.py)`", page.split("## The way of one request")[1], re.MULTILINE)
    assert 20 < len(walk) == len(set(walk)) < 34
    assert [path for path in walk if not (ROOT / path).is_file()] == []
    assert all(first != second for first, second in pairwise(walk))
