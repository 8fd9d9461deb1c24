"""Ratios, clipping, KL, reductions and metrics: hand numbers and what masked tokens may not do."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worked_example import ADVANTAGES, LOG_RATIO, MASK, REF_SHIFT

from rlx import ops
from rlx.types import Largest, Mean, Smallest

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


@pytest.mark.parametrize(
    ("estimator", "expected"), [(ops.k1, -0.045), (ops.k2, 0.039625), (ops.k3, 0.040751)]
)
def test_the_estimators_of_the_worked_example(estimator, expected):
    assert token_average(estimator(LOG_RATIO, REF_SHIFT)) == pytest.approx(expected, abs=1e-6)


def test_only_k2_and_k3_have_the_gradient_of_the_divergence():
    """Exact expectations over a distribution of five tokens. The gradient of the mean of k1 over
    samples is zero, whatever the divergence: a loss of k1 would do nothing."""
    rng = np.random.default_rng(0)
    logits, base = jnp.asarray(rng.normal(size=(2, 1, 5)), jnp.float32)
    base = jax.nn.log_softmax(base)
    drawn = jax.nn.softmax(logits)

    def expected(estimator):
        return jax.grad(lambda x: jnp.sum(drawn * estimator(jax.nn.log_softmax(x), base)))(logits)

    def divergence(x):
        logprobs = jax.nn.log_softmax(x)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - base))

    exact = jax.grad(divergence)(logits)
    assert jnp.max(jnp.abs(exact)) > 0.1
    np.testing.assert_allclose(expected(ops.k1), 0.0, atol=1e-6)
    np.testing.assert_allclose(expected(ops.k2), exact, atol=1e-6)
    # k3's is that of the divergence the other way round: softmax less base.
    np.testing.assert_allclose(expected(ops.k3), drawn - jnp.exp(base), atol=1e-6)


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


# What each reduction makes of the two uneven rows.
MEANS = {
    "token_mean": 7 / 5,
    "sequence_mean": 2.0,
    "budget_mean": 7 / 8,
    "row_mean": 2.0,
}
every_reduction = pytest.mark.parametrize("name", MEANS)


def reduced(name, mask=UNEVEN_MASK, loss=UNEVEN_LOSS):
    # A loss of one value a row, for the weights that are one a row.
    loss = loss[:, :1] if name == "row_mean" else loss
    return jnp.sum(ops.REDUCTIONS[name](mask) * loss)


def test_every_reduction_has_its_number():
    assert MEANS.keys() == ops.REDUCTIONS.keys()


@every_reduction
def test_reductions_differ_where_lengths_do(name):
    assert reduced(name) == pytest.approx(MEANS[name])


@pytest.mark.parametrize("budget", [4, 8])
def test_a_budget_knows_no_length(budget):
    """7 / (2 x 8) = 0.4375: by the batch's longest row it would be 0.875 for every budget."""
    weights = ops.budget_mean(UNEVEN_MASK, budget=budget)
    assert jnp.sum(weights * UNEVEN_LOSS) == pytest.approx(7 / (2 * budget))


@every_reduction
def test_the_cut_into_micro_batches_does_not_move_the_mean(name):
    weights = ops.REDUCTIONS[name](UNEVEN_MASK)
    loss = UNEVEN_LOSS[:, :1] if name == "row_mean" else UNEVEN_LOSS
    pieces = [jnp.sum(weights[i] * loss[i]) for i in range(2)]
    # A token mean a micro-batch and then the mean of those gives 2.0 instead of 1.4.
    assert sum(pieces) == pytest.approx(MEANS[name])


@every_reduction
@settings(deadline=None, max_examples=15)
@given(mask=some_masks)
def test_weights_stand_on_unmasked_tokens_and_sum_to_one(name, mask):
    weights = ops.REDUCTIONS[name](mask)
    live = jnp.any(mask, axis=1, keepdims=True) if name == "row_mean" else mask
    np.testing.assert_array_equal(weights[~live], 0.0)
    # Nothing unmasked: weights of 0, not 0 / 0. A budget sums to the share of it that is used.
    rows = jnp.sum(jnp.any(mask, axis=1))
    share = jnp.sum(mask) / (4 * jnp.maximum(rows, 1)) if name == "budget_mean" else rows > 0
    assert jnp.sum(weights) == pytest.approx(float(share), abs=1e-6)


def test_a_row_without_tokens_is_not_counted():
    padded = jnp.concatenate([UNEVEN_MASK, jnp.zeros((2, 4), bool)])
    loss = jnp.concatenate([UNEVEN_LOSS, jnp.zeros((2, 4))])
    # Counted, the two empty rows would halve it to 1.0.
    assert jnp.sum(ops.sequence_mean(padded) * loss) == pytest.approx(2.0)


def test_a_rows_sum_and_average_are_of_its_unmasked_tokens():
    """Log-probabilities [-1, -1, pad, pad]: over the padded width the average would be -0.5."""
    x, mask = jnp.array([[-1.0, -1.0, jnp.nan, 7.0]]), jnp.array([[True, True, False, False]])
    assert ops.row_sum(x, mask) == -2.0
    assert ops.row_average(x, mask) == -1.0
    assert ops.row_average(x, jnp.zeros_like(mask)) == 0.0


def test_the_last_token_is_the_last_unmasked_one():
    """After a stop token in the middle, at a full row's end, before a hole, and nowhere."""
    mask = jnp.array([[1, 1, 1, 0, 0], [1] * 5, [1, 0, 1, 0, 0], [0] * 5], bool)
    expected = np.array([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0] * 5], bool)
    np.testing.assert_array_equal(ops.last_token(mask), expected)


def test_the_deviation_of_equal_values_is_zero():
    """By the mean of squares less the square of the mean it is 1e-4 in float32."""
    x, mask = jnp.full((1, 7), 0.1), jnp.ones((1, 7), bool)
    assert ops.values({"x": ops.deviation(x, mask)})["x"] == pytest.approx(0.0, abs=2e-8)


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
