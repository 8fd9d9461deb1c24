r"""The structure of a mathematical answer, read from its text. No JAX.

A cleaned text (`maths_text`) is one of these; parts are answers again.

- `value`: a number or an expression, with its unit apart. Numbers are exact; `%` is a unit.
- `list`, in any order: `1, -2`, `1 \text{ or } -2`, `\{1, -2\}`, `1 \pm \sqrt{2}`, a union.
- `bracket`, in order: a tuple or an interval. An inequality for one letter is the interval that it
  says: `1 < x \le 3` is `(1, 3]`.
- `matrix`; `words`; `based`, a number in a base, `52_8`.
- `relation`: another equation or inequality.

`x = 5` and `x \in [2, 7]` are what follows, with a name.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from rlx.rewards.maths_text import Unreadable, clean, enclosed, pieces

MAX_PARTS = 30

_LIST = re.compile(
    r",\s*(?:\\text\{\s*(?:and|or)\s*\}|(?:and|or)(?= ))|,|;"
    r"|\\text\{\s*,?\s*(?:and|or)\s*\}|\\cup(?![a-zA-Z])|(?<= )(?:and|or)(?= )"
)
_COMMA = re.compile(r"[,;]")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)(?![a-zA-Z])")
_SUBSCRIPT = re.compile(r"_(?:\{\w+\}|\w)")
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_ARITHMETIC = re.compile(r"\\(?:frac|sqrt|cdot|times|div|pi)(?![a-zA-Z])")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_MATRIX = re.compile(r"\\begin\{([bpvBV]?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\1\}", re.S)
_BASED = re.compile(r"([0-9A-F]+)_(?:\{(?:\\text\{)?([0-9]+)\}?\}|([0-9]+))")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_WORDS = re.compile(r"\(?[A-Za-z]\)?|[A-Za-z]{2,}(?:[ '-]+[A-Za-z]+)*")
_NAME = re.compile(
    r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\{\w+\}|\w))?(?:\([a-z](?:, ?[a-z])*\))?'?|\\text\{[^{}]*\}"
)
_IDLE_SPACE = re.compile(r"(?<![0-9]) +| +(?![0-9])")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
_NUMBER = re.compile(r"([-+]?)\s?(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+))")
_FRACTION = re.compile(
    r"([-+]?)\s?(?:([0-9]+)\s?)??"
    r"(?:\\frac\{\s?(-?[0-9]+)\s?\}\{\s?(-?[0-9]+)\s?\}|(?<![0-9])([0-9]+)\s?/\s?([0-9]+))"
)
_UNIT = re.compile(
    r"(?<=[0-9})°!a-zA-Z])\s*"
    r"(?:°\s*[CF]?|\\text\{\s*([A-Za-z][A-Za-z/. -]*)\}|(?<=[0-9} ])([A-Za-z][A-Za-z/. ]*))"
    r"(\^\{[23]\})?\.?$"
)
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z]).*°$")
_SHORT_UNITS = re.compile(
    r"cm|mm|km|dm|ft|in|yd|mi|kg|mg|lbs?|oz|ml|hrs?|mins?|sec|[mk]ph|kmh|sq|cu|usd|km/h|m/s|deg"
    r"|cups?|[ap]m|per"
)
_NUMERALS = re.compile(
    r"hundred|thousand|million|billion|trillion|dozen|score|half|halves|thirds?|fourths?|quarters?"
    r"|squared|cubed|factorial|times|plus|minus|over|point|divided|mod"
)


class Answer(NamedTuple):
    kind: str
    text: str
    """Cleaned, its name and unit left out."""
    parts: tuple["Answer", ...] = ()
    mark: str = ""
    """The brackets, a relation's sign, a base, a matrix's rows."""
    name: str = ""
    unit: str = ""
    number: Fraction | None = None
    """Where the text is a plain number."""
    digits: str = ""
    """Where it is a decimal, as it stands."""


@lru_cache(maxsize=8192)
def read(text: str) -> Answer:
    """An answer's structure; Unreadable where the text is none."""
    return _read(clean(text))


def canonical(answer: Answer) -> str:
    """The same text for answers that are plainly the same; for counting votes."""
    if answer.number is not None:
        return str(answer.number)
    if answer.parts:
        return f"{answer.kind}{answer.mark}" + ",".join(map(canonical, answer.parts))
    return squeezed(answer.text)


