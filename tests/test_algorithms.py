"""One table of expectations for the table of algorithms: a new row there is a new row here."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.advantages import group_normalised
from rlx.algorithms import ALGORITHMS
from rlx.algorithms.dapo import informative, overlong_penalty


class Expected(NamedTuple):
    hand: float
    """The loss of the worked example below, at the paper's hyper-parameters."""
    others: tuple[tuple[dict[str, Any], float], ...] = ()
    """The same at other hyper-parameters."""
    defaults: dict[str, Any] = {}  # noqa: RUF012
    metrics: tuple[str, ...] = ()
    """What it logs beside the ratio and the clip."""


GROUP = {"ddof": 0, "epsilon": 1e-4}
EXPECTED = {
    "grpo": Expected(
        0.024650,
        (({"beta": 0.0}, 0.023017), ({"beta": 0.5}, 0.043429)),
        GROUP | {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.04},
        ("kl", "kl/clamped"),
    ),
    "dapo": Expected(
        -0.292894,
        (({"clip_high": 0.2}, -0.281582),),
        GROUP | {"clip_low": 0.2, "clip_high": 0.28},
    ),
    "sft": Expected(1.02, (), {}, ("nll",)),
}

# FORMULAS: two prompts, two samples each, four tokens; advantages with ddof 1.
MASK = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
OLD = jnp.array(
    [[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, 0, 0], [-0.3, -0.9, -1.5, 0], [-2.2, 0, 0, 0]]
)
NEW = OLD + jnp.array(
    [[0.30, -0.10, 0.05, 0], [-0.40, 0.20, 0, 0], [0.10, 0.25, -0.35, 0], [0.15, 0, 0, 0]]
)
REF = OLD + jnp.array(
    [[-0.05, 0.10, 0.20, -0.30], [0, 0.15, 0, 0], [0.20, -0.10, 0.05, 0], [0.40, 0, 0, 0]]
)
ADVANTAGES = group_normalised(jnp.array([[1.1, 0.1], [1.0, 0.0]]), ddof=1).reshape(4, 1)
EXAMPLE = (NEW, OLD, REF, ADVANTAGES, MASK)

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
policy_gradient = pytest.mark.parametrize(
    "name", [n for n, row in ALGORITHMS.items() if row.advantages is not None]
)


@functools.cache
def compiled(name):
    """Value and gradient by the log-probabilities, one compilation a shape."""
    return jax.jit(jax.value_and_grad(ALGORITHMS[name].scalar))


def test_every_row_has_its_expectations():
    assert EXPECTED.keys() == ALGORITHMS.keys()


@every_algorithm
def test_the_worked_example(name):
    row = EXPECTED[name]
    for hyper, value in (({}, row.hand), *row.others):
        assert ALGORITHMS[name].scalar(*EXAMPLE, **hyper) == pytest.approx(value, abs=2e-6), hyper


@every_algorithm
def test_defaults_are_the_papers(name):
    parameters = ALGORITHMS[name].hyper_parameters()
    assert {n: p.default for n, p in parameters.items()} == EXPECTED[name].defaults


@every_algorithm
def test_metrics_are_named_and_count_unmasked_tokens(name):
    _, metrics = ALGORITHMS[name].loss(*EXAMPLE)
    shared = {"clip/low", "clip/high", "ratio/mean", "ratio/max", "ratio/clamped"}
    expected = set(EXPECTED[name].metrics) | (shared if ALGORITHMS[name].advantages else set())
    assert set(metrics) == expected
    for metric in EXPECTED[name].metrics:
        assert metrics[metric].count == 10.0


@every_algorithm
def test_jit_equals_eager(name):
    value, grad = compiled(name)(*EXAMPLE)
    eager_value, eager_grad = jax.value_and_grad(ALGORITHMS[name].scalar)(*EXAMPLE)
    assert value == pytest.approx(float(eager_value), rel=1e-6)
    np.testing.assert_allclose(grad, eager_grad, rtol=1e-5, atol=1e-8)


@every_algorithm
def test_the_gradient_is_that_of_finite_differences(name):
    """In float64, away from the corners of the clip."""
    _, grad = compiled(name)(*EXAMPLE)
    assert jnp.max(jnp.abs(grad)) > 0.01
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in EXAMPLE[:4]]
        rng = np.random.default_rng(0)
        for _ in range(3):
            direction = jnp.asarray(rng.normal(size=NEW.shape)) * 1e-5

            def at(sign, direction=direction):
                row = ALGORITHMS[name]
                return float(row.scalar(exact[0] + sign * direction, *exact[1:], MASK))

            slope = (at(1) - at(-1)) / 2
            assert float(jnp.sum(grad * direction)) == pytest.approx(slope, rel=1e-3, abs=1e-9)


