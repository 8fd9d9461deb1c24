"""The update: invariant to every cut, safe where there is nothing to learn from, compiled once."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import batch, initial_params, learner, movement, quick_compilation  # noqa: F401

from rlx import ops
from rlx.algorithms import ALGORITHMS
from rlx.optimizer import make_optimizer, matrices, schedule
from rlx.settings import OptimizerSettings
from rlx.train import initial_state
from rlx.update import gradients, optimise, recompute_logprobs, update

ROWS = 8
# Text that is given is weighed like sampled text: one cut of it is enough.
CUTS = [(n, m) for n, row in ALGORITHMS.items() for m in ([1, 2, 4] if row.advantages else [1])]
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
compute = jax.jit(gradients, static_argnums=0)


@functools.cache
def learner_of(name, micro):
    return learner(name, micro=micro)


@functools.cache
def whole(name):
    return compute(learner_of(name, ROWS), initial_params(), batch(ROWS))


def assert_same(result, expected):
    """Loss, gradients and metrics, to rounding; gradients by the largest entry of their leaf."""
    (grads, loss, metrics), (grads_0, loss_0, metrics_0) = result, expected
    assert float(loss) == pytest.approx(float(loss_0), rel=1e-5, abs=1e-7)

    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.max(jnp.abs(b))))

    jax.tree.map(same, grads, grads_0)
    values, values_0 = ops.values(metrics), ops.values(metrics_0)
    assert values == pytest.approx(values_0, rel=1e-5, abs=1e-6)


def fresh_state(made):
    return initial_state(initial_params(), made, jax.random.key(0))


@pytest.mark.parametrize(("name", "micro"), CUTS)
def test_micro_batches_do_not_change_the_update(name, micro):
    """Rows of 1 to 5 tokens: a mean of the micro-batches' means would weigh short rows' tokens
    more in the token mean."""
    assert_same(compute(learner_of(name, micro), initial_params(), batch(ROWS)), whole(name))


@every_algorithm
def test_the_order_of_rows_does_not_matter(name):
    order = jnp.asarray(np.random.default_rng(1).permutation(ROWS))
    shuffled = jax.tree.map(lambda x: x[order], batch(ROWS))
    assert_same(compute(learner_of(name, ROWS), initial_params(), shuffled), whole(name))


@every_algorithm
def test_what_lies_under_the_mask_is_inert(name):
    """Tokens too: a padding token is neither predicted nor attended to."""
    clean = batch(ROWS)

    def dirty(x):
        return jnp.where(clean.mask, x, jnp.nan)

    width = clean.mask.shape[1]
    rows = clean._replace(
        tokens=clean.tokens.at[:, -width:].set(jnp.where(clean.mask, clean.tokens[:, -width:], 9)),
        sampler_logprobs=dirty(clean.sampler_logprobs),
        old_logprobs=dirty(clean.old_logprobs),
        ref_logprobs=dirty(clean.ref_logprobs),
    )
    assert_same(compute(learner_of(name, ROWS), initial_params(), rows), whole(name))


def widened(rows, left, right):
    def completions(x):
        return jnp.pad(x, ((0, 0), (0, right)), constant_values=x.dtype.type(0))

    def text(x, fill):
        return jnp.pad(x, ((0, 0), (left, right)), constant_values=fill)

    return rows._replace(
        tokens=text(rows.tokens, 3),
        positions=text(rows.positions, -1),
        mask=completions(rows.mask),
        sampler_logprobs=completions(rows.sampler_logprobs),
        old_logprobs=completions(rows.old_logprobs),
        ref_logprobs=completions(rows.ref_logprobs),
    )


def test_padding_width_does_not_matter():
    rows = widened(batch(ROWS), left=3, right=2)
    assert_same(compute(learner_of("grpo", ROWS), initial_params(), rows), whole("grpo"))


def adamw(name="dapo", **changes):
    settings = OptimizerSettings(learning_rate=0.01, weight_decay=0.1, warmup_steps=4)
    rate = schedule(settings, 100)
    return learner(name, optimizer=make_optimizer(settings, rate), schedule=rate, **changes)


ADAMW = adamw(micro=2)
one_update = jax.jit(optimise, static_argnums=0)


@functools.cache
def warm():
    """A state with moments, after one ordinary update."""
    return one_update(ADAMW, fresh_state(ADAMW), batch(ROWS))


def spoilt(kind):
    rows = batch(ROWS)
    if kind == "nothing unmasked":
        return rows._replace(mask=jnp.zeros_like(rows.mask))
    if kind == "one micro-batch is NaN":
        return rows._replace(old_logprobs=rows.old_logprobs.at[2, 0].set(jnp.nan))
    return rows._replace(advantages=rows.advantages.at[0].set(jnp.inf))


def test_an_ordinary_update_moves_parameters_moments_and_clock():
    state, metrics = warm()
    assert movement(initial_params(), state.params) > 1e-4
    assert state.updates == 1
    values = ops.values(metrics)
    assert values["skipped"] == 0.0
    # The warm-up's first quarter; with a rise from 0 the first rollout would teach nothing.
    assert values["learning_rate"] == pytest.approx(0.0025)
    assert values["update_norm"] > 0.0
    norm = float(optax.global_norm(whole("dapo")[0]))
    assert values["gradient_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    "kind", ["nothing unmasked", "one micro-batch is NaN", "an advantage is infinite"]
)
def test_a_skipped_update_changes_nothing(kind):
    """AdamW moves parameters on a gradient of zero, by its moments and by the decay; clipping by
    a norm of NaN would make every leaf NaN."""
    before, _ = warm()
    after, metrics = one_update(ADAMW, before, spoilt(kind))
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    assert after.updates == before.updates == 1
    values = ops.values(metrics)
    assert values["skipped"] == 1.0
    assert values["update_norm"] == 0.0
    if kind == "nothing unmasked":
        assert values["loss"] == 0.0
        assert values["gradient_norm"] == 0.0


def test_learning_goes_on_after_a_skipped_update():
    state, _ = one_update(ADAMW, warm()[0], spoilt("one micro-batch is NaN"))
    after, metrics = one_update(ADAMW, state, batch(ROWS))
    straight, _ = one_update(ADAMW, warm()[0], batch(ROWS))
    chex.assert_trees_all_equal(after.params, straight.params)
    assert ops.values(metrics)["learning_rate"] == pytest.approx(0.005)


@functools.cache
def moved():
    """A state after one SGD update."""
    made = learner_of("grpo", 2)
    return one_update(made, fresh_state(made), batch(ROWS))[0]


def test_sgd_subtracts_the_summed_gradient():
    """Divided by the number of micro-batches, or kept from the last one, it would be smaller."""
    state = moved()
    grads, _, _ = whole("grpo")
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, initial_params(), grads)
    chex.assert_trees_all_close(state.params, expected, atol=1e-6)


def test_all_updates_of_a_step_in_one_compilation():
    """Two epochs of two mini-batches, two steps: 8 updates, the second on a policy that has
    moved, old buffers given away and one program for all steps."""
    made = adamw("grpo", micro=2, epochs=2, minibatches=2)
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(update, n=1)
    run = jax.jit(traced, static_argnums=0, donate_argnums=1)
    rows = batch(ROWS)
    start = fresh_state(made)
    state, first = run(made, start, rows, jax.random.key(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start.params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start.opt_state))
    state, second = run(made, state, rows, jax.random.key(2))
    assert state.updates == 8
    # Pooled over the four updates of a step: 1/4, 2/4, 3/4 and all of the peak.
    assert ops.values(first)["learning_rate"] == pytest.approx(0.01 * 2.5 / 4)
    assert ops.values(second)["learning_rate"] == pytest.approx(0.01)
    assert first["loss"].count == 4.0
    share = ops.values(first)["effective_sample_size"]
    assert 0.0 < share <= 1.0
    # The state owns its buffers: what it was made from is still there.
    assert jnp.isfinite(initial_params()["norm"]["scale"]).all()


def test_the_ratio_of_a_later_update_has_left_one():
    """With both updates taken from the same parameters, every ratio would be 1 and nothing ever
    clipped."""
    made, rows = learner_of("grpo", ROWS), batch(ROWS)
    old = recompute_logprobs(
        made, initial_params(), rows.tokens, rows.positions, rows.mask.shape[1]
    )
    rows = rows._replace(old_logprobs=old, sampler_logprobs=old + 0.125)
    _, _, first = compute(made, initial_params(), rows)
    _, _, second = compute(made, moved().params, rows)
    assert ops.values(first)["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert ops.values(second)["ratio/max"] > 1.01
    # Between sampler and trainer when the text was sampled, whatever the policy did since.
    assert ops.values(second)["sampler_gap/max"] == pytest.approx(0.125, abs=1e-5)
    # Where the sampler's own stand for the old ones, the gap is that of the policy now.
    rows = rows._replace(old_logprobs=old + 0.125)
    _, _, own = compute(made, initial_params(), rows)
    assert ops.values(own)["sampler_gap/max"] == pytest.approx(0.125, abs=1e-5)


def test_no_reference_no_kl():
    """Against the zeros that stand for a missing reference, a KL of about 2 would be logged."""
    bound = ALGORITHMS["grpo"].bind(beta=0.0)
    shapes = jax.eval_shape(
        functools.partial(gradients, learner("grpo", algorithm=bound)),
        initial_params(),
        batch(ROWS),
    )
    assert "kl" not in shapes[2]
    assert "kl" in whole("grpo")[2]


@pytest.mark.parametrize(
    ("fields", "total", "expected"),
    [
        ({"warmup_steps": 4}, 8, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 1}, 2, [1, 1]),
        ({"schedule": "linear"}, 4, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2, "final_fraction": 0.5}, 4, [0.5, 1, 1, 0.75]),
        ({"schedule": "cosine"}, 4, [1, 0.853553, 0.5, 0.146447]),
        ({"schedule": "cosine", "warmup_steps": 2}, 4, [0.5, 1, 1, 0.5]),
    ],
)
def test_the_learning_rate_of_every_update(fields, total, expected):
    """No update has a rate of 0: optax's own warm-up gives 0 first."""
    rate = schedule(OptimizerSettings(learning_rate=2.0, **fields), total)
    np.testing.assert_allclose([rate(jnp.int32(i)) / 2 for i in range(total)], expected, rtol=1e-5)


