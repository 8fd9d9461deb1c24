"""All that holds for every row of the table of algorithms, by the table in `expectations.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expectations import EXPECTED
from worked_example import ADVANTAGES, EXAMPLES, MASK, NEW, OLD, REF, Example

from rlx import ops
from rlx.algorithms import ALGORITHMS, TERMS
from rlx.algorithms.dapo import informative, overlong_penalty

ROWS = ALGORITHMS | TERMS


every_row = pytest.mark.parametrize("name", EXPECTED)
rows_of_ratios = pytest.mark.parametrize(
    "name", [n for n, row in EXPECTED.items() if "ratio/clamped" in row.metrics]
)


def example_of(name) -> Example:
    return EXAMPLES[EXPECTED[name].example]


def scalar(name):
    return functools.partial(ROWS[name].scalar, **EXPECTED[name].given)


@functools.cache
def compiled(name):
    """Value and gradient by the log-probabilities, one compilation a shape."""
    return jax.jit(jax.value_and_grad(scalar(name)))


@functools.cache
def clean(name):
    return compiled(name)(*example_of(name).arrays)


def assert_same(result, expected):
    assert float(result[0]) == pytest.approx(float(expected[0]), rel=2e-6, abs=1e-9)
    np.testing.assert_allclose(result[1], expected[1], rtol=1e-5, atol=1e-8)


def test_every_row_has_its_expectations():
    assert EXPECTED.keys() == ROWS.keys()
    assert len(ROWS) == len(ALGORITHMS) + len(TERMS)
    for name, row in EXPECTED.items():
        assert EXAMPLES[row.example].unit == ROWS[name].unit, name


@every_row
def test_the_worked_example(name):
    row = EXPECTED[name]
    for hyper, value in (({}, row.hand), *row.others):
        loss = ROWS[name].scalar(*example_of(name).arrays, **hyper)
        assert loss == pytest.approx(value, abs=2e-6, rel=2e-6), hyper


@every_row
def test_defaults_are_the_papers(name):
    parameters = ROWS[name].hyper_parameters()
    assert {n: p.default for n, p in parameters.items()} == EXPECTED[name].defaults


@every_row
def test_metrics_are_those_of_unmasked_tokens(name):
    _, metrics = ROWS[name].loss(*example_of(name).arrays)
    assert ops.values(metrics) == pytest.approx(EXPECTED[name].metrics, abs=2e-6)
    halves = {"rewards/chosen", "rewards/rejected", "score/chosen", "score/rejected"}
    for metric in metrics.keys() - {"ratio/max"}:
        share = 2 if metric in halves else 1
        assert metrics[metric].count == EXPECTED[name].counted / share, metric


@every_row
def test_jit_equals_eager(name):
    assert_same(clean(name), jax.value_and_grad(scalar(name))(*example_of(name).arrays))


@pytest.mark.parametrize("name", [n for n, row in EXPECTED.items() if not row.stopped])
def test_the_gradient_is_that_of_finite_differences(name):
    """In float64, a little beside the example, whose log-ratio of -.4 is a corner of a clip."""
    arrays = example_of(name).arrays
    here = arrays[0] + 0.013
    _, grad = compiled(name)(here, *arrays[1:])
    assert jnp.max(jnp.abs(grad)) > 0.01
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in (here, *arrays[1:4])]
        rng = np.random.default_rng(0)
        for _ in range(2):
            direction = jnp.asarray(rng.normal(size=here.shape)) * 1e-5

            def at(sign, direction=direction):
                return float(scalar(name)(exact[0] + sign * direction, *exact[1:], arrays[4]))

            slope = (at(1) - at(-1)) / 2
            assert float(jnp.sum(grad * direction)) == pytest.approx(slope, rel=1e-3, abs=1e-9)


@every_row
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e30])
def test_what_lies_under_the_mask_is_inert(name, garbage):
    *arrays, advantages, mask = example_of(name).arrays
    dirty = [jnp.where(mask, x, garbage) for x in arrays]
    value, grad = compiled(name)(*dirty, advantages, mask)
    assert value == clean(name)[0]
    np.testing.assert_array_equal(grad, clean(name)[1])
    # Masked on the way out instead: 0 * nan.
    np.testing.assert_array_equal(grad[~mask], 0.0)


@every_row
def test_a_wholly_masked_unit_may_hold_anything(name):
    """And weighs as much as one that is not there."""
    example = example_of(name)
    *arrays, mask = example.arrays
    place = jnp.arange(len(mask))
    gone = (place // example.unit == 0)[:, None]
    dirty = compiled(name)(*(jnp.where(gone, jnp.nan, x) for x in arrays), mask & ~gone)
    assert jnp.isfinite(dirty[0])
    np.testing.assert_array_equal(dirty[1][: example.unit], 0.0)
    without = scalar(name)(*(x[example.unit :] for x in example.arrays))
    assert dirty[0] == pytest.approx(float(without), rel=2e-6, abs=1e-9)


@pytest.mark.parametrize("name", [n for n in EXPECTED if EXPECTED[n].example != "scores"])
def test_padding_width_does_not_matter(name):
    """A score stands a row, without a width."""

    def wider(x):
        return jnp.pad(x, ((0, 0), (0, 3)), constant_values=jnp.nan if x.dtype != bool else False)

    *arrays, advantages, mask = example_of(name).arrays
    advantages = wider(advantages) if advantages.shape == mask.shape else advantages
    value, grad = jax.value_and_grad(scalar(name))(*map(wider, arrays), advantages, wider(mask))
    assert_same((value, grad[:, : mask.shape[1]]), clean(name))
    np.testing.assert_array_equal(grad[:, mask.shape[1] :], 0.0)


@every_row
def test_the_order_of_units_does_not_matter(name):
    """Nor that of the two rows of a pair: their signs say which is preferred."""
    example = example_of(name)
    rows = jnp.arange(len(example.mask)).reshape(-1, example.unit)
    order = rows[::-1, ::-1].reshape(-1)
    value, grad = compiled(name)(*(x[order] for x in example.arrays))
    assert_same((value, grad), (clean(name)[0], clean(name)[1][order]))


@every_row
def test_a_loss_is_unreduced_and_adds_up_over_any_cut(name):
    row, example = ROWS[name].bind(**EXPECTED[name].given), example_of(name)
    mask, unit = example.mask, example.unit
    weights, (loss, _) = row.weights(mask), row.loss(*example.arrays)
    assert loss.shape in (mask.shape, (len(mask), 1))
    assert not weights[~jnp.any(mask, axis=1)].any()
    pieces = [
        jnp.sum(weights[cut] * row.loss(*(x[cut] for x in example.arrays))[0])
        for cut in (slice(0, unit), slice(unit, None))
    ]
    assert sum(pieces) == pytest.approx(EXPECTED[name].hand, abs=2e-6, rel=2e-6)


@every_row
def test_nothing_unmasked_is_a_loss_of_zero(name):
    """Not 0 / 0, in value or gradient."""
    *arrays, mask = example_of(name).arrays
    value, grad = compiled(name)(*arrays, jnp.zeros_like(mask))
    assert value == 0.0
    np.testing.assert_array_equal(grad, 0.0)


@rows_of_ratios
@pytest.mark.parametrize("advantage", [0.0, -1.0])
def test_an_infinite_ratio_is_no_nan(name, advantage):
    """float32 exp(100) is infinite, and infinity times the advantage 0 is NaN."""
    advantages = jnp.full((4, 1), advantage)
    value, grad = compiled(name)(OLD + 100.0, OLD, OLD + 100.0, advantages, MASK)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grad).all()
    if advantage == 0.0:
        assert value == pytest.approx(0.0, abs=1e-6)
    # Clamped, and counted.
    _, metrics = ROWS[name].loss(OLD + 100.0, OLD, OLD + 100.0, advantages, MASK)
    assert ops.values(metrics)["ratio/clamped"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", [n for n, row in EXPECTED.items() if "kl/clamped" in row.metrics])
def test_clamped_divergences_are_counted_on_both_sides_and_never_under_the_mask(name):
    far = jnp.zeros((4, 4)).at[0, 0].set(25.0).at[1, 1].set(-25.0).at[1, 3].set(50.0)
    _, metrics = ROWS[name].loss(NEW, OLD, NEW + far, ADVANTAGES, MASK)
    assert ops.values(metrics)["kl/clamped"] == pytest.approx(0.2)


@rows_of_ratios
def test_a_masked_slot_with_nan_does_not_leak(name):
    """Averaged before it is masked, the first would be NaN and the second 5.5."""
    row = ROWS[name].bind(**({"budget": 1} if name == "dr_grpo" else {}))
    one_of_two, zeros = jnp.array([[True, False]]), jnp.zeros((1, 2))
    # CISPO's value is the log-probability itself.
    new = old = zeros - 1.0
    factor = 2.0 if name == "sapo" else 1.0  # 4 sigmoid(0), and a loss without an offset
    loss = row.scalar(new, old.at[0, 1].set(jnp.nan), zeros, jnp.ones((1, 1)), one_of_two)
    expected = 1.0 if name == "cispo" else -factor
    if name == "grpo":
        expected += 0.04 * float(ops.k3(new, zeros)[0, 0])
    assert loss == pytest.approx(expected)
    rows = jnp.array([[True], [True], [False], [False]])
    advantages = jnp.array([[1.0], [1.0], [10.0], [10.0]])
    columns = jnp.full((4, 1), -1.0)
    loss = row.scalar(columns, columns, columns, advantages, rows)
    assert loss == pytest.approx(1.0 if name == "cispo" else -factor)


@pytest.mark.parametrize("name", [n for n, row in EXPECTED.items() if row.example != "values"])
def test_advantages_per_token_say_the_same_as_per_row(name):
    """A return is a token's own in any case."""
    *arrays, advantages, mask = example_of(name).arrays
    value = scalar(name)(*arrays, jnp.broadcast_to(advantages, mask.shape), mask)
    assert value == pytest.approx(EXPECTED[name].hand, abs=2e-6, rel=2e-6)


