"""Golden bytes of every control message, and the evolution rule of array-like encoding."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hisparse_pd.protocol import messages
from hisparse_pd.protocol.messages import (
    MAX_PROMPT_TOKENS,
    Bootstrap,
    FetchedTokens,
    PrefillTimes,
    Registered,
    RoomDone,
)
from tests.unit.protocol.examples import BOOTSTRAP, GEOMETRY, TO_DECODE, TO_PREFILL


@pytest.mark.parametrize(("message", "golden"), TO_PREFILL, ids=lambda value: type(value).__name__)
def test_golden_bytes_to_prefill(message: messages.ToPrefill, golden: str) -> None:
    assert messages.encoder.encode(message).hex() == golden
    assert messages.to_prefill_decoder.decode(bytes.fromhex(golden)) == message


@pytest.mark.I1
@pytest.mark.parametrize(("message", "golden"), TO_DECODE, ids=lambda value: type(value).__name__)
def test_golden_bytes_to_decode(message: messages.ToDecode, golden: str) -> None:
    assert messages.encoder.encode(message).hex() == golden
    assert messages.to_decode_decoder.decode(bytes.fromhex(golden)) == message


def test_golden_bytes_cover_every_message() -> None:
    assert {type(message) for message, _ in TO_PREFILL} == set(messages.ToPrefill.__args__)
    assert {type(message) for message, _ in TO_DECODE} == set(messages.ToDecode.__args__)


def _fields(message: Any) -> list[Any]:
    fields = msgspec.msgpack.decode(messages.encoder.encode(message))
    assert isinstance(fields, list)
    return fields


def test_hisparse_stands_last_in_the_bootstrap_message() -> None:
    assert Bootstrap.__struct_fields__[-1] == "hisparse"
    assert _fields(BOOTSTRAP)[-4:] == [2, [1, 20], [[[9, 48], [80, 16]], [[128, 64]], 48], True]


REGISTER, _ = TO_PREFILL[0]
OLD_GEOMETRY = replace(GEOMETRY, index_rotation="", has_row_checks=False, attention_split_tile_size=None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (_fields(BOOTSTRAP)[:-1], replace(BOOTSTRAP, hisparse=False)),
        ([*_fields(BOOTSTRAP), {"a": "later"}], BOOTSTRAP),
        (_fields(REGISTER)[:-1], replace(REGISTER, instance_id="")),
        (_fields(REGISTER)[:-2], replace(REGISTER, instance_id="", lane=None)),
        (_fields(REGISTER)[:-3], replace(REGISTER, instance_id="", lane=None, transfer_protocol="")),
    ],
    ids=["dense", "further field", "no run", "no lane", "no transport"],
)
def test_a_message_with_fewer_or_further_fields_decodes(fields: list[Any], expected: Any) -> None:
    assert messages.to_prefill_decoder.decode(msgspec.msgpack.encode(fields)) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "940101a4696e737498a26670a7666c6f617433320403ccc0cc804040",
            Registered(1, "inst", OLD_GEOMETRY),
        ),
        ("950403cd100040cb3fe0000000000000", RoomDone(3, 4096, 64, 0.5, times=None)),
        (
            "960403cd100040cb3fe000000000000093cb3fd0000000000000cb3fe0000000000000cb3ff0000000000000",
            RoomDone(3, 4096, 64, 0.5, PrefillTimes(0.25, 0.5, 1.0), FetchedTokens(host=0)),
        ),
    ],
    ids=["no lanes, drafts, rotation, row checks or splits", "no times", "no fetched tokens"],
)
def test_golden_bytes_of_before_there_were_the_fields_decode(before: str, expected: Any) -> None:
    assert messages.to_decode_decoder.decode(bytes.fromhex(before)) == expected


@pytest.mark.parametrize(
    "socket", ["", "/run/x.sock", "hisparse-pd-lane-../x", "hisparse-pd-lane-" + "0" * 17]
)
def test_a_lane_names_a_socket_of_ours_and_no_path(socket: str) -> None:
    fields = _fields(REGISTER)
    fields[-1] = [socket, bytes(32)]
    with pytest.raises(msgspec.MsgspecError):
        messages.to_prefill_decoder.decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "change",
    [
        {1: -1},
        {1: 2**63},
        {2: [[0, 0]]},
        {2: [[-1, 4]]},
        {2: [[1]]},
        {2: "slots"},
        {4: -1},
        {5: b""},
        {5: bytes(4 * MAX_PROMPT_TOKENS + 1)},
        {5: "text"},
        {6: b""},
        {6: bytes(15)},
        {6: bytes(17)},
        {6: "text"},
        {9: -1},
        {10: [0, 1]},
        {10: [1, 21]},
        {11: 1},
        {0: 77},
        {0: "Bootstrap"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_field_out_of_bounds_is_refused(change: dict[int, Any]) -> None:
    fields = _fields(BOOTSTRAP)
    for position, value in change.items():
        fields[position] = value
    with pytest.raises(msgspec.MsgspecError):
        messages.to_prefill_decoder.decode(msgspec.msgpack.encode(fields))


def test_every_truncation_is_refused() -> None:
    whole = messages.encoder.encode(BOOTSTRAP)
    for num_bytes in range(len(whole)):
        with pytest.raises(msgspec.MsgspecError):
            messages.to_prefill_decoder.decode(whole[:num_bytes])
