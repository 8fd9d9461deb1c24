"""Loss and gradients of the on-line algorithms against TRL's own losses, and advantages against
those that TRL's trainers compute, on the same model, tokens and rewards."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference runs in torch")
pytest.importorskip("trl", reason="TRL's losses are the reference")

from datasets import Dataset  # noqa: E402
from toy import initial_params, learner  # noqa: E402
from toy_torch import (  # noqa: E402
    ROWS,
    WIDTH,
    as_torch,
    assert_gradients,
    assert_loss,
    moved_rows,
    named,
    noisy_params,
    options,
    split,
    tokenizer,
    torch_gradients,
    torch_policy,
    weighted_gradients,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from trl.experimental.gmpo import GMPOTrainer  # noqa: E402

from rlx.algorithms import ALGORITHMS, TERMS  # noqa: E402
from rlx.ops import k1, sequence_mean  # noqa: E402
from rlx.scoring import score_rows  # noqa: E402
from rlx.shaping import Shaping, shape  # noqa: E402
from rlx.state import start_memory  # noqa: E402
from rlx.types import Rollout, Signal  # noqa: E402

TEMPERATURE = 0.7

OURS = {
    "grpo": ALGORITHMS["grpo"],
    "grpo_without_kl": ALGORITHMS["grpo"].bind(beta=0.0),
    "dr_grpo": ALGORITHMS["dr_grpo"],
    "dapo": ALGORITHMS["dapo"],
    "gspo": ALGORITHMS["gspo"],
    "gspo_token": ALGORITHMS["gspo_token"],
    "cispo": ALGORITHMS["cispo"].bind(cap=1.2),
    "sapo": ALGORITHMS["sapo"],
    "gmpo": ALGORITHMS["gmpo"],
    "rloo": ALGORITHMS["rloo"],
    "ppo": ALGORITHMS["ppo"],
    "ppo_dual_clip": ALGORITHMS["ppo_dual_clip"].bind(dual_clip=1.3),
    "reinforce_pp": ALGORITHMS["reinforce_pp"],
    "kl_k3": TERMS["kl_k3"],
    "kl_k3_of_rows": TERMS["kl_k3"]._replace(weights=sequence_mean),
    "kl_r_k3": TERMS["kl_r_k3"],
    "entropy": TERMS["entropy"],
}
PER_TOKEN = {"ppo", "ppo_dual_clip", "reinforce_pp"}
"""Their advantages differ within a row. TRL has no PPO any more and no REINFORCE++; its loss takes
such advantages all the same, and `bnpo` is the token mean of the clipped surrogate."""

SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
WIDE = {"loss_type": "dapo", "epsilon_high": 0.28}

# Our terms with their weights, and the settings that make TRL say the same.
CASES = {
    "grpo": ({"grpo": 1}, {"loss_type": "grpo", "beta": 0.04}),
    "grpo without KL": ({"grpo_without_kl": 1}, {"loss_type": "grpo"}),
    "dr_grpo": ({"dr_grpo": 1}, {"loss_type": "dr_grpo"}),
    "dapo": ({"dapo": 1}, WIDE),
    "dapo with k3": ({"dapo": 1, "kl_k3": 0.04}, WIDE | {"beta": 0.04}),
    "dapo with r k3": (
        {"dapo": 1, "kl_r_k3": 0.04},
        WIDE | {"beta": 0.04, "use_bias_correction_kl": True},
    ),
    "dapo with entropy": ({"dapo": 1, "entropy": 0.05}, WIDE | {"entropy_coef": 0.05}),
    "gspo": ({"gspo": 1}, SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    # With one advantage a row its value and gradient are GSPO's.
    "gspo_token": ({"gspo_token": 1}, SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "gspo with k3": (
        {"gspo": 1, "kl_k3_of_rows": 0.04},
        SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "beta": 0.04},
    ),
    # TRL's `epsilon_high` is the cap itself.
    "cispo": ({"cispo": 1}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    "cispo with k3": (
        {"cispo": 1, "kl_k3": 0.04},
        {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.04},
    ),
    "sapo": ({"sapo": 1}, {"loss_type": "sapo"}),
    # In log space, where the other losses of this trainer have a clip of the ratio.
    "gmpo": ({"gmpo": 1}, {"epsilon_low": 0.4, "epsilon_high": 0.4}),
    "rloo": ({"rloo": 1}, {}),
    "ppo": ({"ppo": 1}, {"loss_type": "bnpo"}),
    # TRL's two-sided clip: `delta` bounds the ratio where the advantage is negative.
    "ppo_dual_clip": ({"ppo_dual_clip": 1}, {"loss_type": "bnpo", "delta": 1.3}),
    "reinforce_pp": ({"reinforce_pp": 1}, {"loss_type": "bnpo"}),
}
DEFAULTS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "entropy_coef": 0.0,
    # By default TRL multiplies k3 by the ratio: `kl_r_k3`, not the term of GRPO's paper.
    "use_bias_correction_kl": False,
    "delta": None,
}
OF_ARGUMENTS = ("use_bias_correction_kl", "delta")


def online(folder, width=WIDTH, **changes):
    sampling = {"num_generations": 2, "max_completion_length": width, "temperature": TEMPERATURE}
    return options(folder, **sampling, **changes)


def reward(completion_ids, **_) -> list[float]:
    return [sum(ids) % 7 / 2 for ids in completion_ids]


def make(kind, arguments, model):
    return kind(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w9", "w3", "w4 w4 w8", "w5"]}),
        processing_class=tokenizer(),
    )


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Real trainers on the toy policy; only their losses are called."""
    folder = tmp_path_factory.mktemp("trl")
    model = torch_policy(initial_params())
    # The bonus is switched on for good by a coefficient at the start.
    group = make(GRPOTrainer, GRPOConfig(**online(folder, entropy_coef=1.0)), model)
    group.current_gradient_accumulation_steps = 1
    # A reference model would be fetched by name; this loss reads none.
    alone = make(RLOOTrainer, RLOOConfig(**online(folder, beta=0.0)), model)
    model.train()
    return {"group": group, "rloo": alone}


