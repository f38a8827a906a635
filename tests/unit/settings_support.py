"""The settings that the command line makes of options."""

from __future__ import annotations

from typing import Any

from hisparse_pd.commands.cli import make_parser


def parsed(command: str, options: list[str]) -> dict[str, Any]:
    namespace = vars(make_parser().parse_args([command, *options]))
    return {name: value for name, value in namespace.items() if name not in ("parser", "command", "config")}
