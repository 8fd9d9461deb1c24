"""Many prompts with few programs: batches by length, and texts that no batch changes."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import CONFIG, initial_params

import run
from rlx.compilation import Compilation
from rlx.generate import Draw, Generator, batches
from rlx.policy import Policy

SHAPE = dataclasses.replace(CONFIG, max_positions=128)
KEY = jax.random.key(5)


class Stops:
    stop_ids, pad_id = (1,), 0


def generator(rows, prompts=7, limit=5):
    policy = Policy(None, SHAPE, Stops, None, jnp.dtype("float32"))
    return Generator(policy, max_new_tokens=limit, rows=rows, prompts=prompts)


def texts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, SHAPE.vocab_size, length).tolist() for length in lengths]


PROMPTS = texts([3, 40, 5, 70, 33, 4, 90])
"""Of three widths: 32, 64 and 128."""


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 9))
def test_batches_are_as_few_as_without_regard_to_length(lengths, size):
    """A batch a width that is filled with copies would be work for nothing. A width is a program,
    so there may be no more of them than doublings."""
    made = list(batches(lengths, size))
    assert sorted(place for batch in made for place in batch.places) == list(range(len(lengths)))
    assert len(made) == math.ceil(len(lengths) / size)
    assert all(len(batch.places) == size for batch in made[:-1])
    for width, places in made:
        assert width >= max(lengths[place] for place in places)
        assert width in (32, 64, 128, 256, 512)
        # No wider than the longest of all needs.
        assert width == 32 or width < 2 * max(lengths)


def test_prompts_of_like_length_go_together():
    lengths = [1, 33, 32, 64, 2, 65]
    assert list(batches(lengths, 2)) == [(32, [0, 2]), (64, [4, 1]), (128, [3, 5])]


@pytest.mark.parametrize("rows", [1, 2, 4, 64])
def test_every_prompt_gets_its_own_texts_whatever_the_batch(rows):
    """A last batch filled with copies, or cut, would repeat or lose some of the 7; noise by the
    place in the batch, or texts in the order of the batches, would give others."""
    draw = Draw(3, 1.0)
    batched = generator(rows)(initial_params(), PROMPTS, draw, KEY)
    assert batched.tokens.shape == (21, 5)
    assert len({tuple(row) for row in batched.tokens[:3]}) > 1
    whole = generator(21)(initial_params(), PROMPTS, draw, KEY)
    for name in ("tokens", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(batched, name))
    np.testing.assert_allclose(whole.logprobs, batched.logprobs, atol=1e-5)


def test_a_prompt_may_have_a_limit_of_its_own():
    """It cuts that prompt's texts and changes no other."""
    draw, limits = Draw(2, 1.0), [5, 1, 3, 5, 2, 5, 4]
    whole = generator(3)(initial_params(), PROMPTS, draw, KEY)
    cut = generator(3)(initial_params(), PROMPTS, draw, KEY, limits)
    for row, limit in enumerate(np.repeat(limits, 2)):
        kept = whole.mask[row] & (np.arange(5) < limit)
        np.testing.assert_array_equal(cut.mask[row], kept)
        np.testing.assert_array_equal(cut.tokens[row][kept], whole.tokens[row][kept])
        stopped = whole.mask[row].sum() <= limit and not whole.truncated[row]
        assert cut.truncated[row] == (not stopped)


def test_other_prompts_of_known_widths_compile_nothing():
    made, draw = generator(1, prompts=1), Draw(1, 1.0)
    with Compilation() as compilation:
        made(initial_params(), texts([2, 40]), draw, KEY)
        first = compilation.programs
        made(initial_params(), texts([64, 9, 33, 20, 50]), draw, KEY)
        assert compilation.programs == first > 0
        # And it would be seen.
        made(initial_params(), texts([65]), draw, KEY)
        assert compilation.programs > first


def generated(tmp_path, prompts, *more):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, prompts)) + "\n")
    flags = ["generate", "--input", str(source), "--output", str(output)]
    assert run.main([*flags, *more]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_line_may_ask_for_fewer_tokens(recipe, tmp_path, capsys):
    prompts = [{"prompt": "1+1=", "max_new_tokens": 2}, {"prompt": "1+1="}]
    more = ("--config", str(recipe), "model.weights=random", "sampling.max_new_tokens=6")
    short, long = generated(tmp_path, prompts, *more)
    assert len(short["token_ids"]) <= 2 < len(long["token_ids"]) <= 6
    assert short["finish_reason"] == "length" and short["max_new_tokens"] == 2
    flags = ["generate", "--config", str(recipe), "--output", str(tmp_path / "no.jsonl")]
    for wrong in (0, 7, 2.0, True, "3"):
        source = tmp_path / "wrong.jsonl"
        source.write_text(json.dumps({"prompt": "a", "max_new_tokens": wrong}) + "\n")
        assert run.main([*flags, "--input", str(source), "sampling.max_new_tokens=6"]) == 2
        assert f"{source}:1: max_new_tokens: expected a whole number" in capsys.readouterr().err


def test_a_text_whose_logits_were_not_finite_costs_no_other(recipe, tmp_path, monkeypatch):
    whole = Generator.__call__

    def broken(*given):
        samples = whole(*given)
        return samples._replace(finite=np.arange(len(samples.finite)) != 1)

    monkeypatch.setattr(Generator, "__call__", broken)
    prompts = [{"prompt": f"{i}+1="} for i in range(3)]
    more = ("--config", str(recipe), "model.weights=random", "sampling.max_new_tokens=4")
    first, second, third = generated(tmp_path, prompts, *more)
    assert first["completion"] and third["completion"]
    assert (second["completion"], second["finish_reason"]) == (None, "not finite")


def test_slots_change_no_text(recipe, tmp_path):
    """Two rows at a time of 18, and all at once."""
    prompts = [{"prompt": f"{i}+1="} for i in range(9)]
    more = ("--config", str(recipe), "model.weights=random", "--n", "2")
    more = (*more, "sampling.max_new_tokens=12")
    one = generated(tmp_path, prompts, *more)
    two = generated(tmp_path, prompts, *more, "sampling.slots=2")
    assert [line["token_ids"] for line in one] == [line["token_ids"] for line in two]