@pytest.fixture(scope="module")
def rows():
    """With an advantage a row, and one a token for the algorithms that have those."""
    made = moved_rows(TEMPERATURE)
    per_token = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, WIDTH)), jnp.float32)
    by_row = made.signals[0]
    by_token = Signal(per_token, per_token, made.mask)
    return made._replace(signals=tuple(by_token if n in PER_TOKEN else by_row for n in OURS))


@pytest.fixture(scope="module")
def compute():
    return weighted_gradients(OURS, micro=2, temperature=TEMPERATURE)


def loss_of_trl(trainers, name, rows, advantages, settings):
    """What TRL does otherwise, and what is set here so that both say the same: its `grpo` counts
    rows without a token (there is none here) and scales by the accumulation steps (one here);
    `dapo` and `cispo` divide by `num_items_in_batch`, the tokens of all that was generated, which
    here is this one batch; its log-ratios are not clamped (none is far); its `gspo` is a level of
    the ratio under any loss, with the token clip's .2 unless the clip is set too; it divides
    `dr_grpo` by `max_completion_length`, which here is the width of the rows."""
    trainer = trainers["rloo" if name == "rloo" else "group"]
    for key, value in (DEFAULTS | settings).items():
        setattr(trainer.args if key in OF_ARGUMENTS else trainer, key, value)
    prompt_ids, prompt_mask, completion_ids, completion_mask = split(rows)
    old = as_torch(rows.old_logprobs)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": as_torch(advantages).squeeze(1),
        "old_per_token_logps": old,
        "old_logps": (old * completion_mask).sum(1),
        "ref_per_token_logps": as_torch(rows.ref_logprobs),
        "num_items_in_batch": completion_mask.sum(),
    }
    trainer.model.zero_grad()
    if name == "gmpo":
        loss = GMPOTrainer._compute_loss(trainer, trainer.model, inputs)
    else:
        loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), torch_gradients(trainer.model)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_trls(trainers, rows, compute, case):
    weights, settings = CASES[case]
    name = next(iter(weights))
    advantages = rows.signals[list(OURS).index(name)].advantages
    (grads, _), loss, metrics = compute(weights, (initial_params(), {}), rows)
    clips = {key for key in ("clip/low", "clip/high", "clip/dual") if f"{name}/{key}" in metrics}
    # A weight of CISPO has a cap and no floor.
    for key in clips - ({"clip/low"} if name == "cispo" else set()):
        assert metrics[f"{name}/{key}"].total > 0, key
    expected_loss, expected = loss_of_trl(trainers, name, rows, advantages, settings)
    assert_loss(loss, expected_loss)
    assert_gradients(named(grads), expected)


