"""The bytes of KV events, written out by hand from SGLang 0.5.17 and vLLM 0.23."""

from __future__ import annotations

import pytest

from hisparse_pd.protocol.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    encode_batch,
    encode_seq,
    kv_events_decoder,
)

TS = bytes.fromhex("cb 41 da 61 f2 a0 20 00 00")  # 1770506880.5

STORED = BlockStored([5, (1 << 63) - 1], 300, [7, 70_000, 1, 2], 2, medium="GPU")
STORED_BYTES = bytes.fromhex(
    "97"  # an array of 7: tag, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium
    "ab 42 6c 6f 63 6b 53 74 6f 72 65 64"  # "BlockStored"
    "92 05 cf 7f ff ff ff ff ff ff ff"
    "cd 01 2c"
    "94 07 ce 00 01 11 70 01 02"
    "02"
    "c0"  # no LoRA
    "a3 47 50 55"  # "GPU"
)
FIRST = BlockStored([1], None, [3], 1, medium="CPU_PINNED")
FIRST_BYTES = bytes.fromhex(
    "97 ab 42 6c 6f 63 6b 53 74 6f 72 65 64 91 01 c0 91 03 01 c0 aa 43 50 55 5f 50 49 4e 4e 45 44"
)
REMOVED = BlockRemoved([5, 6], "GPU")
REMOVED_BYTES = bytes.fromhex("93 ac 42 6c 6f 63 6b 52 65 6d 6f 76 65 64 92 05 06 a3 47 50 55")
CLEARED_BYTES = bytes.fromhex("91 b0 41 6c 6c 42 6c 6f 63 6b 73 43 6c 65 61 72 65 64")


@pytest.mark.parametrize(
    ("events", "array"),
    [
        ([STORED], "91" + STORED_BYTES.hex()),
        ([FIRST], "91" + FIRST_BYTES.hex()),
        ([REMOVED], "91" + REMOVED_BYTES.hex()),
        ([AllBlocksCleared()], "91" + CLEARED_BYTES.hex()),
        ([], "90"),
        ([AllBlocksCleared(), REMOVED], "92" + CLEARED_BYTES.hex() + REMOVED_BYTES.hex()),
    ],
)
def test_a_batch_is_time_events_and_rank(events: list[KvEvent], array: str) -> None:
    payload = b"\x93" + TS + bytes.fromhex(array) + b"\x03"
    assert encode_batch(1770506880.5, events, 3) == payload
    batch = kv_events_decoder.decode(payload)
    assert (batch.ts, batch.events, batch.data_parallel_rank) == (1770506880.5, events, 3)


def test_fields_that_later_releases_add_behind_are_ignored() -> None:
    longer = b"\x98" + STORED_BYTES[1:] + b"\xa4lora"
    payload = b"\x94" + TS + b"\x91" + longer + b"\x00\xc0"
    assert kv_events_decoder.decode(payload).events == [STORED]


def test_numbers_are_eight_bytes() -> None:
    assert encode_seq(258) == bytes.fromhex("00 00 00 00 00 00 01 02")
    assert int.from_bytes(END_OF_REPLAY, "big", signed=True) == -1
