"""The kernel of Mamba-2's output norm against float64: in the interpreter, lowered, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_norm, launch

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels run from jax 0.11.2 on"
)


def draw(batch, tokens, channels):
    keys = jax.random.split(jax.random.key(tokens), 3)
    y = 3 * jax.random.normal(keys[0], (batch, tokens, channels))
    projected = jax.random.normal(keys[1], (batch, tokens, channels + 96)).astype(jnp.bfloat16)
    return y, projected, jax.random.normal(keys[2], (channels,)).astype(jnp.bfloat16)


def check(case, groups, **options):
    y, z, weight = (np.asarray(x.astype(jnp.float32), np.float64) for x in case)
    z = z[..., : y.shape[-1]]
    gated = (y * z / (1.0 + np.exp(-z))).reshape(*y.shape[:2], groups, -1)
    normed = gated / np.sqrt(np.mean(gated**2, axis=-1, keepdims=True) + 1e-5)
    wanted = normed.reshape(y.shape) * weight

    def call(*case):
        return gated_norm.gate_then_norm(*case, groups=groups, eps=1e-5, **options)

    ours = jax.jit(call)(*case)
    assert ours.dtype == jnp.bfloat16
    error = np.asarray(ours.astype(jnp.float32), np.float64) - wanted
    assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < float(jnp.finfo(jnp.bfloat16).eps)


def test_the_interpreted_kernel_is_the_float64_norm():
    check(draw(2, 2, 8 * 192), 8, interpret=launch.mosaic_gpu().InterpretGPUParams())


def test_the_kernel_lowers_to_cuda():
    case = jax.eval_shape(lambda: draw(256, 1, 8 * 960))

    def call(*case):
        return gated_norm.gate_then_norm(*case, groups=8, eps=1e-5)

    jax.jit(call).trace(*case).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "groups", "tokens"), [(7680, 8, 1), (8192, 8, 4), (256, 4, 2)])
def test_the_compiled_kernel_is_the_float64_norm(channels, groups, tokens):
    check(draw(3, tokens, channels), groups)


@pytest.mark.parametrize(("channels", "groups"), [(7680, 6), (8 * 96, 8), (4 * 2112, 4)])
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(channels, groups):
    with pytest.raises(launch.Unsupported, match=f"got {channels} in {groups}"):
        gated_norm.check(channels, groups, jnp.bfloat16)
