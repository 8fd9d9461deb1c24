"""A whole step of training as a run takes it: rollout, reward, advantages, update.

    python benchmarks/iteration.py --size tiny|small [--mode staged] ...

The reward is trivial and the host's: it decodes each completion to text and takes a thousandth of
its characters. Prints one JSON line with the seconds of each phase where the step is `staged`.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from learner import make_learner
from timing import Phases, measure
from workload import PAD, load_model, parser, prompt_ids, report, settle


def main() -> None:
    flags = parser(__doc__, reps=4)
    flags.add_argument("--remat", default="none", choices=["none", "block", "dots"])
    flags.add_argument("--share-prompts", type=int, default=1, choices=[0, 1])
    flags.add_argument(
        "--packing",
        type=int,
        default=1,
        choices=[0, 1],
        help="rows in streams without padding; 0: whole rows, whose prompts are never shared",
    )
    flags.add_argument("--mode", default="staged", choices=["staged", "fused"])
    options = settle(flags.parse_args())
    if options.length_distribution != "full":
        flags.error("a step stops its rows itself; --length-distribution must be full.")

    import jax

    from rlx.state import initial_state

    config, params = load_model(options)
    plan = make_plan(options, config)
    state = initial_state(params, plan.learner, jax.random.key(0))
    del params
    phases, history, rewards = Phases(), [], []
    run = runner(options, plan, phases)

    def one_step() -> None:
        nonlocal state
        state, metrics = run(state)
        jax.block_until_ready(state)
        history.append(phases.take())
        reward = metrics["reward/mean"]
        rewards.append(round(float(reward.total[0] / reward.count[0]), 6))

    seconds = measure(one_step, reps=options.reps, warmup=options.warmup)
    timed = history[-seconds["reps_all"] :]
    report(
        "e2e",
        options,
        param_dtype="float32",
        remat=options.remat,
        share_prompts=options.share_prompts,
        packing=options.packing,
        mode=options.mode,
        phases_s={
            name: round(statistics.median(step[name] for step in timed), 4) for name in timed[0]
        },
        reward=rewards[-1],
        tokens_per_s=round(
            options.prompts * options.samples * options.new_tokens / seconds["median_s"], 1
        ),
        **seconds,
    )


def runner(options: argparse.Namespace, plan, phases: Phases) -> Callable:
    """state -> (state, metrics): one step on the benchmark's prompts."""
    import jax
    import jax.numpy as jnp

    from rlx.prepare import Frozen
    from rlx.prompts import Prompts
    from rlx.train import fused, staged
    from rlx.verify import callback_verifier, host_verifier

    tokens = jnp.asarray(prompt_ids(options), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    pool = Prompts(tokens, positions, jax.random.key(1))
    verifier = length_verifier(decoder(options.model_dir))
    if options.mode == "staged":
        step = staged(plan, host_verifier(verifier), phases)
    else:
        step = fused(plan, callback_verifier(plan.sampling, verifier))

    def run(state):
        state, (metrics, _) = step(state, Frozen(), pool, length=1)
        return state, metrics

    return run


def make_plan(options: argparse.Namespace, config):
    """GRPO, one update a step, no stop token: every row runs to the limit."""
    import jax.numpy as jnp

    from model.product import activations
    from rlx.prepare import Plan
    from rlx.rollout import Sampling
    from rlx.shaping import Shaping

    return Plan(
        sampling=Sampling(
            model=config,
            dtype=jnp.dtype(options.dtype),
            activations=activations(jnp.dtype(options.dtype)),
            prompts=options.prompts,
            samples=options.samples,
            max_new_tokens=options.new_tokens,
            temperature=1.0,
            stop_ids=(),
            pad_id=PAD,
            components=("length",),
            verdicts=False,
            retire_after=0,
            probe=0,
            dynamic=False,
            max_rounds=1,
            overlong_buffer=0,
            slots=0,
        ),
        learner=make_learner(options, config, on_policy=True),
        shaping=Shaping(),
        overlong_filter=False,
        replay_max_age=8,
        correction=None,
        old_logprobs="current",
    )


def decoder(model_dir: str | None) -> Callable[[list[int]], str]:
    """The checkpoint's tokenizer, or, where there is none, the words w3, w4, ... of the ids."""
    path = Path(model_dir or "") / "tokenizer.json"
    if model_dir is None or not path.exists():
        return lambda ids: " ".join(f"w{i}" for i in ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def length_verifier(decode: Callable[[list[int]], str]) -> Callable:
    """A thousandth of the text's characters, in the form of a host verifier."""

    def verify(rows, tokens, lengths):
        rewards = np.zeros(lengths.shape, np.float32)
        for place in np.ndindex(*lengths.shape):
            rewards[place] = len(decode(tokens[place][: lengths[place]].tolist())) / 1000
        verdicts = np.full_like(rewards, np.nan)
        return rewards, verdicts, rewards[..., None], np.zeros(tokens.shape, np.float32)

    return verify


if __name__ == "__main__":
    main()
