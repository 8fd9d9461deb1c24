"""Which prompts come next, with which noise, and which groups stay: on made-up samples."""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import (
    LUCKY,
    PAD,
    STOP,
    initial_params,
    plan,
    pool,
    sampling,
)

import rlx.prompts
from model.sample import Samples
from rlx import ops, rollout
from rlx.advantages import group_normalised
from rlx.prepare import Frozen, Scored, prepare
from rlx.prompts import Draw, count_solved
from rlx.rollout import Scores, join, sample_round
from rlx.rounds import absorb, begin, finish_metrics
from rlx.state import initial_state, start_memory
from rlx.train import Stages, collect_rounds, step

NAN = float("nan")


next_rows = jax.jit(rlx.prompts.next_rows, static_argnums=2)


def drawn(prompts, cursor, count, times):
    """Rows of several draws, one after the other."""
    rows = [next_rows(prompts, jnp.int32(cursor + i * count), count).rows for i in range(times)]
    return np.concatenate(rows)


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_every_epoch_draws_each_prompt_once(count):
    """Batches of 4 from a pool of 6 cross the boundary; a batch of 6 is an epoch."""
    prompts = pool(6)
    rows = drawn(prompts, 0, count, 24 // count).reshape(4, 6)
    for epoch in rows:
        assert Counter(epoch.tolist()) == dict.fromkeys(range(6), 1)
    assert len({tuple(epoch) for epoch in rows.tolist()}) == 4, "every epoch is reshuffled"


def test_the_order_does_not_depend_on_the_batch():
    prompts = pool(6)
    np.testing.assert_array_equal(drawn(prompts, 0, 2, 9), drawn(prompts, 0, 6, 3))
    # A resumed run goes on where the cursor stands: neither replayed nor skipped.
    np.testing.assert_array_equal(drawn(prompts, 4, 2, 3), drawn(prompts, 0, 2, 5)[4:])


def test_the_order_is_the_pools():
    first, second = (drawn(pool(6, seed=s), 0, 6, 2).tolist() for s in (0, 1))
    assert first != second
    assert drawn(pool(6), 0, 6, 2).tolist() == first


def test_a_draw_tells_each_prompts_epoch_and_where_the_next_begins():
    """Six prompts from place 4: two of epoch 0, four of epoch 1. The noise of a prompt that both
    hold is told apart by the epoch."""
    draw = next_rows(pool(6), jnp.int32(4), 6)
    assert draw.epochs.tolist() == [0, 0, 1, 1, 1, 1]
    assert draw.cursor == 10


RETIRABLE = 7


@functools.cache
def orders():
    """Of eight epochs."""
    return drawn(pool(RETIRABLE), 0, RETIRABLE, 8).reshape(8, RETIRABLE).tolist()


def expected_draw(cursor, count, retired):
    """Plain Python: what this epoch still holds, then the rest of the next; the retired last."""
    first, place = divmod(cursor, RETIRABLE)
    stream = [(place + i, row) for i, row in enumerate(orders()[first][place:])]
    held = {row for _, row in stream}
    stream += [(RETIRABLE + i, r) for i, r in enumerate(orders()[first + 1]) if r not in held]
    chosen = sorted(stream, key=lambda item: retired[item[1]])[:count]
    last = max(at for at, _ in chosen)
    return (
        [row for _, row in chosen],
        [first + at // RETIRABLE for at, _ in chosen],
        first * RETIRABLE + last + 1,
    )


@settings(max_examples=50, deadline=None)
@given(
    cursor=st.integers(0, 6 * RETIRABLE),
    count=st.sampled_from([1, 3, 5, RETIRABLE]),
    retired=st.lists(st.booleans(), min_size=RETIRABLE, max_size=RETIRABLE),
)
def test_retired_prompts_are_passed_over(cursor, count, retired):
    draw = next_rows(pool(RETIRABLE), jnp.int32(cursor), count, jnp.array(retired))
    rows, epochs, after = expected_draw(cursor, count, retired)
    assert draw.rows.tolist() == rows
    assert draw.epochs.tolist() == epochs
    assert draw.cursor == after
    # Never one prompt twice, and retired ones only where all others are in.
    assert len(set(rows)) == count
    left = [row for row in range(RETIRABLE) if not retired[row]]
    assert sum(not retired[row] for row in rows) == min(count, len(left))


def test_the_only_prompts_left_are_found_across_the_boundary_of_an_epoch():
    """Both lie behind the cursor in this epoch. A window of one pool's length from the cursor can
    end before them, and would hand out retired prompts."""
    for place in range(RETIRABLE):
        gone = orders()[0][:place]
        retired = np.array([row not in gone[:2] for row in range(RETIRABLE)])
        draw = next_rows(pool(RETIRABLE), jnp.int32(place), 2, jnp.array(retired))
        assert set(gone[:2]) <= set(draw.rows.tolist())
        assert draw.epochs.tolist()[: len(gone[:2])] == [1] * len(gone[:2])


def visits(prompts, count, retired, draws):
    """Of each prompt, in that many draws; and the prompts of each draw."""
    cursor, rows = jnp.int32(0), []
    for _ in range(draws):
        draw = next_rows(prompts, cursor, count, jnp.array(retired))
        cursor = draw.cursor
        rows.append(draw.rows.tolist())
    return Counter(itertools.chain(*rows)), rows, int(cursor)


def test_what_is_left_is_drawn_evenly():
    """Four of seven, two at a time: twelve draws are six epochs."""
    retired = [True, False, False, True, False, True, False]
    seen, _, cursor = visits(pool(RETIRABLE), 2, retired, 12)
    assert seen == {1: 6, 2: 6, 4: 6, 6: 6}
    assert 5 * RETIRABLE < cursor <= 6 * RETIRABLE


def test_fewer_left_than_needed_are_drawn_every_time():
    seen, rows, _ = visits(pool(RETIRABLE), 3, [r != 4 for r in range(RETIRABLE)], 8)
    assert seen[4] == 8
    assert all(draw[0] == 4 and len(set(draw)) == 3 for draw in rows)


def test_all_retired_are_drawn_as_if_none_were():
    seen, *_ = visits(pool(RETIRABLE), 7, [True] * RETIRABLE, 3)
    assert seen == dict.fromkeys(range(RETIRABLE), 3)


def test_a_series_of_solved_visits_is_counted_and_broken():
    """Prompts 4, 0, 2 and 5 are visited; 1 and 3 keep their counts."""
    counts = jnp.array([3, 1, 0, 2, 5, 7])
    correct = jnp.array([[1, 1], [1, 1], [1, 0], [1, NAN]])
    after = count_solved(counts, jnp.array([4, 0, 2, 5]), correct)
    # A mean over what was scored would call prompt 5 solved.
    assert after.tolist() == [4, 1, 0, 2, 6, 0]
    assert count_solved(None, jnp.array([0]), correct[:1]) is None


def test_a_prompt_that_stays_solved_is_drawn_no_more(monkeypatch):
    """Prompts 2 and 5 are always all right, prompt 3 on every other visit only. After two visits
    in a row 2 and 5 are gone; the others go on."""
    monkeypatch.setattr(rollout, "sample", lambda *_, **__: made_up([2] * 8))
    made, size = plan("dapo", {"retire_after": 2}), 6
    memory = start_memory(solved=size)
    state = initial_state({}, made.learner, jax.random.key(1), memory=memory)

    @jax.jit
    def collect(state, right):
        def verify(frozen, pool, rows, samples):
            correct = jnp.repeat(right[rows][:, None], 4, axis=1)
            return Scores(correct, correct, correct[..., None], jnp.zeros((2, 4, 3)))

        stages = Stages(**dict.fromkeys(Stages._fields))._replace(
            sample=sample_round, verify=verify, absorb=absorb, repeat=jax.lax.while_loop
        )
        pending = collect_rounds(made.sampling, stages, state, Frozen(), pool(size), state.key)
        after = state._replace(cursor=pending.cursor)
        return after._replace(memory=memory._replace(solved=pending.solved)), pending.rollout.rows

    asked, rows = Counter(), []
    for _ in range(14):
        right = [0.0, 0.0, 1.0, float(asked[3] % 2 == 0), 0.0, 1.0]
        state, drawn_now = collect(state, jnp.array(right))
        rows += drawn_now.tolist()
        asked = Counter(rows)
    # Two epochs of six, then four prompts an epoch.
    assert Counter(rows[:12]) == dict.fromkeys(range(6), 2)
    assert Counter(rows[12:]) == dict.fromkeys((0, 1, 3, 4), 4)
    assert state.memory.solved.tolist() == [0, 0, 2, asked[3] % 2, 0, 2]


def noise(monkeypatch, pool_of_six, cursor, key, round=0, **changes):
    """The keys that a round hands to the sampler, as numbers [N, G], and its rows."""
    seen = []
    monkeypatch.setattr(
        rollout, "sample", lambda *operands, **_: seen.append(operands[4]) or made_up([])
    )

    @jax.jit
    def keys(at, key, now):
        _, draw = sample_round(sampling(**changes), {}, pool_of_six, at, None, key, now)
        return jax.random.key_data(seen.pop()), draw.rows

    words, rows = keys(jnp.int32(cursor), key, jnp.int32(round))
    words = np.asarray(words).astype(np.uint64)
    return words[..., 0] << np.uint64(32) | words[..., 1], np.asarray(rows)


def test_no_noise_is_shared(monkeypatch):
    """One key a prompt would make a group of copies, and every advantage 0."""
    prompts, key = pool(6), jax.random.key(3)
    here, _ = noise(monkeypatch, prompts, 0, key)
    assert np.unique(here).size == here.size == 8
    for other in (
        noise(monkeypatch, prompts, 0, jax.random.key(4))[0],  # another step
        noise(monkeypatch, prompts, 0, key, round=1)[0],  # another round of the step
        noise(monkeypatch, prompts, 6, key)[0],  # another epoch
    ):
        assert not np.intersect1d(here, other).size


def test_a_prompt_that_a_batch_holds_twice_gets_two_texts(monkeypatch):
    """A batch of 6 that begins in the middle of an epoch holds prompts of the next one too."""
    prompts = pool(6)
    for cursor in range(1, 6):
        keys, rows = noise(monkeypatch, prompts, cursor, jax.random.key(3), prompts=6)
        assert np.unique(keys).size == keys.size
        if len(set(rows.tolist())) < 6:
            return
    pytest.fail("no batch held a prompt twice")


def test_the_batch_does_not_change_a_rows_noise(monkeypatch):
    prompts, key = pool(6), jax.random.key(3)
    alone, first = noise(monkeypatch, prompts, 1, key, prompts=1)
    together, rows = noise(monkeypatch, prompts, 0, key, prompts=3)
    assert rows[1] == first[0]
    np.testing.assert_array_equal(together[1], alone[0])
    fewer, _ = noise(monkeypatch, prompts, 0, key, prompts=3, samples=2)
    np.testing.assert_array_equal(together[:, :2], fewer)


def made_up(lengths, limit=3, finite=None, stopped=None):
    """Completions of the given lengths that end by the stop token, if they end in time."""
    lengths = np.asarray(lengths, int)
    stopped = lengths < limit if stopped is None else np.asarray(stopped)
    mask = np.arange(limit) < lengths[:, None]
    tokens = np.where(mask, LUCKY, PAD)
    for row, (length, stop) in enumerate(zip(lengths, stopped, strict=True)):
        if stop:
            tokens[row, length - 1] = STOP
    return Samples(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.asarray(mask),
        logprobs=jnp.asarray(np.where(mask, -1.0, 0.0), jnp.float32),
        truncated=jnp.asarray(~stopped),
        finite=jnp.ones(len(lengths), bool) if finite is None else jnp.asarray(finite),
        slot_steps=jnp.int32(0),
    )


def scored(correct, limit=3):
    correct = jnp.asarray(correct, jnp.float32)
    return Scores(correct, correct, correct[..., None], jnp.zeros((*correct.shape, limit)))


def draw_of(rows):
    rows = jnp.asarray(rows, jnp.int32)
    return Draw(rows, jnp.zeros_like(rows), jnp.int32(len(rows)))


@functools.partial(jax.jit, static_argnums=0)
def first_round(settings, draw, samples, scores):
    start = begin(settings, 8, jnp.int32(0))
    return absorb(settings, pool(), start, draw, samples, scores)


def collected(settings, samples, correct, rows=(3, 5)):
    return first_round(settings, draw_of(rows), samples, scored(correct))


scored_batch = jax.jit(prepare, static_argnums=0)
absorb_round = jax.jit(absorb, static_argnums=0)


def prepared(made, pending, cursor=0):
    """Batch, preview and metrics, of a policy at its start."""
    state = initial_state(initial_params(), made.learner, jax.random.key(0), cursor=cursor)
    batch, preview, _, metrics = scored_batch(made, state, Frozen(), pending)
    return batch, preview, metrics


def test_the_parts_of_a_reward_are_what_adds_up_to_it():
    """A penalty keeps its sign, what counts nothing is no part, and without weights the reward is
    one."""
    components = jnp.array([[[1.0, 0.3, 2.0], [0.0, 0.9, 5.0]]])
    rewards = components @ jnp.array([1.0, 0.0, -0.2])
    scores = scored([[1, 0]])._replace(components=components, rewards=rewards)
    names = {"components": ("a", "b", "c"), "prompts": 1, "samples": 2}
    settings = sampling(**names, component_weights=(1.0, 0.0, -0.2))
    parts = join(settings, pool(), jnp.array([3]), made_up([2, 2]), scores).parts
    np.testing.assert_allclose(parts, [[[1.0, -0.4], [0.0, -1.0]]], atol=1e-6)
    np.testing.assert_allclose(parts.sum(-1), rewards, atol=1e-6)
    assert rollout.empty_rollout(settings, 8).parts.shape == parts.shape
    whole = join(sampling(**names), pool(), jnp.array([3]), made_up([2, 2]), scores).parts
    np.testing.assert_array_equal(whole, rewards[..., None])


def test_a_rollout_puts_prompt_and_completion_side_by_side():
    settings, prompts = sampling(samples=2), pool()
    rows = jnp.array([5, 0])
    result = join(settings, prompts, rows, made_up([1, 3, 2, 3]), scored([[1, 0], [0, 1]]))
    np.testing.assert_array_equal(result.tokens[0, :8], prompts.tokens[5])
    np.testing.assert_array_equal(result.tokens[3, :8], prompts.tokens[0])
    # Prompt 5 has four tokens, so its completion is at positions 4, 5, 6; -1 after the end.
    np.testing.assert_array_equal(result.positions[0], [-1] * 4 + [0, 1, 2, 3, 4, -1, -1])
    np.testing.assert_array_equal(result.positions[1, 8:], [4, 5, 6])
    np.testing.assert_array_equal(result.mask[0], [True, False, False])  # the stop token is in
    np.testing.assert_array_equal(result.truncated, [False, True, False, True])


def test_a_stop_at_the_last_place_is_no_truncation():
    samples = made_up([3, 3], stopped=[True, False])
    result = collected(sampling(prompts=1, samples=2), samples, [[1, 1]], rows=[0])
    np.testing.assert_array_equal(result.rollout.truncated, [False, True])
    assert result.rollout.rewards.tolist() == [[1.0, 1.0]]
    assert ops.values(result.metrics)["truncated"] == 0.5


def test_length_shaping_comes_before_the_group_statistics():
    """Limit 3, buffer 2: lengths 1, 2, 3 cost 0, 0.5, 1. The verdict stays the task's own."""
    settings = sampling(prompts=1, samples=3, overlong_buffer=2)
    result = collected(settings, made_up([1, 2, 3]), [[1, 1, 1]], rows=[0]).rollout
    np.testing.assert_allclose(result.rewards, [[1.0, 0.5, 0.0]])
    np.testing.assert_array_equal(result.correct, [[1, 1, 1]])
    made = plan("dapo", settings._asdict(), micro=3)
    pending = collected(made.sampling, made_up([1, 2, 3]), [[1, 1, 1]], rows=[0])
    batch, _, _ = prepared(made, pending)
    (signal,) = batch.signals
    np.testing.assert_allclose(
        signal.advantages[:, 0], group_normalised(result.rewards)[0], rtol=1e-6
    )


def test_the_overlong_filter_acts_after_the_group_statistics():
    made = plan("dapo")._replace(overlong_filter=True)
    correct = [[1, 0, 0, 1], [0, 1, 0, 0]]
    pending = collected(made.sampling, made_up([1, 3, 2, 2, 2, 2, 3, 3]), correct)
    batch, preview, metrics = prepared(made, pending)
    # Filtered first, row 0 of group 0 would get +0.707 of three rewards instead of +1.
    np.testing.assert_allclose(preview.advantages.reshape(2, 4)[0], [1, -1, -1, 1], atol=1e-3)
    np.testing.assert_array_equal(
        batch.mask.any(axis=1), [True, False, True, True, True, True, False, False]
    )
    values = ops.values(metrics)
    assert values["trained_rows"] == 5.0 and values["trained_tokens"] == 9.0
    # Lengths are those of the text: from the loss mask the longest would be 2.
    assert values["length/max"] == 3.0
    assert values["length/mean"] == pytest.approx(18 / 8)
    assert values["length/finished"] == pytest.approx(9 / 5)
    assert values["truncated"] == pytest.approx(3 / 8)


def test_old_logprobs_are_the_samplers_where_the_plan_says_so():
    made = plan("dapo", {"prompts": 1}, on_policy=False)
    pending = collected(made.sampling, made_up([1, 3, 2, 2]), [[1, 0, 0, 1]], rows=[0])

    def old(how):
        batch, *_ = prepared(made._replace(old_logprobs=how), pending)
        return np.asarray(batch.old_logprobs)[np.asarray(batch.mask)]

    np.testing.assert_array_equal(old("sampler"), np.full(8, -1.0))
    # The policy's own, for which the text is not of probability exp(-1).
    assert np.abs(old("recompute") + 1.0).min() > 1e-3


def test_a_row_that_could_not_be_scored_is_masked_and_counted():
    made = plan("grpo", {"prompts": 1})
    pending = collected(made.sampling, made_up([2] * 4), [[1, NAN, 0, 0]], rows=[0])
    batch, preview, metrics = prepared(made, pending)
    np.testing.assert_array_equal(batch.mask.any(axis=1), [True, False, True, True])
    advantages = batch.signals[0].advantages
    assert advantages[1] == 0.0
    assert jnp.isfinite(advantages).all()
    values = ops.values(metrics)
    assert values["unscored"] == 0.25
    assert values["reward/mean"] == pytest.approx(1 / 3)
    # A failure stays in the denominator of what was solved: 1 of 4, not 1 of 3.
    assert values["solve_rate"] == 0.25
    assert values["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
    assert values["advantage/std"] == pytest.approx(1.0, abs=1e-3)
    assert jnp.isnan(preview.rollout.rewards[0, 1])


def test_a_row_of_broken_logits_is_no_sample():
    finite = [True, False, True, True]
    pending = collected(
        sampling(prompts=1), made_up([2] * 4, finite=finite), [[1, 1, 0, 0]], rows=[0]
    )
    np.testing.assert_array_equal(jnp.isnan(pending.rollout.rewards[0]), ~np.array(finite))
    np.testing.assert_array_equal(jnp.isnan(pending.rollout.correct[0]), ~np.array(finite))
    assert ops.values(pending.metrics)["nonfinite_rows"] == 0.25


def test_metrics_of_groups():
    correct = [[1, 1, 1, 1], [0, NAN, 0, 0], [1, 0, 0, 0], [NAN] * 4]
    pending = collected(sampling(prompts=4), made_up([2] * 16), correct, rows=range(4))
    values = ops.values(finish_metrics(sampling(prompts=4), pending))
    assert values["groups/all_right"] == 0.25
    assert values["groups/all_wrong"] == 0.25
    assert values["groups/all_equal"] == 0.75
    rewards = np.array([1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0])
    assert values["reward/mean"] == pytest.approx(rewards.mean())
    assert values["reward/std"] == pytest.approx(rewards.std(), abs=1e-6)
    assert values["reward/answer"] == pytest.approx(rewards.mean())


def test_one_sample_a_prompt_is_no_group():
    """It would always equal itself, and read as nothing to learn from."""
    alone = sampling(prompts=4, samples=1)
    pending = collected(alone, made_up([2] * 4), [[1], [0], [1], [0]], rows=range(4))
    values = ops.values(finish_metrics(alone, pending))
    assert values["solve_rate"] == 0.5
    assert not [name for name in values if name.startswith("groups/")]


def run_step(script, *, prompts=2, samples=2, max_rounds=4, dynamic=True, cursor=0, size=6):
    """A step whose prompt `row` gets the scores `script[row]`, without a sampler: what was
    collected, the state after it, and the rows of every round."""
    made = dynamic_plan(prompts, samples, max_rounds, dynamic)
    rounds, seen = [], []

    def sample(settings, params, pool, at, solved, key, round):
        draw = next_rows(pool, at, prompts)
        rounds.append(draw.rows.tolist())
        # The length tells the row, so that text and scores can be matched.
        return made_up(np.repeat(1 + np.asarray(draw.rows) % 3, samples)), draw

    def verify(frozen, pool, rows, samples):
        return scored([script[row] for row in rows.tolist()])

    def repeat(condition, body, carry):
        while condition(carry):
            carry = body(carry)
        return carry

    def watched(made, state, frozen, pending):
        seen.append(pending)
        return scored_batch(made, state, frozen, pending)

    def update(learner, state, batch, key, base):
        seen.append(batch)
        return state, {}

    stages = Stages(
        sample=sample,
        complete=None,
        verify=verify,
        absorb=absorb_round,
        choose=None,
        join=None,
        prepare=watched,
        score=lambda *operands: Scored(),
        wait=lambda scored: scored,
        make_batch=lambda made, state, pending, scored: watched(made, state, Frozen(), pending),
        update=update,
        repeat=repeat,
    )
    state = initial_state(initial_params(), made.learner, jax.random.key(0), cursor=cursor)
    state, (metrics, preview) = step(made, stages, state, Frozen(), pool(size))
    return state, ops.values(metrics), preview, seen, rounds


@functools.cache
def dynamic_plan(prompts, samples, max_rounds, dynamic):
    sample = {"prompts": prompts, "samples": samples, "max_rounds": max_rounds}
    return plan("dapo", sample | {"dynamic": dynamic}, micro=prompts * samples)


GOOD, WRONG, RIGHT = [1, 0], [0, 0], [1, 1]


def test_groups_without_a_signal_are_drawn_again():
    order = drawn(pool(6), 0, 6, 1).tolist()
    script = dict.fromkeys(order, WRONG) | {order[1]: GOOD, order[2]: RIGHT, order[5]: GOOD}
    state, values, preview, (pending, batch), rounds = run_step(script)
    assert rounds == [order[:2], order[2:4], order[4:]]
    assert preview.rollout.rows.tolist() == [order[1], order[5]]  # in the order of drawing
    # A row keeps its own text: the length is that of its prompt.
    lengths = jnp.sum(preview.rollout.mask, axis=1)
    np.testing.assert_array_equal(lengths, np.repeat([1 + order[1] % 3, 1 + order[5] % 3], 2))
    assert pending.kept.all()
    assert batch.mask.any(axis=1).all()
    # By what was drawn, not by what was kept: a cursor at 2 would draw the rest again.
    assert state.cursor == 6
    assert state.step == 1
    assert values["rollout/rounds"] == 3.0
    assert values["rollout/surplus"] == 0.0
    assert values["rollout/shortfall"] == 0.0
    # Metrics are of everything that was drawn.
    assert values["solve_rate"] == pytest.approx(4 / 12)
    assert values["groups/all_right"] == pytest.approx(1 / 6)


def test_groups_beyond_the_number_wanted_are_surplus():
    order = drawn(pool(6), 0, 6, 1).tolist()
    script = dict.fromkeys(order, GOOD) | {order[0]: WRONG}
    state, values, preview, _, _ = run_step(script)
    assert preview.rollout.rows.tolist() == order[1:3]
    assert values["rollout/surplus"] == 1.0
    assert state.cursor == 4


@pytest.mark.parametrize("found", [0, 1])
def test_the_limit_of_rounds_never_raises(found):
    """All filtered: no endless loop, no error, nothing to learn from in the missing places."""
    order = drawn(pool(6), 0, 6, 1).tolist()
    script = dict.fromkeys(order, WRONG)
    if found:
        script[order[3]] = GOOD
    state, values, preview, (pending, batch), rounds = run_step(script, max_rounds=3)
    assert len(rounds) == 3
    assert state.cursor == 6
    assert int(pending.kept.sum()) == found
    # Static shapes; the missing places are masked.
    assert batch.mask.shape == (4, 3)
    np.testing.assert_array_equal(batch.mask.any(axis=1), [found] * 2 + [False] * 2)
    np.testing.assert_array_equal(batch.signals[0].advantages[2 * found :], 0.0)
    assert values["rollout/shortfall"] == 1.0 - found / 2
    assert values["trained_rows"] == 2.0 * found
    assert values["solve_rate"] == found / 12
    # The loss is that of the groups that are there.
    if found:
        assert preview.rollout.rows[0] == order[3]


def test_the_filter_looks_at_the_verdict_and_not_at_the_shaped_reward():
    """Rewards that differ by length alone say nothing about the task."""
    settings = sampling(prompts=1, samples=2, dynamic=True, overlong_buffer=2)
    pending = collected(settings, made_up([1, 3]), [[1, 1]], rows=[0])
    assert not pending.kept.any()


def test_without_verdicts_the_filter_looks_at_the_verifiers_own_rewards():
    """Neither a penalty of length nor a row of broken logits makes a group differ: its row has a
    reward that counts for nothing."""
    settings = sampling(prompts=1, samples=2, dynamic=True, overlong_buffer=2, verdicts=False)

    def kept(samples, rewards):
        scores = scored([rewards])._replace(correct=jnp.full((1, 2), NAN))
        return bool(first_round(settings, draw_of([0]), samples, scores).kept[0])

    assert kept(made_up([2, 2]), [0.25, 0.5])
    assert not kept(made_up([1, 3]), [0.5, 0.5])
    assert not kept(made_up([2, 2], finite=[True, False]), [0.25, 0.5])


def test_without_dynamic_sampling_every_group_stays():
    state, values, _, (pending, _), rounds = run_step(
        dict.fromkeys(range(6), WRONG), dynamic=False, max_rounds=1
    )
    assert len(rounds) == 1
    assert pending.kept.all()
    assert state.cursor == 2
    assert values["groups/all_equal"] == 1.0


def test_a_step_is_deterministic_and_resumes_at_its_cursor():
    script = {row: GOOD if row % 2 else WRONG for row in range(6)}
    first = run_step(script)
    assert run_step(script)[2].rollout.rows.tolist() == first[2].rollout.rows.tolist()
    after = run_step(script, cursor=int(first[0].cursor))
    # Across the boundary of an epoch: the rows that come next, none of them twice in a row.
    stream = drawn(pool(6), 0, 2, 6).tolist()
    assert [r for rows in first[4] + after[4] for r in rows] == stream[: int(after[0].cursor)]
