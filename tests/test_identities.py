"""What the papers say of each other: where two algorithms are one, and what a gradient must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worked_example import ADVANTAGES, EXAMPLES, MASK, NEW, OLD, PAIR_MASK, PAIRS, REF, SIGNS

from rlx.advantages import gae, group_centred, leave_one_out
from rlx.algorithms import ALGORITHMS, TERMS

ROWS = ALGORITHMS | TERMS
# Losses of a ratio: without clip and divergence each is REINFORCE under its own weights.
RATIO_ROWS = [n for n, row in ALGORITHMS.items() if row.source == "rollouts"]
PREFERENCES = [n for n, row in ALGORITHMS.items() if row.source == "pairs"]
FULL = jnp.ones_like(MASK)


def value_and_grad(name, *arrays, **hyper):
    return jax.value_and_grad(lambda x: ROWS[name].scalar(x, *arrays[1:], **hyper))(arrays[0])


def without_kl(name):
    return {"beta": 0.0} if name == "grpo" else {}


def row_gradients(name, advantages, mask):
    """How each token of a row counts where the old policy is the current one.

    GSPO's ratio is a mean over tokens and RLOO's a product, so that a row's weight is shared among
    its tokens in one and given to each in the other.
    """
    weights = ROWS[name].weights(mask)
    if name in ("gspo", "gmpo"):
        weights = weights / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return -jnp.where(mask, weights * advantages, 0.0)


@pytest.mark.parametrize("name", RATIO_ROWS)
def test_on_policy_every_clipped_loss_has_reinforces_gradient(name):
    """-weight x advantage on every token, whatever the clip: it is inside, not outside."""
    arrays = (NEW, NEW, NEW, ADVANTAGES, MASK)
    _, grad = value_and_grad(name, *arrays)
    np.testing.assert_allclose(grad, row_gradients(name, ADVANTAGES, MASK), atol=2e-7)


@pytest.mark.parametrize("name", RATIO_ROWS)
def test_equal_rewards_print_a_loss_of_zero_and_so_do_mixed_ones(name):
    """The loss is no signal of progress: only the gradient tells the two apart."""
    equal = value_and_grad(name, NEW, NEW, NEW, jnp.zeros((4, 1)), FULL)
    assert equal[0] == pytest.approx(0.0, abs=1e-6)
    assert jnp.linalg.norm(equal[1]) == 0.0
    mixed = value_and_grad(name, NEW, NEW, NEW, ADVANTAGES, FULL)
    assert jnp.linalg.norm(mixed[1]) > 0.02
    if name not in ("cispo", "sapo"):
        # CISPO's value is a log-probability, and SAPO's taus differ by the sign of the advantage.
        assert mixed[0] == pytest.approx(0.0, abs=1e-6)


def test_sequence_ratios_share_a_rows_weight_among_its_tokens():
    """The whole completion of RLOO is one action: each of its tokens has the row's weight, where
    GSPO's and GMPO's tokens have a share of it."""
    arrays = (NEW, NEW, NEW, ADVANTAGES, MASK)
    lengths = jnp.sum(MASK, axis=1, keepdims=True)
    _, whole = value_and_grad("rloo", *arrays)
    for name in ("gspo", "gmpo", "grpo"):
        _, shared = value_and_grad(name, *arrays, **without_kl(name))
        np.testing.assert_allclose(shared * lengths, whole, atol=1e-7)


@pytest.mark.parametrize(
    ("one", "other", "hyper", "mask"),
    [
        # Rows of one length: both reductions are the mean over tokens.
        ("dapo", "grpo", ({"clip_high": 0.2}, {"beta": 0.0}), FULL),
        ("ppo", "grpo", ({}, {"beta": 0.0}), FULL),
        ("dr_grpo", "grpo", ({"budget": 4}, {"beta": 0.0}), FULL),
        ("ppo", "dapo", ({}, {"clip_high": 0.2}), MASK),
        ("ppo", "reinforce_pp", ({}, {}), MASK),
        ("reinforce_pp", "reinforce_pp_baseline", ({}, {}), MASK),
        # No ratio of a bad row exceeds 3.
        ("ppo", "ppo_dual_clip", ({}, {}), MASK),
        ("gspo", "gspo_token", ({}, {}), MASK),
        ("gspo", "gspo_token", ({"clip_high": 0.1}, {"clip_high": 0.1}), MASK),
        # One token a row: a mean, a product and a token's own ratio are one.
        ("rloo", "grpo", ({}, {"beta": 0.0}), FULL[:, :1]),
        ("gspo", "rloo", ({"clip_low": 0.2, "clip_high": 0.2}, {}), FULL[:, :1]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_two_algorithms_are_one_where_their_papers_do_not_differ(one, other, hyper, mask):
    """In value and gradient."""
    width = mask.shape[1]
    arrays = (NEW[:, :width], OLD[:, :width], REF[:, :width], ADVANTAGES, mask)
    first = value_and_grad(one, *arrays, **hyper[0])
    second = value_and_grad(other, *arrays, **hyper[1])
    assert first[0] == pytest.approx(float(second[0]), rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(first[1], second[1], atol=1e-7)
    assert jnp.linalg.norm(first[1]) > 0.01


def test_they_do_differ_where_their_papers_differ():
    """Unequal lengths, unequal clips, a divergence: without these the identities say little."""
    arrays = EXAMPLES["z_score"].arrays
    names = ("ppo", "grpo", "dapo", "gspo", "rloo", "cispo", "gmpo", "sapo")
    values = [float(ROWS[n].scalar(*arrays)) for n in names]
    gaps = np.abs(np.subtract.outer(values, values))[np.triu_indices(len(values), 1)]
    assert gaps.min() > 1e-3


def test_gspo_token_gives_a_token_its_own_advantage():
    """In value the sequence's ratio; with advantages that differ within a row, the gradient of
    each token is its own. GSPO would take their mean."""
    advantages = jnp.array([[1.0, -1.0, 0.5, 0.0]])
    row = (jnp.zeros((1, 4)) + 0.01, jnp.zeros((1, 4)), jnp.zeros((1, 4)), advantages, FULL[:1])
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    _, grad = value_and_grad("gspo_token", *row, **wide)
    np.testing.assert_allclose(grad, -np.exp(0.01) * advantages / 4, rtol=1e-5)
    _, grad = value_and_grad("gspo", *row, **wide)
    np.testing.assert_allclose(grad, jnp.full((1, 4), -np.exp(0.01) * 0.125 / 4), rtol=1e-5)


def test_a_sequence_ratio_is_the_exponential_of_a_mean_over_real_tokens():
    """Log-ratios .4 and -.2 with a padding of 5: exp(.1) = 1.10517; of the sum it is 1.22140, and
    with the padding exp(5.2 / 3) = 5.66."""
    new = jnp.array([[0.4, -0.2, 5.0]])
    mask = jnp.array([[True, True, False]])
    zeros = jnp.zeros((1, 3))
    for name in ("gspo", "gspo_token"):
        loss = ROWS[name].scalar(
            new, zeros, zeros, -jnp.ones((1, 1)), mask, clip_low=0.5, clip_high=0.5
        )
        assert loss == pytest.approx(1.10517, abs=1e-5)
        _, grad = value_and_grad(name, new, zeros, zeros, -jnp.ones((1, 1)), mask)
        # A bad row that has become likelier is not clipped: tokens have their gradient.
        np.testing.assert_allclose(grad, [[1.10517 / 2, 1.10517 / 2, 0.0]], rtol=1e-5)


def test_cispo_clips_the_weight_and_not_the_gradient():
    """A token far above the cap: PPO's gradient is 0 there, CISPO's is the cap's."""
    new = jnp.array([[2.0, 0.1]])
    zeros, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    arrays = (new, zeros, zeros, jnp.ones((1, 1)), mask)
    np.testing.assert_allclose(value_and_grad("ppo", *arrays)[1], [[0, -np.exp(0.1) / 2]])
    _, grad = value_and_grad("cispo", *arrays)
    np.testing.assert_allclose(grad, [[-5.0 / 2, -np.exp(0.1) / 2]], rtol=1e-6)


