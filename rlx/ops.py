"""Mathematics that the algorithms share: ratios, clipping, KL estimators, reductions, metrics."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from rlx.types import Largest, Mean, Metrics, Smallest

LOG_RATIO_LIMIT = 20.0
"""exp(89) overflows float32, and infinity times a zero advantage is NaN."""


def masked(
    x: Float[Array, " B #T"], mask: Bool[Array, "B T"], fill: float = 0.0
) -> Float[Array, "B T"]:
    """`fill` wherever the mask is false, NaN included, in value and in gradient."""
    return jnp.where(mask, x, fill)


def log_ratio(logprobs: Float[Array, "B T"], base: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """log pi - log pi_base, clamped."""
    return jnp.clip(logprobs - base, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    ratio: Float[Array, " B #T"],
    advantages: Float[Array, " B #T"],
    clip_low: float,
    clip_high: float,
) -> Float[Array, " B #T"]:
    """-min(r A, clip(r, 1 - low, 1 + high) A). https://arxiv.org/abs/1707.06347 (eq. 7)"""
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def clip_metrics(
    ratio: Float[Array, " B #T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, " B #T"],
    clip_low: float,
    clip_high: float,
) -> Metrics:
    """Shares of tokens (or rows, for a ratio a row) whose gradient the clip cuts: high only where
    A > 0, low where A < 0."""
    low = (ratio < 1.0 - clip_low) & (advantages < 0)
    high = (ratio > 1.0 + clip_high) & (advantages > 0)
    clips = {"clip/low": mean(low, mask), "clip/high": mean(high, mask)}
    return clips | ratio_metrics(ratio, mask)


def ratio_metrics(ratio: Float[Array, " B #T"], mask: Bool[Array, " B #T"]) -> Metrics:
    limit = jnp.exp(LOG_RATIO_LIMIT)
    return {
        "ratio/mean": mean(ratio, mask),
        "ratio/max": Largest(jnp.max(jnp.where(mask, ratio, -jnp.inf))),
        "ratio/clamped": mean((ratio >= limit) | (ratio <= 1.0 / limit), mask),
    }


# Estimators of KL(pi, base) per token, from d = log pi_base - log pi, clamped once.
# http://joschu.net/blog/kl-approx.html


def k1(logprobs: Float[Array, "B T"], base: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """-d: unbiased, of either sign. For rewards only: as a loss its expected gradient is zero."""
    return log_ratio(logprobs, base)


def k2(logprobs: Float[Array, "B T"], base: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """d^2 / 2: biased, with the right gradient on policy."""
    return log_ratio(logprobs, base) ** 2 / 2


def k3(logprobs: Float[Array, "B T"], base: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(d) - d - 1: unbiased, never negative.

    The clamped d stands in both places: clamped inside `exp` alone, k3 would turn negative.
    """
    d = log_ratio(base, logprobs)
    # exp(d) - 1 would round to a multiple of 6e-8: at d = 1e-3, an eighth of the value.
    return jnp.expm1(d) - d


def clamped_share(
    logprobs: Float[Array, "B T"], base: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Mean:
    """How many tokens `log_ratio` clamps."""
    return mean(jnp.abs(logprobs - base) >= LOG_RATIO_LIMIT, mask)


# Reductions: weights of the mask alone, for all rows of one optimizer update. A row without an
# unmasked token weighs nothing and is not counted.


def token_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """m / sum(m): every token weighs the same."""
    weights = mask.astype(jnp.float32)
    return weights / jnp.maximum(jnp.sum(weights), 1.0)


def sequence_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """m / (B |o_i|): the mean over rows of each row's mean over tokens."""
    weights = mask.astype(jnp.float32)
    lengths = jnp.sum(weights, axis=1, keepdims=True)
    return weights / jnp.maximum(lengths, 1.0) / jnp.maximum(jnp.sum(lengths > 0), 1.0)


def row_mean(mask: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """1 / B: every row weighs the same, whatever its length; for losses of one value a row."""
    rows = jnp.any(mask, axis=1, keepdims=True).astype(jnp.float32)
    return rows / jnp.maximum(jnp.sum(rows), 1.0)


def budget_mean(mask: Bool[Array, "B T"], *, budget: int | None = None) -> Float[Array, "B T"]:
    """m / (B budget): a token's weight knows no length, its own row's or another's.

    `budget` is the longest completion, `sampling.max_new_tokens` in training (default: the mask's
    width).
    """
    weights = mask.astype(jnp.float32)
    rows = jnp.maximum(jnp.sum(jnp.any(mask, axis=1)), 1)
    return weights / (rows * (mask.shape[1] if budget is None else budget))


REDUCTIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "budget_mean": budget_mean,
    "row_mean": row_mean,
}


def row_sum(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    return jnp.sum(masked(x, mask), axis=1, keepdims=True)


def row_average(x: Float[Array, " B #T"], mask: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Over a row's unmasked tokens; 0 for a row without one."""
    length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return row_sum(jnp.broadcast_to(x, mask.shape), mask) / length


def last_token(mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """True on each row's last unmasked token: a reward at padding would be masked away."""
    after = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    return mask & (after == 1)


def mean(x: Bool[Array, " B #T"] | Float[Array, " B #T"], mask: Bool[Array, " B #T"]) -> Mean:
    """The mean over unmasked tokens, as a sum and a count."""
    total = jnp.sum(jnp.where(mask, x, 0), dtype=jnp.float32)
    return Mean(total, jnp.sum(mask, dtype=jnp.float32))


def deviation(x: Float[Array, " B #T"], mask: Bool[Array, " B #T"]) -> Mean:
    """The standard deviation of what is unmasked, weighted by its count. It centres first: the
    mean of squares less the square of the mean would find one among equal values in float32."""
    count = jnp.sum(mask, dtype=jnp.float32)
    divisor = jnp.maximum(count, 1.0)
    clean = jnp.where(mask, x, 0.0)
    centred = jnp.where(mask, x - jnp.sum(clean) / divisor, 0.0)
    return Mean(jnp.sqrt(jnp.sum(centred**2) / divisor) * count, count)


def scalar_metric(x: Shaped[Array, ""] | float) -> Mean:
    return Mean(jnp.asarray(x, jnp.float32), jnp.float32(1))


def pool(stacked: Metrics) -> Metrics:
    """Pools the first axis of every metric, exactly: the micro-batches of one update."""

    def reduce(metric):
        if isinstance(metric, Mean):
            return Mean(jnp.sum(metric.total, axis=0), jnp.sum(metric.count, axis=0))
        best = jnp.max if isinstance(metric, Largest) else jnp.min
        return type(metric)(best(metric.value, axis=0))

    return {name: reduce(metric) for name, metric in stacked.items()}


def close(metrics: Metrics) -> Metrics:
    """Turns each mean over tokens into one value of weight 1 (0 where nothing was counted), so
    that pooling updates weighs every update the same."""

    def one(metric):
        if not isinstance(metric, Mean):
            return metric
        counted = metric.count > 0
        value = jnp.where(counted, metric.total / jnp.where(counted, metric.count, 1.0), 0.0)
        return Mean(value, counted.astype(jnp.float32))

    return {name: one(metric) for name, metric in metrics.items()}


def values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers for the log; NaN where nothing was counted."""

    def value(metric):
        if isinstance(metric, Mean):
            return float(metric.total) / float(metric.count) if metric.count else float("nan")
        return float(metric.value)

    return {name: value(metric) for name, metric in jax.device_get(metrics).items()}


def combine(first: Metrics, second: Metrics) -> Metrics:
    """Pools two measurements with the same names."""
    return pool(jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second))


def nothing_measured(shapes: Metrics) -> Metrics:
    """What changes nothing when it is pooled with metrics of these shapes."""
    start = {Mean: 0.0, Largest: -jnp.inf, Smallest: jnp.inf}
    return {
        name: jax.tree.map(lambda s, m=metric: jnp.full(s.shape, start[type(m)], s.dtype), metric)
        for name, metric in shapes.items()
    }
