"""Several verifiers as one: sums, stages, what a recipe may say, and the user's own."""

import pickle
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from judge_server import candidate, served, verdict

from model.errors import BadInput
from rlx.rewards import VERIFIERS, RowError, Score, countdown, judge
from rlx.rewards.build import bind, build, typed_settings
from rlx.rewards.compose import Part, here, staged, weighted
from rlx.rewards.score import Span

ROOT = Path(__file__).parents[1]


def plain(completion, row, *, reward=0.5, correct=None, name="part", spans=()):
    return Score(reward, correct, {name: reward}, f"it is {reward}", spans)


def holds(completion, row, *, word: str):
    found = word in completion
    return Score(float(found), found, {"found": float(found)}, f"{word}: {found}")


def broken(completion, row):
    raise RuntimeError("out of order")


def typed(
    completion: str,
    row,
    *,
    times: int,
    share: float = 0.5,
    words: tuple[str, ...] = (),
    kind: Literal["a", "b"] = "a",
    strict: bool = False,
) -> Score:
    return Score(share, None, {}, f"{times} {words} {kind} {strict}")


def share_of(completion, row):
    return Score(len(completion) / 10, None, {}, "its length")


def fixed(**settings):
    return partial(plain, **settings)


def test_a_sum_weighs_each_reward_and_keeps_every_component():
    verifier = weighted(
        [
            Part("a", 1.0, fixed(reward=0.5)),
            Part("b", 0.25, fixed(reward=2.0, name="other")),
            Part("c", -2.0, fixed(reward=0.1)),
        ]
    )
    score = verifier("x", {})
    assert score.reward == pytest.approx(0.5 + 0.5 - 0.2)
    assert score.components == {
        "a/reward": 0.5,
        "a/part": 0.5,
        "b/reward": 2.0,
        "b/other": 2.0,
        "c/reward": 0.1,
        "c/part": 0.1,
    }
    assert score.correct is None
    assert "b: it is 2.0" in score.reason


@pytest.mark.parametrize(
    ("verdicts", "correct"),
    [
        ([True, True], True),
        ([True, False], False),
        ([True, None], True),
        ([None, False], False),  # the judge says nothing; any() of all verdicts says right
        ([None, None], None),
    ],
)
def test_a_sum_is_right_where_every_verdict_that_exists_is(verdicts, correct):
    parts = [Part(f"p{i}", 1.0, fixed(correct=v)) for i, v in enumerate(verdicts)]
    assert weighted(parts)("x", {}).correct is correct


def test_spans_keep_their_place_and_are_weighed_as_the_reward_is():
    spans = (Span(0, 3, 0.4),)
    verifier = weighted([Part("a", 0.5, fixed(spans=spans)), Part("b", 1.0, fixed(spans=spans))])
    assert verifier("abc", {}).spans == (Span(0, 3, 0.2), Span(0, 3, 0.4))


def test_a_part_that_fails_fails_the_row():
    """A sum of the others would be a silent zero for the one that failed."""
    parts = [Part("a", 1.0, fixed()), Part("b", 1.0, broken)]
    for verifier in (weighted(parts), weighted(parts[::-1])):
        with pytest.raises(RuntimeError, match="out of order"):
            verifier("x", {})


def stages(*, thresholds=(None, None)):
    first, second = thresholds
    return staged(
        [
            Part("form", 0.1, partial(holds, word="f"), first),
            Part("runs", 0.3, partial(holds, word="r"), second),
            Part("equal", 1.0, partial(holds, word="e")),
        ]
    )


@pytest.mark.parametrize(
    ("completion", "reward", "reached", "correct"),
    [
        ("", 0.0, [1, 0, 0], False),
        ("f", 0.1, [1, 1, 0], False),
        ("fr", 0.4, [1, 1, 1], False),
        ("fre", 1.4, [1, 1, 1], True),
        ("re", 0.0, [1, 0, 0], False),  # a sum gives 1.3
        ("fe", 0.1, [1, 1, 0], False),
    ],
)
def test_a_stage_is_reached_only_if_the_former_passed(completion, reward, reached, correct):
    score = stages()(completion, {})
    assert score.reward == pytest.approx(reward)
    assert score.correct is correct
    names = ("form", "runs", "equal")
    assert [score.components[f"reached/{name}"] for name in names] == reached
    for name, there in zip(names, reached, strict=True):
        assert there or score.components[f"{name}/found"] == 0.0
        assert there or f"{name}: not reached" in score.reason
    assert score.components.keys() == stages()("fre", {}).components.keys()


