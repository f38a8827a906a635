"""Pages, docstrings and the files at the root agree with the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.checkout import REPO, files_of_checkout, parsed, statements

PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").glob("*.md"))]
PAGES_OF_PATHS = ["CONTRIBUTING.md", "docs/architecture.md", "docs/extending.md", "docs/invariants.md"]
"""Pages that lead a reader through the files of the checkout."""

MAX_FRAGMENTS = 10
"""Docstrings of the whole tree that may open with a word of FRAGMENT."""
FRAGMENT = re.compile(r"(Of|That|Whose|So)\b")
"""Openings that are seldom those of a whole sentence."""


def text_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def trees() -> dict[str, ast.Module]:
    """Return every Python file of the checkout, parsed."""
    names = [name for name in files_of_checkout() if name.endswith(".py")]
    return {name: parsed(REPO / name) for name in names if not (REPO / name).is_symlink()}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each docstring with its line, those of attributes and constants included."""
    for node in (tree, *statements(tree)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def imports_at_once(tree: ast.Module) -> Iterator[str]:
    """Yield what a file imports when it is imported, which excludes functions and imports for types."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        match waiting.pop():
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case node:
                inner = ast.iter_child_nodes(node)
                waiting += (child for child in inner if isinstance(child, ast.stmt | ast.ExceptHandler))


def file_of(module: str) -> str | None:
    """Return the file of a module of the checkout, as ``trees`` names it, or None."""
    path = module.replace(".", "/")
    names = [f"{path}{end}" for end in (".py", "/__init__.py")]
    return next(
        (name for name in (*names, *(n.removeprefix("hisparse_pd/") for n in names)) if name in trees()), None
    )


def with_packages(module: str) -> list[str]:
    """Return a module and the packages that are imported before it."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def fast_tests() -> set[str]:
    """Return the test files of ``make test-fast``, with the conftest.py of their folders."""
    (listed,) = re.findall(
        r"^FAST_TESTS := \$\(addprefix tests/unit/,(.*?)\)$", makefile(), re.MULTILINE | re.DOTALL
    )
    places = [f"tests/unit/{name}" for name in listed.replace("\\\n", " ").split()]
    assert [place for place in places if not (REPO / place).exists()] == []
    files = {
        name for name in trees() if name.startswith(tuple(f"{place}/" for place in places)) or name in places
    }
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    return files | {f"{folder}/conftest.py" for folder in folders} & trees().keys()


@cache
def makefile() -> str:
    return (REPO / "Makefile").read_text()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", makefile(), re.MULTILINE))


def test_links_lead_to_files_and_headings_that_exist() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text_of(page)):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(REPO)}: {link}")
    assert broken == []


@pytest.mark.parametrize("page", PAGES_OF_PATHS)
def test_paths_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]*|\w+\.(?:py|yml|toml))`", text_of(REPO / page))
    names = {name.rsplit("/")[-1] for name in files_of_checkout()}
    folders = {name.split("/")[0] for name in files_of_checkout()}
    known = [name for name in named if not name.endswith("/") or name.split("/")[0] in folders]
    known = [name for name in known if not name.startswith(("out/", "*"))]
    assert len(known) > 3
    missing = [name for name in known if not ((REPO / name).exists() if "/" in name else name in names)]
    assert missing == []


def test_commands_that_pages_and_hosted_runs_name_exist() -> None:
    workflows = sorted((REPO / ".github" / "workflows").glob("*.yml"))
    assert workflows
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    for workflow in workflows:
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            runs = " ".join(step.get("run", "") for step in job["steps"])
            named |= set(re.findall(r"\bmake ([a-z-]+)", runs))
            matrix = job["strategy"]["matrix"]
            named |= {*matrix["target"], *(entry["target"] for entry in matrix["include"])}
    assert {"lint", "test", "test-full"} <= named <= targets()


def test_a_commit_is_checked_by_the_ruff_of_make_lint() -> None:
    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    entries = [
        hook["entry"].replace(" --force-exclude", "") for repo in config["repos"] for hook in repo["hooks"]
    ]
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", makefile(), re.MULTILINE)
    linted = [line.strip().removesuffix(" .") for line in recipe.splitlines() if "/ruff " in line]
    assert entries == [line.replace("$(BIN)", ".venv/bin") for line in linted]


def test_fast_tests_import_no_torch() -> None:
    """Nor do the modules that they import, directly or not."""
    came_from = dict.fromkeys(fast_tests(), "make test-fast")
    waiting = [*came_from]
    wrong = []
    while waiting:
        name = waiting.pop()
        for imported in imports_at_once(trees()[name]):
            if imported.split(".")[0] == "torch":
                wrong.append(f"{name}, which {came_from[name]} imports")
            for module in with_packages(imported):
                if (file := file_of(module)) is not None and file not in came_from:
                    came_from[file] = name
                    waiting.append(file)
    assert wrong == []
    assert len(came_from) > 100


def test_docstrings_are_no_fragments() -> None:
    found = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, tree in trees().items()
        for line, text in docstrings(tree)
        if FRAGMENT.match(text)
    ]
    assert len(found) <= MAX_FRAGMENTS, "\n".join(found)
