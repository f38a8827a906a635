"""Settings of the router, as ``hisparse-pd router`` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hisparse_pd.base.access import exposure
from hisparse_pd.base.settings import OPEN_API, HttpSettings, Port, Secs, SecsOrZero, TracedSettings

RouterPolicy = Literal["round_robin", "least_loaded", "cache_aware"]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]


class RouterSettings(HttpSettings, TracedSettings):
    """The router."""

    port: Port = Field(8000, description="port of the HTTP server")
    prefill: tuple[tuple[str, int | None], ...] = Field(
        description="URL of a prefill node and, if it differs from the node's own, its bootstrap port; "
        "repeatable"
    )
    decode: tuple[str, ...] = Field(description="URL of a decode node; repeatable")
    node_ca_file: Path | None = Field(
        None, description="file with the CA certificates (PEM) of https nodes; default: the system's"
    )
    node_api_key_file: Path | None = Field(
        None,
        description="file whose first key is sent to the nodes; default: the client's key, unless the router "
        "checks keys itself",
    )
    cors_allow_origins: tuple[Origin, ...] = Field(
        (),
        description="origin whose pages may call the API in a browser, such as https://chat.example.com, or "
        "* for any; repeatable; default: only the router's own page may",
    )
    policy: RouterPolicy = Field(
        "round_robin",
        description="how a pair of nodes is chosen for a request; cache_aware: by load, but prompts with the "
        "same beginning go to the same nodes while these have little more to do than the others and, if they "
        "publish KV events, still have its KV",
    )
    health_interval_secs: Secs = Field(5.0, description="interval of a node's health checks, in seconds")
    request_timeout_secs: Secs = Field(
        600.0, description="silence of a node after which its request fails, in seconds"
    )
    max_retries: int = Field(
        1,
        ge=0,
        le=8,
        description="how often a request is sent to another pair, as long as its client has received "
        "nothing: when a node cannot be reached or is not ready, or the prefill node failed",
    )
    resume_timeout_secs: SecsOrZero = Field(
        30.0,
        description="time that a request whose decode node is lost or shuts down may take to find another "
        "pair, in seconds; 0: such a request ends",
    )
    journal_bytes: int = Field(
        256 << 20,
        ge=0,
        description="memory for all streams' journals, in bytes, from which another decode node can resume "
        "them; a stream without room for its journal ends with its node; 0: no stream resumes",
    )

    @model_validator(mode="after")
    def _has_nodes(self) -> Self:
        for name, nodes in (("prefill", self.prefill), ("decode", self.decode)):
            if not nodes:
                raise ValueError(f"--{name}: at least one node is needed")
        return self

    @property
    def exposure(self) -> str | None:
        """Warning about what other machines can do to the router; None if nothing."""
        return exposure((self.host,), () if self.api_key_file is not None else (OPEN_API,))
