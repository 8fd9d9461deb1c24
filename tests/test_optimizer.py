"""The optimizer's rule: the rate of every update, what decays, and clipping by the global norm."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import initial_params

from rlx.optimizer import make_optimizer, matrices, schedule
from rlx.settings import OptimizerSettings


@pytest.mark.parametrize(
    ("fields", "total", "expected"),
    [
        ({"warmup_steps": 4}, 8, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 1}, 2, [1, 1]),
        ({"schedule": "linear", "warmup_steps": 1}, 4, [1, 1, 2 / 3, 1 / 3]),
        ({"schedule": "cosine", "warmup_steps": 1}, 3, [1, 1, 0.5]),
        ({"schedule": "linear"}, 4, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2, "final_fraction": 0.5}, 4, [0.5, 1, 1, 0.75]),
        ({"schedule": "cosine"}, 4, [1, 0.853553, 0.5, 0.146447]),
        ({"schedule": "cosine", "warmup_steps": 2}, 4, [0.5, 1, 1, 0.5]),
    ],
)
def test_the_learning_rate_of_every_update(fields, total, expected):
    """No update has a rate of 0: optax's own warm-up gives 0 first."""
    rate = schedule(OptimizerSettings(learning_rate=2.0, **fields), total)
    np.testing.assert_allclose([rate(jnp.int32(i)) / 2 for i in range(total)], expected, rtol=1e-5)


def test_kernels_and_embeddings_decay_and_nothing_else():
    decayed = matrices(initial_params())
    assert decayed["embed"]["embedding"]
    assert not decayed["norm"]["scale"]
    layers = decayed["layers"]
    assert layers["mlp"]["gate_proj"]["kernel"]
    assert layers["attention"]["q_proj"]["kernel"]
    # Stacked over layers a bias is a matrix too: by its number of axes it would decay.
    assert not layers["attention"]["q_proj"]["bias"]
    assert not layers["attention_norm"]["scale"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_gradient_is_clipped_by_its_global_norm(name):
    settings = OptimizerSettings(name=name, learning_rate=1.0, clip_norm=1.0, eps=1.0)
    rule = make_optimizer(settings, schedule(settings, 10))
    params = {"a": {"kernel": jnp.zeros(2)}}
    grads = {"a": {"kernel": jnp.array([30.0, 40.0])}}
    updates, _ = rule.update(grads, rule.init(params), params)
    clipped = np.array([0.6, 0.8])
    expected = -clipped if name == "sgd" else -clipped / (clipped + 1.0)
    np.testing.assert_allclose(updates["a"]["kernel"], expected, rtol=1e-5)


def test_no_clipping_at_a_limit_of_zero():
    """optax clips a zero gradient at a limit of zero to NaN."""
    settings = OptimizerSettings(name="sgd", learning_rate=1.0, clip_norm=0.0)
    rule = make_optimizer(settings, schedule(settings, 10))
    params = {"a": {"kernel": jnp.zeros(2)}}
    for grad in (0.0, 50.0):
        updates, _ = rule.update({"a": {"kernel": jnp.full(2, grad)}}, rule.init(params), params)
        np.testing.assert_array_equal(updates["a"]["kernel"], -grad)


def test_small_updates_are_not_lost():
    """0.5 in bfloat16 is 0.002 from its neighbours: ten updates of 1e-6 would leave it at 0.5."""
    settings = OptimizerSettings(learning_rate=1e-6, clip_norm=0.0)
    rule = make_optimizer(settings, schedule(settings, 10))
    params = {"a": {"kernel": jnp.full(2, 0.5, jnp.float32)}}
    state = rule.init(params)
    for _ in range(10):
        updates, state = rule.update({"a": {"kernel": jnp.full(2, -3.0)}}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["a"]["kernel"] - 0.5, 1e-5, rtol=0.05)
