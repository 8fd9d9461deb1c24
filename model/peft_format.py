"""Adapters as a folder in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.config import CheckpointError, ModelConfig, read_json
from model.lora import TARGETS, inputs
from model.shards import listed, write_json
from model.tensors import SCORE, tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
READABLE = ("F32", "F16", "BF16")

USED = ("peft_type", "task_type", "r", "lora_alpha", "target_modules", "init_lora_weights")

INERT = (
    # Where it came from, and how another library holds it.
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode"),
    *("runtime_config", "megatron_core"),
    # Of training alone: nothing is dropped where adapters are read, and no dropout is built here.
    "lora_dropout",
    # Say nothing while use_qalora is false and target_modules is a list.
    *("qalora_group_size", "exclude_modules"),
)
"""Fields that change nothing here. All others must be off: false, null, empty or zero."""

PLAIN = (True, False, "gaussian", None)
"""Values of init_lora_weights that leave the base as it is; PiSSA and others change it."""


class Adapters(NamedTuple):
    params: PyTree
    """Numpy arrays, float32."""
    rank: int
    alpha: float
    targets: tuple[str, ...]


class Place(NamedTuple):
    """Of one stored tensor in the adapters."""

    target: str
    leaf: str
    """`lora_a` or `lora_b`."""
    layer: int
    shape: tuple[int, int]
    """Stored, the transpose of the leaf's."""
    unfolded: tuple[int, ...]
    """The leaf's, without the axis of layers."""


def save_adapters(
    folder: str | Path,
    adapters: PyTree,
    config: ModelConfig,
    *,
    alpha: float,
    base: str | Path,
    scorer: bool = False,
) -> None:
    """Writes the adapters, float32. `base` is the folder of the model that they are of.

    A `value_head` is left out, as a critic's is no part of the policy; of a `scorer` it is written
    as PEFT does a classifier's head. All is written beside `folder` and renamed at the end; an
    earlier adapter at `folder` is replaced, another folder is refused.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not (folder / CONFIG).is_file() and any(folder.iterdir()):
        raise CheckpointError(
            f"The adapter's folder {folder} holds something that is no adapter; it would be lost."
        )
    found = {
        target: adapters["layers"][module][target]
        for target, module in TARGETS.items()
        if target in adapters["layers"].get(module, {})
    }
    rank = next(iter(found.values()))["lora_b"].shape[1]
    stored = {
        name: np.ascontiguousarray(
            np.asarray(found[p.target][p.leaf][p.layer]).reshape(p.shape[::-1]).T, np.float32
        )
        for name, p in _places(config, tuple(found), rank).items()
    }
    if scorer:
        head = np.asarray(adapters["value_head"]["kernel"], np.float32)
        stored[PREFIX + SCORE] = np.ascontiguousarray(head.T)
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    write_json(partial / CONFIG, _described(tuple(found), rank, alpha, base, scorer))
    save_file(stored, partial / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(partial / CONFIG, partial / WEIGHTS)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def load_adapters(folder: str | Path, config: ModelConfig) -> Adapters:
    """The adapters of a language model in a folder that PEFT or `save_adapters` wrote.

    Raises `CheckpointError` with all faults at once: settings that ask for what is not built, and
    missing, unexpected and misshapen tensors.
    """
    folder = Path(folder)
    rank, alpha, targets = _read_settings(folder)
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"The adapter folder {folder} has no {WEIGHTS}.")
    places = _places(config, targets, rank)
    leaves: dict[tuple[str, str], np.ndarray] = {}
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as held:
            _check_tensors(folder, held, places)
            for name, p in places.items():
                leaf = leaves.setdefault(
                    (p.target, p.leaf), np.empty((config.num_layers, *p.unfolded), np.float32)
                )
                leaf[p.layer] = held.get_tensor(name).T.reshape(p.unfolded)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS} is no whole file: {error}.") from None
    layers: dict[str, Any] = {}
    for (target, leaf), value in leaves.items():
        layers.setdefault(TARGETS[target], {}).setdefault(target, {})[leaf] = value
    return Adapters({"layers": layers}, rank, alpha, targets)


def _places(config: ModelConfig, targets: tuple[str, ...], rank: int) -> dict[str, Place]:
    """The stored tensors, by name."""
    made = {}
    for name, tensor in tensors(config).items():
        target = tensor.path.split("/")[-2]
        if target not in targets or not tensor.path.endswith("/kernel") or tensor.layer is None:
            continue
        stem = PREFIX + name.removesuffix(".weight")
        outs, ins = tensor.stored
        split = inputs(target)
        a = ((rank, ins), (*tensor.leaf[:split], rank))
        b = ((outs, rank), (rank, *tensor.leaf[split:]))
        made[f"{stem}.lora_A.weight"] = Place(target, "lora_a", tensor.layer, *a)
        made[f"{stem}.lora_B.weight"] = Place(target, "lora_b", tensor.layer, *b)
    return made


def _described(
    targets: tuple[str, ...], rank: int, alpha: float, base: str | Path, scorer: bool
) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scorer else "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": list(targets),
        "modules_to_save": ["score"] if scorer else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }


def _read_settings(folder: Path) -> tuple[int, float, tuple[str, ...]]:
    """Rank, alpha and targets."""
    described = read_json(folder / CONFIG)
    faults = []
    if described.get("peft_type") != "LORA":
        faults.append(f"peft_type must be 'LORA', and is {described.get('peft_type')!r}")
    if described.get("task_type") not in ("CAUSAL_LM", None):
        faults.append(f"task_type must be 'CAUSAL_LM', and is {described['task_type']!r}")
    start = described.get("init_lora_weights", True)
    if start not in PLAIN:
        faults.append(
            f"init_lora_weights must leave the base as it is (true, false or 'gaussian'), and is "
            f"{start!r}"
        )
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        faults.append(f"r must be a positive whole number, and is {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not alpha > 0:
        faults.append(f"lora_alpha must be a positive number, and is {alpha!r}")
    elif not math.isfinite(alpha):
        faults.append(f"lora_alpha must be finite, and is {alpha!r}")
    targets = described.get("target_modules")
    if not isinstance(targets, list) or not targets or not set(targets) <= set(TARGETS):
        faults.append(
            f"target_modules must be a list of some of {', '.join(TARGETS)}, and is {targets!r}"
        )
    for name, value in described.items():
        if name in USED or name in INERT or not value or (name == "bias" and value == "none"):
            continue
        faults.append(f"{name} is not built, and is {value!r}")
    if faults:
        raise CheckpointError(f"The adapter in {folder} cannot be read: {'; '.join(faults)}.")
    return rank, float(alpha), tuple(t for t in TARGETS if t in targets)


def _check_tensors(folder: Path, held: Any, places: Mapping[str, Place]) -> None:
    names, faults = set(held.keys()), []
    if missing := sorted(set(places) - names):
        faults.append(f"missing {listed(missing)}")
    if unexpected := sorted(names - set(places)):
        faults.append(f"unexpected {listed(unexpected)}")
    misfits = []
    for name in places.keys() & names:
        found = held.get_slice(name)
        shape = tuple(found.get_shape())
        if shape != places[name].shape:
            misfits.append(f"{name} is {list(shape)} for {list(places[name].shape)}")
        elif found.get_dtype() not in READABLE:
            misfits.append(f"{name} is {found.get_dtype()} for one of {', '.join(READABLE)}")
    if misfits:
        faults.append(f"misshapen {listed(sorted(misfits))}")
    if faults:
        raise CheckpointError(
            f"The tensors of {folder} do not fit its settings and the model: {'; '.join(faults)}."
        )
