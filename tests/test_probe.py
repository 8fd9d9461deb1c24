"""Probing: which prompts get the rest of a group, and that a group is what it would be at once."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import (
    LUCKY,
    PAD,
    initial_params,
    movement,
    plan,
    pool,
    sampling,
)

import rlx.prompts
from model.sample import Samples
from rlx import ops, probe, rollout
from rlx.prepare import Frozen
from rlx.probe import rest, wide
from rlx.prompts import Draw
from rlx.replay import empty_replay
from rlx.rollout import Scores, empty_rollout, sample_rows
from rlx.rounds import finish_metrics
from rlx.state import initial_state, start_memory
from rlx.train import fused, staged
from rlx.verify import callback_verifier, host_verifier

NAN = float("nan")
TWO_OF_FOUR = sampling(prompts=2, samples=4, probe=2)
"""A step of 8 rows: 2 samples of 4 prompts, then 2 more of 2 prompts."""
DRAW = Draw(jnp.array([4, 0, 5, 2]), jnp.array([3, 3, 4, 4]), jnp.int32(22))

choose_probed = jax.jit(probe.choose_probed, static_argnums=0)
next_rows = jax.jit(rlx.prompts.next_rows, static_argnums=2)
complete_probed = jax.jit(probe.complete_probed, static_argnums=0)


def made_up(rows, seed, limit=3):
    """Completions of which no two rows are alike."""
    rng = np.random.default_rng(seed)
    mask = np.arange(limit) < (1 + rng.permutation(rows) % limit)[:, None]
    return Samples(
        tokens=jnp.asarray(np.where(mask, rng.integers(2, 16, mask.shape), PAD), jnp.int32),
        mask=jnp.asarray(mask),
        logprobs=jnp.asarray(np.where(mask, rng.normal(-2, 1, mask.shape), 0.0), jnp.float32),
        truncated=jnp.asarray(rng.random(rows) < 0.5),
        finite=jnp.ones(rows, bool),
        slot_steps=jnp.int32(0),
    )


def scored(correct, seed=0, limit=3):
    """Each row with a reward, a part and places of its own."""
    rng, correct = np.random.default_rng(seed), np.asarray(correct, float)
    rewards = correct + rng.random(correct.shape) * 0.1
    places = rng.random((*correct.shape, limit))
    return Scores(
        *(jnp.asarray(x, jnp.float32) for x in (rewards, correct, rewards[..., None] / 2, places))
    )


def chosen(correct, solved=None, settings=TWO_OF_FOUR):
    return choose_probed(settings, pool(), solved, DRAW, made_up(8, 0), scored(correct))


@pytest.mark.parametrize(
    ("correct", "places"),
    [
        # The informative first; of the others, those that may yet be solved before the solved.
        ([[1, 1], [0, 0], [1, 0], [0, 0]], [2, 1]),
        ([[1, 1], [1, 1], [0, 0], [1, 1]], [2, 0]),
        # Among equals the order of drawing decides: no prompt is preferred for its number.
        ([[1, 0], [0, 0], [0, 1], [1, 0]], [0, 2]),
        ([[0, 0], [0, 0], [0, 0], [1, 0]], [3, 0]),
        ([[1, 1]] * 4, [0, 1]),
        # One right and one unknown is not all right; none known is worth no less than all wrong.
        ([[1, 1], [NAN, 1], [1, 1], [NAN, NAN]], [1, 3]),
        ([[NAN, NAN], [0, 0], [NAN, 1], [NAN, 0]], [0, 1]),
    ],
)
def test_the_prompts_that_get_the_rest_of_a_group(correct, places):
    probed = chosen(correct)
    assert probed.draw.rows.tolist() == DRAW.rows[jnp.array(places)].tolist()
    assert probed.draw.epochs.tolist() == DRAW.epochs[jnp.array(places)].tolist()
    # By what was drawn: prompts that were passed by do not come again in this epoch.
    assert probed.draw.cursor == DRAW.cursor
    share = np.mean([set(group) == {0, 1} for group in correct])
    assert ops.values(probed.metrics)["probe/informative"] == share


def test_without_verdicts_rewards_that_differ_are_informative():
    """Those of the verifier: a penalty of length says nothing about a prompt."""
    settings = TWO_OF_FOUR._replace(verdicts=False, overlong_buffer=2)
    rewards = jnp.array([[0.5, 0.5], [0.25, 0.25], [0.5, 0.75], [0.5, 0.5]])
    nothing = scored(np.full((4, 2), NAN))
    scores = nothing._replace(rewards=rewards)
    samples = made_up(8, 0)
    probed = choose_probed(settings, pool(), None, DRAW, samples, scores)
    assert probed.draw.rows.tolist() == [5, 4]
    rest_scores = jax.tree.map(lambda x: x[:2], scores._replace(rewards=jnp.full((4, 2), 0.5)))
    pending = complete_probed(settings, pool(), probed, made_up(4, 1), rest_scores)
    # Prompt 4 has four times 0.5, whatever its rows' lengths cost.
    assert ops.values(pending.metrics)["probe/chosen_informative"] == 0.5


def test_a_group_is_its_first_samples_and_its_others():
    """Every leaf of the rollout, row by row: prompt 5, then prompt 0."""
    prompts = pool()
    first, second = made_up(8, 0), made_up(4, 1)
    first_scores = scored([[1, 1], [0, 0], [1, 0], [0, 0]], 2)
    second_scores = scored([[0, 1], [1, NAN]], 3)
    probed = choose_probed(TWO_OF_FOUR, prompts, None, DRAW, first, first_scores)
    pending = complete_probed(TWO_OF_FOUR, prompts, probed, second, second_scores)
    made = pending.rollout
    assert made.rows.tolist() == [5, 0]
    # Rows 4, 5 and 2, 3 of the first round, rows 0, 1 and 2, 3 of the second.
    origin = [(first, 4), (first, 5), (second, 0), (second, 1)]
    origin += [(first, 2), (first, 3), (second, 2), (second, 3)]
    for row, (samples, place) in enumerate(origin):
        prompt = made.rows[row // 4]
        length = int(prompts.positions[prompt, -1]) + 1
        where = np.where(samples.mask[place], length + np.arange(3), -1)
        np.testing.assert_array_equal(made.tokens[row, :8], prompts.tokens[prompt])
        np.testing.assert_array_equal(made.tokens[row, 8:], samples.tokens[place])
        np.testing.assert_array_equal(made.positions[row, :8], prompts.positions[prompt])
        np.testing.assert_array_equal(made.positions[row, 8:], where)
        np.testing.assert_array_equal(made.mask[row], samples.mask[place])
        np.testing.assert_array_equal(made.sampler_logprobs[row], samples.logprobs[place])
        assert made.truncated[row] == samples.truncated[place]
        scores = first_scores if samples is first else second_scores
        at, group = divmod(place, 2), divmod(row, 4)
        for name in ("rewards", "correct", "components"):
            np.testing.assert_array_equal(
                getattr(made, name)[group], getattr(scores, name)[at], err_msg=name
            )
        np.testing.assert_array_equal(made.token_scores[row], scores.token_scores[at])
    assert pending.kept.all()
    assert pending.cursor == DRAW.cursor


def test_rates_are_of_the_probing_round_and_what_was_spent_or_failed_of_both():
    probed = chosen([[1, 1], [0, 0], [1, 0], [0, 0]])
    second = made_up(4, 1)
    second = second._replace(finite=jnp.array([True, True, True, False]))
    pending = complete_probed(TWO_OF_FOUR, pool(), probed, second, scored([[1, NAN], [0, 0]]))
    values = ops.values(finish_metrics(TWO_OF_FOUR, pending))
    # Of the chosen 8 rows 3 are solved, which is no rate of the pool.
    assert values["solve_rate"] == 3 / 8
    assert values["groups/all_right"] == 1 / 4
    assert values["groups/all_wrong"] == 2 / 4
    assert values["probe/informative"] == 1 / 4
    assert values["probe/chosen_informative"] == 1 / 2
    assert values["tokens"] == int(made_up(8, 0).mask.sum()) + int(second.mask.sum())
    # Two of twelve rows: one that the verifier failed on, one of broken logits.
    assert values["unscored"] == pytest.approx(2 / 12)
    assert values["nonfinite_rows"] == pytest.approx(1 / 12)
    assert values["rollout/rounds"] == 2.0
    assert values["rollout/surplus"] == values["rollout/shortfall"] == 0.0


def test_solved_prompts_are_counted_from_the_probing_round():
    """All four visits count, also of prompts that get no more samples; and once."""
    counts = jnp.array([1, 1, 1, 1, 1, 1])
    probed = chosen([[1, 1], [0, 0], [1, 0], [1, 1]], counts)  # of prompts 4, 0, 5, 2
    expected = [0, 1, 2, 1, 2, 0]
    assert probed.solved.tolist() == expected
    right = scored([[1, 1], [1, 1]])
    pending = complete_probed(TWO_OF_FOUR, pool(), probed, made_up(4, 1), right)
    assert pending.solved.tolist() == expected


def test_a_prompt_whose_other_samples_are_wrong_is_not_solved():
    """Two right of the first two and none of the others: by the probing round alone it would be
    retired at the next such visit."""
    probed = chosen([[1, 1], [1, 1], [1, 1], [1, 1]], jnp.ones(6, jnp.int32))
    others = scored([[0, 0], [1, 1]])
    pending = complete_probed(TWO_OF_FOUR, pool(), probed, made_up(4, 1), others)
    first, second = probed.draw.rows.tolist()
    assert pending.solved[first] == 0
    assert pending.solved[second] == 2


def test_no_noise_is_used_twice(monkeypatch):
    """The keys that the two rounds hand to the sampler, of one prompt."""
    seen = []
    monkeypatch.setattr(rollout, "sample", lambda *x, **_: seen.append(x[4]) or made_up(1, 0))

    @jax.jit
    def words(key):
        where = ({}, pool(), jnp.array([3]), jnp.array([1]), key)
        sample_rows(wide(TWO_OF_FOUR), *where, 0)
        sample_rows(rest(TWO_OF_FOUR), *where, jnp.int32(2))
        sample_rows(TWO_OF_FOUR, *where, 0)
        return [jax.random.key_data(keys)[0] for keys in (seen.pop(0) for _ in range(3))]

    first, others, whole = map(np.asarray, words(jax.random.key(3)))
    np.testing.assert_array_equal(np.concatenate([first, others]), whole)
    assert len(np.unique(whole, axis=0)) == 4


def test_the_two_rounds_have_the_rows_of_whole_groups():
    """Eight rows at most in flight, as without a probe."""
    assert wide(TWO_OF_FOUR).prompts * wide(TWO_OF_FOUR).samples == 8
    assert rest(TWO_OF_FOUR).prompts * rest(TWO_OF_FOUR).samples == 4
    eight = sampling(prompts=3, samples=8, probe=2)
    assert (wide(eight).prompts, wide(eight).samples, rest(eight).samples) == (12, 2, 6)


# Whole runs, with all that a step remembers: a probe, retired prompts and replayed groups.

LEARN = plan(
    "dapo",
    {"prompts": 4, "samples": 4, "max_new_tokens": 2, "probe": 2, "retire_after": 3},
    micro=16,
    on_policy=False,
    optimizer=optax.adam(0.03),
)
POOL = 16


def verifier(rows, tokens, lengths):
    """1 for a completion that begins with one of four tokens in sixteen."""
    right = (tokens[:, :, 0] % 4 == LUCKY % 4).astype(np.float32)
    return right, right, right[..., None], np.zeros(tokens.shape, np.float32)


def start():
    room = empty_replay(empty_rollout(LEARN.sampling, 8), 6)
    memory = start_memory(solved=POOL, replay=room)
    return initial_state(initial_params(), LEARN.learner, jax.random.key(1), memory=memory)


@functools.cache
def learnt():
    """Twenty fused steps, one at a time: states and what each step gave."""
    run, state, history = fused(LEARN, callback_verifier(LEARN.sampling, verifier)), start(), []
    prompts = pool(POOL)
    for _ in range(20):
        state, (metrics, preview) = run(state, Frozen(), prompts, 1)
        values = ops.values(jax.tree.map(lambda x: x[0], metrics))
        # The state is given away: what is looked at later is copied.
        kept = jax.device_get((state.params, state.cursor, state.memory))
        history.append((kept, values, jax.device_get(preview)))
    return history


def test_a_toy_run_learns():
    """Advantages of other rows than their texts would leave the solve rate at a quarter."""
    rate = np.array([values["solve_rate"] for _, values, _ in learnt()])
    assert rate[:3].mean() < 0.5
    assert rate[-5:].mean() > 0.85


def test_a_group_is_the_text_that_all_its_samples_drawn_at_once_would_be():
    """Same keys, same text. Numbers that began at 0 again would make the others copies of the
    first: groups with half the samples that they seem to have."""
    at, key = 3, jax.random.key(1)
    (params, cursor, _), _, _ = learnt()[at - 1]
    _, values, preview = learnt()[at]
    made = preview.rollout
    assert cursor == 24 and values["replay/filled"] == 0.0  # all prompts of epoch 1, all sampled
    for _ in range(at):
        key, _, _ = jax.random.split(key, 3)
    _, sample_key, _ = jax.random.split(key, 3)

    @jax.jit
    def at_once(params, rows, key):
        return sample_rows(
            LEARN.sampling,
            params,
            pool(POOL),
            rows,
            jnp.ones_like(rows),
            jax.random.fold_in(key, 0),
            0,
        )

    whole = at_once(params, made.rows, sample_key)
    np.testing.assert_array_equal(made.tokens[:, 8:], whole.tokens)
    np.testing.assert_array_equal(made.mask, whole.mask)
    np.testing.assert_allclose(made.sampler_logprobs, whole.logprobs, atol=1e-4)
    np.testing.assert_array_equal(made.truncated, whole.truncated)
    for group in np.asarray(whole.tokens).reshape(4, 2, 2, 2):
        assert (group[0] != group[1]).any()


def test_chosen_groups_are_more_often_informative():
    """Of all groups of four two thirds would be, at the start; of those that were chosen more."""
    early = [values for _, values, _ in learnt()[:5]]
    chosen, probed = (
        np.mean([values[f"probe/{of}informative"] for values in early]) for of in ("chosen_", "")
    )
    assert chosen > 1.3 * probed


def test_each_step_advances_by_the_probed_prompts():
    """Eight a step and those that are passed over: not the four that are trained on."""
    cursor, solved = 0, np.zeros(POOL, int)
    for (_, after, memory), _, _ in learnt()[:6]:
        draw = next_rows(pool(POOL), jnp.int32(cursor), 8, jnp.asarray(solved >= 3))
        assert after == draw.cursor >= cursor + 8
        cursor, solved = after, memory.solved


def test_prompts_that_stay_solved_are_retired():
    (_, _, memory), _, _ = learnt()[-1]
    assert (memory.solved >= LEARN.sampling.retire_after).any()


def test_fused_equals_staged():
    phases = []

    def watch(name):
        phases.append(name)
        return contextlib.nullcontext()

    run, state = staged(LEARN, host_verifier(verifier), watch), start()
    for (_, cursor, memory), values, preview in learnt()[:4]:
        phases.clear()
        state, (metrics, own) = run(state, Frozen(), pool(POOL), 1)
        np.testing.assert_array_equal(own.rollout.tokens, preview.rollout.tokens)
        np.testing.assert_array_equal(own.rollout.rows, preview.rollout.rows)
        np.testing.assert_allclose(own.advantages, preview.advantages, atol=1e-5)
        assert state.cursor == cursor
        np.testing.assert_array_equal(state.memory.solved, memory.solved)
        held, expected = state.memory.replay, memory.replay
        np.testing.assert_array_equal(held.born, expected.born)
        np.testing.assert_array_equal(held.uses, expected.uses)
        np.testing.assert_array_equal(held.rollout.tokens, expected.rollout.tokens)
        np.testing.assert_allclose(
            held.rollout.old_logprobs, expected.rollout.old_logprobs, atol=1e-3
        )
        measured = ops.values(jax.tree.map(lambda x: x[0], metrics))
        assert measured.keys() == values.keys()
        for name in ("solve_rate", "tokens", "probe/chosen_informative", "replay/filled"):
            assert measured[name] == pytest.approx(values[name]), name
        assert phases == [
            "sample", "verify", "absorb", "sample", "verify", "absorb", "score", "update"
        ]  # fmt: skip
    params, *_ = learnt()[3][0]
    assert any(values["replay/filled"] for _, values, _ in learnt()[:4])
    moved = movement(initial_params(), params)
    assert moved > 1e-2
    assert movement(state.params, params) <= 2e-3 * moved
