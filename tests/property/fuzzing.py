"""What the fuzz tests share: how many inputs, how valid encodings are damaged, what may be allocated.

Encodings are damaged from a seed, a batch in each example; a failure names its input. Values that have a type
are built by Hypothesis, which shrinks what fails; that costs it some milliseconds each. The default run makes
200 of the first kind and 10 of the second for each decoder, ``make test-full`` 1000 and 50, always the same
ones. FUZZ_INPUTS in the environment (``make fuzz``) sets the number of the first kind, twenty times that of
the second, and all are new in every run.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.examples import num_examples

T = TypeVar("T")

DEFAULT_INPUTS = num_examples(200, 1000)
BATCH = 100
_ASKED = os.environ.get("FUZZ_INPUTS")
_NUM_INPUTS = int(_ASKED or DEFAULT_INPUTS)

fuzz = settings(
    max_examples=max(_NUM_INPUTS // 20, 1),
    derandomize=_ASKED is None,
    database=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
"""Decorates tests of values that hypothesis builds."""

fuzz_batches = settings(
    fuzz, max_examples=max(_NUM_INPUTS // BATCH, 1), phases=(Phase.explicit, Phase.generate)
)
"""Decorates tests of ``batch``."""

seeds = st.integers(0, 2**64 - 1)

HUGE_LENGTHS = tuple(
    header + length.to_bytes(4, "big")
    for header in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")  # array, map, string, bytes, extension
    for length in (2**32 - 1, 2**31, 2**24)
)
"""msgpack headers that promise far more than follows."""

MSGPACK_PARTS = (
    *HUGE_LENGTHS,
    b"\xc1",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinity
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xa3\xed\xa0\x80",  # a lone surrogate
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp far away
    b"\x91" * 2000,
    b"\x81\xa1k" * 2000,
    b"\xdc\xff\xff",
    b"\x00",
)


def damage(rng: random.Random, corpus: Sequence[bytes], parts: Sequence[bytes]) -> bytes:
    """A valid encoding with bits flipped and parts cut out, doubled, exchanged, or hostile ones put in; at
    times bytes that never were one.
    """
    if rng.randint(0, 19) == 0:
        return rng.randbytes(rng.randint(0, 64))
    frame = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(frame))
        match rng.randint(0, 6):
            case 0 if frame:
                frame[start % len(frame)] ^= 1 << rng.randint(0, 7)
            case 1:
                del frame[start:]
            case 2:
                del frame[start : start + rng.randint(1, 8)]
            case 3:
                frame[start:start] = frame[start : start + rng.randint(1, 32)]
            case 4:
                other = rng.choice(corpus)
                frame[start:] = other[rng.randint(0, len(other)) :]
            case 5:
                frame[start : start + rng.randint(0, 4)] = rng.choice(parts)
            case _:
                frame[start:start] = bytes(rng.randint(0, 255) for _ in range(rng.randint(0, 8)))
    return bytes(frame)


def batch(
    seed: int, make: Callable[[random.Random], bytes], check: Callable[[bytes], object], count: int = BATCH
) -> None:
    """``check`` of ``count`` inputs that ``make`` makes of ``seed``."""
    rng = random.Random(seed)
    for _ in range(count):
        content = make(rng)
        try:
            check(content)
        except BaseException as error:
            error.add_note(f"the input was {content!r}")
            raise


def outcome(call: Callable[[], T], *errors: type[Exception]) -> T | None:
    """What ``call`` returns; None when it raised one of ``errors``. Anything else that it raises is a bug."""
    try:
        return call()
    except errors:
        return None


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that was allocated at once through Python's allocators during ``call``."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