def test_sapo_fades_where_ppo_stops():
    """4 sigmoid' (r - 1) r: small and never zero beyond the clip's edge."""
    new = jnp.array([[1.5]])
    arrays = (new, jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1), bool))
    gate = 1 / (1 + np.exp(-(np.exp(1.5) - 1)))
    expected = -4 * gate * (1 - gate) * np.exp(1.5)
    np.testing.assert_allclose(value_and_grad("sapo", *arrays)[1], [[expected]], rtol=1e-4)
    assert value_and_grad("ppo", *arrays)[1] == 0.0


def test_gmpo_damps_one_wild_token():
    """A ratio of e^3 beside three of 1: the arithmetic mean is 5.8, unclipped; the geometric one is
    e^.75, and with the token's own clip e^.1."""
    new = jnp.array([[3.0, 0.0, 0.0, 0.0]])
    zeros = jnp.zeros((1, 4))
    arrays = (new, zeros, zeros, jnp.ones((1, 1)), FULL[:1])
    assert ROWS["gmpo"].scalar(*arrays, clip=10.0) == pytest.approx(-np.exp(0.75), rel=1e-5)
    assert ROWS["gmpo"].scalar(*arrays) == pytest.approx(-np.exp(0.1), rel=1e-5)
    assert ROWS["grpo"].scalar(*arrays, clip_high=1e3, beta=0.0) == pytest.approx(-5.77, abs=0.01)