def _read(text: str) -> Answer:
    if words := _words(text):
        return Answer("words", words)
    if matrix := _MATRIX.fullmatch(text):
        rows = [re.split("&", row) for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = [cell.strip() for row in rows for cell in row]
        return Answer("matrix", text, _read_all(cells), "x".join(str(len(row)) for row in rows))
    if len(parts := _expanded(pieces(text, _LIST))) > 1:
        return Answer("list", text, _read_all(parts))
    if _RELATION.search(text) or _APPROXIMATELY.search(text):
        return _read_relation(text)
    if based := _BASED.fullmatch(text):
        return Answer("based", text, mark=based[2] or based[3])
    if bracket := enclosed(text):
        opening, inside, closing = bracket
        if opening == r"\{":
            parts = _expanded(pieces(inside, _LIST)) if inside else []
            return Answer("list", text, _read_all(parts), r"\{")
        if len(parts := pieces(inside, _COMMA)) > 1:
            return Answer("bracket", text, _read_all(parts), opening + closing)
        if opening == "(" and inside:
            return _read(inside)
    return read_value(text)


def _read_all(texts: list[str]) -> tuple[Answer, ...]:
    if len(texts) > MAX_PARTS:
        raise Unreadable(f"the answer lists more than {MAX_PARTS} parts")
    if not all(texts):
        raise Unreadable("the answer lists an empty part")
    return tuple(_read(text) for text in texts)


def _expanded(parts: list[str]) -> list[str]:
    r"""Each `\pm` as two parts, its `\mp` with the other sign. A part that lacks one stays."""
    found = []
    for part in parts:
        if len(_PLUS_MINUS.findall(part)) == 1 and len(pieces(part, _PLUS_MINUS)) == 2:
            for pm, mp in ("+-", "-+"):
                signed = _PLUS_MINUS.sub(pm, part)
                found.append(re.sub(r"\\mp(?![a-zA-Z])", mp, signed))
        else:
            found.append(part)
    return found


def _words(text: str) -> str:
    bare = _TEXT.sub(r"\1", text).strip().strip(".")
    if not _WORDS.fullmatch(bare):
        return ""
    inner = bare.strip("()")
    if len(inner) > 1:
        # letters side by side are words where TeX says so, or where no product is so long
        return inner.casefold() if "\\text" in text or len(inner) > 2 else ""
    # one letter alone names a choice where it is set as text or in parentheses
    return inner if "\\text" in text or bare != inner else ""


def _read_relation(text: str) -> Answer:
    if approximate := _APPROXIMATELY.search(text):
        before, after = text[: approximate.start()].strip(), text[approximate.end() :].strip()
        # `x \approx 3.6` says a value; `\sqrt{13} \approx 3.6` has said it exactly before
        text = f"{before} = {after}" if _NAME.fullmatch(before) else before
        return _read(text)
    sides = pieces(text, _RELATION)
    signs = _RELATION.findall(text)
    if len(signs) != len(sides) - 1 or not all(sides):
        raise Unreadable("a side of a relation is missing, or it stands in brackets")
    first, last = sides[0], sides[-1]
    if all(sign == "=" for sign in signs):
        if _NAME.fullmatch(first) or not re.search("[0-9]", _SUBSCRIPT.sub("", first)):
            inner = _read(last)
            return inner if inner.name else inner._replace(name=first)
        if not re.search("[A-Za-z]", _ARITHMETIC.sub("", _TEXT.sub("", first))):
            return _read(last)  # 2 + 3 = 5
    if signs == [r"\in"] and _NAME.fullmatch(first):
        return _read(last)._replace(name=first)
    if (interval := _as_interval(sides, signs)) is not None:
        return interval
    if len(signs) != 1:
        raise Unreadable("there is more than one relation")
    if signs[0] in (">", r"\ge"):
        first, last, signs = last, first, [_FLIPPED[signs[0]]]
    return Answer("relation", text, (read_value(f"({first})-({last})"),), signs[0])


def _as_interval(sides: list[str], signs: list[str]) -> Answer | None:
    """What `2 < x`, `x >= 2` or `1 < x <= 3` says of its one letter."""
    named = [i for i, side in enumerate(sides) if _NAME.fullmatch(side) and side != r"\infty"]
    if len(named) != 1 or any(sign not in _FLIPPED for sign in signs) or len(sides) > 3:
        return None
    if signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
        named = [len(sides) - 1 - named[0]]
    if any(sign not in ("<", r"\le") for sign in signs):
        return None
    place = named[0]
    if len(sides) == 3 and place != 1:
        return None
    low, high = (
        (sides[0] if place else r"-\infty"),
        (sides[-1] if place < len(signs) else r"\infty"),
    )
    opening = "[" if place and signs[0] == r"\le" else "("
    closing = "]" if place < len(signs) and signs[-1] == r"\le" else ")"
    text = f"{opening}{low},{high}{closing}"
    return Answer("bracket", text, _read_all([low, high]), opening + closing, name=sides[place])


def read_value(text: str) -> Answer:
    unit = ""
    if text.endswith("%"):
        text, unit = text[:-1].strip(), "%"
    elif (match := _UNIT.search(text)) and (found := _unit(match)) and not _ANGLE.search(text):
        text, unit = text[: match.start()].strip(), found
    if not text:
        raise Unreadable("the answer is empty")
    plain = text.lstrip("+").strip()
    if match := _NUMBER.fullmatch(text):
        signed = match[1].strip("+") + match[2].rstrip(".")
        digits = signed if "." in signed else ""
        return Answer("value", plain, unit=unit, number=Fraction(signed), digits=digits)
    if match := _FRACTION.fullmatch(text):
        sign, whole, *rest = match.groups()
        above, below = (rest[0], rest[1]) if rest[0] is not None else (rest[2], rest[3])
        if int(below) == 0:
            raise Unreadable("the answer divides by zero")
        number = Fraction(int(whole or 0)) + Fraction(int(above), int(below))
        return Answer("value", plain, unit=unit, number=-number if sign == "-" else number)
    return Answer("value", plain, unit=unit)


def _unit(match: re.Match) -> str:
    """The unit behind a value; "" where the letters may be factors or say a number."""
    word = (match[1] or match[2] or "degrees").strip(". ").casefold()
    first = word.split(" ")[0]
    known = match[2] is None or _SHORT_UNITS.fullmatch(first)
    if not known:
        known = len(first) > 3 and set(first) & set("aeiou")
    return word + (match[3] or "") if known and not _NUMERALS.search(word) else ""


def squeezed(text: str) -> str:
    """Without the spaces that part nothing; `1 2` is not 12."""
    return _IDLE_SPACE.sub("", text)
