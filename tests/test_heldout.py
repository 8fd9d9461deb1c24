"""Held-out evaluation without a verdict: pairs, given text, and samples under a reward model."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import CONFIG, PAD, batch, initial_params, learner, movement, pool

from model.errors import BadInput
from model.heads import completion_outputs, last_scores, with_value_head
from model.parameters import initialise
from model.qwen import Qwen
from model.sample import Samples
from model.tokenizer import load_tokenizer
from rlx.config import load
from rlx.heldout import Heldout, Scorer
from rlx.heldout_text import HeldoutPairs, HeldoutTexts
from rlx.policy import Policy, checkpoint_folder
from rlx.rewards.score import Score
from rlx.scorers import RewardModel
from rlx.tasks import Task
from rlx.tasks.task import Mixing

MODEL = Qwen(CONFIG)


def shifted(params, seed=1):
    """Near `params`, but another policy."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), params)


def headed(seed=2):
    params = with_value_head(CONFIG, initial_params())
    kernel = np.random.default_rng(seed).normal(size=(CONFIG.hidden_size, 1))
    return params | {"value_head": {"kernel": jnp.asarray(kernel, jnp.float32)}}


def pairs(count):
    """`count` pairs of completions of unequal length."""
    data = batch(2 * count)
    sides = jnp.asarray(np.resize([1.0, -1.0], (2 * count, 1)), jnp.float32)
    signal = data.signals[0]._replace(advantages=sides)
    return data._replace(signals=(signal,), ref_logprobs=jnp.full(data.mask.shape, jnp.nan))


@functools.partial(jax.jit, static_argnums=3)
def logprobs_alone(params, tokens, positions, length):
    return completion_outputs(MODEL, params, tokens, positions, length).logprobs.sum()


@jax.jit
def score_alone(params, tokens, positions):
    return last_scores(MODEL, params, tokens, positions)


def row_logprobs(params, data):
    """Of each row by itself, without its padding, summed over its tokens."""
    sums = []
    for row, length in enumerate(data.mask.sum(axis=1).tolist()):
        end = data.tokens.shape[1] - data.mask.shape[1] + length
        tokens, positions = (x[row : row + 1, :end] for x in (data.tokens, data.positions))
        sums.append(float(logprobs_alone(params, tokens, positions, length)))
    return np.array(sums)


def test_pairs_are_measured_one_by_one_whatever_the_micro_batch():
    """Micro-batches of 4 rows over 10: a last one filled with counted copies would count the first
    pair twice, and one that is cut would lose the last."""
    params, reference, data = shifted(initial_params()), initial_params(), pairs(5)
    heldout = HeldoutPairs(learner("dpo", hyper={"beta": 0.3}, micro=4), data, reference)
    assert heldout.headline == "accuracy" and heldout.higher_is_better
    implicit = 0.3 * (row_logprobs(params, data) - row_logprobs(reference, data))
    for count, n in ((1, 1), (3, 3), (5, 5), (100, 5)):
        metrics, texts = heldout.evaluate(params, count, greedy=True)
        chosen, rejected = implicit[0 : 2 * n : 2], implicit[1 : 2 * n : 2]
        margins = chosen - rejected
        accuracy = (margins > 0).mean()
        assert texts == [] and metrics["n"] == n
        assert metrics["accuracy"] == pytest.approx(accuracy)
        assert metrics["margin"] == pytest.approx(margins.mean(), abs=1e-5)
        assert metrics["loss"] == pytest.approx(np.logaddexp(0, -margins).mean(), abs=1e-5)
        assert metrics["rewards/chosen"] == pytest.approx(chosen.mean(), abs=1e-5)
        assert metrics["rewards/rejected"] == pytest.approx(rejected.mean(), abs=1e-5)
        error = math.sqrt(accuracy * (1 - accuracy) / (n - 1)) if n > 1 else math.nan
        assert metrics["stderr"] == pytest.approx(error, nan_ok=True)


def test_a_policy_that_is_its_reference_prefers_neither():
    """Counted as failures, the ties would say 0; scored by two programs, whose rounding differs,
    a coin toss for each pair."""
    params = initial_params()
    heldout = HeldoutPairs(learner("dpo"), pairs(8), params)
    metrics, _ = heldout.evaluate(params, 8, greedy=False)
    assert metrics["margin"] == 0.0 and metrics["accuracy"] == 0.5
    assert metrics["loss"] == pytest.approx(math.log(2))