def test_the_dual_clip_bounds_a_bad_token_and_stops_its_gradient():
    """A bad token of ratio e^2: PPO's loss is 7.39, the dual's 3."""
    new = jnp.array([[2.0, 0.1]])
    zeros, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    arrays = (new, zeros, zeros, -jnp.ones((1, 1)), mask)
    value, grad = value_and_grad("ppo_dual_clip", *arrays)
    assert value == pytest.approx((3.0 + np.exp(0.1)) / 2, rel=1e-6)
    np.testing.assert_allclose(grad, [[0.0, np.exp(0.1) / 2]], rtol=1e-6)
    assert value_and_grad("ppo", *arrays)[0] == pytest.approx((np.exp(2) + np.exp(0.1)) / 2)


# The slope of each preference loss by Delta where policy and reference are the same, at beta .1.
FIRST_SLOPES = {
    "dpo": -0.05,
    "dpo_hinge": -0.1,
    "ipo": -10.0,
    "ipo_sum": -10.0,
    "cdpo": -0.04,  # (1 - 2 e) of dpo's
    "robust_dpo": -0.0625,  # dpo's / (1 - 2 e)
}
FIRST_VALUES = {"dpo": np.log(2), "dpo_hinge": 1.0, "ipo": 25.0, "ipo_sum": 25.0}
FIRST_VALUES |= {"cdpo": np.log(2), "robust_dpo": np.log(2)}


@pytest.mark.parametrize("name", PREFERENCES)
def test_where_the_policy_is_the_reference(name):
    """sigmoid(0) = 1/2: log 2, and the gradient -beta / 2 x sign x the pair's weight, on every
    token of both rows. Without the rejected text's half its gradient would be 0."""
    mask = PAIR_MASK
    reference = PAIRS
    if name == "dpo_reference_free":
        # It has no reference to equal: texts of equal likelihood stand for that.
        tokens, reference = jnp.where(mask, -12.0 / jnp.sum(mask, axis=1, keepdims=True), 0.0), None
    else:
        tokens = PAIRS
    arrays = (tokens, tokens, tokens if reference is None else reference, SIGNS, mask)
    value, grad = value_and_grad(name, *arrays)
    like = "dpo" if name == "dpo_reference_free" else name
    assert value == pytest.approx(FIRST_VALUES[like], rel=1e-6)
    # The loss stands on both rows, each of weight 1 / 4: together 1 / 2 a pair.
    expected = FIRST_SLOPES[like] * SIGNS / 2 * mask
    if name == "ipo":
        expected = expected / jnp.sum(mask, axis=1, keepdims=True)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)


def test_both_halves_of_a_pair_are_in_the_margin():
    """pi (-10, -12), reference (-11, -11): margin 2, loss .598139. Without the rejected half the
    margin is 1 and the loss .644397."""
    pi, reference = jnp.array([[-10.0], [-12.0]]), jnp.array([[-11.0], [-11.0]])
    signs, mask = jnp.array([[1.0], [-1.0]]), jnp.ones((2, 1), bool)
    loss = ROWS["dpo"].scalar(pi, pi, reference, signs, mask)
    assert loss == pytest.approx(0.598139, abs=1e-6)


def test_a_pair_of_one_text_has_no_gradient():
    """Two texts that truncation has made equal: log 2, and each half cancels the other."""
    one = jnp.repeat(PAIRS[:1], 2, axis=0)
    reference = one - 0.3
    signs, mask = jnp.array([[1.0], [-1.0]]), jnp.ones((2, 6), bool)
    value, grad = value_and_grad("dpo", one, one, reference, signs, mask)
    assert value == pytest.approx(np.log(2), rel=1e-6)
    np.testing.assert_allclose(jnp.sum(grad, axis=0), 0.0, atol=1e-8)


@pytest.mark.parametrize("name", [*PREFERENCES, "reward_model"])
def test_an_odd_number_of_rows_is_refused(name):
    arrays = [x[:3] for x in (PAIRS, PAIRS, PAIRS, SIGNS, PAIR_MASK)]
    if name == "reward_model":
        arrays = [x[:, :1] for x in arrays]
    with pytest.raises(ValueError, match="even number of rows, came 3"):
        ROWS[name].scalar(*arrays)


