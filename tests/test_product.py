"""The layers' matrix product: its values both ways, and the types of its factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import attend
from model.product import product
from rlx import hlo


def factors(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("batch", [(), (1,), (3, 2)])
@pytest.mark.parametrize(("n", "i", "o"), [(48, 32, 80), (1, 32, 80), (48, 1, 80), (48, 32, 1)])
def test_a_product_and_its_gradients_are_those_of_rounded_factors(batch, n, i, o):
    left, right, slope = factors((*batch, n, i), (*batch, i, o), (*batch, n, o))
    given, back = jax.jit(
        lambda *xs: (lambda y, pull: (y, pull(slope)))(
            *jax.vjp(lambda *ys: product(*ys, jnp.bfloat16), *xs)
        )
    )(left, right)

    def wide(x):
        return np.asarray(x.astype(jnp.bfloat16), np.float64)

    turned = {"left": np.swapaxes(wide(left), -1, -2), "right": np.swapaxes(wide(right), -1, -2)}
    np.testing.assert_allclose(given, wide(left) @ wide(right), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(back[0], wide(slope) @ turned["right"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(back[1], turned["left"] @ wide(slope), rtol=1e-5, atol=1e-5)


def factor_types(function, *given) -> list[set[str]]:
    """Of each matrix product in the compiled program."""
    module = hlo.parse(jax.jit(function).lower(*given).compile().as_text())
    return [
        {computation[name].shape.split("[")[0] for name in line.operands}
        for computation in module.computations.values()
        for line in computation.values()
        if line.opcode == "dot"
    ]


def test_a_gradient_multiplies_bfloat16_where_the_forward_product_does():
    """A CPU multiplies a transposed factor that is read in place as float32, at half the speed."""
    left, right, slope = factors((256, 64), (64, 128), (256, 128))

    def forward(left, right):
        return product(left, right, jnp.bfloat16)

    def backward(left, right, slope):
        return jax.vjp(forward, left, right)[1](slope)

    (own,) = factor_types(forward, left, right)
    assert factor_types(backward, left, right, slope) == [own, own]


def test_attention_multiplies_bfloat16_where_a_plain_product_does():
    plain = factor_types(
        lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32),
        *(x.astype(jnp.bfloat16) for x in factors((6, 64, 32), (6, 32, 64))),
    )
    query, key, value = (
        x.astype(jnp.bfloat16) for x in factors((3, 64, 4, 32), (3, 64, 2, 32), (3, 64, 2, 32))
    )
    mask = jnp.tril(jnp.ones((3, 64, 64), bool))

    def slopes(query, key, value):
        return jax.grad(lambda *xs: attend(*xs, mask).astype(jnp.float32).sum(), (0, 1, 2))(
            query, key, value
        )

    assert factor_types(slopes, query, key, value) == plain * 6
