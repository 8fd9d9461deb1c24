"""What is done about the gap between sampler and trainer: hand-computed weights, what they reach
and what they leave alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import (
    PAD,
    headed_params,
    learner,
    plan,
    pool,
    sampling,
    together,
)

from model.sample import Samples
from rlx import ops
from rlx.algorithms import ALGORITHMS, TERMS
from rlx.corrections import CORRECTIONS
from rlx.learner import Term
from rlx.prepare import Frozen, corrected, prepare
from rlx.prompts import Draw
from rlx.rollout import Scores, empty_rollout
from rlx.rounds import absorb, begin
from rlx.state import initial_state
from rlx.types import Signal

NAN = float("nan")
RATIOS = np.array([[2.0, 0.5, 3.0], [0.5, 0.8, 7.0]])
"""pi_old / pi_sampler; products 3 and 0.4, since the last token of the second row is padding."""
MASK = np.array([[True, True, True], [True, True, False]])
ADVANTAGES = jnp.array([[1.0], [-2.0]])
BOUNDS = {
    "token_truncate": {"cap": 2.5},
    "token_mask": {"cap": 2.5, "floor": 0.6},
    "sequence_truncate": {"cap": 2.0},
    "sequence_mask": {"cap": 2.5, "floor": 0.3},
}
every_correction = pytest.mark.parametrize("name", CORRECTIONS)


def correction(name):
    return functools.partial(CORRECTIONS[name], **BOUNDS[name])


def logprobs(ratios=RATIOS):
    """Old ones and the sampler's."""
    sampler = np.random.default_rng(0).uniform(-3, -1, np.shape(ratios))
    return jnp.asarray(sampler + np.log(ratios), jnp.float32), jnp.asarray(sampler, jnp.float32)


def rollout_of(old, sampler, mask=MASK):
    rows, width = np.shape(mask)
    shapes = sampling(prompts=1, samples=rows, max_new_tokens=width)
    return empty_rollout(shapes, 2)._replace(
        old_logprobs=old, sampler_logprobs=sampler, mask=jnp.asarray(mask)
    )


def correct(name, rollout, terms=("dapo",), signals=None, function=None):
    """The corrected signals of these terms, and the metrics as numbers."""
    rows = ALGORITHMS | TERMS
    made = learner(terms[0], terms=tuple(Term(n, rows[n].bind()) for n in terms))
    made = plan("dapo")._replace(learner=made, correction=function or correction(name))
    if signals is None:
        signals = tuple(Signal(ADVANTAGES, ADVANTAGES, rollout.mask) for _ in terms)
    after, metrics = corrected(made, rollout, signals)
    return after, ops.values(metrics)


