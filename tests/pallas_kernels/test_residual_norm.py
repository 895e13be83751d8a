"""The residual stream's sum and norm against float64: in the interpreter, lowered, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launch, residual_norm

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels run from jax 0.11.2 on"
)


def draw(rows, parts, channels):
    keys = jax.random.split(jax.random.key(rows), 3)
    x = jax.random.normal(keys[0], (rows, channels)).astype(jnp.bfloat16)
    weight = jax.random.normal(keys[2], (channels,)).astype(jnp.bfloat16)
    return x, jax.random.normal(keys[1], (parts, rows, channels)), weight


def check(case, offset, **options):
    call = functools.partial(residual_norm.add_then_norm, eps=1e-5, offset=offset, **options)
    sums, normed = (np.asarray(out.astype(jnp.float32), np.float64) for out in jax.jit(call)(*case))
    x, parts, weight = (np.asarray(array.astype(jnp.float32), np.float64) for array in case)
    half = float(jnp.finfo(jnp.bfloat16).eps) / 2
    wanted = x + parts.sum(axis=0)
    assert np.abs(sums - wanted).max() < 1.01 * half * np.abs(wanted).max()
    wanted = sums / np.sqrt(np.mean(sums**2, axis=1, keepdims=True) + 1e-5) * (offset + weight)
    assert np.abs(normed - wanted).max() < 1.01 * half * np.abs(wanted).max()


@pytest.mark.long
@pytest.mark.parametrize(("rows", "parts", "offset"), [(3, 1, 1.0), (4, 3, 0.0)])
def test_the_interpreted_kernel_is_the_float64_norm(rows, parts, offset):
    check(draw(rows, parts, 704), offset, interpret=launch.mosaic_gpu().InterpretGPUParams())


@pytest.mark.parametrize("rows", [1, 8])
def test_the_kernel_lowers_to_cuda(rows):
    call = functools.partial(residual_norm.add_then_norm, eps=1e-5, offset=0.0)
    case = jax.eval_shape(lambda: draw(rows, 5, 3136))
    jax.jit(call).trace(*case).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "parts", "channels"), [(1, 5, 3136), (7, 1, 2560), (256, 3, 2560)])
def test_the_compiled_kernel_is_the_float64_norm(rows, parts, channels):
    check(draw(rows, parts, channels), 1.0)


@pytest.mark.parametrize(
    ("channels", "dtype"), [(96, jnp.bfloat16), (8256, jnp.bfloat16), (128, jnp.float32)]
)
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(channels, dtype):
    with pytest.raises(launch.Unsupported, match="got"):
        residual_norm.check(channels, dtype)
