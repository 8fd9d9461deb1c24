"""Training on 8 virtual CPU devices, on every mesh and on one device: prints what came of it.

    python tests/mesh_cases.py steps FOLDER      # one line of JSON; beside it runs in FOLDER
    python tests/mesh_cases.py runs FOLDER

A process has the devices that it started with, and that of the tests has one: so this is one of its
own, which tests/test_mesh.py and tests/test_mesh_runs.py start and read.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from conftest import scattered

from model.config import read_config
from model.load import export
from model.qwen import initialise
from model.score_head import export_scorer
from model.sharding import shardings
from rlx import assemble
from rlx.checkpoint import Checkpoints
from rlx.compilation import Compilation
from rlx.config import load_training, resolved_yaml
from rlx.mesh import Sizes, abstract, on_mesh
from rlx.stepper import online_stepper
from rlx.task_loading import load_task

ONE = Sizes(1, 1, 1)
MESHES = tuple(Sizes(*sizes) for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (1, 1, 2)))

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


# ---- what is trained -----------------------------------------------------------------------------


def make_model(folder: Path, *, scorer: bool = False, **fields) -> Path:
    """The bundled model's tokenizer around random weights that are far from uniform."""
    source = folder.with_name(f"{folder.name}-shape")
    source.mkdir(parents=True)
    for file in assemble.checkpoint_folder("nano").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, source)
    config = json.loads((source / "config.json").read_text()) | SHAPE | fields
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": STOPS}))
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
    given = [f"mesh.{axis}={size}" for axis, size in sizes._asdict().items()]
    changes = (*SETTINGS, *given, "optimizer.clip_norm=0", "run.name=mesh")
    config = assemble.resolve(load_training(recipe, overrides(*changes)))
    with on_mesh(sizes) as mesh, Compilation() as compilation:
        keys = assemble.random_keys(config)
        policy = assemble.load_policy(config, keys.weights)
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


def overrides(*changes):
    from toy_run import SMALL

    settings = dict(SMALL)
    for change in changes:
        key, _, value = change.partition("=")
        if key.startswith("-"):
            del settings[key[1:]]
        else:
            settings[key] = value
    return [f"{key}={value}" for key, value in settings.items()]


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


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    # Layers are scanned, as on an accelerator.
    assemble.UNROLLED_LAYERS = 0
    with contextlib.redirect_stdout(sys.stderr):
        told = {"steps": steps}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(told))
