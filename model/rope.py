"""Frequencies of rotary embedding, plain or scaled to long texts, and their spelling in a
`config.json`.

`transformers` computes the same numbers (`modeling_rope_utils.py`). They are constants of the
shape, so that no device's `pow` has a say: at position 100,000 an error of one unit in the last
place of a frequency is an angle of 0.006.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (https://arxiv.org/abs/2309.00071, sec. 3.2 to 3.4): dimensions that turn often within
    the original length keep their frequency, those that turn less than once are slowed by `factor`,
    and all phases are multiplied by an attention factor."""

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    """Positions that the checkpoint was trained on before it was scaled."""
    attention_factor: float | None = None
    """Of cosine and sine; None: 0.1 ln(factor) + 1, or what the two mscales make of it."""
    beta_fast: float = 32.0
    """Turns within the original length, at and above which a dimension keeps its frequency."""
    beta_slow: float = 1.0
    """Turns at and below which it is slowed by the whole factor."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Whether the ends of the ramp between the two are whole dimensions."""

    def phase_scale(self) -> float:
        """What cosine and sine are multiplied by."""

        def grown(scale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def slowed(
        self, wavelengths: Float[np.ndarray, " pairs"], theta: float
    ) -> Float[np.ndarray, " pairs"]:
        """Frequencies of the dimensions whose plain ones are 1 / `wavelengths`."""
        width = 2 * len(wavelengths)

        def dimension(turns: float) -> float:
            length = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return width * math.log(length) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high += 0.001 * (low == high)
        ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        keep = 1 - np.clip(ramp, 0, 1)
        whole = 1 / (np.float32(self.factor) * wavelengths)
        return whole * (1 - keep) + (1 / wavelengths) * keep


@dataclasses.dataclass(frozen=True)
class Llama3:
    """The scaling of Llama 3.1 and later: as YaRN's, with a ramp over wavelengths and no attention
    factor."""

    rope_type: ClassVar[str] = "llama3"

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    def phase_scale(self) -> float:
        return 1.0

    def slowed(
        self, wavelengths: Float[np.ndarray, " pairs"], theta: float
    ) -> Float[np.ndarray, " pairs"]:
        # Step by step as transformers does it, so that the roundings are the same.
        low, high, length, factor = map(
            np.float32,
            (
                self.low_freq_factor,
                self.high_freq_factor,
                self.original_max_position_embeddings,
                self.factor,
            ),
        )
        plain = 1 / wavelengths
        turns = length / (np.float32(2 * math.pi) / plain)
        ramp = (turns - low) / (high - low)
        between = (1 - ramp) * plain / factor + ramp * plain
        slow = np.where(turns < low, plain / factor, between)
        return np.where(turns > high, plain, slow)


Scaling = Yarn | Llama3
SCALINGS = {kind.rope_type: kind for kind in (Yarn, Llama3)}
FIELDS = ("rope_parameters", "rope_scaling")
"""Where a configuration says it: transformers 5 writes the first, 4 the second."""


class Rope(NamedTuple):
    """What a configuration says of rotary embedding."""

    theta: float = 10000.0
    scaling: Scaling | None = None


def frequencies(
    head_dim: int, theta: float, scaling: Scaling | None
) -> tuple[Float[np.ndarray, " pairs"], float]:
    """Radians a position of each pair of dimensions, float32, and the factor of the phases."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = (np.float64(theta) ** exponents).astype(np.float32)
    if scaling is None:
        return 1 / wavelengths, 1.0
    return scaling.slowed(wavelengths, theta).astype(np.float32), scaling.phase_scale()


def longest(scaling: Scaling | None, stated: int) -> int:
    """Positions that a checkpoint may be used at, of which its `max_position_embeddings` says
    `stated`.

    Qwen's models are stretched by adding `rope_scaling` alone, so that the number still is the
    unstretched one. transformers enforces neither.
    """
    if not isinstance(scaling, Yarn):
        return stated
    return max(stated, int(scaling.factor * scaling.original_max_position_embeddings))


def read_rope(config: Mapping[str, Any], positions: int, faults: list[str]) -> Rope:
    """RoPE's base and scaling, from whichever spelling the parsed `config.json` has.

    `positions` is its `max_position_embeddings`, the original length where the scaling states
    none. Adds to `faults` what is contradictory, malformed or not built.
    """
    bases, scalings = {}, {}
    if config.get("rope_theta") is not None:
        bases["rope_theta"] = config["rope_theta"]
    for name in FIELDS:
        settings = config.get(name)
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            faults.append(f"{name} must be an object or null, and is {settings!r}")
            continue
        if settings.get("rope_theta") is not None:
            bases[f"{name}.rope_theta"] = settings["rope_theta"]
        scalings[name] = _scaling(name, settings, positions, faults)
    plain = "rope_parameters" in scalings and scalings["rope_parameters"] is None
    if plain and scalings.get("rope_scaling") is not None:
        # A checkpoint that is stretched by hand, in the older spelling: it decides there.
        del scalings["rope_parameters"]
    for name, base in bases.items():
        if not _is_number(base) or base <= 0:
            faults.append(f"{name} must be a positive number, and is {base!r}")
            return Rope()
    if len(set(bases.values())) > 1:
        faults.append(
            "RoPE's base is stated twice and differs: "
            + ", ".join(f"{name} {base}" for name, base in bases.items())
        )
    if len(set(scalings.values())) > 1 and not faults:
        faults.append(
            "RoPE's scaling is stated twice and differs: "
            + ", ".join(f"{name} {dict(config[name])!r}" for name in scalings)
        )
    theta = float(next(iter(bases.values()), Rope().theta))
    scaling = next(iter(scalings.values()), None)
    if isinstance(scaling, Yarn) and theta <= 1:
        faults.append(f"RoPE of type 'yarn' needs a base above 1, and it is {theta}")
    return Rope(theta, scaling)


def write_rope(rope: Rope) -> dict[str, Any]:
    """The fields of a `config.json`, as transformers 4 and 5 read them."""
    if rope.scaling is None:
        parameters = {"rope_theta": rope.theta, "rope_type": "default"}
        return {"rope_theta": rope.theta, "rope_parameters": parameters}
    fields = {
        name: value for name, value in dataclasses.asdict(rope.scaling).items() if value is not None
    }
    scaling = {"rope_type": rope.scaling.rope_type} | fields
    return {
        "rope_theta": rope.theta,
        "rope_parameters": scaling | {"rope_theta": rope.theta},
        "rope_scaling": scaling,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaling(
    where: str, settings: Mapping[str, Any], positions: int, faults: list[str]
) -> Scaling | None:
    """What one object says beside the base. Null stands for what is not said."""
    stated = {name: value for name, value in settings.items() if value is not None}
    kind = stated.pop("rope_type", stated.get("type", "default"))
    alias = stated.pop("type", kind)
    stated.pop("rope_theta", None)
    whole = stated.pop("partial_rotary_factor", 1) == 1
    built = kind in SCALINGS and alias == kind
    known = [field.name for field in dataclasses.fields(SCALINGS[kind])] if built else []
    if kind == alias == "default" and not stated and whole:
        return None
    others = sorted(set(stated) - set(known))
    if not built or others or not whole:
        why = f"; of type {kind!r} there is no {', '.join(others)}" if built and others else ""
        faults.append(
            f"{where} asks for {dict(settings)!r}; only RoPE of type 'default', "
            f"{' and '.join(map(repr, SCALINGS))} is built, on whole heads{why}"
        )
        return None
    stated.setdefault("original_max_position_embeddings", positions)
    return _checked(where, SCALINGS[kind], stated, faults)


def _checked(
    where: str, kind: type[Scaling], stated: dict[str, Any], faults: list[str]
) -> Scaling | None:
    before = len(faults)
    values = {}
    for field in dataclasses.fields(kind):
        name, required = field.name, field.default is dataclasses.MISSING
        if name not in stated:
            if required:
                faults.append(f"{where} of type {kind.rope_type!r} must state {name}")
            continue
        value = stated[name]
        if name == "truncate":
            right, wanted = isinstance(value, bool), "true or false"
        elif name == "original_max_position_embeddings":
            right, wanted = type(value) is int and value > 0, "a positive whole number"
        else:
            least = 1 if name == "factor" else 0
            right = _is_number(value) and value >= least and value > 0 and math.isfinite(value)
            wanted = f"a number of at least {least}" if least else "a positive number"
        if not right:
            faults.append(f"{where}.{name} must be {wanted}, and is {value!r}")
        whole = isinstance(value, bool) or name == "original_max_position_embeddings"
        values[name] = value if whole or not right else float(value)
    # The ramp between the two ends would have no length, or run backwards.
    for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        if len(faults) == before and hasattr(kind(**values), low):
            scaling = kind(**values)
            if not getattr(scaling, low) < getattr(scaling, high):
                faults.append(
                    f"{where}.{low} must be below {high}, {getattr(scaling, high)}, and is "
                    f"{getattr(scaling, low)}"
                )
    return kind(**values) if len(faults) == before else None
