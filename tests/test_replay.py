"""Replayed groups: which are kept, which come back and where, and what they are learnt from."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import (
    PAD,
    initial_params,
    plan,
    pool,
    sampling,
    verifier,
)

from rlx import ops, replay
from rlx.advantages import mixed
from rlx.checkpoint import Checkpoints
from rlx.prepare import Frozen, prepare
from rlx.replay import empty_replay
from rlx.rollout import empty_rollout
from rlx.rounds import begin
from rlx.scoring import score_rows
from rlx.shaping import Shaping
from rlx.state import initial_state, start_memory
from rlx.train import fused
from rlx.types import Rollout
from rlx.update import gradients
from rlx.verify import callback_verifier

NAN = float("nan")
MIXED, EQUAL, UNKNOWN = [1.0, 0.0], [0.5, 0.5], [NAN, NAN]

exchange = jax.jit(replay.exchange, static_argnums=4)


def made_up(rewards, name=0):
    """A rollout of which every leaf of every row is its own; `name` numbers its groups."""
    rewards = np.asarray(rewards, np.float32)
    n, group = rewards.shape
    rng = np.random.default_rng(name)

    def leaf(path, x):
        draw = rng.normal(size=x.shape) if x.dtype == jnp.float32 else rng.integers(0, 2, x.shape)
        return jnp.asarray(draw, x.dtype)

    shapes = empty_rollout(sampling(prompts=n, samples=group), 2)
    made = jax.tree_util.tree_map_with_path(leaf, shapes)
    tokens = jnp.asarray(rng.integers(0, 10_000, shapes.tokens.shape), jnp.int32)
    rows = jnp.arange(name, name + n, dtype=jnp.int32)
    return made._replace(rewards=jnp.asarray(rewards), rows=rows, tokens=tokens)


def groups(rollout: Rollout) -> dict[int, dict]:
    """Every leaf of each group, by its prompt."""
    rows = rollout.rows.tolist()
    leaves = {
        name: np.asarray(x).reshape(len(rows), -1).tolist() for name, x in rollout._asdict().items()
    }
    return {row: {name: x[i] for name, x in leaves.items()} for i, row in enumerate(rows)}


class Steps:
    """Several exchanges, one after the other; groups are known by their numbers."""

    def __init__(self, room, prompts=3, group=2, max_age=9):
        shapes = empty_rollout(sampling(prompts=prompts, samples=group), 2)
        self.replay, self.max_age, self.at = empty_replay(shapes, room), max_age, 0
        self.seen: dict[int, dict] = {}

    def __call__(self, rewards, at=None):
        """The numbers of the groups in the batch of this step, and its metrics."""
        self.at = self.at if at is None else at
        fresh = made_up(rewards, 100 * (self.at + 1))
        self.seen |= groups(fresh)
        merged, self.replay, metrics = exchange(
            self.replay, fresh, mixed(fresh.rewards), jnp.int32(self.at), self.max_age
        )
        for row, leaves in groups(merged).items():
            # All of a group travels together: text, rewards, verdicts, log-probabilities.
            np.testing.assert_equal(leaves, self.seen[row])
        self.at += 1
        return merged.rows.tolist(), ops.values(metrics)

    @property
    def held(self):
        kept = zip(self.replay.rollout.rows.tolist(), self.replay.born.tolist(), strict=True)
        return [row for row, born in kept if born >= 0]


def test_a_kept_group_takes_the_place_of_one_that_teaches_nothing():
    steps = Steps(room=4)
    rows, metrics = steps([MIXED, EQUAL, MIXED])
    # Its own groups are no filling: a step would learn twice from one of them.
    assert rows == [100, 101, 102]
    assert metrics["replay/filled"] == 0.0
    assert np.isnan(metrics["replay/age"])
    assert metrics["replay/held"] == 2.0
    rows, metrics = steps([EQUAL, MIXED, UNKNOWN])
    assert rows == [100, 201, 102]
    assert metrics["replay/filled"] == pytest.approx(2 / 3)
    assert metrics["replay/age"] == 1.0
    assert metrics["replay/held"] == 3.0


def test_the_least_used_come_first_and_of_those_the_newest():
    steps = Steps(room=6)
    steps([MIXED, MIXED, EQUAL])  # 100, 101
    steps([MIXED, EQUAL, MIXED])  # 200, 202; 100 fills
    assert steps([EQUAL, MIXED, MIXED])[0] == [200, 301, 302]  # of 101, 200, 202 the newest
    assert steps([EQUAL, EQUAL, EQUAL])[0] == [301, 302, 202]
    assert steps([EQUAL, EQUAL, EQUAL])[0] == [101, 301, 302]
    # Used once: 101, 202, 200, 100. Always the newest would be 301 for ever.
    assert steps([EQUAL, EQUAL, EQUAL])[0] == [200, 202, 100]


def test_a_group_comes_at_most_once_into_a_batch():
    steps = Steps(room=4)
    steps([MIXED, EQUAL, EQUAL])
    rows, metrics = steps([EQUAL, EQUAL, EQUAL])
    assert rows == [100, 201, 202]
    assert metrics["replay/filled"] == pytest.approx(1 / 3)


def test_a_group_is_used_up_to_its_age_and_then_forgotten():
    steps = Steps(room=4, max_age=3)
    steps([MIXED, EQUAL, EQUAL])
    rows, metrics = steps([EQUAL] * 3, at=3)
    assert rows == [100, 401, 402]
    assert metrics["replay/age"] == 3.0
    rows, metrics = steps([EQUAL] * 3, at=4)
    assert rows == [500, 501, 502]
    assert metrics["replay/filled"] == 0.0
    assert metrics["replay/held"] == 0.0
    assert steps.held == []


def test_beyond_its_room_the_oldest_are_forgotten():
    steps = Steps(room=4)
    steps([MIXED] * 3)
    steps([MIXED, EQUAL, MIXED])
    assert steps.held == [200, 202, 100, 101]
    _, metrics = steps([MIXED] * 3)
    assert steps.held == [300, 301, 302, 200]
    assert metrics["replay/held"] == 4.0
    # Room for less than a step.
    small = Steps(room=2)
    small([MIXED] * 3)
    assert small.held == [100, 101]


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([NAN, NAN, NAN], False),
        ([NAN, 1.0, NAN], False),
        ([1.0, NAN, 1.0], False),
        ([0.1, 0.1, 0.1], False),
        ([1.0, NAN, 0.0], True),
        ([0.5, 0.5, 0.25], True),
    ],
)
def test_what_differs_is_what_was_scored(rewards, kept):
    """A row that could not be scored is no difference: NaN is unequal to all, itself included."""
    steps = Steps(room=2, prompts=1, group=3)
    steps([rewards])
    assert steps.held == ([100] if kept else [])
    rows, _ = steps([[NAN, 0.0, 0.0]])
    assert rows == ([100] if kept else [200])


class Held(NamedTuple):
    row: int
    born: int
    uses: int


def modelled(held, fresh, useful, step, room, max_age):
    """The same in plain Python: the batch's groups, and what is held after the step."""
    live = [h for h in held if step - h.born <= max_age]
    turn = sorted(range(len(live)), key=lambda i: (live[i].uses, -live[i].born, i))
    batch = list(fresh)
    for place in (i for i, good in enumerate(useful) if not good):
        if turn:
            i = turn.pop(0)
            batch[place] = live[i].row
            live[i] = live[i]._replace(uses=live[i].uses + 1)
    new = [Held(row, step, 0) for row, good in zip(fresh, useful, strict=True) if good]
    return batch, sorted(new + live, key=lambda h: -h.born)[:room]


