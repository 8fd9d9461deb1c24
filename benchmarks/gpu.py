"""Decoding, updating and a whole step at the shapes of published models, on one accelerator.

    python benchmarks/gpu.py 0.5b|3b|nano [--only decode update step transformers]

Random weights made in memory, bfloat16 compute with float32 parameters. Prints a JSON line a part:
`decode` in tokens a second against the bound that measured copy bandwidth sets, `update` as a
share of the measured matrix-product rate, of whole rows (by the kernel `attention`) and in streams,
`step` a whole step of GRPO on Countdown with its phases.
`transformers` decodes the same with Hugging Face's model where torch sees a GPU; run it in a
process of its own, since JAX takes most of the device's memory.
"""

import argparse
import dataclasses
import functools
import json
import time
from typing import NamedTuple

from shapes import SHAPES
from workload import versions

PARTS = ("decode", "update", "step", "transformers")


class Load(NamedTuple):
    """How much is computed."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    update_rows: int
    update_columns: int
    matmul: int
    copied: int
    """Bytes."""


LOADS = {
    "nano": Load(4, 2, 16, 8, 2, 32, 256, 2**24),
    "0.5b": Load(32, 8, 128, 512, 8, 2048, 8192, 2**32),
    "3b": Load(32, 8, 128, 256, 8, 2048, 8192, 2**32),
}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("shape", choices=list(SHAPES))
    flags.add_argument("--only", nargs="+", choices=PARTS, default=PARTS[:3])
    chosen = flags.parse_args()
    load = LOADS[chosen.shape]
    if "transformers" in chosen.only:
        report("transformers", chosen.shape, decode_by_transformers(chosen.shape, load))
    if chosen.only == ["transformers"]:
        return

    import jax
    from ceilings import ceilings

    from model.parameters import initialise

    limits = ceilings(load.matmul, load.copied, reps=5)
    config = SHAPES[chosen.shape]
    params = initialise(config, jax.random.key(0))
    for name, part in (("decode", decode), ("update", update_rate), ("step", countdown_step)):
        if name in chosen.only:
            report(name, chosen.shape, part(config, params, load, limits))


def report(part: str, shape: str, found: dict) -> None:
    line = {"bench": "gpu", "impl": "rlx", "part": part, "shape": shape, **found}
    print(json.dumps(line | {"versions": versions()}), flush=True)


def decode(config, params, load: Load, limits: dict) -> dict:
    """A rollout, prompts included; the bound is of weights and cached keys and values read."""
    import jax
    import jax.numpy as jnp

    from model.product import activations
    from model.sample import sample
    from rlx.cost import rollout_bytes

    tokens = jnp.ones((load.prompts, load.prompt_tokens), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(load.prompt_tokens), tokens.shape)
    shape = (load.prompts, load.samples)

    @jax.jit
    def rollout(params, keys):
        return sample(
            config,
            params,
            tokens,
            positions,
            keys,
            max_new_tokens=load.new_tokens,
            stop_ids=jnp.zeros(0, jnp.int32),
            pad_id=0,
            dtype=jnp.bfloat16,
            activations=activations(jnp.dtype("bfloat16")),
        )

    seconds = [
        timed(lambda i=i: rollout(params, jax.random.split(jax.random.key(i), shape)))
        for i in range(3)
    ]
    rows = load.prompts * load.samples
    moved = rollout_bytes(
        config,
        rows=rows,
        prompt=load.prompt_tokens,
        completion=load.new_tokens,
        samples=load.samples,
        itemsize=2,
    )
    bound = moved / (limits["copy_gbs_median"] * 1e9)
    best = min(seconds[1:])
    return {
        "device": jax.devices()[0].device_kind,
        "rows": rows,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
        "first_call_s": round(seconds[0], 2),
        "seconds": round(best, 4),
        "tokens_per_s": round(rows * load.new_tokens / best, 1),
        "gigabytes": round(moved / 1e9, 3),
        "copy_gbs": limits["copy_gbs_median"],
        "bound_tokens_per_s": round(rows * load.new_tokens / bound, 1),
        "share_of_bound": round(bound / best, 4),
    }


def update_rate(config, params, load: Load, limits: dict) -> dict:
    """One update of whole rows and one of the same rows in streams, layers recomputed; model FLOPs
    do not count the recomputation."""
    import jax
    from learner import make_learner
    from memory import operands

    from rlx.cost import forward_flops, temporary_bytes, update_flops
    from rlx.state import initial_state
    from rlx.update import update

    options = argparse.Namespace(
        rows=load.update_rows,
        columns=load.update_columns,
        samples=1,
        micro_batch=load.update_rows,
        share_prompts=0,
        packing=0,
        dtype="bfloat16",
        remat="block",
    )
    whole = make_learner(options, config, on_policy=True)
    state = initial_state(params, whole, jax.random.key(0))
    batch = jax.jit(lambda: filled(operands(whole, options)[1], config.vocab_size))()
    completion = load.update_columns - 2
    forward = forward_flops(config, rows=load.update_rows, prompt=2, completion=completion)
    needed = update_flops(forward, chunked=False)
    tokens, rate = load.update_rows * load.update_columns, limits["bf16_fp32_gflops_median"]
    found = {}
    for how, learner in (("whole_rows", whole), ("streams", whole._replace(packing=True))):
        step = jax.jit(functools.partial(update, learner), donate_argnums=0)
        start = time.perf_counter()
        step = step.lower(state, batch, jax.random.key(1)).compile()
        compile_s, seconds = time.perf_counter() - start, []
        for i in range(4):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch, jax.random.key(i)))
            seconds.append(time.perf_counter() - start)
        best = min(seconds[1:])
        found[how] = {
            "compile_s": round(compile_s, 2),
            "seconds": round(best, 4),
            "tokens_per_s": round(tokens / best, 1),
            "share_of_matmul_rate": round(needed / best / 1e9 / rate, 4),
            "temporary_mib": round(temporary_bytes(step) / 2**20),
        }
    return {
        "rows": load.update_rows,
        "columns": load.update_columns,
        "attention": whole.model.attention,
        "model_gflops": round(needed / 1e9, 2),
        "matmul_gflops": rate,
        **found,
    }


def filled(batch, vocabulary: int):
    """Of zeros no product would cost a GPU what it costs; and each token would be a text."""
    import jax
    import jax.numpy as jnp

    rows, columns = batch.tokens.shape
    (signal,) = batch.signals
    advantages = jnp.where(jnp.arange(rows)[:, None] % 2, 1.0, -1.0)
    return batch._replace(
        tokens=jax.random.randint(jax.random.key(0), (rows, columns), 0, vocabulary),
        positions=jnp.broadcast_to(jnp.arange(columns), (rows, columns)),
        signals=(signal._replace(advantages=advantages, returns=advantages),),
    )


def countdown_step(config, params, load: Load, limits: dict) -> dict:
    """The second step of a run of GRPO, with the bundled model's tokenizer: only its ids can be
    drawn, so that the whole path of a run is taken, verifier included."""
    import jax

    from model.tokenizer import load_tokenizer
    from rlx import assemble
    from rlx.config import load as load_config
    from rlx.policy import Policy, checkpoint_folder
    from rlx.resolve import resolve
    from rlx.stepper import online_stepper
    from rlx.task_loading import load_task

    run = resolve(
        load_config(
            None,
            [
                *("task.name=countdown", "task.train_size=256", "algorithm.name=grpo"),
                *(f"batch.prompts={load.prompts}", f"batch.samples={load.samples}"),
                f"batch.micro={load.samples}",
                f"sampling.max_new_tokens={load.new_tokens}",
                *("model.dtype=bfloat16", "model.remat=block", "loop.mode=staged"),
            ],
        )
    )
    keys = assemble.random_keys(run)
    folder = checkpoint_folder("nano")
    tokenizer = load_tokenizer(folder)
    config = dataclasses.replace(config, num_tokens=len(tokenizer))
    policy = Policy(folder, config, tokenizer, params, jax.numpy.dtype("bfloat16"))
    stepper = online_stepper(run, policy, load_task(run), keys, None)
    state, seconds = stepper.state, []
    for _ in range(2):
        start = time.perf_counter()
        state, metrics, _ = stepper.run(state, 1)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
        phases = stepper.stopwatch.take()
    sampled = metrics["tokens"]
    return {
        "rows": load.prompts * load.samples,
        "new_tokens": load.new_tokens,
        "first_step_s": round(seconds[0], 2),
        "seconds": round(seconds[1], 4),
        "phases_s": {name: round(value, 4) for name, value in phases.items()},
        "sampled_tokens": int(sampled.total[0] / sampled.count[0]),
    }


def decode_by_transformers(shape: str, load: Load) -> dict:
    """The same rows and lengths through Hugging Face's generate, with a static cache."""
    try:
        import torch
    except ImportError:
        return {"skipped": "torch is not installed"}
    if not torch.cuda.is_available():
        return {"skipped": "torch sees no GPU"}
    import transformers

    from model.config import to_hugging_face

    described = to_hugging_face(SHAPES[shape], dtype="bfloat16")
    config = transformers.Qwen2Config.from_dict(described)
    with torch.device("cuda"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.ones((load.prompts, load.prompt_tokens), dtype=torch.long, device="cuda")

    def rollout():
        with torch.no_grad():
            network.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                min_new_tokens=load.new_tokens,
                max_new_tokens=load.new_tokens,
                do_sample=True,
                top_k=0,
                num_return_sequences=load.samples,
                pad_token_id=0,
                cache_implementation="static",
            )
        torch.cuda.synchronize()

    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        rollout()
        seconds.append(time.perf_counter() - start)
    rows = load.prompts * load.samples
    return {
        "device": torch.cuda.get_device_name(),
        "first_call_s": round(seconds[0], 2),
        "seconds": round(seconds[1], 4),
        "tokens_per_s": round(rows * load.new_tokens / seconds[1], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def timed(call) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
