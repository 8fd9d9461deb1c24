"""The sections of a configuration: each setting's type, default, unit and range, once.

The keys of `algorithm` and `task` are not written here. They are the keyword-only parameters of
the chosen row's functions, which hold their defaults; only their ranges are in a table below.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, create_model
from pydantic.fields import FieldInfo

from rlx.algorithms import ALGORITHMS
from rlx.algorithms.record import hyper_parameters
from rlx.tasks import TASKS


def _flag(value: Any) -> Any:
    # bool("False") is True, so that text is read by its letters and never by its truth.
    words = {"true": True, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(_flag)]


class Section(BaseModel):
    """Refuses unknown keys and changes of type: no text for a number, no 1.5 for an integer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSettings(Section):
    name: str = Field(
        "", pattern="^[^/]*$", description="no slash; empty: the configuration file's stem"
    )
    dir: str = Field("", description="run folder; empty: runs/<name>-<date-time>")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="the only source of randomness")
    resume: Flag = Field(False, description="go on from the last checkpoint in the run folder")


class ModelSettings(Section):
    path: str = Field("nano", min_length=1, description="checkpoint folder; nano: the bundled one")
    weights: Literal["checkpoint", "random"] = Field(
        "checkpoint", description="random: the folder gives shape and tokenizer only"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="compute type; auto: bfloat16 on accelerators, float32 on CPU "
        "(master parameters are float32 always)",
    )
    remat: Literal["none", "block"] = Field(
        "none", description="block: recompute each layer in the backward pass, to save memory"
    )


class TaskSettings(Section):
    """`name` only; the chosen task's own keys come from its signature."""

    name: str = Field("countdown", description="row of the table of tasks")


class SamplingSettings(Section):
    max_new_tokens: int = Field(1024, ge=1, description="longest completion, tokens")
    max_prompt_tokens: int = Field(512, ge=1, description="longest prompt, tokens")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy, not in training")
    top_k: int = Field(0, ge=0, description="tokens kept; 0: off; not in training")
    top_p: float = Field(1.0, gt=0, le=1, description="probability kept; 1: off; not in training")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="share of the largest probability; 0: off; not in training"
    )


class AlgorithmSettings(Section):
    """`name` only; the chosen algorithm's own keys come from its functions' signatures."""

    name: str = Field("dapo", description="row of the table of algorithms")


class RolloutSettings(Section):
    dynamic_sampling: Flag = Field(
        False, description="draw prompts until batch.prompts groups are informative"
    )
    max_rounds: int = Field(4, ge=1, description="draws at most; with dynamic_sampling only")
    overlong_buffer: int = Field(
        0, ge=0, description="tokens before the limit in which the reward falls to -1; 0: off"
    )
    overlong_filter: Flag = Field(False, description="leave truncated rows out of the loss")
    old_logprobs: Literal["auto", "current", "recompute", "sampler"] = Field(
        "auto",
        description="current: those of the update itself, where a batch gets one; auto: current "
        "there, else recompute",
    )


class BatchSettings(Section):
    prompts: int = Field(32, ge=1, description="prompts (or data rows) a step")
    samples: int = Field(8, ge=1, description="completions a prompt, at least 2 to compare a group")
    minibatches: int = Field(1, ge=1, description="optimizer updates an epoch")
    epochs: int = Field(1, ge=1, description="passes over a step's rows")
    micro: int = Field(
        0, ge=0, description="rows a forward and backward pass; 0: the whole mini-batch"
    )


class OptimizerSettings(Section):
    name: Literal["adamw", "sgd"] = Field("adamw", description="update rule")
    learning_rate: float = Field(1e-6, gt=0, le=10, description="peak")
    b1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment; adamw")
    b2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment; adamw")
    eps: float = Field(1e-8, gt=0, le=1, description="added to the second moment's root; adamw")
    weight_decay: float = Field(0.0, ge=0, le=1, description="decoupled; adamw")
    clip_norm: float = Field(1.0, ge=0, description="largest global norm of a gradient; 0: off")
    warmup_steps: int = Field(
        0, ge=0, description="optimizer updates to the peak; the first already takes peak/warmup"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after warm-up"
    )
    final_fraction: float = Field(
        0.0, ge=0, le=1, description="of the peak, at the end; with linear or cosine only"
    )


class LoopSettings(Section):
    steps: int = Field(200, ge=1, description="steps: one rollout and its updates each")
    chunk: int = Field(1, ge=1, description="steps a scan; the host acts between chunks only")
    mode: Literal["auto", "fused", "staged"] = Field(
        "auto", description="fused: whole steps under one jit; staged: stage by stage"
    )
    max_seconds: float = Field(
        0.0, ge=0, description="stop at the end of the chunk that passes it; 0: no limit"
    )


class EvalSettings(Section):
    every: int = Field(10, ge=0, description="steps between evaluations; 0: before and after only")
    problems: int = Field(128, ge=1, description="held-out problems while training")
    final_problems: int = Field(512, ge=1, description="held-out problems before and after")
    samples: int = Field(1, ge=1, description="completions a problem")
    batch: int = Field(256, ge=1, description="rows at a time")
    greedy: Flag = Field(True, description="evaluate greedily too, before and after")


class CheckpointSettings(Section):
    every: int = Field(100, ge=0, description="steps between checkpoints; 0: at the end only")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_best: Flag = Field(True, description="keep the one with the best held-out score too")


class LogSettings(Section):
    samples: int = Field(8, ge=0, description="completions written at each evaluation")
    tensorboard: Flag = Field(True, description="write TensorBoard events")


