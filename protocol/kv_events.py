"""The KV events of a rank: which blocks of tokens it has KV of, as msgpack.

A message has three frames: the topic, the batch's sequence number (8 bytes, big endian, from 0), and a
``KvEventBatch``. This is the form of SGLang 0.5.17 and of vLLM up to 0.23, in which structs are arrays and an
event's first element is its name. The fields are those of SGLang 0.5.17, and all of them are always sent;
vLLM's events begin with the same fields. Their order never changes, and decoders ignore further fields.

A block is a page. Its hash stands for its tokens and all tokens before it: equal hashes on two nodes mean
equal beginnings of prompts, whatever the node, its rank or its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Raw, Struct
from msgspec.msgpack import Encoder

from hisparse_pd.protocol.decoding import TypedDecoder

MEDIUM_GPU: Final = "GPU"
MEDIUM_CPU: Final = "CPU_PINNED"
"""Main memory, as SGLang spells it. vLLM writes CPU; Dynamo takes both."""

MAX_MEDIUM_CHARS: Final = 64
"""Longest name of a medium that a subscriber takes."""
_Medium: TypeAlias = Annotated[str, Meta(max_length=MAX_MEDIUM_CHARS)]

SEQ_BYTES: Final = 8
END_OF_REPLAY: Final = b"\xff" * SEQ_BYTES
"""The sequence number behind the last batch of a replay."""


class BlockStored(Struct, frozen=True, array_like=True, tag=True):
    """Blocks can be found from now on. They follow each other, and the first one follows the parent."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """None: the first block begins the prompt."""
    token_ids: list[int]
    """Those of all blocks, ``block_size`` each."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """Where the blocks are: MEDIUM_GPU or MEDIUM_CPU. A block can be in both."""


class HashesStored(Struct, frozen=True, array_like=True, tag="BlockStored"):
    """A ``BlockStored`` for a subscriber that has no use for the tokens: they are not decoded."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Raw
    block_size: int
    lora_id: int | None = None
    medium: _Medium | None = None


class BlockRemoved(Struct, frozen=True, array_like=True, tag=True):
    """Blocks can no longer be found in ``medium``."""

    block_hashes: list[int]
    medium: _Medium | None = None


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag=True):
    """No block can be found, in any medium."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(Struct, frozen=True, array_like=True):
    """Events of one rank, in order."""

    ts: float
    """When the batch was made, in seconds since 1970."""
    events: list[KvEvent]
    data_parallel_rank: int | None = None


BlockChange: TypeAlias = HashesStored | BlockRemoved | AllBlocksCleared


class BlockChanges(Struct, frozen=True, array_like=True):
    """A ``KvEventBatch`` without the tokens."""

    ts: float
    events: list[BlockChange]
    data_parallel_rank: int | None = None


_encoder = Encoder()
kv_events_decoder: TypedDecoder[KvEventBatch] = TypedDecoder(KvEventBatch)
block_changes_decoder: TypedDecoder[BlockChanges] = TypedDecoder(BlockChanges)


def encode_batch(ts: float, events: Iterable[KvEvent], rank: int) -> bytes:
    """Return the frame with ``events`` of ``rank``. ``ts``: see ``KvEventBatch``."""
    return _encoder.encode(KvEventBatch(ts, list(events), rank))


def encode_seq(number: int) -> bytes:
    return number.to_bytes(SEQ_BYTES, "big")
