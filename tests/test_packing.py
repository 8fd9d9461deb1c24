"""Packing changes what is computed, never what comes out: gradients, metrics, scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import (
    CONFIG,
    PAD,
    headed_params,
    initial_params,
    learner,
    movement,
    signal,
    together,
)

from model.heads import logits
from model.parameters import head_kernel
from model.qwen import Qwen
from rlx.packing import layout, pack
from rlx.scoring import score_completions, score_rows
from rlx.state import initial_state
from rlx.types import Batch
from rlx.update import gradients, optimise, update

PROMPT, WIDTH, SAMPLES = 6, 11, 4


def groups(
    lengths, prompt_lengths, names=("grpo",), seed=0, prompt=PROMPT, width=WIDTH, samples=SAMPLES
):
    """Rows of these lengths, `samples` of each prompt."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    prompts = rng.integers(2, 16, (rows // samples, prompt))
    empty = np.arange(prompt) < prompt - np.asarray(prompt_lengths)[:, None]
    tokens = rng.integers(2, 16, (rows, prompt + width))
    tokens[:, :prompt] = np.repeat(np.where(empty, PAD, prompts), samples, axis=0)
    mask = np.arange(width) < np.asarray(lengths)[:, None]
    tokens[:, prompt:][~mask] = PAD
    full = np.concatenate([np.repeat(~empty, samples, axis=0), mask], axis=1)
    positions = np.where(full, np.cumsum(full, axis=1) - 1, -1)
    near = jnp.asarray(rng.normal(-2.77, 0.3, (3, rows, width)), jnp.float32)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        mask=jnp.asarray(mask),
        sampler_logprobs=near[0],
        old_logprobs=near[1],
        ref_logprobs=near[2],
        values=jnp.asarray(rng.normal(size=mask.shape), jnp.float32),
        margins=jnp.zeros((rows, 1)),
        signals=tuple(signal(name, jnp.asarray(mask), i) for i, name in enumerate(names)),
    )


RAGGED = [11, 1, 0, 5, 3, 3, 11, 11, 0, 0, 0, 0, 2, 9, 10, 7]
PROMPTS = [6, 1, 4, 2]


def packed(made, **changes):
    return made._replace(samples=SAMPLES, packing=True, **changes)


def largest(tree):
    return max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(tree))


