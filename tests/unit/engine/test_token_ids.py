"""Token ids are packed as int32 in little endian, whatever the machine; others are refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hisparse_pd.engine import messages
from hisparse_pd.engine.messages import pack_token_ids, unpack_token_ids

LARGEST = 2**31 - 1


def test_ids_are_int32_in_little_endian(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_token_ids([1, 0x01020304, LARGEST])
    assert packed == b"\1\0\0\0\4\3\2\1\xff\xff\xff\x7f"
    assert unpack_token_ids(packed).tolist() == [1, 0x01020304, LARGEST]
    assert (pack_token_ids(()), unpack_token_ids(b"").tolist()) == (b"", [])
    # The other order of bytes, which this machine need not have, is turned round.
    other = "little" if sys.byteorder == "big" else "big"
    monkeypatch.setattr(messages, "sys", SimpleNamespace(byteorder=other))
    assert pack_token_ids([1]) == b"\0\0\0\1"


@pytest.mark.parametrize("token_id", [-1, -(2**31), LARGEST + 1, 2**32 - 1, 2**32, 2**64])
def test_what_is_no_int32_is_no_token_id(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_token_ids([LARGEST, token_id, 0])


def test_the_error_names_the_id_and_the_bound() -> None:
    with pytest.raises(OverflowError, match=r"token id 2147483648 is no int32: 2147483647 is the largest"):
        pack_token_ids([7, LARGEST + 1, 0])


def test_numbers_that_are_not_whole_are_no_token_ids() -> None:
    with pytest.raises(TypeError):
        pack_token_ids([1.5])  # type: ignore[list-item]
