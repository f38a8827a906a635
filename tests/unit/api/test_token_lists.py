"""Lists of token ids that are read with numpy are those that a decoder reads, and get the same ids."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.serving.api.token_lists import read_list

pytestmark = pytest.mark.I7

IDS = st.lists(st.integers(0, 99_999_999) | st.integers(0, 11), min_size=1, max_size=50)


@pytest.mark.parametrize("separator", [",", ", "])
@given(token_ids=IDS)
@example(token_ids=[0, 9, 10, 99, 100, 999, 9_999, 99_999, 999_999, 9_999_999, 10_000_000, 99_999_999])
def test_plain_lists_are_read(separator: str, token_ids: list[int]) -> None:
    text = json.dumps(token_ids, separators=(separator, ":")).encode()
    assert read_list(text[1:-1]) == pack_token_ids(token_ids)


def test_a_blank_may_be_before_the_first_entry_and_some_of_the_others() -> None:
    assert read_list(b" 12,3, 45") == pack_token_ids([12, 3, 45])


@pytest.mark.parametrize(
    "entries",
    [
        *(b"", b" ", b",", b"1,", b",1", b"1,,2", b"1, ,2"),
        *(b"123456789", b"1,2147483647", b"1,4294967297,2"),
        *(b"01", b"1,007", b"00", b"1,00000000"),
        *(b"-1", b"+1", b"1.5", b"1e3", b"1,true", b"null", b'"1"', b"[1]", b"1,[2", b"2]", b"{}"),
        *(b"1 2", b"1,2 ", b"1,  2", b"1,\t2", b"1,\n2", b"1_0", b"1/", b"1:", b"1,\xb2", b"\xef\xbc\x91"),
    ],
)
def test_whatever_else_is_left_to_the_decoder(entries: bytes) -> None:
    assert read_list(entries) is None
    assert read_list(b"5," * 40 + entries) is None


@given(st.text(alphabet='0123456789, -.e[]"\n', max_size=30).map(str.encode) | st.binary(max_size=12))
def test_what_is_read_is_what_a_decoder_reads(entries: bytes) -> None:
    if (packed := read_list(entries)) is not None:
        assert packed == pack_token_ids(msgspec.json.decode(b"[%b]" % entries, type=list[int]))
