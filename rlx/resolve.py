"""What a configuration leaves open, settled on this machine: each `auto`, and the mesh."""

import jax

from model.config import read_config
from model.device import this_device
from model.errors import BadInput
from model.parameters import parameter_count
from rlx.derived import needs_critic, offline, old_logprobs, uses_lora
from rlx.lora import resolved_lora
from rlx.mesh import Sizes, choose, this_hardware
from rlx.policy import checkpoint_folder
from rlx.settings import Config, MeshSettings

SMALL_PARAMETERS = 1_000_000_000
"""Above it, whole steps under one jit would hold sampler and update in memory at once."""


def resolve(config: Config) -> Config:
    """The configuration with each `auto` replaced by what it comes to on this machine.

    Except `model.attention`: it depends on each network's shape (`attention`).
    """
    model, rollout, loop = config.model, config.rollout, config.loop
    if model.dtype == "auto":
        dtype = "float32" if this_device().platform == "cpu" else "bfloat16"
        model = model.model_copy(update={"dtype": dtype})
    adapted = {"lora": resolved_lora(config.lora)} if uses_lora(config) else {}
    if not offline(config):
        rollout = rollout.model_copy(update={"old_logprobs": old_logprobs(config)})
        if loop.mode == "auto":
            shape = read_config(checkpoint_folder(model.path))
            small = parameter_count(shape) <= SMALL_PARAMETERS and model.frozen_memory == "device"
            mode = "fused" if small and jax.process_count() == 1 else "staged"
            loop = loop.model_copy(update={"mode": mode})
        elif loop.mode == "fused" and jax.process_count() > 1:
            raise BadInput(
                "loop.mode: expected auto or staged on several hosts, since the verifier of a "
                "fused step is called by one process alone; came fused."
            )
    return config.model_copy(update={"model": model, "rollout": rollout, "loop": loop} | adapted)


def mesh_sizes(config: Config, *, training: bool = True) -> Sizes:
    """The mesh of a run on this machine's devices. Raises BadInput where there can be none."""
    paths = model_paths(config, training=training)
    shapes = [read_config(checkpoint_folder(path, setting)) for setting, path in paths.items()]
    return choose(config, shapes, parameter_count(shapes[0]), this_hardware(), training=training)


def model_paths(config: Config, *, training: bool = True) -> dict[str, str]:
    """Of all models that a mesh divides, by their settings, the policy first."""
    paths = {"model.path": config.model.path}
    if training and needs_critic(config) and config.critic.kind == "model" and config.critic.path:
        paths["critic.path"] = config.critic.path
    if config.reward.source == "model":
        paths["reward.model"] = config.reward.model
    return paths


def with_mesh(config: Config, sizes: Sizes) -> Config:
    """The configuration with these sizes written down."""
    return config.model_copy(update={"mesh": MeshSettings(**sizes._asdict())})
