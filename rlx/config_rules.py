"""What training refuses of settings that are each right by themselves: contradictions, settings
that nothing would read, and numbers that do not divide.

A setting at its default is never "set", so that a resolved configuration may name them all.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rlx.settings import Config, offline, rows, updates
from rlx.yaml_text import shown


class Problem(NamedTuple):
    keys: tuple[str, ...]
    """The settings that it depends on, the one to change first."""
    message: str

    def __str__(self) -> str:
        return f"{self.keys[0]}: {self.message}"


def training_problems(config: Config) -> Iterator[Problem]:
    """Yield all that stands between this configuration and a training run."""
    yield from _offline(config) if offline(config) else _online(config)
    yield from _batch(config)
    yield from _optimizer(config)
    yield from _loop(config)
    yield from _evaluation(config)


def _is_set(config: Config, path: str) -> bool:
    section_name, key = path.split(".")
    section = getattr(config, section_name)
    return getattr(section, key) != type(section).model_fields[key].default


def _ignored(config: Config, paths: list[str], because: str, cause: str) -> Iterator[Problem]:
    for path in paths:
        if _is_set(config, path):
            section, key = path.split(".")
            value = shown(getattr(getattr(config, section), key))
            yield Problem((path, cause), f"expected unset, since {because}; came {value}")


def _offline(config: Config) -> Iterator[Problem]:
    name = config.algorithm.name
    unread = [f"rollout.{key}" for key in type(config.rollout).model_fields]
    yield from _ignored(config, unread, f"{name} samples nothing", "algorithm.name")
    if config.batch.samples != 1 and _is_set(config, "batch.samples"):
        yield Problem(
            ("batch.samples", "algorithm.name"),
            f"expected unset or 1, since {name} samples nothing; came {config.batch.samples}",
        )


def _online(config: Config) -> Iterator[Problem]:
    if config.batch.samples < 2:
        yield Problem(
            ("batch.samples", "algorithm.name"),
            f"expected at least 2, since {config.algorithm.name} compares the samples of a "
            f"prompt with each other; came {config.batch.samples}",
        )
    sampling = config.sampling
    differs = "the sampled and the trained distribution would differ"
    if sampling.temperature == 0:
        yield Problem(
            ("sampling.temperature",),
            "expected above 0 in training, since greedy text explores nothing and its "
            "log-probabilities are undefined; came 0",
        )
    for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(sampling, key)
        if value != off:
            yield Problem(
                (f"sampling.{key}",),
                f"expected {off} (off) in training, since {differs}: log-probabilities are of "
                f"the full softmax; came {value}",
            )
    rollout = config.rollout
    if not rollout.dynamic_sampling:
        yield from _ignored(
            config,
            ["rollout.max_rounds"],
            "rollout.dynamic_sampling is false",
            "rollout.dynamic_sampling",
        )
    if rollout.old_logprobs == "current" and config.batch.epochs * config.batch.minibatches > 1:
        yield Problem(
            ("rollout.old_logprobs", "batch.epochs", "batch.minibatches"),
            "expected auto, recompute or sampler, since a batch gets several updates "
            f"(batch.epochs {config.batch.epochs}, batch.minibatches {config.batch.minibatches}); "
            "came current",
        )
    if rollout.overlong_buffer > sampling.max_new_tokens:
        yield Problem(
            ("rollout.overlong_buffer", "sampling.max_new_tokens"),
            f"expected at most sampling.max_new_tokens, {sampling.max_new_tokens}; "
            f"came {rollout.overlong_buffer}",
        )


def _batch(config: Config) -> Iterator[Problem]:
    batch, total = config.batch, rows(config)
    counted = f"batch.prompts * batch.samples = {batch.prompts} * {batch.samples} = {total}"
    if offline(config):
        counted = f"batch.prompts = {total}"
    causes = ("batch.prompts", "batch.samples", "algorithm.name")
    if total % batch.minibatches:
        yield Problem(
            ("batch.minibatches", *causes),
            f"expected a divisor of the step's rows, {counted}; came {batch.minibatches}",
        )
    elif batch.micro and (total // batch.minibatches) % batch.micro:
        yield Problem(
            ("batch.micro", "batch.minibatches", *causes),
            f"expected a divisor of the mini-batch's rows, {total // batch.minibatches} "
            f"({counted}, in {batch.minibatches}); came {batch.micro}",
        )


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer, total = config.optimizer, updates(config)
    if optimizer.name == "sgd":
        moments = [f"optimizer.{key}" for key in ("b1", "b2", "eps", "weight_decay")]
        yield from _ignored(config, moments, "sgd has no such term", "optimizer.name")
    if optimizer.schedule == "constant":
        yield from _ignored(
            config,
            ["optimizer.final_fraction"],
            "optimizer.schedule is constant",
            "optimizer.schedule",
        )
    if optimizer.warmup_steps >= total:
        yield Problem(
            (
                "optimizer.warmup_steps",
                "loop.steps",
                "batch.epochs",
                "batch.minibatches",
            ),
            f"expected below the run's optimizer updates, {total} (loop.steps * batch.epochs * "
            f"batch.minibatches = {config.loop.steps} * {config.batch.epochs} * "
            f"{config.batch.minibatches}); came {optimizer.warmup_steps}",
        )


def _loop(config: Config) -> Iterator[Problem]:
    if config.run.resume and not config.run.dir:
        yield Problem(("run.dir",), "expected the folder of the run to resume; came nothing")
    # Chunks end at absolute multiples of one length, so that a resumed run executes the same
    # programs; what happens between chunks can happen at such steps only.
    chunk = config.loop.chunk
    for path, value in (
        ("loop.steps", config.loop.steps),
        ("eval.every", config.eval.every),
        ("checkpoint.every", config.checkpoint.every),
    ):
        if value % chunk:
            yield Problem(
                (path, "loop.chunk"), f"expected a multiple of loop.chunk, {chunk}; came {value}"
            )


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.eval
    if evaluation.every == 0:
        yield from _ignored(
            config,
            ["eval.problems"],
            "eval.every is 0 (eval.final_problems counts those before and after)",
            "eval.every",
        )
