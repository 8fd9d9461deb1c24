"""Ratios, clipping, KL, reductions and metrics: hand numbers and what masked tokens may not do."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx import ops
from rlx.types import Largest, Mean, Smallest

# FORMULAS: two prompts, two samples each, four tokens.
MASK = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
LOG_RATIO = jnp.array(
    [[0.30, -0.10, 0.05, 0], [-0.40, 0.20, 0, 0], [0.10, 0.25, -0.35, 0], [0.15, 0, 0, 0]]
)
REF_SHIFT = jnp.array(
    [[-0.05, 0.10, 0.20, -0.30], [0, 0.15, 0, 0], [0.20, -0.10, 0.05, 0], [0.40, 0, 0, 0]]
)
ADVANTAGES = jnp.array([[0.707007], [-0.707007], [0.707007], [-0.707007]])

# One row of four tokens with loss 1, one row of one token with loss 3.
UNEVEN_MASK = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
UNEVEN_LOSS = jnp.where(UNEVEN_MASK, jnp.array([[1.0], [3.0]]), 0.0)

some_masks = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3).map(
    lambda rows: jnp.array(rows, bool)
)


def token_average(x):
    return float(jnp.sum(ops.token_mean(MASK) * x))


def test_masked_stops_nan_in_value_and_gradient():
    def total(x):
        return jnp.sum(jnp.exp(ops.masked(x, jnp.array([[True, False]]))))

    value, grad = jax.value_and_grad(total)(jnp.array([[0.0, jnp.nan]]))
    assert value == 2.0  # exp(0) twice
    np.testing.assert_array_equal(grad, [[1.0, 0.0]])  # masked after exp: [1, nan]


@pytest.mark.parametrize("far", [100.0, -100.0, 1e30])
def test_a_far_log_ratio_stays_finite(far):
    """exp(100) is infinite in float32, and infinity times the advantage 0 is NaN."""
    ratio = jnp.exp(ops.log_ratio(jnp.array([[far]]), jnp.zeros((1, 1))))
    assert jnp.isfinite(ratio).all()
    assert ops.clipped_surrogate(ratio, jnp.zeros((1, 1)), 0.2, 0.2) == 0.0
    assert jnp.isfinite(ops.clipped_surrogate(ratio, -jnp.ones((1, 1)), 0.2, 0.2)).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.25, 1.0, -1.25), (0.75, -1.0, 0.8)]
)
def test_the_upper_clip_is_the_wider_one(ratio, advantage, expected):
    """With the ends swapped the losses would be -1.20 and 0.75."""
    loss = ops.clipped_surrogate(jnp.array([[ratio]]), jnp.array([[advantage]]), 0.2, 0.28)
    assert loss.item() == pytest.approx(expected)


def test_clip_fractions_look_at_the_sign_of_the_advantage():
    metrics = ops.values(ops.clip_metrics(jnp.exp(LOG_RATIO), ADVANTAGES, MASK, 0.2, 0.28))
    assert metrics["clip/low"] == pytest.approx(0.1)
    # exp(.30) and exp(.25) with A > 0.
    assert metrics["clip/high"] == pytest.approx(0.2)
    # Blind to the sign, the low share would count exp(-.35) of a good row too: 0.2.
    assert metrics["ratio/max"] == pytest.approx(math.exp(0.3))
    assert metrics["ratio/clamped"] == 0.0


def test_clip_metrics_ignore_what_is_masked():
    ratio = jnp.where(MASK, jnp.exp(LOG_RATIO), 1e9)
    clean = ops.clip_metrics(jnp.exp(LOG_RATIO), ADVANTAGES, MASK, 0.2, 0.28)
    assert ops.values(ops.clip_metrics(ratio, ADVANTAGES, MASK, 0.2, 0.28)) == ops.values(clean)


def test_the_share_of_clamped_ratios_is_counted_on_both_sides():
    far = ops.log_ratio(jnp.array([[50.0, -50.0, 1.0, 0.0]]), jnp.zeros((1, 4)))
    metrics = ops.clip_metrics(jnp.exp(far), jnp.ones((1, 1)), jnp.ones((1, 4), bool), 0.2, 0.2)
    assert ops.values(metrics)["ratio/clamped"] == 0.5


def test_k3_of_the_worked_example():
    assert token_average(ops.k3(LOG_RATIO, REF_SHIFT)) == pytest.approx(0.040751, abs=1e-6)


@given(st.floats(-200, 200, width=32))
def test_k3_is_never_negative(d):
    """Formed as exp(d) - 1 - d, it falls to -6e-8 where d is small."""
    value = ops.k3(jnp.zeros((1, 1)), jnp.full((1, 1), d)).item()
    assert math.isfinite(value)
    assert value >= -1e-7 * min(abs(d), 1e-6)


def test_k3_of_a_small_shift_is_half_its_square():
    """exp(d) - d - 1 in float32 gives 4.77e-7 or 5.96e-7."""
    assert ops.k3(jnp.zeros((1, 1)), jnp.full((1, 1), 1e-3)).item() == pytest.approx(
        5.0e-7, rel=1e-3
    )


def test_k3_clamps_d_in_both_places():
    """At d = 1e9, clamped inside `exp` alone, k3 would be -5e8."""
    assert ops.k3(jnp.zeros((1, 1)), jnp.full((1, 1), 1e9)).item() == pytest.approx(
        4.85165e8, rel=1e-4
    )
    assert ops.k3(jnp.zeros((1, 1)), jnp.full((1, 1), -30.0)).item() == pytest.approx(19.0)
    # In `exp` alone: 29.


def test_token_mean_and_sequence_mean_differ_where_lengths_do():
    assert jnp.sum(ops.token_mean(UNEVEN_MASK) * UNEVEN_LOSS) == pytest.approx(7 / 5)
    assert jnp.sum(ops.sequence_mean(UNEVEN_MASK) * UNEVEN_LOSS) == pytest.approx(2.0)


@pytest.mark.parametrize("reduction", [ops.token_mean, ops.sequence_mean])
def test_the_cut_into_micro_batches_does_not_move_the_mean(reduction):
    weights = reduction(UNEVEN_MASK)
    pieces = [jnp.sum(weights[i] * UNEVEN_LOSS[i]) for i in range(2)]
    # A token mean a micro-batch and then the mean of those gives 2.0 for either.
    expected = {ops.token_mean: 1.4, ops.sequence_mean: 2.0}[reduction]
    assert sum(pieces) == pytest.approx(expected)


@pytest.mark.parametrize("reduction", [ops.token_mean, ops.sequence_mean])
@settings(deadline=None, max_examples=30)
@given(mask=some_masks)
def test_weights_are_a_distribution_over_unmasked_tokens(reduction, mask):
    weights = reduction(mask)
    np.testing.assert_array_equal(weights[~mask], 0.0)
    # Nothing unmasked: weights of 0, not 0 / 0.
    assert jnp.sum(weights) == pytest.approx(float(jnp.any(mask)), abs=1e-6)


def test_a_row_without_tokens_is_not_counted():
    padded = jnp.concatenate([UNEVEN_MASK, jnp.zeros((2, 4), bool)])
    loss = jnp.concatenate([UNEVEN_LOSS, jnp.zeros((2, 4))])
    # Counted, the two empty rows would halve it to 1.0.
    assert jnp.sum(ops.sequence_mean(padded) * loss) == pytest.approx(2.0)


def test_a_mean_is_over_unmasked_tokens():
    metric = ops.mean(jnp.array([[-1.0, -1.0, 0.0, 0.0]]), jnp.array([[True, True, False, False]]))
    assert ops.values({"x": metric})["x"] == -1.0  # not -0.5


def test_micro_batches_pool_exactly():
    """Four tokens of 1 and one token of 3: 1.4, where a mean of means gives 2.0."""
    stacked = {
        "mean": Mean(jnp.array([4.0, 3.0]), jnp.array([4.0, 1.0])),
        "max": Largest(jnp.array([1.0, 3.0])),
        "min": Smallest(jnp.array([1.0, 3.0])),
    }
    pooled = ops.values(ops.pool(stacked))
    assert pooled == {"mean": pytest.approx(1.4), "max": 3.0, "min": 1.0}


def test_every_update_weighs_the_same():
    """Three micro-batches of value 1 in one update, one of value 4 in the next: 2.5, not 1.75."""
    updates = [
        {"x": Mean(jnp.float32(3), jnp.float32(3))},
        {"x": Mean(jnp.float32(4), jnp.float32(1))},
    ]
    first, second = map(ops.close, updates)
    assert ops.values(ops.combine(first, second))["x"] == 2.5


def test_an_update_that_counted_nothing_has_no_weight():
    empty = ops.close({"x": Mean(jnp.float32(0), jnp.float32(0))})
    assert math.isnan(ops.values(empty)["x"])
    full = ops.close({"x": Mean(jnp.float32(6), jnp.float32(2))})
    assert ops.values(ops.combine(empty, full))["x"] == 3.0  # not 1.5


def test_nothing_measured_changes_nothing():
    metrics = {
        "mean": Mean(jnp.float32(3), jnp.float32(2)),
        "max": Largest(jnp.float32(-7)),
        "min": Smallest(jnp.float32(7)),
    }
    shapes = jax.eval_shape(lambda: metrics)
    assert ops.values(ops.combine(ops.nothing_measured(shapes), metrics)) == ops.values(metrics)


@pytest.mark.parametrize("x", [2.0, jnp.float32(2), jnp.int32(2), jnp.array(True)])
def test_a_scalar_metric_takes_any_number(x):
    assert ops.values({"x": ops.scalar_metric(x)})["x"] == float(x)