KINDS = {"mixed": MIXED, "equal": EQUAL, "unknown": UNKNOWN, "half": [NAN, 1.0]}


@settings(max_examples=40, deadline=None)
@given(
    history=st.lists(st.tuples(*[st.sampled_from(sorted(KINDS))] * 3), min_size=1, max_size=9),
    gaps=st.lists(st.integers(1, 3), min_size=9, max_size=9),
    room=st.sampled_from([2, 5]),
)
def test_any_history_is_that_of_a_plain_buffer(history, gaps, room):
    steps, held, at = Steps(room, max_age=4), [], 0
    for kinds, gap in zip(history, gaps, strict=False):
        rows, metrics = steps([KINDS[kind] for kind in kinds], at=at)
        fresh = [100 * (at + 1) + i for i in range(3)]
        useful = [kind == "mixed" for kind in kinds]
        expected, held = modelled(held, fresh, useful, at, room, 4)
        assert rows == expected
        assert steps.held == [h.row for h in held]
        uses = steps.replay.uses.tolist()[: len(held)]
        assert uses == [h.uses for h in held]
        assert metrics["replay/held"] == len(held)
        at += gap


# In a step: what is learnt from a replayed group.

MADE = plan("dapo", micro=8, on_policy=False)
scored_batch = jax.jit(prepare, static_argnums=0)
compute = jax.jit(gradients, static_argnums=0)
scores = jax.jit(score_rows, static_argnums=(0, 5))


