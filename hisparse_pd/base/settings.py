"""Settings of the three services: frozen, validated once, the same from the command line and from a file.

Each field's description is the help of its option, and gives its unit. ``hisparse_pd.commands.cli`` turns the
fields into options (``page_size`` is ``--page-size``) and reads the same names from a TOML or YAML file.
Unknown keys and bad values raise ``pydantic.ValidationError``.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from hisparse_pd.base.access import WILDCARD_HOSTS, PeerList, exposure, is_host
from hisparse_pd.base.vocabulary import MAX_DRAFTS, MAX_RANKS

MAX_PORT = 65535
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Tokens = Annotated[int, Field(ge=1, le=1 << 40)]
TokensOrFree = Annotated[int, Field(ge=0, le=1 << 40)]
RouterPolicy = Literal["round_robin", "least_loaded", "cache_aware"]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]
CollectorUrl = Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
Numa = Annotated[str, Field(pattern=r"^(auto|off|[0-9]{1,4}(,[0-9]{1,4})*)$")]
Secs = Annotated[float, Field(gt=0, le=86400)]
DrainSecs = Annotated[float, Field(ge=0, le=86400)]
TransferProtocol = Literal["tcp", "rdma", "auto"]
CacheDtype = Literal["auto", "float32", "bfloat16", "fp8_e4m3"]
AttentionBackend = Literal["auto", "torch", "triton", "flashmla_sparse", "flashmla_kv"]


def _networks(entries: tuple[str, ...]) -> tuple[str, ...]:
    PeerList.parse(entries)
    return entries


Networks = Annotated[tuple[str, ...], AfterValidator(_networks)]

STREAMS_A_FRONT = 256
"""Streams for which a node starts one front: their tokens of one step take a process some 10 ms."""
MAX_FRONTS = 64
MAX_BODY_BYTES = 16 << 20
"""Limit for the body of an HTTP request, at a node and at the router."""
MAX_HEARTBEAT_FAILURES = 2
"""Heartbeat intervals without a sign of life after which a peer is lost."""
HEALTH_TIMEOUT_SECS = 30.0
"""Silence of an engine after which ``/health`` fails, unless six heartbeat intervals are longer."""
STARTUP_TIMEOUT_SECS = 900.0
"""Time without progress in loading after which ``/liveness`` fails, and limit of the wait for other ranks and
machines of a node. Touching and registering 500 GB of shared memory shows no progress for six minutes."""

_OPEN_API = "anybody can use its HTTP API (--api-key-file)"
_OPEN_CONTROL = "anybody can register and read the control traffic (--control-key-file)"
_OPEN_KV = "the KV ports, which know no keys, take connections from anywhere (--allowed-peers)"


class HisparsePolicy(StrEnum):
    """The mode of requests without the flag ``hisparse``; a request's own flag always wins."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


_PER_MACHINE = {
    *("node_rank", "dist_init_addr", "host", "port", "bootstrap_port", "control_port", "advertise_host"),
    *("model_path", "served_model_name", "control_key_file", "api_key_file", "allowed_peers"),
    *("ssl_certfile", "ssl_keyfile", "device", "ib_device", "numa", "num_threads", "log_level"),
    "otlp_traces_endpoint",
}
"""Settings that may differ between the machines of a node."""


