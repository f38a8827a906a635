"""Settings of a decode node, as ``hisparse-pd decode`` takes them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.settings import Secs, Tokens, TokensOrFree, TracedSettings
from hisparse_pd.base.vocabulary import MAX_DRAFTS

STREAMS_A_FRONT = 256
"""Streams for which a node starts one front process. It writes their tokens of one step in some 10 ms."""
MAX_FRONTS = 64


class HisparsePolicy(StrEnum):
    """The mode of requests without the flag ``hisparse``; a request's own flag always wins."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class DecodeSettings(NodeSettings, TracedSettings):
    """One decode node."""

    default_max_tokens: int = Field(
        0,
        ge=0,
        description="maximum number of tokens in the answer to a chat without max_tokens, the same on all "
        "decode nodes; 0: as many as context and pools leave",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="temperature, top_p, top_k, min_p and repetition_penalty of a request that does not set "
        "them, the same on all decode nodes; model: those in the checkpoint's generation_config.json; "
        "openai: 1, 1, none, 0 and 1",
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
        description="mode of requests without the field hisparse; auto: the node chooses for each request, "
        "dense while the device pool has room",
    )
    device_buffer_size: TokensOrFree = Field(
        0,
        description="bound on the entries of a request's hot buffer, in tokens; 0: 4096, or what the drafts "
        "of a step need, and more while device memory is free",
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
    idle_keys: Literal["auto", "host", "device"] = Field(
        "auto",
        description="where held prefixes keep their indexer keys while no request uses them; device: in the "
        "index pool alone, which gives prefixes up when it is short; host: in main memory, too, where the "
        "keys of all tokens of the host pool have room, and the pages that dense requests leave are copied "
        "to the host pool; auto: host if --index-pool-tokens is less than --host-pool-tokens",
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=1024,
        description="number of tokens that a stream's chunk holds; larger values save work when hundreds of "
        "requests stream; a request's first and last tokens never wait",
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
        description="least number of hisparse requests for which a GPU splits a batch in two, so that one "
        "half copies misses while the other computes; 0: never split; default: the least number for which "
        "this is faster, which the node measures when it starts",
    )
    speculative_num_steps: int = Field(
        0,
        ge=0,
        le=MAX_DRAFTS,
        description="maximum number of drafts: tokens that the checkpoint's draft layer guesses in a step "
        "and the next step verifies; the node chooses how many, by how often they were right; 0: no drafts",
    )

    @property
    def keeps_idle_keys(self) -> bool:
        """Whether main memory keeps the indexer keys of held prefixes, too."""
        if self.disable_prefix_cache or self.idle_keys == "device":
            return False
        return self.idle_keys == "host" or 0 < self.index_pool_tokens < self.host_pool_tokens

    @property
    def host_tokens_here(self) -> int:
        """Token slots that the ranks of this machine have in main memory together. Each takes the bytes of a
        token's KV, indexer keys and row checks at most."""
        device_tokens = 0 if self.device.startswith("cuda") else self.device_pool_tokens
        return len(self.ranks_here) * (self.host_pool_tokens + device_tokens)

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
    def num_draft_layers(self) -> int:
        """Draft layers to load (see ``NodeSettings``): one if steps may have drafts, or else none."""
        return 1 if self.speculative_num_steps else 0

    @model_validator(mode="after")
    def _positions_of_a_step_are_in_two_pages(self) -> Self:
        # Kernels look for a step's newest token and its drafts in at most two pages.
        if self.page_size < self.speculative_num_steps + 1:
            raise ValueError(
                f"--speculative-num-steps {self.speculative_num_steps} needs a --page-size of at least "
                f"{self.speculative_num_steps + 1}, and it is {self.page_size}"
            )
        return self

    @property
    def graph_batches(self) -> list[int]:
        """Batch sizes for which CUDA graphs are captured, smallest first; empty: no graphs."""
        largest = self.max_running_requests
        if self.cuda_graph_max_bs is not None:
            largest = min(self.cuda_graph_max_bs, largest)
        # A batch is padded to the next captured size, so gaps are small where steps are short.
        sizes = {1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, largest + 1, 32), largest}
        return sorted(size for size in sizes if 0 < size <= largest)
