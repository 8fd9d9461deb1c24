"""Loss and gradients of grpo and dapo against TRL's own loss, on the same model and tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference runs in torch")
pytest.importorskip("trl", reason="TRL's loss is the reference")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from toy import batch, initial_params, learner, quick_compilation  # noqa: E402, F401
from toy_torch import named, split, torch_gradients, torch_policy  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from rlx.algorithms import ALGORITHMS  # noqa: E402
from rlx.update import gradients, recompute_logprobs  # noqa: E402

ROWS, WIDTH, PROMPT = 4, 5, 3
compute = jax.jit(gradients, static_argnums=0)
CASES = {
    "grpo without KL": ("grpo", {"beta": 0.0}, {"loss_type": "grpo", "beta": 0.0}),
    "grpo": ("grpo", {}, {"loss_type": "grpo", "beta": 0.04}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "beta": 0.0, "epsilon_high": 0.28}),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A real trainer, with the toy policy; only its loss is called."""
    words = {"<pad>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 16)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    args = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=ROWS,
        num_generations=2,
        max_completion_length=WIDTH,
        bf16=False,
        use_cpu=True,
        report_to=[],
        # By default TRL multiplies k3 by the ratio, which is neither the paper's term nor ours.
        use_bias_correction_kl=False,
    )
    # A reference model would be fetched by name; the loss reads its log-probabilities only.
    args.beta = 0.0
    trainer = GRPOTrainer(
        model=torch_policy(initial_params()),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * ROWS}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def rows():
    """Ragged prompts and completions, and a policy that has moved since it sampled them: ratios
    lie on both sides of both clips."""
    made = batch(ROWS, WIDTH, prompt=PROMPT)
    made = made._replace(positions=made.positions.at[1, 0].set(-1).at[1, 1:].add(-1))
    made = made._replace(positions=jnp.maximum(made.positions, -1))
    current = recompute_logprobs(
        learner(micro=ROWS), initial_params(), made.tokens, made.positions, WIDTH
    )
    rng = np.random.default_rng(5)
    shift = jnp.asarray(rng.uniform(-0.5, 0.5, (2, ROWS, WIDTH)), jnp.float32)
    return made._replace(old_logprobs=current + shift[0], ref_logprobs=current + shift[1])


def loss_of_trl(trainer, rows, loss_type, beta, epsilon_high=0.2):
    """What TRL does otherwise, and what is set here so that both say the same: its `grpo` counts
    rows without a token (there is none here) and, like its `dapo`, scales by the accumulation
    steps (one here); `dapo` divides by `num_items_in_batch`, the tokens of all that was
    generated, which here is this one batch; its log-ratios are not clamped (none is far)."""
    trainer.loss_type, trainer.beta = loss_type, beta
    trainer.epsilon_low, trainer.epsilon_high = 0.2, epsilon_high
    prompt_ids, prompt_mask, completion_ids, completion_mask = split(rows)
    trainer.model.zero_grad()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.from_numpy(np.array(rows.advantages[:, 0])),
            "old_per_token_logps": torch.from_numpy(np.array(rows.old_logprobs)),
            "ref_per_token_logps": torch.from_numpy(np.array(rows.ref_logprobs)),
            "num_items_in_batch": completion_mask.sum(),
        },
    )
    loss.backward()
    return loss.item(), torch_gradients(trainer.model)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_trls(trainer, rows, case):
    name, hyper, settings = CASES[case]
    expected_loss, expected = loss_of_trl(trainer, rows, **settings)
    ours = learner(name, algorithm=ALGORITHMS[name].bind(**hyper), micro=2)
    grads, loss, metrics = compute(ours, initial_params(), rows)
    assert metrics["clip/low"].total > 0
    assert metrics["clip/high"].total > 0
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    for tensor, grad in named(grads).items():
        scale = np.abs(expected[tensor]).max()
        assert scale > 1e-6, tensor
        np.testing.assert_allclose(
            grad, expected[tensor], rtol=0, atol=1e-5 * scale, err_msg=tensor
        )