# What a hyper-parameter may be, by name: one word means one thing in every algorithm and task.
# A name that is not here has its type for a limit.
RANGES: dict[str, FieldInfo] = {
    "clip_low": Field(ge=0, lt=1, description="the ratio is clipped at 1 - clip_low"),
    "clip_high": Field(ge=0, le=10, description="the ratio is clipped at 1 + clip_high"),
    "beta": Field(ge=0, le=100, description="weight of the KL term, or a preference's temperature"),
    "ddof": Field(ge=0, le=1, description="1: sample standard deviation, 0: population"),
    "epsilon": Field(ge=0, le=1, description="added to the standard deviation"),
    "gamma": Field(ge=0, le=1, description="discount a token"),
    "lam": Field(ge=0, le=1, description="decay of the advantage estimate a token"),
    "cap": Field(gt=0, description="largest importance weight"),
    "clip": Field(ge=0, le=10, description="clip of the log-ratio"),
    "tau_positive": Field(gt=0, description="gate's temperature where the advantage is positive"),
    "tau_negative": Field(gt=0, description="gate's temperature where the advantage is negative"),
    "label_smoothing": Field(ge=0, lt=0.5, description="share of preferences taken as wrong"),
    "train_size": Field(ge=1, description="problems to train on"),
    "heldout_size": Field(ge=1, description="problems to evaluate on"),
    "format_weight": Field(ge=0, le=1, description="reward for the form of the answer alone"),
    "language": Field(description="of the prompts"),
    "give_up": Field(ge=0, le=1, description="worked examples: chance to give up after a miss"),
    "demonstrations": Field(ge=1, description="worked completions a training problem, for sft"),
    "numbers": Field(description="counts of numbers a problem may have, in equal shares"),
    "lowest": Field(description="least number of a problem"),
    "highest": Field(description="largest number of a problem"),
    "target_lowest": Field(description="least target"),
    "target_highest": Field(description="largest target"),
    "file": Field(description="file of training rows; empty: they are generated"),
    "heldout_file": Field(description="file of held-out rows; empty: they are set apart"),
}

# Given by the caller: the run's seed to a task, `sampling.max_new_tokens` to a reduction.
FILLED = frozenset({"seed", "budget"})


def functions_of(section: str, name: str) -> tuple[Callable, ...]:
    """Return the functions whose hyper-parameters are the keys of `section`, in a row's order."""
    if section == "task":
        return (TASKS[name],)
    row = ALGORITHMS[name]
    return tuple(f for f in (row.advantages, row.loss, row.weights) if f is not None)


def model_of(section: str, name: str) -> type[Section]:
    """Return the type of the section `algorithm` or `task` where row `name` is chosen.

    Raises KeyError where the table has no such row.
    """
    return _built(section, name, functions_of(section, name))


@functools.cache
def _built(section: str, name: str, functions: tuple[Callable, ...]) -> type[Section]:
    fields: dict[str, Any] = {}
    for function in functions:
        for key, parameter in hyper_parameters(function).items():
            default = parameter.default
            if key in FILLED:
                continue
            if default is inspect.Parameter.empty:
                default = ...
            if key in fields and fields[key][1] != default:
                raise TypeError(
                    f"two functions of {section} {name} have different defaults for `{key}`: "
                    f"expected one, came {fields[key][1]!r} and {default!r}"
                )
            kind = Flag if parameter.annotation is bool else parameter.annotation
            about = RANGES.get(key) or Field(description=_explained(function, key))
            fields[key] = (Annotated[kind, about], default)
    base = AlgorithmSettings if section == "algorithm" else TaskSettings
    about = base.model_fields["name"].description
    chosen = (Literal[name], Field(name, description=about))
    return create_model(f"{section}_{name}", __base__=base, name=chosen, **fields)


def _explained(function: Callable, key: str) -> str:
    """Return the first sentence of the docstring that speaks of the parameter, or its name."""
    text = " ".join((inspect.getdoc(function) or "").split())
    about = [s for s in re.split(r"(?<=[.:]) ", text) if f"`{key}`" in s]
    return about[0].rstrip(".:") if about else key.replace("_", " ")


def _default(section: str, base: type[Section]) -> Callable[[], Section]:
    return lambda: model_of(section, base.model_fields["name"].default)()


class Config(Section):
    """A run's settings, section by section."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    task: SerializeAsAny[TaskSettings] = Field(default_factory=_default("task", TaskSettings))
    sampling: SamplingSettings = SamplingSettings()
    algorithm: SerializeAsAny[AlgorithmSettings] = Field(
        default_factory=_default("algorithm", AlgorithmSettings)
    )
    rollout: RolloutSettings = RolloutSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loop: LoopSettings = LoopSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()


def hyper(section: Section, function: Callable | None = None) -> dict[str, Any]:
    """Return the hyper-parameters of `algorithm` or `task`, or those that `function` takes.

    What the caller fills (`seed`, `budget`) is not among them.
    """
    values = {key: value for key, value in section if key != "name"}
    if function is None:
        return values
    return {key: values[key] for key in hyper_parameters(function) if key in values}


def old_logprobs(config: Config) -> str:
    """`rollout.old_logprobs`, `auto` resolved: the current ones where a batch gets one update."""
    if config.rollout.old_logprobs != "auto":
        return config.rollout.old_logprobs
    return "current" if config.batch.epochs * config.batch.minibatches == 1 else "recompute"


def offline(config: Config) -> bool:
    """Whether the algorithm learns from data as it stands, with no text sampled."""
    return ALGORITHMS[config.algorithm.name].advantages is None


def rows(config: Config) -> int:
    """Return the rows of a step, `N * G`; `N` where nothing is sampled."""
    return config.batch.prompts * (1 if offline(config) else config.batch.samples)


def updates(config: Config) -> int:
    """Return the optimizer updates of the whole run."""
    return config.loop.steps * config.batch.epochs * config.batch.minibatches
