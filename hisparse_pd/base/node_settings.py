"""Settings that prefill and decode nodes share: model, ranks and machines, pools, timeouts.

``PrefillSettings`` and ``DecodeSettings`` extend them. A node resolves its settings once, when it starts;
each of its engines gets a copy for its rank (``of_rank``).
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hisparse_pd.base.access import WILDCARD_HOSTS, exposure, is_host
from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.base.settings import MAX_PORT, OPEN_API, HttpSettings, Port, Secs, TransportSettings, flag
from hisparse_pd.base.vocabulary import MAX_RANKS

CacheDtype = Literal["auto", "float32", "bfloat16", "fp8_e4m3"]
AttentionBackend = Literal["auto", "torch", "triton", "flashmla_sparse", "flashmla_kv"]

MAX_HEARTBEAT_FAILURES = 2
"""Heartbeat intervals without a sign of life after which a peer is lost."""
HEALTH_TIMEOUT_SECS = 30.0
"""Silence of an engine after which ``/health`` fails, unless six heartbeat intervals are longer."""

_OPEN_CONTROL = "anybody can register and read the control traffic (--control-key-file)"
_OPEN_KV = "the KV ports, which know no keys, take connections from anywhere (--allowed-peers)"

_OPEN_EVENTS = "subscribers of its KV events read the prompts' token ids (--kv-events-config)"

_PER_MACHINE = {
    *("node_rank", "dist_init_addr", "host", "port", "bootstrap_port", "control_port", "advertise_host"),
    *("model_path", "served_model_name", "control_key_file", "api_key_file", "allowed_peers"),
    *("ssl_certfile", "ssl_keyfile", "device", "ib_device", "numa", "num_threads", "log_level"),
    "otlp_traces_endpoint",
}
"""Settings that may differ between the machines of a node."""


class NodeSettings(HttpSettings, TransportSettings):
    """One node: a service of one or several ranks, on one or several machines."""

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
        "are used, too, one for each pair of a rank and a front",
        title="HOST:PORT",
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
        description="whether KV goes through shared memory between two nodes of one machine; auto: if both "
        "see the same memory, else by --transfer-protocol; off: never",
    )
    control_key_file: Path | None = Field(
        None,
        description="file with the cluster's CURVE secret key (Z85); default: control traffic is not "
        "encrypted",
    )
    room_timeout_secs: Secs = Field(
        300.0,
        description="maximum time that a room waits for its KV, in seconds; a prefill node keeps the room "
        "longer by the time after which a silent peer is lost",
    )
    heartbeat_interval_secs: Secs = Field(
        5.0,
        description="interval at which prefill and decode nodes exchange heartbeats, in seconds, the same on "
        f"all nodes; a peer is lost after {MAX_HEARTBEAT_FAILURES} intervals without a sign of life",
    )
    max_queued_requests: int = Field(
        4096,
        ge=0,
        description="maximum number of samples that wait, beside --max-running-requests; a request beyond it "
        "is answered 429",
    )
    num_threads: int = Field(
        0, ge=0, le=4096, description="CPU threads of torch in each engine; 0: torch's own choice"
    )
    disable_prefix_cache: bool = Field(
        False,
        description="keep no KV of requests that have ended; without this option a later request with the "
        "same beginning uses that KV, and only the rest is computed and sent",
    )
    kv_events_config: str = Field(
        "",
        description="JSON that says where each rank publishes which pages its prefixes have, with vLLM's and "
        'SGLang\'s keys, such as {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5657"}; further keys are topic, hwm, buffer_steps and max_queue_size; rank N\'s ports are '
        "higher by N; default: nothing is published",
        title="JSON",
    )
    verify_rows: bool = Field(
        True,
        description="keep a check of each KV item, and end a request whose attention would read an item "
        "that is not the one that was written",
    )
    debug_checks: bool = Field(False, description="check the integrity of all pools after every step")

    @model_validator(mode="after")
    def _peers_have_an_address(self) -> Self:
        # Checked here so that it fails before the model is loaded, not after.
        if self.reachable_host in WILDCARD_HOSTS:
            raise ValueError(
                f"host {self.reachable_host!r} stands for every address of this machine, and peers connect "
                "to one address; give it as --advertise-host"
            )
        return self

    @model_validator(mode="after")
    def _machines_have_ranks(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes}")
        if self.dp_size % self.nnodes != 0:
            raise ValueError(
                f"--dp-size {self.dp_size} must be a multiple of --nnodes {self.nnodes}: it is the number of "
                "ranks on all machines together, and each machine has the same number"
            )
        if (self.nnodes > 1) != bool(self.dist_init_addr):
            raise ValueError(
                f"--nnodes {self.nnodes} with --dist-init-addr {self.dist_init_addr!r}: a node of several "
                "machines needs both, and a node of a single machine neither"
            )
        if self.dist_init_addr:
            host, port = self.dist_init_host_port
            if not is_host(host) or host in WILDCARD_HOSTS:
                raise ValueError(f"--dist-init-addr {self.dist_init_addr!r}: expected HOST:PORT of a machine")
            num_engine_ports = self.num_fronts * self.dp_size
            if not 1 <= port <= MAX_PORT - num_engine_ports:
                raise ValueError(
                    f"--dist-init-addr {self.dist_init_addr!r}: the port must be from 1 to "
                    f"{MAX_PORT - num_engine_ports}, for {num_engine_ports} ports behind it are taken, too"
                )
        return self

    @model_validator(mode="after")
    def _ranks_have_numa_nodes(self) -> Self:
        num_named, num_ranks = len(self.numa.split(",")), len(self.ranks_here)
        if num_named not in (1, num_ranks):
            raise ValueError(
                f"--numa {self.numa!r} names {num_named} nodes, and this machine has {num_ranks} ranks; name "
                "one node for all, or one a rank"
            )
        return self

    @model_validator(mode="after")
    def _events_have_prefixes(self) -> Self:
        try:
            config = self.kv_events
            config.check_ranks(self.dp_size)
        except ValueError as error:
            raise ValueError(f"--kv-events-config: {error}") from error
        if config.is_on and self.disable_prefix_cache:
            raise ValueError(
                "--kv-events-config publishes what the node keeps for later requests, which "
                "--disable-prefix-cache turns off; leave out one of them"
            )
        return self

    @property
    def kv_events(self) -> KvEventsConfig:
        """The parsed ``kv_events_config``, with rank 0's addresses."""
        return KvEventsConfig.from_json(self.kv_events_config)

    def devices_here(self, rank: int | None = None) -> list[str]:
        """Return the device of each rank of this machine.

        ``rank``: given if these are the settings of ``of_rank(rank)``, so that ``self.device`` is that
        rank's; None if they are the node's, so that it is the first rank's.
        """
        kind, _, number = self.device.partition(":")
        num_ranks = len(self.ranks_here)
        if kind != "cuda" or self.dp_size == 1:
            return [self.device] * num_ranks
        first = int(number or 0) - (0 if rank is None else self.ranks_here.index(rank))
        return [f"cuda:{gpu}" for gpu in range(first, first + num_ranks)]

    @property
    def dist_init_host_port(self) -> tuple[str, int]:
        """Host and port of ``dist_init_addr``; the port is 0 if it is missing or malformed."""
        host, _, port = self.dist_init_addr.rpartition(":")
        return host.strip("[]"), int(port) if port.isascii() and port.isdecimal() and len(port) < 6 else 0

    def ranks_of(self, machine: int) -> range:
        """Return the ranks of the machine with this ``node_rank``."""
        num_each = self.dp_size // self.nnodes
        return range(machine * num_each, (machine + 1) * num_each)

    @property
    def ranks_here(self) -> range:
        """Ranks of this machine."""
        return self.ranks_of(self.node_rank)

    @property
    def num_fronts(self) -> int:
        """Processes that serve the node's HTTP port; decode nodes may have several."""
        return 1

    def of_rank(self, rank: int) -> Self:
        """Return the settings for the engine of one of ``ranks_here``: with its GPU, or on a CPU with its
        share of the cores as ``num_threads``."""
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

    @cached_property
    def model_name(self) -> str:
        """Name of the model in the API. Looked up once: a link in ``model_path`` costs system calls, and may
        point elsewhere later, while the node serves what it has loaded."""
        return self.served_model_name or self.model_path.resolve().name

    @property
    def num_draft_layers(self) -> int | None:
        """Number of the checkpoint's draft layers that are loaded, 0 or 1; None: 1 if it has any. Nodes of
        either kind override this."""
        return 0

    @property
    def heartbeat_timeout_secs(self) -> float:
        """Time without a sign of life after which a peer is lost."""
        return self.heartbeat_interval_secs * MAX_HEARTBEAT_FAILURES

    @property
    def health_timeout_secs(self) -> float:
        """Silence of an engine after which ``/health`` fails."""
        return max(HEALTH_TIMEOUT_SECS, 6 * self.heartbeat_interval_secs)

    def _check_free_memory_is_known(self, name: str, num_tokens: int) -> None:
        """Raise ValueError if the size of a pool comes from free GPU memory, and the node is not on a GPU.

        Validators of the subclasses call it. ``num_tokens``: the size that the setting ``name`` gives; 0
        leaves it to free memory.
        """
        if num_tokens == 0 and not self.device.startswith("cuda"):
            raise ValueError(
                f"{flag(name)} 0: the size comes from free GPU memory with --device cuda only, and this node "
                f"is on {self.device}; give a number of tokens"
            )

    @property
    def exposure(self) -> str | None:
        """Warning about what other machines can do to this node, with the remedies; None if nothing."""
        dangers = {
            OPEN_API: self.api_key_file is None,
            _OPEN_CONTROL: self.control_key_file is None,
            _OPEN_KV: not self.allowed_peers,
            _OPEN_EVENTS: self.kv_events.is_on and self.kv_events.binds,
        }
        return exposure((self.host, self.reachable_host), (text for text, holds in dangers.items() if holds))
