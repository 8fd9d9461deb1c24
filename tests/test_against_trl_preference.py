"""Loss and gradients of what learns from given text (preference pairs, a reward model, supervised
fine-tuning) against TRL's own losses, on the same model and tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference runs in torch")
pytest.importorskip("trl", reason="TRL's losses are the reference")

from datasets import Dataset  # noqa: E402
from toy import PAD, initial_params, learner  # noqa: E402
from toy_torch import (  # noqa: E402
    ROWS,
    WIDTH,
    TorchOutputs,
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
from transformers import AutoModelForSequenceClassification  # noqa: E402
from trl import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from rlx.algorithms import ALGORITHMS, TERMS  # noqa: E402
from rlx.prepare import make_signal  # noqa: E402
from rlx.scoring import score_rows  # noqa: E402

OURS = {
    "dpo": ALGORITHMS["dpo"],
    # At 1 one pair is beyond the hinge, at .1 none.
    "dpo_hinge": ALGORITHMS["dpo_hinge"].bind(beta=1.0),
    "dpo_reference_free": ALGORITHMS["dpo_reference_free"],
    "ipo": ALGORITHMS["ipo"],
    "ipo_sum": ALGORITHMS["ipo_sum"],
    "cdpo": ALGORITHMS["cdpo"],
    "robust_dpo": ALGORITHMS["robust_dpo"],
    "sft": ALGORITHMS["sft"],
    "reward_model": TERMS["reward_model"],
    "reward_model_margin": TERMS["reward_model"].bind(margin=0.3),
    "reward_model_centred": TERMS["reward_model"].bind(centring=0.05),
}

# Our terms with their weights, and the settings that make TRL say the same.
PAIRS = {
    "dpo": ({"dpo": 1}, {"loss_types": ["sigmoid"]}),
    "dpo_hinge": ({"dpo_hinge": 1}, {"loss_types": ["hinge"], "beta": 1.0}),
    "ipo": ({"ipo": 1}, {"loss_types": ["ipo"]}),
    "robust_dpo": ({"robust_dpo": 1}, {"loss_types": ["robust"], "label_smoothing": 0.1}),
    # TRL has no reference-free form any more: a reference with log-probability 0 everywhere.
    "dpo_reference_free": (
        {"dpo_reference_free": 1},
        {"loss_types": ["sigmoid"], "precompute_ref_logps": True},
    ),
    "dpo with sft": (
        {"dpo": 1, "sft": 0.3},
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    ),
}
DEFAULTS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "loss_weights": [1.0],
    "precompute_ref_logps": False,
}
CHOSEN = np.array([0, 3, 4, 7])
"""The preferred row of each pair: its first or its second."""
REJECTED = np.array([1, 2, 5, 6])
MARGINS = np.array([0.5, -0.2, 0.0, 1.0], np.float32)


def scorer_params():
    head = np.random.default_rng(3).normal(0, 0.3, (16, 1))
    return initial_params() | {"value_head": {"kernel": jnp.asarray(head, jnp.float32)}}


PREFERENCES = {"prompt": ["w2 w9"] * 2, "chosen": ["w4 w5"] * 2, "rejected": ["w6"] * 2}


@pytest.fixture(scope="module")
def dpo_trainer(tmp_path_factory):
    """A real trainer, with a reference that is another model; only its loss is called."""
    return DPOTrainer(
        model=torch_policy(initial_params()),
        ref_model=torch_policy(noisy_params(1)),
        args=DPOConfig(**options(tmp_path_factory.mktemp("dpo"))),
        train_dataset=Dataset.from_dict(PREFERENCES),
        processing_class=tokenizer(),
    )


@pytest.fixture(scope="module")
def reward_trainer(tmp_path_factory):
    params = scorer_params()
    model = torch_policy(params, AutoModelForSequenceClassification, num_labels=1, pad_token_id=PAD)
    kernel = torch.from_numpy(np.array(params["value_head"]["kernel"]))
    model.score.weight.data = kernel.T.contiguous()
    return RewardTrainer(
        model=model,
        args=RewardConfig(**options(tmp_path_factory.mktemp("reward"))),
        train_dataset=Dataset.from_dict(PREFERENCES),
        processing_class=tokenizer(),
    )


@pytest.fixture(scope="module")
def rows():
    """Four pairs, with a reference that is another model."""
    made = moved_rows()
    frozen = score_rows(
        learner(micro=ROWS), noisy_params(1), {}, made.tokens, made.positions, WIDTH
    )
    signs = np.zeros((ROWS, 1), np.float32)
    signs[CHOSEN], signs[REJECTED] = 1, -1
    signs = jnp.asarray(signs)
    return made._replace(
        ref_logprobs=frozen.logprobs,
        signals=tuple(make_signal(a, signs, signs, made.mask) for a in OURS.values()),
    )


@pytest.fixture(scope="module")
def compute():
    return weighted_gradients(OURS, micro=2)


def stacked(rows, pairs=slice(None)):
    """Token ids, attention and completion mask of the chosen rows, then of the rejected."""
    order = np.concatenate([CHOSEN[pairs], REJECTED[pairs]])
    prompt_ids, prompt_mask, completion_ids, completion_mask = (x[order] for x in split(rows))
    return {
        "input_ids": torch.cat([prompt_ids, completion_ids], 1),
        "attention_mask": torch.cat([prompt_mask, completion_mask], 1),
        "completion_mask": torch.cat([torch.zeros_like(prompt_mask), completion_mask], 1),
    }


def loss_of_dpo_trainer(trainer, rows, settings, pairs=slice(None)):
    """On one device and in one batch: TRL's `sft` is a mean over the tokens of each micro-batch,
    which weighs tokens of small ones more."""
    for key, value in (DEFAULTS | settings).items():
        setattr(trainer, key, value)
    inputs = stacked(rows, pairs)
    if trainer.precompute_ref_logps:
        nothing = torch.zeros(len(inputs["input_ids"]) // 2)
        inputs |= {"ref_chosen_logps": nothing, "ref_rejected_logps": nothing}
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("case", PAIRS)
def test_loss_and_gradients_of_pairs_equal_trls(dpo_trainer, rows, compute, case):
    weights, settings = PAIRS[case]
    (grads, _), loss, metrics = compute(weights, (scorer_params(), {}), rows)
    dpo_trainer.model.zero_grad()
    assert_loss(loss, loss_of_dpo_trainer(dpo_trainer, rows, settings))
    assert_gradients(named(grads), torch_gradients(dpo_trainer.model))
    if case != "dpo with sft":
        correct = float(metrics[f"{case}/accuracy" if case != "dpo" else "accuracy"].total)
        assert 0 < correct < ROWS, "pairs on one side only would not show a wrong sign"


def test_conservative_dpo_equals_trls_smoothed_loss(dpo_trainer, rows, compute):
    """TRL's `sigmoid` ignores `label_smoothing`; `aot` has cDPO's formula, of differences that it
    sorts over the batch first. A batch of one pair leaves nothing to sort."""
    (grads, _), loss, _ = compute({"cdpo": 1}, (scorer_params(), {}), rows)
    settings = {"loss_types": ["aot"], "label_smoothing": 0.1}
    dpo_trainer.model.zero_grad()
    count = len(CHOSEN)
    losses = [
        loss_of_dpo_trainer(dpo_trainer, rows, settings, slice(pair, pair + 1))
        for pair in range(count)
    ]
    expected = {n: g / count for n, g in torch_gradients(dpo_trainer.model).items()}
    assert_loss(loss, sum(losses) / count)
    assert_gradients(named(grads), expected)


def test_ipo_of_sums_is_equation_17(rows, compute):
    """TRL has IPO of means over tokens only, as its authors compute it; the paper's text reads as
    sums, stated here."""
    (grads, _), loss, _ = compute({"ipo_sum": 1}, (scorer_params(), {}), rows)
    policy, reference = (TorchOutputs(rows, p) for p in (initial_params(), noisy_params(1)))
    implicit = (policy.logprobs - reference.logprobs.detach()) * as_torch(rows.mask)
    difference = implicit.sum(1)[CHOSEN] - implicit.sum(1)[REJECTED]
    expected = ((difference - 1 / (2 * 0.1)) ** 2).mean()
    assert_gradients(named(grads), policy.gradients(expected))
    assert_loss(loss, expected.item())


@pytest.mark.parametrize(
    ("name", "margins", "centring"),
    [
        ("reward_model", np.zeros(4, np.float32), None),
        ("reward_model", MARGINS, None),
        ("reward_model_margin", MARGINS, None),
        ("reward_model_centred", MARGINS, 0.05),
    ],
)
def test_reward_model_equals_trls(reward_trainer, rows, compute, name, margins, centring):
    """TRL reads a margin from the data and has no constant one: there the constant is added to
    the data's. Its score is read at the last token that is not the padding's id, ours at the last
    unmasked one."""
    both = np.repeat(margins, 2)[:, None]
    (grads, _), loss, metrics = compute(
        {name: 1}, (scorer_params(), {}), rows._replace(margins=jnp.asarray(both))
    )
    constant = 0.3 if name == "reward_model_margin" else 0.0
    inputs = stacked(rows) | {"margin": torch.from_numpy(margins + np.float32(constant))}
    del inputs["completion_mask"]
    margin = inputs.pop("margin")
    reward_trainer.args.center_rewards_coefficient = centring
    model = reward_trainer.model
    model.zero_grad()
    # The model takes no margin; TRL's loss hands it all of its inputs, and it ignores this one.
    expected = reward_trainer.compute_loss(model, inputs | {"margin": margin})
    expected.backward()
    assert_loss(loss, expected.item())
    found = named(grads) | {"score.weight": np.asarray(grads["value_head"]["kernel"]).T}
    assert_gradients(found, torch_gradients(model))
    assert 0 < float(metrics[f"{name}/accuracy"].total) < ROWS


@pytest.fixture(scope="module")
def sft_trainer(tmp_path_factory):
    return SFTTrainer(
        model=torch_policy(initial_params()),
        args=SFTConfig(**options(tmp_path_factory.mktemp("sft"))),
        train_dataset=Dataset.from_dict({"text": ["w2 w3", "w4"]}),
        processing_class=tokenizer(),
    )


def test_conversations_are_learnt_as_trl_learns_them(sft_trainer, rows):
    """The mean over all tokens with a label, in several turns of one text. TRL's labels stand at
    the tokens, -100 elsewhere; its micro-batches share the count of the whole batch
    (`num_items_in_batch`). The mean of their means would weigh tokens of short texts more."""
    width = rows.tokens.shape[1] - 1
    spoken = np.random.default_rng(0).random((ROWS, width)) < 0.5
    # Nothing predicts a text's first token.
    mask = jnp.asarray((np.asarray(rows.positions)[:, 1:] > 0) & spoken)
    ones, zeros = jnp.ones((ROWS, 1)), jnp.zeros((ROWS, width))
    whole = rows._replace(
        mask=mask,
        sampler_logprobs=zeros,
        old_logprobs=zeros,
        ref_logprobs=zeros,
        values=zeros,
        signals=(make_signal(ALGORITHMS["sft"], ones, ones, mask),),
    )
    sft = weighted_gradients({"sft": ALGORITHMS["sft"]}, micro=2)
    (grads, _), loss, _ = sft({"sft": 1}, (initial_params(), {}), whole)
    labels = as_torch(jnp.where(mask, rows.tokens[:, 1:], -100)).long()
    labels = torch.cat([torch.full((ROWS, 1), -100), labels], 1)
    count, losses = (labels != -100).sum(), []
    assert len({int(half.sum()) for half in (labels != -100).chunk(2)}) == 2
    for part in (slice(0, 4), slice(4, 8)):
        inputs = {
            "input_ids": as_torch(rows.tokens).long()[part],
            "attention_mask": as_torch(rows.positions >= 0).long()[part],
            "labels": labels[part],
        }
        loss_of_part = sft_trainer.compute_loss(sft_trainer.model, inputs, num_items_in_batch=count)
        loss_of_part.backward()
        losses.append(loss_of_part.item())
    assert_loss(loss, sum(losses))
    assert_gradients(named(grads), torch_gradients(sft_trainer.model))
