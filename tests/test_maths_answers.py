"""When two mathematical answers are the same."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.rewards.maths_answer import read
from rlx.rewards.maths_equal import equal
from rlx.rewards.maths_text import Unreadable

SHARED = Path(__file__).parents[2] / "shared"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the data folder is not here")


def same(gold: str, answer: str) -> bool:
    try:
        return equal(read(gold), read(answer))
    except Unreadable:
        return False


SAME = [
    # MTH-04, MTH-05, MTH-07, MTH-08
    *[("0,1", "(0,1)"), ("(0,1)", "0, 1"), ("12,34", "34, 12"), ("1,234", "1234")],
    *[("3,5,7", "7,5,3"), ("29", "$29.00"), ("29", "29."), ("29", "29.0"), ("29", r"\$29.00")],
    *[("29", "29%"), ("29.5", "29.5%"), ("0.29", "29%"), (r"50\%", "0.5"), (r"50\%", "50")],
    *[("2", r"\sqrt[3]{8}"), (r"\sqrt[3]2", r"\sqrt[3]{2}"), (r"\infty", r"+\infty")],
    *[(r"\left(1,2\right)", "(1,2)"), ("(1,2)", r"\left(1,2\right)"), ("12", "12 ft")],
    *[("5", r"5\text{ cm}"), (r"5\text{ cm}", "5"), ("90^\\circ", "90"), ("90", "90 degrees")],
    *[(r"864 \mbox{ inches}^2", "864 square inches"), (r"864 \mbox{ inches}^2", "864")],
    # MTH-10, MTH-11, MTH-13, MTH-16, MTH-17
    *[("-1/2", r"-\frac 12"), ("1/2", r"\frac12"), ("1/72", r"\frac1{72}"), ("73", "**73**")],
    *[("2/3", r"\frac{2}{3}"), ("2/3", "4/6"), ("8", "2^3"), ("1024", "2^10"), ("8", "2**3")],
    *[("x in [2,oo)", "x >= 2"), ("x >= 2", "x in [2,oo)"), (r"[2,\infty)", r"x \geq 2")],
    *[(r"x \in [-2,7]", r"-2 \le x \le 7"), (r"(3,4]", "4 >= x > 3"), ("x<2", "2>x")],
    *[(r"(-\infty, 2) \cup (3, \infty)", "x<2 or x>3"), (r"(0,9)\cup(9,36)", "(9,36)∪(0,9)")],
    # numbers
    *[("1\\frac{4}{5}", "9/5"), ("1 4/5", "1.8"), (r"137 \frac{1}{2}", "137.5"), ("025", "25")],
    *[(".35625", "0.35625"), (r"10,\!080", "10{,}080"), (r"11,\! 111,\! 100", "11111100")],
    *[(r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"), ("-3", "−3"), ("2/3", "0.666667")],
    *[(r"6.72 \times 10^{-5}", ".0000672"), ("1/2", r"\dfrac{1}{2}"), (r"\pi", "3.14159")],
    *[("120", "5!"), ("10", r"\binom{5}{2}"), ("3", r"\log_2 8"), ("1", r"\tan 45^\circ")],
    # expressions
    *[(r"11\sqrt2", r"\sqrt{242}"), (r"\cot x", r"\frac{\cos x}{\sin x}"), ("6 - 5i", "-5i+6")],
    *[("5", "(1+2i)(1-2i)"), ("(a+5)(b+2)", "ab+2a+5b+10"), ("x^5-1", "(x-1)(x^4+x^3+x^2+x+1)")],
    *[(r"\frac{11+9a}{20}", "0.45a + 0.55"), ("3R^2", "3 R^{2}"), (r"\frac{\pi}{6}", "pi/6")],
    *[(r"2\sqrt{13}", r"2\sqrt{13} \approx 7.21"), ("√13", r"\sqrt{13}"), ("5r^5", "5r^5")],
    *[(r"\tan^{-1} x", r"\arctan x"), ("e^{2}", r"\exp(2)"), ("|x|", "|-x|"), ("x_1", "x_{1}")],
    *[("f(x)+1", "1 + f(x)"), (r"\overline{AB}", r"\overline{AB}")],  # math-verify's
    # lists, points, matrices
    *[("1,-2", "-2, 1"), ("1,-2", r"x = 1 \text{ or } x = -2"), ("1,-2", r"\{-2, 1\}")],
    *[(r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"), ("5, -5", r"x = \pm 5")],
    *[(r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt 5"), (r"\{5\}", "5")],
    *[(r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"), ("(1,234)", "(1, 234)")],
    *[(r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}", r"\begin{bmatrix} -\frac13 \\ 2 \end{bmatrix}")],
    # names, equations
    *[("x=5", "5"), ("5", "x = 5"), ("7", "a + b = 7"), ("9", "2 + 7 = 9"), ("y = 2x + 3", "2x+3")],
    *[("5x - 7y + 11z + 4 = 0", "10x-14y+22z=-8"), ("y = 2x + 3", "2x-y+3=0")],
    *[("x + y < 3", "3 > x + y"), ("x + y < 3", "-2x - 2y > -6"), ("3.6", r"x \approx 3.6")],
    # words, bases
    *[(r"\text{(C)}", "C"), (r"\text{(C)}", r"\textbf{(C)}"), (r"\text{Evelyn}", "Evelyn")],
    *[
        (r"\text{even}", r"\text{Even}"),
        (r"\text{no}", "No"),
        ("52_8", "52"),
        ("4210_{5}", "4210_5"),
    ],
    # what is left of a sum by rounding is 0
    *[("0", r"\sin(\pi)"), ("0", r"e^{i\pi}+1"), ("0", r"\sqrt{2}-\sqrt{2}"), ("-1", r"\cos \pi")],
    *[("2^{-150}", r"\frac{1}{2^{150}}"), (r"\emptyset", r"\{\}"), ("0.5", ".5"), ("2.5", "2+.5")],
    # a calculation and its result
    *[
        ("18", r"9 \times 2 = 18"),
        ("18", "9*2=18"),
        ("4", r"\sqrt{16}=4"),
        ("18", r"9\cdot 2 = 18"),
    ],
    *[("5", r"\mathbf{5}"), ("5", r"\text{5}"), ("12", r"\text{12 apples}"), ("1/2", "0.5 cup")],
    *[("18", "$18 per day"), ("1,2,3", "1, 2, and 3"), ("1,2,3", r"1, 2, \text{ and } 3")],
]

DIFFERENT = [
    ("12,34", "1234"),  # every comma stripped
    ("(1,234)", "1234"),
    ("29", "0.29"),
    ("2/3", "0.6667"),
    ("2/3", "2"),
    ("109200000", "109200001"),  # a relative tolerance
    (".0000672", ".0000673"),  # rounded to six places, as math-verify does
    ("3.14", r"\pi"),
    ("2^{100}", "2^{100}+1"),  # floats
    ("1", "21"),
    ("14/5", "1 4/5"),
    (r"1\frac{4}{5}", r"\frac{4}{5}"),
    ("3x-y+13=0", "3x+4y+14=0"),  # MTH-14: both collapse to their 0
    ("0", "3x-y+13=0"),
    ("2x+z=1", "1"),  # MTH-17: gold and answer swapped
    ("5", "2x=5"),
    ("x=5", "y=5"),
    ("y = 2x + 3", "y = 2x - 3"),
    ("x + y < 3", "x + y > 3"),
    ("x + y < 3", r"x + y \le 3"),
    ("x<5", r"x\le 5"),
    ("x<5", "x>5"),
    (r"[2,\infty)", "x > 2"),
    ("(1,2)", "(2,1)"),
    ("(8,-2)", "(7,-3)"),  # both empty, as open intervals
    ("(2,4)", "[2,4]"),
    ("(0,9) \\cup (9,36)", "(0,36)"),
    ("2,3", "2"),
    ("1,-2", "1,-2,3"),
    ("1,1,2", "1,2,2"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}"),
    ("52_8", "52_9"),  # math-verify reads 52 in both
    ("52_8", "42"),
    ("40", "40_9"),
    (r"5.4 \text{ cents}", "5.4 dollars"),
    (r"15\mbox{ cm}^2", r"15\mbox{ cm}^3"),
    ("5", "5t"),  # math-verify's units are single letters too
    ("5000000", "5"),
    (r"\text{east}", "seat"),  # the same product of letters
    (r"\text{(C)}", "B"),
    (r"\text{Evelyn}", "Evelyn, Navin"),
    ("x^2", "x^3"),
    ("|x|", "x"),
    (r"\sqrt{x^2}", "x"),
    ("6 - 5i", "6 + 5i"),
    (r"\infty", r"-\infty"),
    ("5", r"\infty"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    (r"\frac{1}{2}", r"\frac{}{2}"),
    (r"f(x)", r"f(y)"),
    # minus infinity agrees with no number, in no place
    *[(gold, r"\ln 0") for gold in ("18", r"12\%", "x^2+1", r"\frac{\sqrt3}{2}", "f(x)=2x")],
    *[("18", r"\log(0)"), ("18", r"\ln(1-1)"), ("18", r"|\ln 0|"), ("18", r"(\ln 0)^2")],
    *[("(1,2)", r"(\ln 0,\ln 0)"), ("1,2", r"\ln 0, \ln 0"), ("5", r"\sqrt[\ln 0]{2}")],
    # a factor beside which the rest would vanish
    *[("y=2x+3", "10^{99}x=1"), ("x^2+y^2=25", "10^{99}x=1"), ("y^2=4x", "10^{50}t=1")],
    *[("x+2y<4", "x-10^{99}<0"), (r"x\ne 3", r"10^{99}t\ne 1"), ("y=2x+3", "10^{99}x+y=1")],
    *[(r"\frac{1}{2^{200}}", "0"), (r"\frac{1}{2^{200}}", r"\frac{1}{2^{300}}"), ("0", "10^{-50}")],
    *[
        ("52_8", "52_9^1"),
        ("52_8", "52_8/6"),
        ("52_8", "52_8+5"),
        ("5", r"\{\}"),
        (r"\sqrt{2}", ".0"),
    ],
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_the_same(gold, answer):
    assert same(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold, answer):
    assert not same(gold, answer)


def numbers() -> st.SearchStrategy[str]:
    whole = st.integers(-9999, 9999)
    decimal = st.builds(lambda a, b: f"{a}.{b}", whole, st.integers(0, 9999))
    below = st.integers(1, 99)
    slashed = st.builds(lambda a, b: f"{a}/{b}", whole, below)
    braced = st.builds(lambda a, b: rf"\frac{{{a}}}{{{b}}}", whole, below)
    return whole.map(str) | decimal | slashed | braced


@settings(deadline=None, max_examples=150)
@given(numbers(), numbers(), st.booleans())
def test_plain_numbers_compare_as_math_verify_compares_them(gold, answer, near):
    import math_verify

    if near:
        answer = gold + "0" if "." in gold else gold
    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    theirs = math_verify.verify(
        *(
            math_verify.parse(rf"\boxed{{{text}}}", config, parsing_timeout=None)
            for text in (gold, answer)
        ),
        timeout_seconds=None,
    )
    assert same(gold, answer) == theirs


@st.composite
def expressions(draw, depth: int = 4) -> tuple[str, Fraction]:
    """An expression in LaTeX, and its exact value."""
    if depth == 0 or draw(st.booleans()):
        value = draw(st.integers(0, 50))
        return str(value), Fraction(value)
    (a, x), (b, y) = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    match draw(st.sampled_from("+-*/f^")):
        case "+":
            return f"({a} + {b})", x + y
        case "-":
            return f"({a} - ({b}))", x - y
        case "*":
            times = draw(st.sampled_from([r"\cdot", r"\times", "*"]))
            return rf"({a}) {times} ({b})", x * y
        case "/" if y:
            return f"(({a})/({b}))", x / y
        case "f" if y:
            return rf"\frac{{{a}}}{{{b}}}", x / y
        case "^":
            return f"({a})^2", x * x
    return f"-({a})", -x


@settings(deadline=None)
@given(expressions())
def test_arithmetic_has_its_exact_value(expression):
    text, value = expression
    assert same(str(value), text) and same(text, str(value))
    assert not same(str(value + 1), text)
    assert not same(str(value - Fraction(1, 10**6)), text)


@settings(deadline=None)
@given(st.text(alphabet=r"0123456789xyfei+-*/^_(){}[]|!%°,;=<>\ .&$#", max_size=60), st.booleans())
def test_no_text_is_more_than_wrong(text, as_gold):
    """Any other exception than `Unreadable` would be the verifier's own failure."""
    same(*((text, "5") if as_gold else ("5", text)))