def test_kernels_and_embeddings_decay_and_nothing_else():
    decayed = matrices(initial_params())
    assert decayed["embed"]["embedding"]
    assert not decayed["norm"]["scale"]
    layers = decayed["layers"]
    assert layers["mlp"]["gate_proj"]["kernel"]
    assert layers["attention"]["q_proj"]["kernel"]
    # Stacked over layers a bias is a matrix too: by its number of axes it would decay.
    assert not layers["attention"]["q_proj"]["bias"]
    assert not layers["attention_norm"]["scale"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_gradient_is_clipped_by_its_global_norm(name):
    settings = OptimizerSettings(name=name, learning_rate=1.0, clip_norm=1.0, eps=1.0)
    rule = make_optimizer(settings, schedule(settings, 10))
    params = {"a": {"kernel": jnp.zeros(2)}}
    grads = {"a": {"kernel": jnp.array([30.0, 40.0])}}
    updates, _ = rule.update(grads, rule.init(params), params)
    clipped = np.array([0.6, 0.8])
    expected = -clipped if name == "sgd" else -clipped / (clipped + 1.0)
    np.testing.assert_allclose(updates["a"]["kernel"], expected, rtol=1e-5)


def test_no_clipping_at_a_limit_of_zero():
    """optax clips a zero gradient at a limit of zero to NaN."""
    settings = OptimizerSettings(name="sgd", learning_rate=1.0, clip_norm=0.0)
    rule = make_optimizer(settings, schedule(settings, 10))
    params = {"a": {"kernel": jnp.zeros(2)}}
    for grad in (0.0, 50.0):
        updates, _ = rule.update({"a": {"kernel": jnp.full(2, grad)}}, rule.init(params), params)
        np.testing.assert_array_equal(updates["a"]["kernel"], -grad)