def assert_close(ours, theirs, part=1e-5):
    """To `part` of the largest entry of each leaf."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        scale = max(float(jnp.max(jnp.abs(b))), 0.05)
        np.testing.assert_allclose(a, b, atol=part * scale, rtol=0)


TERMS = ("grpo", "gspo", "entropy", "kl_k3")


@pytest.mark.parametrize("micro", [1, 2, 4, 8, 16])
def test_packing_changes_no_gradient_and_no_metric(micro):
    made = together(TERMS, micro=micro, on_policy=False, temperature=0.6)
    rows = groups(RAGGED, PROMPTS, TERMS)
    trained = (initial_params(), {})
    grads, value, metrics = jax.jit(functools.partial(gradients, made))(trained, rows)
    ours, our_value, our_metrics = jax.jit(functools.partial(gradients, packed(made)))(
        trained, rows
    )
    assert_close(ours, grads)
    assert float(our_value) == pytest.approx(float(value), abs=1e-6)
    padding, our_padding = metrics.pop("padding"), our_metrics.pop("padding")
    if micro < len(RAGGED):
        assert our_padding.count < padding.count and our_padding.total < padding.total
    assert metrics.keys() == our_metrics.keys()
    assert_close(our_metrics, metrics)


def test_logprobs_of_streams_are_at_the_temperature():
    """At 1 they would be off by more than one nat: those of a policy that nobody samples."""
    made, rows = packed(learner(micro=4, temperature=0.6)), groups(RAGGED, PROMPTS)
    text = (rows.tokens, rows.positions)
    scored = jax.jit(score_completions, static_argnums=0)(
        made, initial_params(), {}, *text, rows.mask
    )
    hidden = Qwen(CONFIG).apply({"params": initial_params()}, *text)[:, -WIDTH - 1 : -1]
    plain = logits(CONFIG, head_kernel(CONFIG, initial_params()), hidden)

    def gap(temperature):
        expected = jax.nn.log_softmax(plain / temperature)
        chosen = jnp.take_along_axis(expected, rows.tokens[:, -WIDTH:, None], axis=2)[..., 0]
        return float(jnp.max(jnp.where(rows.mask, jnp.abs(scored.logprobs - chosen), 0)))

    assert gap(0.6) < 1e-5
    assert gap(1.0) > 1.0


@functools.cache
def both(name):
    """Gradients of whole rows and of packed ones, compiled once for many batches."""
    made = learner(name, micro=4)
    run = [jax.jit(functools.partial(gradients, m)) for m in (made, packed(made))]
    return lambda rows: [f((initial_params(), {}), rows)[:2] for f in run]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, WIDTH), min_size=12, max_size=12),
    st.lists(st.integers(1, PROMPT), min_size=3, max_size=3),
    st.integers(0, 100),
)
def test_any_lengths(lengths, prompt_lengths, seed):
    whole, ours = both("dapo")(groups(lengths, prompt_lengths, seed=seed))
    assert_close(ours, whole)


@pytest.mark.parametrize("separate", [True, False], ids=["separate critic", "shared head"])
def test_critics_and_the_value_after_the_last_token(separate):
    params = initial_params() if separate else headed_params()
    critic = headed_params() if separate else {}
    changes = {"critic": Qwen(CONFIG)} if separate else {}
    made = together(("ppo", "value"), micro=4, **changes)
    rows = groups(RAGGED, PROMPTS, ("ppo", "value"))
    grads, *_ = jax.jit(functools.partial(gradients, made))((params, critic), rows)
    ours, *_ = jax.jit(functools.partial(gradients, packed(made)))((params, critic), rows)
    assert largest(grads[1] if separate else grads[0]["value_head"]) > 1e-3
    assert_close(ours, grads)

    where = (params, critic, rows.tokens, rows.positions)
    whole = jax.jit(score_rows, static_argnums=(0, 5))(made, *where, WIDTH)
    short = jax.jit(score_completions, static_argnums=0)(packed(made), *where, rows.mask)
    for name in ("logprobs", "entropy"):
        theirs = np.where(rows.mask, getattr(whole, name), 0)
        np.testing.assert_allclose(np.where(rows.mask, getattr(short, name), 0), theirs, atol=2e-6)
    # A row without a token is not scored at all.
    states = np.pad(np.asarray(rows.mask), ((0, 0), (1, 0)), constant_values=True)
    states &= np.asarray(rows.mask).any(axis=1, keepdims=True)
    np.testing.assert_allclose(
        np.where(states, short.values, 0), np.where(states, whole.values, 0), atol=2e-6
    )


def test_pairs_stay_in_one_stream():
    """A row's partner is elsewhere in the stream or in another one: the margin would be between
    strangers."""
    made = learner("dpo", micro=2, hyper={"beta": 0.5})
    rows = groups([11, 3, 4, 11, 0, 0, 2, 9, 1, 10, 7, 7], [6, 3, 2], ("dpo",))
    grads, value, _ = jax.jit(functools.partial(gradients, made))((initial_params(), {}), rows)
    ours, our_value, _ = jax.jit(functools.partial(gradients, packed(made)))(
        (initial_params(), {}), rows
    )
    assert_close(ours, grads)
    assert float(our_value) == pytest.approx(float(value), abs=1e-6)


def test_a_stream_of_one_pair_holds_it_at_full_length():
    """Its rows each begin with a block: room for their tokens side by side was too little, and the
    second one lost its end. So it was on a mesh, whose devices each take a part of `micro`."""
    made = learner("dpo", micro=2, hyper={"beta": 0.5})
    rows = groups([11] * 12, [6, 3, 2], ("dpo",))
    grads, value, _ = jax.jit(functools.partial(gradients, made))((initial_params(), {}), rows)
    ours, our_value, _ = jax.jit(functools.partial(gradients, packed(made)))(
        (initial_params(), {}), rows
    )
    assert_close(ours, grads)
    assert float(our_value) == pytest.approx(float(value), abs=1e-6)


def test_shuffled_mini_batches_are_the_same_rows():
    """Packing puts the rows of a prompt side by side again; which rows an update sees stays."""
    made = learner("grpo", micro=4, minibatches=2, epochs=2)
    rows = groups(RAGGED, PROMPTS)
    key = jax.random.key(3)
    ends = []
    for one in (made, packed(made)):
        state = initial_state(initial_params(), one, jax.random.key(0))
        state, metrics = jax.jit(update, static_argnums=0)(one, state, rows, key)
        ends.append((state.params, metrics))
    moved = movement(initial_params(), ends[0][0])
    assert moved > 1e-3
    assert movement(*(params for params, _ in ends)) < 1e-4 * moved


@pytest.mark.parametrize("remat", ["none", "block", "dots"])
def test_nothing_to_learn_from_changes_nothing(remat):
    made = packed(learner("grpo", micro=4, model=Qwen(CONFIG, remat=remat)))
    rows = groups([0] * 8, [3, 6])
    state = initial_state(initial_params(), made, jax.random.key(0))
    end, metrics = jax.jit(optimise, static_argnums=0)(made, state, rows)
    assert metrics["skipped"].total == 1
    for a, b in zip(jax.tree.leaves(end), jax.tree.leaves(state), strict=True):
        assert jnp.array_equal(a, b)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=8, max_size=8),
    st.integers(1, 2),
    st.integers(1, 4),
)
def test_places_hold_what_they_are_for(lengths, unit, micro):
    """No two tokens in one place, none outside the stream, no row in more blocks than it may."""
    prompt, row, samples = 20, 40, 4
    how = layout(8, micro * unit, 2, unit, prompt, row)
    prompts = jnp.arange(8) // samples
    prompt_lengths = jnp.where(prompts == 0, 20, 7)
    tokens = jnp.zeros((8, prompt + row), jnp.int32)
    made = jax.jit(pack, static_argnums=0)(how, tokens, jnp.array(lengths), prompt_lengths, prompts)
    block, size = how.shape.block, how.shape.tokens
    taken: dict[tuple[int, int], str] = {}
    for b, length in enumerate(lengths):
        stream, start = int(made.streams[b]), int(made.places.starts[b])
        if not length:
            continue
        assert start + length <= size
        assert (start + length - 1) // block - start // block <= how.shape.reach
        for place in range(start, start + length):
            assert taken.setdefault((stream, place), f"row {b}") == f"row {b}"
        first = int(made.places.prompt_starts[b])
        assert first % block == 0
        for place in range(first, first + int(prompt_lengths[b]) - 1):
            owner = f"prompt {b // samples}"
            assert taken.setdefault((stream, place), owner) == owner
        blocks = {int(made.streams[b]) * size + p // block for p in range(start, start + length)}
        for other, its in enumerate(lengths):
            if its and other // samples != b // samples:
                begin = int(made.places.starts[other])
                theirs = {
                    int(made.streams[other]) * size + p // block for p in range(begin, begin + its)
                }
                assert not blocks & theirs
    if unit == 2:
        assert all(made.streams[::2] == made.streams[1::2])
    assert int(made.count) == int(made.streams[-1]) + 1


def test_full_rows_leave_no_padding():
    """8 prompts of 64 tokens, 8 samples of 128: 8 streams of 64 + 8 x 128 columns."""
    how = layout(64, 8, 1, 1, 65, 128)
    lengths, prompts = jnp.full(64, 128), jnp.arange(64) // 8
    tokens = jnp.zeros((64, 193), jnp.int32)
    made = pack(how, tokens, lengths, jnp.full(64, 65), prompts)
    assert int(made.count) * how.shape.tokens == 8 * 64 + 64 * 128
