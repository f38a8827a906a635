"""Settings of ``hisparse-pd doctor``: those of a planned node's transport, and the peer to measure.

``commands/cli.py`` makes them of the options, and ``command.py`` gets them.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from hisparse_pd.base.settings import Port, Secs, TransportSettings, check_address


class DoctorSettings(TransportSettings):
    """The doctor's settings; a node's own settings keep their names and meanings."""

    host_pool_gib: float = Field(
        0.0, ge=0, le=1 << 20, description="main memory that the node is to register, in GiB; 0: not checked"
    )

    kv_store: str = Field(
        "",
        description="HOST:PORT of the master of the prefill nodes' Mooncake Store, in which an object is "
        "written, read and removed; default: none",
        title="HOST:PORT",
    )
    serve: bool = Field(
        False, description="make no checks, but let the doctor of another machine write to this one"
    )
    port: Port = Field(8997, description="port of --serve; 0: any free one")
    peer: str = Field(
        "",
        description="HOST:PORT of a doctor with --serve, to which this doctor measures the transport; "
        "default: nothing is measured",
        title="HOST:PORT",
    )
    peer_timeout_secs: Secs = Field(
        10.0, description="maximum time to wait for an answer from --peer, in seconds"
    )

    @model_validator(mode="after")
    def _store_is_an_address(self) -> Self:
        if self.kv_store:
            check_address("--kv-store", self.kv_store)
        return self

    @model_validator(mode="after")
    def _peer_is_an_address(self) -> Self:
        host, port = self.peer_address
        if self.peer and not (host and port.isdecimal() and 1 <= int(port) <= 65535):
            raise ValueError(f"--peer {self.peer!r}: expected HOST:PORT with a port in 1 to 65535")
        if self.peer and self.serve:
            raise ValueError(
                "--peer and --serve: one doctor serves and another one measures; leave out one of them"
            )
        return self

    @property
    def peer_address(self) -> tuple[str, str]:
        """Host, without brackets, and port of ``peer``; both empty without one."""
        host, _, port = self.peer.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), port

    @property
    def host_pool_bytes(self) -> int:
        return round(self.host_pool_gib * (1 << 30))
