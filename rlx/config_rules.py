"""What training refuses of settings that are each right by themselves: contradictions, settings
that nothing would read, and numbers that do not divide.

Which terms can be added up: term_rules.py. Where text is sampled: rollout_rules.py.
"""

from collections.abc import Iterator

from rlx.config_problems import Problem, ignored, is_set, keys_of
from rlx.derived import offline, reads_whole_rows, rows, source, terms, unit, updates, uses_lora
from rlx.rollout_rules import rollout_problems
from rlx.settings import Config
from rlx.term_rules import term_problems


def training_problems(config: Config) -> Iterator[Problem]:
    """Yield all that stands between this configuration and a training run."""
    rules = (term_problems, _offline if offline(config) else rollout_problems, _batch)
    for problem in (problem for rule in rules for problem in rule(config)):
        # Which terms there are decides over all of these.
        yield problem._replace(keys=(*problem.keys, "algorithm"))
    yield from _lora(config)
    yield from _frozen(config)
    yield from _attention(config)
    yield from _optimizer(config)
    yield from _loop(config)
    yield from _evaluation(config)


def _offline(config: Config) -> Iterator[Problem]:
    name = terms(config)[0].name
    unread = [
        path for section in ("rollout", "reward", "critic") for path in keys_of(config, section)
    ]
    # Evaluation samples from the model as it is.
    unread += ["loop.mode", "sampling.weights", "sampling.cache"]
    yield from ignored(config, unread, f"{name} samples nothing")
    given = {"pairs": "pairs", "texts": "chats" if config.task.name == "chat" else None}
    if measured := given[source(config)]:
        sampled = [f"sampling.{key}" for key in ("temperature", "top_k", "top_p", "min_p", "slots")]
        sampled += ["sampling.long_prompts"]
        sampled += ["eval.samples", "eval.batch", "eval.greedy", "log.samples"]
        because = f"{name} samples nothing, and is measured on held-out {measured}"
        yield from ignored(config, sampled, because, "task")
    if config.batch.samples != 1 and is_set(config, "batch.samples"):
        yield Problem(
            ("batch.samples",),
            f"expected unset or 1, since {name} samples nothing; came {config.batch.samples}",
        )


def _batch(config: Config) -> Iterator[Problem]:
    batch, total, whole = config.batch, rows(config), unit(config)
    counted = f"batch.prompts * batch.samples = {batch.prompts} * {batch.samples} = {total}"
    if offline(config):
        counted = f"batch.prompts = {total}"
        if whole > 1:
            counted = f"batch.prompts * {whole} = {batch.prompts} * {whole} = {total}"
    if source(config) == "pairs":
        because = f"{terms(config)[0].name} does not learn from texts as they stand"
        yield from ignored(config, ["batch.packing"], because)
    paired = [term.name for term in terms(config) if term.row.unit > 1]
    of_pairs = f", in whole pairs, since {paired[0]} learns from pairs" if paired else ""
    causes = ("batch.prompts", "batch.samples")
    if source(config) == "rollouts" and batch.samples % whole:
        yield Problem(
            ("batch.samples",),
            f"expected an even number, since {paired[0]} learns from pairs of a group's samples; "
            f"came {batch.samples}",
        )
    elif (total // whole) % batch.minibatches:
        yield Problem(
            ("batch.minibatches", *causes),
            f"expected a divisor of the step's rows, {counted}{of_pairs}; came {batch.minibatches}",
        )
    elif batch.micro and ((total // batch.minibatches) % batch.micro or batch.micro % whole):
        yield Problem(
            ("batch.micro", "batch.minibatches", *causes),
            f"expected a divisor of the mini-batch's rows, {total // batch.minibatches} "
            f"({counted}, in {batch.minibatches}){of_pairs}; came {batch.micro}",
        )


def _lora(config: Config) -> Iterator[Problem]:
    shape = ["lora.alpha", "lora.targets"]
    if not uses_lora(config):
        causes = ("lora.rank", "lora.adapter")
        yield from ignored(config, [*shape, "lora.base_dtype"], "lora.rank is 0", *causes)
    elif config.lora.adapter:
        because = "the adapter in lora.adapter decides it"
        yield from ignored(config, ["lora.rank", *shape], because, "lora.adapter")
    targets = config.lora.targets
    if len(set(targets)) < len(targets):
        yield Problem(
            ("lora.targets",), f"expected each projection once; came {', '.join(targets)}"
        )


def _attention(config: Config) -> Iterator[Problem]:
    if not reads_whole_rows(config):
        because = "sampled rows lie in streams, which have an attention of their own"
        causes = ("algorithm", "batch.packing", "reward.source")
        yield from ignored(config, ["model.attention"], because, *causes)


def _frozen(config: Config) -> Iterator[Problem]:
    reads = [term for term in terms(config) if term.row.bind(**term.hyper).uses_reference()]
    reward = config.reward
    if not reads and (offline(config) or (reward.kl == "none" and reward.source == "verifier")):
        settings = ["model.frozen_dtype", "model.frozen_memory"]
        because = "the run has neither a reference nor a reward model"
        yield from ignored(config, settings, because, "algorithm", "reward.kl", "reward.source")
    if config.model.frozen_memory == "host" and config.loop.mode == "fused":
        yield Problem(
            ("model.frozen_memory", "loop.mode"),
            "expected device, since in one program with the update (loop.mode=fused) the copy may "
            "stay on the device; came host",
        )


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer, total = config.optimizer, updates(config)
    if optimizer.name == "sgd":
        moments = [f"optimizer.{key}" for key in ("b1", "b2", "eps", "weight_decay", "state_dtype")]
        yield from ignored(config, moments, "sgd has no such term", "optimizer.name")
    if optimizer.schedule == "constant":
        yield from ignored(
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


def greedy_samples(config: Config) -> Iterator[Problem]:
    """What `eval` refuses too: they would all be the same."""
    if config.eval.samples > 1 and not config.sampling.temperature:
        yield Problem(
            ("eval.samples", "sampling.temperature"),
            "expected 1, since sampling.temperature is 0 and greedy samples are all the same; "
            f"came {config.eval.samples}",
        )


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.eval
    yield from greedy_samples(config)
    if evaluation.every == 0:
        yield from ignored(
            config,
            ["eval.problems"],
            "eval.every is 0 (eval.final_problems counts those before and after)",
            "eval.every",
        )
