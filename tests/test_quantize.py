"""int8 weights and cache: what is sampled is what the rounded model says, and the gap is known."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import initial_params, pool, sampling

import run
from model.attention import attend, causal_mask, rotary_phases
from model.heads import logits
from model.parameters import head_kernel
from model.quantize import FAINTEST, quantize
from model.qwen import Block, RMSNorm
from model.sample import sample
from rlx import assemble
from rlx.algorithms import ALGORITHMS
from rlx.config import load_training
from rlx.corrections import CORRECTIONS
from rlx.policy import load_policy
from rlx.resolve import resolve
from rlx.rollout import sample_rows

N, G, P, T = 3, 4, 6, 12
NEVER = jnp.array([-1, -1])
BOTH = {"weights": "int8", "cache": "int8"}
ways = pytest.mark.parametrize(
    "way", [{"weights": "int8"}, {"cache": "int8"}, BOTH], ids=["weights", "cache", "both"]
)


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=12, max_size=12),
    st.sampled_from([0, 1, (0, 1)]),
)
def test_rounding_is_off_by_half_a_step_at_most(numbers, axes):
    """A scale over the wrong axis would cut what is above its maximum."""
    x = np.array(numbers, np.float32).reshape(2, 3, 2)
    values, scale = quantize(jnp.asarray(x), axes)
    wide = np.expand_dims(np.asarray(scale), axes)
    step = np.maximum(np.abs(x).max(axes, keepdims=True), FAINTEST) / 127
    np.testing.assert_allclose(wide, step, rtol=1e-6)
    assert values.dtype == jnp.int8 and int(jnp.min(values)) >= -127
    assert (np.abs(np.asarray(values) * wide - x) <= 0.5001 * wide).all()


def test_hand_computed_steps():
    values, scale = quantize(jnp.array([[-254.0, 3.0, 0.9], [0.0, 0.0, 0.0]]), 1)
    np.testing.assert_array_equal(values, [[-127, 2, 0], [0, 0, 0]])
    np.testing.assert_allclose(scale, [2.0, FAINTEST / 127], rtol=1e-6)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(broken):
    """A cast would make a plain number of it, and the row would count as a sample."""
    values, scale = quantize(jnp.array([[1.0, broken], [1.0, 2.0]]), 1)
    np.testing.assert_array_equal(jnp.isfinite(values * scale[:, None]).all(1), [False, True])


def near(x, axes):
    """x as int8 can hold it."""
    step = jnp.max(jnp.abs(x), axes, keepdims=True) / 127
    return jnp.round(x / step) * step


def rounded(config, params):
    """float32 parameters that int8 holds exactly, and the head's own kernel. By hand, from what the
    arrays mean: stacked layers, then the inputs of each product."""
    layers = params["layers"]
    attention, mlp = dict(layers["attention"]), dict(layers["mlp"])
    for name in ("q_proj", "k_proj", "v_proj"):
        attention[name] = attention[name] | {"kernel": near(attention[name]["kernel"], 1)}
    attention["o_proj"] = attention["o_proj"] | {
        "kernel": near(attention["o_proj"]["kernel"], (1, 2))
    }
    mlp = {name: {"kernel": near(part["kernel"], 1)} for name, part in mlp.items()}
    layers = layers | {"attention": attention, "mlp": mlp}
    return params | {"layers": layers}, near(head_kernel(config, params), 0)


class Rounding:
    """Whole rows, whose completions see keys and values as an int8 cache has them."""

    def __init__(self, positions, cache):
        self.mask, self.cache = causal_mask(positions), cache

    def attend(self, query, key, value):
        exact = attend(query, key, value, self.mask)
        if self.cache == "auto":
            return exact, None
        # The prompt's last token is decoded, the others are prefilled.
        later = (jnp.arange(query.shape[1]) >= P - 1)[:, None, None]
        seen = attend(query, near(key, -1), near(value, -1), self.mask)
        return jnp.where(later, seen, exact), None


@functools.partial(jax.jit, static_argnames=("config", "weights", "cache"))
def distributions(config, params, prompts, samples, weights="auto", cache="auto"):
    """Log-probabilities [B, T, V] of whole rows, rounded by other means than the sampler's."""
    kernel = head_kernel(config, params)
    if weights == "int8":
        params, kernel = rounded(config, params)
    group = samples.tokens.shape[0] // len(prompts.tokens)
    tokens = jnp.concatenate([jnp.repeat(prompts.tokens, group, 0), samples.tokens], 1)
    before = jnp.repeat(prompts.positions, group, 0)
    after = before[:, -1:] + 1 + jnp.arange(samples.tokens.shape[1])
    positions = jnp.concatenate([before, after], 1)
    context = Rounding(positions, cache)
    x = params["embed"]["embedding"][tokens]
    phases = rotary_phases(positions, config.head_dim, config.rope_theta)
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        x, _ = Block(config).apply({"params": layer}, x, phases, context)
    x = RMSNorm(config.norm_epsilon, "embed").apply({"params": params["norm"]}, x)
    return jax.nn.log_softmax(logits(config, kernel, x[:, P - 1 : -1]) / 0.9, axis=-1)


