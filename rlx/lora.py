"""From the settings to a frozen base and the adapters that are trained in its place."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Key, PyTree

from model.config import ModelConfig
from model.device import this_device
from model.lora import initial, scaled
from model.parameters import cast
from model.peft_format import load_adapters
from rlx.settings import Config, LoraSettings


class Lora(NamedTuple):
    """A policy's adapters, as they began."""

    adapters: PyTree
    alpha: float


def resolved_lora(settings: LoraSettings) -> LoraSettings:
    """`lora.base_dtype`, `auto` replaced."""
    if settings.base_dtype != "auto":
        return settings
    dtype = "float32" if this_device().platform == "cpu" else "bfloat16"
    return settings.model_copy(update={"base_dtype": dtype})


def adapt(
    config: Config, shape: ModelConfig, params: PyTree, key: Key[jax.Array, ""]
) -> tuple[PyTree, Lora]:
    """The frozen base of a model's parameters, and its adapters. `config` is resolved.

    Raises BadInput for projections that the model has not, and an adapter that does not fit it.
    """
    lora = config.lora
    # Rounded where they lie: what is read from a folder stays on the host, to be placed in parts.
    base = cast(params, jnp.dtype(lora.base_dtype))
    if lora.adapter:
        found = load_adapters(Path(lora.adapter).expanduser(), shape)
        adapters = jax.tree.map(jnp.asarray, found.params)
        rank, alpha, targets = found.rank, found.alpha, found.targets
        base = scaled(base, targets, alpha / rank)
    else:
        rank, targets = lora.rank, lora.targets
        alpha = 2.0 * rank if lora.alpha is None else lora.alpha
        base = scaled(base, targets, alpha / rank)
        # A key of their own: random weights, where they are drawn, are the same without adapters.
        adapters = initial(base, targets, rank, jax.random.fold_in(key, 1))
    return base, Lora(adapters, alpha)
