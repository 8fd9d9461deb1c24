"""Several tasks in one run: exact shares, epochs of their own, weights that move."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import initial_params

from model.errors import BadInput
from rlx import ops
from rlx.config import ConfigError, load, resolved_yaml
from rlx.mixture import Mix, begin, counted, next_rows, next_tasks, step_begun
from rlx.prepare import Frozen
from rlx.rewards import RowError
from rlx.run_folder import check_resume
from rlx.state import initial_state
from rlx.task_loading import load_task
from rlx.train import fused, staged
from rlx.verify import callback_verifier, host_verifier

MIX = Mix(("a", "b"), (4, 2), (3.0, 1.0), (1.0, 3.0), "weights", 0.1, steps=10)


@functools.partial(jax.jit, static_argnames=("mix", "count"))
def draw(mix, cursor, count):
    return next_rows(mix, jax.random.key(0), cursor, count)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.integers(1, 400))
def test_shares_are_exact_after_any_number_of_draws(weights, count):
    """Independent draws would be off by the square root of their number."""
    weights = tuple(weights)
    names = tuple(map(str, range(len(weights))))
    mix = Mix(names, (9,) * len(names), weights, weights, "weights", 0.1, 1)
    _, cursor = jax.jit(next_tasks, static_argnums=1)(begin(mix), count)
    wanted = count * np.asarray(weights) / sum(weights)
    assert int(cursor.drawn.sum()) == count
    assert np.abs(np.asarray(cursor.drawn) - wanted).max() < 1 + 1e-3


def test_two_draws_go_on_where_one_would_have_gone():
    whole, epochs, end = draw(MIX, begin(MIX), 12)
    first, first_epochs, cursor = draw(MIX, begin(MIX), 5)
    second, second_epochs, cursor = draw(MIX, cursor, 7)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    np.testing.assert_array_equal(np.concatenate([first_epochs, second_epochs]), epochs)
    jax.tree.map(np.testing.assert_array_equal, cursor, end)


def test_every_epoch_of_a_task_is_all_its_prompts_once():
    rows, epochs = map(np.asarray, draw(MIX, begin(MIX), 48)[:2])
    for rows_of, start, size, count in ((rows < 4, 0, 4, 36), (rows >= 4, 4, 2, 12)):
        assert rows_of.sum() == count
        mine, its = rows[rows_of], epochs[rows_of]
        for epoch in range(count // size):
            assert sorted(mine[its == epoch]) == list(range(start, start + size))
    orders = {tuple(rows[(rows < 4) & (epochs == epoch)]) for epoch in range(9)}
    assert len(orders) > 1


def test_a_small_task_is_drawn_twice_in_one_step_in_two_epochs():
    """In one epoch both groups would have the same noise, and be one group twice."""
    rows, epochs, _ = draw(MIX._replace(weights=(1.0, 3.0)), begin(MIX), 8)
    pairs = list(zip(rows.tolist(), epochs.tolist(), strict=True))
    assert len(set(pairs)) == 8 > len(set(rows.tolist()))


def test_a_schedule_ends_at_the_final_weights():
    """However many prompts a step draws, in however many rounds: dynamic sampling draws again."""
    mix = MIX._replace(follow="schedule")
    cursor = begin(mix)
    for step in range(11):
        for round in range(1 + step % 3):
            cursor = step_begun(mix, cursor, jnp.asarray(round == 0))
            np.testing.assert_allclose(cursor.weights, [0.75 - step / 20, 0.25 + step / 20], 1e-6)
            rows, _, cursor = draw(mix, cursor, 8)
            cursor = counted(mix, cursor, rows, jnp.ones((8, 2)))
    later = step_begun(mix, cursor, jnp.asarray(True))
    np.testing.assert_allclose(later.weights, [0.25, 0.75])


def test_weights_follow_the_solve_rates_down_to_the_floor():
    mix = MIX._replace(follow="solve_rates", weights=(1.0, 1.0))
    cursor = begin(mix)
    np.testing.assert_allclose(cursor.weights, [0.5, 0.5])
    count = jax.jit(counted, static_argnums=0)
    for _ in range(200):
        rows, _, cursor = draw(mix, cursor, 8)
        right = jnp.where(rows[:, None] < 4, jnp.array([1.0, 0.0]), 1.0)
        cursor = count(mix, cursor, rows, right)
    np.testing.assert_allclose(cursor.solve_rate, [0.5, 1.0], atol=0.02)
    np.testing.assert_allclose(cursor.weights, [1 / 1.1, 0.1 / 1.1], atol=0.01)


def test_rows_without_a_verdict_leave_the_solve_rate_alone():
    cursor, rows = begin(MIX), jnp.array([0, 4])
    unknown = counted(MIX, cursor, rows, jnp.full((2, 2), jnp.nan))
    np.testing.assert_array_equal(unknown.solve_rate, cursor.solve_rate)
    half = counted(MIX, cursor, rows, jnp.array([[1.0, jnp.nan], [1.0, 0.0]]))
    assert float(half.solve_rate[0]) > 0.5 and float(half.solve_rate[1]) == 0.5


@functools.cache
def plan():
    made = toy.plan("grpo")
    return made._replace(sampling=made.sampling._replace(mix=MIX._replace(follow="solve_rates")))


def state():
    return initial_state(
        initial_params(), plan().learner, jax.random.key(1), cursor=begin(plan().sampling.mix)
    )


def test_a_run_of_two_tasks_is_the_same_fused_and_staged_and_tells_of_each():
    made, prompts = plan(), toy.pool(6)
    run = fused(made, callback_verifier(made.sampling, toy.verifier))
    together, (metrics, _) = run(state(), Frozen(), prompts, 3)
    stage = staged(made, host_verifier(toy.verifier), lambda phase: contextlib.nullcontext())
    apart, _ = stage(state(), Frozen(), prompts, length=3)
    jax.tree.map(np.testing.assert_array_equal, together.cursor, apart.cursor)
    assert int(together.cursor.drawn.sum()) == 3 * made.sampling.prompts
    assert int(together.cursor.steps) == 3
    for step in range(3):
        values = ops.values(jax.tree.map(lambda x, step=step: x[step], metrics))
        shares = [values[f"task/{name}/share"] for name in "ab"]
        assert sum(shares) == pytest.approx(1)
        rates = [values[f"task/{name}/solve_rate"] for name in "ab"]
        whole = sum(s * r for s, r in zip(shares, rates, strict=True) if s)
        assert whole == pytest.approx(values["solve_rate"])


TWO = (
    "task.name=mixture",
    "task.tasks=[{name: countdown, label: three, weight: 3, numbers: [3], train_size: 8, "
    "heldout_size: 4}, {name: countdown, label: two, numbers: [2], train_size: 5, heldout_size: 2, "
    "line_weight: 0.1}]",
)


def test_a_mixture_has_the_rows_of_its_tasks_and_their_verifiers():
    task = load_task(load(None, TWO))
    assert [row["task"] for row in task.train] == ["three"] * 8 + ["two"] * 5
    assert [row["task"] for row in task.heldout] == ["three", "two"] * 2 + ["three"] * 2
    row = next(row for row in task.train if row["task"] == "two")
    score = task.score("nothing", row)
    assert set(score.components) == {"format", "correct", "lines"}
    assert set(task.score("", task.train[0]).components) == set(score.components)
    with pytest.raises(RowError, match="task"):
        task.score("", {"nums": [1], "target": 1})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("label: two", "label: three"), r"tasks\[1\].label.*three again"),
        (("label: two", "colour: red"), r"tasks\[1\].colour"),
        (("weight: 3", "weight: 0"), r"tasks\[0\].weight: expected a number above 0; came 0"),
        (("weight: 3", "final_weight: 2"), r"tasks\[0\].final_weight.*schedule"),
        (("numbers: [2]", "numbers: [x]"), r"tasks\[1\].numbers: expected a list, each a whole"),
        (("numbers: [2]", "numbers: [9]"), r"tasks\[1\]: .*different counts from 2 to 6"),
        (("{name: countdown, label: two", "{name: nothing, label: two"), r"tasks\[1\].name"),
        (("{name: countdown, label: two", "{name: mixture, label: two"), r"tasks\[1\].name"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(change, told):
    with pytest.raises(BadInput, match=told):
        load_task(load(None, (TWO[0], TWO[1].replace(*change))))


def test_a_resumed_schedule_has_the_steps_that_it_began_with(tmp_path):
    """Twice as many steps would take the weights back."""

    def of(follow, steps):
        return load(None, [*TWO, f"task.follow={follow}", f"loop.steps={steps}"])

    for follow in ("schedule", "weights"):
        (tmp_path / "config.yaml").write_text(resolved_yaml(of(follow, 4)))
        check_resume(of(follow, 4), tmp_path)
    check_resume(of("weights", 8), tmp_path)
    (tmp_path / "config.yaml").write_text(resolved_yaml(of("schedule", 4)))
    with pytest.raises(ConfigError, match=r"loop\.steps: the run began with 4, not 8"):
        check_resume(of("schedule", 8), tmp_path)
