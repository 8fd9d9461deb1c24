"""What training refuses where text is sampled: of sampling, rewards, the critic, and the groups
that a step takes.
"""

from collections.abc import Iterator

from rlx.advantages import components_normalised
from rlx.algorithms.record import hyper_parameters
from rlx.config_problems import Problem, ignored, keys_of
from rlx.corrections import CORRECTIONS
from rlx.derived import rows, terms
from rlx.settings import Config
from rlx.term_rules import compares, of_rows


def rollout_problems(config: Config) -> Iterator[Problem]:
    comparing = [term.name for term in terms(config) if compares(term)]
    if config.batch.samples < 2 and comparing:
        yield Problem(
            ("batch.samples",),
            f"expected at least 2, since {comparing[0]} compares the samples of a prompt with each "
            f"other; came {config.batch.samples}",
        )
    yield from _sampling(config)
    yield from _reward(config)
    yield from _critic(config)
    yield from _old_logprobs(config)
    yield from _correction(config)
    yield from _prompts(config)


def _sampling(config: Config) -> Iterator[Problem]:
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
    total = rows(config)
    if sampling.slots > total:
        yield Problem(
            ("sampling.slots", "batch.prompts", "batch.samples"),
            f"expected at most the step's rows, batch.prompts * batch.samples = {total}; "
            f"came {sampling.slots}",
        )


def _reward(config: Config) -> Iterator[Problem]:
    reward = config.reward
    if reward.source == "model" and not reward.model:
        yield Problem(
            ("reward.model", "reward.source"),
            "expected a reward model's folder, since reward.source is model; came nothing",
        )
    if reward.source == "verifier":
        yield from ignored(config, ["reward.model"], "reward.source is verifier", "reward.source")
        if len(reward.verifiers) < 2:
            because = f"reward.verifiers names {len(reward.verifiers) or 'none'}"
            yield from ignored(config, ["reward.combine"], because, "reward.verifiers")
        if reward.verifiers and not any(entry.get("name") == "task" for entry in reward.verifiers):
            because = "reward.verifiers does not name the task's own, {name: task}"
            yield from ignored(config, _task_weights(config), because, "reward.verifiers")
        if reward.workers == 0:
            limits = ["reward.row_seconds", "reward.worker_mib"]
            yield from ignored(config, limits, "reward.workers is 0", "reward.workers")
    else:
        of_verifiers = ("verifiers", "combine", "workers", "row_seconds", "worker_mib")
        yield from ignored(
            config,
            [f"reward.{key}" for key in of_verifiers],
            "reward.source is model: no verifier scores",
            "reward.source",
        )
    if reward.kl == "none":
        of_kl = ["reward.kl_beta", "reward.kl_target"]
        yield from ignored(config, of_kl, "reward.kl is none", "reward.kl")
    elif reward.kl_beta == 0:
        yield Problem(
            ("reward.kl_beta", "reward.kl"),
            f"expected above 0, since reward.kl is {reward.kl}; came 0",
        )
    total = rows(config)
    if reward.kl != "none" and reward.kl_target and reward.kl_horizon < total:
        yield Problem(
            ("reward.kl_horizon", "batch.prompts", "batch.samples"),
            "expected at least the completions of a step, batch.prompts * batch.samples = "
            f"{total}, or the weight would overshoot, and below a fifth of it change its sign; "
            f"came {reward.kl_horizon:g}",
        )
    if reward.kl_target == 0:
        yield from ignored(
            config, ["reward.kl_horizon"], "reward.kl_target is 0", "reward.kl_target"
        )
    readers = [t for t in terms(config) if t.row.advantages is not None]
    by_parts = [t.name for t in readers if t.row.advantages is components_normalised]
    if by_parts and len(by_parts) == len(readers):
        shaping = ["kl", "running", "clip", "missing_stop_penalty"]
        yield from ignored(
            config,
            ["rollout.overlong_buffer", *(f"reward.{key}" for key in shaping)],
            f"{by_parts[0]} with components_normalised reads the reward's parts and never their "
            "sum, which this changes",
        )


def _task_weights(config: Config) -> list[str]:
    """What only the task's own verifier reads."""
    return [path for path in keys_of(config, "task") if path.endswith("_weight")]


def _critic(config: Config) -> Iterator[Problem]:
    if not any(term.row.critic for term in terms(config)):
        yield from ignored(
            config,
            keys_of(config, "critic"),
            "the advantages read no critic's values (those of ppo do, and `advantage: gae`)",
        )
    elif config.critic.kind == "head":
        yield from ignored(
            config,
            ["critic.path", "critic.learning_rate"],
            "critic.kind is head: the critic is a part of the policy",
            "critic.kind",
        )
    else:
        because = "critic.kind is model: its loss stands alone, and its learning rate scales it"
        yield from ignored(config, ["critic.coefficient"], because, "critic.kind")


