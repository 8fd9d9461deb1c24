"""A run that has no room on its devices is refused, and one that has is compiled once."""

from collections import Counter

import jax
import pytest
from toy_run import arguments

import run
from model.errors import BadInput
from rlx.compilation import EVENTS
from rlx.config import load_training
from rlx.mesh import Hardware
from rlx.resolve import resolve
from rlx.room import check_state

GIB = 2**30


@pytest.fixture
def recipe(tiny_nano, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"model:\n  path: {tiny_nano}\n")
    return path


@pytest.fixture
def device(monkeypatch):
    """A CPU that says how much memory it has, and how much of it is taken."""

    def has(memory, used=0):
        monkeypatch.setattr("rlx.room.this_hardware", lambda: Hardware(1, 1, memory))
        monkeypatch.setattr("rlx.room.memory_in_use", lambda: used)

    return has


KINDS = {
    "fused": ("loop.mode=fused",),
    "staged": ("loop.mode=staged",),
    "given": (
        *("algorithm.name=sft", "task.give_up=0.5", "task.demonstrations=8"),
        *("-batch.samples", "-batch.minibatches", "-rollout.overlong_buffer", "-eval.greedy"),
        "sampling.max_new_tokens=48",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_keeps_more_than_a_device_has_is_refused_before_it_reads_weights(
    recipe, tmp_path, device, capsys, kind
):
    device(2**14)
    command = arguments(recipe, tmp_path / "run", "loop.steps=2", *KINDS[kind])
    assert run.main(command) == 2
    assert "The run keeps 0.00 GiB on each device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["given", "staged"])
def test_texts_are_not_counted_before_they_are_read(recipe, tmp_path, device, kind):
    """Of the longest there would be GiB, and a file of 500 short ones is next to nothing."""
    changes = (*KINDS[kind], "sampling.max_prompt_tokens=32768", "-task.train_size")
    _, _, *settings = arguments(recipe, tmp_path / "run", *changes)
    config = resolve(load_training(recipe, settings))
    device(2**26)
    check_state(config)
    device(2**14)
    with pytest.raises(BadInput, match=r"keeps .* \(parameters, moments, a reference\)"):
        check_state(config)


@pytest.mark.parametrize(
    ("kind", "program"), zip(KINDS, ("update", "sample", "update"), strict=True)
)
def test_a_program_that_has_no_room_beside_what_lies_there_is_refused(
    recipe, tmp_path, device, capsys, kind, program
):
    device(4 * GIB, used=4 * GIB)
    command = arguments(recipe, tmp_path / "run", "loop.steps=2", *KINDS[kind])
    assert run.main(command) == 2
    said = capsys.readouterr().err
    assert f"The program `{program}` needs 4." in said and "GiB of a device's 4.00" in said


def test_a_run_that_has_room_compiles_each_program_once(recipe, tmp_path, device):
    device(4 * GIB)
    compiled = Counter()

    def listen(event, seconds, **about):
        if event == EVENTS[-1]:
            compiled[about["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        # Of a width that no other test has compiled.
        changes = ("loop.steps=3", "loop.mode=staged", "sampling.max_new_tokens=23")
        command = arguments(recipe, tmp_path / "run", *changes)
        assert run.main(command) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [compiled[f"jit({name})"] for name in ("sample_round", "update")] == [1, 1], compiled
