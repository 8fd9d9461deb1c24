r"""Equality by math-verify, of expressions that `maths_value` cannot read. No JAX.

Its own time limits are off: they are signals, which work in no thread and disturb a worker that has
a limit of its own. So what reaches it is short, shallow and holds nothing that sympy would compute
for hours.
"""

import logging
import re
from functools import cache, lru_cache
from typing import Any

MAX_CHARACTERS = 120
MAX_DEPTH = 6
_HEAVY = re.compile(
    r"!|\\(?:sum|prod|int|oint|lim|binom|det|iint)(?![a-zA-Z])|\^\{?-?[^{}]*[0-9]{3}"
)


def equal(gold: str, answer: str) -> bool:
    """Whether math-verify finds the answer equal to the gold one, which comes first there too."""
    if any(_is_heavy(text) for text in (gold, answer)):
        return False
    library = _library()
    parsed = [_parsed(text) for text in (gold, answer)]
    return all(parsed) and library.verify(*parsed, float_rounding=12, timeout_seconds=None)


def _is_heavy(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return (
        len(text) > MAX_CHARACTERS
        or deepest > MAX_DEPTH
        or text.count("|") > 4
        or _HEAVY.search(text) is not None
    )


@lru_cache(maxsize=2048)
def _parsed(text: str) -> list[Any]:
    library = _library()
    config = library.LatexExtractionConfig(
        try_extract_without_anchor=False,
        boxed_match_priority=0,
        normalization_config=_normalization(),
    )
    return library.parse(
        rf"\boxed{{{text}}}", [config], fallback_mode="no_fallback", parsing_timeout=None
    )


@cache
def _normalization() -> Any:
    from latex2sympy2_extended import NormalizationConfig  # math-verify's parser

    # its units are single letters too: with them on, 5t is 5
    return NormalizationConfig(units=False, boxed="last")


@cache
def _library() -> Any:
    import math_verify  # slow to import, and few answers need it

    # it warns of limits that are off, once a process
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify
