"""Settings of a prefill node, as ``hisparse-pd prefill`` takes them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.settings import (
    MAX_PORT,
    Port,
    Tokens,
    TokensOrAuto,
    TokensOrFree,
    check_address,
    flag,
)

HeldReads = Literal["all", "prompts", "off"]


class PrefillSettings(NodeSettings):
    """One prefill node."""

    bootstrap_port: Port = Field(8998, description="port of the bootstrap endpoint")
    control_port: Port = Field(
        0,
        description="port of the first rank's control socket; further ranks have the following ones; 0: any "
        "free ones",
    )
    chunked_prefill_size: Tokens = Field(2048, description="maximum number of tokens computed in one step")
    kv_pool_tokens: TokensOrFree = Field(
        65536,
        description="token slots in the KV pool, prefix cache included; 0: as many as free GPU memory holds",
    )
    host_cache_tokens: TokensOrAuto = Field(
        0,
        description="token slots of each rank in main memory, where the prefix cache keeps what the KV pool "
        "has no room for; auto: as many as free main memory holds, less --neighbour-host-tokens; 0: none",
        title="INT|auto",
    )
    neighbour_host_tokens: int = Field(
        0,
        ge=0,
        description="token slots in main memory of the decode nodes on this machine, all of their ranks "
        "together, for which --host-cache-tokens auto leaves room; pair adds those of its own",
    )
    read_held: HeldReads = Field(
        "all",
        description="which KV of a prompt is read from the decode node that holds it, where this node has it "
        "nowhere, instead of being computed; all: any whole page; prompts: pages before the first with KV of "
        "decode steps, which on a GPU is rounded differently; off: none",
    )

    kv_store: str = Field(
        "",
        description="HOST:PORT of the master of a Mooncake Store (mooncake_master), which keeps the pages of "
        "the host tier for all prefill nodes; needs --host-cache-tokens; default: none",
        title="HOST:PORT",
    )
    kv_store_gib: float = Field(
        4.0,
        ge=0,
        le=1 << 20,
        description="main memory that each rank lends to --kv-store, in GiB (Mooncake's "
        "global_segment_size); 0: none, if others lend some",
    )

    @property
    def kv_store_bytes(self) -> int:
        """Bytes that each rank lends to the store."""
        return round(self.kv_store_gib * (1 << 30))

    @property
    def num_host_cache_tokens(self) -> int:
        """``host_cache_tokens`` of an engine, which has replaced ``auto`` by a number."""
        assert self.host_cache_tokens != "auto", "an engine chooses the size before anything asks for it"
        return self.host_cache_tokens

    @property
    def num_draft_layers(self) -> int | None:
        return None  # the draft layer is loaded if the checkpoint has one: decode nodes may want its KV

    def of_rank(self, rank: int) -> Self:
        settings = super().of_rank(rank)
        if self.control_port == 0:
            return settings
        return settings.model_copy(update={"control_port": self.control_port + rank})

    @model_validator(mode="after")
    def _ranks_have_control_ports(self) -> Self:
        # Checked here so that it fails before the models are loaded, not after.
        if self.control_port == 0:
            return self
        last = self.control_port + self.dp_size - 1
        taken = (
            f"--control-port {self.control_port} with --dp-size {self.dp_size} takes the ports up to {last}"
        )
        if last > MAX_PORT:
            raise ValueError(f"{taken}, and the highest port is {MAX_PORT}; choose a lower --control-port")
        for name in ("port", "bootstrap_port"):
            if self.control_port <= getattr(self, name) <= last:
                raise ValueError(
                    f"{taken}, and {flag(name)} {getattr(self, name)} is among them; choose another"
                )
        return self

    @model_validator(mode="after")
    def _pool_holds_a_page(self) -> Self:
        self._check_free_memory_is_known("kv_pool_tokens", self.kv_pool_tokens)  # 0 needs a GPU
        if 0 < self.kv_pool_tokens < self.page_size:
            raise ValueError(
                f"--kv-pool-tokens {self.kv_pool_tokens} must be at least --page-size {self.page_size}"
            )
        return self

    @model_validator(mode="after")
    def _host_cache_is_below_a_prefix_cache(self) -> Self:
        if self.host_cache_tokens == "auto":
            if not self.device.startswith("cuda"):
                raise ValueError(
                    f"--host-cache-tokens auto: the KV pool of a node on {self.device} is in main memory, "
                    "too, and its size says how much of that is cache; give a number of tokens"
                )
        elif 0 < self.host_cache_tokens < self.page_size:
            raise ValueError(
                f"--host-cache-tokens {self.host_cache_tokens} must be 0 or at least --page-size "
                f"{self.page_size}"
            )
        if self.host_cache_tokens and self.disable_prefix_cache:
            raise ValueError(
                f"--host-cache-tokens {self.host_cache_tokens} keeps what the prefix cache has, which "
                "--disable-prefix-cache turns off; leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _store_is_below_a_host_tier(self) -> Self:
        if not self.kv_store:
            return self
        check_address("--kv-store", self.kv_store)
        if not self.host_cache_tokens:
            raise ValueError(
                f"--kv-store {self.kv_store} keeps what the host tier has, and there is none; give "
                "--host-cache-tokens, too"
            )
        return self
