"""Settings that several services share: field types, limits, and the classes that services build on.

Every service's settings are one frozen class of pydantic fields: ``PrefillSettings``, ``DecodeSettings`` and
``RouterSettings`` in ``prefill_settings.py``, ``decode_settings.py`` and ``router_settings.py``. A field is
an option of the command line (``page_size`` is ``--page-size``) and a key of the configuration file. Its
description is the option's help and gives its unit; its title, if any, stands for the value in that help
(``--numa auto|off|N[,N...]``). A rule over several fields names them as options in its error: whoever wrote a
file knows its keys by them. Unknown keys and bad values raise ``pydantic.ValidationError``;
``settings_sources.py`` reads both sources and words the errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hisparse_pd.base.access import PeerList

MAX_PORT = 65535
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Tokens = Annotated[int, Field(ge=1, le=1 << 40)]
TokensOrFree = Annotated[int, Field(ge=0, le=1 << 40)]
"""Number of tokens; 0: chosen by the node, for pools by free memory."""
TokensOrZero = Annotated[int, Field(ge=0, le=1 << 40)]
TokensOrAuto = TokensOrZero | Literal["auto"]
"""Number of tokens; auto: chosen by the node, by free main memory."""
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
Numa = Annotated[str, Field(pattern=r"^(auto|off|[0-9]{1,4}(,[0-9]{1,4})*)$")]
CollectorUrl = Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")]
Secs = Annotated[float, Field(gt=0, le=86400)]
SecsOrZero = Annotated[float, Field(ge=0, le=86400)]
TransferProtocol = Literal["tcp", "rdma", "auto"]


def flag(name: str) -> str:
    """Return the option of a field. Errors name settings so; it is a key of a file, too, without its first
    two dashes."""
    return "--" + name.replace("_", "-")


def check_address(name: str, address: str) -> None:
    """Raise ValueError unless ``address``, the value of the option ``name``, is HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and 1 <= int(port) <= MAX_PORT):
        raise ValueError(f"{name} {address!r}: expected HOST:PORT with a port in 1 to {MAX_PORT}")


def _checked_networks(entries: tuple[str, ...]) -> tuple[str, ...]:
    PeerList.parse(entries)
    return entries


Networks = Annotated[tuple[str, ...], AfterValidator(_checked_networks)]

MAX_BODY_BYTES = 16 << 20
"""Limit for the body of an HTTP request, at a node and at the router."""
STARTUP_TIMEOUT_SECS = 900.0
"""Time without progress in loading after which ``/liveness`` fails, and limit of the wait for other ranks and
machines of a node. Touching and registering 500 GB of shared memory shows no progress for six minutes."""

OPEN_API = "anybody can use its HTTP API (--api-key-file)"
"""Danger that a service without API keys names in its ``exposure`` warning, with the option that ends it."""


class FrozenSettings(BaseModel):
    """Immutable settings that refuse unknown keys. Fields may begin with pydantic's prefix ``model_``."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class HttpSettings(FrozenSettings):
    """HTTP server and log of a service: the settings that nodes and the router share."""

    host: str = Field("127.0.0.1", description="address that the HTTP server binds")
    api_key_file: Path | None = Field(
        None,
        description="file with API keys, one a line; a request without one of them is answered 401; default: "
        "requests need no key",
    )
    ssl_certfile: Path | None = Field(
        None,
        description="file with the certificate and its chain (PEM); makes the server speak https, and is "
        "read again when it changes; default: http",
    )
    ssl_keyfile: Path | None = Field(
        None,
        description="file with the certificate's key (PEM), without a password; default: the key is in "
        "--ssl-certfile",
    )
    drain_timeout_secs: SecsOrZero = Field(
        15.0,
        description="time that requests in flight have to finish after SIGTERM, in seconds; those that take "
        "longer end with a 503",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of messages that are logged"
    )

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(
                f"--ssl-keyfile {self.ssl_keyfile}: a key serves nothing without --ssl-certfile; give both"
            )
        return self


class TracedSettings(FrozenSettings):
    """Traces of requests, which decode nodes and the router make."""

    otlp_traces_endpoint: CollectorUrl = Field(
        "",
        description="URL of a collector for traces, by OTLP over HTTP (protobuf), such as "
        "http://collector:4318; without a path it is /v1/traces; OTEL_ variables set the rest; default: no "
        "traces",
        title="URL",
    )


class TransportSettings(FrozenSettings):
    """KV transport of a node on this machine. ``hisparse-pd doctor`` takes the same options to check it."""

    host: str = Field("127.0.0.1", description="address that this process listens on")
    device: Device = Field(
        "cpu",
        description="device of the model and the pools of KV on it: cpu, cuda or cuda:N",
        title="cpu|cuda|cuda:N",
    )
    transfer_protocol: TransferProtocol = Field(
        "tcp",
        description="protocol by which KV crosses the network, the same on all nodes; rdma: a node "
        "without it does not start; auto: rdma where it can be used, else tcp",
    )
    ib_device: str = Field(
        "",
        description="RDMA devices for rdma and auto, such as mlx5_0,mlx5_1, which must all be usable; "
        "default: all usable ones, or the nearest of them to a rank's NUMA node if it has one",
    )
    numa: Numa = Field(
        "auto",
        description="NUMA node of a rank's engine, threads and pools; auto: that of its GPU, if the machine "
        "has several NUMA nodes; off: nothing is placed; N or N,N…: one for all ranks of this machine, or "
        "one for each",
        title="auto|off|N[,N...]",
    )
    advertise_host: str = Field(
        "",
        description="address at which peers reach this node, for control messages and KV; default: --host",
    )
    same_host_dir: str = Field(
        "",
        max_length=64,
        description="directory for the decode nodes' sockets that all nodes of one machine see; needed where "
        "containers have separate networks; default: abstract socket names of the network namespace",
        title="DIR",
    )
    allowed_peers: Networks = Field(
        (),
        description="addresses and networks of the other nodes, such as 10.0.0.0/24; no others reach the "
        "bootstrap, control and KV ports; repeatable; default: any address",
        title="NETWORK",
    )

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.host
