"""The head: log-probability and entropy in chunks are those of the plain softmax, and smaller."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import model.chunked_softmax
from model.heads import completion_outputs, logits, token_logprobs
from model.parameters import head_kernel
from model.qwen import Qwen

B, T, D, V, TOKENS = 3, 7, 5, 29, 25


@pytest.fixture
def small_chunks(monkeypatch):
    """21 tokens make six chunks of four, the last of them filled up with three of padding; 29 ids
    three of ten, the last of which begins with one of the chunk before, and ends with four ids
    that are no token."""
    monkeypatch.setattr(model.chunked_softmax, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(model.chunked_softmax, "CHUNK_IDS", 11)


@pytest.fixture
def case(tiny_config):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, TOKENS, (B, T)), jnp.int32)
    return dataclasses.replace(tiny_config, hidden_size=D), kernel, hidden, targets


def direct(kernel, hidden, targets, temperature, tokens=TOKENS):
    """The definition, on the tokens that exist."""
    logprobs = jax.nn.log_softmax((hidden @ kernel)[..., :tokens] / temperature)
    chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def pulled(outputs):
    """A scalar in which every log-probability and entropy has its own weight."""
    rng = np.random.default_rng(1)
    return sum(jnp.sum(jnp.asarray(rng.normal(size=x.shape)) * x) for x in outputs)


@pytest.mark.parametrize("ids_first", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_values_and_gradients_are_those_of_the_direct_formula(
    case, small_chunks, temperature, ids_first
):
    config, kernel, hidden, targets = case

    def in_chunks(kernel, hidden):
        lying = kernel.T if ids_first else kernel
        return token_logprobs(config, lying, hidden, targets, temperature, ids_first=ids_first)

    found = in_chunks(kernel, hidden)
    for a, b in zip(found, direct(kernel, hidden, targets, temperature), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)

    def of_formula(kernel, hidden):
        return pulled(direct(kernel, hidden, targets, temperature))

    found = jax.grad(lambda *of: pulled(in_chunks(*of)), argnums=(0, 1))(kernel, hidden)
    wanted = jax.grad(of_formula, argnums=(0, 1))(kernel, hidden)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_chunks_that_nobody_needs_are_zeros_and_change_no_other(case, small_chunks):
    """Chunks of four tokens: the second is not needed, and the third for one token alone."""
    config, kernel, hidden, targets = case
    needed = jnp.ones(B * T, bool).at[4:8].set(False).at[8:11].set(False).reshape(B, T)
    skipped = (jnp.arange(B * T) // 4 == 1).reshape(B, T)

    def weighed(outputs):
        return pulled(jnp.where(needed, x, 0.0) for x in outputs)

    def of(kernel, hidden, **more):
        return token_logprobs(config, kernel, hidden, targets, **more)

    found, every = of(kernel, hidden, needed=needed), of(kernel, hidden)
    for a, b in zip(found, every, strict=True):
        np.testing.assert_array_equal(a, jnp.where(skipped, 0.0, b))
    slopes = [
        jax.grad(lambda *x, more=more: weighed(of(*x, **more)), argnums=(0, 1))(kernel, hidden)
        for more in ({"needed": needed}, {})
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *slopes)


def test_entropy_has_a_gradient_of_its_own(case):
    """An entropy outside the gradient's tape changes the loss's number and not the update."""
    config, kernel, hidden, targets = case
    slope = jax.grad(lambda h: jnp.sum(token_logprobs(config, kernel, h, targets)[1]))(hidden)
    assert float(jnp.abs(slope).min(axis=-1).max()) > 1e-3


@pytest.mark.parametrize(
    ("temperature", "logprob"), [(1, -0.126928), (0.5, -0.01815), (2, -0.313262)]
)
def test_the_temperature_divides_the_logits(tiny_config, temperature, logprob):
    """Logits (2, 0): without the temperature all three would be -0.126928."""
    config = dataclasses.replace(tiny_config, vocab_size=2, hidden_size=2, num_tokens=None)
    hidden = jnp.array([[[2.0, 0.0]]])
    found, _ = token_logprobs(config, jnp.eye(2), hidden, jnp.array([[0]]), float(temperature))
    assert float(found[0, 0]) == pytest.approx(logprob, abs=1e-6)


def test_equal_logits_have_the_entropy_of_the_tokens_that_exist(case):
    config, kernel, hidden, targets = case
    logprobs, entropy = token_logprobs(config, 0 * kernel, hidden, targets)
    np.testing.assert_allclose(entropy, math.log(TOKENS), rtol=1e-6)  # log 29 with padding
    np.testing.assert_allclose(logprobs, -math.log(TOKENS), rtol=1e-6)


def test_ids_beyond_the_tokenizer_have_no_share_and_no_gradient(case):
    """Their columns are the arg-max everywhere: with a share, log-probabilities fall to -1e4."""
    config, kernel, hidden, targets = case
    hidden = jnp.abs(hidden)
    loud = kernel.at[:, TOKENS:].set(1e4)
    clean = token_logprobs(config, kernel, hidden, targets)
    outputs = token_logprobs(config, loud, hidden, targets)
    jax.tree.map(np.testing.assert_array_equal, outputs, clean)
    slope = jax.grad(lambda k: pulled(token_logprobs(config, k, hidden, targets)))(loud)
    assert bool(jnp.all(jnp.isfinite(slope)))
    np.testing.assert_array_equal(slope[:, TOKENS:], 0.0)
    everything = dataclasses.replace(config, num_tokens=None)
    assert float(token_logprobs(everything, loud, hidden, targets)[0].max()) < -1e3


def test_extreme_logits_give_finite_values_and_gradients(case):
    config, kernel, hidden, targets = case

    def of(hidden):
        return pulled(token_logprobs(config, 1e4 * kernel, hidden, targets, 0.5))

    value, slope = jax.value_and_grad(of)(hidden)
    assert bool(jnp.isfinite(value)) and bool(jnp.all(jnp.isfinite(slope)))


def test_logits_of_bfloat16_activations_are_float32(case):
    """In bfloat16 two logits of 20 that differ by 0.05 are the same number."""
    config, kernel, hidden, targets = case
    hidden = hidden.astype(jnp.bfloat16)
    found = logits(config, kernel, hidden)
    assert found.dtype == jnp.float32
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    exact = hidden.astype(jnp.float32) @ rounded
    np.testing.assert_allclose(found[..., :TOKENS], exact[..., :TOKENS], atol=1e-4)
    logprobs, entropy = token_logprobs(config, kernel, hidden, targets)
    assert logprobs.dtype == entropy.dtype == jnp.float32


def arrays(jaxpr):
    """Every value that a jaxpr computes, those of the programs inside it with them."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from arrays(getattr(inner, "jaxpr", inner))


