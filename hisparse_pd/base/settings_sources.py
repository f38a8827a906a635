"""Reads settings from options of the command line and from TOML or YAML files.

Options and keys of files are named after the fields of the settings classes (``settings.py`` and its
neighbours): options with dashes, keys with dashes or underscores. The command line (``commands/cli.py``)
calls ``load_settings`` for one service. For ``pair``, whose file has sections, ``commands/pair.py`` calls
``read_file``, ``check_known`` and ``validate``, and starts each service with the options of ``to_options``.
Whatever is wrong raises SettingsError, which says where the value came from and what is allowed.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings import flag

S = TypeVar("S", bound=BaseModel)

_MAX_SHOWN_CHARS = 200
_NUMBERS = {"INT": "an integer", "FLOAT": "a number"}
"""Kinds of number in errors, by the word that ``metavar`` has for them."""


class SettingsError(ValueError):
    """A setting is unknown, missing or out of its bounds; the message names it and what is allowed."""


def load_settings(model: type[S], given: Mapping[str, Any], config: Path | None = None) -> S:
    """Return settings from the file ``config``, if there is one, overridden by ``given`` from the command
    line. Raises SettingsError."""
    from_file = read_file(config) if config is not None else {}
    check_known(from_file, model.model_fields, str(config))
    return validate(model, from_file, str(config), given)


def validate(model: type[S], from_file: Mapping[str, Any], source: str, given: Mapping[str, Any]) -> S:
    """Make settings from known keys. Raises SettingsError.

    ``given``: values from the command line, which win. ``source``: name of the file in errors.
    """
    for name, value in from_file.items():
        field = model.model_fields[name]
        if isinstance(value, bool) and field.annotation is not bool:  # pydantic would read it as 0 or 1
            raise SettingsError(f"{source}: {name}: expected {metavar(field)}, got {value}")
    values = {**from_file, **given}
    if model is RouterSettings and isinstance(values.get("prefill"), list):  # a file may leave ports out
        values["prefill"] = [_with_bootstrap_port(entry) for entry in values["prefill"]]
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # A field that takes a number or a word has a problem with each, and they are explained alike.
        problems = dict.fromkeys(_explain(model, problem, source, given) for problem in error.errors())
        raise SettingsError("; ".join(problems)) from error


def read_file(path: Path) -> dict[str, Any]:
    """Return the top level of a TOML or YAML file, with underscores in the keys. Raises SettingsError."""
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise SettingsError(f"--config {path}: expected a .toml, .yaml or .yml file, got {suffix!r}")
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text) or {}
    except RecursionError as error:
        raise SettingsError(f"--config {path}: it is nested too deeply") from error
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:  # ValueError for impossible dates and numbers, too
        raise SettingsError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path}: expected keys with values, got a {type(content).__name__}")
    return with_underscores(content, str(path))


def with_underscores(section: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """Replace dashes in keys by underscores. Raises SettingsError if that makes two keys the same."""
    renamed: dict[str, Any] = {}
    for key, value in section.items():
        name = str(key).replace("-", "_")
        if name in renamed:
            raise SettingsError(
                f"{source}: {name} is given twice, with dashes and with underscores; give it once"
            )
        renamed[name] = value
    return renamed


def check_known(section: Mapping[str, Any], known: Iterable[str], source: str) -> None:
    """Raises SettingsError for a key of ``section`` that is not in ``known``."""
    allowed = sorted(known)
    for name in section:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise SettingsError(f"{source}: unknown key {name!r}{hint}; allowed: {', '.join(allowed)}")


def to_options(settings: BaseModel) -> list[str]:
    """Return command-line options that give these settings."""
    options: list[str] = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value is None or value == field.default:
            continue
        match value:
            case bool():
                options.append(flag(name) if value else flag(f"no_{name}"))
            case tuple():  # an option for each entry, which may be a pair such as (URL, port)
                for entry in value:
                    words = entry if isinstance(entry, tuple) else (entry,)
                    options += [flag(name), *(str(word) for word in words if word is not None)]
            case _:
                options.append(f"{flag(name)}={value}")
    return options


def metavar(field: FieldInfo) -> str:
    """Return a word for the values that a field takes, as ``--help`` shows it: its ``title``, if it has
    one."""
    if field.title is not None:
        return field.title
    if allowed := choices(field):
        return "{" + ",".join(allowed) + "}"
    types = set(get_args(field.annotation)) or {field.annotation}
    if Path in types:
        return "PATH"
    return "INT" if int in types else "FLOAT" if float in types else "TEXT"


def choices(field: FieldInfo) -> list[str]:
    """Return the words that a field allows, nothing if it allows other values."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return [choice.value for choice in annotation]
    return []


def bounds(field: FieldInfo) -> str:
    """Return the bounds of a field in words, empty if it has none."""
    constraints = list(field.metadata)
    for annotation in get_args(field.annotation):  # of a number or a word, such as ``TokensOrAuto``
        for note in getattr(annotation, "__metadata__", ()):
            constraints += note.metadata if isinstance(note, FieldInfo) else ()
    words = []
    for constraint in constraints:
        match constraint:
            case Ge(ge=bound):
                words.append(f"at least {bound}")
            case Gt(gt=bound):
                words.append(f"above {bound}")
            case Le(le=bound):
                words.append(f"at most {bound}")
            case Lt(lt=bound):
                words.append(f"below {bound}")
            case MaxLen(max_length=bound):
                words.append(f"at most {bound} characters")
            case _:
                continue
    return ", ".join(words)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return an end for an error message that suggests close matches, empty if there are none."""
    close = difflib.get_close_matches(word, list(known), n=3)
    return f", did you mean {' or '.join(close)}?" if close else ""


def _explain(
    model: type[BaseModel], problem: Mapping[str, Any], source: str, given: Mapping[str, Any]
) -> str:
    """Return one of pydantic's problems as a sentence that names the option, or the file and its key."""
    location = problem["loc"]
    if not location:  # a rule over several fields, whose message names them
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(location[0])
    field = model.model_fields[name]
    if problem["type"] == "missing" and len(location) == 1:
        return f"{flag(name)} is required: {field.description}"
    where = flag(name) if name in given else f"{source}: {name}"
    if problem["type"] == "value_error":  # a check of our own, whose message names the value
        return f"{where}: {str(problem['msg']).removeprefix('Value error, ')}"
    shown = _shown(problem["input"])
    hint = did_you_mean(shown.strip("'"), choices(field))
    return f"{where}: {shown}: expected {_expected(field)}{hint}"


def _expected(field: FieldInfo) -> str:
    """Return what a field takes, for an error: its words, a number in its bounds, or what its description
    says."""
    if field.annotation is bool:
        return "true or false"
    if allowed := choices(field):
        return f"one of {', '.join(allowed)}"
    limits = f" ({bounds(field)})" if bounds(field) else ""
    kind, _, word = metavar(field).partition("|")  # INT, FLOAT or INT|auto, or a word for a text
    if kind not in _NUMBERS:
        return f"the {field.description}{limits}"
    return f"{_NUMBERS[kind]}{limits}{f' or {word}' if word else ''}"


def _shown(value: Any) -> str:
    """Return a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no integer of thousands of digits
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def _with_bootstrap_port(entry: Any) -> Any:
    """Turn ``URL``, ``[URL]`` or ``[URL, PORT]`` into a pair of URL and port."""
    match entry:
        case str():
            return (entry, None)
        case [url]:
            return (url, None)
        case _:
            return entry
