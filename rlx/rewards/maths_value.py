r"""The value of an elementary expression in LaTeX or plain notation, at three fixed points. No JAX.

    expression = term {("+" | "-") term}
    term       = power {["\cdot" | "\times" | "/" | "\div"] power}
    power      = ["-"] atom {"!" | "°"} ["^" exponent]
    atom       = number | mixed number | letter [subscript] | constant | function power {power}
               | "\frac" | "\sqrt" | "\binom" | "(" expression ")" | "|" expression "|"

Two expressions that agree to 40 digits where each letter has three values drawn by its name are
the same function, but by an accident that nobody meets. This takes microseconds and a bounded time,
where simplifying their difference may take for ever. `e` and `i` are the constants.
"""

import re
import zlib
from functools import cache, lru_cache
from typing import Any, NamedTuple

from rlx.rewards.maths_text import Unreadable

DIGITS = 50
AGREEMENT = 40
"""Digits in which equal values agree."""
CANCELLED = 44
"""A sum that is smaller than its terms by so many digits is 0."""
LARGEST_EXPONENT = 2000
LARGEST_BITS = 40_000
"""Of a power: towers of powers end here."""
LARGEST_FACTORIAL = 100
POINTS = 3

_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[a-zA-Z]+|\\[{}|]|[a-zA-Z]|[-+/^_(){}\[\]|!°]")
_PLAIN_FRACTION = ["{", "0", "}", "{", "0", "}"]
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
_TIMES = (r"\cdot", r"\times")
_OVER = ("/", r"\div")
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho"
    r"|sigma|tau|upsilon|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega"
    r"|ell)"
)
_FUNCTIONS = {
    r"\sin": "sin",
    r"\cos": "cos",
    r"\tan": "tan",
    r"\cot": "cot",
    r"\sec": "sec",
    r"\csc": "csc",
    r"\arcsin": "asin",
    r"\arccos": "acos",
    r"\arctan": "atan",
    r"\sinh": "sinh",
    r"\cosh": "cosh",
    r"\tanh": "tanh",
    r"\exp": "exp",
    r"\ln": "log",
    r"\log": "log",
}
_PERIODIC = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))


class Unknown(Exception):
    """The text is outside this grammar; something else may know how to read it."""


class Values(NamedTuple):
    """What an expression is at each of the points: three times the same where it has no letter."""

    at: tuple[Any, ...]
    letters: frozenset[str]


@lru_cache(maxsize=8192)
def values(text: str) -> Values:
    """Of a cleaned text. Raises Unknown, or Unreadable where it has no value."""
    tokens = _tokens(text)
    first = _Evaluation(tokens, 0)
    at = [first.whole()]
    for point in range(1, POINTS):
        at.append(_Evaluation(tokens, point).whole() if first.letters else at[0])
    return Values(tuple(at), frozenset(first.letters))


def close(a: Any, b: Any) -> bool:
    """Whether two values agree in all digits that count. Only 0 agrees with 0."""
    return abs(a - b) <= max(abs(a), abs(b)) * _mp().mpf(10) ** -AGREEMENT


def rounds_to(value: Any, decimal: str) -> bool:
    """Whether a decimal, given as its digits, is the real value rounded to as many places."""
    mp = _mp()
    places = len(decimal.partition(".")[2])
    return abs(value.imag) == 0 and abs(value.real - mp.mpf(decimal)) <= mp.mpf(10) ** -places / 2


@cache
def _mp() -> Any:
    import mpmath  # with sympy, on which math-verify stands

    # a context of our own: the module's has a precision that anyone may set
    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


def _tokens(text: str) -> list[str]:
    tokens, end = [], 0
    for match in _TOKEN.finditer(text):
        if text[end : match.start()].strip():
            break
        tokens.append(match[0])
        end = match.end()
    if text[end:].strip():
        raise Unknown(f"{text[end:].strip()[:1]!r} is no part of an expression")
    return tokens


