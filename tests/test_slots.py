"""More rows than slots, limits of their own, and caches that grow: none of it changes a row."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model.sample
from model.sample import sample

N, G, T = 3, 4, 12
PAD = 3
NEVER = jnp.array([-1, -1])


@pytest.fixture(scope="module")
def program(tiny_config, tiny_params, prompts):
    """The sampler under jit, by how many slots it has; keys, limits and stops are traced."""
    keys = jax.random.split(jax.random.key(0), (N, G))

    @functools.partial(jax.jit, static_argnames=("slots", "width"))
    def run(stop_ids, limits, slots=None, width=T, params=tiny_params, keys=keys):
        return sample(
            tiny_config, params, *prompts, keys, max_new_tokens=width, stop_ids=stop_ids,
            pad_id=PAD, temperature=0.9, slots=slots, limits=limits,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def endless(program):
    return program(NEVER, None)


def assert_cut(samples, endless, stop_ids, limits):
    """`samples` are `endless` up to each row's first stop token or limit, and padding after it."""
    for row, ids in enumerate(np.asarray(endless.tokens)):
        stops = np.append(np.flatnonzero(np.isin(ids, stop_ids)) + 1, T + 1)
        length = min(stops[0], limits[row])
        np.testing.assert_array_equal(samples.mask[row], np.arange(len(ids)) < length)
        np.testing.assert_array_equal(samples.tokens[row, :length], ids[:length])
        np.testing.assert_array_equal(samples.tokens[row, length:], PAD)
        np.testing.assert_allclose(
            samples.logprobs[row, :length], endless.logprobs[row, :length], atol=1e-5
        )
        np.testing.assert_array_equal(samples.logprobs[row, length:], 0.0)
        assert bool(samples.truncated[row]) == (stops[0] > limits[row])


limits_of_rows = st.lists(st.integers(0, T), min_size=N * G, max_size=N * G)
ids = st.integers(0, 24)


@pytest.mark.parametrize("slots", [1, 3, 9, None])
@settings(deadline=None, max_examples=15)
@given(limits=limits_of_rows, stops=st.tuples(ids, ids))
def test_a_row_is_what_it_would_be_alone(program, endless, slots, limits, stops):
    """A slot that kept anything of its former row would show it in the next one's text."""
    samples = program(jnp.array(stops), jnp.array(limits).reshape(N, G), slots)
    assert_cut(samples, endless, stops, limits)
    assert bool(samples.finite.all())
    assert int(samples.mask.sum()) <= int(samples.slot_steps)


def test_as_many_slots_as_rows_are_no_slots(program):
    limits = jnp.full((N, G), 5)
    lower = [program.lower(NEVER, limits, slots).as_text() for slots in (None, N * G, N * G + 9)]
    assert lower[0] == lower[1] == lower[2]


def test_a_finished_slot_takes_the_next_row(program):
    """Fixed batches of three would take 4 x 12 steps; here rows 0 and 4 go on while others pass."""
    limits = np.array([12, 1, 1, 1, 12, 1, 1, 1, 1, 1, 1, 12])
    stride = model.sample.STRIDE
    samples = program(NEVER, jnp.array(limits).reshape(N, G), 3)
    np.testing.assert_array_equal(samples.mask.sum(axis=1), limits)
    # A row of one token has its slot for one stride: nine of them in the slots that 36 steps of
    # the long ones leave, and the last long one by itself.
    assert int(samples.slot_steps) <= 3 * 12 + 9 * stride + 3 * 12
    # All at once: the longest row decides, for every slot.
    samples = program(NEVER, jnp.full((N, G), 2), None)
    assert int(samples.slot_steps) == N * G * model.sample.STRIDE


def test_a_limit_beyond_the_longest_is_the_longest(program, endless):
    limits = jnp.full((N, G), 10 * T)
    for slots in (2, None):
        assert_cut(program(NEVER, limits, slots), endless, [], [T] * N * G)


def test_a_broken_row_leaves_nothing_behind(program, endless, tiny_params):
    """A weight of 0 times the infinity in a column that is no longer seen would be NaN."""
    embedding = tiny_params["embed"]["embedding"].at[20].set(jnp.inf)
    broken = tiny_params | {"embed": {"embedding": embedding}}
    met = (np.asarray(endless.tokens[:, :-1]) == 20).any(axis=1)
    met[:G] = True  # it is in the first prompt
    assert met.any() and not met.all()
    for slots in (1, 2):
        samples = program(NEVER, None, slots, params=broken)
        np.testing.assert_array_equal(samples.finite, ~met)
        np.testing.assert_array_equal(samples.tokens[~met], endless.tokens[~met])
        np.testing.assert_allclose(samples.logprobs[~met], endless.logprobs[~met], atol=1e-5)


def test_the_last_rows_are_moved_together(program, endless):
    """Row 8 begins in the third round of four slots, and is soon alone: three would stay idle."""
    limits = np.array([1, 1, 1, 1, 1, 1, 1, 1, 12, 1, 1, 1])
    samples = program(NEVER, jnp.array(limits).reshape(N, G), 4)
    assert_cut(samples, endless, [], limits)
    stride = model.sample.STRIDE
    assert int(samples.slot_steps) == 4 * 3 * stride + 12 - stride


def test_no_slot_is_refused(program):
    with pytest.raises(ValueError, match="slots must be at least 1, and is 0"):
        program(NEVER, None, 0)


@pytest.mark.parametrize(
    ("narrowest", "widths"), [(8, [8, 16, 24, 32]), (16, [16, 32]), (32, [32])]
)
def test_a_cache_that_grows_gives_the_same_text(monkeypatch, program, narrowest, widths):
    """A column lost or repeated at a change of width would change what follows it."""
    monkeypatch.setattr(model.sample, "NARROWEST", 64)
    whole = program.__wrapped__(NEVER, None, None, 32)
    monkeypatch.setattr(model.sample, "NARROWEST", narrowest)
    assert model.sample.cache_widths(32) == widths
    grown = program.__wrapped__(NEVER, None, None, 32)
    np.testing.assert_array_equal(grown.tokens, whole.tokens)
    np.testing.assert_allclose(grown.logprobs, whole.logprobs, atol=5e-6)
    assert bool(grown.mask.all())


def test_widths_end_at_the_longest_and_are_few():
    for longest in (4, 32, 64, 96, 100, 128, 1024, 4096):
        widths = model.sample.cache_widths(longest)
        assert widths[-1] == longest and widths == sorted(set(widths))
        assert len(widths) <= model.sample.WIDTHS
        assert not any(width % model.sample.STRIDE for width in widths)
    assert model.sample.cache_widths(64) == [32, 64]


@pytest.mark.parametrize("slots", [None, 5])
def test_no_step_copies_a_cache(monkeypatch, program, slots, optimised):
    """XLA copies what it can't update in place: then each step costs a cache's length."""
    monkeypatch.setattr(model.sample, "NARROWEST", 8)
    text = program.lower(NEVER, None, slots, 36).compile().as_text()
    rows = slots or N * G
    bodies = re.findall(r"body=%?([\w.-]+)", text)
    assert bodies
    shapes = [rf"f32\[{rows},2,10,\d+\]", rf"f32\[{rows},2,\d+,10\]"]
    seen = 0
    for name in bodies:
        body = re.search(rf"^%?{re.escape(name)} \(.*?^}}", text, re.MULTILINE | re.DOTALL).group()
        for shape in shapes:
            seen += bool(re.search(shape, body))
            assert not re.search(rf"= {shape}\S* copy\(", body)
    assert seen >= 2