@every_algorithm
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, 5.0])
def test_what_lies_under_the_mask_is_inert(name, garbage):
    dirty = [jnp.where(MASK, x, garbage) for x in EXAMPLE[:3]]
    value, grad = compiled(name)(*dirty, ADVANTAGES, MASK)
    clean_value, clean_grad = compiled(name)(*EXAMPLE)
    assert value == clean_value
    np.testing.assert_array_equal(grad, clean_grad)
    # Masked on the way out instead: 0 * nan.
    np.testing.assert_array_equal(grad[~MASK], 0.0)


@every_algorithm
def test_a_wholly_masked_row_may_hold_anything(name):
    mask = MASK.at[1].set(False)
    clean = compiled(name)(*EXAMPLE[:4], mask)
    dirty = compiled(name)(*(x.at[1].set(jnp.nan) for x in EXAMPLE[:4]), mask)
    assert dirty[0] == clean[0]
    np.testing.assert_array_equal(dirty[1], clean[1])
    # And it weighs as much as a row that is not there.
    keep = jnp.array([0, 2, 3])
    without = ALGORITHMS[name].scalar(*(x[keep] for x in (*EXAMPLE[:4], mask)))
    assert clean[0] == pytest.approx(float(without), rel=1e-6)


@every_algorithm
def test_padding_width_does_not_matter(name):
    def wider(x):
        return jnp.pad(x, ((0, 0), (0, 3)), constant_values=jnp.nan if x.dtype != bool else False)

    value, grad = compiled(name)(*map(wider, EXAMPLE[:3]), ADVANTAGES, wider(MASK))
    clean_value, clean_grad = compiled(name)(*EXAMPLE)
    assert value == pytest.approx(float(clean_value), rel=1e-6)
    np.testing.assert_allclose(grad[:, :4], clean_grad, rtol=1e-6)
    np.testing.assert_array_equal(grad[:, 4:], 0.0)


@every_algorithm
def test_the_order_of_rows_does_not_matter(name):
    order = jnp.array([2, 0, 3, 1])
    value, grad = compiled(name)(*(x[order] for x in EXAMPLE))
    clean_value, clean_grad = compiled(name)(*EXAMPLE)
    assert value == pytest.approx(float(clean_value), rel=1e-5)
    np.testing.assert_allclose(grad, clean_grad[order], rtol=1e-5, atol=1e-9)


@every_algorithm
def test_a_loss_is_unreduced_and_adds_up_over_any_cut(name):
    row = ALGORITHMS[name]
    weights = row.weights(MASK)
    pieces = [
        jnp.sum(weights[cut] * row.loss(*(x[cut] for x in EXAMPLE))[0])
        for cut in (slice(0, 1), slice(1, 4))
    ]
    assert row.loss(*EXAMPLE)[0].shape in (MASK.shape, (4, 1))
    assert sum(pieces) == pytest.approx(EXPECTED[name].hand, abs=2e-6)


@every_algorithm
def test_nothing_unmasked_is_a_loss_of_zero(name):
    """Not 0 / 0, in value or gradient."""
    value, grad = compiled(name)(*EXAMPLE[:4], jnp.zeros_like(MASK))
    assert value == 0.0
    np.testing.assert_array_equal(grad, 0.0)


@policy_gradient
def test_a_ratio_of_one_gives_the_plain_policy_gradient(name):
    """Unclipped, the gradient is -weight x advantage on every token; the clip is inside, not
    outside."""
    _, grad = compiled(name)(NEW, NEW, NEW, ADVANTAGES, MASK)
    expected = -ALGORITHMS[name].weights(MASK) * ADVANTAGES
    np.testing.assert_allclose(grad, expected, atol=1e-7)