class _Evaluation:
    """One pass over the tokens, at one of the points."""

    def __init__(self, tokens: list[str], point: int):
        self.tokens = tokens
        self.place = 0
        self.point = point
        self.letters: set[str] = set()
        self.mp = _mp()

    @property
    def token(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.token
        if token not in wanted or not token:
            return ""
        self.place += 1
        return token

    def need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise Unreadable(f"{self.token or 'the end'!r} stands where {wanted!r} should")

    def whole(self) -> Any:
        value = self.expression()
        if self.token:
            raise Unreadable(f"{self.token!r} stands where an operator or the end should")
        return self.finite(value)

    def finite(self, value: Any) -> Any:
        if not self.mp.isfinite(value):
            raise Unreadable("the answer is infinite, or has no value")
        return value

    def expression(self) -> Any:
        value = self.term()
        largest = abs(value)
        while operator := self.take("+", "-"):
            other = self.term()
            largest = max(largest, abs(other))
            value = value + other if operator == "+" else value - other
        return self.without_residue(value, largest)

    def without_residue(self, value: Any, size: Any) -> Any:
        """0 where what is left is what rounding left of terms of this size."""
        return self.mp.mpc(0) if abs(value) < size * self.mp.mpf(10) ** -CANCELLED else value

    def term(self) -> Any:
        value = self.power()
        while True:
            if self.take(*_TIMES):
                value = value * self.power()
            elif self.take(*_OVER):
                value = self.quotient(value, self.power())
            elif self.starts_factor():
                value = value * self.power()
            else:
                return value

    def starts_factor(self) -> bool:
        """Whether what comes next multiplies what came before. A number never does: `1 2`."""
        token = self.token
        return bool(token) and (
            token.isalpha()
            or token in ("(", "[", "{", r"\{", r"\frac", r"\sqrt", r"\binom", r"\pi")
            or token in _FUNCTIONS
            or _GREEK.fullmatch(token) is not None
        )

    def power(self) -> Any:
        sign = 1
        while operator := self.take("-", "+"):
            sign = -sign if operator == "-" else sign
        value = self.atom()
        while mark := self.take("!", "°"):
            value = self.factorial(value) if mark == "!" else value * self.mp.pi / 180
        if self.take("^"):
            value = self.raised(value, self.group())
            if self.token == "^":
                raise Unreadable("a power stands on a power")
        return sign * value

    def atom(self) -> Any:
        token = self.token
        self.place += 1
        if token[:1].isdigit() or token.startswith("."):
            return self.mp.mpc(f"0{token}") + self.mixed_part(token)
        if token in ("(", "[", "{", r"\{"):
            value = self.expression()
            self.need(_CLOSING[token])
            return value
        if token == "|":
            value = self.expression()
            self.need("|")
            return self.mp.mpc(abs(value))
        if token == r"\frac":
            return self.quotient(self.group(), self.group())
        if token == r"\sqrt":
            return self.root()
        if token == r"\binom":
            return self.binomial(self.group(), self.group())
        if token in _FUNCTIONS:
            return self.function(_FUNCTIONS[token], token == r"\log")
        if token == r"\pi":
            return self.mp.mpc(self.mp.pi)
        if token in ("e", "i") and self.token != "_":
            return self.mp.mpc(self.mp.e) if token == "e" else self.mp.mpc(0, 1)
        if token.isalpha() or _GREEK.fullmatch(token):
            return self.letter(token)
        if token.startswith("\\"):
            raise Unknown(f"{token} is not known")
        raise Unreadable(f"{token or 'the end'!r} stands where a number should")

    def mixed_part(self, token: str) -> Any:
        r"""`1\frac{4}{5}` is 9/5: a fraction of plain numbers behind a whole number is added."""
        ahead = self.tokens[self.place : self.place + 7]
        shape = ["0" if word.isdigit() else word for word in ahead]
        if not token.isdigit() or shape != [r"\frac", *_PLAIN_FRACTION]:
            return 0
        self.place += 7
        return self.quotient(self.mp.mpc(ahead[2]), self.mp.mpc(ahead[5]))

    def letter(self, name: str) -> Any:
        if self.take("_"):
            if self.take("{"):
                end = self.place
                while self.token not in ("}", ""):
                    self.place += 1
                name = f"{name}_{''.join(self.tokens[end : self.place])}"
                self.need("}")
            else:
                name = f"{name}_{self.token}"
                self.place += 1
        if self.token == "(" and name in ("f", "g", "h", "P", "Q"):
            raise Unknown(f"{name} is a function")
        self.letters.add(name)
        drawn = zlib.crc32(f"{name} {self.point}".encode()) / 2**32 + self.mp.mpf(1) / 3
        return self.mp.mpc(-drawn if self.point == 1 else drawn)

    def group(self) -> Any:
        self.need("{")
        value = self.expression()
        self.need("}")
        return value

    def root(self) -> Any:
        degree = self.mp.mpc(2)
        if self.take("["):
            degree = self.expression()
            self.need("]")
        radicand = self.group()
        odd = degree.imag == 0 and degree.real == int(degree.real) and int(degree.real) % 2 == 1
        if odd and radicand.imag == 0 and radicand.real < 0:  # the real cube root of -8
            return -self.raised(-radicand, self.quotient(self.mp.mpc(1), degree))
        return self.raised(radicand, self.quotient(self.mp.mpc(1), degree))

    def function(self, name: str, decimal: bool) -> Any:
        base = None
        if decimal and self.take("_"):
            base = self.group() if self.token == "{" else self.atom()
        exponent = None
        if self.take("^"):
            exponent = self.group()
            if exponent == -1:
                if name not in ("sin", "cos", "tan"):
                    raise Unknown("an inverse function")
                name, exponent = "a" + name, None
        bracketed = self.token in ("(", "{")
        argument = self.power()
        while not bracketed and self.starts_factor() and self.token not in ("(", *_FUNCTIONS):
            argument = argument * self.power()
        if name in _PERIODIC | {"exp", "sinh", "cosh", "tanh"} and abs(argument) > 10**6:
            raise Unreadable("the argument of a function is too large")
        try:
            value = getattr(self.mp, "ln" if name == "log" else name)(argument)
            if base is not None:
                value = self.quotient(value, self.mp.ln(base))
        except (ZeroDivisionError, ValueError) as error:
            raise Unreadable("a function has no value there") from error
        value = self.finite(self.mp.mpc(value))
        if name in _PERIODIC:  # sin(pi)
            value = self.without_residue(value, min(1, abs(argument)))
        return value if exponent is None else self.raised(value, exponent)

    def quotient(self, a: Any, b: Any) -> Any:
        if b == 0:
            raise Unreadable("the answer divides by zero")
        return a / b

    def raised(self, base: Any, exponent: Any) -> Any:
        if abs(exponent) > LARGEST_EXPONENT:
            raise Unreadable(f"an exponent is larger than {LARGEST_EXPONENT}")
        if base == 0 and exponent.real <= 0:
            if exponent == 0:
                return self.mp.mpc(1)
            raise Unreadable("the answer divides by zero")
        if base != 0 and abs(self.mp.mag(base) * exponent) > LARGEST_BITS:
            raise Unreadable("a power is too large")
        return self.mp.mpc(self.mp.power(base, exponent))

    def factorial(self, value: Any) -> Any:
        return self.mp.mpc(self.mp.factorial(self.whole_number(value)))

    def binomial(self, n: Any, k: Any) -> Any:
        return self.mp.mpc(self.mp.binomial(self.whole_number(n), self.whole_number(k)))

    def whole_number(self, value: Any) -> int:
        if value.imag != 0 or not 0 <= value.real <= LARGEST_FACTORIAL:
            raise Unreadable(f"a factorial is of no whole number up to {LARGEST_FACTORIAL}")
        if value.real != int(value.real):
            raise Unreadable("a factorial is of no whole number")
        return int(value.real)
