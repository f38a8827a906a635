"""The packages and who may import whom: the rules of docs/architecture.md, read from the sources."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.checkout import parsed, statements

ROOT = Path(__file__).resolve().parents[2]

LEVELS = (
    ("base",),
    ("protocol", "kernels", "core.grammar"),
    ("core.memory", "core.model", "core.paging"),
    ("transfer", "tools.checkpoints"),
    ("engine",),
    ("serving.http",),
    ("serving.api",),
    ("prefill_node", "decode_node", "router", "commands.doctor", "commands.options"),
    ("commands.mps",),
    ("commands.pair",),
    ("commands.cli", "tools.bench"),
    ("__main__",),
)
"""Packages of ``hisparse_pd`` and of ``tools``, lowest level first. A package imports packages of the levels
below its own, and none on its own level."""

LINKED = ("prefill_node", "decode_node", "router", "transfer", "kernels", "protocol")
"""Folders at the root of the repository, to which ``hisparse_pd`` has links of the same names."""

GROUPS = ("core", "serving", "commands")
"""Folders of ``hisparse_pd`` that have several packages."""

OWNERS: dict[str, tuple[str, ...]] = {
    "mooncake": ("transfer/engine.py", "transfer/page_store.py", "hisparse_pd/commands/doctor/checks.py"),
    "llguidance": ("hisparse_pd/core/grammar/",),
    "cupy": ("kernels/", "hisparse_pd/core/memory/"),
    "cuda": ("kernels/", "hisparse_pd/core/memory/"),
    "triton": ("kernels/",),
    "sgl_kernel": ("kernels/",),
    "zmq": (
        "protocol/",
        "hisparse_pd/core/model/rank_bells.py",
        "hisparse_pd/engine/sockets.py",
        "hisparse_pd/commands/doctor/channel.py",
    ),
    "starlette": ("hisparse_pd/serving/", "router/", "prefill_node/server.py", "decode_node/"),
    "uvicorn": ("hisparse_pd/serving/http/", "router/"),
    "transformers": (
        *("hisparse_pd/core/model/", "hisparse_pd/serving/api/text_codec.py"),
        *("tools/bench/", "tools/checkpoints/"),
    ),
    "opentelemetry": ("hisparse_pd/base/tracing.py",),
    "torch.distributed": ("hisparse_pd/core/model/rank_group.py",),
    "torch": (
        *("kernels/", "hisparse_pd/core/model/", "hisparse_pd/core/memory/"),
        *(
            f"hisparse_pd/engine/{name}.py"
            for name in ("start", "loop", "lockstep", "prefix_scrub", "host_copies")
        ),
        *("prefill_node/", "decode_node/", "hisparse_pd/commands/", "tools/"),
    ),
}
"""Files that may import a library, at once or later."""

PURE = (
    *(
        f"decode_node/{name}.py"
        for name in ("scheduler", "growth", "mode_choice", "mode_speed", "making_room")
    ),
    *(f"decode_node/{name}.py" for name in ("hot_buffer_sizes", "free_slots", "plan_draft", "plan_slots")),
    "decode_node/step_plan.py",
    *(f"decode_node/{name}.py" for name in ("limits", "next_plan")),
    *(
        "decode_node/held_matches.py",
        "decode_node/live_requests.py",
        "decode_node/quarantine.py",
        "decode_node/request.py",
        "decode_node/request_states.py",
        "decode_node/reserve.py",
    ),
    *("prefill_node/scheduler.py", "prefill_node/requests.py"),
    *(f"hisparse_pd/core/paging/{name}.py" for name in ("prompt_keys", "allocator", "pools", "prefix_tree")),
    *(f"hisparse_pd/core/paging/{name}.py" for name in ("run_tree", "run_integrity", "idle_runs")),
    *("transfer/plan.py", "transfer/send_queue.py"),
)
"""Schedulers, pools and plans, which use no tensors, sockets or HTTP."""

PACKAGES = {package for level in LEVELS for package in level}


@cache
def sources() -> dict[str, Path]:
    """Return the file of each module, without the tests and ``__init__.py``."""
    return {
        module_of(file): file
        for folder in ("hisparse_pd", *LINKED, "tools")
        for file in walk(ROOT / folder)
        if file.name != "__init__.py"
    }


def walk(folder: Path) -> Iterator[Path]:
    """Yield the sources of a folder, without those behind its links, which are walked in their own folder."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        elif path.suffix == ".py":
            yield path