@policy_gradient
def test_equal_rewards_print_a_loss_of_zero_and_so_do_mixed_ones(name):
    """The loss is no signal of progress: only the gradient tells the two apart."""
    mask = jnp.ones((4, 4), bool)
    equal = jax.value_and_grad(ALGORITHMS[name].scalar)(NEW, NEW, NEW, jnp.zeros((4, 1)), mask)
    mixed = jax.value_and_grad(ALGORITHMS[name].scalar)(NEW, NEW, NEW, ADVANTAGES, mask)
    assert equal[0] == pytest.approx(0.0, abs=1e-6)
    assert mixed[0] == pytest.approx(0.0, abs=1e-6)
    assert jnp.linalg.norm(equal[1]) == 0.0
    assert jnp.linalg.norm(mixed[1]) > 0.1


@policy_gradient
def test_an_infinite_ratio_of_a_row_without_advantage_is_no_nan(name):
    value, grad = compiled(name)(OLD + 100.0, OLD, OLD + 100.0, jnp.zeros((4, 1)), MASK)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()


@policy_gradient
def test_a_masked_slot_with_nan_does_not_leak(name):
    """Averaged before it is masked, the first would be NaN and the second 5.5."""
    zeros, one_of_two = jnp.zeros((1, 2)), jnp.array([[True, False]])
    old = jnp.array([[0.0, jnp.nan]])
    loss = ALGORITHMS[name].scalar(zeros, old, zeros, jnp.ones((1, 1)), one_of_two)
    assert loss == pytest.approx(-1.0)
    rows = jnp.array([[True], [True], [False], [False]])
    advantages = jnp.array([[1.0], [1.0], [10.0], [10.0]])
    columns = jnp.zeros((4, 1))
    assert ALGORITHMS[name].scalar(columns, columns, columns, advantages, rows) == -1.0


@every_algorithm
def test_advantages_per_token_say_the_same_as_per_row(name):
    per_token = jnp.broadcast_to(ADVANTAGES, MASK.shape)
    value = ALGORITHMS[name].scalar(NEW, OLD, REF, per_token, MASK)
    assert value == pytest.approx(EXPECTED[name].hand, abs=2e-6)


@every_algorithm
def test_an_unknown_hyper_parameter_is_refused_with_the_known_ones(name):
    with pytest.raises(TypeError, match=r"clip_hihg.*known"):
        ALGORITHMS[name].scalar(*EXAMPLE, clip_hihg=0.3)


@every_algorithm
def test_bound_and_given_hyper_parameters_agree(name):
    for hyper, value in EXPECTED[name].others:
        bound = ALGORITHMS[name].bind(**hyper)
        assert bound.scalar(*EXAMPLE) == pytest.approx(value, abs=2e-6)
        defaults = {n: p.default for n, p in bound.hyper_parameters().items()}
        assert defaults == EXPECTED[name].defaults | hyper


def test_only_a_kl_term_loads_a_reference():
    assert ALGORITHMS["grpo"].uses_reference()
    assert not ALGORITHMS["grpo"].bind(beta=0.0).uses_reference()
    assert not ALGORITHMS["dapo"].uses_reference()
    assert not ALGORITHMS["sft"].uses_reference()


def test_grpo_and_dapo_are_one_where_their_papers_do_not_differ():
    """Rows of one length, one clip, no KL: both reductions are the mean."""
    arrays = (*EXAMPLE[:4], jnp.ones((4, 4), bool))
    grpo = ALGORITHMS["grpo"].scalar(*arrays, beta=0.0)
    assert grpo == pytest.approx(float(ALGORITHMS["dapo"].scalar(*arrays, clip_high=0.2)), rel=1e-6)


def test_sft_does_not_look_at_advantages():
    other = ALGORITHMS["sft"].scalar(NEW, OLD * 2, REF * 3, -ADVANTAGES, MASK)
    assert other == ALGORITHMS["sft"].scalar(*EXAMPLE)


def test_the_overlong_penalty_is_counted_in_tokens():
    """With the two lengths mixed up, 90 tokens would give 0 or -1."""
    lengths = jnp.array([[79, 80, 81], [90, 100, 101]])
    penalty = overlong_penalty(lengths, limit=100, buffer=20)
    np.testing.assert_allclose(penalty, [[0, 0, -0.05], [-0.5, -1, -1]], atol=1e-6)


def test_a_group_is_informative_where_some_are_right_and_some_wrong():
    nan = jnp.nan
    correct = jnp.array(
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [nan, 1, 1], [nan, 0, 1], [nan, 0, 0], [nan] * 3]
    )
    # Counted as wrong, the row without a score would keep the fourth group.
    expected = [False, False, True, False, True, False, False]
    np.testing.assert_array_equal(informative(correct), expected)
