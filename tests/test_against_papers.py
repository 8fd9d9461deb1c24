"""Loss, gradients and advantages of what TRL lacks (PPO with its critic, GSPO-token, REINFORCE++)
and of the terms, against the papers' formulas in plain torch and NumPy, a loop where that is
clearer. Nothing of rlx computes an expected number here."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference runs in torch")

from toy import CONFIG, initial_params, learner  # noqa: E402
from toy_torch import (  # noqa: E402
    ROWS,
    WIDTH,
    TorchOutputs,
    as_torch,
    assert_gradients,
    assert_loss,
    moved_rows,
    named,
    noisy_params,
    weighted_gradients,
)

from model.qwen import Qwen  # noqa: E402
from rlx.algorithms import ALGORITHMS, TERMS  # noqa: E402
from rlx.ops import k1  # noqa: E402
from rlx.scoring import score_rows  # noqa: E402
from rlx.shaping import Shaping, shape  # noqa: E402
from rlx.state import start_memory  # noqa: E402
from rlx.types import Rollout, Signal  # noqa: E402

TEMPERATURE = 0.7
GAMMA, LAM, VALUE_CLIP, KL_BETA = 0.9, 0.8, 0.1, 0.05

OURS = {
    "ppo": ALGORITHMS["ppo"].bind(gamma=GAMMA, lam=LAM),
    "value": TERMS["value"].bind(value_clip=VALUE_CLIP),
    "ppo_dual_clip": ALGORITHMS["ppo_dual_clip"].bind(gamma=GAMMA, lam=LAM, dual_clip=1.3),
    "gspo_token": ALGORITHMS["gspo_token"],
    "gmpo": ALGORITHMS["gmpo"],
    "reinforce_pp": ALGORITHMS["reinforce_pp"].bind(gamma=GAMMA),
    "reinforce_pp_baseline": ALGORITHMS["reinforce_pp_baseline"].bind(gamma=GAMMA),
    "kl_k2": TERMS["kl_k2"],
    "kl_k3": TERMS["kl_k3"],
    "kl_r_k3": TERMS["kl_r_k3"],
    "entropy": TERMS["entropy"],
}


def head(seed: int):
    kernel = np.random.default_rng(seed).normal(0, 0.3, (CONFIG.hidden_size, 1))
    return {"value_head": {"kernel": jnp.asarray(kernel, jnp.float32)}}


PARAMS = initial_params() | head(3)


@pytest.fixture(scope="module")
def rollout():
    """Four groups of two, ragged, some rows cut by the limit; the reference and the critic that
    saw them are other models. KL stands in the reward, whose rest falls on the last token."""
    made = moved_rows(TEMPERATURE)
    rng = np.random.default_rng(4)
    mask = np.asarray(made.mask)
    truncated = mask.sum(1) == WIDTH
    assert 0 < truncated.sum() < ROWS
    after = rng.normal(size=ROWS)
    scores = rng.normal(size=(ROWS // 2, 2))
    bare = Rollout(
        tokens=made.tokens,
        positions=made.positions,
        mask=made.mask,
        sampler_logprobs=made.old_logprobs,
        old_logprobs=made.old_logprobs,
        ref_logprobs=made.ref_logprobs,
        values=critic_values(made) + jnp.asarray(rng.uniform(-0.3, 0.3, mask.shape), jnp.float32),
        bootstrap=jnp.asarray(np.where(truncated, after, 0), jnp.float32),
        rewards=jnp.asarray(scores, jnp.float32),
        token_rewards=jnp.zeros(mask.shape),
        correct=jnp.asarray(scores > 0, jnp.float32),
        components=jnp.asarray(scores[..., None], jnp.float32),
        parts=jnp.asarray(scores[..., None], jnp.float32),
        token_scores=jnp.zeros(mask.shape),
        truncated=jnp.asarray(truncated),
        rows=jnp.arange(ROWS // 2),
    )
    shaping = Shaping(divergence=k1, kl_beta=KL_BETA)
    shaped, _, _ = shape(shaping, start_memory(KL_BETA), bare, jnp.ones(ROWS, bool))
    return bare, shaped


def critic_values(rows):
    scorer = learner(micro=ROWS)
    outputs = score_rows(scorer, PARAMS, {}, rows.tokens, rows.positions, WIDTH)
    return outputs.values[:, :-1]


def paper_rewards(bare) -> np.ndarray:
    """r_t = -beta (log pi_old - log pi_ref), the verifier's reward added at the last token."""
    old, ref = np.float64(bare.old_logprobs), np.float64(bare.ref_logprobs)
    rewards = np.zeros((ROWS, WIDTH))
    for row, length in enumerate(np.asarray(bare.mask).sum(1)):
        for t in range(length):
            rewards[row, t] = -KL_BETA * (old[row, t] - ref[row, t])
        rewards[row, length - 1] += np.float64(bare.rewards).reshape(-1)[row]
    return rewards