def test_no_array_holds_the_logits_of_all_tokens(case, small_chunks):
    config, kernel, hidden, targets = case

    def largest(function):
        traced = jax.make_jaxpr(jax.value_and_grad(function, argnums=(0, 1)))(kernel, hidden)
        return max(math.prod(array.shape) for array in arrays(traced.jaxpr))

    # What is left beside the chunk of logits is the kernel's gradient.
    assert largest(lambda k, h: pulled(token_logprobs(config, k, h, targets))) == max(D, 4) * V
    assert largest(lambda k, h: pulled(direct(k, h, targets, 1.0, V))) == B * T * V


def test_a_completion_token_is_predicted_by_the_column_before_it(tiny_config, tiny_params, prompts):
    qwen = Qwen(tiny_config)

    @jax.jit
    def both(params):
        hidden = qwen.apply({"params": params}, *prompts)
        every = logits(tiny_config, head_kernel(tiny_config, params), hidden)
        return completion_outputs(qwen, params, *prompts, 2, 0.7), every

    found, every = both(tiny_params)
    every = np.asarray(jax.nn.log_softmax(every / 0.7))
    rows = np.arange(3)
    for place, column in enumerate((4, 5)):
        # The single-token prompt has nothing before its token: there the value means nothing.
        real = np.asarray(prompts.positions[:, column]) > 0
        wanted = every[rows, column - 1, prompts.tokens[:, column]]
        np.testing.assert_allclose(found.logprobs[real, place], wanted[real], atol=1e-5)
        same_column = every[rows, column, prompts.tokens[:, column]]
        assert np.abs(found.logprobs[real, place] - same_column[real]).max() > 0.1
    assert bool(jnp.all(jnp.isfinite(found.logprobs)) & jnp.all(jnp.isfinite(found.entropy)))


def test_another_temperature_is_no_new_program(case):
    config, kernel, hidden, targets = case
    traces = []

    @jax.jit
    def of(temperature):
        traces.append(temperature)
        return token_logprobs(config, kernel, hidden, targets, temperature)[0]

    assert not np.allclose(of(0.5), of(1.5))
    assert len(traces) == 1
