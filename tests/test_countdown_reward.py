"""Countdown's verifier: the faults that others have shipped, and truths for every expression."""

import json
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import fuzz_countdown
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.rewards import VERIFIERS, RowError

score = VERIFIERS["countdown"]
DATA = Path(__file__).parents[2] / "shared/data/countdown"
STOP = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")


def answered(expression: str) -> str:
    return f"x</think><answer>{expression}</answer>"


def is_correct(expression: str, nums: list[int], target: int) -> bool:
    return score(answered(expression), {"nums": nums, "target": target}).correct


@pytest.mark.parametrize(
    ("expression", "nums", "target"),
    [
        ("81*1*1*1", [1, 81, 1, 1], 81),
        ("(7/3)*3", [7, 3, 3], 7),
        ("49*(1/49)", [49, 1, 49], 1),  # 0.9999999999999999 in floats
        ("3--2", [3, 2], 5),
        ("-2+3", [3, 2], 1),
        ("-(2-5)", [2, 5], 3),
        ("2*-(3-5)", [2, 3, 5], 4),
        (" \n 1 + 2 \n", [1, 2], 3),
        ("8/4/2", [8, 4, 2], 1),  # 4 if it associated to the right
        ("8-4-2", [8, 4, 2], 2),  # 6 if it associated to the right
        ("1+2*3", [1, 2, 3], 7),  # 9 without precedence
        ("((((1))))+2", [1, 2], 3),
        ("2-5", [2, 5], -3),
        ("0+7", [0, 7], 7),
    ],
)
def test_right_answers_are_correct(expression, nums, target):
    assert is_correct(expression, nums, target)


@pytest.mark.parametrize(
    ("expression", "nums", "target"),
    [
        ("81*1", [1, 81, 1, 1], 81),  # a set instead of a multiset says right
        ("1+1+1", [1, 1], 3),  # a number too often
        ("10/3", [10, 3], 3),  # int() of the value says right
        ("2**3-5", [2, 3, 5], 3),  # eval says right
        ("5//2", [5, 2], 2),  # eval says right
        ("2* *3-5", [2, 3, 5], 3),
        ("5/ /2", [5, 2], 2),
        ("1.5*2", [1, 5, 2], 3),  # digits [1, 5, 2], value 3.0
        ("07-2", [7, 2], 5),
        ("00+7", [0, 7], 7),
        ("(3)(4)", [3, 4], 12),
        ("3(4)", [3, 4], 12),
        ("(3)4", [3, 4], 12),
        ("3 4", [3, 4], 34),
        ("3 4", [34], 34),
        ("٣+2", [3, 2], 5),  # Arabic-Indic three: int() and str.isdigit take it
        ("２+3", [3, 2], 5),  # full-width two
        ("²+3", [3, 2], 5),  # isdigit is true, int() raises
        ("7/0", [7, 0], 0),
        ("7/(3-3)", [7, 3, 3], 0),
        ("1_0+2", [10, 2], 12),
        ("1e3", [1, 3], 1000),
        ("3---2", [3, 2], 1),
        ("--3+2", [3, 2], 5),
        ("+3+2", [3, 2], 5),
        ("3+2=5", [3, 2], 5),
        ("x+3+2", [3, 2], 5),
        ("3+2;", [3, 2], 5),
        ("3×2", [3, 2], 6),
        ("\\boxed{3+2}", [3, 2], 5),
        ("3+\u00a02", [3, 2], 5),
        ("3+\n2", [3, 2], 5),
        ("(3+2", [3, 2], 5),
        ("3+2)", [3, 2], 5),
        ("3+2()", [3, 2], 5),
        ("3+2+", [3, 2], 5),
        ("()", [3, 2], 5),
        ("-", [3, 2], 5),
        ("", [3, 2], 0),
        (" ", [3, 2], 0),
        ("__import__('os')", [3, 2], 0),
    ],
)
def test_wrong_answers_earn_the_format_alone(expression, nums, target):
    result = score(answered(expression), {"nums": nums, "target": target})
    layout = 1.0 if expression.strip() else 0.1
    assert not result.correct
    assert result.components == {"format": layout, "correct": 0.0}
    assert result.reward == pytest.approx(0.1 * layout)
    assert result.reason != "correct"


