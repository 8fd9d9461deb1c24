"""Training on 8 virtual CPU devices, on every mesh and on one device: prints what came of it.

    python tests/mesh_cases.py steps FOLDER      # one line of JSON; beside it runs in FOLDER
    python tests/mesh_cases.py kernel FOLDER
    python tests/mesh_cases.py generated FOLDER
    python tests/mesh_cases.py runs FOLDER

A process has the devices that it started with, and that of the tests has one: so this is one of its
own, which tests/test_mesh.py and tests/test_mesh_runs.py start and read.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from conftest import scattered
from safetensors.numpy import load_file
from toy_run import arguments, lines, start

import run
from model import kernels
from model.config import read_config
from model.load import export
from model.parameters import initialise
from model.score_head import export_scorer
from model.sharding import shardings
from rlx import assemble
from rlx.checkpoint import Checkpoints
from rlx.compilation import Compilation
from rlx.config import load_training, resolved_yaml
from rlx.mesh import Sizes, abstract, on_mesh
from rlx.policy import checkpoint_folder, load_policy
from rlx.resolve import resolve
from rlx.stepper import online_stepper
from rlx.task_loading import load_task

ONE = Sizes(1, 1, 1)
MESHES = tuple(Sizes(*sizes) for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (1, 1, 2)))
BOTH, WIDE = MESHES[2:4]

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
"""What each of the meshes divides."""

STOPS = [2, *range(20, 60)]
"""Of 512 ids: texts of random weights end at different places."""

VERIFIER = """
from rlx.rewards import Score

def lengthy(completion, row):
    right = len(completion) % 3 == 0
    return Score(float(len(completion) % 7), right, {"part": float(right)}, "its length")
"""

SETTINGS = (
    *("-model.weights", "sampling.max_new_tokens=12", "task.train_size=32", "loop.steps=3"),
    *("batch.prompts=8", "batch.minibatches=1", "rollout.overlong_buffer=0"),
)


def name_of(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def settings_of(sizes: Sizes) -> list[str]:
    return [f"mesh.{axis}={size}" for axis, size in sizes._asdict().items()]


# ---- what is trained -----------------------------------------------------------------------------


def make_model(folder: Path, *, scorer: bool = False, stops=STOPS, **fields) -> Path:
    """The bundled model's tokenizer around random weights that are far from uniform."""
    source = folder.with_name(f"{folder.name}-shape")
    source.mkdir(parents=True)
    for file in checkpoint_folder("nano").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, source)
    config = json.loads((source / "config.json").read_text()) | SHAPE | fields
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    shape = read_config(source)
    shapes = jax.eval_shape(lambda key: initialise(shape, key), jax.random.key(0))
    params = jax.device_get(scattered(shapes, seed=1))
    if not scorer:
        export(folder, params, shape, source=source)
        return folder
    kernel = np.random.default_rng(2).normal(0, 0.3, (shape.hidden_size, 1)).astype(np.float32)
    params.pop("lm_head", None)
    export_scorer(folder, params | {"value_head": {"kernel": kernel}}, shape, source=source)
    return folder


def make_recipe(folder: Path, model: Path, *, verifier: bool = True) -> Path:
    (folder / "own.py").write_text(VERIFIER)
    own = f"reward:\n  workers: 0\n  verifiers:\n    - name: {folder / 'own.py'}:lengthy\n"
    path = folder / f"{model.name}{'' if verifier else '-given'}.yaml"
    path.write_text(f"model:\n  path: {model}\n" + (own if verifier else ""))
    return path


def gap(found, wanted) -> float:
    """The distance of two trees, as a share of the second one's size."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    squares = [(np.sum((a - b) ** 2.0), np.sum(b**2.0)) for a, b in pairs]
    away, size = np.sum(np.asarray(squares, np.float64), axis=0)
    return float(np.sqrt(away / size))


def largest_gap(found, wanted) -> float:
    """Of any leaf by itself."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


def difference(after, before):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, after, before)


# ---- three steps on each mesh, and what they leave -----------------------------------------------


def steps(folder: Path) -> dict:
    """Three steps on each mesh beside those on one device; checkpoints across meshes."""
    recipe = make_recipe(folder, make_model(folder / "model"))
    runs = {sizes: train(recipe, folder, sizes) for sizes in (ONE, *MESHES)}
    wanted = runs[ONE]
    found = {}
    for sizes in MESHES:
        run = runs[sizes]
        found[name_of(sizes)] = run["told"] | {
            "gradient_gap": gap(run["gradient"], wanted["gradient"]),
            "leaf_gap": largest_gap(run["gradient"], wanted["gradient"]),
            "movement_gap": gap(run["movement"], wanted["movement"]),
            "same_tokens": all(map(np.array_equal, run["tokens"], wanted["tokens"])),
            "restored": {name_of(other): restore(runs, other, sizes, folder) for other in runs},
        }
    back = {"restored": {name_of(other): restore(runs, other, ONE, folder) for other in MESHES}}
    return found | {name_of(ONE): wanted["told"] | back}


