"""A task's held-out problems, ready to be sampled and scored at any parameters."""

from typing import Any

import jax
from jaxtyping import Key, PyTree

from model.errors import BadInput
from rlx import assemble
from rlx.config import Config
from rlx.data import encode_prompts, pad_left, prompt_width
from rlx.evaluate import Completion, summarise
from rlx.generate import Draw, Generator
from rlx.rewards.host import HostVerifier
from rlx.tasks import Task


class Heldout:
    def __init__(
        self,
        config: Config,
        policy: assemble.Policy,
        task: Task,
        key: Key[jax.Array, ""],
        counts: dict[str, int],
    ):
        """`counts` are the numbers of problems that will be asked for, by the setting's name.

        Raises BadInput where the task has fewer, or their prompts don't fit.
        """
        for name, count in counts.items():
            if count > len(task.heldout):
                raise BadInput(
                    f"{name}: expected at most the task's {len(task.heldout)} held-out problems; "
                    f"came {count}."
                )
        self.rows = task.heldout[: max(counts.values())]
        self.answer = task.answer
        self.key = key
        tokenizer, sampling = policy.tokenizer, config.sampling
        encoded = encode_prompts(
            self.rows, tokenizer, config.sampling.max_prompt_tokens, "held-out row"
        )
        assemble.check_length(policy.config, encoded, sampling.max_new_tokens)
        self.tokens, self.positions = pad_left(encoded, prompt_width(encoded), tokenizer.pad_id)
        self.verifier = HostVerifier(task.score, self.rows, tokenizer.decode, tokenizer.stop_ids)
        samples = config.eval.samples if sampling.temperature else 1
        self.draw = Draw(samples, sampling.temperature, assemble.filters(config))
        self.generator = Generator(
            policy,
            max_new_tokens=sampling.max_new_tokens,
            rows=min(config.eval.batch, min(counts.values()) * samples),
        )

    def evaluate(
        self, params: PyTree, problems: int, *, greedy: bool
    ) -> tuple[dict[str, Any], list[Completion]]:
        """Metrics of the first `problems`, with `greedy/...` beside if asked, and the texts."""
        texts = self._texts(params, problems, self.draw)
        metrics = summarise(texts, self.draw.samples, self.answer)
        if greedy and self.draw.temperature > 0:
            best = summarise(self._texts(params, problems, Draw(1, 0.0)), 1, self.answer)
            metrics |= {f"greedy/{name}": best[name] for name in ("pass@1", "stderr", "truncated")}
        return metrics, texts

    def _texts(self, params: PyTree, problems: int, draw: Draw) -> list[Completion]:
        samples = self.generator(
            params, self.tokens[:problems], self.positions[:problems], draw, self.key
        )
        return [self._completion(samples, row, draw.samples) for row in range(len(samples.tokens))]

    def _completion(self, samples: Any, row: int, group: int) -> Completion:
        problem, length = row // group, int(samples.mask[row].sum())
        text = self.verifier.text(samples.tokens[row], length)
        score = None
        if samples.finite[row]:
            place = f"held-out row {problem}"
            score = self.verifier.score_text(text, self.rows[problem], place=place)
        return Completion(problem, text, length, bool(samples.truncated[row]), score)