@pytest.mark.parametrize(
    ("completion", "layout"),
    [
        ("a</think><answer>b</answer>", 1.0),
        ("a</think> \n <answer>b</answer>", 1.0),
        ("</think><answer>b</answer>", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),  # a whole text: no prefill is added
        ("\n <think>a</think><answer>b</answer>", 1.0),
        ("a</think><think>c</think><answer>b</answer>", 0.5),  # lazy wildcards give 1.0
        ("a</think><answer>b</answer><answer>c</answer>", 0.1),  # as above
        ("a</think></think><answer>b</answer>", 0.5),
        ("a</think>and<answer>b</answer>", 0.6),
        ("a</think><answer>b</answer>and", 0.6),
        ("a<answer>b</answer></think>", 0.6),
        ("<answer>b</answer>", 0.5),
        ("a</think>", 0.1),
        ("a</think>b</answer>", 0.1),
        ("a</think></answer>b<answer>", 0.1),
        ("a</think><answer></answer>", 0.1),  # an empty answer is no pair
        ("a</think><answer> \n </answer>", 0.1),
        ("a</think><ANSWER>b</ANSWER>", 0.1),
        ("I do not know", 0.0),  # with the prompt's example before it: 0.5
        ("", 0.0),
    ],
)
def test_format(completion, layout):
    row = {"nums": [1, 2], "target": 3}
    assert score(completion, row).components["format"] == pytest.approx(layout)


def test_without_a_prefill_the_completion_opens_its_own_think_block():
    row = {"nums": [1, 2], "target": 3, "prefill": ""}
    assert score("a</think><answer>1+2</answer>", row).components["format"] == 0.5
    assert score("<think>a</think><answer>1+2</answer>", row).components["format"] == 1.0


@pytest.mark.parametrize("prefill", ["<think>", "Let me see.\n<think>", "<think>\n"])
def test_only_the_tag_of_a_prefill_counts(prefill):
    row = {"nums": [1, 2], "target": 3, "prefill": prefill}
    assert score("a</think><answer>1+2</answer>", row).reward == pytest.approx(1.1)


@given(st.lists(st.sampled_from([*STOP, " ", "\n", "\t"]), max_size=6))
def test_stop_tokens_and_white_space_at_the_end_change_nothing(tail):
    row = {"nums": [1, 2], "target": 3}
    assert score(answered("1+2") + "".join(tail), row) == score(answered("1+2"), row)


def test_text_after_the_stop_token_breaks_the_format():
    result = score(answered("1+2") + "<|im_end|>more", {"nums": [1, 2], "target": 3})
    assert result.components == {"format": 0.6, "correct": 1.0}


def test_the_last_answer_block_counts():
    row = {"nums": [1, 2], "target": 3}
    assert score("<answer>1*2</answer><answer>1+2</answer>", row).correct
    assert not score("<answer>1+2</answer><answer>1*2</answer>", row).correct
    assert score("<answer>1*2</answer><answer>1+2</answer><answer>1*", row).correct
    assert score("<answer>1*2 <answer>1+2</answer>", row).correct
    assert not score("<answer>1+2</answer> is right. <answer></answer>", row).correct


