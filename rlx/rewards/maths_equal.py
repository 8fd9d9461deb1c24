r"""When two mathematical answers are the same. No JAX.

- Numbers are exact: 29, 29.00 and 58/2 are the same. A decimal of at least six significant digits
  also stands for a fraction or a root that rounds to it.
- A unit may be there or not, and not another one. `%` is one: 29% is 29 and also 0.29, and 0.29 is
  not 29. `52` answers a gold `52_8`, not the other way round.
- A list with one more part than it should have is another list. `0, 1` may stand for `(0, 1)`.
- A name may be there or not, and not another one: 5 is `x = 5`, and `y = 5` is not.
- Both sides of an equation or inequality may be multiplied by one number.

Gold comes first: `a + b = 7` answers a gold 7, and 7 does not answer a gold `2x + z = 7`.
"""

import re

from rlx.rewards import maths_other, maths_value
from rlx.rewards.maths_answer import Answer, read_value, squeezed
from rlx.rewards.maths_text import Unreadable

SIGNIFICANT = 6


def equal(gold: Answer, answer: Answer) -> bool:
    """Whether the answer is the gold one. Raises Unreadable where the answer has no value."""
    if gold.name and answer.name and squeezed(gold.name) != squeezed(answer.name):
        return False
    if gold.unit and answer.unit and _dimension(gold.unit) != _dimension(answer.unit):
        return False
    if squeezed(gold.text) == squeezed(answer.text):
        return True
    if "relation" in (gold.kind, answer.kind):
        return _equal_relations(gold, answer)
    if gold.kind == answer.kind == "value":
        return _equal_values(gold, answer)
    kinds = {gold.kind, answer.kind}
    if kinds == {"words", "value"}:  # `no` was read as the product of its letters
        return squeezed(gold.text).casefold() == squeezed(answer.text).casefold()
    if gold.kind == "based" and answer.kind in ("based", "value"):
        digits, *base = answer.text.rstrip(".").split("_")
        same_base = answer.kind == "based" and answer.mark == gold.mark
        return digits == gold.text.split("_")[0] and (same_base or not base)
    if kinds == {"list", "bracket"}:
        bracket = gold if gold.kind == "bracket" else answer
        bare = answer if gold.kind == "bracket" else gold
        return bracket.mark == "()" and not bare.mark and _equal_in_order(gold.parts, answer.parts)
    if kinds == {"list", "value"}:
        parts = gold.parts or answer.parts
        other = answer if gold.kind == "list" else gold
        if not parts:
            return other.text == r"\emptyset"
        pair = (parts[0], other) if gold.kind == "list" else (other, parts[0])
        return len(parts) == 1 and equal(*pair)
    if len(kinds) > 1:
        return False
    if gold.kind == "list":
        return _equal_in_any_order(gold.parts, answer.parts)
    if gold.kind in ("bracket", "matrix"):
        return gold.mark == answer.mark and _equal_in_order(gold.parts, answer.parts)
    return False  # words, which are the same text or not


def _equal_values(gold: Answer, answer: Answer) -> bool:
    if (gold.unit == "%") != (answer.unit == "%"):
        hundredths = [
            a.number / 100 if a.unit == "%" and a.number is not None else a.number
            for a in (gold, answer)
        ]
        if hundredths[0] is not None and hundredths[0] == hundredths[1]:
            return True
    if gold.number is not None and gold.number == answer.number:
        return True
    if r"\infty" in gold.text + answer.text:
        return False  # the same text was equal before
    decimals = [a for a in (gold, answer) if a.digits]
    if gold.number is not None and answer.number is not None:
        other = answer if decimals[:1] == [gold] else gold
        if len(decimals) != 1 or other.number.denominator == 1 or not _is_precise(decimals[0]):
            return False
    values = _evaluated(gold.text, answer.text)
    if values is None:
        return maths_other.equal(gold.text, answer.text)
    if all(map(maths_value.close, values[0].at, values[1].at)):
        return True
    if len(decimals) != 1 or not _is_precise(decimals[0]):
        return False
    value = values[1 if decimals[0] is gold else 0]
    return not value.letters and maths_value.rounds_to(value.at[0], decimals[0].digits)


def _evaluated(gold: str, answer: str) -> tuple[maths_value.Values, maths_value.Values] | None:
    """The values of both; None where the gold text has none that can be computed here.

    An answer has to be as elementary as the gold one: only a gold text that is not lets a model's
    text reach sympy.
    """
    try:
        expected = maths_value.values(gold)
    except maths_value.Unknown:
        return None
    try:
        return expected, maths_value.values(answer)
    except maths_value.Unknown as unknown:
        raise Unreadable(str(unknown)) from unknown


def _is_precise(decimal: Answer) -> bool:
    return len(decimal.digits.replace(".", "").lstrip("-0")) >= SIGNIFICANT


def _dimension(unit: str) -> tuple[str, str]:
    """The first letter and the power. Abbreviations begin as their units do: ft, feet; but lb."""
    words = [w for w in re.split(r"[ ^{}]+", unit) if w]
    power = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
    powers = [power.get(word, word) for word in words if word in power or word in ("2", "3")]
    letters = [{"lb": "p", "lbs": "p"}.get(word, word[0]) for word in words if word not in power]
    return letters[0] if letters else "", powers[0] if powers else ""


def _equal_relations(gold: Answer, answer: Answer) -> bool:
    sides = []
    for side in (gold, answer):
        if side.kind == "value" and side.name:  # y = 2x + 3
            side = Answer("relation", side.text, (read_value(f"({side.name})-({side.text})"),), "=")
        if side.kind != "relation":
            return False
        sides.append(side)
    if sides[0].mark != sides[1].mark:
        return False
    values = _evaluated(*(side.parts[0].text for side in sides))
    if values is None:
        return maths_other.equal(gold.text, answer.text)
    if values[0].letters != values[1].letters:
        return False
    pairs = list(zip(values[0].at, values[1].at, strict=True))
    if any(a == 0 or b == 0 for a, b in pairs):
        return False
    ratios = [a / b for a, b in pairs]
    if not all(maths_value.close(ratio, ratios[0]) for ratio in ratios):
        return False
    return sides[0].mark in ("=", r"\ne") or ratios[0].real > 0


def _equal_in_order(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool:
    return len(gold) == len(answer) and all(map(equal, gold, answer))


def _equal_in_any_order(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool:
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for part in gold:
        found = next((i for i, other in enumerate(left) if equal(part, other)), None)
        if found is None:
            return False
        del left[found]
    return True
