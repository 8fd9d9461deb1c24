"""Settings reach the parts of a run: each is given another number than any other, and found."""

from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from toy import CONFIG, pool

from rlx import ops
from rlx.assemble import bound_terms, make_learner, make_memory, make_plan
from rlx.config import load_training
from rlx.corrections import token_mask
from rlx.policy import Policy
from rlx.resolve import resolve
from rlx.shaping import Shaping

TOKENIZER = SimpleNamespace(stop_ids=(1, 9), pad_id=3)
POLICY = Policy(Path(), CONFIG, TOKENIZER, None, jnp.dtype("float32"))


def configured(*settings):
    return resolve(load_training(None, settings))


def hyper(term):
    """What its functions are called with."""
    return {name: p.default for name, p in term.algorithm.hyper_parameters().items()}


def test_settings_reach_learner_plan_and_memory():
    config = configured(
        *("algorithm.name=grpo", "algorithm.clip_low=0.11", "algorithm.clip_high=0.33"),
        *("algorithm.beta=0.07", "algorithm.ddof=1", "algorithm.epsilon=1e-3"),
        *("batch.prompts=6", "batch.samples=4", "batch.minibatches=2", "batch.epochs=3"),
        *("batch.micro=4", "batch.packing=false", "model.router_aux=0.02"),
        *("sampling.temperature=0.7", "sampling.max_new_tokens=40", "sampling.slots=5"),
        *("reward.kl=k3", "reward.kl_beta=0.05", "reward.kl_target=2", "reward.kl_horizon=500"),
        *("reward.missing_stop_penalty=0.5", "reward.running=true", "reward.clip=3"),
        *("rollout.correction=token_mask", "rollout.correction_cap=3"),
        *("rollout.correction_floor=0.25", "rollout.overlong_filter=true"),
        *("rollout.overlong_buffer=12", "rollout.replay=7", "rollout.replay_max_age=9"),
        *("rollout.dynamic_sampling=true", "rollout.max_rounds=8", "rollout.retire_after=10"),
    )
    learner = make_learner(config, POLICY)
    plan = make_plan(config, POLICY, learner, {"answer": 1.0, "format": 0.2}, verdicts=True)
    memory = make_memory(config, plan, pool(6))

    (term,) = learner.terms
    values = {"ddof": 1, "epsilon": 1e-3, "clip_low": 0.11, "clip_high": 0.33, "beta": 0.07}
    assert (term.name, term.weight, hyper(term)) == ("grpo", 1.0, values)
    found = learner._asdict()
    expected = {"temperature": 0.7, "minibatches": 2, "epochs": 3, "micro": 4, "samples": 4}
    expected |= {"on_policy": False, "packing": False, "router_aux": 0.02}
    assert {name: found[name] for name in expected} == expected

    assert plan.learner is learner
    assert plan.shaping == Shaping(
        divergence=ops.k3,
        kl_target=2.0,
        kl_horizon=500.0,
        missing_stop_penalty=0.5,
        running=True,
        clip=3.0,
    )
    assert plan.correction.func is token_mask
    assert plan.correction.keywords == {"cap": 3.0, "floor": 0.25}
    assert (plan.overlong_filter, plan.replay_max_age, plan.old_logprobs) == (True, 9, "recompute")
    found = plan.sampling._asdict()
    expected = {"prompts": 6, "samples": 4, "slots": 5, "max_new_tokens": 40, "temperature": 0.7}
    expected |= {"overlong_buffer": 12, "dynamic": True, "max_rounds": 8, "retire_after": 10}
    expected |= {"components": ("answer", "format"), "component_weights": (1.0, 0.2)}
    expected |= {"stop_ids": (1, 9), "pad_id": 3, "verdicts": True}
    assert {name: found[name] for name in expected} == expected

    assert memory.kl_beta == pytest.approx(0.05)
    assert memory.solved.shape == (6,) and memory.replay.born.shape == (7,)


def test_without_them_each_part_is_off():
    config = configured("rollout.probe=4", "rollout.old_logprobs=sampler")
    plan = make_plan(config, POLICY, make_learner(config, POLICY), {}, verdicts=False)
    memory = make_memory(config, plan, pool(6))
    assert (plan.sampling.probe, plan.sampling.max_rounds, plan.sampling.dynamic) == (4, 1, False)
    assert (plan.shaping, plan.correction, plan.old_logprobs) == (Shaping(), None, "sampler")
    assert memory.solved is None and memory.replay is None


@pytest.mark.parametrize(("kind", "weight"), [("head", 0.3), ("model", 1.0)])
def test_the_critics_settings_reach_its_loss(kind, weight):
    """A critic of its own has an optimizer of its own, and no weight."""
    settings = [f"critic.kind={kind}", "critic.value_clip=0.4", "algorithm.lam=0.8"]
    settings += ["critic.coefficient=0.3"] if kind == "head" else []
    settings += ["algorithm.name=ppo", "algorithm.gamma=0.9", "algorithm.clip_low=0.11"]
    policy, critic = bound_terms(configured(*settings))
    of_returns = {"gamma": 0.9, "lam": 0.8}
    assert hyper(policy) == of_returns | {"clip_low": 0.11, "clip_high": 0.2}
    assert (policy.weight, critic.name, critic.weight) == (1.0, "value", weight)
    assert hyper(critic) == of_returns | {"value_clip": 0.4}


def test_a_budget_is_the_longest_completion():
    """Without it, losses would depend on the width of the padding."""
    (term,) = bound_terms(configured("algorithm.name=dr_grpo", "sampling.max_new_tokens=48"))
    assert hyper(term)["budget"] == 48