def pending_of(correct, seed, kept=(True, True)):
    """Two groups of four with their text, as `collect` would give them."""
    settings = MADE.sampling
    pending = begin(settings, 8, jnp.int32(0))
    rng = np.random.default_rng(seed)
    mask = np.arange(3) < (1 + rng.permutation(8) % 3)[:, None]
    prompts, rows = pool(6), rng.permutation(6)[:2]
    tokens = np.where(mask, rng.integers(2, 16, mask.shape), PAD)
    before = np.repeat(np.asarray(prompts.positions)[rows], 4, axis=0)
    places = np.where(mask, before[:, -1:] + 1 + np.arange(3), -1)
    rewards = jnp.asarray(correct, jnp.float32)
    made = pending.rollout._replace(
        tokens=jnp.asarray(
            np.concatenate([np.repeat(prompts.tokens[rows], 4, axis=0), tokens], axis=1), jnp.int32
        ),
        positions=jnp.asarray(np.concatenate([before, places], axis=1), jnp.int32),
        mask=jnp.asarray(mask),
        sampler_logprobs=jnp.asarray(np.where(mask, -2.0, 0.0), jnp.float32),
        rewards=rewards,
        correct=rewards,
        components=rewards[..., None],
        parts=rewards[..., None],
        rows=jnp.asarray(rows, jnp.int32),
    )
    return pending._replace(rollout=made, kept=jnp.array(kept), round=jnp.int32(1))


def state_of(params, step=0, memory=None):
    if memory is None:
        memory = start_memory(replay=empty_replay(empty_rollout(MADE.sampling, 8), 3))
    state = initial_state(params, MADE.learner, jax.random.key(0), memory=memory)
    return state._replace(step=jnp.int32(step))


@functools.cache
def later():
    """Two policies, and the batch of the second: its first group is one that the first sampled,
    its second one has no differences."""
    first = initial_params()
    rng = np.random.default_rng(5)
    second = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.05, x.shape), x.dtype), first)
    early = pending_of([[1, 0, 0, 1], [0, 0, 0, 0]], seed=1)
    old, _, memory, _ = scored_batch(MADE, state_of(first), Frozen(), early)
    late = pending_of([[0, 0, 0, 0], [1, 1, 1, 1]], seed=2)
    state = state_of(second, step=1, memory=memory)
    batch, preview, memory, metrics = scored_batch(MADE, state, Frozen(), late)
    return second, (early, old), (late, batch, preview, memory, metrics)


def current_logprobs(params, batch):
    return np.asarray(scores(MADE.learner, params, {}, batch.tokens, batch.positions, 3).logprobs)


def test_old_logprobs_are_those_of_the_policy_that_sampled():
    second, (early, old), (late, batch, preview, _, metrics) = later()
    assert ops.values(metrics)["replay/filled"] == 0.5
    np.testing.assert_array_equal(batch.tokens[:4], early.rollout.tokens[:4])
    np.testing.assert_array_equal(batch.tokens[4:], late.rollout.tokens[4:])
    np.testing.assert_array_equal(batch.old_logprobs[:4], old.old_logprobs[:4])
    now = np.where(batch.mask, current_logprobs(second, batch), 0.0)
    gap = np.abs(now - np.where(batch.mask, batch.old_logprobs, 0.0)).max(axis=1)
    assert gap[:4].max() > 0.05
    np.testing.assert_allclose(gap[4:], 0.0, atol=1e-5)
    # What is shown is what is learnt from.
    assert preview.rollout.rows.tolist() == [early.rollout.rows[0], late.rollout.rows[1]]
    np.testing.assert_allclose(
        preview.advantages[:, 0], [1, -1, -1, 1, 0, 0, 0, 0], atol=1e-3, rtol=0
    )