def paper_whitened(x, mask):
    return np.where(mask, (x - x[mask].mean()) / np.sqrt(x[mask].var(ddof=1) + 1e-8), 0)


def paper_gae(rewards, bare):
    """Backwards, one token at a time. 1506.02438 (eq. 16)"""
    values, advantages = np.float64(bare.values), np.zeros((ROWS, WIDTH))
    for row, length in enumerate(np.asarray(bare.mask).sum(1)):
        following, later = float(bare.bootstrap[row]), 0.0
        for t in reversed(range(length)):
            delta = rewards[row, t] + GAMMA * following - values[row, t]
            advantages[row, t] = later = delta + GAMMA * LAM * later
            following = values[row, t]
    return advantages, advantages + values


def paper_returns(rewards, mask):
    returns = np.zeros((ROWS, WIDTH))
    for row, length in enumerate(mask.sum(1)):
        for t in range(length):
            returns[row, t] = sum(GAMMA ** (k - t) * rewards[row, k] for k in range(t, length))
    return returns


@pytest.fixture(scope="module")
def estimates(rollout):
    """Name -> advantages and returns by the papers."""
    bare, _ = rollout
    mask, rewards = np.asarray(bare.mask), paper_rewards(bare)
    advantages, values = paper_gae(rewards, bare)
    plain = paper_returns(rewards, mask)
    totals, shifted = rewards.sum(1).reshape(-1, 2), rewards.copy()
    for row, length in enumerate(mask.sum(1)):
        shifted[row, length - 1] -= totals[row // 2].mean()
    gae = paper_whitened(advantages, mask), np.where(mask, values, 0)
    return {
        "ppo": gae,
        "ppo_dual_clip": gae,
        "value": gae,
        "reinforce_pp": (paper_whitened(plain, mask), plain),
        "reinforce_pp_baseline": (paper_whitened(paper_returns(shifted, mask), mask), plain),
    }


@pytest.fixture(scope="module")
def rows(rollout, estimates):
    bare, _ = rollout
    made, rng = moved_rows(TEMPERATURE), np.random.default_rng(8)
    free = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    given = {n: tuple(jnp.asarray(x, jnp.float32) for x in pair) for n, pair in estimates.items()}
    given["gmpo"] = made.signals[0][:2]
    return made._replace(
        values=bare.values,
        signals=tuple(Signal(*given.get(name, (free, free)), made.mask) for name in OURS),
    )


@pytest.fixture(scope="module")
def compute():
    return weighted_gradients(OURS, micro=2, temperature=TEMPERATURE)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "reinforce_pp_baseline"])
def test_advantages_are_the_papers(rollout, estimates, name):
    """PPO's with the critic's value after a row that the limit cut. REINFORCE++'s baseline is the
    group's mean of the whole reward, KL and all."""
    bare, shaped = rollout
    found = OURS[name].advantages(shaped)
    for ours, expected in zip(found, estimates[name], strict=True):
        np.testing.assert_allclose(np.where(bare.mask, ours, 0), expected, rtol=1e-4, atol=2e-6)


def token_mean(values, rows):
    return sum(values[row, t] for row, t in np.argwhere(rows.mask)) / int(rows.mask.sum())


def clipped(policy, rows, name, low=0.2, high=0.2, dual=None):
    """min(r A, clip(r) A) token by token; where A < 0 no less than `dual` A (1912.09729, eq. 5)."""
    advantages = as_torch(rows.signals[list(OURS).index(name)].advantages)
    ratio = (policy.logprobs - as_torch(rows.old_logprobs)).exp()
    total = torch.zeros(ROWS, WIDTH)
    for row, t in np.argwhere(rows.mask):
        r, a = ratio[row, t], advantages[row, t]
        objective = torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
        if dual is not None and a < 0:
            objective = torch.maximum(objective, dual * a)
        total[row, t] = objective
    return -token_mean(total, rows)


def value_loss(policy, rows):
    """1/2 max((V - R)^2, (clip(V, V_old +- c) - R)^2), mean over tokens."""
    returns = as_torch(rows.signals[list(OURS).index("value")].returns)
    old, now = as_torch(rows.values), policy.values[:, :-1]
    near = torch.minimum(torch.maximum(now, old - VALUE_CLIP), old + VALUE_CLIP)
    return token_mean(torch.maximum((now - returns) ** 2, (near - returns) ** 2) / 2, rows)


def gspo_token(policy, rows, low=3e-4, high=4e-4):
    """s_t = sg[s] pi_t / sg[pi_t], clipped token by token, averaged over each row. 2507.18071
    (eq. 13, 14)"""
    advantages = as_torch(rows.signals[list(OURS).index("gspo_token")].advantages)
    losses = []
    for row, length in enumerate(np.asarray(rows.mask).sum(1)):
        now, old = policy.logprobs[row, :length], as_torch(rows.old_logprobs)[row, :length]
        sequence = ((now - old).sum() / int(length)).exp().detach()
        ratio = sequence * now.exp() / now.exp().detach()
        a = advantages[row, :length]
        losses.append(-torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a).mean())
    return sum(losses) / ROWS