def chosen(every, samples):
    return jnp.take_along_axis(every, samples.tokens[..., None], axis=-1)[..., 0]


def calm(params):
    """Weights of a trained model's size: the shared ones make logits of tens, and gaps of nats."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x / 3 if path[-1].key in ("kernel", "embedding") else x, params
    )


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def shape(request, tiny_config, tiny_params):
    params = calm(tiny_params)
    if request.param:
        params = {name: part for name, part in params.items() if name != "lm_head"}
    return dataclasses.replace(tiny_config, tie_embeddings=request.param), params


@functools.partial(jax.jit, static_argnames=("config", "slots", "weights", "cache"))
def program(config, params, prompts, slots=None, weights="auto", cache="auto"):
    keys = jax.random.split(jax.random.key(0), (N, G))
    return sample(
        config, params, *prompts, keys, max_new_tokens=T, stop_ids=NEVER, pad_id=3,
        temperature=0.9, slots=slots, weights=weights, cache=cache,
    )  # fmt: skip


@ways
def test_logprobs_are_those_of_the_rounded_model(shape, prompts, way):
    """Exactly: a correction by any other number than what was sampled from would be biased. The
    trainer's are near, and further off than rounding in float32."""
    config, params = shape
    samples = program(config, params, prompts, **way)
    same = distributions(config, params, prompts, samples, **way)
    gap = jnp.abs(samples.logprobs - chosen(same, samples))
    # A number half way between two steps may fall to either side.
    assert float(jnp.median(gap)) < 1e-5 and float(gap.max()) < 5e-3
    trainers = chosen(distributions(config, params, prompts, samples), samples)
    gap = float(jnp.abs(samples.logprobs - trainers).mean())
    assert 5e-4 < gap < 0.05


def test_without_int8_the_gap_is_rounding_only(shape, prompts):
    config, params = shape
    samples = program(config, params, prompts)
    trainers = chosen(distributions(config, params, prompts, samples), samples)
    assert float(jnp.abs(samples.logprobs - trainers).max()) < 2e-5


@ways
@pytest.mark.parametrize("slots", [3])
def test_a_slot_gives_each_row_its_own_text(tiny_config, tiny_params, prompts, way, slots):
    """A scale that stayed behind from the slot's former row would change the next one's text."""
    params = calm(tiny_params)
    whole = program(tiny_config, params, prompts, **way)
    slotted = program(tiny_config, params, prompts, slots, **way)
    np.testing.assert_array_equal(slotted.tokens, whole.tokens)
    gap = jnp.abs(slotted.logprobs - whole.logprobs)
    assert float(jnp.median(gap)) < 1e-5 and float(gap.max()) < 5e-3


def test_a_broken_row_does_not_reach_the_next_in_its_slot(tiny_config, tiny_params, prompts):
    """In int8 the infinity is in the scales, which a weight of 0 would make NaN."""
    params = calm(tiny_params)
    whole = program(tiny_config, params, prompts, **BOTH)
    embedding = params["embed"]["embedding"].at[20].set(jnp.inf)
    broken = params | {"embed": {"embedding": embedding}}
    met = (np.asarray(whole.tokens[:, :-1]) == 20).any(axis=1)
    met[:G] = True  # it is in the first prompt
    assert not met.all()
    samples = program(tiny_config, broken, prompts, 1, **BOTH)
    np.testing.assert_array_equal(samples.finite, ~met)
    np.testing.assert_array_equal(samples.tokens[~met], whole.tokens[~met])