def test_format_weight_weighs_the_format():
    row = {"nums": [1, 2], "target": 3}
    assert score(answered("1+2"), row, format_weight=0.0).reward == 1.0
    assert score(answered("1*2"), row, format_weight=0.5).reward == 0.5


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"target": 3}, "nums"),
        ({"nums": [1, 2]}, "target"),
        ({"nums": "12", "target": 3}, "nums"),
        ({"nums": [], "target": 3}, "nums"),
        ({"nums": [1, "2"], "target": 3}, "nums"),
        ({"nums": [1, 2.0], "target": 3}, "nums"),
        ({"nums": [1, -2], "target": 3}, "nums"),
        ({"nums": [True, 2], "target": 3}, "nums"),
        ({"nums": [1, 2], "target": "3"}, "target"),
        ({"nums": [1, 2], "target": None}, "target"),
        ({"nums": [1, 2], "target": 3, "prefill": None}, "prefill"),
    ],
)
def test_a_bad_row_is_an_error_that_names_the_field(row, field):
    with pytest.raises(RowError, match=f"`{field}`"):
        score("", row)


def test_numpy_numbers_are_numbers():
    row = {"nums": np.array([1, 2]), "target": np.int64(3)}
    assert score(answered("1+2"), row).correct
    assert score(answered("1+2"), {"nums": [np.int32(1), 2], "target": 3}).correct


LINES_ROW = {"nums": [3, 5, 9], "target": 24}


def lines(text: str) -> float:
    return score(text, LINES_ROW, line_weight=0.2).components["lines"]


def test_without_a_line_weight_there_are_no_lines():
    text = "24-9=15 5*3\n</think><answer>5*3+9</answer>"
    result = score(text, LINES_ROW)
    assert set(result.components) == {"format", "correct"} and result.spans == ()
    assert result == score(text, LINES_ROW, line_weight=0.0)
    assert "lines" in score("", LINES_ROW, line_weight=0.2).components


def test_each_sound_line_earns_its_part_at_its_own_place():
    text = "<think>24-3=21 no \n24+9=32 no\n\nso\n24-9=15 5*3\n</think><answer>5*3+9</answer>"
    result = score(text, LINES_ROW, line_weight=0.3)
    assert [text[span.start : span.end] for span in result.spans] == [
        "<think>24-3=21 no",
        "24-9=15 5*3",
    ]
    assert [span.score for span in result.spans] == pytest.approx([0.1, 0.1])  # of 3 lines with =
    assert result.components["lines"] == pytest.approx(2 / 3)
    assert result.reward == pytest.approx(0.1 + 1 + 0.2)


@pytest.mark.parametrize(
    "text",
    [
        "24-9=15 15/3=5 5",
        "24 - 9 = 15, and 15 / 3 = 5.",
        "3*5=15\n15+9=24",  # on the result of a line before
        "9-5=4\n9-3=6",
        "try (3+5=8)",
        "24-9=15",  # broken off before the think block was closed
    ],
)
def test_lines_of_true_steps_from_what_is_there_are_sound(text):
    assert lines(text) == 1.0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("I think of 24 and 9", 0.0),
        ("24-9=14", 0.0),
        ("24-9=15 15/3=4", 0.0),  # one false step spoils the line
        ("24-9=15\n24-9=15\n24-9=15\n24-9=15", 1 / 4),  # 1 if repeats counted
        ("3+5=8\n5+3=8", 1 / 2),  # the same, turned round
        ("3+5=8 no\n3 + 5 = 8 ok", 1 / 2),
        ("24-9=15\n24-9=15 3+5=8", 1.0),  # the second one says something new
        ("7+7=14", 0.0),  # about numbers that nobody gave
        ("1*1=1", 0.0),
        ("3-3=0", 0.0),  # 3 is there once
        ("9/9=1", 0.0),
        ("3+5=8 3+9=12", 0.0),  # 3 twice within a line
        ("3+5=9\n9+9=18", 0.0),  # no result of a false line
        ("3+5=7\n7+9=16", 0.0),
        ("1+3+5=9", 0.0),  # `3+5=9` alone would be read; false anyhow
        ("9+3+5=8", 0.0),  # `3+5=8` alone is true
        ("2*(3)+5=8", 0.0),
        ("3+5=8=8", 0.0),
        ("3+5=8+0", 0.0),
        ("3+5=8-1=7", 0.0),
        ("-3+5=8", 0.0),
        ("3+5=8.5", 0.0),
        ("3+5=08", 0.0),
        ("3+5=8^2", 0.0),
        ("3+5=8!", 0.0),
        ("٣+5=8", 0.0),
        ("8=3+5", 0.0),
        ("=", 0.0),
        ("3+5=", 0.0),
        ("3+5=8\n24-9==15", 1 / 2),  # what cannot be read is counted all the same
        ("3/0=5", 0.0),
        ("5/3=1", 0.0),
        ("3+5=8" + " " * 1000, 0.0),
        ("x</think>3+5=8", 0.0),  # no reasoning any more
        ("x<answer>3+5=8</answer>", 0.0),
    ],
)
def test_lines_that_would_cheat_earn_nothing(text, share):
    assert lines(text) == pytest.approx(share)


