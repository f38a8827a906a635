"""The command line: ``hisparse-pd prefill | decode | router | pair | doctor | keygen``.

Options are made from the fields of the settings (``base/*settings.py``), so the command line, a ``--config``
file and the code use the same names. The command line wins over the file. Services are imported only when
they are run, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic.fields import FieldInfo

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.process import occupy_standard_streams, say
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings_sources import SettingsError, load_settings
from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.commands.doctor.settings import DoctorSettings
from hisparse_pd.commands.options import CommandParser, HelpFormatter, add_option, unknown_options
from hisparse_pd.commands.pair import pair_fields, pair_settings
from hisparse_pd.commands.pair import run as run_pair

NOT_SETTINGS = frozenset(("parser", "command", "config", "json"))
"""Names in argparse's namespace that are no settings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status of the process; usage errors exit with status 2."""
    occupy_standard_streams()
    parser = make_parser()
    namespace, unknown = parser.parse_known_args(argv)
    command_parser: CommandParser = namespace.parser
    if unknown:
        command_parser.error(unknown_options(unknown, command_parser))
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
                return run_pair(*pair_settings(given, namespace.config))
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


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
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
            formatter_class=HelpFormatter,
        )
        command.set_defaults(parser=command)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML or YAML file with the same settings"
        )
        for field_name, field in fields.items():
            add_option(command, field_name, field)
        return command

    add(
        "prefill",
        "Run a prefill node, which computes prompts and sends their KV to decode nodes.",
        PrefillSettings.model_fields,
    )
    add("decode", "Run a decode node, which receives KV and generates tokens.", DecodeSettings.model_fields)
    add(
        "router",
        "Run the router, which serves the HTTP API in front of the nodes.",
        RouterSettings.model_fields,
    )
    add("pair", "Run a prefill node, a decode node and a router on this machine.", pair_fields())
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
    except FileExistsError as error:
        raise SettingsError(f"{path} exists, and keygen overwrites no file; choose another path") from error
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
    say(f"wrote {path}; {use}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
