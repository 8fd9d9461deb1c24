"""The sections of a configuration: each setting's type, default, unit and range, once.

`task` and `algorithm` have no keys here: signatures.py reads theirs off the chosen row's functions.
"""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, SerializeAsAny

from model.lora import TARGETS
from model.quantize import Stored
from rlx.algorithms.critic import value
from rlx.algorithms.record import hyper_parameters
from rlx.corrections import CORRECTIONS
from rlx.optimizer_state import StateDtype
from rlx.signatures import AlgorithmSettings, Flag, OneTerm, Section, TaskSettings, model_of


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
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        {}, description="given to the chat template, as {enable_thinking: false} to Qwen3's"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="compute type; auto: bfloat16 on accelerators, float32 on CPU "
        "(master parameters are float32 always)",
    )
    remat: Literal["none", "block", "dots"] = Field(
        "none",
        description="to save memory, recompute each layer in the backward pass: block: all of it; "
        "dots: all but its projections",
    )
    attention: Literal["auto", "plain", "cudnn", "tpu"] = Field(
        "auto",
        description="over rows that are in no stream: cudnn and tpu are fused kernels; auto: the "
        "device's, where it can compute the model, else plain",
    )
    router_aux: float = Field(
        0.0,
        ge=0,
        le=10,
        description="weight of the loss that evens out the load of a policy's experts; 0: off, "
        "and so it must be for models without experts",
    )
    frozen_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="in which a reference and a reward model are kept; auto: model.dtype",
    )
    frozen_memory: Literal["device", "host"] = Field(
        "device",
        description="where they are kept; host: in pinned host memory, copied to the device by "
        "each program that scores with them",
    )


class LoraSettings(Section):
    """Low-rank adapters beside a frozen base, of which they alone are trained."""

    rank: int = Field(0, ge=0, description="of the adapters; 0: off, all parameters are trained")
    alpha: float | None = Field(
        None, gt=0, description="adapters count alpha / rank; null: twice the rank"
    )
    targets: tuple[Literal[*TARGETS], ...] = Field(
        tuple(TARGETS), min_length=1, description="projections that are adapted"
    )
    base_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="what the frozen base lies in; auto: bfloat16 on accelerators, float32 on CPU",
    )
    adapter: str = Field(
        "",
        description="folder in PEFT's format that the run begins from, and that decides rank, "
        "alpha and targets; empty: fresh adapters",
    )


class SamplingSettings(Section):
    max_new_tokens: int = Field(1024, ge=1, description="longest completion, tokens")
    max_prompt_tokens: int = Field(512, ge=1, description="longest prompt, tokens")
    long_prompts: Literal["refuse", "skip"] = Field(
        "refuse",
        description="what is done about rows with a longer one: skip: left out and counted, as "
        "pairs and chats that do not fit are always",
    )
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy, not in training")
    top_k: int = Field(0, ge=0, description="tokens kept; 0: off; not in training")
    top_p: float = Field(1.0, gt=0, le=1, description="probability kept; 1: off; not in training")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="share of the largest probability; 0: off; not in training"
    )
    slots: int = Field(
        0,
        ge=0,
        description="rows decoded at a time, the next in the place of a finished one; 0: all of "
        "a step's (evaluation: eval.batch, generate: 256)",
    )
    weights: Stored = Field(
        "auto",
        description="how kernels lie in memory while training samples; int8: with a scale an "
        "output channel; auto: in model.dtype, as in evaluation and generate always",
    )
    cache: Stored = Field(
        "auto",
        description="how keys and values lie there; int8: with a scale a token and head",
    )


class RewardSettings(Section):
    source: Literal["verifier", "model"] = Field(
        "verifier", description="the task's own verifier, or a reward model"
    )
    model: str = Field("", description="reward model's checkpoint folder; with reward.source=model")
    verifiers: tuple[dict[str, Any], ...] = Field(
        (),
        description="in the place of the task's own: settings of each, with its name (a verifier, "
        "`task` for the task's own, or one of yours as module:function or file.py:function), "
        "weight and label",
    )
    combine: Literal["sum", "stages"] = Field(
        "sum",
        description="how several verifiers make one reward; stages: one is asked only where all "
        "before it passed, by their verdict or their `threshold`",
    )
    workers: int | None = Field(
        None,
        ge=0,
        description="processes that verify; null: none for verifiers that are bounded by "
        "themselves, else one less than the cores; 0: none, and no limits",
    )
    row_seconds: float = Field(
        10.0, gt=0, description="time limit of a row in a process; beyond it has no reward (NaN)"
    )
    worker_mib: int = Field(2048, ge=64, description="memory limit of such a process, MiB")
    kl: Literal["none", "k1", "k3"] = Field(
        "none", description="estimator of a KL penalty to the start, taken off each token's reward"
    )
    kl_beta: float = Field(
        0.0, ge=0, le=100, description="its weight, reward a nat; above 0 with reward.kl only"
    )
    kl_target: float = Field(
        0.0, ge=0, description="nats a completion that the weight is steered to; 0: it is fixed"
    )
    kl_horizon: float = Field(
        10_000.0, gt=0, description="completions over which it is steered; with kl_target only"
    )
    missing_stop_penalty: float = Field(
        0.0, ge=0, description="taken off the reward of a truncated row"
    )
    running: Flag = Field(
        False, description="normalise rewards by the mean and deviation of all so far"
    )
    clip: float = Field(
        0.0, ge=0, description="largest absolute reward, after normalisation; 0: off"
    )


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
        "there (with no replay, correction or reward.kl), else recompute",
    )
    correction: Literal["none", *CORRECTIONS] = Field(
        "none", description="what is done about the gap between sampler and trainer"
    )
    correction_cap: float = Field(
        2.0, gt=1, description="largest ratio of the two, trainer to sampler; with a correction"
    )
    correction_floor: float = Field(
        0.5, gt=0, lt=1, description="least ratio of the two; with a correction that masks"
    )
    probe: int = Field(
        0,
        ge=0,
        description="samples of a prompt before it is decided whether its group is worth "
        "completing; at least 2; 0: off",
    )
    retire_after: int = Field(
        0,
        ge=0,
        description="visits in a row with all samples right, after which a prompt is drawn no "
        "more; 0: never",
    )
    replay: int = Field(
        0,
        ge=0,
        description="groups kept from earlier steps to take the place of those that teach "
        "nothing; 0: off",
    )
    replay_max_age: int = Field(8, ge=1, description="steps that a group is kept; with replay only")


