"""The update: invariant to every cut, safe where there is nothing to learn from, compiled once."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import (
    batch,
    batch_of,
    headed_params,
    initial_params,
    learner,
    movement,
    together,
)

from rlx import ops
from rlx.algorithms import ALGORITHMS, TERMS
from rlx.optimizer import make_optimizer, schedule
from rlx.scoring import score_rows
from rlx.settings import OptimizerSettings
from rlx.state import initial_state
from rlx.update import gradients, optimise, update

ROWS = 16
UNIT = {name: row.unit for name, row in (ALGORITHMS | TERMS).items()}
# All rows of the table share a program, in which the weights of the terms are an input: 1 for the
# row in question, 0 for the others. Pairs can't be cut into single rows.
EVERY = tuple(UNIT)
SINGLE = tuple(name for name, unit in UNIT.items() if unit == 1)
every_row = pytest.mark.parametrize("name", EVERY)


def only(name, names=EVERY):
    return jnp.eye(len(names))[names.index(name)]


@functools.cache
def program(names, micro):
    """The real `gradients`, compiled for all rows."""

    def run(weights, params, batch):
        return gradients(together(names, weights, micro=micro), (params, {}), batch)

    return jax.jit(run)


def signals_of(rows, *names):
    return rows._replace(signals=tuple(rows.signals[EVERY.index(name)] for name in names))


def compute(name, micro, rows, params=None):
    names = SINGLE if micro == 1 else EVERY
    params = headed_params() if params is None else params
    return program(names, micro)(only(name, names), params, signals_of(rows, *names))


@functools.cache
def data():
    """Rows of 1 to 5 tokens."""
    return batch_of(EVERY, ROWS)


@functools.cache
def whole(name):
    return compute(name, ROWS, data())


def measured(name, metrics):
    """Without those of the other terms, and the share of padding, which is no result."""
    others = tuple(f"{other}/" for other in EVERY if other != name)
    return {
        key: value
        for key, value in ops.values(metrics).items()
        if not key.startswith((*others, "loss/")) and key != "padding"
    } | {"loss": float(metrics[f"loss/{name}"].total)}


def assert_same(name, result, expected):
    """Loss, gradients and metrics, to rounding; gradients by the largest entry of their leaf."""
    (grads, loss, metrics), (grads_0, loss_0, metrics_0) = result, expected
    assert float(loss) == pytest.approx(float(loss_0), rel=1e-5, abs=1e-6)

    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.max(jnp.abs(b))) + 1e-9)

    jax.tree.map(same, grads, grads_0)
    assert measured(name, metrics) == pytest.approx(measured(name, metrics_0), rel=1e-5, abs=2e-6)


def fresh_state(made, params=None):
    return initial_state(initial_params() if params is None else params, made, jax.random.key(0))


@every_row
def test_every_row_has_a_gradient(name):
    """All that follows would hold of a loss of nothing."""
    grads, loss, metrics = whole(name)
    assert optax.global_norm(grads) > 1e-3
    assert loss == pytest.approx(float(metrics[f"loss/{name}"].total), rel=1e-6)
    head = jnp.max(jnp.abs(grads[0]["value_head"]["kernel"]))
    assert (head > 0.0) == (name in ("value", "reward_model"))


CUTS = [(name, units * unit) for units in (1, 2, 4) for name, unit in UNIT.items()]


@pytest.mark.parametrize(("name", "micro"), CUTS)
def test_micro_batches_do_not_change_the_update(name, micro):
    """Of 1, 2 and 4 units. Rows of 1 to 5 tokens: a mean of the micro-batches' means would weigh
    short rows' tokens more in the token mean."""
    assert_same(name, compute(name, micro, data()), whole(name))


