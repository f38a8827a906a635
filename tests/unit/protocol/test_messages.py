"""Golden bytes of every control message, and the evolution rule that array-like encoding gives."""

from typing import Any

import msgspec
import pytest

from protocol import messages
from protocol.messages import (
    Bootstrap,
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
    assert _fields(BOOTSTRAP)[-3:] == [1, 64, True]


def test_a_bootstrap_that_does_not_say_is_dense() -> None:
    shortened = msgspec.msgpack.encode(_fields(BOOTSTRAP)[:-1])
    decoded = messages.to_prefill_decoder.decode(shortened)
    assert decoded == msgspec.structs.replace(BOOTSTRAP, hisparse=False)


def test_a_registration_that_does_not_name_its_transport_decodes() -> None:
    register, _ = TO_PREFILL[0]
    shortened = msgspec.msgpack.encode(_fields(register)[:-2])
    decoded = messages.to_prefill_decoder.decode(shortened)
    assert decoded == msgspec.structs.replace(register, transfer_protocol="", lane=None)


def test_nodes_that_know_of_no_lanes_no_drafts_no_rotation_no_row_checks_and_no_splits_decode() -> None:
    """Golden bytes of before there were the fields."""
    register, _ = TO_PREFILL[0]
    decoded = messages.to_prefill_decoder.decode(msgspec.msgpack.encode(_fields(register)[:-1]))
    assert decoded == msgspec.structs.replace(register, lane=None)
    before = "940101a4696e737499a26670a7666c6f617433320403ccc0cc804040a9746f705f7020302e39"
    geometry = msgspec.structs.replace(
        GEOMETRY, index_rotation="", has_row_checks=False, attention_split_tile_size=None
    )
    assert messages.to_decode_decoder.decode(bytes.fromhex(before)) == Registered(1, "inst", geometry)


@pytest.mark.parametrize(
    "socket", ["", "/run/x.sock", "hisparse-pd-lane-../x", "hisparse-pd-lane-" + "0" * 17]
)
def test_a_lane_names_a_socket_of_ours_and_no_path(socket: str) -> None:
    register, _ = TO_PREFILL[0]
    fields = _fields(register)
    fields[-1] = [socket, bytes(32)]
    with pytest.raises(msgspec.MsgspecError):
        messages.to_prefill_decoder.decode(msgspec.msgpack.encode(fields))


def test_a_delivery_that_does_not_tell_of_its_times_decodes() -> None:
    """Golden bytes of before there was the field."""
    decoded = messages.to_decode_decoder.decode(bytes.fromhex("950403cd100040cb3fe0000000000000"))
    assert decoded == RoomDone(3, 4096, 64, 0.5, times=None)


def test_bootstrap_with_a_further_field_decodes() -> None:
    lengthened = msgspec.msgpack.encode([*_fields(BOOTSTRAP), {"a": "later"}])
    assert messages.to_prefill_decoder.decode(lengthened) == BOOTSTRAP


@pytest.mark.parametrize(
    "change",
    [
        {1: -1},
        {1: 2**63},
        {2: 0},
        {3: [[0, 0]]},
        {3: [[-1, 4]]},
        {3: [[1]]},
        {3: "slots"},
        {5: -1},
        {6: b""},
        {6: bytes(15)},
        {6: bytes(17)},
        {6: "text"},
        {9: 1},
        {0: 77},
        {0: "Bootstrap"},
    ],
    ids=str,
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