def data_set() -> list[str]:
    folder = SHARED / "data/math_problems"
    return [
        row["answer"]
        for name in ("math", "aime")
        for row in json.loads((folder / f"{name}.json").read_text())
    ]


@needs_data
def test_gold_answers_of_math_and_aime_are_right_and_perturbed_ones_wrong():
    golds = data_set()
    assert len(golds) == 530
    for gold in golds:
        assert same(gold, gold) and same(gold, f"${gold}$")
        assert same(gold, gold.replace(r"\left", "").replace(r"\right", ""))
        assert same(gold, re.sub(r"\\frac(?=\{)", r"\\dfrac", gold))
        wrong = [f"{gold}, 3", f"1, {gold}"]
        for number in re.finditer("[0-9]+", gold):
            more = int(number[0]) + 1
            wrong.append(f"{gold[: number.start()]}{more}{gold[number.end() :]}")
        if not gold.startswith("-") and gold != "0":
            wrong.append("-" + gold)
        if "+" in gold:
            wrong.append(gold.replace("+", "-", 1))
        for answer in wrong:
            assert not same(gold, answer), (gold, answer)


@needs_data
def test_model_outputs_that_were_judged_by_eye():
    """LLaDA's 84 on MATH: 29 are right, as a person reads them."""
    from rlx.rewards.maths import score

    path = SHARED / "data/math_graded/d1_math500_256_128_0.json"
    rows = json.loads(path.read_text())["generations"]
    right = [
        i
        for i, row in enumerate(rows)
        if score(row["generations"], {"answer": row["ground_truth"]}, extraction="any").correct
    ]
    assert right == [
        *[1, 2, 4, 11, 12, 13, 14, 16, 19, 20, 24, 28, 36, 37, 40, 45, 46, 49, 51, 53, 54],
        *[60, 61, 64, 66, 67, 68, 73, 75],
    ]
