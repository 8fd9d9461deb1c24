"""Held-out evaluation: pass@1 with its standard error, unbiased pass@k, maj@k."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from model.config import ModelConfig
from model.sample import Filters, Samples, sample
from rlx import assemble
from rlx.config import Config
from rlx.data import encode_prompts, pad_left, prompt_width
from rlx.rewards.blocks import last_answer
from rlx.rewards.host import HostVerifier
from rlx.rewards.score import Score
from rlx.tasks import Task


class Draw(NamedTuple):
    """How to sample; temperature 0 is greedy."""

    samples: int
    temperature: float
    filters: Filters | None = None


class Completion(NamedTuple):
    """One sampled text."""

    problem: int
    ids: list[int]
    """The stop token included."""
    logprobs: list[float]
    text: str
    truncated: bool
    score: Score | None
    """None: the verifier failed on it."""


class Sampler:
    """Samples any number of prompts in batches of one shape, so that one program serves all.

    What a prompt gets does not depend on the batch it is in: its noise is of (seed, problem,
    sample).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        stop_ids: Sequence[int],
        pad_id: int,
        max_new_tokens: int,
        rows: int,
    ):
        self.rows, self.pad_id = rows, pad_id

        @functools.partial(jax.jit, static_argnames="group")
        def run(params, tokens, positions, problems, first, key, temperature, filters, group):
            def of_problem(problem):
                problem_key = jax.random.fold_in(key, problem)
                return jax.vmap(lambda g: jax.random.fold_in(problem_key, g))(
                    first + jnp.arange(group)
                )

            return sample(
                config,
                params,
                tokens,
                positions,
                jax.vmap(of_problem)(problems),
                max_new_tokens=max_new_tokens,
                stop_ids=jnp.asarray(stop_ids, jnp.int32),
                pad_id=pad_id,
                temperature=temperature,
                filters=filters,
                dtype=dtype,
            )

        self.run = run

    def __call__(
        self,
        params: PyTree,
        tokens: Int[np.ndarray, "M P"],
        positions: Int[np.ndarray, "M P"],
        draw: Draw,
        seed: int,
    ) -> Samples:
        """Of M prompts, `draw.samples` each, in order; on the host."""
        group = min(draw.samples, self.rows)
        prompts = max(1, self.rows // group)
        rounds = math.ceil(draw.samples / group)
        pieces = []
        for start in range(0, len(tokens), prompts):
            # The last batch is filled up with copies, which are dropped: one shape, one program.
            chosen = np.arange(start, start + prompts) % len(tokens)
            count = min(prompts, len(tokens) - start)
            groups = [
                jax.device_get(
                    self.run(
                        params,
                        tokens[chosen],
                        positions[chosen],
                        chosen,
                        first * group,
                        jax.random.key(seed),
                        jnp.float32(draw.temperature),
                        draw.filters,
                        group,
                    )
                )
                for first in range(rounds)
            ]

            def join(*leaves, count=count):
                grouped = [leaf.reshape(prompts, group, *leaf.shape[1:]) for leaf in leaves]
                joined = np.concatenate(grouped, axis=1)[:count, : draw.samples]
                return joined.reshape(-1, *leaves[0].shape[1:])

            pieces.append(jax.tree.map(join, *groups))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)


def completions(samples: Samples, verifier: HostVerifier, group: int) -> list[Completion]:
    """Decodes and scores samples of the verifier's rows, `group` of each."""
    found = []
    for row in range(len(samples.tokens)):
        length = int(samples.mask[row].sum())
        problem = row // group
        text = verifier.text(samples.tokens[row], length)
        score = (
            verifier.score_text(text, verifier.rows[problem], place=f"held-out row {problem}")
            if samples.finite[row]
            else None
        )
        found.append(
            Completion(
                problem,
                samples.tokens[row, :length].tolist(),
                samples.logprobs[row, :length].tolist(),
                text,
                bool(samples.truncated[row]),
                score,
            )
        )
    return found