def test_the_evaluation_leaves_the_learner_and_its_data_alone():
    params, data = initial_params(), pairs(3)
    heldout = HeldoutPairs(learner("dpo", micro=2), data, params)
    first, _ = heldout.evaluate(shifted(params), 3, greedy=False)
    heldout.evaluate(params, 1, greedy=False)
    again, _ = heldout.evaluate(shifted(params), 3, greedy=False)
    assert first == again
    assert jnp.isnan(data.ref_logprobs).all()
    assert movement(params, initial_params()) == 0.0


def test_a_reward_models_scores_are_those_of_the_last_real_token():
    """Read at padding, every row of the batch but the longest would have another score."""
    params, data = headed(), pairs(5)
    heldout = HeldoutPairs(learner("reward_model", hyper={"margin": 0.25}, micro=4), data, None)
    metrics, _ = heldout.evaluate(params, 5, greedy=False)
    scores = []
    for row in range(10):
        end = data.tokens.shape[1] - data.mask.shape[1] + int(data.mask[row].sum())
        tokens, positions = (x[row : row + 1, :end] for x in (data.tokens, data.positions))
        scores.append(float(score_alone(params, tokens, positions)[0]))
    chosen, rejected = np.array(scores[0::2]), np.array(scores[1::2])
    assert metrics["score/chosen"] == pytest.approx(chosen.mean(), abs=1e-5)
    assert metrics["score/rejected"] == pytest.approx(rejected.mean(), abs=1e-5)
    assert metrics["accuracy"] == pytest.approx((chosen > rejected).mean())
    expected = np.logaddexp(0, -(chosen - rejected - 0.25)).mean()
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_fresh_reward_model_is_right_half_the_time():
    params = with_value_head(CONFIG, initial_params())
    metrics, _ = HeldoutPairs(learner("reward_model"), pairs(4), None).evaluate(
        params, 4, greedy=False
    )
    assert metrics["accuracy"] == 0.5 and metrics["loss"] == pytest.approx(math.log(2))


