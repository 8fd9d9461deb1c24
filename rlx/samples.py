"""What samples.jsonl shows of a run's text: completions of a training step, and held-out ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from model.tokenizer import Tokenizer
from rlx.evaluate import Completion
from rlx.prepare import Preview


def prompt_text(tokenizer: Tokenizer, row: Mapping[str, Any]) -> str:
    """A row's prompt as the model reads it."""
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else tokenizer.render(prompt)


def training_samples(
    preview: Preview,
    rows: Sequence[Mapping[str, Any]],
    components: Sequence[str],
    tokenizer: Tokenizer,
    count: int,
) -> list[dict[str, Any]]:
    """The first `count` completions of a step; fewer where it kept fewer.

    `rows` are the training rows, `components` the names of a score's components.
    """
    rollout = preview.rollout
    group, width = rollout.rewards.shape[1], rollout.mask.shape[1]
    texts = jax.device_get((rollout.tokens[:count, -width:], rollout.mask[:count]))
    scores = jax.device_get((rollout.rewards, rollout.correct, rollout.components))
    rewards, correct, parts = (x.reshape(-1, *x.shape[2:]) for x in scores)
    advantages, truncated, places = jax.device_get(
        (preview.advantages[:count], rollout.truncated[:count], rollout.rows)
    )
    return [
        {
            "split": "train",
            "prompt": prompt_text(tokenizer, rows[int(places[i // group])]),
            "completion": tokenizer.decode_completion(tokens[mask].tolist()),
            "reward": float(rewards[i]),
            "components": dict(zip(components, parts[i].tolist(), strict=True)),
            "correct": bool(correct[i]) if np.isfinite(correct[i]) else None,
            # One a row, or one a token: then the mean over its tokens.
            "advantage": float(np.broadcast_to(advantages[i], mask.shape)[mask].mean()),
            "truncated": bool(truncated[i]),
            "length": int(mask.sum()),
        }
        for i, (tokens, mask) in enumerate(zip(*texts, strict=True))
        # The place of a group that was never found holds no text.
        if mask.any()
    ]


def heldout_samples(
    texts: Sequence[Completion],
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    count: int,
) -> list[dict[str, Any]]:
    return [
        {
            "split": "heldout",
            "prompt": prompt_text(tokenizer, rows[c.problem]),
            "completion": c.text,
            "reward": c.score.reward if c.score else None,
            "components": c.score.components if c.score else {},
            "correct": c.score.correct if c.score else None,
            "advantage": None,
            "truncated": c.truncated,
            "length": c.length,
        }
        for c in texts[:count]
    ]