def test_a_penalty_in_the_reward_makes_no_group_worth_keeping():
    """A KL penalty differs from row to row: by the shaped rewards every group would be mixed,
    none would be replaced, and groups that are wholly wrong would be kept."""
    made = MADE._replace(shaping=Shaping(divergence=ops.k1))
    memory = start_memory(0.1, replay=empty_replay(empty_rollout(MADE.sampling, 8), 3))
    early = pending_of([[1, 0, 0, 1], [0, 0, 0, 0]], seed=1)
    state = state_of(initial_params(), memory=memory)
    _, preview, memory, metrics = scored_batch(made, state, Frozen(), early)
    assert len(set(np.asarray(preview.rollout.rewards[1]).tolist())) > 1
    assert ops.values(metrics)["replay/held"] == 1.0
    assert memory.replay.rollout.rows[0] == early.rollout.rows[0]


@pytest.mark.parametrize(
    ("shaping", "truncated", "held"),
    [
        # One that was wholly wrong and has advantages all the same.
        (Shaping(missing_stop_penalty=0.5), [False] * 5 + [True] * 3, 2.0),
        # One that was mixed and has none once it is cut.
        (Shaping(clip=0.5), [False] * 8, 1.0),
    ],
)
def test_what_is_worth_keeping_goes_by_the_rewards_that_are_learnt_from(shaping, truncated, held):
    made = MADE._replace(shaping=shaping)
    rewards = [[1, 0, 0, 1], [2.0, 3.0, 2.0, 2.0] if shaping.clip else [0, 0, 0, 0]]
    pending = pending_of(rewards, seed=1)
    rollout = pending.rollout._replace(truncated=jnp.asarray(truncated))
    _, _, _, metrics = scored_batch(
        made, state_of(initial_params()), Frozen(), pending._replace(rollout=rollout)
    )
    assert ops.values(metrics)["replay/held"] == held