def test_label_smoothing_of_zero_is_dpo():
    arrays = EXAMPLES["pairs"].arrays
    for name in ("cdpo", "robust_dpo"):
        smooth = ROWS[name].scalar(*arrays, label_smoothing=0.0)
        assert smooth == pytest.approx(float(ROWS["dpo"].scalar(*arrays)), rel=1e-6)


def test_robust_dpo_is_unbiased_under_flipped_labels():
    """Averaged over a share e of flipped pairs it is DPO of the true labels; cDPO is not."""
    *arrays, signs, mask = EXAMPLES["pairs"].arrays
    truth = ROWS["dpo"].scalar(*arrays, signs, mask)

    def expected(name):
        right, flipped = (ROWS[name].scalar(*arrays, s, mask) for s in (signs, -signs))
        return 0.9 * right + 0.1 * flipped

    assert expected("robust_dpo") == pytest.approx(float(truth), rel=1e-5)
    assert abs(float(expected("cdpo") - truth)) > 0.01


def test_leaving_one_out_is_centring_by_another_scale():
    rewards = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    np.testing.assert_allclose(
        leave_one_out(rewards), 5 / 4 * group_centred(rewards), rtol=1e-5, atol=1e-7
    )


numbers = st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5)


@settings(deadline=None, max_examples=20)
@given(numbers, numbers, st.floats(-2, 2, width=32), st.sampled_from([0.5, 0.9, 1.0]))
def test_the_ends_of_lambda_are_monte_carlo_and_temporal_difference(
    rewards, values, bootstrap, gamma
):
    arrays = [jnp.array([x], jnp.float32) for x in (rewards, values)]
    ends = (jnp.ones((1, 5), bool), jnp.array([bootstrap], jnp.float32))
    advantages, returns = gae(*arrays, *ends, gamma=gamma, lam=1.0)
    total = bootstrap
    for t in reversed(range(5)):
        total = rewards[t] + gamma * total
        np.testing.assert_allclose(returns[0, t], total, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(advantages[0, t], total - values[t], rtol=1e-4, atol=1e-4)
    advantages, _ = gae(*arrays, *ends, gamma=gamma, lam=0.0)
    following = [*values[1:], bootstrap]
    expected = np.array(rewards) + gamma * np.array(following) - np.array(values)
    np.testing.assert_allclose(advantages[0], expected, rtol=1e-4, atol=1e-4)


# The length bias (Dr.GRPO, sec. 3.1). A group of one right answer and one wrong one, whose length
# grows; on policy.


def pull_on_the_wrong_answer(name, length, width=16):
    """Its gradient per token, and of the row together."""
    mask = jnp.arange(width) < jnp.array([[4], [length]])
    tokens = jnp.full((2, width), -1.0)
    advantages = jnp.array([[1.0], [-1.0]])
    _, grad = value_and_grad(name, tokens, tokens, tokens, advantages, mask)
    return float(grad[1, 0]), float(jnp.sum(grad[1]))


@pytest.mark.parametrize("length", [2, 8, 16])
def test_dr_grpo_pulls_on_every_token_of_a_long_wrong_answer_as_on_a_short_one(length):
    """1 / (B T_max) a token: a longer wrong answer is punished more, in all."""
    token, row = pull_on_the_wrong_answer("dr_grpo", length)
    assert token == pytest.approx(1 / (2 * 16), rel=1e-6)
    assert row == pytest.approx(length / (2 * 16), rel=1e-6)


@pytest.mark.parametrize("length", [2, 8, 16])
def test_grpo_pulls_less_on_each_token_the_longer_a_wrong_answer_grows(length):
    """1 / (B |o|) a token: the row is punished the same in all, so length is a way out."""
    token, row = pull_on_the_wrong_answer("grpo", length)
    assert token == pytest.approx(1 / (2 * length), rel=1e-6)
    assert row == pytest.approx(1 / 2, rel=1e-6)


def test_a_token_mean_lets_a_long_row_weaken_the_others():
    """DAPO's tokens all weigh the same, and less where another row is long; under Dr.GRPO's budget
    they don't see each other."""

    def pull_on_the_right_answer(name, length):
        mask = jnp.arange(16) < jnp.array([[4], [length]])
        tokens = jnp.full((2, 16), -1.0)
        _, grad = value_and_grad(name, tokens, tokens, tokens, jnp.array([[1.0], [-1.0]]), mask)
        return float(grad[0, 0])

    assert pull_on_the_right_answer("dapo", 2) == pytest.approx(-1 / 6)
    assert pull_on_the_right_answer("dapo", 16) == pytest.approx(-1 / 20)
    assert pull_on_the_right_answer("dr_grpo", 2) == pull_on_the_right_answer("dr_grpo", 16)
