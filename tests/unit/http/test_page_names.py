"""Names of a prompt's pages: which pages have one, and what is read of a header."""

from __future__ import annotations

import pytest

from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys, block_hash, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.serving.http.page_names import PageNames, decode_names, encode_names

PAGE = 4
PROMPT = pack_token_ids(range(100, 150))
KEYS = PromptKeys.of(NO_ISOLATION, PROMPT, PAGE)
HASHES = list(map(block_hash, KEYS.keys))


@pytest.mark.parametrize(
    ("num_shared_tokens", "counts"),
    [
        (0, ()),
        (3, ()),
        (4, (1,)),
        (15, (1, 2, 3)),
        (16, (1, 2, 4)),
        (27, (1, 2, 4, 6)),
        (48, (1, 2, 4, 8, 12)),
    ],
)
def test_powers_of_two_and_the_last_shared_page_have_names(
    num_shared_tokens: int, counts: tuple[int, ...]
) -> None:
    value = encode_names(KEYS, 50, num_shared_tokens)
    expected = PageNames(PAGE, 50, tuple((count, HASHES[count - 1]) for count in counts)) if counts else None
    assert decode_names(value) == expected
    assert bool(value) == bool(counts)


def test_a_prompt_with_an_isolation_key_has_no_names() -> None:
    assert encode_names(PromptKeys.of(root_of("salt"), PROMPT, PAGE), 50, 48) == b""


@pytest.mark.parametrize(
    ("num_tokens", "count"), [(0, None), (3.9, None), (4, 1), (11, 2), (27, 4), (28, 4), (48, 12), (100, 12)]
)
def test_the_last_name_within_a_beginning(num_tokens: float, count: int | None) -> None:
    names = decode_names(encode_names(KEYS, 50, 48))
    assert names is not None
    assert names.after(num_tokens) == (None if count is None else HASHES[count - 1])


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"1", b"{}", b"[0,5,[]]", b"[4,0,[]]", b'[4,5,[["1",2]]]', b"[4,5,[[0,1]]]"),
        *(b"[4,5," + b"[" * 9000, b"[4,5,[" + b",".join([b"[1,1]"] * 65) + b"]]"),
        b"[4,1%b,[[1,1]]]" % (400 * b"0"),
    ],
)
def test_malformed_names_are_none(value: bytes) -> None:
    assert decode_names(value) is None
