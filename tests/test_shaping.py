"""What becomes of a reward before advantages: its place, its scale, penalties, the KL in it."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import sampling

from rlx import ops
from rlx.rollout import empty_rollout
from rlx.shaping import Shaping, adapted, shape
from rlx.state import start_memory

NAN = float("nan")
WIDTH = 5


def rolled(rewards, lengths, **fields):
    rewards = jnp.asarray(rewards, jnp.float32)
    n, g = rewards.shape
    mask = jnp.arange(WIDTH) < jnp.asarray(lengths)[:, None]
    empty = empty_rollout(sampling(prompts=n, samples=g, max_new_tokens=WIDTH), 4)
    return empty._replace(mask=mask, rewards=rewards, **fields)


def shaped(shaping, rollout, memory=None, use=None):
    use = jnp.ones(len(rollout.mask), bool) if use is None else use
    return shape(shaping, memory or start_memory(shaping.kl_beta), rollout, use)


def test_a_reward_lands_on_the_last_token():
    """Three tokens and two of padding, and a full row: on the first padding it would be masked
    away, and the sum be 0."""
    result, _, _ = shaped(Shaping(), rolled([[1.0, 2.0]], [3, 5]))
    expected = [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2]]
    np.testing.assert_array_equal(result.token_rewards, expected)
    np.testing.assert_array_equal(ops.row_sum(result.token_rewards, result.mask), [[1], [2]])


def test_what_was_earned_on_the_way_is_not_paid_twice():
    scores = jnp.array([[0.25, 0, 0.5, 0, 0]])
    result, _, _ = shaped(Shaping(), rolled([[1.0]], [4], token_scores=scores))
    np.testing.assert_allclose(result.token_rewards, [[0.25, 0, 0.5, 0.25, 0]])


SHAPINGS = [
    Shaping(),
    Shaping(divergence=ops.k1, kl_beta=0.1),
    Shaping(divergence=ops.k3, kl_beta=0.3, missing_stop_penalty=0.5),
    Shaping(running=True, clip=1.0),
    Shaping(ops.k1, 0.1, 1.0, 100.0, 1.0, True, 2.0),
]


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(SHAPINGS),
    # Far enough apart that their deviation, as the unit, does not drown the sum in rounding.
    st.lists(st.integers(-12, 12).map(lambda i: i / 4) | st.just(NAN), min_size=4, max_size=4),
    st.lists(st.integers(0, WIDTH), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_rewards_by_token_sum_to_the_reward(shaping, rewards, lengths, seed):
    """Whatever shapes them; nothing stands on padding, and a row without a score has none."""
    lengths = np.maximum(lengths, 1)
    rng = np.random.default_rng(seed)
    old, ref, scores = jnp.asarray(rng.normal(size=(3, 4, WIDTH)), jnp.float32)
    rollout = rolled(
        np.reshape(rewards, (2, 2)),
        lengths,
        old_logprobs=old,
        ref_logprobs=ref,
        token_scores=scores,
        truncated=jnp.asarray(lengths == WIDTH),
    )
    result, _, _ = shaped(shaping, rollout)
    total = jnp.sum(result.token_rewards, axis=1)
    expected = jnp.nan_to_num(result.rewards.reshape(-1))
    np.testing.assert_allclose(total, expected, atol=2e-5)
    np.testing.assert_array_equal(jnp.isnan(result.rewards), jnp.isnan(rollout.rewards))
    np.testing.assert_array_equal(result.token_rewards[~rollout.mask], 0.0)


OLD = jnp.array([[-1.0, -2.0, -1.5, 9.0, NAN], [-0.5, -1.0, 0, 0, 0]])
REF = jnp.array([[-1.2, -1.5, -1.5, -9.0, NAN], [-1.5, -1.0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        (ops.k1, [[0.2, -0.5, 0], [1.0, 0, 0]]),
        (ops.k3, [[0.0187308, 0.1487213, 0], [0.3678794, 0, 0]]),
    ],
)
def test_the_divergence_is_taken_off_each_token(estimator, divergence):
    """What lies under the mask has none, NaN included."""
    shaping = Shaping(divergence=estimator, kl_beta=0.1)
    rollout = rolled([[1.0, 0.0]], [3, 2], old_logprobs=OLD, ref_logprobs=REF)
    result, memory, metrics = shaped(shaping, rollout)
    expected = -0.1 * np.array(divergence)
    expected[0, 2] += 1.0
    np.testing.assert_allclose(result.token_rewards[:, :3], expected, atol=1e-6)
    spent = np.sum(divergence, axis=1)
    np.testing.assert_allclose(result.rewards[0], np.array([1.0, 0.0]) - 0.1 * spent, atol=1e-6)
    values = ops.values(metrics)
    assert values["kl/reward"] == pytest.approx(spent.sum() / 5, abs=1e-6)
    assert values["kl/completion"] == pytest.approx(spent.mean(), abs=1e-6)
    assert values["kl/beta"] == pytest.approx(0.1)
    # Without a target the weight stays.
    assert memory.kl_beta == jnp.float32(0.1)


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.15, 0.00102048), (0.01, 0.00097952), (0.1, 0.001), (0.105, 0.00100512)]
)
def test_the_adaptive_weight_of_the_worked_example(kl, expected):
    """Its error is clipped at a fifth; unclipped, .15 against a target of .1 gives .0010512."""
    beta = adapted(0.001, kl, 1024.0, 0.1, 10_000.0)
    assert beta == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("target", "direction"), [(0.1, 1), (5.0, -1)])
def test_the_weight_moves_against_the_error(target, direction):
    """A divergence of 0.35 a completion, over the target or under it."""
    shaping = Shaping(ops.k1, 0.1, kl_target=target, kl_horizon=10.0)
    rollout = rolled([[1.0, 0.0]], [3, 2], old_logprobs=OLD, ref_logprobs=REF)
    _, memory, metrics = shaped(shaping, rollout)
    assert memory.kl_beta == pytest.approx(0.1 * (1 + direction * 0.2 * 2 / 10), rel=1e-5)
    # This step still used the weight it began with.
    assert ops.values(metrics)["kl/beta"] == pytest.approx(0.1)
    _, memory, _ = shaped(shaping, rollout, memory)
    assert memory.kl_beta == pytest.approx(0.1 * (1 + direction * 0.04) ** 2, rel=1e-5)


def test_rows_without_a_reward_steer_nothing():
    shaping = Shaping(ops.k1, 0.1, kl_target=1e3, kl_horizon=10.0)
    rollout = rolled([[NAN, 0.0]], [3, 2], old_logprobs=OLD, ref_logprobs=REF)
    _, memory, metrics = shaped(shaping, rollout)
    assert ops.values(metrics)["kl/completion"] == pytest.approx(1.0)
    assert memory.kl_beta == pytest.approx(0.1 * (1 - 0.2 * 1 / 10), rel=1e-5)
    _, memory, _ = shaped(shaping, rolled([[NAN, NAN]], [3, 2]))
    assert memory.kl_beta == jnp.float32(0.1)


def test_running_normalisation_is_that_of_all_rewards_so_far():
    """Against NumPy over the stream; each step counts itself in. Rows without a score don't."""
    rng = np.random.default_rng(0)
    memory, stream = start_memory(), []
    for step in range(4):
        rewards = rng.normal(5 + step, 3, (2, 3)).astype(np.float32)
        rewards[0, step % 3] = NAN
        stream += rewards[np.isfinite(rewards)].tolist()
        result, memory, metrics = shaped(Shaping(running=True), rolled(rewards, [3] * 6), memory)
        mean, std = np.mean(stream), np.std(stream, ddof=1)
        np.testing.assert_allclose(result.rewards, (rewards - mean) / std, rtol=1e-4, atol=1e-5)
        assert ops.values(metrics)["reward/scale"] == pytest.approx(1 / std, rel=1e-4)
    assert memory.rewards.count == len(stream) == 20


