"""What `test_algorithms.py` expects of every row of ALGORITHMS and TERMS: a new row there is a new
row here."""

from typing import Any, NamedTuple


class Expected(NamedTuple):
    example: str
    """Which worked example it is computed on."""
    hand: float
    """The loss there, at the paper's hyper-parameters."""
    others: tuple[tuple[dict[str, Any], float], ...] = ()
    """The same at other hyper-parameters."""
    defaults: dict[str, Any] = {}  # noqa: RUF012
    metrics: dict[str, float] = {}  # noqa: RUF012
    """All that it logs."""
    counted: int = 10
    """How many tokens, or rows, its metrics are means over."""
    given: dict[str, Any] = {}  # noqa: RUF012
    """Hyper-parameters without which a loss would look at the width of the padding."""
    stopped: bool = False
    """A part of the loss carries no gradient on purpose, so that finite differences of its value
    say nothing about it; `test_identities.py` has its gradient."""


def clips(low: float, high: float, mean: float = 1.0453409, largest: float = 1.3498588):
    return {
        "clip/low": low,
        "clip/high": high,
        "ratio/mean": mean,
        "ratio/max": largest,
        "ratio/clamped": 0.0,
    }


GROUP = {"ddof": 0, "epsilon": 1e-4}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
SEQUENCE_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}
PPO = (({"clip_high": 0.28}, -0.292894), ({"clip_low": 0.3}, -0.288652))
KL = {"kl": 0.0407507, "kl/clamped": 0.0}


def preference(hand, at_half, others=(), defaults=None, **changed):
    """Of the pairs with Delta = 1.5; `at_half` is the loss at beta = 0.5."""
    metrics = {"accuracy": 1.0, "margin": 0.15, "rewards/chosen": 0.1, "rewards/rejected": -0.05}
    metrics |= {name.replace("_", "/"): value for name, value in changed.items()}
    defaults = {"beta": 0.1} | (defaults or {})
    return Expected("pairs", hand, (({"beta": 0.5}, at_half), *others), defaults, metrics, 4)


EXPECTED = {
    "ppo": Expected("z_score", -0.281582, PPO, {"gamma": 1.0, "lam": 0.95} | CLIP, clips(0.1, 0.2)),
    "ppo_dual_clip": Expected(
        "z_score",
        -0.281582,
        # exp(.20) and exp(.15) of bad rows stand above 1.1.
        (({"dual_clip": 1.1}, -0.294537), *PPO),
        {"gamma": 1.0, "lam": 0.95, "dual_clip": 3.0} | CLIP,
        clips(0.1, 0.2) | {"clip/dual": 0.0},
    ),
    "grpo": Expected(
        "z_score",
        0.024650,
        (({"beta": 0.0}, 0.023017), ({"beta": 0.5}, 0.043429)),
        GROUP | CLIP | {"beta": 0.04},
        clips(0.1, 0.2) | KL,
    ),
    "dr_grpo": Expected(
        "centred",
        -0.124460,
        (({"budget": 8}, -0.062230), ({"clip_low": 0.1}, -0.121335)),
        CLIP | {"budget": None},
        clips(0.1, 0.2),
        given={"budget": 4},
    ),
    "dapo": Expected(
        "z_score",
        -0.292894,
        (({"clip_high": 0.2}, -0.281582),),
        GROUP | {"clip_low": 0.2, "clip_high": 0.28},
        clips(0.1, 0.2),
    ),
    "gspo": Expected(
        "z_score",
        0.028481,
        (({"clip_low": 0.2, "clip_high": 0.2}, 0.000385),),
        GROUP | SEQUENCE_CLIP,
        clips(0.25, 0.25, 1.0327915, 1.1618342),
        4,
    ),
    "gspo_token": Expected(
        "z_score",
        0.028481,
        (({"clip_low": 0.2, "clip_high": 0.2}, 0.000385),),
        GROUP | SEQUENCE_CLIP,
        clips(0.2, 0.4, 1.0229487, 1.1618342),
        stopped=True,
    ),
    "rloo": Expected(
        "left_out",
        -0.054859,
        (({"clip_low": 0.1, "clip_high": 0.1}, -0.009541),),
        CLIP,
        clips(0.0, 0.25, 1.0661476, 1.2840254),
        4,
    ),
    "reinforce_pp": Expected("z_score", -0.281582, PPO, {"gamma": 1.0} | CLIP, clips(0.1, 0.2)),
    "reinforce_pp_baseline": Expected(
        "z_score", -0.281582, PPO, {"gamma": 1.0} | CLIP, clips(0.1, 0.2)
    ),
    "cispo": Expected(
        "z_score",
        0.117122,
        (({"cap": 1.2}, 0.107357),),
        GROUP | {"cap": 5.0},
        {n: v for n, v in clips(0.0, 0.0).items() if n != "clip/low"},
        stopped=True,
    ),
    "gmpo": Expected(
        "z_score", 0.000385, (({"clip": 0.2}, 0.024772),), GROUP | {"clip": 0.4}, clips(0.0, 0.0)
    ),
    "sapo": Expected(
        "z_score",
        -0.033407,
        (({"tau_positive": 2.0}, 0.320512), ({"tau_negative": 3.0}, -0.470283)),
        GROUP | {"tau_positive": 1.0, "tau_negative": 1.05},
        {
            "gate": 1.0322062,
            "ratio/mean": 1.0453409,
            "ratio/max": 1.3498588,
            "ratio/clamped": 0.0,
        },
    ),
    "dpo": preference(0.620957, 0.386871),
    "dpo_hinge": preference(0.85, 0.25),
    "dpo_reference_free": preference(
        0.554355, 0.201413, margin=0.3, rewards_chosen=-1.2, rewards_rejected=-1.5
    ),
    # Of means over 6 and 5 tokens: averaged over the padded width, 23.361111.
    "ipo": preference(
        22.404444,
        0.537778,
        margin=0.4 / 15,
        rewards_chosen=0.1 / 6,
        rewards_rejected=-0.01,
    ),
    "ipo_sum": preference(12.25, 0.25),
    "cdpo": preference(
        0.635957, 0.461871, (({"label_smoothing": 0.3}, 0.665957),), {"label_smoothing": 0.1}
    ),
    "robust_dpo": preference(
        0.602207, 0.293121, (({"label_smoothing": 0.3}, 0.508457),), {"label_smoothing": 0.1}
    ),
    "sft": Expected("z_score", 1.02, (), {}, {"nll": 1.02}),
    "kl_k2": Expected("z_score", 0.039625, (), {}, {"kl": 0.039625, "kl/clamped": 0.0}),
    "kl_k3": Expected("z_score", 0.040751, (), {}, KL),
    "kl_r_k3": Expected("z_score", 0.038968, (), {}, {"kl": 0.0389675, "kl/clamped": 0.0}),
    "entropy": Expected("entropy", -1.02, (), {}, {"bonus": 1.02}),
    "value": Expected(
        "values",
        0.182078,
        (({"value_clip": 0.5}, 0.133836), ({"value_clip": 1e9}, 0.116961)),
        {"gamma": 1.0, "lam": 0.95, "value_clip": 0.2},
        {"loss": 0.1820779, "clip": 0.5},
        4,
    ),
    "reward_model": Expected(
        "scores",
        0.474077,
        (({"margin": 0.3}, 0.598139), ({"centring": 0.1}, 0.555077)),
        {"margin": 0.0, "centring": 0.0},
        {"accuracy": 1.0, "margin": 0.5, "score/chosen": 0.7, "score/rejected": 0.2},
        4,
    ),
}
