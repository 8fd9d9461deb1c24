"""The toy policy as a torch model of `transformers`, by the table of tensor names."""

import numpy as np
import torch
from toy import CONFIG
from transformers import AutoConfig, AutoModelForCausalLM

from model.config import to_hugging_face
from model.tensors import tensors
from rlx.types import Batch


def named(params) -> dict[str, np.ndarray]:
    """Parameters, or gradients by them, in the names and layouts of the torch model."""
    result = {}
    for name, tensor in tensors(CONFIG).items():
        leaf = params
        for key in tensor.path.split("/"):
            leaf = leaf[key]
        leaf = np.asarray(leaf if tensor.layer is None else leaf[tensor.layer])
        result[name] = np.ascontiguousarray(tensor.to_stored(leaf))
    return result


def torch_policy(params) -> torch.nn.Module:
    described = to_hugging_face(CONFIG)
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {name: torch.from_numpy(value.copy()) for name, value in named(params).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def torch_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def split(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompt ids and mask, completion ids and mask, as TRL keeps them."""
    width = batch.mask.shape[1]
    tokens, positions = torch.from_numpy(np.array(batch.tokens)), np.array(batch.positions)
    prompt_mask = torch.from_numpy((positions[:, :-width] >= 0).astype(np.int64))
    completion_mask = torch.from_numpy(np.array(batch.mask).astype(np.int64))
    return tokens[:, :-width].long(), prompt_mask, tokens[:, -width:].long(), completion_mask
