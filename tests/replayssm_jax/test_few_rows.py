"""Products of few rows: the same sums as one row at a time, whatever path takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax.few_rows import LEAST_ELEMENTS, MOST_ROWS, dot_general


@pytest.mark.parametrize("rows", [(1,), (2,), (1, MOST_ROWS), (MOST_ROWS + 1,)])
@pytest.mark.parametrize("side", [0, 1])
def test_rows_equal_the_float64_product(rows, side):
    rng = np.random.default_rng(len(rows) + side)
    x, matrix = rng.normal(size=(*rows, 96)), rng.normal(size=(96, 128))
    assert matrix.size >= LEAST_ELEMENTS
    stored = matrix if side == 0 else matrix.T
    found = jax.jit(lambda x, w: dot_general(x, w, (((x.ndim - 1,), (side,)), ((), ()))))(
        x.astype(np.float32), stored.astype(np.float32)
    )
    np.testing.assert_allclose(found, x @ matrix, rtol=0, atol=96**0.5 * 1e-5)


def test_no_row_depends_on_the_others():
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.normal(size=(2, 4, 96)), jnp.float32)
    matrix = jnp.asarray(rng.normal(size=(96, 128)), jnp.float32)
    together = jax.jit(lambda x: dot_general(x, matrix, (((2,), (0,)), ((), ()))))(x)
    alone = jax.jit(lambda row: dot_general(row, matrix, (((0,), (0,)), ((), ()))))
    for index in np.ndindex(2, 4):
        assert (together[index] == alone(x[index])).all()


@pytest.mark.parametrize("shape", [(96,), (1, 1, 96)])
def test_a_16_bit_vector_has_rows_of_zeros_beside_it_but_for_a_cpu(shape, monkeypatch):
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    matrix = jnp.asarray(rng.normal(size=(96, 128)), jnp.bfloat16)

    def product(x):
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        return dot_general(x, matrix, numbers, preferred_element_type=jnp.float32)

    text = jax.jit(product).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{MOST_ROWS}x128xf32>" in text
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ np.asarray(matrix.astype(jnp.float32), np.float64)
    np.testing.assert_allclose(product(x), exact, rtol=0, atol=96**0.5 * 1e-5)


def test_gradients_pass_through():
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.normal(size=(3, 96)), jnp.float32)
    matrix = jnp.asarray(rng.normal(size=(96, 128)), jnp.float32)

    def loss(x, matrix, product):
        return jnp.sum(jnp.sin(product(x, matrix, (((1,), (0,)), ((), ())))))

    ours = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(x, matrix, dot_general)
    plain = jax.grad(loss, (0, 1))(x, matrix, jax.lax.dot_general)
    for found, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
