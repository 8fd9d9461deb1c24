"""The gym: reasoning-gym's data sets by name, their own scorers, and what may not reach these."""

import json
import pickle
import sys
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import BadInput
from rlx.rewards import RowError, gym
from rlx.rewards.gym_answers import EXPRESSIONS, HARMLESS, LITERALS, objection, runs_answers
from rlx.tasks.gym import load, make_row
from rlx.tasks.gym_rows import Wanted, draw, draw_here

factory = pytest.importorskip("reasoning_gym.factory")

SLOW = {"futoshiki", "knight_swap"}
"""Seconds for each problem."""
MANY_ANSWERS = {
    "boxnet": None,  # without an example
    "graph_color": lambda m: json.dumps({str(k): v for k, v in m["possible_answer"].items()}),
    "rubiks_cube": lambda m: m["example_correct_answer"],
    "rush_hour": None,
}
"""Data sets that give no answer of their own, and where an item has an example of one."""


def rows_of(name, size=3, **options):
    drawn = draw_here(Wanted(name, options, 0, size, 1))
    return [make_row(name, options, item) for item in drawn.train + drawn.heldout]


def judged(answer, row, **settings):
    return gym.score(f"Because.</think>\n<answer>{answer}</answer>", row, **settings)


# ---- every data set ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(factory.DATASETS.keys() - {"composite"}))
def test_its_own_answers_are_right_and_nonsense_is_not(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = rows_of(name, 1 if name in SLOW else 3)
    assert len({row["question"] for row in rows}) == len(rows)
    pickle.dumps(rows)
    for row in rows:
        answer = row["answer"]
        if name in MANY_ANSWERS:
            assert answer is None
            answer = MANY_ANSWERS[name] and MANY_ANSWERS[name](row["metadata"])
        if answer is not None:
            score = judged(answer, row)
            assert (score.reward, score.correct) == (1.1, True), score.reason
        for nonsense in ("zzz", "{}", "[[]]", "qq 7 or 8 or 9", row["question"]):
            score = judged(nonsense, row)
            assert (score.reward, score.correct) == (0.1, False), (nonsense, answer)
        assert gym.score(row["prompt"][1]["content"], row).reward < 0.5


def test_the_scorers_that_run_answers_are_known():
    """A new version's would else be given whatever a model writes."""
    for name in factory.DATASETS.keys() - {"composite"}:
        assert not runs_answers(name, factory.DATASETS[name][0].__new__(factory.DATASETS[name][0]))
    assert factory.DATASETS.keys() >= EXPRESSIONS | LITERALS | HARMLESS

    class Unknown:
        def score_answer(self, answer, entry):
            return float(eval(answer) == entry)

    assert runs_answers("unknown", Unknown())


# ---- answers that may not be run --------------------------------------------------------------


ATTACKS = [
    "__import__('os').system('touch {}')",
    "open('{}', 'w')",
    "exit()",
    "print(1)",
    "(1).real",
]
ATTACKS += ["().__class__", "9**9**9**9", "((9**9)**9999)**9999", "9**Abs(-99999999)", "lambda: 0"]
ATTACKS += ["print(1)", "S('1')", "Integral(x, x)", "1e999", "1j", "f(x)", "exp(x, y)", "exp(x=1)"]
ATTACKS += [
    "[1]*10**9",
    "x if x else y",
    "x.args",
    "x[0]",
    "xx",
    "True",
    "'a'",
    "2**(x-x+10**9)",
    "ｘ",
]


@pytest.mark.parametrize("name", sorted(EXPRESSIONS | LITERALS))
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_is_never_run(name, attack, tmp_path):
    folder = tmp_path / "touched"
    row = {"dataset": name, "answer": "1 2", "metadata": {"numbers": [1, 2], "valid_answers": []}}
    row["metadata"] |= {"target": 3, "variable": "x", "integrand": "x"}
    start = time.process_time()
    score = judged(attack.format(folder), row)
    assert score.reward == 0.1 and not folder.exists()
    assert time.process_time() - start < 5.0  # the first of a data set imports it


@pytest.mark.parametrize("name", sorted(EXPRESSIONS | LITERALS))
@pytest.mark.parametrize(
    "text", ["(" * 5000, "-" * 900 + "1", "[" * 900, "1+" * 499 + "1", "9" * 999]
)
def test_deep_and_long_answers_end_at_once(name, text):
    start = time.process_time()
    objection(name, text, {"answer": "1", "metadata": {"numbers": [1]}})
    assert time.process_time() - start < 0.5


@given(st.text(alphabet="x0123456789+-*/()._'[]=!ecsinopr", max_size=40))
def test_what_passes_as_an_expression_holds_known_names_alone(answer):
    if not objection("simple_integration", answer, {}):
        for call in ("open", "__", "import", "exec", "'", "[", "=", "print"):
            assert call not in answer


def test_scorers_that_take_wrong_answers_are_held_to_the_question():
    """By its own scorer, any text would be right of the first, and `0` of the second."""
    halting = {"dataset": "game_of_life_halting", "answer": "False", "metadata": {}}
    assert [judged(a, halting).correct for a in ("false", "True", "zzz")] == [True, False, False]
    coin = {"dataset": "coin_flip", "answer": "0.4375", "metadata": {}}
    given = ("0.4375", "7/16", "0.43752", "0", "0.4", "1e-9", "7/0", "half")
    assert [judged(a, coin).correct for a in given] == [True] * 3 + [False] * 5
    # Of a NaN it takes the least of 1 and a NaN, which is 1.
    complexes = {"dataset": "complex_arithmetic", "answer": "8.0 + 3.0i", "metadata": {}}
    complexes["metadata"] = {"result": [8.0, 3.0]}
    given = ("8.0 + 3.0i", "nan", "NaN", "nani", "nan+nani", "inf")
    assert [judged(a, complexes).correct for a in given] == [True] + [False] * 5
    puzzle = {"dataset": "puzzle24", "answer": "1*7+8+9", "metadata": {"numbers": [1, 7, 8, 9]}}
    given = ("9+8+7*1", "8*3*1*1", "1*7+8+9+0", "8*(9-7+1)")
    assert [judged(a, puzzle).correct for a in given] == [True, False, False, True]


# ---- the reward -------------------------------------------------------------------------------


def test_a_part_of_a_score_earns_nothing_unless_asked():
    """Its scorer gives 1/4 to a text that holds the answer and three more like it."""
    row = {"dataset": "caesar_cipher", "answer": "AB", "metadata": {}}
    score = judged("ABCDEFGH", row)
    assert (score.reward, score.correct) == (0.1, False) and 0 < score.components["score"] < 1
    part = judged("ABCDEFGH", row, partial_weight=0.5)
    assert part.reward == pytest.approx(0.1 + 0.5 * score.components["score"])
    assert judged("AB", row, format_weight=0.5).reward == 1.5
    for text in ("", "AB", "<answer></answer>", "x</think><answer> </answer>"):
        assert not gym.score(text, row).correct
    assert gym.score("", row).components.keys() == score.components.keys()
    assert not judged("A" * 30_000, row).correct


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"answer": "1"}, "needs `dataset`"),
        ({"dataset": "chain_sum"}, "and `answer`"),
        ({"dataset": "chain_sum", "answer": "1", "metadata": 3}, "`metadata` must be an object"),
        ({"dataset": "chain", "answer": "1"}, "expected one of reasoning-gym's"),
        ({"dataset": "chain_sum", "answer": "1", "options": {"max": 1}}, "chain_sum has min_terms"),
    ],
)
def test_bad_rows_are_refused(bad, message):
    with pytest.raises(RowError, match=message):
        judged("1", bad)


