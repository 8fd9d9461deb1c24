"""PPO in full: advantages from a critic, the critic's own learning, and a reward model in a run."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import (
    CONFIG,
    headed_params,
    initial_params,
    movement,
    plan,
    pool,
    together,
    verifier,
)

from model.qwen import Qwen
from rlx import ops
from rlx.advantages import gae, gae_plain, gae_whitened, whiten
from rlx.learner import forward
from rlx.prepare import Frozen, critic_metrics, prepare, score_text
from rlx.rollout import empty_rollout
from rlx.rounds import begin
from rlx.shaping import Shaping
from rlx.state import initial_state, start_memory
from rlx.train import fused, staged
from rlx.verify import callback_verifier, model_verifier


def estimate(rewards, values, mask=None, bootstrap=0.0, gamma=1.0, lam=0.95):
    arrays = [jnp.array([x], jnp.float32) for x in (rewards, values)]
    mask = jnp.ones((1, len(rewards)), bool) if mask is None else jnp.array([mask], bool)
    ends = jnp.array([bootstrap], jnp.float32)
    return [x[0] for x in gae(*arrays, mask, ends, gamma=gamma, lam=lam)]


def test_the_worked_example():
    advantages, returns = estimate([0, -0.1, 0, 1.0], [0.2, 0.3, 0.1, 0.5])
    np.testing.assert_allclose(advantages, [0.604688, 0.53125, 0.875, 0.5], atol=1e-6)
    np.testing.assert_allclose(returns, [0.804688, 0.83125, 0.975, 1.0], atol=1e-6)


def test_a_finished_row_ends_in_nothing_and_a_truncated_one_in_its_value():
    """Values .5, .4, .3 and .2 after the last token. Taken for finished, the truncated row would
    get -.42075, -.335, -.3 without any reward to say so."""
    values = [0.5, 0.4, 0.3]
    advantages, returns = estimate([0, 0, 1.0], values)
    np.testing.assert_allclose(advantages, [0.43675, 0.565, 0.7], atol=1e-6)
    np.testing.assert_allclose(returns, [0.93675, 0.965, 1.0], atol=1e-6)
    advantages, _ = estimate([0, 0, 0], values, bootstrap=0.2)
    np.testing.assert_allclose(advantages, [-0.28525, -0.195, -0.1], atol=1e-6)


def test_masked_tokens_are_no_steps():
    """One decay between two trained tokens; as a step of its own the hole would decay twice, to
    .25, and its garbage would count."""
    advantages, returns = estimate([0, 9.0, 1.0], [0, 7.0, 0], [1, 0, 1], lam=0.5)
    np.testing.assert_allclose(advantages, [0.5, 0.0, 1.0])
    np.testing.assert_allclose(returns, [0.5, 0.0, 1.0])
    # After a row's end too: the bootstrap reaches its last token undiminished.
    ragged, _ = estimate([0, 0, 5.0, 5.0], [0.5, 0.4, 9, 9], [1, 1, 0, 0], bootstrap=0.2)
    short, _ = estimate([0, 0], [0.5, 0.4], bootstrap=0.2)
    np.testing.assert_allclose(ragged[:2], short, atol=1e-7)
    np.testing.assert_array_equal(ragged[2:], 0.0)


def reference(rewards, values, mask, bootstrap, gamma, lam):
    """By the definition, a row at a time, in float64."""
    result = np.zeros(mask.shape)
    for row in range(len(mask)):
        later, following = 0.0, bootstrap[row]
        for t in np.flatnonzero(mask[row])[::-1]:
            delta = rewards[row, t] + gamma * following - values[row, t]
            later = delta + gamma * lam * later
            following = values[row, t]
            result[row, t] = later
    return result


@pytest.mark.parametrize("hyper", [{}, {"gamma": 0.9}, {"gamma": 0.97, "lam": 0.8}])
def test_ragged_rows_with_holes_equal_the_definition(hyper):
    rng = np.random.default_rng(0)
    mask = rng.random((6, 7)) < 0.7
    mask[2] = False
    rewards, values = rng.normal(size=(2, 6, 7)).astype(np.float32)
    bootstrap = rng.normal(size=6).astype(np.float32)
    expected = reference(rewards, values, mask, bootstrap, **({"gamma": 1.0, "lam": 0.95} | hyper))
    rollout = rollout_of(mask, rewards, values, bootstrap)
    advantages, returns = gae_plain(rollout, **hyper)
    np.testing.assert_allclose(advantages, expected, atol=2e-5)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), atol=2e-5)
    # Whitened are the advantages and not the returns, which the critic is to predict.
    white, same = gae_whitened(rollout, **hyper)
    np.testing.assert_allclose(white, whiten(advantages, rollout.mask), atol=1e-6)
    np.testing.assert_array_equal(same, returns)
    picked = np.asarray(white)[mask]
    assert picked.mean() == pytest.approx(0.0, abs=1e-6)
    assert picked.std(ddof=1) == pytest.approx(1.0, abs=1e-4)


def rollout_of(mask, rewards, values, bootstrap):
    shape = plan("ppo", {"prompts": 2, "samples": len(mask) // 2}).sampling
    empty = empty_rollout(shape._replace(max_new_tokens=mask.shape[1]), 8)
    return empty._replace(
        mask=jnp.asarray(mask),
        token_rewards=jnp.asarray(rewards),
        values=jnp.asarray(values),
        bootstrap=jnp.asarray(bootstrap),
    )


def test_explained_variance_compares_with_the_mean_of_the_returns():
    returns, mask = jnp.array([[1.0, 2.0, 3.0, 50.0]]), jnp.array([[True, True, True, False]])

    def foreseen(values):
        return ops.values(critic_metrics(jnp.array([values]), returns, mask))["explained_variance"]

    assert foreseen([1.0, 2.0, 3.0, 0.0]) == pytest.approx(1.0)
    assert foreseen([6.0, 7.0, 8.0, 0.0]) == pytest.approx(1.0)  # by variance: no matter the level
    assert foreseen([2.0, 2.0, 2.0, 0.0]) == pytest.approx(0.0)
    assert foreseen([3.0, 2.0, 1.0, 0.0]) == pytest.approx(-3.0)
    # Equal returns have no variance: not -1e16, and not counted.
    same = critic_metrics(jnp.array([[1.0, 2.0]]), jnp.ones((1, 2)), jnp.ones((1, 2), bool))
    assert same["explained_variance"].count == 0.0


SAMPLE = {"prompts": 4, "samples": 8, "max_new_tokens": 3, "overlong_buffer": 0}
SHAPING = Shaping(
    divergence=ops.k1,
    kl_beta=0.05,
    kl_target=0.02,
    kl_horizon=100.0,
    missing_stop_penalty=0.25,
    running=True,
    clip=5.0,
)


def ppo_plan(separate, shaping=SHAPING, **changes):
    """With two epochs of two mini-batches, and a critic beside the policy."""
    fields = {"micro": 8, "minibatches": 2, "epochs": 2, "on_policy": False} | changes
    base = plan("ppo", SAMPLE, **fields)
    learner = together(
        ("ppo", "value"),
        (1.0, 0.5),
        critic=Qwen(CONFIG) if separate else None,
        optimizer=optax.adam(0.02),
        **fields,
    )
    return base._replace(learner=learner, shaping=shaping)


def start(made, separate):
    params = initial_params() if separate else headed_params()
    critic = headed_params() if separate else None
    memory = start_memory(made.shaping.kl_beta)
    return initial_state(params, made.learner, jax.random.key(1), critic=critic, memory=memory)


@functools.cache
def trained(separate):
    """Twelve fused steps."""
    made = ppo_plan(separate)
    run = fused(made, callback_verifier(made.sampling, verifier))
    return run(start(made, separate), Frozen(reference=initial_params()), pool(), 12)


def history(metrics, name):
    metric = metrics[name]
    return np.asarray(metric.total / metric.count if hasattr(metric, "total") else metric.value)


@pytest.mark.parametrize("separate", [True, False], ids=["separate critic", "shared head"])
def test_policy_and_critic_learn(separate):
    state, (metrics, _) = trained(separate)
    rate, foreseen = history(metrics, "solve_rate"), history(metrics, "explained_variance")
    assert rate[:2].mean() < 0.3
    assert rate[-3:].mean() > 0.7
    assert foreseen[-3:].mean() > foreseen[:2].mean() + 0.2
    assert history(metrics, "value/loss")[-1] < history(metrics, "value/loss")[0]
    head = ("value_head" in state.params, "value_head" in (state.critic or {}))
    assert head == (not separate, separate)
    if separate:
        assert movement(headed_params(), state.critic) > 0.01


def test_the_weight_of_the_divergence_follows_it():
    """Down at first, while the policy is the reference; up once it has left the target of .02 a
    completion behind. The largest step is a fifth x 32 / 100."""
    state, (metrics, _) = trained(True)
    kl, beta = history(metrics, "kl/completion"), history(metrics, "kl/beta")
    assert beta[0] == pytest.approx(0.05)
    for step in range(11):
        error = np.clip(kl[step] / 0.02 - 1, -0.2, 0.2)
        assert beta[step + 1] == pytest.approx(beta[step] * (1 + error * 32 / 100), rel=1e-4)
    assert beta[1] < beta[0]
    assert beta[-1] > 1.5 * beta[1]
    assert state.memory.kl_beta > beta[-1]
    assert state.memory.rewards.count == 12 * 32


def test_a_fixed_weight_and_no_shaping_at_all():
    made = ppo_plan(False, Shaping(divergence=ops.k3, kl_beta=0.05))
    pending = sampled(made)
    state = start(made, False)
    _, preview, memory, metrics = prepare(made, state, Frozen(initial_params()), pending)
    assert memory.kl_beta == jnp.float32(0.05)
    # The policy has not moved, so the divergence is that of the head-bearing tree: none.
    assert ops.values(metrics)["kl/reward"] == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose(preview.rollout.rewards, pending.rollout.rewards, atol=1e-5)


def sampled(made):
    """Made-up text: the first half of the rows ends in time, the others are cut."""
    rows = SAMPLE["prompts"] * SAMPLE["samples"]
    rng = np.random.default_rng(0)
    lengths = np.where(np.arange(rows) < rows // 2, 1 + np.arange(rows) % 3, 3)
    mask = np.arange(3) < lengths[:, None]
    prompts = pool()
    positions = np.repeat(np.asarray(prompts.positions[:4]), 8, axis=0)
    tail = np.where(mask, positions[:, -1:] + 1 + np.arange(3), -1)
    tokens = np.repeat(np.asarray(prompts.tokens[:4]), 8, axis=0)
    text = np.where(mask, rng.integers(2, 16, mask.shape), 0)
    pending = begin(made.sampling, 8, jnp.int32(0))
    rollout = pending.rollout._replace(
        tokens=jnp.asarray(np.concatenate([tokens, text], axis=1), jnp.int32),
        positions=jnp.asarray(np.concatenate([positions, tail], axis=1), jnp.int32),
        mask=jnp.asarray(mask),
        truncated=jnp.asarray(np.arange(rows) >= rows // 2),
        rewards=jnp.asarray(rng.normal(size=(4, 8)), jnp.float32),
        correct=jnp.zeros((4, 8)),
    )
    return pending._replace(rollout=rollout, kept=jnp.ones(4, bool))


def test_a_critic_of_its_own_has_no_head_of_words():
    """Untied, its parameters hold none, and the values of a stream must not ask for one."""
    made, whole = ppo_plan(True, packing=True, samples=8), ppo_plan(True)
    untied = Qwen(dataclasses.replace(CONFIG, tie_embeddings=False))
    made = made._replace(learner=made.learner._replace(critic=untied))
    pending, state = sampled(made), start(made, True)
    rollout = pending.rollout
    text = (rollout.tokens, rollout.positions, rollout.mask, rollout.truncated)
    of_stream, of_rows = (score_text(m, state, Frozen(), *text) for m in (made, whole))
    np.testing.assert_allclose(of_stream.values, of_rows.values, atol=1e-5)
    np.testing.assert_allclose(of_stream.bootstrap, of_rows.bootstrap, atol=1e-5)


@pytest.mark.parametrize("separate", [True, False], ids=["separate critic", "shared head"])
def test_values_stand_before_their_tokens_and_the_bootstrap_after_the_last(separate):
    """Of finished rows the bootstrap is 0; of truncated ones the value after the last token, and
    not that before it."""
    made = ppo_plan(separate)
    pending, state = sampled(made), start(made, separate)
    rollout = pending.rollout
    text = (rollout.tokens, rollout.positions, rollout.mask, rollout.truncated)
    scored = score_text(made, state, Frozen(), *text)
    outputs = forward(
        made.learner, state.params, state.critic, rollout.tokens, rollout.positions, 3
    )
    np.testing.assert_allclose(
        scored.values, jnp.where(rollout.mask, outputs.values[:, :3], 0), atol=1e-5
    )
    np.testing.assert_array_equal(scored.bootstrap[:16], 0.0)
    np.testing.assert_allclose(scored.bootstrap[16:], outputs.values[16:, 3], atol=1e-5)
    assert jnp.max(jnp.abs(scored.bootstrap[16:] - scored.values[16:, 2])) > 1e-2


def test_the_critic_learns_from_returns_of_the_whole_reward():
    """Returns are of the shaped reward, the divergence included, and end at the last token."""
    made = ppo_plan(False, Shaping(divergence=ops.k1, kl_beta=0.1, missing_stop_penalty=0.25))
    pending, state = sampled(made), start(made, False)
    other = jax.tree.map(lambda leaf: leaf * 0.9, initial_params())
    batch, preview, _, _ = prepare(made, state, Frozen(reference=other), pending)
    shaped = preview.rollout
    total = jnp.sum(shaped.token_rewards, axis=1)
    np.testing.assert_allclose(total, shaped.rewards.reshape(-1), atol=1e-5)
    spent = 0.1 * jnp.sum(
        jnp.where(shaped.mask, shaped.old_logprobs - shaped.ref_logprobs, 0.0), axis=1
    )
    raw = pending.rollout.rewards.reshape(-1) - 0.25 * shaped.truncated
    np.testing.assert_allclose(total, raw - spent, atol=1e-4)
    assert jnp.max(jnp.abs(spent)) > 0.01
    advantages, returns = gae_plain(shaped)
    policy, critic = batch.signals
    np.testing.assert_allclose(critic.returns, returns, atol=1e-5)
    np.testing.assert_allclose(policy.advantages, whiten(advantages, shaped.mask), atol=1e-5)


def test_a_reward_model_scores_the_same_text_the_same_in_both_ways_to_run():
    """Its score after the last token is the reward; nothing is right or wrong, and the frozen
    model is read and never given away."""
    made = plan("grpo", SAMPLE | {"verdicts": False}, micro=16, rate=0.05, hyper={"beta": 0.0})
    frozen = Frozen(reward_model=headed_params())
    verify = model_verifier(Qwen(CONFIG), micro=16)

    def begun():
        return initial_state(initial_params(), made.learner, jax.random.key(1))

    scan, (metrics, preview) = fused(made, verify)(begun(), frozen, pool(), 2)
    hand, (other, shown) = staged(made, verify, lambda name: contextlib.nullcontext())(
        begun(), frozen, pool(), 2
    )
    np.testing.assert_array_equal(preview.rollout.tokens, shown.rollout.tokens)
    np.testing.assert_allclose(preview.rollout.rewards, shown.rollout.rewards, atol=1e-5)
    assert movement(initial_params(), scan.params) > 1e-3
    assert movement(scan.params, hand.params) < 1e-3 * movement(initial_params(), scan.params)
    assert metrics.keys() == other.keys()
    assert "solve_rate" not in metrics
    np.testing.assert_allclose(
        history(metrics, "reward/mean"), history(other, "reward/mean"), atol=1e-5
    )
    rollout = preview.rollout
    scored = forward(made.learner, headed_params(), {}, rollout.tokens, rollout.positions, 3).values
    lengths = jnp.sum(rollout.mask, axis=1, keepdims=True)
    last = jnp.take_along_axis(scored, lengths, axis=1)
    # At padding, where shorter rows end, the score is another.
    np.testing.assert_allclose(rollout.rewards.reshape(-1, 1), last, atol=1e-5)
    assert (lengths < 3).any()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(headed_params()))
