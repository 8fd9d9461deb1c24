"""Models beside the policy that score its text: a reward model, and a critic of its own."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from model.config import ModelConfig, read_config
from model.errors import BadInput
from model.heads import with_value_head
from model.load import load_params
from model.lora import merged
from model.parameters import parameter_axes
from model.qwen import Qwen
from model.score_head import is_scorer, load_scorer
from model.tokenizer import load_tokenizer
from rlx import assemble
from rlx.derived import needs_critic
from rlx.frozen import freeze
from rlx.mesh import placed
from rlx.policy import Policy, checkpoint_folder
from rlx.settings import Config


class RewardModel(NamedTuple):
    """A frozen model whose score is the reward."""

    model: Qwen
    params: PyTree
    """With a `value_head`, as `freeze` keeps them."""


class Critic(NamedTuple):
    """A model of its own that foresees rewards."""

    folder: Path
    """What it began as, with the tokenizer's files."""
    config: ModelConfig
    params: PyTree
    """With a `value_head`, without an `lm_head`."""


def load_critic(config: Config, policy: Policy) -> Critic | None:
    """The separate critic, None where there is none or a head on the policy's trunk.

    It begins as the policy, or as the policy or reward model of `critic.path`.
    """
    if not needs_critic(config) or config.critic.kind == "head":
        return None
    if not config.critic.path:
        trunk = {name: leaf for name, leaf in merged(policy.whole).items() if name != "lm_head"}
        # All of it is trained, whatever the base of the policy's adapters lies in.
        trunk = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trunk)
        return Critic(policy.folder, policy.config, with_value_head(policy.config, trunk))
    folder = checkpoint_folder(config.critic.path, "critic.path")
    check_same_tokens("critic.path", folder, policy)
    shape = dataclasses.replace(read_config(folder), num_tokens=policy.config.num_tokens)
    if is_scorer(folder):
        params = load_scorer(folder, shape)
    else:
        params = with_value_head(shape, load_params(folder, shape))
        params.pop("lm_head", None)
    return Critic(folder, shape, placed(parameter_axes(shape), params))


def load_reward_model(config: Config, policy: Policy) -> RewardModel | None:
    """What `reward.model` names; None where a verifier scores."""
    if config.reward.source == "verifier":
        return None
    folder = checkpoint_folder(config.reward.model, "reward.model")
    check_same_tokens("reward.model", folder, policy)
    shape = read_config(folder)
    params = placed(parameter_axes(shape), load_scorer(folder, shape))
    model = assemble.network(config, shape, policy.dtype)
    return RewardModel(model, freeze(config, params, policy.dtype))


def check_same_tokens(setting: str, folder: Path, policy: Policy) -> None:
    """Raises BadInput where a second model would read the policy's tokens as others."""
    other = load_tokenizer(folder).inner.get_vocab()
    if other != policy.tokenizer.inner.get_vocab():
        raise BadInput(
            f"{setting}: {folder} has another vocabulary than the policy's {policy.folder}; it "
            "scores the policy's tokens as they are."
        )