def module_of(file: Path) -> str:
    """Return the name by which a file is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("hisparse_pd", *parts) if parts[0] in LINKED else parts)


def package_of(name: str) -> str:
    """Return the package of a module or of a name in it, as in ``LEVELS``; for a library, its first name."""
    first, *others = name.split(".")
    if first == "tools":
        return ".".join((first, *others[:1]))
    if first != "hisparse_pd" or not others:
        return first
    return ".".join(others[: 2 if others[0] in GROUPS else 1])


@cache
def imported(file: Path) -> frozenset[str]:
    """Return the modules and names that a file imports at its top, in functions, and for types only."""
    found: set[str] = set()
    for node in statements(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def imports(module: str) -> frozenset[str]:
    """Return the full names of the modules that a module imports."""
    return frozenset(
        name if name in sources() or "." not in name else name.rpartition(".")[0]
        for name in imported(sources()[module])
    )


def test_every_module_is_in_a_package() -> None:
    assert {package_of(module) for module in sources()} == PACKAGES
    folders = {file.parent.name for file in ROOT.glob("[!.]*/*.py")}
    assert folders == {"hisparse_pd", *LINKED, "tools", "deploy", "tests"}


def test_nothing_but_hisparse_pd_is_a_package_that_is_installed() -> None:
    """An ``__init__.py`` in a folder at the root would hide other packages, as Hugging Face's ``kernels``."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert settings == {"find": {"include": ["hisparse_pd*"]}}
    for folder in LINKED:
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "hisparse_pd" / folder).readlink() == Path("..", folder)
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for folder in ("tests", "tools", "hisparse_pd", *LINKED)
        for file in walk(ROOT / folder)
        for name in imported(file)
        if name.split(".")[0] in LINKED
    ]
    assert not wrong


@pytest.mark.parametrize("folder", LINKED)
def test_a_package_of_a_folders_name_is_found_from_the_root(folder: str, tmp_path: Path) -> None:
    """A command in the checkout has the current directory first on its path."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "__init__.py").write_text("print('the other one')")
    command = [sys.executable, "-c", f"import {folder}"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("the other one", "")


def test_no_import_runs_upward_or_sideways() -> None:
    level_of = {package: number for number, level in enumerate(LEVELS) for package in level}
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        for name in imports(module)
        if (package := package_of(name)) in PACKAGES
        and package != (own := package_of(module))
        and level_of[package] >= level_of[own]
    ]
    assert not wrong


def test_no_circle_between_folders() -> None:
    """Imports between two folders have one direction, also where their packages are on several levels."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module in sources():
        own = package_of(module).split(".")[0]
        graph[own] |= {
            package_of(name).split(".")[0] for name in imports(module) if package_of(name) in PACKAGES
        }
        graph[own] -= {own}
    TopologicalSorter(graph).prepare()


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


@pytest.mark.parametrize("node", ["prefill_node", "decode_node"])
def test_an_engine_imports_nothing_of_traces(node: str) -> None:
    """Not even late. The processes of fronts and of the router are tried in ``test_traces.py``."""
    waiting = [f"hisparse_pd.{node}.engine"]
    seen = {*waiting}
    while waiting:
        found = (imports(waiting.pop()) & sources().keys()) - seen
        seen |= found
        waiting += found
    assert len(seen) > 100
    assert "hisparse_pd.base.tracing" not in seen


def test_no_test_module_is_imported() -> None:
    """What tests share is in a module of its own, such as `support.py`, or named after what it is."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in walk(ROOT / "tests")
        for name in imported(file)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    ]
    assert not wrong


@pytest.mark.parametrize("path", PURE)
def test_schedulers_pools_and_plans_are_pure(path: str) -> None:
    assert not {name.split(".")[0] for name in imports(module_of(ROOT / path))} & OWNERS.keys()


def test_the_page_names_every_package_in_this_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| `")]
    levels = [[package for package in level if package != "__main__"] for level in LEVELS]
    named = [re.findall(r"`([\w/]+?)/?(?:\.py)?`", line.split("|")[1]) for line in table]
    said = [
        {name.removeprefix("hisparse_pd/").replace("/", ".") for name in names} for names in reversed(named)
    ]
    assert said == [set(level) for level in levels if level]


def test_the_walk_of_the_page_names_files_that_exist_and_goes_forward() -> None:
    """Its files are in the order in which a request meets them, each once."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    walk = re.findall(r"^\d+\. .*?`([\w/]+\.py)`", page.split("## The way of one request")[1], re.MULTILINE)
    assert 20 < len(walk) == len(set(walk)) < 34
    assert [path for path in walk if not (ROOT / path).is_file()] == []
    assert all(first != second for first, second in pairwise(walk))