@pytest.mark.parametrize("slots", [None, 5])
def test_the_loop_holds_int8_and_no_wide_copy(tiny_config, tiny_params, prompts, slots, optimised):
    """XLA moves a cast of what no step changes out of the loop: each step would then read the
    float32 weights, and the prompts' float32 cache, that int8 is there to save."""
    text = program.lower(tiny_config, tiny_params, prompts, slots, **BOTH).compile().as_text()
    carried = "".join(line for line in text.splitlines() if re.search(r" while\(", line))
    rows, held = slots or N * G, slots or N
    # The projections of one input are one kernel.
    kernels = [(24, 10, 10), (6, 10, 24), (24, 80), (40, 24), (24, 29)]
    caches = [(rows, 2, 10, T), (rows, 2, T, 10), (held, 2, 10, P - 1), (held, 2, P - 1, 10)]
    for sizes in kernels + caches:
        sizes = ",".join(map(str, sizes))
        assert f"s8[{sizes}]" in carried, sizes
    flat = [(24, 100), (60, 24)]
    for sizes in kernels + caches + flat:
        # Other than the cache of one row by chance, nothing else has these shapes.
        sizes = ",".join(map(str, sizes))
        assert f"f32[{sizes}]" not in carried, sizes


def test_truncated_importance_sampling_takes_the_bias_away(tiny_config, tiny_params, prompts):
    """One token after each prompt, by enumeration: the gradient expected under the int8 sampler,
    against that under the trainer. Uncut weights give it exactly; a cap that cuts, nearly."""
    params = jax.tree.map(lambda x: x / 1.5, tiny_params)  # wide enough apart for weights to cut
    samples = program(tiny_config, params, prompts, **BOTH)
    policy = distributions(tiny_config, params, prompts, samples)[::G, 0, :25]
    sampler = distributions(tiny_config, params, prompts, samples, **BOTH)[::G, 0, :25]
    rewards = jnp.asarray(np.random.default_rng(0).normal(size=(N, 25)), jnp.float32)
    rewards -= jnp.sum(jnp.exp(policy) * rewards, axis=1, keepdims=True)
    every = jnp.ones((N * 25, 1), bool)

    def expected(drawn_from, cap):
        """A row for each token of each prompt, as heavy as its probability."""
        old, drawn = policy.reshape(-1, 1), drawn_from.reshape(-1, 1)
        advantages = jnp.exp(drawn) * rewards.reshape(-1, 1)
        if cap:
            advantages *= CORRECTIONS["token_truncate"](old, drawn, every, cap=cap)[1]

        def loss(scores):
            logprobs = jax.nn.log_softmax(scores).reshape(-1, 1)
            return ALGORITHMS["dapo"].scalar(logprobs, old, old, advantages, every)

        return jax.grad(loss)(policy)

    right = expected(policy, None)
    largest = float(jnp.max(jnp.exp(policy - sampler)))
    assert largest > 1.01

    def error(cap):
        return float(jnp.linalg.norm(expected(sampler, cap) - right) / jnp.linalg.norm(right))

    assert error(None) > 3e-3
    assert error(largest + 0.1) < 1e-4
    assert 1e-4 < error((1 + largest) / 2) < error(None)


def test_the_settings_reach_the_sampler(tiny_nano):
    given = [f"model.path={tiny_nano}", "model.weights=random", "sampling.weights=int8"]
    config = resolve(load_training(None, [*given, "sampling.cache=int8"]))
    policy = load_policy(config, jax.random.key(0))
    learner = assemble.make_learner(config, policy)
    made = assemble.make_plan(config, policy, learner, {"answer": 1.0}, True).sampling
    assert (made.weights, made.cache) == ("int8", "int8")
    rows = (jnp.arange(2), jnp.zeros(2, jnp.int32), jax.random.key(3), 0)
    jitted = jax.jit(sample_rows, static_argnums=0)
    exact = jitted(sampling(), initial_params(), pool(), *rows)
    for way in ({"weights": "int8"}, {"cache": "int8"}):
        found = jitted(sampling(**way), initial_params(), pool(), *rows)
        same = exact.tokens[:, 0] == found.tokens[:, 0]
        gap = jnp.where(same, jnp.abs(found.logprobs - exact.logprobs)[:, 0], 0.0)
        assert 0 < float(gap.max()) < 0.1


def test_they_are_of_training_alone(recipe, tmp_path, capsys):
    """A checkpoint is measured as it is; an algorithm that samples nothing reads neither."""
    flags = ["generate", "--input", "a.jsonl", "--output", str(tmp_path / "b.jsonl")]
    for command in (["eval"], flags):
        for key in ("weights", "cache"):
            assert run.main([*command, "--config", str(recipe), f"sampling.{key}=int8"]) == 2
            assert f"it never reads sampling.{key}" in capsys.readouterr().err
    for name in ("dpo", "sft"):
        with pytest.raises(ValueError, match=f"sampling.cache: expected unset, since {name}"):
            load_training(None, [f"algorithm.name={name}", "sampling.cache=int8"])
    with pytest.raises(ValueError, match=r"sampling\.weights"):
        load_training(None, ["sampling.weights=int4"])