class BatchSettings(Section):
    prompts: int = Field(32, ge=1, description="prompts (or data rows, or pairs of rows) a step")
    samples: int = Field(8, ge=1, description="completions a prompt, at least 2 to compare a group")
    minibatches: int = Field(1, ge=1, description="optimizer updates an epoch")
    epochs: int = Field(1, ge=1, description="passes over a step's rows")
    micro: int = Field(
        0, ge=0, description="rows a forward and backward pass; 0: the whole mini-batch"
    )
    packing: Flag | None = Field(
        None,
        description="compute no padding; null: where rows are sampled (in streams, each prompt "
        "once), not in sft (several conversations a row, each attending to itself alone)",
    )


class OptimizerSettings(Section):
    name: Literal["adamw", "sgd"] = Field("adamw", description="update rule")
    learning_rate: float = Field(1e-6, gt=0, le=10, description="peak")
    b1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment; adamw")
    b2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment; adamw")
    eps: float = Field(1e-8, gt=0, le=1, description="added to the second moment's root; adamw")
    weight_decay: float = Field(0.0, ge=0, le=1, description="decoupled; adamw")
    state_dtype: StateDtype = Field(
        "float32",
        description="how both moments lie in memory, at 8, 4 or about 2 bytes a parameter; int8: "
        "with a scale a block; adamw",
    )
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


class CriticSettings(Section):
    """For algorithms whose advantages read a critic's values."""

    kind: Literal["head", "model"] = Field(
        "head", description="head: on the policy's trunk; model: one of its own"
    )
    path: str = Field(
        "",
        description="folder of a policy or reward model that it begins as; empty: the policy; "
        "with critic.kind=model only",
    )
    learning_rate: float = Field(
        0.0,
        ge=0,
        le=10,
        description="peak; 0: optimizer.learning_rate; with critic.kind=model only",
    )
    coefficient: float = Field(
        0.1,
        gt=0,
        le=100,
        description="weight of a head's loss beside the policy's; with critic.kind=head only",
    )
    value_clip: float = Field(
        hyper_parameters(value)["value_clip"].default,
        gt=0,
        description="a value counts as learnt up to this distance from the one at sampling time",
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


AUTO = "auto"


class MeshSettings(Section):
    """`mesh: auto` is all three at 0."""

    data: int = Field(0, ge=0, description="devices that each compute rows of their own; 0: chosen")
    fsdp: int = Field(
        0,
        ge=0,
        description="devices that compute rows of their own and share the parameters among them; "
        "0: chosen",
    )
    tensor: int = Field(
        0,
        ge=0,
        description="devices that compute the same rows, each a part of the heads, the "
        "feed-forward width and the vocabulary; 0: chosen",
    )


class HostSettings(Section):
    """Of several processes, each on a host of its own, the same command starts all."""

    join: Literal["auto", "never"] = Field(
        "auto",
        description="auto: with the processes that coordinator, count and index name, or those of "
        "Cloud TPU, Slurm, Open MPI or a Kubernetes job; never: this process alone",
    )
    coordinator: str = Field("", description="host:port of the first process; empty: as detected")
    count: int = Field(0, ge=0, description="processes; with hosts.coordinator only")
    index: int | None = Field(
        None,
        ge=0,
        description="this process's number, from 0; null: what the variable RLX_HOST_INDEX holds",
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
    keep_best: Flag = Field(
        True,
        description="keep the one with the best score too, of those saved at an evaluation",
    )


class LogSettings(Section):
    samples: int = Field(8, ge=0, description="completions written at each evaluation")
    tensorboard: Flag = Field(True, description="write TensorBoard events")


def _default(base: type[Section]) -> Callable[[], Section]:
    return lambda: model_of(base, base.model_fields["name"].default)()


class Config(Section):
    """A run's settings, section by section."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    task: SerializeAsAny[TaskSettings] = Field(default_factory=_default(TaskSettings))
    sampling: SamplingSettings = SamplingSettings()
    algorithm: SerializeAsAny[AlgorithmSettings] = Field(default_factory=_default(OneTerm))
    reward: RewardSettings = RewardSettings()
    rollout: RolloutSettings = RolloutSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    critic: CriticSettings = CriticSettings()
    loop: LoopSettings = LoopSettings()
    mesh: MeshSettings = MeshSettings()
    hosts: HostSettings = HostSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
