"""The aux record: every value comes back, and only the room's own whole record is accepted."""

import numpy as np
import pytest

from hisparse_pd.transfer.aux_record import AuxLayout, AuxMismatch

LAYOUT = AuxLayout(num_index_groups=3, index_topk=8)
HINT = np.arange(24, dtype=np.int32).reshape(3, 8) - 1
ROOM = 2**63 - 1


def packed(room: int = ROOM) -> np.ndarray:
    slot = np.full(LAYOUT.slot_bytes, 0xAB, np.uint8)
    LAYOUT.pack_into(slot, room, HINT)
    return slot


def test_every_value_comes_back() -> None:
    record = LAYOUT.unpack(packed(), ROOM)
    assert record.room == ROOM
    assert record.hint is not None
    np.testing.assert_array_equal(record.hint, HINT)
    assert record.hint.dtype == np.int32


def test_a_hint_is_optional() -> None:
    slot = bytearray(LAYOUT.slot_bytes)
    LAYOUT.pack_into(slot, 0)
    assert LAYOUT.unpack(bytes(slot), 0).hint is None


def test_the_record_is_copied_out() -> None:
    slot = packed()
    record = LAYOUT.unpack(slot, ROOM)
    slot[:] = 0
    assert record.hint is not None
    np.testing.assert_array_equal(record.hint, HINT)


def test_slots_are_whole_cache_lines_and_the_rest_is_left_alone() -> None:
    assert LAYOUT.slot_bytes % 64 == 0
    assert LAYOUT.record_bytes == 32 + 3 * 8 * 4
    assert (packed()[LAYOUT.record_bytes :] == 0xAB).all()


@pytest.mark.I7
def test_one_flipped_bit_anywhere_is_found() -> None:
    for offset in range(LAYOUT.record_bytes):
        slot = packed()
        slot[offset] ^= 1
        with pytest.raises(AuxMismatch):
            LAYOUT.unpack(slot, ROOM)


def test_nothing_but_the_rooms_own_record_is_accepted() -> None:
    """An empty slot, a cleared slot, another room's record and a record of another geometry are refused."""
    cleared = packed()
    LAYOUT.clear(cleared)
    wider = AuxLayout(num_index_groups=3, index_topk=9)
    of_wider = np.zeros(wider.slot_bytes, np.uint8)
    wider.pack_into(of_wider, 7)
    for slot, why in (
        (bytes(LAYOUT.slot_bytes), "no aux record of room 7"),
        (cleared, "no aux record of room 7"),
        (packed(room=6), "expected the aux record of room 7, found that of room 6"),
        (of_wider, "damaged"),
    ):
        with pytest.raises(AuxMismatch, match=why):
            LAYOUT.unpack(slot, 7)


def test_a_hint_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hint has shape \(2, 8\), expected \(3, 8\)"):
        LAYOUT.pack_into(bytearray(LAYOUT.slot_bytes), ROOM, HINT[:2])


def test_a_slot_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="aux slot of 10 bytes"):
        LAYOUT.unpack(bytes(10), ROOM)