@pytest.mark.parametrize(
    ("name", "weights", "kept"),
    [
        ("token_truncate", [[2.0, 0.5, 2.5], [0.5, 0.8, 0]], MASK),
        ("token_mask", [[2.0, 0, 0], [0, 0.8, 0]], [[1, 0, 0], [0, 1, 0]]),
        ("sequence_truncate", [[2.0] * 3, [0.4, 0.4, 0]], MASK),
        ("sequence_mask", [[0] * 3, [0.4, 0.4, 0]], [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_hand_computed_weights(name, weights, kept):
    (signal,), _ = correct(name, rollout_of(*logprobs()))
    np.testing.assert_array_equal(signal.mask, np.asarray(kept, bool))
    advantages = np.where(signal.mask, signal.advantages, 0.0)
    np.testing.assert_allclose(advantages, np.array([[1], [-2]]) * weights, rtol=1e-5)
    # What the critic learns is no matter of the sampler.
    np.testing.assert_array_equal(signal.returns, ADVANTAGES)


@pytest.mark.parametrize("name", ["token_mask", "sequence_mask"])
def test_the_bounds_themselves_are_kept(name):
    (signal,), metrics = correct(
        name,
        rollout_of(jnp.zeros((2, 1)), jnp.zeros((2, 1)), np.ones((2, 1), bool)),
        function=functools.partial(CORRECTIONS[name], cap=1.0, floor=1.0),
    )
    assert signal.mask.all()
    assert metrics["correction/masked"] == 0.0


@pytest.mark.parametrize(
    ("name", "algorithm", "loss", "wrong"),
    [
        # Tokens of weights 2 (A = 1) and 0.8 (A = -2) stay: their sum over 2, not over all 5.
        ("token_mask", "dapo", -(2.0 - 1.6) / 2, -(2.0 - 1.6) / 5),
        # Each row's mean over its own tokens: one token is left in each, of 3 and of 2.
        ("token_mask", "grpo", -(2.0 - 1.6) / 2, -(2.0 / 3 - 1.6 / 2) / 2),
        # The second row alone stays, of weight 0.4: it is the only row, not one of two.
        ("sequence_mask", "dapo", 0.8, 0.8 * 2 / 5),
        ("sequence_mask", "dr_grpo", 0.8 * 2 / 3, 0.8 * 2 / 3 / 2),
        ("sequence_mask", "gspo", 0.8, 0.4),
        ("sequence_mask", "rloo", 0.8, 0.4),
    ],
)
def test_what_is_rejected_leaves_the_denominator_too(name, algorithm, loss, wrong):
    """On policy, by hand. `wrong` is with rejected tokens or rows at 0 in the mean."""
    (signal,), _ = correct(name, rollout_of(*logprobs()))
    old, _ = logprobs()
    value = ALGORITHMS[algorithm].scalar(old, old, old, signal.advantages, signal.mask)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert abs(loss - wrong) > 0.05


@pytest.mark.parametrize("algorithm", ["gspo", "rloo", "gmpo", "grpo"])
def test_a_row_loss_takes_the_weight_of_its_sequence(algorithm):
    """-(2 * 1 - 0.4 * 2) / 2: the weights of rows, 3 cut to 2, and 0.4."""
    (signal,), _ = correct("sequence_truncate", rollout_of(*logprobs()))
    assert signal.advantages.shape == (2, 1)
    old, _ = logprobs()
    value = ALGORITHMS[algorithm].scalar(old, old, old, signal.advantages, signal.mask)
    np.testing.assert_allclose(value, -0.6, rtol=1e-5)


@every_correction
def test_without_a_gap_nothing_changes(name):
    old, _ = logprobs()
    rollout = rollout_of(old, old)
    (signal,), metrics = correct(name, rollout)
    np.testing.assert_array_equal(signal.mask, rollout.mask)
    np.testing.assert_array_equal(
        jnp.broadcast_to(signal.advantages, (2, 3)), jnp.broadcast_to(ADVANTAGES, (2, 3))
    )
    assert metrics == {
        "correction/ratio": 1.0,
        "correction/ratio_max": 1.0,
        "correction/truncated": 0.0,
        "correction/masked": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "ratio", "truncated", "masked"),
    [
        ("token_truncate", 6.8 / 5, 1 / 5, 0.0),
        ("token_mask", 6.8 / 5, 0.0, 3 / 5),
        ("sequence_truncate", 1.7, 1 / 2, 0.0),
        ("sequence_mask", 1.7, 0.0, 1 / 2),
    ],
)
def test_metrics_are_of_the_raw_ratio(name, ratio, truncated, masked):
    """Of what is left, a gap would look smaller the more is cut off: 1.26 and 1.2, 1.4 and 0.4."""
    _, metrics = correct(name, rollout_of(*logprobs()))
    expected = {
        "correction/ratio": ratio,
        "correction/ratio_max": 3.0,
        "correction/truncated": truncated,
        "correction/masked": masked,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)


@every_correction
def test_padding_is_inert(name):
    """Neither what stands at padding nor a row without a token reaches weights or metrics."""
    (expected,), metrics = correct(name, rollout_of(*logprobs()))
    old, sampler = (
        jnp.concatenate([jnp.where(MASK, x, junk), jnp.full((1, 3), junk)])
        for x, junk in zip(logprobs(), (NAN, 50.0), strict=True)
    )
    mask = jnp.concatenate([MASK, jnp.zeros((1, 3), bool)])
    advantages = jnp.concatenate([ADVANTAGES, jnp.zeros((1, 1))])
    signals = (Signal(advantages, advantages, mask),)
    (signal,), own = correct(name, rollout_of(old, sampler, mask), signals=signals)
    assert own == pytest.approx(metrics, rel=1e-6)
    np.testing.assert_array_equal(signal.mask[:2], expected.mask)
    assert not signal.mask[2].any()
    assert jnp.isfinite(signal.advantages).all()
    np.testing.assert_allclose(
        np.where(expected.mask, signal.advantages[:2], 0.0),
        np.where(expected.mask, expected.advantages, 0.0),
        rtol=1e-6,
    )


@every_correction
@pytest.mark.parametrize("gap", [300.0, -300.0])
def test_a_gap_beyond_float32_stays_finite(name, gap):
    old, sampler = jnp.full((2, 3), -1.0), jnp.full((2, 3), -1.0 - gap)
    (signal,), metrics = correct(name, rollout_of(old, sampler))
    assert jnp.isfinite(signal.advantages).all()
    assert np.isfinite(list(metrics.values())).all()
    if name.endswith("mask"):
        assert not signal.mask.any()
    else:
        limit = BOUNDS[name]["cap"] if gap > 0 else 0.0
        np.testing.assert_allclose(jnp.abs(signal.advantages[0]), limit, atol=1e-8)


@every_correction
def test_other_terms_are_left_alone(name):
    """A KL term's weight is no importance weight; pairs and imitated text have their own."""
    terms = ("dapo", "kl_k3", "entropy", "value", "dpo", "sft", "grpo")
    rollout = rollout_of(*logprobs())
    rng = np.random.default_rng(1)
    signals = tuple(
        Signal(*(jnp.asarray(rng.normal(size=(2, 1)), jnp.float32) for _ in range(2)), rollout.mask)
        for _ in terms
    )
    after, _ = correct(name, rollout, terms, signals)
    for term, one, other in zip(terms, after, signals, strict=True):
        same = all(
            x.shape == y.shape and bool((x == y).all()) for x, y in zip(one, other, strict=True)
        )
        assert same == (term not in ("dapo", "grpo")), term


# Through `prepare`.

POLICIES = tuple(name for name, row in ALGORITHMS.items() if row.source == "rollouts")
CAP = 1.7


def test_policy_losses_are_those_of_sampled_text():
    assert {n for n, row in (ALGORITHMS | TERMS).items() if row.is_policy_loss} == set(POLICIES)


@functools.partial(jax.jit, static_argnums=0)
def scored_batch(made, state, draw, samples, scores):
    start = begin(made.sampling, 8, jnp.int32(0))
    pending = absorb(made.sampling, pool(), start, draw, samples, scores)
    batch, _, _, metrics = prepare(made, state, Frozen(), pending)
    return batch, metrics


@functools.cache
def prepared(name):
    """The batch of all these losses, `None` without a correction. The sampler found every token so
    unlikely that every ratio, of a token or a row, is cut to the cap."""
    made = plan("grpo")._replace(learner=together(POLICIES, micro=8), old_logprobs="recompute")
    if name is not None:
        made = made._replace(correction=functools.partial(CORRECTIONS[name], cap=CAP))
    rng = np.random.default_rng(2)
    mask = jnp.asarray(np.arange(3) < (1 + rng.permutation(8) % 3)[:, None])
    samples = Samples(
        tokens=jnp.where(mask, jnp.asarray(rng.integers(2, 16, mask.shape)), PAD),
        mask=mask,
        logprobs=jnp.where(mask, -40.0, 0.0),
        truncated=jnp.zeros(8, bool),
        finite=jnp.ones(8, bool),
        slot_steps=jnp.int32(0),
    )
    right = jnp.array([[1.0, 0, 0, 1], [0, 1, 0, NAN]])
    scores = Scores(right, right, right[..., None], jnp.zeros((2, 4, 3)))
    draw = Draw(jnp.array([3, 5]), jnp.zeros(2, jnp.int32), jnp.int32(2))
    state = initial_state(headed_params(), made.learner, jax.random.key(0))
    batch, metrics = scored_batch(made, state, draw, samples, scores)
    return batch, ops.values(metrics)


@jax.jit
def program(batch):
    """Each loss and its gradient in the log-probabilities of a policy that has left the one which
    scored the batch: ratios are not 1."""
    gap = jax.random.normal(jax.random.key(4), batch.mask.shape) * 0.05
    measured = {}
    for term, signal in zip(together(POLICIES).terms, batch.signals, strict=True):
        fixed = (batch.old_logprobs, batch.ref_logprobs, signal.advantages, signal.mask)
        loss = jax.value_and_grad(term.algorithm.scalar)
        measured[term.name] = loss(batch.old_logprobs + gap, *fixed)
    return measured


def times(batch, factor):
    """The batch with all advantages multiplied."""
    signals = tuple(s._replace(advantages=s.advantages * factor) for s in batch.signals)
    return batch._replace(signals=signals)


@functools.cache
def update_of(level, factor=1.0):
    return jax.device_get(program(times(prepared(level)[0], factor)))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("level", ["token_truncate", "sequence_truncate"])
def test_a_weight_multiplies_the_advantages(name, level):
    """The update with every ratio cut to w is that of advantages times w, for every loss."""
    _, metrics = prepared(level)
    assert metrics["correction/truncated"] == 1.0
    loss, grads = update_of(level)[name]
    expected_loss, expected = update_of(None, CAP)[name]
    _, bare = update_of(None)[name]
    assert np.abs(expected - bare).max() > 1e-3
    np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)


def test_the_kl_term_of_a_loss_keeps_its_weight():
    """GRPO's loss is S + K: corrected it is w S + K. Weights on the loss would give w (S + K)."""
    both, divergence = (update_of(None, factor)["grpo"][0] for factor in (1.0, 0.0))
    loss, _ = update_of("token_truncate")["grpo"]
    assert divergence > 0.1
    assert loss == pytest.approx(CAP * (both - divergence) + divergence, rel=1e-4)


def test_an_unscored_row_stays_masked():
    batch, metrics = prepared("token_truncate")
    for signal in batch.signals:
        assert not signal.mask[7].any()
        assert jnp.isfinite(signal.advantages).all()
    # Of the seven rows that count; the metric knows no others.
    assert metrics["trained_rows"] == 7.0
