"""Copies of the checkout, for tests that build from it elsewhere."""

from __future__ import annotations

import ast
import gc
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def files_of_checkout(*paths: str) -> list[str]:
    """Return the files of ``paths``, or all, that git tracks or would add. Links to folders are files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listing = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=60).stdout
    return [name for name in listing.split("\0") if name and (REPO / name).exists()]


@cache
def parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    gc.disable()  # collections would go through all trees again and again
    try:
        return ast.parse(file.read_text())
    finally:
        gc.enable()


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements of a tree, those in bodies included. This takes a tenth of ``ast.walk``."""
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, field, ())


def copy_of_checkout(directory: Path, *paths: str) -> None:
    """Copy ``files_of_checkout`` into ``directory``, readable for all; links stay links."""
    for name in files_of_checkout(*paths):
        source, target = REPO / name, directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
        if not target.is_symlink():
            target.chmod(target.stat().st_mode | 0o444)
