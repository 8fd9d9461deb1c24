"""samples.jsonl tells of a text what was earned by it, verdict or none."""

import jax.numpy as jnp
import numpy as np
import pytest
from toy import plan, pool

from model.tokenizer import load_tokenizer
from rlx.evaluate import Completion
from rlx.policy import checkpoint_folder
from rlx.prepare import Preview
from rlx.rewards.score import Score
from rlx.rollout import empty_rollout
from rlx.samples import heldout_samples, training_samples


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(checkpoint_folder("nano"))


def preview(tokenizer):
    """Two prompts with four completions each; the first two of two tokens and one."""
    width, ids = 3, tokenizer.encode("12")
    rollout = empty_rollout(plan().sampling, pool().tokens.shape[1])
    tokens = np.zeros(rollout.tokens.shape, np.int32)
    tokens[0, -width : -width + 2] = [ids[0], tokenizer.end_id]
    tokens[1, -width] = ids[-1]
    mask = np.zeros(rollout.mask.shape, bool)
    mask[0, :2], mask[1, :1] = True, True
    advantages = np.where(mask, [[1.0, 3.0, 9.0]] * 8, 0.0)
    rollout = rollout._replace(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask),
        rewards=jnp.asarray([[0.5, 0.25, 0, 0], [0, 0, 0, 0]], jnp.float32),
        correct=jnp.full((2, 4), jnp.nan),
        components=jnp.asarray(np.full((2, 4, 1), 0.5), jnp.float32),
        rows=jnp.asarray([1, 0]),
    )
    return Preview(rollout, jnp.asarray(advantages, jnp.float32))


def test_a_row_without_a_verdict_has_its_reward(tokenizer):
    rows = [{"prompt": "never"}, {"prompt": "a text prompt"}]
    first, second = training_samples(preview(tokenizer), rows, ("score",), tokenizer, 8)
    assert first["correct"] is None and first["reward"] == 0.5
    assert first["components"] == {"score": 0.5}
    assert first["prompt"] == second["prompt"] == "a text prompt"
    assert first["completion"] == tokenizer.decode(tokenizer.encode("12")[:1])
    assert (first["length"], second["length"]) == (2, 1)


def test_an_advantage_a_token_is_averaged_over_the_tokens_of_its_text(tokenizer):
    """Over the padding too it would be 4/3 and 1/3."""
    rows = [{"prompt": "never"}, {"prompt": "a"}]
    samples = training_samples(preview(tokenizer), rows, ("score",), tokenizer, 2)
    assert [sample["advantage"] for sample in samples] == [2.0, 1.0]


def test_a_held_out_text_under_a_reward_model(tokenizer):
    texts = [
        Completion(0, "four", 2, False, Score(1.5, None, {"score": 1.5}, "")),
        Completion(0, "", 3, True, None),
    ]
    scored, failed = heldout_samples(texts, [{"prompt": "2 + 2 ="}], tokenizer, 5)
    assert (scored["reward"], scored["correct"], scored["prompt"]) == (1.5, None, "2 + 2 =")
    assert (failed["reward"], failed["components"], failed["truncated"]) == (None, {}, True)
