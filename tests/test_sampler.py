"""The sampler: it draws from the softmax that the trainer sees, and says what it drew."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from model.draw import Filters, draw, keep, likeliest
from model.heads import completion_outputs, logits
from model.parameters import head_kernel
from model.qwen import Qwen
from model.sample import sample

N, G, P, T = 3, 8, 6, 12
NEVER = jnp.array([-1, -1])
PAD = 3


@pytest.fixture(scope="module")
def traces():
    """Grows with each time that the sampler is traced, and so compiled."""
    return []


@pytest.fixture(scope="module")
def program(tiny_config, traces):
    """The sampler under jit; whatever may vary between two steps of training is traced."""

    @functools.partial(jax.jit, static_argnames=("pad_id", "max_new_tokens", "dtype"))
    def run(params, prompts, keys, stop_ids, temperature, filters=None, pad_id=PAD,
            max_new_tokens=T, dtype=jnp.float32):  # fmt: skip
        traces.append(keys.shape)
        return sample(
            tiny_config, params, *prompts, keys, max_new_tokens=max_new_tokens, stop_ids=stop_ids,
            pad_id=pad_id, temperature=temperature, filters=filters, dtype=dtype,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def trainer(tiny_config):
    """The training model's log-probabilities of what was sampled."""

    @functools.partial(jax.jit, static_argnames="dtype")
    def run(params, prompts, samples, temperature, dtype=jnp.float32):
        rows, width = samples.tokens.shape
        group = rows // prompts.tokens.shape[0]
        tokens = jnp.concatenate([jnp.repeat(prompts.tokens, group, 0), samples.tokens], axis=1)
        positions = jnp.repeat(prompts.positions, group, 0)
        after = positions[:, -1:] + 1 + jnp.arange(width)
        positions = jnp.concatenate([positions, jnp.where(samples.mask, after, -1)], axis=1)
        model = Qwen(tiny_config, dtype=dtype)
        return completion_outputs(model, params, tokens, positions, width, temperature).logprobs

    return run


def keys_of(seed, shape=(N, G)):
    return jax.random.split(jax.random.key(seed), shape)


@pytest.fixture(scope="module")
def endless(program, tiny_params, prompts):
    """Samples that no token stops."""
    return program(tiny_params, prompts, keys_of(0), NEVER, 0.7)