def train(recipe: Path, folder: Path, sizes: Sizes) -> dict:
    home = folder / name_of(sizes)
    changes = (*SETTINGS, *settings_of(sizes), "optimizer.clip_norm=0")
    _, _, *given = arguments(recipe, home, *changes)
    config = resolve(load_training(recipe, given))
    with on_mesh(sizes) as mesh, Compilation() as compilation:
        keys = assemble.random_keys(config)
        policy = load_policy(config, keys.weights)
        stepper = online_stepper(config, policy, load_task(config), keys, None)
        state, like = stepper.state, abstract(stepper.state)
        before = jax.device_get(state.params)
        tokens, losses, compiled, gradient = [], [], [], None
        for _ in range(3):
            state, metrics, preview = stepper.run(state, 1)
            compiled.append(compilation.seconds()["fused_steps"])
            losses.append(float(metrics["loss"].total[0] / metrics["loss"].count[0]))
            tokens.append(np.asarray(preview.rollout.tokens))
            if gradient is None:  # the first moment of the first step
                gradient = moments(jax.device_get(state.opt_state))
        home.mkdir()
        (home / "config.yaml").write_text(resolved_yaml(config))
        with Checkpoints(home / "checkpoints", keep=1, keep_best=False) as kept:
            kept.save(state, None)
        after = jax.device_get(state)
        export(home / "hf", after.params, policy.config, source=policy.folder)
        told = {
            "losses": losses,
            "compiled": compiled,
            "astray": astray(mesh, stepper.learner.axes, state),
            "share": {
                "params": share(state.params),
                "moments": share([m for _, m in moments_of(state.opt_state)]),
            },
        }
    return {
        "told": told,
        "tokens": tokens,
        "gradient": gradient,
        "movement": difference(after.params, before),
        "state": after._replace(key=jax.random.key_data(after.key)),
        "like": like,
        "axes": stepper.learner.axes,
        "policy": policy,
    }


def moments_of(opt_state):
    found = jax.tree_util.tree_leaves_with_path(opt_state)
    return [
        (path, leaf) for path, leaf in found if any(getattr(k, "name", "") == "mu" for k in path)
    ]


def moments(opt_state):
    return [leaf for _, leaf in moments_of(opt_state)]


def astray(mesh, axes, state) -> list[str]:
    """Parameters and moments that do not lie as the rules say."""
    if mesh is None:
        return []
    tree = (state.params, state.critic, state.opt_state)
    places = jax.tree.leaves(shardings(mesh, axes, tree))
    return [
        jax.tree_util.keystr(path)
        for (path, leaf), place in zip(
            jax.tree_util.tree_leaves_with_path(tree), places, strict=True
        )
        if not leaf.sharding.is_equivalent_to(place, leaf.ndim)
    ]


def share(tree) -> float:
    """Of its bytes, how much the device that holds most of them holds."""
    held: dict = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values()) / sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def restore(runs: dict, writer: Sizes, reader: Sizes, folder: Path) -> dict:
    """The checkpoint of one mesh on another: whether the numbers are those that were written, and
    what does not lie as on the reader's own mesh."""
    own, policy = runs[reader], runs[reader]["policy"]
    with on_mesh(reader) as mesh:
        home = folder / name_of(writer) / "checkpoints"
        with Checkpoints(home, keep=1, keep_best=False) as kept:
            state = kept.restore(own["like"])
        here = jax.device_get(state)
        if writer == ONE:
            name = folder / f"hf-{name_of(reader)}"
            export(name, here.params, policy.config, source=policy.folder)
        here = here._replace(key=jax.random.key_data(here.key))
        same = jax.tree.map(np.array_equal, here, runs[writer]["state"])
        return {"same": all(jax.tree.leaves(same)), "astray": astray(mesh, own["axes"], state)}


# ---- a fused kernel on each mesh -----------------------------------------------------------------


