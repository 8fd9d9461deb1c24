"""Worked Countdown traces: their form, their arithmetic, and when their answers are right."""

import random
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.rewards import VERIFIERS
from rlx.tasks import TASKS
from rlx.tasks.countdown import draw_problem
from rlx.tasks.countdown_traces import LARGEST, attempts, demonstrate

NUMS = st.lists(st.integers(1, 99), min_size=2, max_size=4)
ROWS = st.builds(lambda nums, target: {"nums": nums, "target": target}, NUMS, st.integers(1, 99))
SEEDS = st.integers(0, 10**9)


def split(trace: str) -> tuple[list[str], str]:
    thought, _, answer = trace.partition("</think>")
    assert thought == "" or thought.endswith("\n")
    return thought.splitlines(), re.fullmatch(r"<answer>(.+)</answer>", answer)[1]


@given(ROWS, SEEDS, st.booleans())
def test_a_trace_has_the_form_and_is_right_exactly_after_success(row, seed, solvable):
    rng = random.Random(seed)
    if solvable:
        limits = {"values": (1, 99), "targets": (1, LARGEST - 1)}
        draws = (draw_problem(rng, len(row["nums"]), **limits) for _ in range(9))
        nums, target = next(filter(None, draws), (row["nums"], row["target"]))
        row = {"nums": nums, "target": target}
    trace = demonstrate(row, rng, give_up=0.1)
    lines, _ = split(trace)
    succeeded = bool(lines) and not lines[-1].endswith("no")
    result = VERIFIERS["countdown"](trace, row)
    assert result.components["format"] == 1.0
    assert result.correct == succeeded, (trace, result.reason)
    # a guess uses every number once all the same: it fails by its value, or divides by zero
    assert succeeded or "value" in result.reason or "zero" in result.reason
    assert all(line.endswith("no") for line in lines[:-1])
    assert len(set(lines)) == len(lines)


@given(ROWS, SEEDS)
def test_every_equation_in_a_trace_is_true_and_follows_from_the_last(row, seed):
    lines, _ = split(demonstrate(row, random.Random(seed), give_up=0.0))
    for line in lines[:200]:
        remainder, left = row["target"], Counter(row["nums"])
        *equations, end = line.split(" ")
        assert len(equations) == len(row["nums"]) - 2
        for equation in equations:
            a, operator, b, rest = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", equation).groups()
            a, b, rest = int(a), int(b), int(rest)
            assert remainder in (a, b)
            used = b if a == remainder else a
            if b == remainder and left[b] == 0:
                used = a
            assert left[used] > 0
            left[used] -= 1
            value = {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)}[operator]
            assert value == rest and 0 < rest <= LARGEST
            remainder = rest
        if end != "no":
            assert VERIFIERS["countdown"](
                f"</think><answer>{end}</answer>",
                {"nums": list(left.elements()), "target": remainder},
            ).correct


@pytest.mark.parametrize("give_up", [0.0, 0.35, 1.0])
def test_persistence_wins(give_up):
    task = TASKS["countdown"](
        seed=0, train_size=300, heldout_size=1, numbers=(3,), highest=10, give_up=give_up
    )
    rng = random.Random(0)
    solved = sum(task.score(task.demonstrate(row, rng), row).correct for row in task.train)
    # every generated problem of three numbers is solved by undoing one whole step
    low, high = {0.0: (300, 300), 0.35: (120, 240), 1.0: (20, 110)}[give_up]
    assert low <= solved <= high


def test_each_attempt_is_made_once_and_any_may_be_the_first():
    row = (24, (3, 5, 9))
    chains = list(attempts(*row, random.Random(0)))
    assert len(chains) == len(set(chains))
    assert {chain[0].equation for chain in chains} == {
        *("24-3=21", "24+3=27", "24*3=72", "24/3=8"),
        *("24-5=19", "24+5=29"),
        *("24-9=15", "24+9=33"),
    }
    firsts = Counter(next(attempts(*row, random.Random(s)))[0].equation for s in range(1000))
    assert len(firsts) == 8 and min(firsts.values()) > 60


def test_the_example_of_the_documentation_is_a_trace():
    traces = {
        demonstrate({"nums": [3, 5, 9], "target": 24}, random.Random(s), give_up=0.0)
        for s in range(300)
    }
    assert "24-9=15 5*3\n</think><answer>5*3+9</answer>" in traces


@pytest.mark.parametrize(
    ("nums", "target", "answers"),
    [
        ([2, 3, 10], 5, {"10-(3+2)"}),
        ([3, 2, 8], 40, {"(3+2)*8"}),
        ([2, 12, 18], 3, {"18/(12/2)"}),
        ([7, 7], 1, {"7/7"}),
        ([6, 2], 12, {"6*2"}),
    ],
)
def test_answers_have_no_parenthesis_too_many(nums, target, answers):
    rows = {"nums": nums, "target": target}
    seen = {split(demonstrate(rows, random.Random(s), give_up=0.0))[1] for s in range(60)}
    assert answers <= seen


def test_a_trace_needs_two_numbers_and_a_probability():
    with pytest.raises(ValueError, match="at least two numbers"):
        demonstrate({"nums": [1], "target": 1}, random.Random(0), give_up=0.5)
    with pytest.raises(ValueError, match="`give_up`"):
        demonstrate({"nums": [1, 2], "target": 3}, random.Random(0), give_up=1.5)
