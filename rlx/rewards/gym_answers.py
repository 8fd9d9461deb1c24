"""What answers may not reach reasoning-gym's scorers, as of version 0.1.25. No JAX.

Some scorers run answers as Python: `sympy.parse_expr` and `eval` run whatever they are given. So an
answer to a data set of EXPRESSIONS must be an expression of a small grammar, and one to a data set
of LITERALS a literal, a bare word, or no expression at all (the usual case: `1 2 3` is none).

Some scorers take wrong answers for right: `game_of_life_halting` any text, `coin_flip` the first
digit, `puzzle24` other numbers than the given ones, `complex_arithmetic` a NaN. Here these four are
held to their questions.
"""

import ast
import inspect
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 1000
MAX_EXPONENT = 99
MAX_WEIGHT = 5000
"""Of an expression: bits of its numbers and count of its names, added up, times exponents."""

ARITHMETIC = frozenset({"countdown", "puzzle24"})
EXPRESSIONS = ARITHMETIC | {
    "polynomial_multiplication",
    "simple_integration",
    "intermediate_integration",
}
LITERALS = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
HARMLESS = frozenset({"number_sorting"})
"""These run their own answer alone."""

FUNCTIONS = frozenset(("exp", "log", "ln", "sqrt", "Abs", "sin", "cos", "tan", "sec", "csc", "cot"))
FUNCTIONS |= {"asin", "acos", "atan", "sinh", "cosh", "tanh"}
"""`Integral` is not among them: that of the integrand would answer every question."""

COIN_FLIP_TOLERANCE = Fraction(1, 10_000)
"""Its scorer's own."""

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_RUNS = re.compile(r"\b(?:eval|exec|compile|parse_expr|sympify|__import__)\(")


def objection(name: str, answer: str, entry: Mapping) -> str:
    """Why an answer may not reach the scorer of data set `name`; "" where it may."""
    if name in LITERALS:
        return _no_literal(answer)
    if name == "game_of_life_halting":
        same = answer.casefold() == str(entry["answer"]).casefold()
        return "" if same else f"the answer is not {entry['answer']}"
    if name == "complex_arithmetic" and re.search(r"nan|inf", answer.casefold()):
        return "the answer is no number"
    if name == "coin_flip":
        return _other_number(answer, entry["answer"])
    if name not in EXPRESSIONS:
        return ""
    if len(answer) > MAX_CHARACTERS:
        return f"the answer is longer than {MAX_CHARACTERS} characters"
    try:
        # names of other scripts could become ASCII ones
        tree = ast.parse(answer if answer.isascii() else "", mode="eval")
        if _weight(tree.body, name not in ARITHMETIC) > MAX_WEIGHT:
            return "the answer's numbers and powers are too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "the answer is no expression of numbers, operators and known functions"
    if name == "puzzle24":
        numbers = entry["metadata"].get("numbers", [])
        if sorted(map(int, re.findall(r"[0-9]+", answer))) != sorted(numbers):
            return f"the answer does not use each of {numbers} exactly once"
    return ""


def runs_answers(name: str, dataset: Any) -> bool:
    """Whether a scorer that is not known here runs something as code."""
    if name in EXPRESSIONS | LITERALS | HARMLESS:
        return False
    return _RUNS.search(inspect.getsource(type(dataset).score_answer)) is not None


def _weight(node: ast.expr, symbols: bool) -> float:
    """How large an expression's value may be; ValueError where it is not of the grammar."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if isinstance(number, float) and not (symbols and math.isfinite(number)):
                raise ValueError
            return 1.0 + math.log2(abs(number) + 1)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _weight(operand, symbols)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if symbols:
            return _weight(left, symbols) * _exponent(right)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            return _weight(left, symbols) + _weight(right, symbols)
        case ast.Name(id=name) if symbols and (_is_letter(name) or name == "pi"):
            return 1.0
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
            symbols and name in FUNCTIONS
        ):
            return 1.0 + _weight(argument, symbols)
    raise ValueError


def _exponent(node: ast.expr) -> float:
    """A small number, a fraction of two, or a letter; whatever else there is might be evaluated to
    a large one."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _exponent(operand)
        case ast.Constant(value=int() | float() as number) if number <= MAX_EXPONENT:
            return 1.0 + number
        case ast.BinOp(left=ast.Constant() as over, op=ast.Div(), right=ast.Constant() as under):
            return _exponent(over) + _exponent(under)
        case ast.Name(id=name) if _is_letter(name):
            return 1.0
    raise ValueError


def _is_letter(name: str) -> bool:
    return len(name) == 1 and name.isalpha()


def _no_literal(answer: str) -> str:
    try:
        tree = ast.parse(answer, mode="eval")
    except (SyntaxError, ValueError):
        return ""
    except (RecursionError, MemoryError):
        return "the answer is nested too deeply"
    if isinstance(tree.body, ast.Name):
        return ""
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return "the answer is an expression, where a value should stand"
    return ""


def _other_number(answer: str, gold: str) -> str:
    try:
        # an exponent can make a fraction of any size
        numbers = [Fraction(text) for text in (answer, gold) if not re.search(r"[eE]", text)]
    except (ValueError, ZeroDivisionError):
        numbers = []
    if len(numbers) < 2 or abs(numbers[0] - numbers[1]) > COIN_FLIP_TOLERANCE:
        return f"the answer is not {gold}"
    return ""
