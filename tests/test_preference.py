"""Preference pairs and reward models: which score is read, margins, pairs that stay together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import (
    batch_of,
    headed_params,
    initial_params,
    learner,
    pool,
)
from worked_example import EXAMPLES

from model.heads import Outputs
from rlx import ops
from rlx.algorithms import TERMS
from rlx.algorithms.dpo import right_pairs
from rlx.algorithms.record import of_scores
from rlx.offline import offline_run
from rlx.scoring import score_rows
from rlx.state import initial_state
from rlx.types import Signal
from rlx.update import gradients, update

PAIRS = 4


@functools.cache
def pairs(name="dpo"):
    return batch_of((name,), 2 * PAIRS)


def test_a_score_is_read_after_the_last_real_token():
    """Column t of the values is the state before token t. Read at the padding's end, every row
    would score 5; read before its last token, one less."""
    mask = jnp.array([[1, 1, 1, 0, 0], [1] * 5, [1, 0, 1, 0, 0], [1, 0, 0, 0, 0]], bool)
    values = jnp.broadcast_to(jnp.arange(6.0), (4, 6))
    zeros = jnp.zeros((4, 5))
    signs = jnp.array([[1.0], [-1.0]] * 2)
    batch = batch_of(("reward_model",), 4)._replace(mask=mask)
    inputs = of_scores(Outputs(zeros, zeros, values), batch, Signal(signs, signs, mask))
    np.testing.assert_array_equal(inputs.logprobs[:, 0], [3, 5, 3, 1])
    assert inputs.mask.all()
    np.testing.assert_array_equal(inputs.old_logprobs, batch.margins)
    # A pair that has no part in the loss is masked, whatever its score.
    nothing = Signal(signs, signs, mask.at[2:].set(False))
    inputs = of_scores(Outputs(zeros, zeros, values), batch, nothing)
    np.testing.assert_array_equal(inputs.mask[:, 0], [True, True, False, False])


def test_a_scores_gradient_reaches_no_padding():
    """Garbage in the values of padding and of earlier states changes nothing."""
    mask = jnp.array([[1, 1, 0], [1, 1, 1]], bool)
    signs, zeros = jnp.array([[1.0], [-1.0]]), jnp.zeros((2, 3))
    batch = batch_of(("reward_model",), 2)._replace(mask=mask, margins=jnp.zeros((2, 1)))

    def loss(values):
        inputs = of_scores(Outputs(zeros, zeros, values), batch, Signal(signs, signs, mask))
        return TERMS["reward_model"].scalar(*inputs)

    values = jnp.array([[9.0, 9.0, 0.7, jnp.nan], [9.0, 9.0, 9.0, 0.2]])
    value, grad = jax.value_and_grad(loss)(values)
    assert value == pytest.approx(0.474077, abs=1e-6)
    slope = 1 / (1 + np.exp(0.5))
    np.testing.assert_allclose(grad, [[0, 0, -slope, 0], [0, 0, 0, slope]], rtol=1e-5)


def test_margins_of_the_data_and_a_constant_one_add_up():
    """-log sigmoid(.5 - .3), each way of asking for it; -log sigmoid(.5 + .3) is .371101."""
    scores, _, ref, signs, mask = EXAMPLES["scores"].arrays
    row, margins = TERMS["reward_model"], jnp.full((6, 1), 0.2)
    for given, constant in ((margins + 0.1, 0.0), (margins, 0.1), (0 * margins, 0.3)):
        loss = row.scalar(scores, given, ref, signs, mask, margin=constant)
        assert loss == pytest.approx(0.598139, abs=1e-6)
    # Half of the pairs with a margin of .3: the mean of both.
    some = jnp.array([[0.3], [0.3], [0.0], [0.0], [9.0], [9.0]])
    loss = row.scalar(scores, some, ref, signs, mask)
    assert loss == pytest.approx((0.598139 + 0.474077) / 2, abs=1e-6)


def test_the_centring_term_pulls_scores_to_zero_and_their_gap_nowhere():
    scores, margins, ref, signs, mask = EXAMPLES["scores"].arrays
    row = TERMS["reward_model"]

    def pull(centring):
        return jax.grad(lambda x: row.scalar(x, margins, ref, signs, mask, centring=centring))(
            scores
        )

    added = pull(0.1) - pull(0.0)
    # 2 c (r_w + r_l) for each score of a pair, which weighs 1 / 2.
    np.testing.assert_allclose(added[:4, 0], 0.1 * 2 * 0.9 / 2, rtol=1e-5)
    np.testing.assert_array_equal(added[4:], 0.0)


def test_a_reward_model_knows_only_differences():
    scores, margins, ref, signs, mask = EXAMPLES["scores"].arrays
    row = TERMS["reward_model"]
    shifted = row.scalar(scores + 3.0, margins, ref, signs, mask)
    assert shifted == pytest.approx(float(row.scalar(scores, margins, ref, signs, mask)), rel=1e-5)


def test_a_pair_that_ties_is_half_right():
    """As of held-out pairs: a policy that is its reference has 0.5 there, and here."""
    np.testing.assert_array_equal(right_pairs(jnp.float32([[2], [0], [-1]])), [[1], [0.5], [0]])


def test_shuffling_keeps_pairs_together():
    """One pair an update, at a rate of 0: their mean margin is that of the whole batch. Shuffled
    row by row, chosen and rejected texts of different pairs would be subtracted."""
    rows = pairs()
    still = learner("dpo", optimizer=optax.sgd(0.0), micro=2)
    state = initial_state(initial_params(), still, jax.random.key(0))
    _, _, whole = jax.jit(gradients, static_argnums=0)(still, (initial_params(), {}), rows)
    several = still._replace(minibatches=PAIRS, epochs=2)
    after, metrics = jax.jit(update, static_argnums=0)(several, state, rows, jax.random.key(5))
    assert after.updates == 2 * PAIRS
    for name in ("margin", "accuracy"):
        expected = ops.values(whole)[name]
        assert ops.values(metrics)[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_a_step_on_given_pairs_scores_them_with_the_reference():
    """What stands in the data for it is not looked at; without a reference nothing is scored."""
    made = learner("dpo", optimizer=optax.sgd(0.0), micro=4)
    rows = pairs()._replace(ref_logprobs=jnp.full_like(pairs().ref_logprobs, jnp.nan))
    reference = jax.tree.map(lambda leaf: 0.9 * leaf, initial_params())
    state = initial_state(initial_params(), made, jax.random.key(0))
    state, metrics = offline_run(made, PAIRS)(state, reference, pool(PAIRS), rows, 1)
    width = rows.mask.shape[1]
    scored = score_rows(made, reference, {}, rows.tokens, rows.positions, width).logprobs
    given = rows._replace(ref_logprobs=scored)
    _, loss, measured = jax.jit(gradients, static_argnums=0)(made, (initial_params(), {}), given)
    assert metrics["loss"].total[0] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["margin"].total[0] == pytest.approx(ops.values(measured)["margin"], rel=1e-4)
    assert state.cursor == PAIRS
    assert float(loss) != pytest.approx(np.log(2), abs=1e-3)


def test_a_reward_model_has_no_use_for_the_language_head():
    """Its gradient reaches trunk and score head; the tied embedding by its inputs only, so that a
    token in no text keeps its row."""
    made = learner("reward_model", micro=8)
    rows = pairs("reward_model")
    grads, _, _ = jax.jit(gradients, static_argnums=0)(made, (headed_params(), {}), rows)
    used = np.unique(np.asarray(rows.tokens)[np.asarray(rows.positions) >= 0])
    unused = np.setdiff1d(np.arange(16), used)
    embedding = grads[0]["embed"]["embedding"]
    assert jnp.max(jnp.abs(grads[0]["value_head"]["kernel"])) > 1e-4
    assert jnp.max(jnp.abs(embedding[used])) > 1e-5
    assert unused.size
    np.testing.assert_array_equal(embedding[unused], 0.0)
