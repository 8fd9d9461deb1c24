"""Checkpoints: what is saved comes back, whole ones only, the last and the best kept."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from rlx.checkpoint import Checkpoints
from rlx.state import start_memory
from rlx.types import TrainState


def state_at(step, value=1.0):
    params = {"kernel": jnp.full((3, 2), value, jnp.float32), "scale": jnp.ones(2, jnp.bfloat16)}
    critic = {"value_head": {"kernel": jnp.full((2, 1), -value, jnp.float32)}}
    memory = start_memory(0.05 * value, solved=4)
    counts = (jnp.int32(step), jnp.int32(4 * step), jnp.int32(2 * step))
    opt_state = optax.adamw(1e-3).init((params, critic))
    return TrainState(params, critic, opt_state, memory, jax.random.key(step), *counts)


def checkpoints(folder, keep=5, keep_best=False):
    return Checkpoints(folder / "checkpoints", keep=keep, keep_best=keep_best)


def test_a_state_comes_back_with_its_structure_types_and_key(tmp_path):
    """A tree of other containers or dtypes would compile every program again."""
    state = state_at(3, 0.25)
    with checkpoints(tmp_path) as kept:
        kept.save(state, None)
        kept.wait()
        back = kept.restore(jax.eval_shape(lambda: state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
    assert (back.params["kernel"] == 0.25).all()
    assert (back.critic["value_head"]["kernel"] == -0.25).all()
    assert back.memory.kl_beta == jnp.float32(0.0125)
    assert (back.step, back.cursor, back.updates) == (3, 12, 6)
    assert jax.random.uniform(back.key) == jax.random.uniform(jax.random.key(3))

    traces = []
    step = jax.jit(lambda s: traces.append(1) or s.step + 1)
    step(state)
    step(back)
    assert len(traces) == 1


def test_an_unfinished_checkpoint_is_none_and_steps_compare_as_numbers(tmp_path):
    """By name, 9 would come after 10; by age, the torn 12 would be the newest."""
    with checkpoints(tmp_path) as kept:
        for step in (2, 9, 10):
            kept.save(state_at(step), None)
        kept.wait()
    (tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp-7" / "default").mkdir(parents=True)
    with checkpoints(tmp_path) as kept:
        assert kept.latest == 10 and kept.steps == [2, 9, 10]
        assert kept.restore(jax.eval_shape(lambda: state_at(0))).step == 10
        assert kept.restore(jax.eval_shape(lambda: state_at(0)), 9).step == 9


def test_the_last_two_and_the_best_are_kept(tmp_path):
    """Unevaluated ones are no candidates for the best."""
    with checkpoints(tmp_path, keep=2, keep_best=True) as kept:
        for step, score in ((1, 0.2), (2, 0.9), (3, 0.4), (4, None), (5, 0.3), (6, None)):
            kept.save(state_at(step), score)
            kept.wait()
        assert kept.steps == [2, 5, 6]


def test_a_step_below_the_newest_is_not_dropped_without_a_word(tmp_path):
    with checkpoints(tmp_path) as kept:
        kept.save(state_at(100), None)
        kept.wait()
        with pytest.raises(RuntimeError, match="Checkpoint 10 was not written"):
            kept.save(state_at(10), None)


def test_a_failed_save_ends_in_an_error(tmp_path):
    """The folder turns into a file before a save. No thread is left that waits for one that does
    not come: it would hold the process for minutes."""
    kept = checkpoints(tmp_path)
    kept.save(state_at(1), None)
    kept.wait()
    folder = tmp_path / "checkpoints"
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("in the way")
    before = set(threading.enumerate())
    with pytest.raises(Exception, match=r"checkpoints|directory|exist"):
        kept.save(state_at(2), None)
        kept.wait()
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in left:
        thread.join(20)
    assert not [thread for thread in left if thread.is_alive()]


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, "tests")
from test_checkpoint import checkpoints, state_at
with checkpoints(Path(sys.argv[1]), keep=1) as kept:
    kept.save(state_at(1), None)
    kept.wait()
    kept.save(state_at(2), None)
    time.sleep(float(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path, seconds):
    """With one kept, the old one deleted first would leave none."""
    root = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path, str(seconds)], cwd=root)
    assert ended.returncode == -signal.SIGKILL
    with checkpoints(tmp_path, keep=1) as kept:
        assert kept.latest in (1, 2)
        assert kept.restore(jax.eval_shape(lambda: state_at(0))).step == kept.latest
