"""Group advantages: numbers of both conventions, groups without a signal, rows without a score."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import sampling

from rlx.advantages import group_normalised, mixed
from rlx.algorithms import ALGORITHMS
from rlx.rollout import begin

NAN = float("nan")


def test_a_group_of_one_is_refused():
    """Its sample standard deviation is NaN, and so would be everything after it."""
    with pytest.raises(ValueError, match="at least 2 samples"):
        group_normalised(jnp.array([[1.0]]))


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [(1, [1.4997, -0.4999, -0.4999, -0.4999]), (0, [1.7317, -0.5772, -0.5772, -0.5772])],
)
def test_both_conventions_of_the_standard_deviation(ddof, expected):
    advantages = group_normalised(jnp.array([[1.0, 0.0, 0.0, 0.0]]), ddof=ddof)
    np.testing.assert_allclose(advantages[0], expected, atol=1e-4)


@pytest.mark.parametrize(("hyper", "best"), [({}, 2.645), ({"ddof": 1}, 2.474)])
def test_one_success_in_eight(hyper, best):
    """The population's standard deviation is the default."""
    advantages = group_normalised(jnp.eye(1, 8), **hyper)
    assert advantages[0, 0] == pytest.approx(best, abs=1e-3)


def test_the_worked_example():
    advantages = group_normalised(jnp.array([[1.1, 0.1], [1.0, 0.0]]), ddof=1)
    np.testing.assert_allclose(advantages, [[0.707007, -0.707007]] * 2, atol=1e-6)


@pytest.mark.parametrize(
    ("reward", "size"), [(0.2, 8), (0.1, 8), (0.7, 7), (1.1, 12), (1 / 3, 32), (0.0, 4)]
)
@pytest.mark.parametrize("epsilon", [1e-4, 1e-8])
def test_equal_rewards_get_exactly_zero(reward, size, epsilon):
    """0.2 has no exact float: the mean is off by 1.5e-8, and with an epsilon of 1e-8 that is an
    advantage of -0.58 for every row; a test of std > 0 would keep the group."""
    rewards = jnp.full((1, size), reward, jnp.float32)
    for advantages in (group_normalised, jax.jit(group_normalised, static_argnames="epsilon")):
        np.testing.assert_array_equal(advantages(rewards, epsilon=epsilon), 0.0)
    assert not mixed(rewards).any()


def test_two_groups_of_one_prompt_are_two_groups():
    """Joined by their text, the eight rows would get -1 and +1."""
    rewards = jnp.array([[0.0] * 4, [1.0] * 4])
    np.testing.assert_array_equal(group_normalised(rewards), 0.0)


def test_a_row_that_could_not_be_scored_is_left_out():
    with_hole = group_normalised(jnp.array([[1.0, NAN, 0.0, 0.0]]))
    without = group_normalised(jnp.array([[1.0, 0.0, 0.0]]))
    np.testing.assert_allclose(with_hole[0, jnp.array([0, 2, 3])], without[0], rtol=1e-6)
    assert with_hole[0, 1] == 0.0
    # Counted as a reward of 0, the best row would get 1.7317 instead of 1.4139.
    assert with_hole[0, 0] == pytest.approx(1.4139, abs=1e-3)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [NAN, 1.0, NAN], [0.3, NAN, 0.3]])
def test_too_few_scores_for_a_comparison_give_zero(rewards, ddof):
    np.testing.assert_array_equal(group_normalised(jnp.array([rewards]), ddof=ddof), 0.0)


def test_one_prompt_does_not_touch_another():
    rewards = jnp.array([[1.0, 0.0, 0.5], [9.0, NAN, -9.0]])
    np.testing.assert_array_equal(group_normalised(rewards)[:1], group_normalised(rewards[:1]))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-8, 8), min_size=4, max_size=4), st.permutations(range(4)))
def test_order_and_level_of_rewards_do_not_matter(rewards, order):
    rewards = jnp.array([rewards], jnp.float32)
    advantages = group_normalised(rewards)
    assert jnp.sum(advantages) == pytest.approx(0.0, abs=1e-4)
    np.testing.assert_allclose(group_normalised(rewards + 2.0), advantages, atol=1e-5)
    order = jnp.array(order)
    np.testing.assert_allclose(group_normalised(rewards[:, order]), advantages[:, order], atol=1e-5)


@pytest.mark.parametrize("name", [n for n, row in ALGORITHMS.items() if row.advantages])
def test_every_row_carries_the_advantage_of_its_own_reward(name):
    """Row i has reward i: a reshape the other way round would mix the prompts."""
    plan = sampling(prompts=4, samples=4)
    rollout = begin(plan, 8, jnp.int32(0)).rollout._replace(rewards=jnp.arange(16.0).reshape(4, 4))
    advantages, returns = ALGORITHMS[name].advantages(rollout)
    assert advantages.shape == returns.shape == (16, 1)
    # Returns are rewards, not advantages.
    np.testing.assert_array_equal(returns[:, 0], jnp.arange(16.0))
    np.testing.assert_allclose(advantages.reshape(4, 4), group_normalised(rollout.rewards))
    assert (jnp.diff(advantages.reshape(4, 4)) > 0).all()


def test_returns_have_the_mean_of_the_rewards_and_advantages_of_zero():
    rollout = begin(sampling(prompts=1, samples=4), 8, jnp.int32(0)).rollout._replace(
        rewards=jnp.array([[1.0, 0.0, 0.0, 0.0]])
    )
    advantages, returns = ALGORITHMS["grpo"].advantages(rollout)
    assert jnp.mean(returns) == 0.25
    assert jnp.mean(advantages) == pytest.approx(0.0, abs=1e-6)