@every_row
def test_the_order_of_units_does_not_matter(name):
    unit = UNIT[name]
    order = np.random.default_rng(1).permutation(ROWS // unit)
    rows = (order[:, None] * unit + np.arange(unit)).reshape(-1)
    shuffled = jax.tree.map(lambda x: x[rows], data())
    assert_same(name, compute(name, ROWS, shuffled), whole(name))


@every_row
def test_what_lies_under_the_mask_is_inert(name):
    """Tokens too: a padding token is neither predicted nor attended to."""
    clean = data()

    def dirty(x):
        return jnp.where(clean.mask, x, jnp.nan) if x.shape == clean.mask.shape else x

    width = clean.mask.shape[1]
    rows = clean._replace(
        tokens=clean.tokens.at[:, -width:].set(jnp.where(clean.mask, clean.tokens[:, -width:], 9)),
        sampler_logprobs=dirty(clean.sampler_logprobs),
        old_logprobs=dirty(clean.old_logprobs),
        ref_logprobs=dirty(clean.ref_logprobs),
        values=dirty(clean.values),
        signals=tuple(
            s._replace(advantages=dirty(s.advantages), returns=dirty(s.returns))
            for s in clean.signals
        ),
    )
    assert_same(name, compute(name, ROWS, rows), whole(name))


def widened(rows, left, right):
    def completions(x):
        return jnp.pad(x, ((0, 0), (0, right)), constant_values=x.dtype.type(0))

    def per_token(x):
        return completions(x) if x.shape == rows.mask.shape else x

    def text(x, fill):
        return jnp.pad(x, ((0, 0), (left, right)), constant_values=fill)

    return rows._replace(
        tokens=text(rows.tokens, 3),
        positions=text(rows.positions, -1),
        mask=completions(rows.mask),
        sampler_logprobs=completions(rows.sampler_logprobs),
        old_logprobs=completions(rows.old_logprobs),
        ref_logprobs=completions(rows.ref_logprobs),
        values=completions(rows.values),
        signals=tuple(
            s._replace(
                advantages=per_token(s.advantages),
                returns=per_token(s.returns),
                mask=completions(s.mask),
            )
            for s in rows.signals
        ),
    )


@every_row
def test_padding_width_does_not_matter(name):
    rows = widened(data(), left=3, right=2)
    assert_same(name, compute(name, ROWS, rows), whole(name))


def adamw(name="dapo", **changes):
    settings = OptimizerSettings(learning_rate=0.01, weight_decay=0.1, warmup_steps=4)
    rate = schedule(settings, 100)
    return learner(name, optimizer=make_optimizer(settings, rate), schedule=rate, **changes)


ADAMW = adamw(micro=2)
one_update = jax.jit(optimise, static_argnums=0)
ordinary = functools.cache(lambda: signals_of(data(), "dapo"))


@functools.cache
def warm():
    """A state with moments, after one ordinary update."""
    return one_update(ADAMW, fresh_state(ADAMW, headed_params()), ordinary())


def spoilt(kind):
    rows = ordinary()
    (only_signal,) = rows.signals
    if kind == "nothing unmasked":
        return unmasked_nothing(rows)
    if kind == "one micro-batch is NaN":
        return rows._replace(old_logprobs=rows.old_logprobs.at[2, 0].set(jnp.nan))
    infinite = only_signal.advantages.at[0].set(jnp.inf)
    return rows._replace(signals=(only_signal._replace(advantages=infinite),))


def unmasked_nothing(rows):
    nothing = jnp.zeros_like(rows.mask)
    signals = tuple(s._replace(mask=nothing) for s in rows.signals)
    return rows._replace(mask=nothing, signals=signals)


def test_an_ordinary_update_moves_parameters_moments_and_clock():
    state, metrics = warm()
    assert movement(headed_params(), state.params) > 1e-4
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
    after, metrics = one_update(ADAMW, state, ordinary())
    straight, _ = one_update(ADAMW, warm()[0], ordinary())
    chex.assert_trees_all_equal(after.params, straight.params)
    assert ops.values(metrics)["learning_rate"] == pytest.approx(0.005)


@functools.cache
def program_of_updates():
    """The real `optimise` with AdamW, for all rows."""

    def run(weights, state, rows):
        return optimise(with_adamw(weights), state, rows)

    return jax.jit(run)


def with_adamw(weights=None):
    return together(EVERY, weights, micro=ROWS, optimizer=ADAMW.optimizer)


@functools.cache
def after_one(name):
    start = fresh_state(with_adamw(), headed_params())
    return program_of_updates()(only(name), start, data())


@every_row
def test_without_an_unmasked_token_no_row_changes_anything(name):
    """Moments that are not zero would move parameters on a gradient of zero."""
    state, first = after_one(name)
    assert movement(headed_params(), state.params) > 1e-4
    assert ops.values(first)["skipped"] == 0.0
    after, metrics = program_of_updates()(only(name), state, unmasked_nothing(data()))
    chex.assert_trees_all_equal((after.params, after.opt_state), (state.params, state.opt_state))
    values = ops.values(metrics)
    assert after.updates == 1
    assert values["skipped"] == 1.0
    assert values["loss"] == values["gradient_norm"] == 0.0


def test_terms_that_select_nothing_are_skipped_too():
    """Groups of equal rewards are no pairs: their text is unmasked, but no term learns from it.
    AdamW would move parameters by the decay and by its moments, on a gradient of zero."""
    state, _ = after_one("dpo")
    nothing = tuple(s._replace(mask=jnp.zeros_like(s.mask)) for s in data().signals)
    rows = data()._replace(signals=nothing)
    after, metrics = program_of_updates()(only("dpo"), state, rows)
    assert movement(state.params, after.params) == 0.0
    assert after.updates == 1
    assert ops.values(metrics)["skipped"] == 1.0


@functools.cache
def moved():
    """A state after one SGD update."""
    made = learner("grpo", micro=2, hyper={"beta": 0.5})
    return one_update(made, fresh_state(made, headed_params()), signals_of(data(), "grpo"))[0]


def test_sgd_subtracts_the_summed_gradient():
    """Divided by the number of micro-batches, or kept from the last one, it would be smaller."""
    grads, _, _ = whole("grpo")
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, headed_params(), grads[0])
    chex.assert_trees_all_close(moved().params, expected, atol=1e-6)


