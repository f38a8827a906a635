"""The nesting of JSON from outside has a bound that is the same with every Python."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hisparse_pd.protocol import decoding
from hisparse_pd.protocol.decoding import (
    MAX_NESTING,
    NestedTooDeeply,
    TypedDecoder,
    check_nesting,
    decode_json,
)

pytestmark = pytest.mark.I8


def nested(levels: int, opening: str = "[", inner: str = "") -> str:
    closing = {"[": "]", '{"a":': "}"}[opening]
    return opening * levels + (inner or ("1" if opening != "[" else "")) + closing * levels


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_the_bound_is_exact_and_what_passes_can_be_written_again(opening: str) -> None:
    value = decode_json(nested(MAX_NESTING, opening))
    assert depth_of(value) == MAX_NESTING
    assert json.loads(json.dumps(value, indent=1)) == value
    assert msgspec.json.decode(msgspec.json.encode(value)) == value
    for levels in (MAX_NESTING + 1, 100_000):
        with pytest.raises(NestedTooDeeply, match=f"nested too deeply: {MAX_NESTING} levels .* are the most"):
            decode_json(nested(levels, opening))
        with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
            TypedDecoder.json(dict[str, msgspec.Raw]).decode(f'{{"a":{nested(levels, opening)}}}'.encode())


def test_the_bound_is_well_under_the_interpreters() -> None:
    assert sys.getrecursionlimit() > 4 * MAX_NESTING


@given(
    st.recursive(
        st.text(alphabet='[]{}"\\é', max_size=6),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{"\\', max_size=3), inner),
        max_leaves=40,
    ),
    st.integers(1, 9),
)
@example(['\\"[[[[', "\\\\", [[]]], 3)
@example(["\\" * 5 + '"[[[[', [["\\" * 4]]], 2)
def test_brackets_in_strings_are_no_levels(value: Any, chunk_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "CHUNK_BYTES", chunk_bytes)
        for ensure_ascii in (True, False):
            text = json.dumps(value, ensure_ascii=ensure_ascii).encode()
            depth = depth_of(value)
            patch.setattr(decoding, "MAX_NESTING", depth)
            check_nesting(text)
            if depth:
                patch.setattr(decoding, "MAX_NESTING", depth - 1)
                with pytest.raises(NestedTooDeeply):
                    check_nesting(text)


def test_what_is_wide_is_not_deep() -> None:
    check_nesting(json.dumps([{"a": [nested(9)]}] * 300_000).encode())
