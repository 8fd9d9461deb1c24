"""Advantages: numbers of every convention, groups without a signal, rows without a score."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import sampling

from rlx.advantages import (
    ADVANTAGES,
    components_normalised,
    discounted,
    group_centred,
    group_normalised,
    group_reward_to_go,
    leave_one_out,
    mixed,
    pair_order,
    reorder,
    solved,
    whiten,
)
from rlx.algorithms import ALGORITHMS, TERMS
from rlx.rollout import empty_rollout

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


def rolled(rewards, lengths=None, width=3, **fields):
    """A rollout with these rewards [N, G], each on its row's last token."""
    rewards = jnp.asarray(rewards, jnp.float32)
    n, g = rewards.shape
    lengths = np.full(n * g, width) if lengths is None else np.asarray(lengths).reshape(-1)
    mask = jnp.asarray(np.arange(width) < lengths[:, None])
    last = jnp.asarray(np.arange(width) == lengths[:, None] - 1)
    known = jnp.nan_to_num(rewards).reshape(-1, 1)
    shape = sampling(prompts=n, samples=g, max_new_tokens=width)
    return empty_rollout(shape, 8)._replace(
        mask=mask,
        rewards=rewards,
        token_rewards=jnp.where(last, known, 0.0),
        rows=jnp.arange(n),
        **fields,
    )


# What a row's own advantage is computed from: its group, its batch, or a choice of two rows.
KIND = dict.fromkeys(ADVANTAGES, "group") | {
    "components_normalised": "components",
    "gae": "values",
    "gae_whitened": "values",
    "whitened_returns": "batch",
    "whitened_group_returns": "group and batch",
}


