"""The files of a run stay valid, hold each step once, and say aloud what went wrong."""

import errno
import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from rlx.report.metrics import MetricsWriter, json_safe, read_lines, write_atomically
from rlx.report.progress import Progress, Watch

SAMPLE = {
    "prompt": "1 + 1 =",
    "completion": "2",
    "reward": 1.0,
    "components": {"answer": 1.0},
    "correct": True,
    "advantage": 0.5,
    "truncated": False,
    "length": 2,
}


def strict(text):
    """Python reads NaN in JSON, other readers do not."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def metrics_lines(folder):
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_nan_becomes_null_and_is_named(tmp_path):
    values = {
        "loss": math.nan,
        "ratio/max": np.float32("inf"),
        "entropy": jnp.float32(0.5),
        "kl": jnp.bfloat16(0.25),
        "length/max": np.int64(7),
    }
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(np.int64(1), values)
    (line,) = metrics_lines(tmp_path)
    assert line == {
        "step": 1,
        "kind": "train",
        "loss": None,
        "ratio/max": None,
        "entropy": 0.5,
        "kl": 0.25,
        "length/max": 7.0,
        "nonfinite": ["loss", "ratio/max"],
    }


def test_every_line_is_on_disk_before_the_writer_closes(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False, resume_step=None)
    for step in (1, 2):
        writer.write(step, {"loss": 0.0})
        writer.write_samples(step, [SAMPLE])
        assert metrics_lines(tmp_path)[-1]["step"] == step
        assert read_lines(tmp_path / "samples.jsonl")[-1]["step"] == step
    writer.close()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda writer: writer.write(4, {"loss": 0.0}), "after 5; got step 4"),
        (lambda writer: writer.write(5, {"loss": 0.0}), "after 5; got step 5"),
        (lambda writer: writer.write(3, {"n": 1.0}, kind="eval"), "after 4; got step 3"),
        (lambda writer: writer.write(6, {"loss": 0.0}, kind="test"), "train, eval; got 'test'"),
        (lambda writer: writer.write(6, {"step": 1.0}), "'step' is a field of every"),
        (lambda writer: writer.write(6, {"loss": np.zeros(2)}), "'loss' to be one number"),
        (lambda writer: writer.write_samples(6, [{"prompt": "x"}]), "lacks completion, reward"),
    ],
)
def test_a_line_that_would_mislead_is_refused(tmp_path, write, words):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(5, {"loss": 0.0})
        writer.write(4, {"n": 1.0}, kind="eval")
        before = (tmp_path / "metrics.jsonl").read_text()
        with pytest.raises(ValueError, match=words):
            write(writer)
        assert (tmp_path / "metrics.jsonl").read_text() == before


def test_after_a_resume_each_step_stands_there_once(tmp_path):
    """Appending without a look back would give steps 1 2 3 4 5 3 4 5 6."""
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(0, {"n": 1.0}, kind="eval")
        for step in range(1, 6):
            writer.write(step, {"loss": 1.0})
            writer.write_samples(step, [SAMPLE])
        writer.write(2, {"n": 1.0}, kind="eval")
        writer.write(4, {"n": 1.0}, kind="eval")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "kind": "tr')  # the process died here
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=2) as writer:
        with pytest.raises(ValueError, match="after 2; got step 2"):
            writer.write(2, {"loss": 2.0})
        for step in range(3, 7):
            writer.write(step, {"loss": 2.0})
            writer.write_samples(step, [SAMPLE])
        writer.write(4, {"n": 2.0}, kind="eval")
    lines = metrics_lines(tmp_path)
    train = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert train == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    evaluations = [(line["step"], line["n"]) for line in lines if line["kind"] == "eval"]
    assert evaluations == [(0, 1.0), (2, 1.0), (4, 2.0)]
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_that_comes_again_stands_there_once(tmp_path):
    """A run that ended while it was exported is resumed at its last step, and evaluates anew."""
    for resume_step, value in ((None, 1.0), (2, 2.0)):
        again = resume_step is not None
        with MetricsWriter(
            tmp_path, tensorboard=False, resume_step=resume_step, evaluated_again=again
        ) as writer:
            if not again:
                writer.write(0, {"n": value}, kind="eval")
                writer.write(2, {"loss": value})
                writer.write_samples(2, [SAMPLE | {"split": "train"}])
            writer.write(2, {"n": value}, kind="eval")
            writer.write_samples(2, [SAMPLE | {"split": "heldout", "length": int(value)}])
    lines = [(x["kind"], x["step"], x.get("n")) for x in metrics_lines(tmp_path)]
    assert lines == [("eval", 0, 1.0), ("train", 2, None), ("eval", 2, 2.0)]
    samples = read_lines(tmp_path / "samples.jsonl")
    assert [(x["split"], x["length"]) for x in samples] == [("train", 2), ("heldout", 2)]


def test_a_fresh_run_does_not_mix_with_an_earlier_one(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(1, {"loss": 0.0})
    with pytest.raises(ValueError, match=r"already holds an earlier run.*run\.dir"):
        MetricsWriter(tmp_path, tensorboard=False, resume_step=None)
    assert len(metrics_lines(tmp_path)) == 1


def test_a_spoilt_line_is_an_error_with_its_number_and_a_torn_last_one_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "kind": "train"}\n'
    path.write_text(good + '{"step": 2, "ki')
    assert read_lines(path) == [{"step": 1, "kind": "train"}]
    path.write_text(good + '{"step": 2, "ki\n' + good)
    with pytest.raises(ValueError, match="line 2: expected JSON"):
        read_lines(path)
    path.write_text(good + "[1]\n")
    with pytest.raises(ValueError, match="line 2: expected an object with a whole number `step`"):
        read_lines(path)


@given(st.text(st.characters(exclude_categories=[])), st.floats())
def test_any_text_and_any_float_keep_the_file_one_line_a_sample(tmp_path_factory, text, number):
    """Unicode line separators would split a line, lone surrogates refuse it."""
    folder = tmp_path_factory.mktemp("run")
    row = {**SAMPLE, "completion": text, "reward": number}
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        writer.write_samples(1, [row, row])
    lines = read_lines(folder / "samples.jsonl")
    assert [line["completion"] for line in lines] == [text, text]
    assert lines[0]["reward"] == (number if math.isfinite(number) else None)


def test_summary_is_replaced_as_a_whole(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write_summary({"before": {"pass@1": np.float32(0.5), "n": np.int32(8)}})
        writer.write_summary({"seconds": jnp.float32(2.5), "hf": tmp_path, "after": math.nan})
    assert strict((tmp_path / "summary.json").read_text()) == {
        "seconds": 2.5,
        "hf": str(tmp_path),
        "after": None,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_what_json_cannot_hold_is_an_error():
    with pytest.raises(ValueError, match="JSON can hold; got bytes"):
        json_safe({"completion": b"x"})


def test_a_failing_disk_surfaces(tmp_path):
    with pytest.raises(OSError):
        write_atomically(tmp_path / "missing" / "summary.json", "{}")
    (tmp_path / "metrics.jsonl").mkdir()
    with (
        pytest.raises(OSError),
        MetricsWriter(tmp_path, tensorboard=False, resume_step=0) as writer,
    ):
        writer.write(1, {"loss": 0.0})


def events(folder):
    """Of each file, in the order of their steps: what it holds as (name, value, step)."""
    files = []
    for path in sorted((folder / "tensorboard").glob("*tfevents*"), key=lambda p: p.suffix):
        data, found, place = path.read_bytes(), [], 0
        while place < len(data):  # length, its checksum, the event, its checksum
            size = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += 16 + size
            if event.HasField("session_log"):
                found.append(("begun", event.session_log.status, event.step))
            found += [(x.tag, x.simple_value, event.step) for x in event.summary.value]
        files.append(found)
    return files


def test_tensorboard_gets_the_same_steps_under_the_kind(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True, resume_step=None) as writer:
        writer.write(3, {"loss": 0.5, "kl": math.nan})
        writer.write(3, {"pass@1": 0.25}, kind="eval")
        # At once: a run that is killed has them too. TensorBoard has no @ in its names.
        assert events(tmp_path) == [[("train/loss", 0.5, 3), ("eval/pass_1", 0.25, 3)]]
    with MetricsWriter(tmp_path, tensorboard=True, resume_step=3) as writer:
        writer.write(4, {"loss": 0.25})
    # TensorBoard hides what is at or past the step of a session's start: step 3 itself must stay.
    assert events(tmp_path)[1] == [("begun", SessionLog.START, 4), ("train/loss", 0.25, 4)]


def test_a_disk_that_fails_under_tensorboard_surfaces_too(tmp_path, monkeypatch):
    """A writer with a thread would lose it, and wait for ever once its queue is full."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = MetricsWriter(tmp_path, tensorboard=True, resume_step=None)
    with monkeypatch.context() as broken:
        broken.setattr(EventsWriter, "flush", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write(1, {"loss": 0.5})
    writer.close()


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_time_left_leaves_the_compile_out():
    """With the first step's 100 seconds in the mean it would say 6 * 26.5 = 159 seconds."""
    clock = Clock()
    with Progress(10, stream=io.StringIO(), clock=clock) as progress:
        for step, at in ((1, 100.0), (2, 102.0), (3, 104.0), (4, 106.0)):
            clock.seconds = at
            progress.update(step, {})
            if step == 1:
                assert progress.seconds_left is None
        assert progress.seconds_left == pytest.approx(12.0)


def test_time_left_counts_a_chunk_whose_steps_come_at_once():
    """Were each update a mark, 20 seconds over 9 steps would make 4.4 seconds of 10."""
    clock = Clock()
    with Progress(15, stream=io.StringIO(), chunk=5, clock=clock) as progress:
        for step in range(1, 11):
            clock.seconds = 100.0 if step <= 5 else 120.0
            progress.update(step, {})
        assert progress.seconds_left == pytest.approx(20.0)


def test_a_log_gets_a_plain_line_now_and_then_and_always_the_last():
    clock, stream = Clock(), io.StringIO()
    with Progress(100, stream=stream, seconds_between_lines=5.0, clock=clock) as progress:
        for step in range(1, 43):
            clock.seconds += 0.5
            progress.update(step, {"reward/mean": jnp.float32(0.25), "length/mean": 512.4})
        progress.note("held-out [bold]pass@1[/bold] 0.5")
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/100", "11/100", "21/100", "31/100", "41/100", "42/100",
    ]  # fmt: skip
    assert "reward 0.25  length 512  elapsed" in lines[0]
    assert lines[-2] == "held-out [bold]pass@1[/bold] 0.5"
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {"loss": 0.5, "entropy": 1.0, "length/mean": 9.0, "solve_rate": 0.5, "reward/mean": 1},
            "reward 1  solved 0.5  length 9  entropy 1  elapsed",
        ),
        ({"accuracy": 0.75, "margin": 0.25, "loss": 0.5}, "accuracy 0.75  margin 0.25  loss 0.5"),
        ({"nll": 2.5, "loss": 2.5}, "nll 2.5  loss 2.5  elapsed"),
    ],
)
def test_a_run_shows_what_it_has(metrics, words):
    """A preference run would show four dashes."""
    stream = io.StringIO()
    with Progress(1, stream=stream) as progress:
        progress.update(1, metrics)
    assert words in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_metrics(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Progress(4, stream=stream) as progress:
        progress.update(2, {"reward/mean": 0.125, "solve_rate": 0.5})
        progress.note("a [note]")
    assert "\x1b[" in stream.getvalue()
    for words in ("2/4", "0.125", "solved", "a [note]"):
        assert words in stream.getvalue()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"groups/all_equal": 1.0, "groups/all_wrong": 1.0}, "All were wrong"),
        ({"groups/all_equal": 1.0, "groups/all_right": 1.0}, "too easy"),
        ({"groups/all_equal": 1.0}, "no advantage was left"),
        ({"truncated": jnp.float32(1.0)}, "Raise sampling.max_new_tokens"),
    ],
)
def test_a_run_that_learns_nothing_is_told_once_after_five_steps(metrics, words):
    """Silent, such a run ends with exit code 0 and looks like a success."""
    notes = []
    watch = Watch(notes.append)
    healthy = {"groups/all_equal": 0.9, "truncated": 0.9, "unscored": 0.0, "skipped": 0.0}
    for step, values in enumerate([metrics] * 4 + [healthy] + [metrics] * 4, start=1):
        watch.update(step, values)
    assert notes == []
    for step in range(10, 20):
        watch.update(step, metrics)
    assert len(notes) == 1
    assert words in notes[0] and "step 10" in notes[0]


def test_equal_groups_are_no_news_where_nothing_is_compared_within_them():
    """A group of one, as PPO has it, is never mixed."""
    notes = []
    watch = Watch(notes.append, groups=False)
    for step in range(8):
        watch.update(step, {"groups/all_equal": 1.0})
    assert notes == []


@pytest.mark.parametrize("name", ["unscored", "skipped"])
def test_rows_without_a_score_and_skipped_updates_are_told_at_once(name):
    notes = []
    watch = Watch(notes.append)
    for step in (1, 2):
        watch.update(step, {name: 0.25})
    assert len(notes) == 1
    assert f"{name} 0.25" in notes[0] and "WARNING (step 1)" in notes[0]
