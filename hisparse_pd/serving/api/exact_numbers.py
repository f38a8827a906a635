"""Numbers of schemas as clients spell them, and which of them llguidance, which keeps doubles, can enforce.

``constraints.py`` and ``grammars.py`` read schemas with ``read_json``, decoders of bodies read numbers with
``read_float``; ``schema_numbers.py`` and ``json_grammars.py`` ask about each number. JSON's integers become
Python's, of any size. Other numbers become doubles; one whose double is written differently, such as 1.0e2 or
0.1000000000000000000001, is a ``SpelledFloat``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Final, TypeGuard

_MAX_EXACT: Final = 2**53
"""Largest integer up to which a double has every integer."""
_MAX_DECIMALS: Final = 22
"""Most digits behind a point. Doubles have the powers of ten up to 10 ** _MAX_DECIMALS exactly. llguidance
divides a number's digits by such a power, and gets the nearest double if the digits are at most _MAX_EXACT;
else it may get a neighbour of that double."""
_MAX_BOUND: Final = 2**63
"""Bound of llguidance's ranges, which are of 64-bit integers."""
_MAX_COEFFICIENT: Final = 2**32 // 10 - 1
"""Largest ``multipleOf``, its decimal point left out: llguidance computes with 32 bits."""
_MAX_MULTIPLE_DECIMALS: Final = 9
"""Most digits of a ``multipleOf`` behind the point, for the same reason."""

BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LENGTHS: Final = {
    **dict.fromkeys(("minLength", "maxLength"), 2**32 - 1),
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), 2**64 - 1),
}
"""Keywords of lengths, with the largest value that llguidance takes for each."""

Number = int | float


class SpelledFloat(float):
    """A double, and the text that it was read from, which Python would write differently."""

    __slots__ = ("text",)
    text: str


def read_float(text: str) -> float:
    """Read a JSON literal that is no integer. Raises ValueError where its exponent is out of range."""
    value = float(text)
    if repr(value) == text:
        return value
    try:
        Decimal(text)
    except InvalidOperation:
        raise ValueError(f"the exponent of {text:.40} is out of range") from None
    spelled = SpelledFloat(value)
    spelled.text = text
    return spelled


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


read_json = partial(json.loads, parse_float=read_float, parse_constant=_refuse_constant)
"""Reads JSON, and keeps the spelling of its numbers. Raises ValueError."""


def spelling(value: Number) -> str:
    """Return the number as the client wrote it."""
    return value.text if isinstance(value, SpelledFloat) else repr(value)


def spelling_for_llguidance(value: Number) -> str:
    """Return the text in which llguidance is given the number: its double, without a point if it is whole."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _MAX_BOUND
    return str(int(value)) if is_whole else repr(value)


def write_json(value: object, spell: Callable[[Number], str] = spelling) -> str:
    """Return ``value`` as JSON, with its numbers as ``spell`` has them. A level of nesting takes two of
    Python's stack frames."""
    if isinstance(value, dict):
        parts = [f"{_encoded(name)}:{write_json(each, spell)}" for name, each in value.items()]
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ",".join([write_json(each, spell) for each in value]) + "]"
    return spell(value) if is_number(value) else _encoded(value)


_encoded = partial(json.dumps, ensure_ascii=False)