@every_row
def test_an_unknown_hyper_parameter_is_refused_with_the_known_ones(name):
    with pytest.raises(TypeError, match=r"clip_hihg.*known"):
        ROWS[name].scalar(*example_of(name).arrays, clip_hihg=0.3)


@every_row
def test_bound_and_given_hyper_parameters_agree(name):
    for hyper, value in EXPECTED[name].others:
        bound = ROWS[name].bind(**hyper)
        assert bound.scalar(*example_of(name).arrays) == pytest.approx(value, abs=2e-6)
        defaults = {n: p.default for n, p in bound.hyper_parameters().items()}
        assert defaults == EXPECTED[name].defaults | hyper


def test_what_loads_a_reference():
    reading = {n for n, row in ROWS.items() if row.uses_reference()}
    pairs = {n for n, row in EXPECTED.items() if row.example == "pairs"}
    assert reading == {"grpo", "kl_k2", "kl_k3", "kl_r_k3"} | pairs - {"dpo_reference_free"}
    assert not ALGORITHMS["grpo"].bind(beta=0.0).uses_reference()
    # They look at it, and no other does.
    for name in ROWS:
        logprobs, old, ref, advantages, mask = example_of(name).arrays
        other = scalar(name)(logprobs, old, 1.1 * ref - 0.1, advantages, mask)
        assert (abs(float(other - clean(name)[0])) > 1e-5) == (name in reading), name


def test_sft_does_not_look_at_advantages():
    other = ALGORITHMS["sft"].scalar(NEW, OLD * 2, REF * 3, -ADVANTAGES, MASK)
    assert other == ALGORITHMS["sft"].scalar(*EXAMPLES["z_score"].arrays)


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
