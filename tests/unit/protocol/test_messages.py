"""Golden bytes of every control message, and the evolution rule that array-like encoding gives."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import messages
from protocol.messages import (
    Bootstrap,
    RoomDone,
)
from tests.unit.protocol.examples import BOOTSTRAP, TO_DECODE, TO_PREFILL


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


def test_hisparse_keeps_its_place_in_the_bootstrap_message() -> None:
    """What came after it stands behind it."""
    assert Bootstrap.__struct_fields__[5:] == ("hisparse", "attempt", "num_held_tokens")
    assert _fields(BOOTSTRAP)[6:] == [True, 1, 64]


@pytest.mark.parametrize(
    ("num_missing", "without"), [(1, {}), (2, {"attempt": 0}), (3, {"attempt": 0, "hisparse": False})]
)
def test_bootstrap_without_its_last_fields_decodes(num_missing: int, without: dict[str, bool]) -> None:
    shortened = msgspec.msgpack.encode(_fields(BOOTSTRAP)[:-num_missing])
    decoded = messages.to_prefill_decoder.decode(shortened)
    assert decoded == msgspec.structs.replace(BOOTSTRAP, num_held_tokens=0, **without)


def test_a_prefill_node_that_does_not_say_that_it_skips_does_not() -> None:
    """It is of an older release, and would write a whole prompt."""
    registered, _ = TO_DECODE[0]
    shortened = msgspec.msgpack.encode(_fields(registered)[:-1])
    assert messages.to_decode_decoder.decode(shortened) == msgspec.structs.replace(
        registered, skips_held=False
    )


def test_a_registration_that_does_not_name_its_transport_decodes() -> None:
    register, _ = TO_PREFILL[0]
    shortened = msgspec.msgpack.encode(_fields(register)[:-1])
    decoded = messages.to_prefill_decoder.decode(shortened)
    assert decoded == msgspec.structs.replace(register, transfer_protocol="")


def test_a_delivery_that_does_not_tell_of_failed_batches_decodes() -> None:
    """Golden bytes of before there was the field."""
    decoded = messages.to_decode_decoder.decode(bytes.fromhex("950403cd100040cb3fe0000000000000"))
    assert decoded == RoomDone(3, 4096, 64, 0.5, batch_failed=False)


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
        {6: 1},
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


@pytest.mark.parametrize("num_bytes", range(len(messages.encoder.encode(BOOTSTRAP))))
def test_every_truncation_is_refused(num_bytes: int) -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.to_prefill_decoder.decode(messages.encoder.encode(BOOTSTRAP)[:num_bytes])


@given(st.binary(max_size=200))
@settings(derandomize=True, max_examples=500)
def test_arbitrary_bytes_raise_nothing_but_msgspec_errors(frame: bytes) -> None:
    for decoder in (messages.to_prefill_decoder, messages.to_decode_decoder):
        try:
            decoded = decoder.decode(frame)
        except msgspec.MsgspecError:
            continue
        assert messages.encoder.encode(decoded)