def assert_ended(samples, endless, stop_ids, pad_id):
    """`samples` are `endless` up to and with the first stop token, and padding after it."""
    wanted = np.asarray(endless.tokens)
    for row, ids in enumerate(wanted):
        stops = np.flatnonzero(np.isin(ids, stop_ids))
        length = stops[0] + 1 if len(stops) else len(ids)
        np.testing.assert_array_equal(samples.mask[row], np.arange(len(ids)) < length)
        np.testing.assert_array_equal(samples.tokens[row, :length], ids[:length])
        np.testing.assert_array_equal(samples.tokens[row, length:], pad_id)
        np.testing.assert_allclose(
            samples.logprobs[row, :length], endless.logprobs[row, :length], atol=1e-6
        )
        np.testing.assert_array_equal(samples.logprobs[row, length:], 0.0)
        assert bool(samples.truncated[row]) == (len(stops) == 0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_logprobs_are_the_trainers(program, trainer, tiny_params, prompts, temperature):
    samples = program(tiny_params, prompts, keys_of(1), jnp.array([4, 11]), temperature)
    assert bool(samples.mask.any(axis=1).all()) and not bool(samples.mask.all())
    found = trainer(tiny_params, prompts, samples, temperature)
    gap = jnp.where(samples.mask, jnp.abs(found - samples.logprobs), 0.0)
    assert float(gap.max()) < 1e-4
    # Both at another temperature would agree too, but not with each other's.
    other = trainer(tiny_params, prompts, samples, temperature + 0.2)
    assert float(jnp.where(samples.mask, jnp.abs(other - samples.logprobs), 0.0).max()) > 0.01


def test_bfloat16_sampling_stays_near_the_bfloat16_trainer(program, trainer, tiny_params, prompts):
    samples = program(tiny_params, prompts, keys_of(1), NEVER, 1.0, dtype=jnp.bfloat16)
    near = trainer(tiny_params, prompts, samples, 1.0, dtype=jnp.bfloat16)
    assert samples.logprobs.dtype == jnp.float32
    assert 0 < float(jnp.abs(near - samples.logprobs).mean()) < 0.02


def test_greedy_logprobs_are_finite_and_those_of_temperature_one(
    program, trainer, tiny_params, prompts
):
    """A division by the temperature gives (inf, nan)."""
    samples = program(tiny_params, prompts, keys_of(0), NEVER, 0.0)
    found = trainer(tiny_params, prompts, samples, 1.0)
    np.testing.assert_allclose(samples.logprobs, found, atol=1e-4)
    # All noise apart, siblings are equal.
    siblings = samples.tokens.reshape(N, G, T)
    np.testing.assert_array_equal(siblings, np.repeat(siblings[:, :1], G, axis=1))


def chi_square_limit(freedom, deviations=3.7):
    """What chi-square exceeds once in ten thousand times (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + deviations * spread**0.5) ** 3


def chi_square(counts, expected):
    """The statistic and its degrees of freedom; cells of less than five share one."""
    counts, expected = np.ravel(counts), np.ravel(expected)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum(), len(counts) - 1


def test_pairs_of_tokens_are_drawn_as_often_as_the_softmax_says(
    tiny_config, program, tiny_params, prompts
):
    """Of both tokens together: noise that a row's steps share would show here."""
    temperature, count = 1.3, 8192
    one = jax.tree.map(lambda x: x[:1], prompts)
    keys = keys_of(2, (1, count))
    samples = program(tiny_params, one, keys, NEVER, temperature, max_new_tokens=2)
    tokens = np.asarray(samples.tokens)

    @jax.jit
    def last_two(params, tokens, positions):
        hidden = Qwen(tiny_config).apply({"params": params}, tokens, positions)
        return logits(tiny_config, head_kernel(tiny_config, params), hidden[:, -2:]) / temperature

    follow = jnp.concatenate([jnp.repeat(one.tokens, 25, 0), jnp.arange(25)[:, None]], axis=1)
    every = last_two(tiny_params, follow, jnp.tile(jnp.arange(7), (25, 1)))
    probs = np.asarray(jax.nn.softmax(every, axis=-1), np.float64)[..., :25]
    joint = probs[0, 0][:, None] * probs[:, 1]
    counts = np.zeros((25, 25))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)

    statistic, freedom = chi_square(counts, joint * count)
    assert freedom > 100 and statistic < chi_square_limit(freedom)
    # Another temperature's softmax would be found out.
    sharper = joint**1.3 / (joint**1.3).sum()
    statistic, freedom = chi_square(counts, sharper * count)
    assert statistic > 2 * chi_square_limit(freedom)


def test_draws_follow_the_probabilities_across_blocks():
    """500 tokens are four blocks, the last of them not full."""
    rng = np.random.default_rng(0)
    probs = rng.random(500) ** 4 * (rng.random(500) > 0.3)
    probs = (probs / probs.sum()).astype(np.float32)
    uniform = jax.random.uniform(jax.random.key(0), (200_000,))
    drawn = jax.jit(lambda u: draw(jnp.broadcast_to(probs, (2000, 500)), u))
    counts = sum(np.bincount(drawn(piece), minlength=500) for piece in uniform.reshape(100, 2000))
    statistic, freedom = chi_square(counts, probs * 200_000.0)
    assert freedom > 200 and statistic < chi_square_limit(freedom)
    np.testing.assert_array_equal(counts[probs == 0], 0)


def test_a_token_of_probability_zero_is_never_drawn():
    """A running sum that XLA adds up in a tree rises by rounding where it should stand still. The
    numbers below are the ones between which it does: each drew a forbidden token."""
    rng = np.random.default_rng(0)
    probs = rng.random((16, 4001)).astype(np.float32) ** 8
    probs[:, ::3] = 0
    probs[:, 3900:] = 0  # ids beyond the tokenizer
    probs /= probs.sum(axis=1, keepdims=True)
    running = np.asarray(jax.jit(lambda p: jnp.cumsum(p, axis=-1))(probs))
    rows, places = np.nonzero((probs[:, 1:] == 0) & (np.diff(running) > 0))
    assert len(rows) > 100
    levels = running[rows, places] / running[rows, -1]
    drawing = jax.jit(draw)
    lowest, highest = np.zeros_like(levels), np.full_like(levels, 1 - 2**-23)
    for uniform in (levels, np.nextafter(levels, 1), lowest, highest):
        drawn = np.asarray(drawing(jnp.asarray(probs[rows]), jnp.asarray(uniform)))
        assert probs[rows, drawn].min() > 0

    edges = jnp.array([[0, 0, 0.4, 0.6, 0, 0]] * 2)
    np.testing.assert_array_equal(draw(edges, jnp.array([0.0, 1 - 2**-24])), [2, 3])


