"""What attention reads of a step, from a projection, against float64: interpreted, lowered, on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_inputs, launch
from pallas_kernels.parts import AttentionParts

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels run from jax 0.11.2 on"
)

NANO = AttentionParts(heads=40, groups=8, width=128)
QWEN = AttentionParts(heads=16, groups=4, width=256, gated=True, rotated=64, eps=1e-6, offset=1.0)


def draw(parts, batch, tokens, columns):
    """The first row is empty, the second has no column left for its second token."""
    keys = jax.random.split(jax.random.key(tokens), 6)
    projected = jax.random.normal(keys[0], (batch, tokens, parts.units * parts.width)).astype(jnp.bfloat16)
    k, v = (
        jax.random.normal(key, (batch, parts.groups, columns, parts.width)).astype(jnp.bfloat16)
        for key in keys[1:3]
    )
    position = jax.random.randint(keys[3], (batch,), 0, columns - tokens, jnp.int32)
    position = position.at[0].set(0).at[1].set(columns - 1)
    if not parts.rotated:
        return projected, k, v, position
    weights = tuple(0.3 * jax.random.normal(key, (parts.width,)) for key in keys[4:])
    angles = jax.random.uniform(keys[3], (batch, tokens, parts.rotated // 2), maxval=2 * np.pi)
    turns = jnp.cos(angles), jnp.sin(angles)
    return projected, k, v, position, tuple(w.astype(jnp.bfloat16) for w in weights), turns


def truth(parts, projected, k, v, position, norms=(), turns=()):
    def exact(x):
        return np.asarray(x.astype(jnp.float32), np.float64)

    projected, k, v, position = exact(projected), exact(k), exact(v), np.asarray(position)
    units = projected.reshape(*projected.shape[:2], -1, parts.width)
    first = parts.units - 2 * parts.groups
    q, new_k, new_v = (
        units[:, :, : first : 2 if parts.gated else 1],
        *np.split(units[:, :, first:], 2, axis=2),
    )
    outputs = []
    for x, weight in zip((q, new_k), norms or (None, None), strict=True):
        if weight is not None:
            scale = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + parts.eps)
            x = x / scale * (parts.offset + exact(weight))
        if turns:
            cos, sin = (exact(turn)[:, :, None] for turn in turns)
            half = parts.rotated // 2
            a, b = x[..., :half], x[..., half : 2 * half]
            x = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)
        outputs.append(x)
    for cache, new in ((k, outputs[1]), (v, new_v)):
        for row, token in np.ndindex(new.shape[:2]):
            if position[row] + token < cache.shape[2]:
                cache[row, :, position[row] + token] = new[row, token]
    return outputs[0], k, v


def check(parts, case, **options):
    ours = jax.jit(functools.partial(attention_inputs.take_in, parts=parts, **options))(*case)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for mine, wanted in zip(ours, truth(parts, *case), strict=True):
        error = np.abs(np.asarray(mine.astype(jnp.float32), np.float64) - wanted)
        # Rounded after the norm and after the rotation, which adds two products.
        assert (error <= 2 * eps * np.abs(wanted).max()).all()
        assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < eps
    values = truth(parts, *case)[2]
    np.testing.assert_array_equal(np.asarray(ours[2].astype(jnp.float32)), values)


@pytest.mark.parametrize(
    "parts",
    [
        AttentionParts(heads=3, groups=1, width=64),
        AttentionParts(heads=4, groups=2, width=128, gated=True, rotated=64, eps=1e-6, offset=1.0),
    ],
)
def test_the_interpreted_kernel_norms_rotates_and_stores(parts):
    check(parts, draw(parts, 3, 2, 16), interpret=launch.mosaic_gpu().InterpretGPUParams())


@pytest.mark.parametrize("parts", [NANO, QWEN])
def test_the_kernel_lowers_to_cuda_in_place(parts):
    case = jax.eval_shape(lambda: draw(parts, 256, 1, 384))
    call = jax.jit(functools.partial(attention_inputs.take_in, parts=parts), donate_argnums=(1, 2))
    text = call.trace(*case).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("tf.aliasing_output") == 2 and text.count("output_operand_alias<") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("parts", [NANO, QWEN, AttentionParts(heads=32, groups=2, width=128)])
def test_the_compiled_kernel_norms_rotates_and_stores(parts, tokens):
    check(parts, draw(parts, 5, tokens, 40))


@pytest.mark.parametrize(
    ("parts", "dtype", "reason"),
    [
        (NANO, jnp.float32, "got float32"),
        (AttentionParts(heads=4, groups=2, width=96), jnp.bfloat16, "channels, got 96"),
        (AttentionParts(heads=4, groups=2, width=64, rotated=16), jnp.bfloat16, "rotated, got 16"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(parts, dtype, reason):
    with pytest.raises(launch.Unsupported, match=reason):
        attention_inputs.check(parts, dtype)
