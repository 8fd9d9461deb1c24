"""The policy: its checkpoint found and read, with its tokenizer and adapters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Key, PyTree

import model
from model.config import ModelConfig, read_config
from model.errors import BadInput
from model.load import load_params
from model.lora import beside
from model.parameters import initialise, parameter_axes
from model.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from rlx.derived import uses_lora
from rlx.hosts import check_same
from rlx.lora import Lora, adapt
from rlx.mesh import placed
from rlx.settings import Config

BUNDLED = {"nano": Path(model.__file__).parent / "assets" / "nano"}


class Policy(NamedTuple):
    """A checkpoint, ready to be used."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    params: PyTree
    dtype: jnp.dtype
    lora: Lora | None = None
    """Where adapters are trained: `params` are then their frozen base."""

    @property
    def base(self) -> PyTree | None:
        return None if self.lora is None else self.params

    @property
    def whole(self) -> PyTree:
        """The parameters as the model reads them, in the very arrays of base and adapters."""
        return self.params if self.lora is None else beside(self.params, self.lora.adapters)


def checkpoint_folder(path: str, setting: str = "model.path") -> Path:
    """The folder that a setting names. Raises BadInput where there is none."""
    folder = BUNDLED.get(path, Path(path).expanduser())
    if not path or not folder.is_dir():
        raise BadInput(
            f"{setting}: expected a checkpoint folder in Hugging Face's format, or one of "
            f"{', '.join(BUNDLED)}; came {path or 'nothing'}, which is no folder."
        )
    return folder


def load_policy(config: Config, key: Key[jax.Array, ""]) -> Policy:
    """Reads the checkpoint, or draws random weights for its shape. `config` is resolved."""
    folder = checkpoint_folder(config.model.path)
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    check_same("files in model.path", files)
    tokenizer = load_tokenizer(folder, config.model.chat_template_kwargs)
    shape = read_config(folder)
    check_vocabulary(tokenizer, shape)
    if not tokenizer.stop_ids:
        raise BadInput(f"The tokenizer of {folder} has no token that ends a text.")
    if config.model.router_aux and not shape.num_experts:
        raise BadInput(
            f"model.router_aux: expected 0, since the model in {folder} has no experts; came "
            f"{config.model.router_aux}."
        )
    shape = dataclasses.replace(shape, num_tokens=len(tokenizer))
    if config.model.weights == "random":
        params = initialise(shape, key)
    else:
        params = load_params(folder, shape)
    axes, adapted = parameter_axes(shape), None
    if uses_lora(config):
        params, adapted = adapt(config, shape, params, key)
        adapted = adapted._replace(adapters=placed(axes, adapted.adapters))
    params = placed(axes, params)
    return Policy(folder, shape, tokenizer, params, jnp.dtype(config.model.dtype), adapted)


def check_length(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    whose: str = "the model",
) -> None:
    """Raises BadInput where a prompt and its completion have no room in the model."""
    longest = max(map(len, prompts))
    if longest + new_tokens > config.max_positions:
        raise BadInput(
            f"sampling.max_new_tokens: the longest prompt has {longest} tokens, and with "
            f"{new_tokens} more it goes beyond the {config.max_positions} positions of {whose}."
        )