def kernel(folder: Path) -> dict:
    """The TPU's attention, interpreted, on each mesh beside the plain one on one device: how far
    outputs and slopes are off."""
    kernels.segment_attention = functools.partial(kernels.segment_attention, interpret=True)
    rng = np.random.default_rng(3)
    lengths = np.array([130, 1, 64, 129, 7, 130, 100, 33])[:, None]
    columns = np.arange(130)[None]
    # A text and a half, so that a device which took another's rows would see other segments.
    positions = np.where(columns < lengths, columns % 80, -1).astype(np.int32)
    parts = [rng.normal(size=(8, 130, heads, 16)).astype(np.float32) for heads in (8, 4, 4)]

    def loss(parts, attention):
        mixed, _ = kernels.whole_rows(attention, positions).attend(*parts)
        mixed = jnp.where(positions[:, :, None, None] >= 0, mixed, 0)
        return jnp.sum(mixed**2), mixed

    slopes = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    wanted = jax.device_get(slopes(parts, "plain"))
    found = {}
    for sizes in MESHES:
        with on_mesh(sizes):
            found[name_of(sizes)] = gap(jax.device_get(slopes(parts, "tpu")), wanted)
    return found


# ---- completions of a file of prompts on meshes --------------------------------------------------

DRAWS = {
    "greedy": ("sampling.temperature=0",),
    "filtered": ("sampling.top_k=300", "sampling.top_p=0.9", "sampling.temperature=0.7"),
    "floor": ("sampling.min_p=0.02",),
}
"""Filters that look at the whole vocabulary, of which a device has its part."""


def generated(folder: Path) -> dict:
    """`run.py generate` on meshes beside one device: whether the ids are the same, how far their
    log-probabilities are off, and how many ids there are."""
    model = make_model(folder / "drawn")
    prompts = folder / "prompts.jsonl"
    asked = [{"prompt": f"make {number} of 3, 4 and 5"} for number in range(11)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked))

    def lines_of(name, sizes):
        written = folder / f"{name}-{name_of(sizes)}.jsonl"
        command = ["generate", "--model", str(model), "--input", str(prompts), "--n", "2"]
        command += ["--output", str(written), "sampling.max_new_tokens=12", "sampling.slots=8"]
        if run.main([*command, *DRAWS[name], *settings_of(sizes)]):
            raise SystemExit(f"{written}: the command was refused")
        got = lines(written)
        return [x["token_ids"] for x in got], np.concatenate([x["logprobs"] for x in got])

    found = {}
    for name in DRAWS:
        ids, logprobs = lines_of(name, ONE)
        for sizes in (BOTH, WIDE):
            own_ids, own = lines_of(name, sizes)
            same = own_ids == ids
            found[f"{name}-{name_of(sizes)}"] = {
                "same_ids": same,
                "gap": float(np.max(np.abs(own - logprobs))) if same else None,
                "ids": len(logprobs),
            }
    return found


# ---- whole runs, of all kinds --------------------------------------------------------------------

PAIRS = Path(run.__file__).parent / "configs" / "data" / "countdown_pairs.jsonl"
GIVEN = (
    *(f"task.file={PAIRS}", "task.train_size=32", "task.heldout_size=12", "-task.highest"),
    *("-task.language", "-batch.samples", "-rollout.overlong_buffer", "-eval.greedy"),
    *("sampling.max_new_tokens=96", "eval.final_problems=12"),
)
"""Settings of runs on given pairs, of which each device's part is no part of the held-out ones."""
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MODELS = {
    "tied": {},
    "llama": LLAMA | {"tie_word_embeddings": False},
    # Of given pairs, which would end where they are still equal.
    "qwen3": QWEN3 | {"tie_word_embeddings": False, "stops": STOPS[:1]},
}
KINDS: dict[str, tuple[Sizes, str, tuple[str, ...]]] = {
    # Refilled slots, several updates a step, each in pieces; a number of held-out problems that
    # the devices do not divide.
    "dynamic": (
        BOTH,
        "tied",
        (
            "algorithm.terms=[{name: dapo}, {name: dpo, weight: 0.1}]",
            *("rollout.dynamic_sampling=true", "sampling.slots=8"),
            *("batch.minibatches=2", "batch.epochs=2", "batch.micro=8", "loop.steps=2"),
            *("eval.final_problems=5", "eval.batch=6", "eval.greedy=true", "model.remat=block"),
        ),
    ),
    "probe": (
        WIDE,
        "qwen3",
        (
            *("rollout.probe=2", "rollout.replay=4", "rollout.retire_after=1", "batch.micro=8"),
            # A cache in int8 rounds what was summed in another order: one row in some hundred then
            # says something else.
            *("sampling.weights=int8", "algorithm.name=gspo"),
            "rollout.correction=sequence_truncate",
        ),
    ),
    "critic_head": (
        WIDE,
        "llama",
        (
            *("algorithm.name=ppo", "reward.kl=k3", "reward.kl_beta=0.1", "batch.minibatches=2"),
            *("reward.kl_target=0.01", "reward.running=true"),
        ),
    ),
    "critic_model": (
        BOTH,
        "tied",
        (
            *GIVEN[:5],
            *("-rollout.overlong_buffer", "-eval.greedy", "eval.final_problems=6"),
            *("task.name=preference", "algorithm.name=ppo", "critic.kind=model"),
            *("reward.source=model", "batch.minibatches=2", "batch.samples=2", "loop.mode=staged"),
            *("critic.path=SCORER", "reward.model=SCORER", "loop.steps=2"),
        ),
    ),
    "texts": (
        BOTH,
        "tied",
        (*GIVEN, "task.name=chat", "algorithm.name=sft", "batch.packing=true", "batch.prompts=4"),
    ),
    "pairs": (
        WIDE,
        "qwen3",
        (
            *(*GIVEN, "task.name=preference", "batch.prompts=4", "batch.micro=4"),
            "algorithm.terms=[{name: dpo}, {name: sft, weight: 0.1}]",
        ),
    ),
    # Of given texts: one rounded number of a sampled one changes all that follows.
    "bfloat16": (
        WIDE,
        "llama",
        (
            *(*GIVEN, "task.name=chat", "algorithm.name=sft", "batch.packing=false"),
            *("model.dtype=bfloat16", "batch.prompts=4", "batch.micro=2"),
        ),
    ),
}