def is_number(value: object) -> TypeGuard[Number]:
    """Whether ``value`` is a JSON number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: Number) -> Decimal:
    """Return the number that the client wrote, exactly."""
    return Decimal(spelling(value))


def spelling_by_llguidance(value: Number) -> str:
    """Return the text in which llguidance lets a model write the number; "" if it would be another number."""
    if not is_kept_by_llguidance(value):
        return ""
    digits = format(Decimal(repr(float(value))), "f")
    return digits.removesuffix(".0")


def is_spelled_alike(value: Number) -> bool:
    """Whether llguidance spells the number as the client did."""
    return spelling_by_llguidance(value) == spelling(value)


def is_kept_by_llguidance(value: Number) -> bool:
    """Whether llguidance, given ``spelling_for_llguidance``, reads and spells this very number."""
    try:
        near = float(value)
    except OverflowError:
        return False
    if not math.isfinite(near) or Decimal(repr(near)) != (number := exact(value)):
        return False
    digits, num_decimals = _parts(number)
    is_read = num_decimals == 0 or (digits <= _MAX_EXACT and num_decimals <= _MAX_DECIMALS)
    return is_read and abs(near) < _MAX_BOUND


def fault_of_bound(keyword: str, value: Number, *, of_integers: bool) -> str:
    """Return "" if llguidance can enforce the bound exactly, else which bounds are enforced exactly.

    ``keyword``: one of BOUNDS. ``of_integers``: whether the bounded values are integers only.
    """
    if keyword == "multipleOf":
        digits, num_decimals = _parts(exact(value)) if is_kept_by_llguidance(value) else (0, 0)
        if 0 < digits <= _MAX_COEFFICIENT and num_decimals <= _MAX_MULTIPLE_DECIMALS and value > 0:
            return ""
        return f"multiples of up to {_MAX_COEFFICIENT} are, with up to {_MAX_MULTIPLE_DECIMALS} decimals"
    # llguidance turns an exclusive bound into the next integer, which has to be exact, too.
    is_exclusive = keyword.startswith("exclusive")
    is_whole = exact(value) == exact(value).to_integral_value()
    is_exact = _is_whole_double(value) if of_integers and is_whole else is_kept_by_llguidance(value)
    if is_exact and not (is_exclusive and abs(value) >= _MAX_EXACT):
        return ""
    return f"integers up to {_MAX_EXACT - is_exclusive} are, and decimals of up to 15 digits"


def _is_whole_double(value: Number) -> bool:
    """Whether a whole number is a double. It is not enough that the double is spelled so: bounds of integers
    are computed with the double itself."""
    return abs(value) < _MAX_BOUND and Decimal(float(value)) == exact(value)


def admits_excluded_integer(bounds: Mapping[str, object]) -> bool:
    """Whether llguidance would admit an integer that a bound excludes. It does if the other bound comes
    before the next integer: exclusiveMinimum 1 and maximum 1.5 would admit 1."""
    low = _tightest(bounds, "minimum", "exclusiveMinimum", max)
    high = _tightest(bounds, "maximum", "exclusiveMaximum", min)
    if low is None or high is None:
        return False
    # The excluded integer is admitted only at the bound nearer to zero, ``near``. Of positive numbers that is
    # the low one. Of negative numbers it is the high one, which is a low bound of the negated numbers.
    negated_high, negated_low = (-high[0], high[1]), (-low[0], low[1])
    for (near, is_excluded), (far, _) in ((low, high), (negated_high, negated_low)):
        if is_excluded and near >= 0 and near == math.floor(near) == math.floor(far):
            return True
    return False


def _tightest(
    bounds: Mapping[str, object], inclusive: str, exclusive: str, choose: Callable[..., tuple[float, bool]]
) -> tuple[float, bool] | None:
    """Return the tightest bound of two keywords, and whether it is excluded; None for no bound. ``choose``:
    max for lower bounds, min for upper ones."""
    given = ((bounds.get(inclusive), False), (bounds.get(exclusive), True))
    found = [(float(value), is_excluded) for value, is_excluded in given if is_number(value)]
    return choose(found, key=lambda bound: bound[0]) if found else None


def _parts(number: Decimal) -> tuple[int, int]:
    """Return a finite number's digits, as an integer without zeros behind the last decimal, and how many of
    them are behind the point: 1.50 has (15, 1), 1200 has (1200, 0)."""
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).lstrip("0")
    short = text.rstrip("0")
    exponent += len(text) - len(short)
    if not short:
        return 0, 0
    return int(short) * 10 ** max(0, exponent), max(0, -exponent)