def test_a_threshold_passes_without_a_verdict():
    verifier = staged([Part("length", 1.0, share_of, 0.5), Part("word", 1.0, fixed(correct=True))])
    assert verifier("1234", {}).components["reached/word"] == 0.0
    assert verifier("12345", {}).components["reached/word"] == 1.0
    # the verdict that was not reached is not right, and is not missing
    assert [verifier(text, {}).correct for text in ("1234", "12345")] == [False, True]


def test_a_threshold_counts_the_reward_and_not_the_verdict():
    verifier = staged([Part("a", 1.0, fixed(correct=False), 0.5), Part("b", 1.0, fixed())])
    assert verifier("x", {}).components["reached/b"] == 1.0


def test_a_stage_that_nothing_could_pass_is_refused():
    verifier = staged([Part("length", 1.0, share_of), Part("word", 1.0, fixed(correct=True))])
    with pytest.raises(RowError, match=r"length.*threshold"):
        verifier("12345", {})


def test_what_is_not_reached_is_not_run():
    calls = []

    def recorded(completion, row):
        calls.append(completion)
        return Score(1.0, None, {}, "")

    verifier = staged([Part("a", 1.0, partial(holds, word="a")), Part("b", 1.0, recorded)])
    verifier("x", {})
    verifier("y", {})
    verifier("a", {})
    assert calls == ["", "a"]  # once, to learn its components


def test_a_failing_stage_fails_the_rows_that_reach_it_and_no_others():
    def fails(completion, row):
        if completion:
            raise RuntimeError("out of order")
        return Score(0.0, None, {}, "")

    verifier = staged([Part("a", 1.0, partial(holds, word="a")), Part("b", 1.0, fails)])
    assert verifier("x", {}).reward == 0.0
    with pytest.raises(RuntimeError):
        verifier("a", {})


# --- the judge behind rules ---

NUMBERS = {"nums": [1, 2], "target": 3, "question": "Make 3 of 1 and 2.", "prefill": "<think>"}
RIGHT = "one and two</think><answer>1+2</answer>"
WRONG = "one and two</think><answer>1-2</answer>"


def rules_first(url: str):
    return build(
        [
            {"name": "countdown", "weight": 1.0, "format_weight": 0.2},
            {
                "name": "judge",
                "weight": 0.3,
                "base_url": url,
                "judge_model": "stub",
                "judged": "reasoning",
                "retries": 0,
            },
        ],
        "stages",
        VERIFIERS | {"judge": judge.score},
        None,
    )


def test_the_judge_is_asked_only_for_what_the_rules_call_right():
    with served(lambda body: verdict(0.5)) as fake:
        verifier = rules_first(fake.url)
        verifier = pickle.loads(pickle.dumps(verifier))
        pairs = [(RIGHT, NUMBERS), (WRONG, NUMBERS), ("", NUMBERS), (RIGHT, {}), (RIGHT, NUMBERS)]
        results = verifier.many(pairs)
    assert [getattr(r, "reward", None) for r in results] == [
        pytest.approx(1.2 + 0.15),
        pytest.approx(0.2),
        pytest.approx(0.0),
        None,
        pytest.approx(1.2 + 0.15),
    ]
    assert isinstance(results[3], RowError)
    assert [candidate(body) for body in fake.bodies] == ["one and two"]
    assert [r.correct for r in results if isinstance(r, Score)] == [True, False, False, True]
    assert results[1].components["reached/judge"] == 0.0
    assert len({frozenset(r.components) for r in results if isinstance(r, Score)}) == 1


def test_a_judge_that_fails_leaves_the_row_out_and_the_others_in():
    with served(lambda body: "CORRECT") as fake:
        verifier = rules_first(fake.url)
        results = verifier.many([(RIGHT, NUMBERS), (WRONG, NUMBERS)])
        with pytest.raises(judge.JudgeFailure):
            verifier(RIGHT, NUMBERS)
    assert isinstance(results[0], judge.JudgeFailure)
    assert results[1].reward == pytest.approx(0.2)


def test_only_what_has_a_judge_in_it_is_scored_all_at_once():
    assert not hasattr(stages(), "many")
    assert hasattr(rules_first("http://127.0.0.1:9"), "many")