class FrozenSettings(BaseModel):
    """Immutable settings that refuse unknown keys. Fields may begin with pydantic's prefix ``model_``."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class _Settings(FrozenSettings):
    """Settings of every service, since each speaks HTTP."""

    host: str = Field("127.0.0.1", description="address that the HTTP server binds")
    api_key_file: Path | None = Field(
        None,
        description="file with API keys, one a line, of which each HTTP request needs one; default: requests "
        "need no key",
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
    drain_timeout_secs: DrainSecs = Field(
        15.0,
        description="time that requests in flight have to finish after SIGTERM, in seconds; later ones end "
        "with a 503",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of messages that are logged"
    )

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(
                f"ssl_keyfile {self.ssl_keyfile}: a key serves nothing without ssl_certfile; give both"
            )
        return self


class _TracedSettings(FrozenSettings):
    """Settings of services that make traces of requests."""

    otlp_traces_endpoint: CollectorUrl = Field(
        "",
        description="URL of a collector for traces, by OTLP over HTTP (protobuf), such as "
        "http://collector:4318; without a path it is /v1/traces; OTEL_ variables set the rest; default: no "
        "traces",
        title="URL",
    )


class TransportSettings(FrozenSettings):
    """Settings of a node's KV transport on this machine, which the doctor takes, too."""

    host: str = Field("127.0.0.1", description="address that this process listens on")
    device: Device = Field("cpu", description="device of the model and the device pool: cpu, cuda or cuda:N")
    transfer_protocol: TransferProtocol = Field(
        "tcp",
        description="protocol of the KV transport, the same on all nodes; rdma: refuse to start without it; "
        "auto: rdma where it can be used, else tcp",
    )
    ib_device: str = Field(
        "",
        description="RDMA devices for rdma and auto, such as mlx5_0,mlx5_1, which must all be usable; "
        "default: all usable ones, or the nearest of them to a rank's NUMA node if it has one",
    )
    numa: Numa = Field(
        "auto",
        description="NUMA node of a rank's engine, threads and pools; auto: that of its GPU, where the "
        "machine has several; off: nothing is placed; N or N,N…: one for all ranks of this machine, or one "
        "for each",
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


class NodeSettings(_Settings, TransportSettings):
    """Settings that prefill and decode nodes share."""

    model_path: Path = Field(description="directory of the checkpoint in the Hugging Face layout")
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="source of the weights, the same on all nodes; auto: the checkpoint; dummy: random "
        "weights, for measurements, which need only the checkpoint's configuration and tokenizer",
    )
    served_model_name: str = Field(
        "", description="name of the model in the API; default: the last part of --model-path"
    )
    port: Port = Field(30000, description="port of the HTTP server")
    page_size: int = Field(64, ge=1, le=65536, description="token slots in a page")
    max_running_requests: int = Field(64, ge=1, le=65536, description="maximum number of requests in a batch")
    context_length: int = Field(
        0, ge=0, description="maximum of a request's prompt plus output, in tokens; 0: the model's own"
    )
    kv_cache_dtype: CacheDtype = Field(
        "auto", description="format of the KV items, the same on all nodes; auto: --dtype"
    )
    indexer_cache_dtype: CacheDtype = Field(
        "auto", description="format of the indexer keys, the same on all nodes; auto: that of the KV items"
    )
    attention_backend: AttentionBackend = Field(
        "auto", description="implementation of the sparse attention; auto: the fastest that runs here"
    )
    attention_split_tile_size: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="positions in one split of a query's attention in decode steps on a GPU, the same on all "
        "nodes; small splits are faster for few requests and slower for many; 0: queries are not split; "
        "default: 512 with FlashMLA, 256 with Triton",
    )
    dp_size: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="number of ranks: engine processes of this node, each with its own requests and pools, "
        "its own GPU from --device on, and its share of the routed experts; sizes of pools and batches are "
        "per rank",
    )
    nnodes: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="number of machines of this node, each with the same number of ranks; the node is "
        "started on every one of them, with the same settings",
    )
    node_rank: int = Field(
        0,
        ge=0,
        lt=MAX_RANKS,
        description="number of this machine, from 0 to --nnodes - 1; machine 0 has the HTTP port",
    )
    dist_init_addr: str = Field(
        "",
        description="HOST:PORT of machine 0 where the ranks of several machines meet; the following ports "
        "are used, too, one for each rank and front",
    )
    rank_exchange: Literal["auto", "nccl"] = Field(
        "auto",
        description="how ranks on GPUs exchange tokens in each layer of experts; auto: over each other's "
        "memory if all are on one machine and each reaches all others, else by NCCL",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="dtype of weights and activations; auto: float32 on cpu, else the checkpoint's"
    )
    mem_fraction_static: float = Field(
        0.85,
        gt=0,
        lt=1,
        description="share of the GPU's memory for weights, pools and tables together, if the node chooses "
        "the size of the device pool",
    )
    same_host_lane: Literal["auto", "off"] = Field(
        "auto",
        description="shared memory as the way of KV between two nodes of one machine; auto: used if both see "
        "the same memory, else --transfer-protocol; off: not used",
    )
    control_key_file: Path | None = Field(
        None,
        description="file with the cluster's CURVE secret key (Z85); default: control traffic is not "
        "encrypted",
    )
    room_timeout_secs: Secs = Field(
        300.0,
        description="maximum time that a room waits for its KV, in seconds; a prefill node keeps the room "
        "longer by the heartbeat limit",
    )
    heartbeat_interval_secs: Secs = Field(
        5.0,
        description="interval of a decode node's heartbeats, in seconds, the same on all nodes; a peer is "
        f"lost after {MAX_HEARTBEAT_FAILURES} intervals without a sign of life",
    )
    max_queued_requests: int = Field(
        4096,
        ge=0,
        description="maximum number of samples that wait beside --max-running-requests; requests beyond it "
        "are answered 429",
    )
    num_threads: int = Field(
        0, ge=0, le=4096, description="CPU threads of torch in each engine; 0: torch's own choice"
    )
    disable_prefix_cache: bool = Field(
        False,
        description="keep no KV of requests that have ended; if it is kept, a request with the same "
        "beginning uses it: a prefill node computes only the rest, and only the rest is sent to a decode "
        "node",
    )
    verify_rows: bool = Field(
        True,
        description="keep a check of each KV item, and end a request whose attention would read an item "
        "that is not the one that was written",
    )
    debug_checks: bool = Field(False, description="check the integrity of all pools after every step")

    @model_validator(mode="after")
    def _peers_have_an_address(self) -> Self:
        # The engine would notice, but only once the model is loaded.
        if self.reachable_host in WILDCARD_HOSTS:
            raise ValueError(
                f"host {self.reachable_host!r} is every address of this machine, and peers need one; give "
                "--advertise-host"
            )
        return self

    @model_validator(mode="after")
    def _machines_have_ranks(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank {self.node_rank} must be below nnodes {self.nnodes}")
        if self.dp_size % self.nnodes != 0:
            raise ValueError(
                f"dp_size {self.dp_size} must be a multiple of nnodes {self.nnodes}: the ranks of all "
                "machines together, as many on each"
            )
        if (self.nnodes > 1) != bool(self.dist_init_addr):
            raise ValueError(
                f"nnodes {self.nnodes} with dist_init_addr {self.dist_init_addr!r}: a node of several "
                "machines needs both, one of a single machine neither"
            )
        if self.dist_init_addr:
            host, port = self.meeting
            if not is_host(host) or host in WILDCARD_HOSTS:
                raise ValueError(f"dist_init_addr {self.dist_init_addr!r}: expected HOST:PORT of a machine")
            num_engine_ports = self.num_fronts * self.dp_size
            if not 1 <= port <= MAX_PORT - num_engine_ports:
                raise ValueError(
                    f"dist_init_addr {self.dist_init_addr!r}: the port must be from 1 to "
                    f"{MAX_PORT - num_engine_ports}, for {num_engine_ports} ports behind it are taken, too"
                )
        return self

    @model_validator(mode="after")
    def _ranks_have_numa_nodes(self) -> Self:
        num_named, num_ranks = len(self.numa.split(",")), len(self.ranks_here)
        if num_named not in (1, num_ranks):
            raise ValueError(
                f"numa {self.numa!r} names {num_named} nodes, and this machine has {num_ranks} ranks; name "
                "one node for all, or one a rank"
            )
        return self

    def devices_here(self, rank: int | None = None) -> list[str]:
        """Return the device of each of ``ranks_here``. ``device`` is that of ``rank``, or of the first."""
        kind, _, number = self.device.partition(":")
        if kind != "cuda" or self.dp_size == 1:
            return [self.device] * len(self.ranks_here)
        first = int(number or 0) - (0 if rank is None else self.ranks_here.index(rank))
        return [f"cuda:{first + position}" for position in range(len(self.ranks_here))]

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of ``dist_init_addr``; the port is 0 if none is given."""
        host, _, port = self.dist_init_addr.rpartition(":")
        return host.strip("[]"), int(port) if port.isascii() and port.isdecimal() and len(port) < 6 else 0

    def ranks_of(self, machine: int) -> range:
        """Return the ranks of the machine with this ``node_rank``."""
        num_each = self.dp_size // self.nnodes
        return range(machine * num_each, (machine + 1) * num_each)

    @property
    def ranks_here(self) -> range:
        return self.ranks_of(self.node_rank)

    @property
    def num_fronts(self) -> int:
        """Processes that serve the node's HTTP port."""
        return 1

    def of_rank(self, rank: int) -> Self:
        """Return the settings for the engine of one of ``ranks_here``: its GPU, or its share of the CPU."""
        if self.dp_size == 1:
            return self
        if self.device.startswith("cuda"):
            return self.model_copy(update={"device": self.devices_here()[self.ranks_here.index(rank)]})
        num_threads = self.num_threads or max(1, (os.cpu_count() or 1) // len(self.ranks_here))
        return self.model_copy(update={"num_threads": num_threads})

    @property
    def of_all_machines(self) -> dict[str, Any]:
        """Settings that must be the same on every machine of a node, by name."""
        return self.model_dump(mode="json", exclude=_PER_MACHINE)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path.resolve().name

    @property
    def num_draft_layers(self) -> int | None:
        """Number of draft layers that the node runs, as ``core/model/spec.py``'s ``load_spec`` takes it."""
        return 0

    @property
    def heartbeat_timeout_secs(self) -> float:
        """Time without a sign of life after which a peer is lost."""
        return self.heartbeat_interval_secs * MAX_HEARTBEAT_FAILURES

    @property
    def health_timeout_secs(self) -> float:
        return max(HEALTH_TIMEOUT_SECS, 6 * self.heartbeat_interval_secs)

    def _check_free_memory_is_known(self, name: str, num_tokens: int) -> None:
        """Raises ValueError if a pool is to be sized by free GPU memory and the node is not on a GPU."""
        if num_tokens == 0 and not self.device.startswith("cuda"):
            raise ValueError(
                f"{name} 0: the size comes from free GPU memory with --device cuda only, and this node is on "
                f"{self.device}; give a number of tokens"
            )

    @property
    def exposure(self) -> str | None:
        """Warning about what other machines can do to this node, with the remedies; None if nothing."""
        dangers = {
            _OPEN_API: self.api_key_file is None,
            _OPEN_CONTROL: self.control_key_file is None,
            _OPEN_KV: not self.allowed_peers,
        }
        return exposure((self.host, self.reachable_host), (text for text, holds in dangers.items() if holds))


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

    @property
    def num_draft_layers(self) -> int | None:
        return None

    def of_rank(self, rank: int) -> Self:
        settings = super().of_rank(rank)
        if self.control_port == 0:
            return settings
        return settings.model_copy(update={"control_port": self.control_port + rank})

    @model_validator(mode="after")
    def _ranks_have_control_ports(self) -> Self:
        # The engines would notice, but only once the model is loaded.
        if self.control_port == 0:
            return self
        last = self.control_port + self.dp_size - 1
        what = f"control_port {self.control_port} with dp_size {self.dp_size} takes the ports up to {last}"
        if last > MAX_PORT:
            raise ValueError(f"{what}, and the last one there is is {MAX_PORT}; choose a lower control_port")
        for name in ("port", "bootstrap_port"):
            if self.control_port <= getattr(self, name) <= last:
                raise ValueError(f"{what}, and {name} {getattr(self, name)} is among them; choose another")
        return self

    @model_validator(mode="after")
    def _pool_holds_a_page(self) -> Self:
        self._check_free_memory_is_known("kv_pool_tokens", self.kv_pool_tokens)
        if 0 < self.kv_pool_tokens < self.page_size:
            raise ValueError(
                f"kv_pool_tokens {self.kv_pool_tokens} must be at least page_size {self.page_size}"
            )
        return self


class DecodeSettings(NodeSettings, _TracedSettings):
    """One decode node."""

    default_max_tokens: int = Field(
        0,
        ge=0,
        description="maximum number of tokens in the answer to a chat without max_tokens, the same on all "
        "decode nodes; 0: as many as context and pools leave",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="temperature, top_p and top_k of a request that does not set them, the same on all "
        "decode nodes; model: those in the checkpoint's generation_config.json; openai: 1, 1 and no top_k",
    )
    chat_control_tokens: Literal["template", "anyone"] = Field(
        "template",
        description="who may write control tokens in chats, the same on all decode nodes; template: only the "
        "model's chat template, and what clients write is text; anyone: clients, too, who can then forge "
        "messages",
    )
    api_server_count: int = Field(
        0,
        ge=0,
        le=MAX_FRONTS,
        description="number of front processes, which serve the node's HTTP port together; 0: one for every "
        f"{STREAMS_A_FRONT} requests that may run, which are --dp-size times --max-running-requests",
    )
    hisparse: HisparsePolicy = Field(
        HisparsePolicy.AUTO,
        description="mode of requests without the flag hisparse; auto: dense while the device pool has room",
    )
    device_buffer_size: TokensOrFree = Field(
        0,
        description="maximum size of a request's hot buffer, in tokens; 0: 4096, or what the drafts of a "
        "step need",
    )
    host_pool_tokens: Tokens = Field(262144, description="token slots in the registered host pool")
    device_pool_tokens: TokensOrFree = Field(
        65536, description="token slots in the device pool; 0: as many as free GPU memory holds"
    )
    quarantine_secs: Secs = Field(
        60.0,
        description="time before slots or pages of a failed write are reused, in seconds; more than the 30 "
        "seconds for which Mooncake may still write",
    )
    index_pool_tokens: int = Field(
        0, ge=0, description="token slots in the indexer-key pool; 0: host pool plus device pool"
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=1024,
        description="number of tokens that are sent to a client together; larger values save the servers "
        "work when hundreds of requests stream; a request's first and last tokens never wait",
    )
    cuda_graph_max_bs: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="largest batch for which a CUDA graph is captured; 0: no graphs; default: "
        "--max-running-requests",
    )
    micro_batch_min_bs: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="number of hisparse requests from which on a GPU splits a batch in two, so that one half "
        "copies misses while the other computes; 0: never split; default: the number from which on this is "
        "faster, which the node measures when it starts",
    )
    speculative_num_steps: int = Field(
        0,
        ge=0,
        le=MAX_DRAFTS,
        description="maximum number of drafts: tokens that the checkpoint's draft layer guesses in a step "
        "and the next step verifies; the node chooses how many, by how often they were right; 0: no drafts",
    )

    @property
    def num_fronts(self) -> int:
        """Processes that serve the node's HTTP port: ``api_server_count``, or its default."""
        by_size = -(-self.dp_size * self.max_running_requests // STREAMS_A_FRONT)
        return self.api_server_count or min(by_size, MAX_FRONTS)

    @model_validator(mode="after")
    def _device_pool_can_be_sized(self) -> Self:
        self._check_free_memory_is_known("device_pool_tokens", self.device_pool_tokens)
        return self

    @property
    def num_draft_layers(self) -> int | None:
        return 1 if self.speculative_num_steps else 0

    @model_validator(mode="after")
    def _positions_of_a_step_are_in_two_pages(self) -> Self:
        if self.page_size < self.speculative_num_steps + 1:
            raise ValueError(
                f"speculative_num_steps {self.speculative_num_steps} needs a page_size of at least "
                f"{self.speculative_num_steps + 1}, and it is {self.page_size}"
            )
        return self

    @property
    def graph_batches(self) -> list[int]:
        """Batch sizes for which CUDA graphs are captured, smallest first; empty: no graphs."""
        most = self.max_running_requests
        if self.cuda_graph_max_bs is not None:
            most = min(self.cuda_graph_max_bs, most)
        ours = {1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, most + 1, 32), most}
        return sorted(size for size in ours if 0 < size <= most)


class RouterSettings(_Settings, _TracedSettings):
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
        "same beginning go to the same nodes while these have little more to do than the others",
    )
    health_interval_secs: Secs = Field(5.0, description="interval of a node's health checks, in seconds")
    request_timeout_secs: Secs = Field(
        600.0, description="silence of a node after which its request fails, in seconds"
    )
    max_retries: int = Field(
        1,
        ge=0,
        le=8,
        description="how often a request that its client has nothing of yet is sent to another pair "
        "because a node cannot be reached, is not ready, or, for a prefill node, failed",
    )
    resume_timeout_secs: DrainSecs = Field(
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
                raise ValueError(f"{name}: at least one node is needed")
        return self

    @property
    def exposure(self) -> str | None:
        """Warning about what other machines can do to the router; None if nothing."""
        return exposure((self.host,), () if self.api_key_file is not None else (_OPEN_API,))
