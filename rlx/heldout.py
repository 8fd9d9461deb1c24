"""A task's held-out problems, ready to be sampled and scored at any parameters."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Key, PyTree

from model.errors import BadInput
from model.heads import last_scores
from model.sample import Samples
from model.sharding import batch_shards, round_up, whole
from rlx import assemble, hosts
from rlx.data import encode_prompts, prompt_pool
from rlx.evaluate import HEADLINES, Completion, summarise, summarise_rewards
from rlx.frozen import on_device
from rlx.generate import Draw, Generator
from rlx.policy import Policy, check_length
from rlx.prompts import Prompts
from rlx.rewards.score import Score
from rlx.rollout import whole_rows
from rlx.scorers import RewardModel
from rlx.settings import Config
from rlx.task_loading import make_verifier
from rlx.tasks import Task


class Heldout:
    def __init__(
        self,
        config: Config,
        policy: Policy,
        task: Task,
        key: Key[jax.Array, ""],
        counts: dict[str, int],
        reward_model: RewardModel | None = None,
    ):
        """`counts` are the numbers of problems that will be asked for, by the setting's name. The
        task's verifier scores, or a reward model where one is given.

        Raises BadInput where the task has fewer, their prompts don't fit, or nothing can score.
        """
        self.tokenizer, sampling = policy.tokenizer, config.sampling
        self.rows, encoded, self.notes = encode_prompts(
            task.heldout,
            self.tokenizer,
            sampling.max_prompt_tokens,
            "held-out row",
            long_prompts=sampling.long_prompts,
            count=max(counts.values()),
        )
        hosts.check_same("held-out problems", encoded)
        for name, count in counts.items():
            if count > len(self.rows):
                raise BadInput(
                    f"{name}: expected at most the task's {len(self.rows)} held-out problems; "
                    f"came {count}. {' '.join(self.notes)}".rstrip()
                )
        self.task = task
        self.key = key
        self.headline = "pass@1" if task.verdicts and reward_model is None else "reward"
        self.higher_is_better = HEADLINES[self.headline].higher_is_better
        check_length(policy.config, encoded, sampling.max_new_tokens)
        self.prompts = encoded
        samples = config.eval.samples
        self.draw = Draw(samples, sampling.temperature, assemble.filters(config))
        rows, prompts = config.eval.batch, min(counts.values())
        self.generator = Generator(
            policy,
            max_new_tokens=sampling.max_new_tokens,
            rows=min(rows, sampling.slots or rows),
            prompts=prompts,
        )
        self.verifier, self.scorer = None, None
        if reward_model is not None:
            pool = prompt_pool(encoded, self.tokenizer.pad_id, key)
            self.scorer = Scorer(reward_model, pool, min(rows, prompts * samples))
        elif task.score is not None:
            self.verifier = make_verifier(config, task, self.rows, self.tokenizer)
        else:
            raise BadInput(
                f"reward.source: the task {task.name} has no verifier that could score samples; "
                "expected reward.source=model, with a reward model in reward.model."
            )

    def evaluate(
        self, params: PyTree, count: int, *, greedy: bool
    ) -> tuple[dict[str, Any], list[Completion]]:
        """Metrics of the first `count` problems, with `greedy/...` beside if asked, and the
        texts."""
        texts = self._texts(params, count, self.draw)
        metrics = self._summary(texts, self.draw.samples)
        if greedy and self.draw.temperature > 0:
            best = self._summary(self._texts(params, count, Draw(1, 0.0)), 1)
            told = (self.headline, "stderr", "truncated", "balanced_accuracy")
            metrics |= {
                f"greedy/{name}": value
                for name, value in best.items()
                if name.rpartition("/")[2] in told
            }
        return metrics, texts

    def _summary(self, texts: list[Completion], group: int) -> dict[str, float]:
        """Of all problems, and of each task of a mixture by itself."""
        metrics = self._of_task(self.task, texts, group)
        for name, task in (self.task.mixture.tasks if self.task.mixture else {}).items():
            own = [text for text in texts if self.rows[text.problem]["task"] == name]
            if own:
                mine = self._of_task(task, own, group)
                metrics |= {f"task/{name}/{key}": value for key, value in mine.items()}
        return metrics

    def _of_task(self, task: Task, texts: list[Completion], group: int) -> dict[str, float]:
        if self.headline != "pass@1":
            return summarise_rewards(texts, group)
        label = task.label
        labels = label and [label(self.rows[text.problem]) for text in texts[::group]]
        return summarise(texts, group, self._answer, labels)

    def _answer(self, text: Completion) -> str | None:
        row, mixture = self.rows[text.problem], self.task.mixture
        return (mixture.tasks[row["task"]] if mixture else self.task).answer(text.text)

    def _texts(self, params: PyTree, count: int, draw: Draw) -> list[Completion]:
        samples = self.generator(params, self.prompts[:count], draw, self.key)
        problems = np.repeat(np.arange(count, dtype=np.int32), draw.samples)
        texts = [
            self.tokenizer.decode_completion(tokens[mask].tolist())
            for tokens, mask in zip(samples.tokens, samples.mask, strict=True)
        ]
        scores = self._scores(samples, problems, texts)
        lengths, truncated = samples.mask.sum(axis=1).tolist(), samples.truncated.tolist()
        places = problems.tolist()
        return [
            Completion(*row) for row in zip(places, texts, lengths, truncated, scores, strict=True)
        ]

    def _scores(
        self, samples: Samples, problems: Int[np.ndarray, " M"], texts: list[str]
    ) -> list[Score | None]:
        if self.scorer is not None:
            return self.scorer(samples, problems)
        found: list[Score | None] = [None] * len(texts)
        (whole,) = np.nonzero(samples.finite)
        # Every process has all texts, and verifies some.
        own = whole[jax.process_index() :: jax.process_count()]
        scores = self.verifier.score_texts(
            [texts[i] for i in own], problems[own].tolist(), place="held-out row"
        )
        for places, scored in hosts.gathered((own, scores)):
            for i, score in zip(places, scored, strict=True):
                found[i] = score
        return found


class Scorer:
    """A reward model's scores of sampled text, in batches of `rows`: one shape, one program."""

    def __init__(self, reward_model: RewardModel, pool: Prompts, rows: int):
        self.params, self.pool = reward_model.params, pool
        self.rows = round_up(rows, batch_shards())
        # The program holds on to what it closes over, and must not to the parameters.
        model = reward_model.model
        self.run = jax.jit(
            lambda params, pool, problems, samples: whole(
                last_scores(model, on_device(params), *whole_rows(pool, problems, samples))
            )
        )

    def __call__(self, samples: Samples, problems: Int[np.ndarray, " M"]) -> list[Score | None]:
        """Of M completions, each of a problem (a row of the pool). None where the logits of its
        text, or the score, are not finite."""
        count, pieces = len(problems), []
        for start in range(0, count, self.rows):
            # The last batch is filled up with copies, which are dropped.
            places = np.arange(start, start + self.rows) % count
            rows = (problems, samples)
            # What is counted over all rows has no rows to choose.
            piece = jax.tree.map(lambda x, p=places: x[p] if np.ndim(x) else x, rows)
            pieces.append(self.run(self.params, self.pool, *piece))
        scores = np.concatenate(jax.device_get(pieces))[:count]
        known = samples.finite & np.isfinite(scores)
        return [
            Score(score, None, {"score": score}, "a reward model's score") if ok else None
            for score, ok in zip(scores.tolist(), known.tolist(), strict=True)
        ]
