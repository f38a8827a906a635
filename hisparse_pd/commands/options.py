"""Options of the command line, made from the fields of the settings.

``cli.py`` makes a ``CommandParser`` for each command, and calls ``add_option`` for each field.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from hisparse_pd.base.settings import flag
from hisparse_pd.base.settings_sources import bounds, did_you_mean, metavar

USAGE_ERROR = 2


class HelpFormatter(argparse.HelpFormatter):
    """Lays help out with room for long names of options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of options stay whole


class CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, whose forty options would bury it."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


def add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """Add the option of one field, with its help and the number of values that it takes."""
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(field)}
    if field.annotation is bool:
        parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, **common)
    elif get_origin(field.annotation) is tuple:
        takes_port = get_origin(get_args(field.annotation)[0]) is tuple
        if takes_port:  # the router's --prefill URL PORT, which may be repeated
            parser.add_argument(
                flag(name), action="append", nargs="+", metavar=("URL", "BOOTSTRAP_PORT"), **common
            )
        elif field.title is not None:  # such as --allowed-peers NETWORK ...
            parser.add_argument(flag(name), action="extend", nargs="+", metavar=field.title, **common)
        else:  # the router's --decode URL, which may be repeated
            parser.add_argument(flag(name), action="append", metavar="URL", **common)
    else:
        parser.add_argument(flag(name), metavar=metavar(field), **common)


def unknown_options(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return the error for words of a command line that no option takes."""
    known = [option for action in parser._actions for option in action.option_strings]
    words = [word.split("=", 1)[0] for word in unknown]
    options = [word for word in words if word.startswith("-")] or words
    explained = "; ".join(f"unknown option {word}{did_you_mean(word, known)}" for word in options)
    return f"{explained} (--help lists all)"


def _help(field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    elif field.default in ("", None, ()):
        default = ""
    else:
        default = f"default: {field.default}"
    notes = "; ".join(note for note in (bounds(field), default) if note)
    return f"{field.description}{f' ({notes})' if notes else ''}".replace("%", "%%")
