"""Three steps of grpo against a training loop in plain torch, from one start on fixed text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference runs in torch")

from toy import batch, initial_params, plan  # noqa: E402
from toy_torch import named, split, torch_policy  # noqa: E402

from rlx.optimizer import make_optimizer, schedule  # noqa: E402
from rlx.prepare import Frozen, prepare  # noqa: E402
from rlx.rounds import begin  # noqa: E402
from rlx.settings import OptimizerSettings  # noqa: E402
from rlx.state import initial_state  # noqa: E402
from rlx.update import update  # noqa: E402

PROMPTS, SAMPLES, WIDTH, STEPS, EPOCHS = 2, 4, 5, 3, 2
CLIP, BETA, CLIP_NORM, DECAY = 0.2, 0.04, 1.0, 0.1
RATES = {"sgd": 0.2, "adamw": 0.02}
PLAN = plan(
    "grpo",
    {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": WIDTH},
    epochs=EPOCHS,
    on_policy=False,
)
# One compilation for both rules: it does not look at the optimizer.
fill = jax.jit(prepare, static_argnums=0)


def step_data(number):
    """What was sampled in one step: texts and rewards."""
    rows = batch(PROMPTS * SAMPLES, WIDTH, seed=number)
    rewards = np.random.default_rng(number).integers(0, 3, (PROMPTS, SAMPLES)).astype(np.float32)
    rewards[:, 0] = [1.0, 3.0]  # no group of equal rewards
    return rows, rewards


def our_loop(rule):
    """The stages that follow sampling, with two epochs a batch so that the ratio leaves 1."""
    settings = OptimizerSettings(
        name=rule,
        learning_rate=RATES[rule],
        eps=1e-3,
        weight_decay=DECAY if rule == "adamw" else 0.0,
        clip_norm=CLIP_NORM,
    )
    rate = schedule(settings, STEPS * EPOCHS)
    learner = PLAN.learner._replace(optimizer=make_optimizer(settings, rate), schedule=rate)
    state = initial_state(initial_params(), learner, jax.random.key(0))
    learn = jax.jit(update, static_argnums=0)
    for number in range(STEPS):
        rows, rewards = step_data(number)
        pending = begin(PLAN.sampling, 3, jnp.int32(0))
        pending = pending._replace(
            rollout=pending.rollout._replace(
                tokens=rows.tokens,
                positions=rows.positions,
                mask=rows.mask,
                rewards=jnp.asarray(rewards),
            ),
            kept=jnp.ones(PROMPTS, bool),
        )
        ready, _, _, _ = fill(PLAN, state, Frozen(initial_params()), pending)
        state, _ = learn(learner, state, ready, jax.random.key(number))
    assert state.updates == STEPS * EPOCHS
    return named(state.params)


def logprobs_of(model, rows):
    prompt, prompt_mask, completion, mask = split(rows)
    ids = torch.cat([prompt, completion], dim=1)
    attention = torch.cat([prompt_mask, mask], dim=1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -WIDTH - 1 : -1]
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, completion[..., None])[..., 0]
    return chosen, mask.float()


def torch_loop(rule):
    model, frozen = torch_policy(initial_params()), torch_policy(initial_params())
    if rule == "sgd":
        steps = torch.optim.SGD(model.parameters(), lr=RATES[rule])
    else:
        matrices = [p for n, p in model.named_parameters() if p.dim() == 2]
        others = [p for n, p in model.named_parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others}]
        steps = torch.optim.AdamW(groups, lr=RATES[rule], eps=1e-3, weight_decay=0.0)
    for number in range(STEPS):
        rows, rewards = step_data(number)
        spread = rewards.std(axis=1, keepdims=True)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)
        advantages = torch.from_numpy(advantages.reshape(-1, 1))
        with torch.no_grad():
            old, mask = logprobs_of(model, rows)
            reference, _ = logprobs_of(frozen, rows)
        for _ in range(EPOCHS):
            current, _ = logprobs_of(model, rows)
            ratio = torch.exp(current - old)
            clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
            token = -torch.minimum(ratio * advantages, clipped * advantages)
            token = token + BETA * (torch.exp(reference - current) - (reference - current) - 1)
            loss = ((token * mask).sum(dim=1) / mask.sum(dim=1)).mean()
            steps.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            steps.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rule", RATES)
def test_three_steps_end_where_torch_ends(rule):
    """A wrong decay mask, epsilon, clip or old log-probability each shows as more than 1e-3 of
    the way."""
    start, ours, theirs = named(initial_params()), our_loop(rule), torch_loop(rule)
    for name, value in ours.items():
        moved = np.abs(theirs[name] - start[name]).max()
        assert moved > 1e-3, name
        gap = np.abs(value - theirs[name]).max()
        assert gap <= 1e-3 * moved, (name, gap, moved)