def test_every_estimate_has_its_kind():
    assert KIND.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_row_carries_the_advantage_of_its_own_reward(name):
    """Row i has reward i: a reshape the other way round would mix the prompts."""
    rewards = jnp.arange(16.0).reshape(4, 4)
    rollout = rolled(rewards, parts=rewards[..., None])
    advantages, returns = ADVANTAGES[name](rollout)
    last = (advantages[:, -1], returns[:, -1])
    assert advantages.shape in ((16, 1), (16, 3))
    # Returns are rewards, not advantages.
    np.testing.assert_allclose(last[1], jnp.arange(16.0), atol=1e-6)
    assert (jnp.diff(last[0].reshape(4, 4)) > 0).all()
    same_in_each_group = not bool(jnp.ptp(last[0].reshape(4, 4), axis=0).max() > 1e-3)
    assert same_in_each_group == (KIND[name] not in ("values", "batch"))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_groups_and_of_rows_in_them_does_not_matter(name):
    rng = np.random.default_rng(0)
    rollout = rolled(
        rng.normal(size=(3, 4)),
        rng.integers(1, 4, 12),
        parts=jnp.asarray(rng.normal(size=(3, 4, 1)), jnp.float32),
        values=jnp.asarray(rng.normal(size=(12, 3)), jnp.float32),
    )
    order = jnp.asarray([rng.permutation(4) for _ in range(3)])
    rows = (jnp.arange(3)[:, None] * 4 + order).reshape(-1)
    for got, expected in zip(
        ADVANTAGES[name](reorder(rollout, order)), ADVANTAGES[name](rollout), strict=True
    ):
        np.testing.assert_allclose(got, expected[rows], atol=1e-5)
    turned = jax.tree.map(lambda x: jnp.roll(x, len(x) // 3, axis=0), rollout)
    for got, expected in zip(ADVANTAGES[name](turned), ADVANTAGES[name](rollout), strict=True):
        np.testing.assert_allclose(got, jnp.roll(expected, 4, axis=0), atol=1e-5)


@pytest.mark.parametrize("name", [n for n, kind in KIND.items() if kind != "values"])
def test_equal_rewards_give_exactly_zero(name):
    """Those of a critic answer to its values instead."""
    for reward in (0.1, 0.7, 1 / 3):
        rewards = jnp.full((2, 5), reward, jnp.float32)
        advantages, _ = ADVANTAGES[name](rolled(rewards, parts=rewards[..., None]))
        if KIND[name] == "batch":
            np.testing.assert_allclose(advantages, 0.0, atol=1e-3)
        else:
            np.testing.assert_array_equal(advantages, 0.0)


@pytest.mark.parametrize("name", [n for n, kind in KIND.items() if kind not in ("values", "batch")])
def test_every_group_estimate_refuses_a_group_of_one(name):
    with pytest.raises(ValueError, match="at least 2 samples"):
        ADVANTAGES[name](rolled([[1.0], [0.0]]))


def test_returns_have_the_mean_of_the_rewards_and_advantages_of_zero():
    advantages, returns = ALGORITHMS["grpo"].advantages(rolled([[1.0, 0.0, 0.0, 0.0]]))
    assert jnp.mean(returns) == 0.25
    assert jnp.mean(advantages) == pytest.approx(0.0, abs=1e-6)


def test_centred_and_left_out():
    """Dr.GRPO keeps the reward's scale; RLOO compares with the others, so G / (G - 1) more."""
    rewards = jnp.array([[1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(group_centred(rewards)[0], [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(leave_one_out(rewards)[0], [1.0, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_leaving_out_counts_the_scored_rows_only():
    """Of three scored rows each has two others: with G - 1 = 3 the best would get .889."""
    advantages = leave_one_out(jnp.array([[1.0, NAN, 0.0, 0.0]]))
    np.testing.assert_allclose(advantages[0], [1.0, 0.0, -0.5, -0.5], rtol=1e-6)


def test_discounting_passes_over_masked_tokens():
    mask = jnp.array([[True, False, True, True]])
    got = discounted(jnp.array([[0.0, 9.0, 0.5, 1.0]]), mask, 0.5)
    # Counted as a step, the masked token would halve once more and add its own: 0.5 (9 + ...).
    np.testing.assert_allclose(got[0], [0.5, 0.0, 1.0, 1.0])


def test_whitening_is_over_unmasked_tokens_with_ddof_1():
    x = jnp.array([[0.6046875, 0.53125, 0.875, 0.5, 1e6]])
    mask = jnp.array([[True, True, True, True, False]])
    expected = [-0.135106, -0.565612, 1.449523, -0.748806, 0.0]
    # With ddof 0 the largest would be 1.673766.
    np.testing.assert_allclose(whiten(x, mask)[0], expected, atol=1e-5)


def test_one_unmasked_token_is_whitened_to_zero():
    """Its sample variance is 0 / 0."""
    x, mask = jnp.array([[3.0, 4.0]]), jnp.array([[True, False]])
    np.testing.assert_array_equal(whiten(x, mask), 0.0)
    np.testing.assert_array_equal(whiten(x, jnp.zeros_like(mask)), 0.0)


def test_reinforce_plus_plus_whitens_all_tokens_of_the_batch():
    """A long row has more of them: the mean over rows would be 0.5, over tokens it is 0.75."""
    rollout = rolled([[1.0, 0.0]], [3, 1])
    advantages, returns = ADVANTAGES["whitened_returns"](rollout)
    np.testing.assert_array_equal(returns, [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_allclose(advantages[0], 0.5, rtol=1e-5)
    np.testing.assert_allclose(advantages[1], [-1.5, 0, 0], rtol=1e-5)


def test_reinforce_plus_plus_with_baseline_takes_the_groups_mean_off_first():
    """An easy group and a hard one: without the baseline all rows of the easy one would be
    pushed up."""
    rewards = [[11.0, 10.0], [1.0, 0.0]]
    plain = ADVANTAGES["whitened_returns"](rolled(rewards))[0][:, 0]
    based = ADVANTAGES["whitened_group_returns"](rolled(rewards))[0][:, 0]
    np.testing.assert_array_equal(jnp.sign(plain), [1, 1, -1, -1])
    np.testing.assert_array_equal(jnp.sign(based), [1, -1, 1, -1])
    np.testing.assert_allclose(based, np.sqrt(11 / 12) * np.sign(based), rtol=1e-5)


def test_reward_to_go_takes_off_what_was_earned_before():
    """Two places of a text, each worth 1 here and nothing in the other row: the mean is 1 and the
    deviation 1. What stands after a place does not answer for it."""
    rollout = rolled([[2.0, 0.0]])
    rollout = rollout._replace(token_rewards=jnp.array([[1.0, 0, 1.0], [0, 0, 0]]))
    advantages, _ = group_reward_to_go(rollout, epsilon=0.0)
    # On every token the whole reward: 1, 1, 1.
    np.testing.assert_allclose(advantages, [[1, 0, 0], [-1, -1, -1]], atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(-4, 4), min_size=8, max_size=8),
    st.lists(st.integers(1, 3), min_size=8, max_size=8),
)
def test_reward_to_go_without_places_is_the_z_score_on_every_token(rewards, lengths):
    rollout = rolled(np.reshape(rewards, (2, 4)), lengths)
    advantages, _ = group_reward_to_go(rollout)
    expected = group_normalised(rollout.rewards).reshape(-1, 1)
    np.testing.assert_allclose(jnp.where(rollout.mask, advantages - expected, 0.0), 0.0, atol=1e-5)


def test_every_component_of_the_reward_counts_the_same():
    """A part of a thousand would drown one of 1: normalised together, the first two rows get
    about +1 and the others -1. The sum is brought back to deviation 1 over the batch: without
    that it would be 2 and -2."""
    parts = jnp.array([[[1000.0, 0], [1000.0, 1], [0, 0], [0, 1]]])
    rollout = rolled(parts.sum(axis=2), parts=parts)
    advantages, _ = components_normalised(rollout, epsilon=0.0)
    np.testing.assert_allclose(advantages[:, 0], [0, 1.224745, -1.224745, 0], atol=1e-5)


def test_groups_without_a_verdict_stand_beside_groups_with_one():
    """As in a mixture: the best of the one is imitated, and what is right in the other."""
    rewards = jnp.array([[0.2, 0.9], [0.3, 0.4]])
    rollout = rolled(rewards, correct=jnp.array([[NAN, NAN], [1.0, 0.0]]))
    np.testing.assert_array_equal(solved(rollout)[0][:, 0], [0, 1, 1, 0])


def test_unfound_groups_are_no_verdicts():
    """Nothing is judged: the best of a mixed group is imitated. Taken for verdicts, the zeros of
    places that were never filled would leave the term without a row."""
    rewards = jnp.array([[0.2, 0.9], [NAN, NAN]])
    rollout = rolled(rewards, correct=jnp.array([[NAN, NAN], [0.0, 0.0]]))
    np.testing.assert_array_equal(solved(rollout)[0][:, 0], [0, 1, 0, 0])


PREFERENCE = [n for n, row in (ALGORITHMS | TERMS).items() if row.unit == 2]


@pytest.mark.parametrize("name", PREFERENCE)
def test_a_groups_pair_is_its_best_and_its_worst(name):
    """Groups of equal or of no rewards have none; a row that could not be scored is neither."""
    rewards = jnp.array([[0.2, 0.9, 0.9, -1.0], [0.1] * 4, [NAN, 0.0, 1.0, NAN], [NAN] * 4])
    rollout = rolled(rewards)
    signs, _ = (ALGORITHMS | TERMS)[name].advantages(rollout)
    np.testing.assert_array_equal(
        signs.reshape(4, 4), [[0, 1, 0, -1], [0] * 4, [0, -1, 1, 0], [0] * 4]
    )
    taking_part = (ALGORITHMS | TERMS)[name].selects(signs)
    np.testing.assert_array_equal(taking_part, signs != 0)
    # In the order of pairs they stand side by side.
    ordered = reorder(rollout, pair_order(rewards))
    signs, _ = (ALGORITHMS | TERMS)[name].advantages(ordered)
    np.testing.assert_array_equal(
        signs.reshape(4, 4), [[1, -1, 0, 0], [0] * 4, [1, -1, 0, 0], [0] * 4]
    )


def test_reordering_moves_whole_rows():
    rng = np.random.default_rng(0)
    rollout = rolled(rng.normal(size=(2, 3)), [1, 2, 3, 3, 2, 1])
    rollout = rollout._replace(tokens=jnp.arange(6)[:, None] + jnp.zeros((6, 11), jnp.int32))
    order = jnp.array([[2, 0, 1], [0, 2, 1]])
    moved = reorder(rollout, order)
    np.testing.assert_array_equal(moved.tokens[:, 0], [2, 0, 1, 3, 5, 4])
    np.testing.assert_array_equal(jnp.sum(moved.mask, axis=1), [3, 1, 2, 3, 1, 2])
    np.testing.assert_array_equal(moved.rewards[0], rollout.rewards[0, order[0]])
    np.testing.assert_array_equal(moved.rows, rollout.rows)


def test_text_is_imitated_where_it_is_right():
    rollout = rolled([[1.0, 2.0], [0.0, 3.0]], correct=jnp.array([[1.0, 0], [NAN, 0]]))
    np.testing.assert_array_equal(ALGORITHMS["sft"].advantages(rollout)[0][:, 0], [1, 0, 0, 0])
    # Where nothing is right or wrong, the best of each group that differs.
    unjudged = rolled([[1.0, 2.0], [5.0, 5.0]], correct=jnp.full((2, 2), NAN))
    np.testing.assert_array_equal(ALGORITHMS["sft"].advantages(unjudged)[0][:, 0], [0, 1, 0, 0])


@pytest.mark.parametrize(
    "name", [n for n, row in (ALGORITHMS | TERMS).items() if row.advantages is not None]
)
def test_a_row_without_a_score_gets_no_advantage(name):
    """Nor makes another's NaN."""
    row = (ALGORITHMS | TERMS)[name]
    rewards = jnp.array([[1.0, NAN, 0.0, 0.5]])
    rollout = rolled(rewards, correct=jnp.array([[1.0, NAN, 0, 0]]), parts=rewards[..., None])
    # `prepare` masks such a row before it asks for advantages.
    rollout = rollout._replace(mask=rollout.mask & jnp.isfinite(rewards).reshape(-1, 1))
    advantages, returns = row.advantages(rollout)
    assert jnp.isfinite(advantages).all()
    assert jnp.isfinite(returns).all()
    np.testing.assert_array_equal(advantages[1], 0.0)
