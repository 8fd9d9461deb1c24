"""Reading which letter a text answers with, where the answer is one of several options. No JAX.

What counts as a verdict is told in `rlx/rewards/choice.py`.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from rlx.rewards.blocks import last_answer

MAX_CHARACTERS = 1000
"""An answer block may not be longer; of a text without one, only so much of its end is read."""

# Case is ignored among ASCII letters alone: else the long s and the dotless i would be letters.
_FLAGS = re.IGNORECASE | re.ASCII
# what makes a letter part of a word, other scripts and accents among it
_WORD = r"A-Za-z0-9_'’\-\u00c0-\u052f"
_OPENING, _CLOSING = r"[\[({\"'“‘]{0,4}", r"[\])}\"'”’]{0,4}"
_PREFIX = r"(?:(?:the |my |final |correct ){0,3}answer ?:? )?(?:option |choice )?"
_SPACE = re.compile(r"\s+")
# emphasis, mathematics and code; what they hold stays
_SET = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")
_MARKUP = re.compile(
    r"[*`$]|\\(?:boxed|text|textbf|mathrm|mathbf)\b|\\[()\[\]]"
    r"|(?<![A-Za-z0-9])_{1,2}(?=\S)|(?<=\S)_{1,2}(?![A-Za-z0-9])"
)
_BOX = re.compile(r"[\s*$\\(\[]*\\boxed\s?\{.*\}[\s*$.\\)\]]*")
# with the option's own words behind it
_BEFORE_TEXT = re.compile(r"[\[(]?([A-Za-z])(?![A-Za-z0-9])[\])]? ?[-–—:.)]? ?")

_BARE = re.compile(rf"{_PREFIX}{_OPENING}([a-z]){_CLOSING}[.:,;!]?{_CLOSING}", _FLAGS)
_LABEL = re.compile(
    rf"{_PREFIX}(?:[\[({{]([a-z])[\])}}]{{1,2}}[.:,]?|([a-z])([\]).:,]))(?= |$)", _FLAGS
)
_LINE_LABEL = re.compile(r"^\W{0,8}([a-z])[\]).:](?=\s|$)", _FLAGS | re.MULTILINE)
_BRACKETED = re.compile(r"(?<!\w)[\[(]([a-z])[\])](?!\w)", _FLAGS)
_STATEMENT = re.compile(
    r"\b(?:answer|(?:correct|right|best) (?:option|choice))\b(?: (?:choice|option|letter)\b)?"
    r"(?: (?:to|for|of) (?:the|this) (?:question|problem|case)\b)?"
    r"(?: ?(?:[:=→–—]|->)"
    r"| (?:is|would be|should be|must be|has to be|will be|seems to be|appears to be)\b){1,3}"
    r"(?: ?(?::|therefore|thus|then|clearly|definitely|most likely|likely|probably|indeed|simply"
    r"|just|only|it is|it's|the|letter|option|choice)(?![a-z]),?){0,4}"
    rf" ?{_OPENING}(?P<letter>[a-z])(?![{_WORD}])(?P<closing>{_CLOSING})",
    _FLAGS,
)
_CLAUSE_ENDS = re.compile(r"[.,;:!?](?= |$)|\b(?:so|but|hence|thus|therefore|because)\b", _FLAGS)
_DOUBT = re.compile(
    r"\b(?:not|never|nor|neither|cannot|wrong|incorrect|false|unlikely|doubt|if|unless|whether"
    r"|suppose|supposing|assume|assuming)\b|n['’]t\b",
    _FLAGS,
)
_TAKEN_BACK = re.compile(
    r" ?\?| (?:is|was) (?:not|wrong|incorrect|false|unlikely)\b| (?:isn|wasn|can)['’]t\b| cannot\b",
    _FLAGS,
)
_AND_ANOTHER = re.compile(
    r"[\])}\"'”’.]{0,4}(?:(?: ?[,;/&+|–-]| or\b| and\b){1,2}(?: or\b| and\b)?)? ?"
    rf"(?:option |choice )?[\[({{]?([a-z])(?![{_WORD}])",
    _FLAGS,
)
# a letter that opens another sentence or clause: `B. A type 1 error`, `B, I think`
_OPENS = re.compile(r"[A-Za-z] (?!and\b|or\b)[a-z]")


class NoVerdict(Exception):
    """Why a text names no option; an outcome of reading, not a failure."""


def verdict(text: str, options: Mapping[str, str]) -> str:
    """The one option that a text gives as its answer, by its letter; NoVerdict with the reason."""
    block = last_answer(text)
    if block is None:
        return one_of(_named_at_end(text, options), options)
    if len(block) > MAX_CHARACTERS:
        raise NoVerdict(f"the answer is longer than {MAX_CHARACTERS} characters")
    if not block.strip():
        raise NoVerdict("the answer is empty")
    return one_of(_named(block, options), options)


def one_of(named: Sequence[str], options: Collection[str]) -> str:
    """The only one that is named, if it is an option."""
    found = list(dict.fromkeys(named))
    if not found:
        raise NoVerdict("the answer names no option")
    if len(found) > 1:
        raise NoVerdict(f"the answer names several options: {', '.join(found[:10])}")
    if found[0] not in options:
        raise NoVerdict(f"there is no option {found[0]}")
    return found[0]


def plain(text: str) -> str:
    """The text without markup, in one line."""
    for _ in range(3):  # \\boxed{\\text{B}}
        text = _SET.sub(r"\1", text)
    return _SPACE.sub(" ", _MARKUP.sub("", text)).strip()


def folded(text: str) -> str:
    """The same for texts that differ in markup, case, space and a final full stop alone."""
    return plain(text).casefold().rstrip(".").rstrip()


def _named_at_end(text: str, options: Mapping[str, str]) -> list[str]:
    """What a text without an answer block names."""
    end = text.rpartition("</think>")[2].strip().removeprefix("<think>").strip()
    lines = end[-MAX_CHARACTERS:].split("\n")
    if len(lines) == 1 and len(end) <= MAX_CHARACTERS and (named := _named(end, options)):
        return named
    if len(lines) > 1 and len(end) <= MAX_CHARACTERS and _BOX.fullmatch(lines[-1]):
        return _named(lines[-1], options)
    # a statement may begin above the last line: `Answer:`, and below it the letter
    tail = plain("\n".join(lines[-3:]))
    named = _stated(tail, options, len(tail) - len(plain(lines[-1])))
    if not named:
        raise NoVerdict("there is no answer block, and the last line states no answer")
    return named


def _named(answer: str, options: Mapping[str, str]) -> list[str]:
    """All letters that a text, read as an answer and nothing else, names."""
    text = plain(answer)
    bare = _BARE.fullmatch(text)
    if bare and bare[1].upper() in options:
        return [bare[1].upper()]
    wanted = folded(text)
    if same := [letter for letter, option in options.items() if folded(option) == wanted]:
        return same
    if bare:
        return [bare[1].upper()]
    first = _BEFORE_TEXT.match(text)
    if first and folded(text[first.end() :]) == folded(options.get(first[1].upper(), "")) != "":
        return [first[1].upper()]
    named = []
    label = _LABEL.match(text)
    if label and _is_label(label[2], label[3], text[label.end() :].strip(), options):
        letter = (label[1] or label[2]).upper()
        if folded(text[label.end() :]) == folded(options.get(letter, "")):
            return [letter]
        others = [*_LINE_LABEL.findall(answer), *_BRACKETED.findall(text)]
        named = [letter, *_listed(text, label.end(), options)]
        named += [other.upper() for other in others if other.upper() in options]
    return named + _stated(text, options, 0)


def _stated(text: str, options: Mapping[str, str], start: int) -> list[str]:
    """The letters of the statements of a text in one line that stand at `start` or later."""
    named = []
    for statement in _STATEMENT.finditer(text):
        if statement.start("letter") >= start and _holds(text, statement, options):
            letter = statement["letter"].upper()
            named.append(letter)
            words = folded(text[statement.end() :].lstrip(" .:,"))
            # `The answer is B. A type 1 error`, where this is B's text, lists no A
            if not words.startswith(folded(options.get(letter, "")) or words + " "):
                named += _listed(text, statement.end("letter"), options)
    return named


def _holds(text: str, statement: re.Match, options: Mapping[str, str]) -> bool:
    """Whether a statement is meant as one, and its letter as an option's."""
    letter, after = statement["letter"], text[statement.end() :]
    clause = _CLAUSE_ENDS.split(text[: statement.start()][-200:])[-1]
    if _DOUBT.search(clause) or _TAKEN_BACK.match(after):
        return False
    if statement["closing"]:
        return True
    if after[:1] == " ":
        # `the answer is a matter of taste`, or in capitals
        return letter not in "ai" and not (letter in "AI" and after[1:3].isupper())
    return _is_label(letter, after[:1], after[1:].strip(), options)


def _is_label(letter: str | None, mark: str | None, rest: str, options: Mapping[str, str]) -> bool:
    """Whether a letter before other words is an option's, and no abbreviation: C. difficile."""
    if mark != "." or not rest[:1].islower():
        return True
    return folded(options.get(letter.upper(), "")).startswith(folded(rest)[:20])


def _listed(text: str, place: int, options: Mapping[str, str]) -> list[str]:
    """The letters that follow a letter in a list: `B or C`, `A, B, C`, `A B`."""
    found = []
    while match := _AND_ANOTHER.match(text, place):
        letter = match[1].upper()
        joined = " or " in match[0] or " and " in match[0]
        if letter not in options or (not joined and _OPENS.match(text, match.start(1))):
            break
        found.append(letter)
        place = match.end()
    return found
