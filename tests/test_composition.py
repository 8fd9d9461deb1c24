"""Several losses over one forward pass, and updates that are off-policy for real."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import (
    headed_params,
    initial_params,
    learner,
    plan,
    pool,
    together,
    verifier,
)

import rlx.learner
from rlx import ops, update
from rlx.prepare import Frozen, prepare
from rlx.rounds import begin
from rlx.state import initial_state
from rlx.train import fused
from rlx.update import gradients
from rlx.verify import callback_verifier

WEIGHTS = {"gspo": 1.0, "dpo": 0.1, "sft": 0.05, "entropy": 0.01, "kl_k3": 0.04}
NAMES = tuple(WEIGHTS)
SAMPLE = {"prompts": 3, "samples": 4, "max_new_tokens": 3}
NAN = float("nan")


def composed(weights, micro):
    return together(NAMES, weights, micro=micro)


@functools.cache
def faded_params(share):
    """Another policy: here the one that sampled, and the reference."""
    return jax.tree.map(lambda leaf: leaf * share, initial_params())


@functools.cache
def collected(overlong_filter=False):
    """Made-up text of three groups; in the second all rewards are equal."""
    base = plan("gspo", SAMPLE)._replace(overlong_filter=overlong_filter)
    made = base._replace(learner=composed(tuple(WEIGHTS.values()), 4), old_logprobs="recompute")
    rng, prompts = np.random.default_rng(3), pool()
    lengths = rng.integers(1, 4, 12)
    mask = np.arange(3) < lengths[:, None]
    positions = np.repeat(np.asarray(prompts.positions[:3]), 4, axis=0)
    tail = np.where(mask, positions[:, -1:] + 1 + np.arange(3), -1)
    tokens = np.repeat(np.asarray(prompts.tokens[:3]), 4, axis=0)
    text = np.where(mask, rng.integers(2, 16, mask.shape), 0)
    pending = begin(made.sampling, 8, jnp.int32(0))
    rollout = pending.rollout._replace(
        tokens=jnp.asarray(np.concatenate([tokens, text], axis=1), jnp.int32),
        positions=jnp.asarray(np.concatenate([positions, tail], axis=1), jnp.int32),
        mask=jnp.asarray(mask),
        rewards=jnp.array([[0.0, 2.0, NAN, -1.0], [0.3] * 4, [1.0, 0.0, 5.0, 2.0]]),
        correct=jnp.array([[0.0, 1.0, NAN, 0.0], [0.0] * 4, [1.0, 0.0, 1.0, 0.0]]),
        # The worst of the first group.
        truncated=jnp.zeros(12, bool).at[3].set(True),
    )
    pending = pending._replace(rollout=rollout, kept=jnp.ones(3, bool))
    state = initial_state(faded_params(0.95), made.learner, jax.random.key(0))
    batch, *_ = prepare(made, state, Frozen(reference=faded_params(0.8)), pending)
    return batch


@functools.cache
def program(micro):
    def run(weights, params, batch):
        return gradients(composed(weights, micro), (params, {}), batch)

    return jax.jit(run)


def compute(weights, micro=12, batch=None):
    batch = collected() if batch is None else batch
    return program(micro)(jnp.asarray(weights, jnp.float32), initial_params(), batch)


total = functools.cache(lambda: compute(tuple(WEIGHTS.values())))


def assert_close(grads, expected):
    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.max(jnp.abs(b))) + 1e-9)

    jax.tree.map(same, grads, expected)


def test_the_total_is_the_weighted_sum_of_the_terms_apart():
    """In loss and gradient: each term computed by a learner that has no other."""
    grads, loss, metrics = total()
    batch, apart = collected(), []
    for place, name in enumerate(NAMES):
        single = learner(name, micro=12)
        own = batch._replace(signals=batch.signals[place : place + 1])
        run = jax.jit(gradients, static_argnums=0)
        apart.append(run(single, (initial_params(), {}), own))
        assert metrics[f"loss/{name}"].total == pytest.approx(float(apart[-1][1]), abs=1e-6)
        # Each has something to say, or its weight would prove nothing.
        assert optax.global_norm(apart[-1][0]) > 1e-3, name
    shares = WEIGHTS.values()
    expected = sum(w * float(a[1]) for w, a in zip(shares, apart, strict=True))
    assert loss == pytest.approx(expected, rel=1e-5)
    summed = jax.tree.map(
        lambda *leaves: sum(w * leaf for w, leaf in zip(shares, leaves, strict=True)),
        *(a[0] for a in apart),
    )
    assert_close(grads, summed)


def test_all_terms_share_one_forward_pass(monkeypatch):
    """Counted in the trace of one micro-batch's loss; a pass a term would be five."""
    passes = []

    def counted(*operands, **named):
        passes.append(1)
        return forward(*operands, **named)

    forward = rlx.learner.completion_outputs
    monkeypatch.setattr(rlx.learner, "completion_outputs", counted)
    made, batch = composed(tuple(WEIGHTS.values()), 12), collected()
    weights = tuple(
        t.algorithm.weights(s.mask) for t, s in zip(made.terms, batch.signals, strict=True)
    )
    jax.eval_shape(lambda p: update.loss(made, (p, {}), batch, weights), initial_params())
    assert len(passes) == 1