def test_the_first_update_already_corrects_for_the_policy_having_moved():
    """-min(r A, clip(r) A) with r = pi now / pi then, over all tokens of the batch. Old
    log-probabilities of the policy now would make every ratio 1, and the loss the mean of -A."""
    second, _, (_, batch, *_) = later()
    mask = np.asarray(batch.mask)
    ratio = np.exp(np.where(mask, current_logprobs(second, batch) - batch.old_logprobs, 0.0))
    advantages = np.asarray(batch.signals[0].advantages)
    surrogate = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    expected = surrogate[mask].mean()
    wrong = -np.broadcast_to(advantages, mask.shape)[mask].mean()
    assert abs(expected - wrong) > 1e-3
    _, loss, metrics = compute(MADE.learner, (second, {}), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    assert metrics["ratio/max"].value == pytest.approx(ratio[mask].max(), rel=1e-4)
    assert metrics["ratio/max"].value > 1.05


def test_a_group_that_was_never_found_is_no_group():
    """With dynamic sampling a place can stay empty: it is filled, and never kept."""
    second, _, (*_, memory, _) = later()
    empty = pending_of([[1, 0, 0, 1], [1, 0, 1, 0]], seed=3, kept=(True, False))
    batch, preview, after, metrics = scored_batch(
        MADE, state_of(second, step=2, memory=memory), Frozen(), empty
    )
    values = ops.values(metrics)
    assert values["replay/filled"] == 0.5
    assert values["replay/age"] == 2.0
    assert batch.mask.any(axis=1).all()
    assert after.replay.born.tolist() == [2, 0, -1]
    assert after.replay.rollout.rows[0] == empty.rollout.rows[0]
    assert preview.rollout.rows[0] == empty.rollout.rows[0]


def test_text_without_a_trace_of_replay_is_learnt_from_as_without_it():
    """Nothing is held yet: the batch is the one that a run without a replay would have."""
    pending = pending_of([[1, 0, 0, 1], [0, 1, 0, 0]], seed=4)
    with_replay, *_ = scored_batch(MADE, state_of(initial_params()), Frozen(), pending)
    bare = state_of(initial_params(), memory=start_memory())
    without, *_ = scored_batch(MADE, bare, Frozen(), pending)
    for one, other in zip(*map(jax.tree.leaves, (with_replay, without)), strict=True):
        np.testing.assert_array_equal(one, other)


# Whole runs.

LEARN = plan(
    "dapo",
    {"prompts": 4, "samples": 4, "max_new_tokens": 2, "retire_after": 2},
    micro=16,
    on_policy=False,
    optimizer=optax.adam(0.03),
)
POOL = 12


def start():
    room = empty_replay(empty_rollout(LEARN.sampling, 8), 6)
    memory = start_memory(solved=POOL, replay=room)
    state = initial_state(initial_params(), LEARN.learner, jax.random.key(1), memory=memory)
    # A restored state is bound to a device; so is this one, and both run one compiled program.
    return jax.device_put(state, jax.devices()[0])


ASKED = []


def noted(rows, tokens, lengths):
    ASKED.append(rows.tolist())
    return verifier(rows, tokens, lengths)


@functools.cache
def program():
    return fused(LEARN, callback_verifier(LEARN.sampling, noted))


def one_step(run, state):
    state, (metrics, preview) = run(state, Frozen(), pool(POOL), 1)
    return state, (ops.values(jax.tree.map(lambda x: x[0], metrics)), jax.device_get(preview))


def plain(state):
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


@functools.cache
def learnt():
    """Forty steps: the state after each, what was drawn, what the step gave."""
    ASKED.clear()
    state, history = start(), []
    for _ in range(40):
        state, given = one_step(program(), state)
        history.append((plain(state), ASKED[-1], *given))
    return history


def test_a_toy_run_learns():
    rate = np.array([values["solve_rate"] for _, _, values, _ in learnt()])
    assert rate[:3].mean() < 0.3
    assert rate[-5:].mean() > 0.8
    assert max(values["replay/filled"] for _, _, values, _ in learnt()) >= 0.5
    # A full batch of replayed and fresh groups has a ratio beyond 1 in its only update.
    assert max(values["ratio/max"] for _, _, values, _ in learnt()) > 1.2


def test_replayed_prompts_are_those_of_the_text():
    """The preview's rows name the prompt of each text, drawn or replayed."""
    prompts = np.asarray(pool(POOL).tokens)
    for _, _, _, preview in learnt():
        texts = preview.rollout.tokens.reshape(4, 4, -1)[:, :, :8]
        expected = np.repeat(prompts[preview.rollout.rows][:, None], 4, axis=1)
        np.testing.assert_array_equal(texts, expected)


def test_what_stays_solved_is_drawn_no_more():
    """As long as there are four others; then the solved ones fill up."""
    before, passed = np.zeros(POOL, int), 0
    for state, rows, _, _ in learnt():
        retired = before >= LEARN.sampling.retire_after
        assert len(set(rows)) == 4
        assert sum(not retired[row] for row in rows) == min(4, (~retired).sum())
        passed += retired.any() and not retired[rows].any()
        before = state.memory.solved
    assert passed
    assert (before >= LEARN.sampling.retire_after).sum() > POOL - 4


def test_a_resumed_run_is_bit_equal(tmp_path):
    """The memory is in the checkpoint: without it the first step would find nothing to replay."""
    history, at = learnt(), 6
    state = start()
    for _ in range(at):
        state, _ = one_step(program(), state)
    assert (state.memory.replay.born >= 0).any()
    with Checkpoints(tmp_path / "checkpoints", keep=1, keep_best=False) as kept:
        kept.save(state, None)
        kept.wait()
        back = kept.restore(jax.eval_shape(lambda: state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for one, other in zip(*map(jax.tree.leaves, (plain(back), plain(state))), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    expected, *_ = history[at + 3]
    for _, _, values, _ in history[at : at + 4]:
        back, (measured, _) = one_step(program(), back)
        assert measured["replay/filled"] == values["replay/filled"]
    for one, other in zip(*map(jax.tree.leaves, (plain(back), expected)), strict=True):
        np.testing.assert_array_equal(one, other)
