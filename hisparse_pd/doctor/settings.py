"""Settings of ``hisparse-pd doctor``: what a node on this machine is to be, and the peer to measure."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hisparse_pd.settings import Device, Networks, Port, Secs, TransferProtocol


class DoctorSettings(BaseModel):
    """The first half has the names and meanings of a node's own settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transfer_protocol: TransferProtocol = Field(
        "tcp",
        description="what the node's KV transport is to run on; auto: rdma where it can be used, else tcp",
    )
    ib_device: str = Field(
        "", description="RDMA devices that must all be usable, such as mlx5_0,mlx5_1; default: at least one"
    )
    device: Device = Field("cpu", description="cpu, cuda or cuda:N: that the node is to compute on")
    host: str = Field("127.0.0.1", description="address that --serve listens on")
    advertise_host: str = Field(
        "", description="address that peers are to reach this machine at; default: --host"
    )
    same_host_dir: str = Field(
        "",
        max_length=64,
        description="directory of the sockets by which nodes of one machine share memory; default: names of "
        "the network namespace",
        title="DIR",
    )
    host_pool_gib: float = Field(
        0.0, ge=0, le=1 << 20, description="main memory that the node is to register, in GiB; 0: not checked"
    )

    serve: bool = Field(False, description="check nothing, but let the doctor of another machine write here")
    port: Port = Field(8997, description="port of --serve; 0: any free one")
    allowed_peers: Networks = Field(
        (),
        description="addresses and networks that may write here; repeatable; default: any",
        title="NETWORK",
    )
    peer: str = Field("", description="HOST:PORT of a doctor that serves: measure how fast it is written to")
    peer_timeout_secs: Secs = Field(10.0, description="wait for an answer of --peer at most, in seconds")

    @model_validator(mode="after")
    def _peer_is_an_address(self) -> Self:
        host, port = self.peer_address
        if self.peer and not (host and port.isdecimal() and 1 <= int(port) <= 65535):
            raise ValueError(f"--peer {self.peer!r}: expected HOST:PORT with a port in 1 to 65535")
        if self.peer and self.serve:
            raise ValueError("--peer and --serve: one doctor serves, the other one measures")
        return self

    @property
    def peer_address(self) -> tuple[str, str]:
        host, _, port = self.peer.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), port

    @property
    def reachable_host(self) -> str:
        return self.advertise_host or self.host

    @property
    def host_pool_bytes(self) -> int:
        return round(self.host_pool_gib * (1 << 30))