def pass_at_k(right: int, samples: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), unbiased for k <= n. https://arxiv.org/abs/2107.03374 (eq. 1)"""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def summarise(texts: Sequence[Completion], group: int) -> dict[str, float]:
    """Metrics of `group` completions a problem. A failed row counts as wrong, and is told.

    The standard error is over problems, each with the mean of its samples.
    """
    problems = [texts[i : i + group] for i in range(0, len(texts), group)]
    right = np.array([[c.score is not None and c.score.correct for c in p] for p in problems])
    rewards = [c.score.reward for c in texts if c.score is not None]
    lengths = np.array([len(c.ids) for c in texts])
    rates = right.mean(axis=1)
    n = len(problems)
    metrics = {
        "pass@1": float(rates.mean()),
        "stderr": float(rates.std(ddof=1) / math.sqrt(n)) if n > 1 else float("nan"),
        "n": n,
        "reward/mean": float(np.mean(rewards)) if rewards else float("nan"),
        "length/mean": float(lengths.mean()),
        "length/max": int(lengths.max()),
        "truncated": float(np.mean([c.truncated for c in texts])),
        "failed": sum(c.score is None for c in texts),
    }
    k = 2
    while k <= group:
        metrics[f"pass@{k}"] = float(np.mean([pass_at_k(int(c), group, k) for c in right.sum(1)]))
        k *= 2
    if group > 1 and f"pass@{group}" not in metrics:
        metrics[f"pass@{group}"] = float(right.any(axis=1).mean())
    if group > 2:
        metrics[f"maj@{group}"] = float(np.mean([majority_right(p) for p in problems]))
    return metrics


def majority_right(texts: Sequence[Completion]) -> bool:
    """Whether the commonest answer is right; of equally common ones the first. Texts without an
    answer don't vote."""
    answers = [(last_answer(c.text) or "").strip() for c in texts]
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return False
    chosen = texts[answers.index(votes.most_common(1)[0][0])]
    return chosen.score is not None and chosen.score.correct


def evaluation_draw(config: Config) -> Draw:
    settings = config.eval
    filtered = settings.top_k or settings.top_p < 1 or settings.min_p
    filters = Filters(settings.top_k, settings.top_p, settings.min_p) if filtered else None
    return Draw(settings.samples if settings.temperature else 1, settings.temperature, filters)


class Heldout:
    """The task's held-out problems, ready to be sampled at any parameters."""

    def __init__(self, config: Config, policy: assemble.Policy, task: Task):
        settings = config.eval
        periodic = settings.problems if settings.every else 0
        name = "problems" if periodic > settings.final_problems else "final_problems"
        count = getattr(settings, name)
        if len(task.heldout) < count:
            raise ValueError(
                f"eval.{name}: expected at most the task's {len(task.heldout)} held-out problems; "
                f"came {count}."
            )
        self.rows = task.heldout[:count]
        encoded = encode_prompts(
            self.rows, policy.tokenizer, limit=config.sampling.max_prompt_tokens
        )
        assemble.check_length(policy.config, encoded, config.sampling.max_new_tokens)
        self.tokens, self.positions = pad_left(
            encoded, prompt_width(encoded), policy.tokenizer.pad_id
        )
        self.verifier = HostVerifier(
            task.score, self.rows, policy.tokenizer.decode, policy.tokenizer.stop_ids
        )
        self.draw = evaluation_draw(config)
        self.seed = config.run.seed
        fewest = min(periodic or count, settings.final_problems) * self.draw.samples
        self.sampler = Sampler(
            policy.config,
            dtype=policy.dtype,
            stop_ids=policy.tokenizer.stop_ids,
            pad_id=policy.tokenizer.pad_id,
            max_new_tokens=config.sampling.max_new_tokens,
            rows=min(settings.batch, fewest),
        )

    def texts(self, params: PyTree, problems: int, draw: Draw) -> list[Completion]:
        samples = self.sampler(
            params, self.tokens[:problems], self.positions[:problems], draw, self.seed
        )
        return completions(samples, self.verifier, draw.samples)

    def evaluate(
        self, params: PyTree, problems: int, *, greedy: bool
    ) -> tuple[dict[str, Any], list[Completion]]:
        """Metrics (with `greedy/...` beside them if asked) and the sampled texts."""
        texts = self.texts(params, problems, self.draw)
        metrics = summarise(texts, self.draw.samples)
        if greedy and self.draw.temperature > 0:
            best = summarise(self.texts(params, problems, Draw(1, 0.0)), 1)
            metrics |= {f"greedy/{name}": best[name] for name in ("pass@1", "stderr", "truncated")}
        return metrics, texts