def test_siblings_differ_and_the_same_keys_give_the_same_text(
    program, tiny_params, prompts, endless
):
    again = program(tiny_params, prompts, keys_of(0), NEVER, 0.7)
    jax.tree.map(np.testing.assert_array_equal, again, endless)
    for siblings in np.asarray(endless.tokens).reshape(N, G, T):
        assert len({tuple(ids) for ids in siblings}) == G


def test_a_row_depends_on_its_prompt_and_key_alone(
    program, tiny_params, prompts, endless, pad_left
):
    keys = keys_of(0)
    # Other places, other neighbours, one sibling fewer, three columns of padding more; and the
    # prompt of one token by itself, with one key.
    turned = jax.tree.map(lambda x: x[jnp.array([2, 0])], prompts)
    wider = type(prompts)(
        jnp.pad(turned.tokens, ((0, 0), (3, 0)), constant_values=8),
        jnp.pad(turned.positions, ((0, 0), (3, 0)), constant_values=-1),
    )
    chosen = keys[jnp.array([2, 0])][:, 1:]
    moved = program(tiny_params, wider, chosen, NEVER, 0.7)
    rows = np.concatenate([2 * G + np.arange(1, G), np.arange(1, G)])
    np.testing.assert_array_equal(moved.tokens, endless.tokens[rows])
    np.testing.assert_allclose(moved.logprobs, endless.logprobs[rows], atol=1e-5)

    alone = program(tiny_params, pad_left([[9]], 2), keys[2:, 5:6], NEVER, 0.7)
    np.testing.assert_array_equal(alone.tokens[0], endless.tokens[2 * G + 5])
    np.testing.assert_allclose(alone.logprobs[0], endless.logprobs[2 * G + 5], atol=1e-5)


def test_the_smallest_shapes_give_the_first_token(program, tiny_params, endless, pad_left):
    """A one-token prompt in two columns has an empty prompt cache: padding alone."""
    one = pad_left([[9]], 2)
    got = program(tiny_params, one, keys_of(0)[2:, :1], NEVER, 0.7, max_new_tokens=1)
    assert got.tokens.shape == (1, 1) and bool(got.finite.all()) and bool(got.truncated.all())
    assert int(got.tokens[0, 0]) == int(endless.tokens[2 * G, 0])
    np.testing.assert_allclose(got.logprobs[0, 0], endless.logprobs[2 * G, 0], atol=1e-5)


def test_one_column_of_prompt_is_refused(tiny_config, tiny_params):
    with pytest.raises(ValueError, match=r"at least 2 columns, and tokens is \[3, 1\]"):
        sample(
            tiny_config, tiny_params, jnp.zeros((3, 1), int), jnp.zeros((3, 1), int), keys_of(0),
            max_new_tokens=2, stop_ids=NEVER, pad_id=0,
        )  # fmt: skip


@pytest.mark.parametrize("stops", [(4, 4), (4, 17), (-1, PAD)])
def test_a_row_ends_with_its_first_stop_token(program, tiny_params, prompts, endless, stops):
    """Any of several ids stops. Padding that is a stop token too (the last case) does not hide
    the stop itself: its mask is true, as a mask made from ids could not tell."""
    samples = program(tiny_params, prompts, keys_of(0), jnp.array(stops), 0.7)
    lengths = np.asarray(samples.mask.sum(axis=1))
    assert len(set(lengths)) > 3, "the rows must end at different places to show anything"
    assert_ended(samples, endless, stops, PAD)


def test_a_sampled_padding_token_stops_nothing(endless):
    assert bool((endless.tokens[:, :-1] == PAD).any())
    assert bool(endless.mask.all()) and bool(endless.truncated.all())


def test_a_stop_token_in_the_last_column_is_no_truncation(program, tiny_params, prompts, endless):
    ids = np.asarray(endless.tokens)
    row = next(r for r in range(N * G) if ids[r, -1] not in ids[r, :-1])
    stop = int(ids[row, -1])
    samples = program(tiny_params, prompts, keys_of(0), jnp.array([stop, -1]), 0.7)
    assert bool(samples.mask[row].all()) and not bool(samples.truncated[row])
    assert bool(samples.truncated.any()), "and a row that fills up without a stop is one"
    assert_ended(samples, endless, [stop], PAD)


