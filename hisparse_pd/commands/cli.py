"""The command line: ``hisparse-pd prefill | decode | router | pair | doctor | keygen``.

Options are made from the fields of the settings (``base/*settings.py``), so the command line, a ``--config``
file and the code use the same names. The command line wins over the file. Services are imported only when
they are run, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.ports import free_port, is_taken
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.process import occupy_standard_streams, say, setup_logging
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings import STARTUP_TIMEOUT_SECS, Device, FrozenSettings, Port
from hisparse_pd.base.settings_sources import (
    SettingsError,
    check_known,
    did_you_mean,
    flag,
    load_settings,
    metavar,
    read_file,
    to_options,
    validate,
    with_underscores,
)
from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.commands.doctor.settings import DoctorSettings

log = logging.getLogger(__name__)

USAGE_ERROR = 2

S = TypeVar("S", PrefillSettings, DecodeSettings, RouterSettings)


class PairSettings(FrozenSettings):
    """Settings of ``pair`` alone: where it places the nodes."""

    prefill_port: Port = Field(
        30000,
        description="port of the prefill node; 0, or a default that is in use: any free one",
    )
    decode_port: Port = Field(
        30001,
        description="port of the decode node; 0, or a default that is in use: any free one",
    )
    decode_device: Device | None = Field(
        None, description="device of the decode node; default: the prefill node's (--device)"
    )


SECTIONS: dict[str, type[BaseModel]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "router": RouterSettings,
}
"""Settings of each service of a pair, by the service's section in the pair's file."""
_SETTINGS_OF_NODES = (
    ("prefill_port", "prefill", "port"),
    ("decode_port", "decode", "port"),
    ("decode_device", "decode", "device"),
)
"""Options of ``pair`` that set one node's setting: (option, service, setting)."""

NOT_SETTINGS = frozenset(("parser", "command", "config", "json"))
"""Names in argparse's namespace that are no settings."""
_SET_BY_PAIR = frozenset(
    ("prefill", "decode", "advertise_host", "control_port", "nnodes", "node_rank", "dist_init_addr")
)
"""Settings that ``pair`` does not take: it connects its services itself, and they are all on this machine."""
_ROUTER_ONLY_IN_PAIR = frozenset(("host", "port", "ssl_certfile", "ssl_keyfile"))
"""Settings of ``pair`` that concern its router alone, since its nodes stay on loopback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status of the process; usage errors exit with status 2."""
    occupy_standard_streams()
    parser = make_parser()
    namespace, unknown = parser.parse_known_args(argv)
    command_parser: _CommandParser = namespace.parser
    if unknown:
        command_parser.error(_unknown_options(unknown, command_parser))
    given = {name: value for name, value in vars(namespace).items() if name not in NOT_SETTINGS}
    try:
        match namespace.command:
            case "keygen":
                return _keygen(namespace.path, for_api=namespace.api)
            case "doctor":
                doctor_settings = load_settings(DoctorSettings, given, namespace.config)
                from hisparse_pd.commands.doctor.command import run as run_doctor

                return run_doctor(doctor_settings, as_json=namespace.json)
            case "pair":
                return _run_pair(*pair_settings(given, namespace.config))
            case "prefill":
                prefill_settings = load_settings(PrefillSettings, given, namespace.config)
                from hisparse_pd.prefill_node.server import run as run_prefill

                return run_prefill(prefill_settings)
            case "decode":
                decode_settings = load_settings(DecodeSettings, given, namespace.config)
                from hisparse_pd.decode_node.server import run as run_decode

                return run_decode(decode_settings)
            case _:
                router_settings = load_settings(RouterSettings, given, namespace.config)
                from hisparse_pd.router.process import run as run_router

                return run_router(router_settings)
    except SettingsError as error:
        command_parser.error(str(error))


# --- the settings of a pair --------------------------------------------------------------------------


