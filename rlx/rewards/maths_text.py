"""The text of a mathematical answer: cleaned, bounded, and cut where its structure is. No JAX.

`clean` turns the ways in which one thing is written into one way and refuses what no answer needs:
too long, too deep, invisible characters, digits of other scripts. It knows no values.
"""

import re
import unicodedata
from collections.abc import Iterator

MAX_CHARACTERS = 400
MAX_DEPTH = 24

_UNICODE = {
    **dict.fromkeys("−–", "-"),
    **dict.fromkeys("×∗", r"\times "),
    **dict.fromkeys("·⋅", r"\cdot "),
    **dict.fromkeys("£€￥¥", ""),
    **dict(zip("（）［］｛｝，．；：＝＋－％＜＞＾／", "()[]{},.;:=+-%<>^/", strict=True)),
    "÷": "/",
    "π": r"\pi ",
    "θ": r"\theta ",
    "∞": r"\infty ",
    "√": "sqrt",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ",
    "°": r"^\circ ",
    "∪": r"\cup ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "²": "^2",
    "³": "^3",
}
_TRANSLATION = str.maketrans(_UNICODE)

_ROOT = re.compile(r"√\s*([0-9]+(?:\.[0-9]+)?)")

# In this order; each pattern with what stands for it afterwards.
_REWRITES = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\{,\}|,\\!\s*+", ","),  # 10,\!080 and 10{,}080
        (r"(?<=\d)\\[, ](?=\d{3}(?!\d))", ""),  # 10\,080
        (r"\\(?:boxed|fbox)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[()\[\]]", " "),  # the ends of formulas; `\\[` ends a matrix's row
        (r"\\?\$", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*+\.?", ""),
        (r"\\(?:quad|qquad|displaystyle|textstyle|hfill)(?![a-zA-Z])|(?<!\\)\\[,;:! ]|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (
            r"\\(?:mbox|mathrm|mathbf|textbf|textit|textrm|mathit|operatorname|hbox)\s*+\{",
            r"\\text{",
        ),
        (r"\\text\{\s*(-?[0-9][0-9.,/]*)\s*\}", r"\1"),
        (r"\\text\{\s*(-?[0-9][0-9.,/]*)\s+(?=[A-Za-z])", r"\1 \\text{"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\leq(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\%", "%"),
        (r"\s*\b(?:percent|per cent)\b|\\text\{\s*percent\s*\}", "%"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degrees?(?![a-zA-Z])", "°"),
        (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])(pi|theta)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<=[a-zA-Z])\s+in\s+(?=[\[({\\])", r"\\in "),
        (r"(?<![a-zA-Z\\])sqrt(?![a-zA-Z])", r"\\sqrt"),
        (r"\\cdot(?![a-zA-Z])|(?<!\*)\*(?!\*)", r"\\cdot "),
        (r"\*\*", "^"),
    )
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class Unreadable(Exception):
    """The reason why a text is no answer; an outcome of scoring, not a failure."""


def clean(text: str) -> str:
    """One way of writing for all that mean the same; Unreadable where there is nothing to read."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"the answer is longer than {MAX_CHARACTERS} characters")
    text = _plain_characters(text).strip()
    while len(text) > 4 and text[:2] == text[-2:] and text[:2] in ("**", "__"):  # Markdown's bold
        text = text[2:-2].strip()
    text = text.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    _check_depth(text)
    text = " ".join(_braced_arguments(text).split()).strip(" ,;:")
    text = _without_outer_braces(re.sub(r"(?<=\S)\s*\.$", "", text)).strip()
    if not text:
        raise Unreadable("the answer is empty")
    if "{}" in text.replace(" ", "").replace(r"\{\}", ""):
        raise Unreadable("the answer holds an empty pair of braces")
    return _without_thousands(text)


def pieces(text: str, separator: re.Pattern) -> list[str]:
    """The text cut at the separators that stand in no bracket; the separators are left out."""
    found, start = [], 0
    levels = depths(text)
    for match in separator.finditer(text):
        if levels[match.start()] == 0 and match.start() >= start:
            found.append(text[start : match.start()].strip())
            start = match.end()
    return [*found, text[start:].strip()]


def depths(text: str) -> list[int]:
    """How many brackets are open before each character, a bracket itself counted as outside.

    A half-open interval closes one kind of bracket with another, so kinds are not told apart; TeX's
    braces group more tightly, but an answer that crosses the two is no answer.
    """
    levels, depth = [], 0
    for character in text:
        if character in ")]}":
            depth = max(depth - 1, 0)
        levels.append(depth)
        if character in "([{":
            depth += 1
    return levels


def enclosed(text: str) -> tuple[str, str, str] | None:
    r"""Opening bracket, inside and closing bracket, where one pair holds the whole text."""
    opening = next((o for o in (r"\{", "(", "[") if text.startswith(o)), None)
    closing = next((c for c in (r"\}", ")", "]") if text.endswith(c)), None)
    if opening is None or closing is None or (opening == r"\{") != (closing == r"\}"):
        return None
    levels = depths(text)
    first, last = len(opening) - 1, len(text) - 1
    if first >= last or any(level == 0 for level in levels[first + 1 : last]):
        return None
    return opening, text[len(opening) : len(text) - len(closing)].strip(), closing


def _plain_characters(text: str) -> str:
    if not text.isascii():
        for character in text:
            if character.isascii():
                continue
            category = unicodedata.category(character)
            if category == "Nd":
                raise Unreadable(f"the answer holds {character!r}, a digit of another script")
            if category in ("Cf", "Cc", "Cn", "Co", "Cs"):
                raise Unreadable(f"the answer holds the invisible character {character!a}")
        text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_TRANSLATION)
    if control := next((c for c in text if ord(c) < 32 and not c.isspace()), None):
        raise Unreadable(f"the answer holds the invisible character {control!a}")
    return text


def _check_depth(text: str) -> None:
    if max(depths(text), default=0) > MAX_DEPTH:
        raise Unreadable(f"more than {MAX_DEPTH} brackets within each other")


def _without_outer_braces(text: str) -> str:
    while text.startswith("{") and text.endswith("}"):
        if any(level == 0 for level in depths(text)[1:-1]):
            break
        text = text[1:-1].strip()
    return text


def _without_thousands(text: str) -> str:
    r"""`1,234` is a number where it stands free; in `(1,234)` the comma parts two numbers."""
    levels = depths(text)
    return _THOUSANDS.sub(
        lambda match: match[0] if levels[match.start()] else match[0].replace(",", ""), text
    )


def _braced_arguments(text: str) -> str:
    r"""`\frac12` to `\frac{1}{2}`, `\sqrt[3]2` to `\sqrt[3]{2}`, `sqrt(x)`, `x^(2)` to braces."""
    return "".join(_braced(text, 0, len(text)))


def _braced(text: str, start: int, end: int) -> Iterator[str]:
    while start < end:
        command = _COMMAND.match(text, start, end)
        if command is None and text[start] != "^":
            yield text[start]
            start += 1
            continue
        name = command[0] if command else "^"
        yield name
        start = command.end() if command else start + 1
        if command and name not in _ARGUMENTS:
            continue
        if name == r"\sqrt" and _at(text, start, end) == "[":
            close = _closing(text, _skip(text, start), end)
            yield from _braced(text, _skip(text, start), close)
            start = close
        for _ in range(_ARGUMENTS.get(name, 1)):
            start = _skip(text, start)
            if start >= end:
                raise Unreadable(f"{name} lacks what should follow it")
            first, last, after = _argument(text, start, end, name)
            yield "{"
            yield from _braced(text, first, last)
            yield "}"
            start = after


def _argument(text: str, start: int, end: int, name: str) -> tuple[int, int, int]:
    """Where an argument begins and ends, its brackets left out, and what follows it."""
    opening = text[start]
    if opening == "{" or (opening == "(" and name in (r"\sqrt", "^")):
        close = _closing(text, start, end)
        return start + 1, close - 1, close
    if command := _COMMAND.match(text, start, end):
        if command[0] in _ARGUMENTS:
            raise Unreadable(f"{command[0]} stands unbraced behind {name}")
        return start, command.end(), command.end()
    if name == "^" and (number := re.compile(r"-?\d+").match(text, start, end)):
        return start, number.end(), number.end()  # 2^10 is meant, whatever TeX would set
    return start, start + 1, start + 1


def _closing(text: str, start: int, end: int) -> int:
    depth = 0
    for i in range(start, end):
        if text[i] in _PAIRS:
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i + 1
    raise Unreadable("a bracket is not closed")


def _skip(text: str, start: int) -> int:
    while start < len(text) and text[start] == " ":
        start += 1
    return start


def _at(text: str, start: int, end: int) -> str:
    start = _skip(text, start)
    return text[start] if start < end else ""
