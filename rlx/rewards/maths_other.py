r"""Equality by math-verify, of expressions that `maths_value` cannot read. No JAX.

Its own time limits are off: they are signals, which work in no thread and disturb a worker that has
a limit of its own. So what reaches it is short, shallow and holds nothing that sympy would compute
for hours.
"""

import logging
import math
import re
from functools import cache, lru_cache
from typing import Any

MAX_CHARACTERS = 120
MAX_DEPTH = 6
MAX_POWER = 12
"""Of all exponents, multiplied: they may stand upon each other, and sympy expands sums."""
# factorials and what else sympy computes as it reads; a power in an exponent
_HEAVY = re.compile(
    r"!|\\(?:sum|prod|i*int|oint|lim|d?binom|det)(?![a-zA-Z])|\^\s*\{[^{}]*(?:\{|\^)"
)
_EXPONENT = re.compile(r"\^\s*\{?([^{}]*)")


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
    powers = [int(n) for e in _EXPONENT.findall(text) for n in re.findall("[0-9]+", e)]
    return (
        len(text) > MAX_CHARACTERS
        or deepest > MAX_DEPTH
        or text.count("|") > 4
        or math.prod(powers) > MAX_POWER
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