def pair_settings(
    given: Mapping[str, Any], config: Path | None = None
) -> tuple[PairSettings, PrefillSettings, DecodeSettings, RouterSettings]:
    """Return the settings of ``pair`` and of its three services. Raises SettingsError.

    The file has sections ``prefill``, ``decode`` and ``router``. A key outside them goes to every service
    that knows it, a section's key wins over it, and the command line wins over both.
    """
    from_file = read_file(config) if config is not None else {}
    sections = _take_sections(from_file, config)
    check_known(from_file, {**_pair_fields(), **dict.fromkeys(SECTIONS)}, str(config))

    # The nodes' settings, with the ports that ``pair`` chooses for them.
    pair = validate(
        PairSettings, _known_to(PairSettings, from_file), str(config), _known_to(PairSettings, given)
    )
    merged = {name: _shared_values(name, from_file) for name in SECTIONS}  # values of the file, by service
    options = {name: _shared_values(name, given) for name in SECTIONS}  # values of the command line
    for option, section, name in _SETTINGS_OF_NODES:
        if (value := getattr(pair, option)) is not None:
            (options if option in given else merged)[section][name] = value
    for section in SECTIONS:
        merged[section] |= sections[section]
    prefill = validate(PrefillSettings, merged["prefill"], f"{config} [prefill]", options["prefill"])
    decode = validate(DecodeSettings, merged["decode"], f"{config} [decode]", options["decode"])
    if prefill.host_cache_tokens == "auto":
        neighbours = prefill.neighbour_host_tokens + decode.host_tokens_here
        prefill = prefill.model_copy(update={"neighbour_host_tokens": neighbours})
    chosen = set(from_file) | set(given)  # names that the user set outside any section
    prefill = _with_ports(
        prefill,
        port="prefill_port" in chosen or "port" in sections["prefill"],
        bootstrap_port="bootstrap_port" in chosen or "bootstrap_port" in sections["prefill"],
    )
    decode = _with_ports(decode, port="decode_port" in chosen or "port" in sections["decode"])
    # The router's settings, which name the nodes.
    merged["router"]["prefill"] = [(_node_url(prefill), prefill.bootstrap_port)]
    merged["router"]["decode"] = [_node_url(decode)]
    if node_keys := decode.api_key_file or prefill.api_key_file:
        merged["router"].setdefault("node_api_key_file", node_keys)
    router = validate(RouterSettings, merged["router"], f"{config} [router]", options["router"])
    # Clients know the router's port, so a default in use is an error and is not replaced.
    return pair, prefill, decode, _with_ports(router, port=True)


def _take_sections(from_file: dict[str, Any], config: Path | None) -> dict[str, dict[str, Any]]:
    """Take the services' sections out of a pair's file. Raises SettingsError."""
    sections: dict[str, dict[str, Any]] = {}
    for name, model in SECTIONS.items():
        section = from_file.pop(name, {})
        if not isinstance(section, dict):
            raise SettingsError(f"{config}: {name}: expected a section with settings, got {section!r}")
        allowed = {key: field for key, field in model.model_fields.items() if key not in _SET_BY_PAIR}
        sections[name] = with_underscores(section, f"{config} [{name}]")
        check_known(sections[name], allowed, f"{config} [{name}]")
    return sections


def _pair_fields() -> dict[str, FieldInfo]:
    """Return the options of ``pair``: its own, and those of its services that it does not set itself."""
    fields: dict[str, FieldInfo] = {}
    models: tuple[type[BaseModel], ...] = (*SECTIONS.values(), PairSettings)
    for model in models:
        fields |= {name: field for name, field in model.model_fields.items() if name not in _SET_BY_PAIR}
    return fields


