"""The product of few rows against float64: in the interpreter, lowered, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launch, products

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels run from jax 0.11.2 on"
)


def draw(rows, inputs, outputs, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(rows))
    matrix = jax.random.normal(keys[1], (inputs, outputs)) * inputs**-0.5
    return jax.random.normal(keys[0], (rows, inputs)).astype(dtype), matrix.astype(dtype)


def truth(x, matrix, activation):
    x, matrix = (np.asarray(array.astype(jnp.float32), np.float64) for array in (x, matrix))
    product = x @ matrix
    if activation == "squared relu":
        return np.maximum(product, 0.0) ** 2
    if activation == "gated silu":
        gate, up = np.split(product, 2, axis=1)
        return gate / (1.0 + np.exp(-gate)) * up
    return product


def check(case, activation=None, parts=None, **options):
    def call(x, matrix):
        return products.multiply(x, matrix, activation=activation, parts=parts, **options)

    x, matrix = case
    ours, wanted = jax.jit(call)(x, matrix), truth(x, matrix, activation)
    assert ours.dtype == (case[0].dtype if parts is None else jnp.float32)
    ours = np.asarray(ours.astype(jnp.float32), np.float64)
    ours = ours if parts is None else ours.sum(axis=0)
    # Sums of as many terms, which tensor cores cut off instead of rounding them; else roundings of the
    # product, of the gate and of the result.
    bound = 1e-9 * case[0].shape[1] + 1e-7 if parts else 0.75 * float(jnp.finfo(case[0].dtype).eps)
    assert np.sqrt(np.mean((ours - wanted) ** 2) / np.mean(wanted**2)) < bound


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "activation", "parts"),
    [
        (3, 192, 64, None, None),
        (9, 320, 64, None, 2),
        (16, 192, 64, "squared relu", None),
        (17, 256, 128, "gated silu", None),
        (24, 192, 64, None, 3),
        (31, 128, 64, None, None),
        (32, 192, 128, "gated silu", None),
        (64, 128, 64, None, 2),
    ],
)
def test_the_interpreted_kernel_is_the_float64_product(rows, inputs, outputs, activation, parts):
    check(draw(rows, inputs, outputs), activation, parts, interpret=launch.mosaic_gpu().InterpretGPUParams())


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "activation", "parts"),
    [
        (1, 2560, 12352, None, None),
        (8, 2560, 18432, "gated silu", None),
        (31, 3136, 12544, "squared relu", None),
        (32, 2560, 18432, "gated silu", None),
        (64, 7680, 3136, None, 5),
    ],
)
def test_the_kernel_lowers_to_cuda(rows, inputs, outputs, activation, parts):
    call = functools.partial(products.multiply, activation=activation, parts=parts)
    case = jax.eval_shape(lambda: draw(rows, inputs, outputs))
    jax.jit(call).trace(*case).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 31, 32, 64])
@pytest.mark.parametrize(
    ("inputs", "outputs", "activation", "parts"),
    [
        (2560, 12352, None, None),
        (3136, 12544, "squared relu", None),
        (2560, 18432, "gated silu", None),
        (7680, 3136, None, 5),
        (12544, 3136, None, 5),
        (64, 64, None, None),
    ],
)
def test_the_compiled_kernel_is_the_float64_product(rows, inputs, outputs, activation, parts):
    check(draw(rows, inputs, outputs), activation, parts)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "activation", "reason"),
    [
        (65, 128, 64, jnp.bfloat16, None, "1 to 64 rows, got 65"),
        (8, 96, 64, jnp.bfloat16, None, "96 x 64"),
        (8, 3136, 17504, jnp.bfloat16, None, "3136 x 17504"),
        (8, 128, 64, jnp.bfloat16, "gated silu", "128 x 64"),
        (8, 128, 64, jnp.float32, None, "got float32"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(
    rows, inputs, outputs, dtype, activation, reason
):
    with pytest.raises(launch.Unsupported, match=reason):
        products.check(rows, inputs, outputs, dtype, activation)


def test_the_parts_of_a_sum_keep_two_ctas_a_multiprocessor():
    assert products.parts_of(7680, 3136) == 5
    assert products.parts_of(2560, 18432) == 1
    assert products.parts_of(64, 64) == 1