def test_rules_beside_a_judge_run_where_the_caller_says():
    seen = []

    def pool(verifier, rows):
        seen.append([completion for completion, _ in rows])
        return here(verifier, rows)

    with served(lambda body: verdict(0.5)) as fake:
        results = rules_first(fake.url).many([(RIGHT, NUMBERS), (WRONG, NUMBERS)], each=pool)
    # The judge is asked of what passed the rules.
    assert seen == [[RIGHT, WRONG], [RIGHT]]
    assert [r.correct for r in results] == [True, False]


def test_composed_verifiers_are_bounded_where_all_parts_are():
    def bounded(completion, row):
        return Score(0.0, None, {}, "")

    bounded.bounded, bounded.imports = True, ("json",)
    both = weighted([Part("a", 1.0, bounded), Part("b", 1.0, partial(bounded))])
    assert both.bounded and both.imports == ("json",)
    assert not weighted([Part("a", 1.0, bounded), Part("b", 1.0, share_of)]).bounded


def test_composed_verifiers_travel_to_other_processes():
    verifier = pickle.loads(pickle.dumps(stages()))
    assert verifier("fre", {}) == stages()("fre", {})


# --- recipes ---

TABLE = {"countdown": countdown.score, "typed": typed}


@pytest.mark.parametrize(
    ("entries", "combine", "told"),
    [
        ([], "sum", "at least one"),
        ([{"name": "countdown"}], "product", "combine: expected one of sum, stages"),
        ([{"name": "count"}], "sum", r"verifiers\[0\]: name: expected task, countdown, typed"),
        ([{"weight": 1.0}], "sum", "expected settings with a `name`"),
        (["countdown"], "sum", "expected settings with a `name`"),
        ([{"name": "task"}, {"name": "countdown", "weigth": 1.0}], "sum", r"\[1\]: weigth.*weight"),
        ([{"name": "countdown", "format_weight": "much"}], "sum", "format_weight: .*'much'"),
        ([{"name": "countdown", "weight": "1"}], "sum", "weight: expected a finite number"),
        ([{"name": "countdown", "weight": True}], "sum", "weight: expected a finite number"),
        ([{"name": "countdown", "weight": float("nan")}], "sum", "weight: expected a finite"),
        ([{"name": "countdown", "threshold": 0.5}], "sum", "threshold: it would be ignored"),
        ([{"name": "countdown", "label": "a/b"}], "sum", "label"),
        ([{"name": "countdown"}, {"name": "countdown"}], "sum", "two verifiers are called count"),
        ([{"name": "task", "format_weight": 0.5}], "sum", "format_weight: the task's own"),
        ([{"name": "typed"}], "sum", "times: .*required"),
        ([{"name": "typed", "times": 1.5}], "sum", "times: .*1.5"),
        ([{"name": "typed", "times": 1, "kind": "c"}], "sum", "kind: .*'a' or 'b'.*'c'"),
        ([{"name": "typed", "times": 1, "strict": "no"}], "sum", "strict: .*'no'"),
        ([{"name": "no_such_package.x:score"}], "sum", "no such module"),
    ],
)
def test_a_recipe_that_is_wrong_is_refused_with_the_place(entries, combine, told):
    with pytest.raises(BadInput, match=told):
        build(entries, combine, TABLE, fixed())


def test_a_task_without_a_verifier_cannot_be_part_of_one():
    with pytest.raises(BadInput, match="task has no verifier"):
        build([{"name": "task"}], "sum", TABLE, None)


def test_settings_get_the_types_of_the_signature():
    assert typed_settings(typed, {"times": 2, "share": 1, "words": ["a", "b"]}) == {
        "times": 2,
        "share": 1.0,
        "words": ("a", "b"),
    }


def test_the_same_verifier_may_stand_twice_under_labels():
    verifier = build(
        [
            {"name": "typed", "times": 1, "share": 0.5},
            {"name": "typed", "times": 1, "share": 0.25, "label": "again", "weight": 2},
            {"name": "task"},
        ],
        "sum",
        TABLE,
        fixed(reward=0.125),
    )
    score = verifier("x", {})
    assert score.reward == 0.5 + 0.5 + 0.125
    assert score.components["again/reward"] == 0.25 and score.components["task/part"] == 0.125


def test_binding_checks_settings_first():
    with pytest.raises(BadInput, match="base_url"):
        bind(judge.score, base_url="nowhere", judge_model="m")