def _shared_values(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values outside any section that are for the service of ``section``."""
    own = _known_to(SECTIONS[section], values)
    if section != "router":
        own = {name: value for name, value in own.items() if name not in _ROUTER_ONLY_IN_PAIR}
    return own


def _known_to(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``values`` that are fields of ``model``."""
    return {name: value for name, value in values.items() if name in model.model_fields}


def _with_ports(settings: S, **was_chosen: bool) -> S:
    """Replace ports by free ones: a port that is 0, which the other services of the pair could not know, and
    a default that another process uses, for instance another pair.

    ``was_chosen``: for each field with a port, whether the user set it.
    """
    ports = {name: getattr(settings, name) for name in was_chosen}
    free = {
        name: free_port()
        for name, port in ports.items()
        if port == 0 or (not was_chosen[name] and is_taken(settings.host, port))
    }
    return settings.model_copy(update=free)


def _node_url(settings: PrefillSettings | DecodeSettings | RouterSettings) -> str:
    """Return the URL at which this machine reaches the service."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{settings.port}" if ":" in host else f"{scheme}://{host}:{settings.port}"


# --- options from fields -----------------------------------------------------------------------------


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # names of options stay whole


class _CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, whose forty options would bury it."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _CommandParser(
        prog="hisparse-pd",
        description="Disaggregated prefill/decode service for sparse-attention LLMs with HiSparse decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hisparse-pd {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, fields: Mapping[str, FieldInfo]) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name,
            help=summary,
            description=summary,
            usage=f"hisparse-pd {name} [options]",
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )
        command.set_defaults(parser=command)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML or YAML file with the same settings"
        )
        for field_name, field in fields.items():
            _add_option(command, field_name, field)
        return command

    add("prefill", "Run a prefill node: computes prompts and pushes their KV.", PrefillSettings.model_fields)
    add("decode", "Run a decode node: receives KV and generates.", DecodeSettings.model_fields)
    add("router", "Run the router: the OpenAI API in front of the nodes.", RouterSettings.model_fields)
    add("pair", "Run a prefill node, a decode node and a router on this machine.", _pair_fields())
    doctor = add("doctor", "Check this machine before a node is deployed on it.", DoctorSettings.model_fields)
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    keygen = commands.add_parser(
        "keygen", help="Write a new key.", description="Write a new control key, or a new API key."
    )
    keygen.set_defaults(parser=keygen)
    keygen.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="new file for the key, which only its owner can read; it must not exist",
    )
    keygen.add_argument(
        "--api", action="store_true", help="write an API key, for --api-key-file, instead of a control key"
    )
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
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


def _help(field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    elif field.default in ("", None, ()):
        default = ""
    else:
        default = f"default: {field.default}"
    notes = "; ".join(note for note in (_bounds(field), default) if note)
    return f"{field.description}{f' ({notes})' if notes else ''}".replace("%", "%%")


def _bounds(field: FieldInfo) -> str:
    """Return a field's bounds in words."""
    words = []
    for constraint in field.metadata:
        match constraint:
            case Ge(ge=bound):
                words.append(f"at least {bound}")
            case Gt(gt=bound):
                words.append(f"above {bound}")
            case Le(le=bound):
                words.append(f"at most {bound}")
            case Lt(lt=bound):
                words.append(f"below {bound}")
            case _:
                continue
    return ", ".join(words)


def _unknown_options(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    known = [option for action in parser._actions for option in action.option_strings]
    words = [word.split("=", 1)[0] for word in unknown]
    options = [word for word in words if word.startswith("-")] or words
    explained = "; ".join(f"unknown option {word}{did_you_mean(word, known)}" for word in options)
    return f"{explained} (--help lists all)"


# --- commands of this module -------------------------------------------------------------------------


def _run_pair(
    pair: PairSettings, prefill: PrefillSettings, decode: DecodeSettings, router: RouterSettings
) -> int:
    """Run the three services of a pair as child processes. Returns the exit status."""
    from hisparse_pd.router.supervisor import Child, Supervisor

    setup_logging(router.log_level, "pair")
    log.info(
        "prefill node at %s with bootstrap port %d, decode node at %s",
        _node_url(prefill),
        prefill.bootstrap_port,
        _node_url(decode),
    )
    services: dict[str, PrefillSettings | DecodeSettings | RouterSettings] = {
        "prefill": prefill,
        "decode": decode,
        "router": router,
    }
    children = [
        Child(
            name,
            [sys.executable, "-m", "hisparse_pd", name, *to_options(settings)],
            f"{_node_url(settings)}/health",
            settings.drain_timeout_secs,
        )
        for name, settings in services.items()
    ]

    def announce() -> None:
        say(f"hisparse-pd serves {prefill.model_name} at {_node_url(router)}/v1")

    return Supervisor(children, STARTUP_TIMEOUT_SECS).run(announce)


def _keygen(path: Path, *, for_api: bool) -> int:
    """Write a new control key, or an API key, to ``path``. Returns the exit status. Raises SettingsError."""
    if for_api:
        key = secrets.token_urlsafe(32).encode()
        use = "give the router, or a node, --api-key-file with it, and each client the key in it"
    else:
        from hisparse_pd.protocol.channels import ControlKeys

        key = ControlKeys.generate().secret
        use = "give every node of the cluster --control-key-file with a copy of it"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; an existing key is never overwritten") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
    say(f"wrote {path}; {use}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