def test_ids_beyond_the_tokenizer_are_never_drawn(program, trainer, tiny_params, prompts):
    """Their logits are the largest of all; ids 25 to 28 would be every token there is."""
    kernel = tiny_params["lm_head"]["kernel"]
    loud = tiny_params | {"lm_head": {"kernel": kernel.at[:, 25:].multiply(100.0)}}
    for temperature in (0.0, 5.0):
        samples = program(loud, prompts, keys_of(3), NEVER, temperature)
        assert int(samples.tokens.max()) < 25
        found = trainer(loud, prompts, samples, temperature or 1.0)
        np.testing.assert_allclose(samples.logprobs, found, atol=1e-4)
        assert float(samples.logprobs.min()) > -50


def test_weights_that_are_not_numbers_are_reported(program, tiny_params, prompts, endless):
    """The draw itself gives a valid id for NaN logits, and nothing shows."""
    broken = tiny_params | {"norm": {"scale": tiny_params["norm"]["scale"].at[3].set(jnp.nan)}}
    samples = program(broken, prompts, keys_of(0), NEVER, 0.7)
    assert not bool(samples.finite.any())
    assert int(samples.tokens.min()) >= 0 and int(samples.tokens.max()) < 25
    assert bool(endless.finite.all())

    # Of one token's embedding: the rows that have met the token, and no others.
    embedding = tiny_params["embed"]["embedding"].at[20].set(jnp.inf)
    broken = tiny_params | {"embed": {"embedding": embedding}}
    samples = program(broken, prompts, keys_of(0), NEVER, 0.7)
    met = (np.asarray(endless.tokens[:, :-1]) == 20).any(axis=1)
    met[:G] = True  # it is in the first prompt
    assert met.any() and not met.all()
    np.testing.assert_array_equal(samples.finite, ~met)
    np.testing.assert_array_equal(samples.tokens[~met], endless.tokens[~met])


def test_what_a_finished_row_computes_does_not_count(program, tiny_params, prompts):
    """A finished row is fed padding, here an id whose embedding is infinite."""
    embedding = tiny_params["embed"]["embedding"].at[28].set(jnp.inf)
    broken = tiny_params | {"embed": {"embedding": embedding}}
    stops = jnp.array([4, 17])
    samples = program(broken, prompts, keys_of(0), stops, 0.7, pad_id=28)
    assert bool(samples.finite.all()) and bool((samples.tokens == 28).any())
    assert bool(jnp.all(jnp.isfinite(samples.logprobs)))


keeping = jax.jit(keep)


def kept(probs, temperature=1.0, **filters):
    probs = np.pad(np.float32(probs), (0, 4 - len(probs))) ** (1 / temperature)
    return np.flatnonzero(keeping((probs / probs.sum())[None], Filters(**filters))[0]).tolist()


def test_the_filters_keep_the_sets_computed_by_hand():
    # The likeliest token stays, whatever p: no softmax of nothing.
    assert kept([0.9, 0.1], top_p=0.5) == [0]
    assert kept([0.1, 0.9], top_p=0.0) == [1]
    # The token that crosses p belongs to the nucleus: without it [0] and [0, 1].
    assert kept([0.5, 0.3, 0.15, 0.05], top_p=0.6) == [0, 1]
    assert kept([0.5, 0.3, 0.15, 0.05], top_p=0.85) == [0, 1, 2]
    # Temperature first: min-p before it would keep three.
    assert kept([0.6, 0.3, 0.08, 0.02], temperature=2.0, min_p=0.1) == [0, 1, 2, 3]
    assert kept([0.6, 0.3, 0.08, 0.02], min_p=0.1) == [0, 1, 2]
    # The nucleus is of what top-k left: of 0.5 and 0.3 the first is 0.625.
    assert kept([0.5, 0.3, 0.2], top_k=2, top_p=0.6) == [0]
    assert kept([0.5, 0.3, 0.2], top_p=0.6) == [0, 1]
    assert kept([0.2, 0.3, 0.5], top_k=1) == [2]
    assert kept([0.2, 0.3, 0.5], top_k=7) == kept([0.2, 0.3, 0.5]) == [0, 1, 2]
    assert kept([0.25] * 4, top_k=3) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_the_filters_allow_what_those_of_transformers_allow(temperature):
    scores = np.random.default_rng(4).normal(size=(16, 203)).astype(np.float32) * 3 / temperature
    run = jax.jit(lambda k, p, m: keep(jax.nn.softmax(scores), Filters(k, p, m)) > 0)
    for top_k in (0, 1, 20, 500):
        for top_p in (0.1, 0.6, 0.95, 1.0):
            for min_p in (0.0, 0.05, 0.4):
                wanted = torch.tensor(scores)
                if top_k:
                    wanted = TopKLogitsWarper(top_k)(None, wanted)
                if top_p < 1:
                    wanted = TopPLogitsWarper(top_p)(None, wanted)
                if min_p:
                    wanted = MinPLogitsWarper(min_p)(None, wanted)
                allowed = np.isfinite(wanted.numpy())
                np.testing.assert_array_equal(run(top_k, top_p, min_p), allowed)


