"""The toy policy as a torch model of `transformers`, by the table of tensor names, and what tests
of losses against torch share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from toy import CONFIG, PAD, STOP, batch, initial_params, learner
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from model.config import to_hugging_face
from model.tensors import tensors
from rlx.algorithms import Algorithm
from rlx.learner import Term
from rlx.scoring import score_rows
from rlx.types import Batch, Signal
from rlx.update import gradients

ROWS, WIDTH, PROMPT = 8, 5, 3
"""One shape, so that a module compiles once."""


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


def torch_policy(params, auto=AutoModelForCausalLM, **extra) -> torch.nn.Module:
    described = to_hugging_face(CONFIG) | extra
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    model = auto.from_config(config, attn_implementation="eager")
    state = {name: torch.from_numpy(value.copy()) for name, value in named(params).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight", "score.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.train()


def torch_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def as_torch(array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def split(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompt ids and mask, completion ids and mask, as TRL keeps them."""
    width = batch.mask.shape[1]
    tokens, positions = as_torch(batch.tokens), np.array(batch.positions)
    prompt_mask = torch.from_numpy((positions[:, :-width] >= 0).astype(np.int64))
    completion_mask = torch.from_numpy(np.array(batch.mask).astype(np.int64))
    return tokens[:, :-width].long(), prompt_mask, tokens[:, -width:].long(), completion_mask


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id of the toy model."""
    words = {"<pad>": PAD, "</s>": STOP, **{f"w{i}": i for i in range(2, CONFIG.vocab_size)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


def options(folder, **changes) -> dict:
    """Of any of TRL's trainers."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    } | changes


class TorchOutputs:
    """What the torch policy, and its value head if it has one, says of the completions of some
    rows: log-probabilities and entropies [B T], values [B T+1]."""

    def __init__(self, rows: Batch, params, temperature: float = 1.0):
        self.model = torch_policy(params)
        prompt_ids, prompt_mask, completion_ids, completion_mask = split(rows)
        hidden = self.model.model(
            torch.cat([prompt_ids, completion_ids], 1),
            attention_mask=torch.cat([prompt_mask, completion_mask], 1),
        ).last_hidden_state[:, -completion_ids.shape[1] - 1 :]
        spread = (self.model.lm_head(hidden[:, :-1]) / temperature).log_softmax(-1)
        self.logprobs = spread.gather(-1, completion_ids[..., None]).squeeze(-1)
        self.entropy = -(spread.exp() * spread).sum(-1)
        if "value_head" in params:
            self.kernel = as_torch(params["value_head"]["kernel"]).requires_grad_()
            self.values = (hidden @ self.kernel).squeeze(-1)

    def gradients(self, loss: torch.Tensor) -> dict[str, np.ndarray]:
        loss.backward()
        return torch_gradients(self.model)


def noisy_params(seed: int, scale: float = 0.1):
    """Another policy near the toy's."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(rng.normal(0, scale, leaf.shape), jnp.float32),
        initial_params(),
    )


def moved_rows(temperature: float = 1.0, seed: int = 34) -> Batch:
    """Ragged prompts and completions, and a policy that has moved since it sampled them: ratios
    lie on both sides of every clip."""
    made = batch(ROWS, WIDTH, prompt=PROMPT)
    shift = jnp.asarray([0, 1, 2, 0, 0, 1, 0, 2])[:, None]
    made = made._replace(positions=jnp.maximum(made.positions - shift, -1))
    scorer = learner(micro=ROWS, temperature=temperature)
    where = (made.tokens, made.positions, WIDTH)
    current = score_rows(scorer, initial_params(), {}, *where).logprobs
    rng = np.random.default_rng(seed)
    noise = jnp.asarray(rng.uniform(-0.7, 0.7, (2, ROWS, WIDTH)), jnp.float32)
    advantages = jnp.asarray(rng.normal(size=(ROWS, 1)), jnp.float32)
    return made._replace(
        old_logprobs=current + noise[0],
        ref_logprobs=current + noise[1],
        signals=(Signal(advantages, advantages, made.mask),),
    )


def weighted_gradients(terms: dict[str, Algorithm], **changes) -> Callable:
    """(weights, trained, rows) -> gradients, loss and metrics of that weighted sum of the terms.

    One program for a whole table: a weight of 0 leaves a term out. A program a case would spend
    minutes on compiling.
    """
    base = learner(**changes)

    @jax.jit
    def compute(weights, trained, rows):
        weighted = tuple(Term(name, algorithm, weights[name]) for name, algorithm in terms.items())
        return gradients(base._replace(terms=weighted), trained, rows)

    def at(weights, trained, rows):
        assert weights.keys() <= terms.keys()
        full = {name: jnp.float32(weights.get(name, 0)) for name in terms}
        return compute(full, trained, rows)

    return at


def assert_loss(loss, expected: float) -> None:
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)


def assert_gradients(grads: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Of each tensor to 1e-5 of its largest entry. None may be without a gradient: two models that
    both learn nothing would agree."""
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        scale = np.abs(expected[name]).max()
        assert scale > 1e-6, name
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=1e-5 * scale, err_msg=name)
