"""``hisparse-pd pair``: a prefill node, a decode node and a router as child processes on this machine.

``cli.py`` offers the options of ``pair_fields``, calls ``pair_settings`` with those that were given, and
``run`` with what that returns. The services find each other by ports that are chosen here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.ports import free_port, is_taken
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.process import say, setup_logging
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings import STARTUP_TIMEOUT_SECS, Device, FrozenSettings, Port
from hisparse_pd.base.settings_sources import (
    SettingsError,
    check_known,
    read_file,
    to_options,
    validate,
    with_underscores,
)
from hisparse_pd.base.vocabulary import StartError

log = logging.getLogger(__name__)

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
        None,
        description="device of the decode node: cpu, cuda or cuda:N; default: the prefill node's (--device)",
        title="cpu|cuda|cuda:N",
    )
    mps: bool = Field(
        False,
        description="start NVIDIA's MPS for the nodes, which share a GPU: they use it at the same time and "
        "not by turns, so that prompts are computed sooner, and steps beside them take longer",
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

_SET_BY_PAIR = frozenset(
    ("prefill", "decode", "advertise_host", "control_port", "nnodes", "node_rank", "dist_init_addr")
)
"""Settings that ``pair`` does not take: it connects its services itself, and they are all on this machine."""
_ROUTER_ONLY_IN_PAIR = frozenset(("host", "port", "ssl_certfile", "ssl_keyfile"))
"""Settings of ``pair`` that concern its router alone, since its nodes stay on loopback."""


def pair_settings(
    given: Mapping[str, Any], config: Path | None = None
) -> tuple[PairSettings, PrefillSettings, DecodeSettings, RouterSettings]:
    """Return the settings of ``pair`` and of its three services. Raises SettingsError.

    The file has sections ``prefill``, ``decode`` and ``router``. A key outside them goes to every service
    that knows it, a section's key wins over it, and the command line wins over both.
    """
    from_file = read_file(config) if config is not None else {}
    sections = _take_sections(from_file, config)
    check_known(from_file, {**pair_fields(), **dict.fromkeys(SECTIONS)}, str(config))

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
    if pair.mps and (prefill.device == "cpu" or decode.device != prefill.device):
        raise SettingsError(
            f"--mps is for nodes that share a GPU; the prefill node's device is {prefill.device}, and the "
            f"decode node's {decode.device}; give both the same GPU, or leave --mps out"
        )
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


def pair_fields() -> dict[str, FieldInfo]:
    """Return the options of ``pair``: its own, and those of its services that it does not set itself."""
    fields: dict[str, FieldInfo] = {}
    models: tuple[type[BaseModel], ...] = (*SECTIONS.values(), PairSettings)
    for model in models:
        fields |= {name: field for name, field in model.model_fields.items() if name not in _SET_BY_PAIR}
    return fields


def run(pair: PairSettings, prefill: PrefillSettings, decode: DecodeSettings, router: RouterSettings) -> int:
    """Run the three services of a pair as child processes. Returns the exit status."""
    from hisparse_pd.commands.mps import running_mps
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

    def announce() -> None:
        say(f"hisparse-pd serves {prefill.model_name} at {_node_url(router)}/v1")

    try:
        with ExitStack() as stack:
            environment = stack.enter_context(running_mps()) if pair.mps else {}
            children = [
                Child(
                    name,
                    [sys.executable, "-m", "hisparse_pd", name, *to_options(settings)],
                    f"{_node_url(settings)}/health",
                    settings.drain_timeout_secs,
                    environment,
                )
                for name, settings in services.items()
            ]
            return Supervisor(children, STARTUP_TIMEOUT_SECS).run(announce)
    except StartError as error:
        log.error("%s", error)
        return 1


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