def rollout_of_trl(kind, arguments, folder):
    """One step of TRL's training as it stands: what it sampled and what it gave its loss, by group.

    The reference is the model in `folder`; the policy has moved away from it.
    """
    seen = []

    class Watched(kind):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = make(Watched, arguments, str(folder))
    state = {n: torch.from_numpy(v.copy()) for n, v in named(noisy_params(1)).items()}
    trainer.model.load_state_dict(state, strict=False)
    trainer.train()
    # TRL shuffles what it sampled; a group's rows are those of one prompt.
    order = np.lexsort(seen[0]["prompt_ids"].numpy().T)
    return {n: x[torch.from_numpy(order)] if x.ndim else x for n, x in seen[0].items()}


def as_rollout(given) -> Rollout:
    """The same text with our models' log-probabilities: the policy's and the reference's."""
    mask = jnp.asarray(given["completion_mask"].numpy() > 0)
    real = torch.cat([given["prompt_mask"], given["completion_mask"]], 1).numpy() > 0
    tokens = torch.cat([given["prompt_ids"], given["completion_ids"]], 1).numpy()
    positions = jnp.asarray(np.where(real, np.cumsum(real, axis=1) - 1, -1), jnp.int32)
    tokens, width = jnp.asarray(tokens, jnp.int32), mask.shape[1]
    scorer = learner(micro=ROWS, temperature=TEMPERATURE)
    old, ref = (
        score_rows(scorer, params, {}, tokens, positions, width).logprobs
        for params in (noisy_params(1), initial_params())
    )
    ids = [row[keep].tolist() for row, keep in zip(tokens[:, -width:], mask, strict=True)]
    scores = jnp.asarray(reward(ids), jnp.float32).reshape(-1, 2)
    zeros = jnp.zeros(mask.shape)
    return Rollout(
        tokens=tokens,
        positions=positions,
        mask=mask,
        sampler_logprobs=old,
        old_logprobs=old,
        ref_logprobs=ref,
        values=zeros,
        bootstrap=zeros[:, 0],
        rewards=scores,
        token_rewards=zeros,
        correct=scores,
        components=scores[..., None],
        parts=scores[..., None],
        token_scores=zeros,
        truncated=zeros[:, 0] > 0,
        rows=jnp.arange(len(scores)),
    )


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    torch_policy(initial_params()).save_pretrained(folder)
    return folder


STEP = {"max_steps": 1, "learning_rate": 0.0, "model_init_kwargs": {"dtype": "float32"}}


def test_rloo_has_trls_advantages_with_kl_in_the_reward(reference_folder, tmp_path):
    """TRL takes beta times the sum over a row of k1 off its reward, then the mean of the others.
    The penalty put into the loss instead, as in GRPO, would leave these advantages at the bare
    rewards'."""
    arguments = RLOOConfig(**online(tmp_path, width=12, beta=0.3, **STEP))
    given = rollout_of_trl(RLOOTrainer, arguments, reference_folder)
    rollout, expected = as_rollout(given), given["advantages"].numpy()
    assert not rollout.mask.all(), "padding must be left out of the sum"
    shaping = Shaping(divergence=k1, kl_beta=0.3)
    shaped, _, _ = shape(shaping, start_memory(0.3), rollout, jnp.ones(ROWS, bool))
    advantages, _ = ALGORITHMS["rloo"].advantages(shaped)
    np.testing.assert_allclose(advantages[:, 0], expected, rtol=1e-5, atol=1e-5)
    bare, _ = ALGORITHMS["rloo"].advantages(rollout)
    assert np.abs(bare[:, 0] - expected).max() > 0.01
    logprobs = jnp.sum(jnp.where(rollout.mask, rollout.old_logprobs, 0), axis=1)
    np.testing.assert_allclose(logprobs, given["old_logps"].numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "algorithm"),
    [("group", ALGORITHMS["grpo"].bind(ddof=1)), ("none", ALGORITHMS["dr_grpo"])],
)
def test_group_advantages_equal_trls(reference_folder, tmp_path, scale, algorithm):
    """TRL's deviation has n - 1 in it: our default, DeepSeekMath's n, would give advantages 1.41
    times as large in pairs. Dr.GRPO's needs `scale_rewards: none` beside its loss."""
    arguments = GRPOConfig(**online(tmp_path, beta=0.0, scale_rewards=scale, **STEP))
    given = rollout_of_trl(GRPOTrainer, arguments, reference_folder)
    advantages, _ = algorithm.advantages(as_rollout(given))
    expected = given["advantages"].numpy()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(advantages[:, 0], expected, rtol=1e-5, atol=1e-6)