def runs(folder: Path, *names: str) -> dict:
    """Runs of `run.py` on a mesh beside the same on one device."""
    scorer = make_model(folder / "scorer", scorer=True)
    models = {name: make_model(folder / name, **fields) for name, fields in MODELS.items()}
    found = {}
    for name in names or KINDS:
        sizes, model, changes = KINDS[name]
        model = models[model]
        recipe = make_recipe(folder, model, verifier="-task.highest" not in changes)
        changes = [*SETTINGS, *(c.replace("SCORER", str(scorer)) for c in changes)]
        if "-rollout.overlong_buffer" in changes:
            changes.remove("rollout.overlong_buffer=0")
        for run_name, on in {"one": ONE, "mesh": sizes}.items():
            start_whole(recipe, folder / name / run_name, *changes, *settings_of(on))
        found[name] = compare(folder / name / "mesh", folder / name / "one", model)
    return found


def start_whole(recipe, home: Path, *changes) -> None:
    if start(recipe, home, *changes):
        raise SystemExit(f"{home}: the run was refused")


def compare(got: Path, wanted: Path, model: Path) -> dict:
    before = load_file(model / "model.safetensors")
    after, expected = (load_file(home / "hf" / "model.safetensors") for home in (got, wanted))
    kept = [name for name in expected if name in before]
    moved = [{name: np.float64(x[name]) - before[name] for name in kept} for x in (after, expected)]
    texts = [
        [line.get("completion") for line in lines(home / "samples.jsonl")]
        for home in (got, wanted)
        if (home / "samples.jsonl").exists()
    ]
    return {
        "movement_gap": gap(*moved),
        "size": float(np.sqrt(sum(np.sum(x**2) for x in moved[1].values()))),
        "texts": [len(x) for x in texts],
        "same_texts": not texts or texts[0] == texts[1],
        "metrics": unlike(lines(got / "metrics.jsonl"), lines(wanted / "metrics.jsonl")),
    }


UNLIKE = ("seconds", "tokens_per_second", "padding", "sampler_gap", "compile", "phase", "memory")
"""What is not the same on other devices: padding is that of each device's own streams."""


COARSE = {"perplexity": 10.0, "stderr": 10.0, "accuracy": 400.0}
"""Times the rounding of the others: an exponential of one of them, a spread of few rows, and a
share of few pairs, of which one may tie here and not there."""


def unlike(got: list[dict], wanted: list[dict]) -> dict:
    """Metrics that differ by more than rounding."""
    found = {}
    for a, b in zip(got, wanted, strict=True):
        for name in a.keys() | b.keys():
            x, y = a.get(name), b.get(name)
            if x == y or name.startswith(UNLIKE):
                continue
            numbers = isinstance(x, float | int) and isinstance(y, float | int)
            if not numbers or abs(x - y) > 1e-3 * COARSE.get(name, 1.0) * max(abs(y), 1e-2):
                found[name] = [x, y]
    return found


if __name__ == "__main__":
    # Layers are scanned, as on an accelerator.
    assemble.UNROLLED_LAYERS = 0
    what, home, *names = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        told = {"steps": steps, "kernel": kernel, "generated": generated, "runs": runs}[what](
            Path(home), *names
        )
    print(json.dumps(told))