@pytest.mark.parametrize("micro", [2, 4])
def test_micro_batches_of_pairs_do_not_change_the_update(micro):
    grads, loss, metrics = compute(tuple(WEIGHTS.values()), micro)
    expected, value, measured = total()
    assert loss == pytest.approx(float(value), rel=1e-5)
    assert_close(grads, expected)
    assert ops.values(metrics) == pytest.approx(ops.values(measured), rel=1e-4, abs=1e-5)


def test_every_terms_metrics_are_logged_under_its_name():
    names = total()[2].keys()
    assert {f"loss/{name}" for name in NAMES} <= names
    # The first is the run's algorithm and needs no prefix.
    assert {"clip/low", "clip/high", "ratio/max", "entropy"} <= names
    assert {"dpo/accuracy", "dpo/margin", "sft/nll", "entropy/bonus", "kl_k3/kl"} <= names
    assert not {"accuracy", "nll", "kl", "gspo/clip/low"} & names


def test_a_groups_pair_is_its_best_and_worst_and_equal_groups_have_none():
    """Rows 2i and 2i + 1, so that no cut parts them; the group of equal rewards has no part, and
    neither has a row without a score."""
    policy, pair, right, *_ = collected().signals
    signs = pair.advantages.reshape(3, 4)
    np.testing.assert_array_equal(signs, [[1, -1, 0, 0], [0] * 4, [1, -1, 0, 0]])
    np.testing.assert_array_equal(pair.mask.any(axis=1).reshape(3, 4), signs != 0)
    # The others still learn from every scored row.
    scored = [[True, True, True, False], [True] * 4, [True] * 4]
    np.testing.assert_array_equal(policy.mask.any(axis=1).reshape(3, 4), scored)
    # Text is imitated where it is right; in the third group the best row, and then row 0.
    right_rows = [[True, False, False, False], [False] * 4, [True, False, True, False]]
    np.testing.assert_array_equal(right.mask.any(axis=1).reshape(3, 4), right_rows)


def test_a_pair_that_lost_a_row_to_the_filter_is_none():
    """Its other row alone would be pushed up as if it had beaten a text of probability 1."""
    whole, filtered = (collected(on).signals[NAMES.index("dpo")].mask for on in (False, True))
    np.testing.assert_array_equal(whole.any(axis=1), [1, 1, *[0] * 6, 1, 1, 0, 0])
    np.testing.assert_array_equal(filtered.any(axis=1), [*[0] * 8, 1, 1, 0, 0])
    # The policy's own loss keeps the row.
    assert collected(True).signals[0].mask[0].any()


