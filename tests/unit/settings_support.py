"""What tests of settings share: files, and what the command line makes of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hisparse_pd.commands.cli import make_parser

MODEL = {"model_path": "/models/tiny"}


def file(tmp_path: Path, text: str, suffix: str = ".toml") -> Path:
    path = tmp_path / f"settings{suffix}"
    path.write_text(text)
    return path


def parsed(command: str, options: list[str]) -> dict[str, Any]:
    namespace = vars(make_parser().parse_args([command, *options]))
    return {name: value for name, value in namespace.items() if name not in ("parser", "command", "config")}