def test_no_number_of_lines_earns_more_than_the_weight():
    found, text = 24, []
    for _ in range(300):
        text.append(f"{found}+9={found + 9}")
        found += 9
    result = score("\n".join(text), LINES_ROW, line_weight=0.2)
    assert result.components["lines"] == pytest.approx(200 / 300)  # those after 200 are not read
    assert sum(span.score for span in result.spans) == pytest.approx(0.2 * 200 / 300)
    assert result.reward == pytest.approx(0.2 * 200 / 300)


@given(st.lists(st.sampled_from([*"359=+-*/ \n.", "24", "15", "</think>", "\n24-9=15"])))
@settings(max_examples=300)
def test_the_reward_contains_the_spans_whatever_is_written(pieces):
    text = "".join(pieces)
    plain, result = score(text, LINES_ROW), score(text, LINES_ROW, line_weight=0.25)
    earned = sum(span.score for span in result.spans)
    assert 0 <= earned <= 0.25 + 1e-9
    assert result.reward == pytest.approx(plain.reward + earned)
    ends = [0, *(place for span in result.spans for place in span[:2])]
    assert ends == sorted(ends) and ends[-1] <= len(text)


# An expression tree, its text written with or without parentheses, and its value by Fraction.
LEAF = st.integers(0, 99).map(lambda n: (str(n), [n], Fraction(n), 3))


def join(left, operator, right, spare, gap):
    """Text, numbers, value and binding (1: sum, 2: product, 3: atom) of two trees joined."""
    (a, a_nums, a_value, a_binds), (b, b_nums, b_value, b_binds) = left, right
    binds = 1 if operator in "+-" else 2
    if spare or a_binds < binds:
        a = f"({a})"
    if spare or b_binds < binds or (b_binds == binds and operator in "-/"):
        b = f"({b})"
    if a_value is None or b_value is None or (operator == "/" and b_value == 0):
        value = None
    else:
        value = {
            "+": lambda: a_value + b_value,
            "-": lambda: a_value - b_value,
            "*": lambda: a_value * b_value,
            "/": lambda: a_value / b_value,
        }[operator]()
    return f"{a}{gap}{operator}{gap}{b}", a_nums + b_nums, value, binds


TREES = st.recursive(
    LEAF,
    lambda inner: st.builds(
        join, inner, st.sampled_from("+-*/"), inner, st.booleans(), st.sampled_from(["", " "])
    ),
    max_leaves=6,
)


@given(TREES)
def test_an_expression_is_correct_for_its_own_value_alone(tree):
    text, nums, value, _ = tree
    if value is not None and value.denominator == 1:
        assert is_correct(text, nums, int(value))
        assert is_correct(f"-({text})", nums[::-1], -int(value))
        assert not is_correct(text, nums, int(value) + 1)
        assert not is_correct(text, [*nums, 1], int(value))
    else:
        assert not is_correct(text, nums, int(value or 0))


PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", *STOP, *"0123 +-*/().", "12", "**", "٣", "\n"]
)


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
@settings(max_examples=300)
def test_no_text_raises_and_rewards_stay_in_range(text):
    result = score(text, {"nums": [1, 2, 3], "target": 6})
    assert 0.0 <= result.reward <= 1.1 + 1e-9
    assert result.correct == (result.components["correct"] == 1.0)
    assert result.reward == pytest.approx(0.1 * result.components["format"] + result.correct)


MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    "completion",
    [
        answered("9**9**9**9"),
        answered("((9**9)**9999)**9999"),
        answered("(" * 5000 + "1" + ")" * 5000),
        answered("(" * 400 + "1+2" + ")" * 400),
        answered("-(" * 300 + "1+2" + ")" * 300),
        answered("1+" * (MEGABYTE // 2) + "1"),
        answered("9" * MEGABYTE),
        answered("9" * 999),
        answered("*".join(["99"] * 333)),
        answered(" " * MEGABYTE),
        "1+" * (MEGABYTE // 2),
        " " * MEGABYTE + "x",
        "x" + " " * MEGABYTE,
        "</s> " * (MEGABYTE // 5),
        "<answer>" * (MEGABYTE // 8),
        "</answer>" * (MEGABYTE // 9),
        "<answer></answer>" * (MEGABYTE // 17),
        "</answer><answer>" * (MEGABYTE // 17),
        "<think>" * (MEGABYTE // 7),
    ],
    ids=lambda completion: f"{completion[:30]!r}",
)
def test_hostile_text_is_wrong_within_50_ms(completion):
    row = {"nums": [1, 2], "target": 3}
    seconds = []
    for _ in range(3):  # the best of three, and of this process alone: the machine may be busy
        start = time.process_time()
        result = score(completion, row)
        seconds.append(time.process_time() - start)
    assert not result.correct
    assert min(seconds) < 0.05


@pytest.mark.parametrize("piece", ["=", "=\n", "3+5=8\n", "3+5=8 ", "9" * 50 + "+1=2\n"])
def test_hostile_lines_are_read_within_100_ms(piece):
    start = time.process_time()
    score(piece * (MEGABYTE // len(piece)), {"nums": [3, 5], "target": 8}, line_weight=0.1)
    assert time.process_time() - start < 0.1


def test_long_products_of_the_given_numbers_stay_fast():
    nums = [99] * 333
    start = time.process_time()
    assert is_correct("*".join(map(str, nums)), nums, 99**333)
    assert not is_correct("/".join(map(str, nums)), nums, 1)
    assert time.process_time() - start < 0.1


@pytest.mark.skipif(not DATA.exists(), reason="the optional data folder is not there")
def test_generations_of_another_model_score_as_python_would_have_it():
    seen = right = 0
    for file in sorted(DATA.glob("d1_countdown_*.json")):
        for item in json.loads(file.read_text())["generations"]:
            nums, target = item["ground_truth"]
            text = re.sub(r"\\boxed\{(.*?)\}", r"\1", item["generations"])
            raw = score(item["generations"], {"nums": nums, "target": target})
            result = score(text, {"nums": nums, "target": target})
            assert not (raw.correct and not result.correct)
            blocks = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
            expression = blocks[-1].strip() if blocks else ""
            expected = False
            if re.fullmatch(r"[0-9+\-*/() ]+", expression) and "**" not in expression:
                digits = sorted(map(int, re.findall(r"[0-9]+", expression)))
                try:
                    # the suite's own data, not a user's: eval is the independent reference here
                    value = eval(re.sub(r"([0-9]+)", r"Fraction(\1)", expression))
                    expected = digits == sorted(nums) and value == target
                except (SyntaxError, TypeError, ZeroDivisionError):
                    pass
            assert result.correct == expected
            seen, right = seen + 1, right + expected
    assert seen > 0
    assert 0 < right < seen


def test_scoring_imports_no_jax():
    modules = "rlx.rewards.host, rlx.score_file, rlx.tasks"
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"


def test_odd_and_hostile_answers_are_judged_as_a_slow_check_judges_them():
    """`python tests/fuzz_countdown.py` does the same for a million."""
    counts = fuzz_countdown.fuzz(3000, seed=7)
    assert counts["right"] > 300 and len(counts) > 20