def test_a_scorer_that_fails_at_the_right_answer_is_no_wrong_answer(monkeypatch):
    class Broken:
        def score_answer(self, answer, entry):
            return {"1": 1.0, "nan": float("nan")}[answer]

    monkeypatch.setattr(gym, "dataset", lambda name, options: Broken())
    row = {"dataset": "chain_sum", "answer": "1", "metadata": {}}
    assert judged("1", row).correct
    assert "cannot be read" in judged("2", row).reason
    with pytest.raises(KeyError):
        judged("2", row | {"answer": "3"})


# ---- the task ---------------------------------------------------------------------------------


def test_problems_are_distinct_and_heldout_ones_apart():
    one, two, more = (
        draw_here(Wanted("chain_sum", {}, seed, size, 20))
        for seed, size in ((1, 40), (2, 40), (1, 80))
    )
    for drawn in (one, two, more):
        questions = {item["question"] for item in drawn.train + drawn.heldout}
        assert len(questions) == len(drawn.train) + 20
    # A model that another seed's run has trained must not have seen them.
    assert one.heldout == two.heldout == more.heldout
    assert more.train[:40] == one.train
    # neighbouring seeds of reasoning-gym's own share all items but one
    asked = [{item["question"] for item in drawn.train} for drawn in (one, two)]
    assert len(asked[0] & asked[1]) < 5


def test_options_are_the_data_sets_own():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load(seed=0, dataset="chain_sum", options=options, train_size=5, heldout_size=5)
    assert all(abs(int(row["answer"])) <= 18 for row in task.train)
    row = task.train[0]
    assert row["options"] == options
    assert row["prompt"][1]["content"].startswith(row["question"])
    assert task.score(f"x</think><answer>{row['answer']}</answer>", row).reward == 1.1
    pickle.dumps((task.score, task.train))


def test_rows_are_the_same_in_every_process(monkeypatch):
    """In this process, they depend on how Python hashes texts."""
    drawn = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        drawn.append(draw(Wanted("isomorphic_strings", {}, 0, 3, 2)))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain", {}, "expected one of reasoning-gym's .*; came 'chain'"),
        ("composite", {}, "expected one of reasoning-gym's"),
        ("gcd", {"seed": 1}, "options.seed: expected unset"),
        ("gcd", {"terms": 1}, "gcd has min_numbers, .*; came terms"),
        ("gcd", {"min_numbers": -1}, "gcd can't be made with"),
        ("gcd", {"min_numbers": "x"}, "gcd can't be made with"),
    ],
)
def test_impossible_data_sets_are_refused(name, options, message):
    with pytest.raises(BadInput, match=message):
        gym.make_dataset(name, seed=0, size=1, options=options)


def test_impossible_settings_are_refused():
    with pytest.raises(BadInput, match="expected one of reasoning-gym's"):
        load(seed=0, dataset="chain")
    for size in ("train_size", "heldout_size"):
        with pytest.raises(BadInput, match=f"`{size}` must be at least 1, not 0"):
            load(seed=0, dataset="gcd", **{size: 0})


def test_too_few_different_problems_are_told():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(BadInput, match=r"chain_sum gave \d+ of 5000 new problems in 100000 draws"):
        draw_here(Wanted("chain_sum", options, 0, 5000, 1))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(BadInput, match=r"pip install 'rlx\[gym\]'"):
        gym.make_dataset("chain_sum", seed=0, size=1, options={})