def test_pairs_without_a_difference_leave_the_mean():
    """The mean is over the two pairs that there are: with the equal group's it would be two thirds
    of it."""
    batch = collected()
    pair = batch.signals[1]
    rows = jnp.array([0, 1, 8, 9])
    only_pairs = jax.tree.map(lambda x: x[rows], batch)._replace(
        signals=(jax.tree.map(lambda x: x[rows], pair),)
    )
    single = learner("dpo", micro=4)
    _, loss, _ = jax.jit(gradients, static_argnums=0)(single, (initial_params(), {}), only_pairs)
    assert total()[2]["loss/dpo"].total == pytest.approx(float(loss), rel=1e-5)


def test_an_entropy_bonus_changes_the_gradient_and_not_only_the_number():
    without = dict(WEIGHTS) | {"entropy": 0.0}
    grads, loss, metrics = compute(tuple(without.values()))
    full, value, _ = total()
    bonus = ops.values(metrics)["entropy/bonus"]
    assert bonus == pytest.approx(ops.values(metrics)["entropy"], rel=1e-5)
    assert value - loss == pytest.approx(-0.01 * bonus, rel=1e-3)
    gap = optax.global_norm(jax.tree.map(jnp.subtract, full, grads))
    assert gap > 1e-5
    # Downhill in the loss is uphill in the entropy.
    alone, _, _ = compute([0, 0, 0, 1.0, 0])
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, initial_params(), alone[0])
    _, _, after = program(12)(jnp.eye(5)[3], moved, collected())
    assert ops.values(after)["entropy"] > ops.values(metrics)["entropy"] + 1e-4


def test_a_divergence_in_the_loss_has_an_effect():
    """A coefficient that is accepted and never used would leave both gradients the same."""
    without, _, _ = compute(tuple((dict(WEIGHTS) | {"kl_k3": 0.0}).values()))
    gap = optax.global_norm(jax.tree.map(jnp.subtract, total()[0], without))
    assert gap > 1e-4


# Off-policy for real: four updates a batch of which three are on a policy that has moved.

CLIPPING = ["ppo", "grpo", "dapo", "gspo"]
OFF_POLICY = (*CLIPPING, "value")


@functools.cache
def several_updates():
    base = plan("ppo", {"prompts": 4, "samples": 8, "max_new_tokens": 3}, on_policy=False)
    verify = callback_verifier(base.sampling, verifier)

    def run(weights, state, frozen, pool):
        made = together(
            OFF_POLICY,
            weights,
            micro=16,
            minibatches=2,
            epochs=2,
            optimizer=optax.adam(0.03),
            hyper={"grpo": {"beta": 0.0}},
        )
        return fused(base._replace(learner=made), verify)(state, frozen, pool, 4)

    return jax.jit(run)


@pytest.mark.parametrize("name", CLIPPING)
def test_later_updates_of_a_batch_are_off_policy(name):
    """Were old log-probabilities taken anew in every update, each ratio would be 1 and nothing
    ever clipped. GSPO's are a row's, hardly off 1, and clipped all the same."""
    weights = np.zeros(len(OFF_POLICY), np.float32)
    weights[OFF_POLICY.index(name)] = 1.0
    if name == "ppo":
        weights[-1] = 0.1
    start = together(OFF_POLICY, None, optimizer=optax.adam(0.03))
    state = initial_state(headed_params(), start, jax.random.key(2))
    state, (metrics, _) = several_updates()(weights, state, Frozen(), pool())
    assert state.updates == 16
    prefix = "" if name == OFF_POLICY[0] else f"{name}/"
    assert (metrics[f"{prefix}ratio/max"].value > 1.05).all()
    for side in ("low", "high"):
        share = metrics[f"{prefix}clip/{side}"]
        assert float(jnp.sum(share.total)) > 0.0, side
    assert float(jnp.max(metrics["kl/old"].total)) > 0.0