def test_each_epoch_shuffles_pairs_anew_and_cuts_them_into_mini_batches():
    """In the order of the epoch's own key. Eight rows are four pairs, two in each mini-batch."""
    made = together(("grpo", "dpo"), micro=4, minibatches=2, epochs=2)
    rows, key = batch_of(("grpo", "dpo"), 8), jax.random.key(0)
    state, _ = jax.jit(update, static_argnums=0)(made, fresh_state(made), rows, key)

    def after(orders):
        end = fresh_state(made)
        for pairs in np.reshape(orders, (-1, 2)):
            places = (2 * pairs[:, None] + np.arange(2)).reshape(-1)
            end, _ = one_update(made, end, jax.tree.map(lambda x, at=places: x[at], rows))
        return end.params

    orders = [jax.random.permutation(k, 4).tolist() for k in jax.random.split(key, 2)]
    moved = movement(initial_params(), state.params)
    assert movement(after(orders), state.params) < 1e-4 * moved
    # Other orders lead elsewhere: one for all epochs, or none.
    assert set(orders[0][:2]) not in (set(orders[1][:2]), {0, 1})
    for other in ([orders[0]] * 2, [orders[1]] * 2, [range(4)] * 2):
        assert movement(after(other), state.params) > 1e-3 * moved


def test_the_effective_sample_size_of_known_weights():
    """Half of the tokens weigh 3, the others 1: 2^2 / 5 of them are left."""
    rows = batch(4)
    made = learner("grpo", micro=2, on_policy=True)
    text = (initial_params(), {}, rows.tokens, rows.positions, rows.mask.shape[1])
    current = score_rows(made, *text).logprobs
    place = jnp.cumsum(rows.mask.reshape(-1)).reshape(rows.mask.shape)
    sampler = current - jnp.where(place % 2 == 0, jnp.log(3.0), 0.0)
    rows = rows._replace(sampler_logprobs=jnp.where(rows.mask, sampler, jnp.nan))
    assert jnp.sum(rows.mask) == 10
    run = jax.jit(update, static_argnums=0)
    _, metrics = run(made, fresh_state(made), rows, jax.random.key(0))
    assert ops.values(metrics)["effective_sample_size"] == pytest.approx(0.8, rel=1e-5)
    assert not {"importance/mean", "importance/square"} & metrics.keys()


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
    rows = data()
    old = score_rows(
        learner("grpo", micro=ROWS),
        headed_params(),
        {},
        rows.tokens,
        rows.positions,
        rows.mask.shape[1],
    ).logprobs

    def seen(rows, params):
        return ops.values(compute("grpo", ROWS, rows, params)[2])

    rows = rows._replace(old_logprobs=old, sampler_logprobs=old + 0.125)
    first, second = seen(rows, headed_params()), seen(rows, moved().params)
    assert first["grpo/ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert second["grpo/ratio/max"] > 1.01
    # Of text that the old policy wrote, in the mean over it: the Kullback-Leibler divergence.
    again = score_rows(
        learner("grpo", micro=ROWS), moved().params, {}, rows.tokens, rows.positions, 5
    ).logprobs
    d = np.asarray(again - old)[np.asarray(rows.mask)]
    assert second["kl/old"] == pytest.approx(np.mean(np.expm1(d) - d), rel=1e-4)
    # Between sampler and trainer when the text was sampled, whatever the policy did since.
    assert second["sampler_gap/max"] == pytest.approx(0.125, abs=1e-5)
    # Where the sampler's own stand for the old ones, the gap is that of the policy now.
    rows = rows._replace(old_logprobs=old + 0.125)
    assert seen(rows, headed_params())["sampler_gap/max"] == pytest.approx(0.125, abs=1e-5)


def test_no_reference_no_kl():
    """Against the zeros that stand for a missing reference, a KL of about 2 would be logged."""

    def logged(beta):
        made = learner("grpo", hyper={"beta": beta})
        shapes = jax.eval_shape(
            functools.partial(gradients, made), (initial_params(), {}), batch(ROWS)
        )
        return shapes[2].keys()

    assert {"kl", "kl/clamped"} == logged(0.1) - logged(0.0)