def kept_by_sorting(probs, filters):
    """The filters as they are defined: on all tokens, sorted."""
    order = jnp.argsort(-probs, axis=-1, stable=True)
    ranked = jnp.take_along_axis(probs, order, axis=-1)
    rank = jnp.arange(probs.shape[-1])
    kept = (rank < filters.top_k) | jnp.equal(filters.top_k, 0)
    ranked = jnp.where(kept, ranked, 0.0)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    nucleus = before < filters.top_p * jnp.sum(ranked, axis=-1, keepdims=True)
    kept &= nucleus | jnp.greater_equal(filters.top_p, 1.0)
    kept &= ranked >= filters.min_p * ranked[:, :1]
    kept |= rank == 0
    back = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(kept, back, axis=-1), probs, 0.0)


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 4.0])
def test_the_candidates_decide_as_a_sort_of_all_does(sharpness):
    """In each flat row the cut falls beyond the candidates, in each sharp one before; and half of
    the probabilities occur twice or more, so that a tie lies at every place of a cut."""
    scores = np.random.default_rng(7).normal(size=(12, 2200)).astype(np.float32) * sharpness
    scores[:, ::2] = np.round(scores[:, ::2], 1)
    probs = jax.nn.softmax(scores)
    short, whole = jax.jit(keep), jax.jit(kept_by_sorting)
    beyond = 0
    for top_k in (0, 1, 127, 128, 129, 500, 900):
        for top_p in (0.0, 0.3, 0.9, 0.999, 1.0):
            for min_p in (0.0, 0.02, 0.4, 1.0):
                filters = Filters(top_k, top_p, min_p)
                wanted = np.asarray(whole(probs, filters))
                np.testing.assert_array_equal(short(probs, filters), wanted)
                beyond += (wanted > 0).sum(axis=1).max() > 128
    assert beyond > 0


@pytest.mark.parametrize("size", [130, 700, 3001])
def test_the_likeliest_are_those_of_a_sort(size):
    """With four values alone nearly all are ties, within a part and between parts."""
    rng = np.random.default_rng(3)
    for values in (rng.random((8, size)), rng.integers(0, 4, (8, size)) / 4):
        probs = jnp.asarray(values, jnp.float32)
        top, ids = jax.jit(likeliest, static_argnums=1)(probs, 20)
        np.testing.assert_array_equal(ids, np.argsort(-values, axis=1, kind="stable")[:, :20])
        np.testing.assert_array_equal(top, np.take_along_axis(np.asarray(probs), ids, 1))


def test_filtered_draws_keep_the_logprobs_of_the_full_softmax(
    program, trainer, tiny_params, prompts
):
    """Probabilities 0.5 and 0.3 of which top-k leaves these two: log 0.5, not log 0.625."""
    nucleus = program(tiny_params, prompts, keys_of(0), NEVER, 1.0, Filters(2, 1.0, 0.0))
    found = trainer(tiny_params, prompts, nucleus, 1.0)
    np.testing.assert_allclose(nucleus.logprobs, found, atol=1e-4)
    only = program(tiny_params, prompts, keys_of(0), NEVER, 1.0, Filters(1, 1.0, 0.0))
    greedy = program(tiny_params, prompts, keys_of(0), NEVER, 0.0)
    np.testing.assert_array_equal(only.tokens, greedy.tokens)
    # Two choices a token, and both are taken.
    first = np.asarray(nucleus.tokens[:, 0]).reshape(N, G)
    assert all(len(set(group)) <= 2 for group in first)
    assert any(len(set(group)) == 2 for group in first)


def test_one_program_serves_all_temperatures_keys_filters_and_stops(
    program, traces, tiny_params, prompts
):
    before = len(traces)
    seen = [
        program(tiny_params, prompts, keys_of(seed), jnp.array([stop, -1]), temperature, filters)
        for seed, stop, temperature, filters in (
            (0, 4, 1.0, Filters(0, 1.0, 0.0)),
            (1, 4, 1.0, Filters(0, 1.0, 0.0)),
            (1, 9, 0.5, Filters(5, 0.9, 0.1)),
            (1, 9, 0.0, Filters(5, 0.9, 0.1)),
        )
    ]
    assert len({np.asarray(samples.tokens).tobytes() for samples in seen}) == 4
    assert len(traces) <= before + 1