def gmpo(policy, rows, clip=0.4):
    """A times the geometric mean of ratios, each clipped where that lowers the objective: those of
    a good answer from above, at e^clip, of a bad one from below. 2507.20673 (eq. 4)"""
    advantages = as_torch(rows.signals[list(OURS).index("gmpo")].advantages)
    losses = []
    for row, length in enumerate(np.asarray(rows.mask).sum(1)):
        product = 1.0
        for t in range(length):
            ratio = (policy.logprobs[row, t] - as_torch(rows.old_logprobs)[row, t]).exp()
            good = advantages[row, 0] > 0
            product *= ratio.clamp(max=np.exp(clip)) if good else ratio.clamp(min=np.exp(-clip))
        losses.append(-advantages[row, 0] * product ** (1 / int(length)))
    return sum(losses) / ROWS


def divergence(policy, rows, estimator):
    """Of x = pi_ref / pi: (log x)^2 / 2, x - log x - 1, and that times pi / pi_old."""
    x = (as_torch(rows.ref_logprobs) - policy.logprobs).exp()
    ratio = (policy.logprobs - as_torch(rows.old_logprobs)).exp()
    k3 = x - x.log() - 1
    return token_mean({"k2": x.log() ** 2 / 2, "k3": k3, "r_k3": ratio * k3}[estimator], rows)


# Our terms with their weights, and the papers' formula.
CASES = {
    "ppo": ({"ppo": 1}, lambda p, r: clipped(p, r, "ppo")),
    "ppo and its critic": (
        {"ppo": 1, "value": 0.1},
        lambda p, r: clipped(p, r, "ppo") + 0.1 * value_loss(p, r),
    ),
    "ppo_dual_clip": ({"ppo_dual_clip": 1}, lambda p, r: clipped(p, r, "ppo_dual_clip", dual=1.3)),
    "gspo_token": ({"gspo_token": 1}, gspo_token),
    "gmpo": ({"gmpo": 1}, gmpo),
    "reinforce_pp": ({"reinforce_pp": 1}, lambda p, r: clipped(p, r, "reinforce_pp")),
    "reinforce_pp_baseline": (
        {"reinforce_pp_baseline": 1},
        lambda p, r: clipped(p, r, "reinforce_pp_baseline"),
    ),
    "kl_k2": ({"kl_k2": 1}, lambda p, r: divergence(p, r, "k2")),
    "kl_k3": ({"kl_k3": 1}, lambda p, r: divergence(p, r, "k3")),
    "kl_r_k3": ({"kl_r_k3": 1}, lambda p, r: divergence(p, r, "r_k3")),
    "entropy": ({"entropy": 1}, lambda p, r: -token_mean(p.entropy, r)),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_papers(rows, compute, case):
    weights, formula = CASES[case]
    (grads, _), loss, metrics = compute(weights, (PARAMS, {}), rows)
    policy = TorchOutputs(rows, PARAMS, TEMPERATURE)
    expected = formula(policy, rows)
    assert_gradients(named(grads), policy.gradients(expected))
    assert_loss(loss, expected.item())
    name = next(iter(weights))
    for key in ("clip/low", "clip/high", "clip/dual"):
        metric = metrics.get(key if name == "ppo" else f"{name}/{key}")
        assert metric is None or metric.total > 0, key
    kernel = np.asarray(grads["value_head"]["kernel"])
    if "value" in weights:
        assert 0 < metrics["value/clip"].total < rows.mask.sum()
        assert_gradients({"head": kernel}, {"head": policy.kernel.grad.numpy()})
    else:
        assert np.all(kernel == 0)


def test_a_critic_of_its_own_learns_the_same_loss(rows):
    """The critic's trunk and head take the value loss alone, the policy the surrogate alone. One
    trunk for both would mix the two gradients."""
    terms = {"ppo": OURS["ppo"], "value": OURS["value"]}
    signals = tuple(rows.signals[list(OURS).index(name)] for name in terms)
    critic_params = noisy_params(2) | head(7)
    apart = weighted_gradients(terms, micro=2, temperature=TEMPERATURE, critic=Qwen(CONFIG))
    # Temperature has no part in a value.
    critic, policy = TorchOutputs(rows, critic_params), TorchOutputs(rows, PARAMS, TEMPERATURE)
    weights = {"ppo": 1, "value": 1}
    trained = (initial_params(), critic_params)
    (grads, critic_grads), loss, _ = apart(weights, trained, rows._replace(signals=signals))
    surrogate, error = clipped(policy, rows, "ppo"), value_loss(critic, rows)
    assert_loss(loss, (surrogate + error).item())
    assert_gradients(named(grads), policy.gradients(surrogate))
    assert_gradients(named(critic_grads), critic.gradients(error))
    kernel = np.asarray(critic_grads["value_head"]["kernel"])
    assert_gradients({"head": kernel}, {"head": critic.kernel.grad.numpy()})