def _old_logprobs(config: Config) -> Iterator[Problem]:
    rollout, batch = config.rollout, config.batch
    if rollout.old_logprobs != "current":
        return
    stands, expected = "rollout.old_logprobs", "expected auto or recompute, since"
    if batch.epochs * batch.minibatches > 1:
        yield Problem(
            (stands, "batch.epochs", "batch.minibatches"),
            "expected auto, recompute or sampler, since a batch gets several updates "
            f"(batch.epochs {batch.epochs}, batch.minibatches {batch.minibatches}); "
            "came current",
        )
    if config.reward.kl != "none":
        yield Problem(
            (stands, "reward.kl"),
            f"{expected} reward.kl reads them before the update; came current",
        )
    if rollout.replay:
        yield Problem(
            (stands, "rollout.replay"),
            f"{expected} replayed text was sampled by an earlier policy; came current",
        )
    if rollout.correction != "none":
        yield Problem(
            (stands, "rollout.correction"),
            f"{expected} rollout.correction reads them before the update; came current",
        )


def _correction(config: Config) -> Iterator[Problem]:
    rollout, name = config.rollout, config.rollout.correction
    cause = "rollout.correction"
    if name == "none":
        bounds = ["rollout.correction_cap", "rollout.correction_floor"]
        yield from ignored(config, bounds, "rollout.correction is none", cause)
        return
    if "floor" not in hyper_parameters(CORRECTIONS[name]):
        because = f"{name} has a cap only"
        yield from ignored(config, ["rollout.correction_floor"], because, cause)
    if rollout.old_logprobs == "sampler":
        yield Problem(
            (cause, "rollout.old_logprobs"),
            "expected none, since with rollout.old_logprobs=sampler the ratio of the loss holds "
            f"the gap already; came {name}",
        )
    by_row = [term.name for term in terms(config) if of_rows(term)]
    if by_row and name.startswith("token_"):
        yield Problem(
            (cause,),
            f"expected {name.replace('token_', 'sequence_')}, since the loss of {by_row[0]} is "
            f"one value a row; came {name}",
        )


def _prompts(config: Config) -> Iterator[Problem]:
    """Which prompts and groups a step takes."""
    rollout, sampling, samples = config.rollout, config.sampling, config.batch.samples
    if not rollout.dynamic_sampling:
        yield from ignored(
            config,
            ["rollout.max_rounds"],
            "rollout.dynamic_sampling is false",
            "rollout.dynamic_sampling",
        )
    if rollout.overlong_buffer > sampling.max_new_tokens:
        yield Problem(
            ("rollout.overlong_buffer", "sampling.max_new_tokens"),
            f"expected at most sampling.max_new_tokens, {sampling.max_new_tokens}; "
            f"came {rollout.overlong_buffer}",
        )
    probe = rollout.probe
    if probe and (probe < 2 or probe >= samples or samples % probe):
        yield Problem(
            ("rollout.probe", "batch.samples"),
            f"expected 0, or a divisor of batch.samples, {samples}, from 2 and below it; "
            f"came {probe}",
        )
    if probe and rollout.dynamic_sampling:
        yield Problem(
            ("rollout.probe", "rollout.dynamic_sampling"),
            f"expected 0, since rollout.dynamic_sampling draws whole groups; came {probe}",
        )
    if config.reward.source == "model":
        yield from ignored(
            config,
            ["rollout.retire_after"],
            "reward.source is model, which calls nothing right or wrong",
            "reward.source",
        )
        because, cause = "reward.source is model: no verifier scores", "reward.source"
        yield from ignored(config, _task_weights(config), because, cause)
    if samples < 2:
        because = "batch.samples is 1: a group of one is never mixed"
        mixed = ["rollout.dynamic_sampling", "rollout.replay"]
        yield from ignored(config, mixed, because, "batch.samples")
    first = terms(config)[0]
    if not compares(first):
        because = (
            f"the advantages of {first.name} compare no group: one whose rewards are equal "
            "teaches too"
        )
        yield from ignored(config, ["rollout.replay"], because)
    if not rollout.replay:
        because = "rollout.replay is 0"
        yield from ignored(config, ["rollout.replay_max_age"], because, "rollout.replay")
    if critics := [term.name for term in terms(config) if term.row.critic]:
        yield from ignored(
            config,
            ["rollout.replay"],
            f"{critics[0]} has a critic, whose values of replayed text are an earlier critic's",
        )
