"""A run's host side: what is written beside the next steps, in which order, and what stops it."""

import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_run import lines, params_of, start

import run
from model.config import read_config
from model.load import load_params
from rlx import loop
from rlx.background import Background
from rlx.compilation import Compilation
from rlx.record import NONFINITE_STEPS, Record
from rlx.report.metrics import MetricsWriter

# ---- the worker -------------------------------------------------------------------------------


def test_work_is_done_in_order_beside_the_caller():
    done, gate = [], threading.Event()

    def first():
        gate.wait(10)
        done.append(1)

    with Background() as background:
        background.run(first)
        assert done == []
        gate.set()
        background.run(done.append, 2)
        background.join()
        assert done == [1, 2]
        background.run(done.append, 3)
    assert done == [1, 2, 3]


def fail(text):
    raise FloatingPointError(text)


def test_an_error_of_the_worker_is_raised_once_by_the_next_call():
    with Background() as background:
        background.run(fail, "first")
        with pytest.raises(FloatingPointError, match="first"):
            background.run(fail, "never begun")
        background.join()
    with pytest.raises(FloatingPointError, match="last"), Background() as background:
        background.run(fail, "last")


def test_the_callers_error_is_told_before_the_workers():
    with pytest.raises(KeyError), Background() as background:
        background.run(fail, "hidden")
        raise KeyError


# ---- a run ------------------------------------------------------------------------------------


def test_lines_stand_in_the_order_of_what_they_tell(recipe, tmp_path):
    """An evaluation that did not wait for the writer would stand before its own step."""
    folder = tmp_path / "run"
    more = ("loop.steps=6", "loop.chunk=2", "eval.every=2", "eval.problems=8")
    assert start(recipe, folder, *more) == 0
    found = [(x["step"], x["kind"]) for x in lines(folder / "metrics.jsonl")]
    assert found == [
        (0, "eval"),
        (1, "train"),
        (2, "train"),
        (2, "eval"),
        (3, "train"),
        (4, "train"),
        (4, "eval"),
        (5, "train"),
        (6, "train"),
        (6, "eval"),
    ]
    samples = [x["step"] for x in lines(folder / "samples.jsonl")]
    assert samples == sorted(samples)


def test_a_checkpoint_is_of_its_own_step_though_the_next_runs_meanwhile(recipe, tmp_path):
    """Saved in the background from buffers that the next step takes over, it would hold parts of a
    later state."""
    long, short = tmp_path / "long", tmp_path / "short"
    assert start(recipe, long, "loop.steps=4", "checkpoint.every=1", "checkpoint.keep=4") == 0
    assert start(recipe, short, "loop.steps=2") == 0
    output = tmp_path / "out"
    given = ["export", "--run", str(long), "--output", str(output), "--step", "2"]
    assert run.main(given) == 0
    chex.assert_trees_all_equal(load_params(output, read_config(output)), params_of(short))


def failing_from(step, error):
    write = MetricsWriter.write

    def written(self, at, values, kind="train"):
        if kind == "train" and at >= step:
            raise error
        write(self, at, values, kind)

    return written


def test_a_line_that_cannot_be_written_ends_the_run(recipe, tmp_path, monkeypatch):
    """No evaluation and no checkpoint stands on a step without its line."""
    folder = tmp_path / "run"
    monkeypatch.setattr(MetricsWriter, "write", failing_from(3, OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        start(recipe, folder, "loop.steps=20", "checkpoint.every=1", "checkpoint.keep=9")
    assert [x["step"] for x in lines(folder / "metrics.jsonl")] == [0, 1, 2]
    kept = [int(path.name) for path in (folder / "checkpoints").iterdir()]
    assert max(kept) == 2


def broken_from(step, taken):
    """`stepper.run` whose gradients are said not to be finite; counts its calls."""

    def wrap(make):
        def made(*operands):
            stepper = make(*operands)

            def run(state, length):
                state, metrics, preview = stepper.run(state, length)
                taken.append(int(state.step))
                name = "skipped/nonfinite"
                broken = jnp.float32(taken[-1] >= step)
                metrics[name] = jax.tree.map(lambda x: jnp.full_like(x, broken), metrics[name])
                metrics[name] = metrics[name]._replace(count=jnp.ones_like(metrics[name].count))
                return state, metrics, preview

            return stepper._replace(run=run)

        return made

    return wrap


def test_a_run_without_finite_gradients_ends_one_chunk_late_at_most(recipe, tmp_path, monkeypatch):
    folder, taken = tmp_path / "run", []
    monkeypatch.setattr(loop, "online_stepper", broken_from(2, taken)(loop.online_stepper))
    with pytest.raises(FloatingPointError, match="last 5 steps, up to step 6; nothing"):
        start(recipe, folder, "loop.steps=20")
    last = 1 + NONFINITE_STEPS
    assert [x["step"] for x in lines(folder / "metrics.jsonl")] == list(range(last + 1))
    assert taken[-1] <= last + 1
    assert not (folder / "summary.json").exists()


# ---- compilation ------------------------------------------------------------------------------


def test_a_program_is_counted_once_and_by_its_name():
    @jax.jit
    def doubled(x):
        return 2 * x

    x = np.ones(3, np.float32)
    with Compilation() as compilation:
        doubled(x)
        assert compilation.programs == 1
        doubled(x)
        assert compilation.programs == 1
        doubled(np.ones(4, np.float32))
        assert compilation.programs == 2
        assert compilation.total_seconds > 0
    seconds = compilation.total_seconds
    doubled(np.ones(5, np.float32))
    assert compilation.total_seconds == seconds


def test_small_programs_are_told_together():
    compilation = Compilation()
    for name, seconds in (("jit(update)", 2.0), ("jit(tiny)", 0.3), ("jit(small)", 0.2)):
        compilation._listen("/jax/core/compile/backend_compile_duration", seconds, fun_name=name)
    compilation._listen("/jax/core/compile/jaxpr_trace_duration", 1.0, fun_name="update")
    compilation._listen("/jax/another/duration", 1.0, fun_name="update")
    assert compilation.seconds() == {"update": 3.0, "other": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        ("loop.mode=fused",),
        ("loop.mode=staged",),
        ("loop.mode=fused", "rollout.dynamic_sampling=true", "loop.chunk=2"),
        ("loop.mode=staged", "rollout.dynamic_sampling=true"),
    ],
    ids=" ".join,
)
def test_a_run_compiles_nothing_after_its_first_chunk(recipe, tmp_path, monkeypatch, changes):
    programs, end = [], Record.end

    def counted(self, *operands):
        programs.append(self.compilation.programs)
        return end(self, *operands)

    monkeypatch.setattr(Record, "end", counted)
    folder = tmp_path / "run"
    jax.clear_caches()  # what other tests compiled counts here too
    assert start(recipe, folder, "loop.steps=4", *changes) == 0
    assert len(programs) >= 2 and programs[0] > 10
    assert set(programs) == {programs[0]}
    train = [x for x in lines(folder / "metrics.jsonl") if x["kind"] == "train"]
    assert train[0]["seconds/compile"] > 20 * train[-1]["seconds/compile"]


def test_a_run_tells_what_it_compiled(recipe, tmp_path, capsys):
    folder = tmp_path / "run"
    assert start(recipe, folder, "loop.steps=2", "loop.mode=staged") == 0
    assert "compiled in " in capsys.readouterr().out
    summary = (folder / "summary.json").read_text()
    assert '"compile_seconds": {' in summary
    assert "<dt>Compilation</dt>" in (folder / "report.html").read_text()