def test_equal_rewards_are_not_blown_up():
    """The mean of seven times 0.1 is off by 7e-9, and so is their deviation: divided by it plus
    1e-8, every reward would be -0.41."""
    result, memory, _ = shaped(Shaping(running=True), rolled([[0.1] * 7], [3] * 7))
    np.testing.assert_allclose(result.rewards, 0.0, atol=1e-6)
    assert memory.rewards.mean == pytest.approx(0.1)


def test_the_scale_holds_for_scores_within_the_text_too():
    scores = jnp.array([[1.0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    result, _, _ = shaped(Shaping(running=True), rolled([[3.0, 1.0]], [3, 3], token_scores=scores))
    scale = 1 / np.sqrt(2)
    np.testing.assert_allclose(result.token_rewards[0], [scale, 0, 0, 0, 0], atol=1e-6)


def test_clipping_and_the_penalty_of_a_missing_stop():
    """The clip is of the reward, before the penalty: a truncated row may fall below it."""
    shaping = Shaping(clip=1.0, missing_stop_penalty=0.5)
    truncated = jnp.array([False, True, True])
    result, _, _ = shaped(shaping, rolled([[3.0, -3.0, 0.25]], [3, 5, 5], truncated=truncated))
    np.testing.assert_allclose(result.rewards, [[1.0, -1.5, -0.25]])


def test_places_of_groups_that_were_never_found_have_no_reward():
    use = jnp.array([True, True, False, False])
    rollout = rolled([[1.0, 0.0], [7.0, 7.0]], [3, 2, 1, 1])
    result, memory, _ = shaped(Shaping(running=True), rollout, use=use)
    assert jnp.isnan(result.rewards[1]).all()
    np.testing.assert_array_equal(result.token_rewards[2:], 0.0)
    assert memory.rewards.count == 2