def test_nll_is_a_mean_over_tokens_with_the_error_of_a_ratio_over_rows():
    """Tokens of a row taken as independent would give another error; a mean of the rows' means,
    another value."""
    params, data = initial_params(), batch(7)
    heldout = HeldoutTexts(learner("sft", micro=4), data)
    assert heldout.headline == "nll" and not heldout.higher_is_better
    every = -row_logprobs(params, data)
    for count, n in ((2, 2), (5, 5), (7, 7), (50, 7)):
        metrics, texts = heldout.evaluate(params, count, greedy=False)
        losses, lengths = every[:n], np.asarray(data.mask.sum(axis=1))[:n]
        nll = losses.sum() / lengths.sum()
        # The ratio's error is that of the mean of (loss - nll length), over the mean length.
        error = (losses - nll * lengths).std(ddof=1) / math.sqrt(n) / lengths.mean()
        assert texts == []
        assert metrics["nll"] == pytest.approx(nll, rel=1e-5)
        assert metrics["nll"] != pytest.approx((losses / lengths).mean(), rel=1e-3)
        assert metrics["stderr"] == pytest.approx(error, rel=1e-3)
        assert metrics["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
        assert (metrics["n"], metrics["tokens"]) == (n, lengths.sum())


def samples_of(lengths, seed=3):
    rng = np.random.default_rng(seed)
    mask = np.arange(4) < np.array(lengths)[:, None]
    tokens = np.where(mask, rng.integers(2, 16, mask.shape), PAD).astype(np.int32)
    count = len(lengths)
    nothing, no, yes = np.zeros(mask.shape), np.zeros(count, bool), np.ones(count, bool)
    return Samples(tokens, mask, nothing, no, yes, np.int32(4 * count))


def test_a_reward_model_scores_a_sample_behind_its_own_prompt():
    """6 samples of 3 prompts in batches of 4: behind another's prompt, or with its padding, a
    sample has another score."""
    params, prompts = headed(), pool(3)
    samples, problems = samples_of([1, 4, 2, 3, 4, 1]), np.repeat(np.arange(3, dtype=np.int32), 2)
    alone = []
    for row, problem in enumerate(problems):
        prompt = np.asarray(prompts.tokens[problem])[np.asarray(prompts.positions[problem]) >= 0]
        ids = np.concatenate([prompt, samples.tokens[row][samples.mask[row]]])[None]
        places = np.arange(ids.shape[1], dtype=np.int32)[None]
        alone.append(float(score_alone(params, jnp.asarray(ids), jnp.asarray(places))[0]))
    for rows in (1, 4, 64):
        scored = Scorer(RewardModel(MODEL, params), prompts, rows)(samples, problems)
        assert [score.reward for score in scored] == pytest.approx(alone, abs=1e-5)
        assert all(s.correct is None and s.components == {"score": s.reward} for s in scored)


def test_a_sample_without_finite_logits_has_no_score():
    samples = samples_of([2, 3])._replace(finite=np.array([True, False]))
    scored = Scorer(RewardModel(MODEL, headed()), pool(2), 2)(samples, np.arange(2, dtype=np.int32))
    assert isinstance(scored[0], Score) and scored[1] is None


NANO = checkpoint_folder("nano")


@pytest.fixture(scope="module")
def policy():
    tokenizer = load_tokenizer(NANO)
    config = dataclasses.replace(CONFIG, vocab_size=len(tokenizer))
    params = initialise(config, jax.random.key(0))
    return Policy(NANO, config, tokenizer, params, jnp.dtype("float32"))


def task(score=None, verdicts=False):
    heldout = [{"prompt": text} for text in ("1 + 1 =", "Reach 7:", "3 * 4 =", "2 =", "9 - 1 =")]
    return Task(name="trial", train=heldout, heldout=heldout, score=score, verdicts=verdicts)


def heldout_of(policy, task, reward_model=None, samples=2):
    settings = ["sampling.max_new_tokens=4", "sampling.temperature=1", f"eval.samples={samples}"]
    config = load(None, [*settings, "eval.batch=4"])
    counts = {"eval.final_problems": 5, "eval.problems": 3}
    return Heldout(config, policy, task, jax.random.key(4), counts, reward_model)


def test_under_a_reward_model_the_mean_score_stands_for_the_run(policy):
    model = Qwen(policy.config)
    params = with_value_head(policy.config, policy.params)
    kernel = np.random.default_rng(0).normal(size=(policy.config.hidden_size, 1))
    params = params | {"value_head": {"kernel": jnp.asarray(kernel, jnp.float32)}}
    heldout = heldout_of(policy, task(verdicts=True), RewardModel(model, params))
    assert heldout.headline == "reward" and heldout.verifier is None
    metrics, texts = heldout.evaluate(policy.params, 5, greedy=True)
    rewards = np.array([c.score.reward for c in texts]).reshape(5, 2)
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert metrics["stderr"] == pytest.approx(rewards.mean(axis=1).std(ddof=1) / math.sqrt(5))
    assert {"greedy/reward", "greedy/stderr", "greedy/truncated"} <= metrics.keys()
    assert {"length/mean", "truncated", "failed"} <= metrics.keys()
    assert not [name for name in metrics if "pass@" in name or "maj@" in name]
    assert [c.problem for c in texts] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_verifier_without_verdicts_is_told_by_its_reward(policy):
    def by_length(text, row):
        return Score(float(len(text)), None, {"length": float(len(text))}, "")

    by_length.bounded = True  # no other process could load it
    heldout = heldout_of(policy, task(by_length))
    metrics, texts = heldout.evaluate(policy.params, 3, greedy=False)
    assert metrics["reward"] == pytest.approx(np.mean([len(c.text) for c in texts]))
    assert metrics["n"] == 3 and "pass@1" not in metrics


def test_in_a_mixture_each_task_reads_its_own_votes(policy):
    """By one reader, boxed answers and answers in tags would not both be votes."""

    def upper(text):
        return text[:1].upper() or None

    named = {"a": task()._replace(answer=upper), "b": task()._replace(answer=lambda text: None)}
    mixing = Mixing(named, (1.0, 1.0), (1.0, 1.0), "weights", 0.1)

    def right(text, row):
        return Score(1.0, True, {"correct": 1.0}, "")

    right.bounded = True
    rows = [{"prompt": f"{i} =", "task": "ab"[i % 2]} for i in range(5)]
    mixed = Task("mixture", rows, rows, right, mixture=mixing)
    heldout = heldout_of(policy, mixed, samples=3)
    metrics, _ = heldout.evaluate(policy.params, 5, greedy=False)
    assert metrics["task/a/maj@3"] == 1.0 and metrics["task/b/maj@3"] == 0.0
    assert metrics["maj@3"] == pytest.approx(3 / 5)


def test_rows_that_nothing_can_score_are_refused(policy):
    with pytest.raises(BadInput, match=r"task trial has no verifier.*reward\.source=model"):
        heldout_of(policy, task())
