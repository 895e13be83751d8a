"""Formats of a state: scales, saturation, random words, B22."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import numerics
from replayssm_jax import precision

encode = jax.jit(precision.encode, static_argnums=1)
decode = jax.jit(precision.decode)

LOSSY = precision.FORMATS[1:]


def _rows(shape=(3, 5, 32), seed=0):
    """Rows of very different sizes, float32."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.integers(-6, 7, (*shape[:-1], 1))
    return jnp.asarray(rng.normal(size=shape) * size, jnp.float32)


def _words(shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32))


def _fp8_oracle(x):
    """A row at a time: the lowest power of two that brings it to 448 or less, then ml_dtypes."""
    result = np.empty(x.shape, np.float64)
    for index in np.ndindex(*x.shape[:-1]):
        row = x[index].astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(np.max(np.abs(row)) / 448))
        result[index] = (row / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        result[index] *= scale
    return result


def _nvfp4_oracle(x):
    """A block at a time, by searching all scales and all values in float64."""
    scales = np.arange(0, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    grid = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    result = np.empty(x.shape, np.float64)
    for index in np.ndindex(*x.shape[:-1]):
        row = x[index].astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(np.max(np.abs(row)) / 2688))
        for first in range(0, row.size, 16):
            block = row[first : first + 16] / scale
            unit = scales[np.nonzero(6 * scales >= np.max(np.abs(block)))[0][0]]
            choices = np.sign(block)[:, None] * grid * unit
            nearest = np.argmin(np.abs(block[:, None] - choices), axis=1)  # random blocks have no ties
            result[index][first : first + 16] = choices[np.arange(block.size), nearest] * scale
    return result


@pytest.mark.parametrize("k", [32, 40, 10])
@pytest.mark.parametrize(("format", "oracle"), [("fp8_e4m3", _fp8_oracle), ("nvfp4", _nvfp4_oracle)])
def test_scaled_formats_equal_a_slow_oracle(format, oracle, k):
    x = _rows((3, 5, k))
    np.testing.assert_array_equal(decode(encode(x, format)), oracle(np.asarray(x)))


@pytest.mark.parametrize(("format", "dtype"), [("bf16", jnp.bfloat16), ("fp16", jnp.float16)])
def test_unscaled_formats_are_arrays(format, dtype):
    x = jnp.clip(_rows(), -6e4, 6e4)
    stored = encode(x, format)
    assert isinstance(stored, jax.Array) and stored.dtype == dtype
    np.testing.assert_array_equal(stored, x.astype(dtype))
    np.testing.assert_array_equal(decode(stored), x.astype(dtype).astype(jnp.float32))


def test_fp32_is_the_array_itself():
    x = _rows()
    assert precision.encode(x, "fp32") is x
    np.testing.assert_array_equal(decode(x), x)


@pytest.mark.parametrize("format", LOSSY)
def test_decoded_values_are_kept_by_encode(format):
    """Nearest and with any words: a stored state that does not change keeps its bits."""
    values = decode(encode(jnp.clip(_rows((2, 4, 32)), -6e4, 6e4), format))
    for random in (None, jnp.zeros(values.shape, jnp.uint32), jnp.full(values.shape, 0xFFFFFFFF, jnp.uint32)):
        again = decode(encode(values, format, random))
        if format == "nvfp4":  # the largest of a block may sit below 6 scales; then a finer scale is chosen
            largest = np.max(np.abs(np.asarray(values)).reshape(2, 4, 2, 16), axis=-1)
            change = np.abs(np.asarray(again - values)).reshape(2, 4, 2, 16)
            assert np.all(change <= largest[..., None] / 6)
        else:
            np.testing.assert_array_equal(again, values)


@pytest.mark.parametrize("format", LOSSY)
def test_stochastic_mean_is_the_input(format):
    """4,096 seeds: the mean lies within six standard errors of a draw between two neighbours."""
    draws = 4096
    x = np.asarray(_rows((1, 2, 16), seed=5)[0]) / 10.0**3
    seeds = jnp.arange(draws, dtype=jnp.uint32)
    words = precision.row_random(seeds, 3, jnp.full((draws,), 40, jnp.int32), x.shape)
    batch = jnp.broadcast_to(jnp.asarray(x)[None], (draws, *x.shape))
    values = np.asarray(decode(encode(batch, format, words)), np.float64)
    low, high = values.min(axis=0), values.max(axis=0)
    assert np.all((low <= x) & (x <= high)) and np.mean(low < high) > 0.5
    bound = 6 * (high - low) / 2 / np.sqrt(draws) + 2.0**-17 * (high - low)
    assert np.all(np.abs(values.mean(axis=0) - x) <= bound)


def test_random_words_depend_on_the_row_alone():
    """Same under jit and vmap, alone and in a batch; other seeds, layers, positions and elements differ."""
    seed = jnp.asarray([7, 8, 9], jnp.uint32)
    start = jnp.asarray([5, 6, 5], jnp.int32)
    together = precision.row_random(seed, 2, start, (4, 6))
    assert together.shape == (3, 4, 6) and together.dtype == jnp.uint32
    jitted = jax.jit(precision.row_random, static_argnums=(1, 3))(seed, 2, start, (4, 6))
    np.testing.assert_array_equal(together, jitted)
    alone = precision.row_random(seed[1:2], 2, start[1:2], (4, 6))
    np.testing.assert_array_equal(together[1:2], alone)
    mapped = jax.vmap(lambda s, p: precision.row_random(s[None], 2, p[None], (4, 6))[0])(seed, start)
    np.testing.assert_array_equal(together, mapped)
    others = [precision.row_random(seed, 1, start, (4, 6)), precision.row_random(seed, 2, start + 16, (4, 6))]
    everything = np.concatenate([np.ravel(words) for words in (together, *others)])
    assert np.unique(everything).size == everything.size


@pytest.mark.parametrize("format", LOSSY)
def test_encode_is_the_same_under_jit_vmap_and_batch_position(format):
    x = _rows((4, 3, 32), seed=6) / 100
    words = _words(x.shape)
    expected = encode(x, format, words)
    mapped = jax.vmap(lambda row, word: encode(row, format, word))(x, words)
    moved = encode(jnp.roll(x, 1, axis=0), format, jnp.roll(words, 1, axis=0))
    for one, other, rolled in zip(*map(jax.tree.leaves, (expected, mapped, moved)), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, jnp.roll(rolled, -1, axis=0))


@pytest.mark.parametrize("format", LOSSY)
def test_zeros_are_what_encode_makes_of_zeros(format):
    empty = jax.jit(precision.zeros, static_argnums=(0, 1))((2, 3, 40), format)
    encoded = encode(jnp.zeros((2, 3, 40), jnp.float32), format)
    assert jax.tree.structure(empty) == jax.tree.structure(encoded)
    for one, other in zip(jax.tree.leaves(empty), jax.tree.leaves(encoded), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, 0)
    np.testing.assert_array_equal(decode(empty), 0.0)


B22 = [448.0, 464.0, 465.0, 500.0, -1000.0]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("scale", [2.0**-120, 1e-42, 1e-30, 1.0, 3.7, 1e30, 2.0**118])
def test_b22_finite_stays_finite_and_is_not_clipped(format, scale, stochastic):
    """Half of the widest gap between codes, a whole one where rounding is stochastic."""
    x = np.zeros((3, 16), np.float32)
    x[0, :5], x[1, :5] = np.asarray(B22) * scale, -np.asarray(B22[:1] * 5) * scale
    words = jnp.full(x.shape, 0xFFFFFFFF, jnp.uint32) if stochastic else None
    stored = encode(jnp.asarray(x), format, words)
    assert isinstance(stored, precision.Scaled) and np.all(np.isfinite(stored.scale))
    values = np.asarray(decode(stored), np.float64)
    assert np.all(np.isfinite(values))
    np.testing.assert_array_equal(values[x == 0], 0.0)
    largest = np.max(np.abs(x), axis=-1, keepdims=True).astype(np.float64)
    gap = largest * (2.0 / 8 if format == "fp8_e4m3" else 2.0 / 4)
    limit = gap if stochastic else gap / 2
    bound = numerics.E4M3_BOUND if format == "fp8_e4m3" else numerics.NVFP4_BOUND
    # Magnitudes of less than 2^-126 count as zero.
    assert np.all(np.abs(values - np.clip(x, -bound, bound)) <= np.maximum(limit, 2.0**-126))


@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_b22_infinities_and_nan_are_passed_on_where_they_are(broken):
    x = np.asarray(_rows((2, 48), seed=7)) / 1e3
    bad = x.copy()
    bad[0, 20] = broken
    for format in LOSSY:
        got = np.asarray(decode(encode(jnp.asarray(bad), format)))
        whole = np.asarray(decode(encode(jnp.asarray(np.where(bad == x, x, 0)), format)))
        touched = np.zeros(x.shape, bool)
        touched[0, slice(16, 32) if format == "nvfp4" else 20] = True
        np.testing.assert_array_equal(got[~touched], whole[~touched])
        if format in ("bf16", "fp16"):
            np.testing.assert_array_equal(got[touched], broken)
        else:
            assert np.all(np.isnan(got[touched]))


def test_scales_do_not_depend_on_other_rows():
    x = np.asarray(_rows((4, 2, 32), seed=8))
    others = x.copy()
    others[1:, 1] *= 1e5
    for format in ("fp8_e4m3", "nvfp4"):
        same, changed = encode(jnp.asarray(x), format), encode(jnp.asarray(others), format)
        for one, other in zip(jax.tree.leaves(same), jax.tree.leaves(changed), strict=True):
            np.testing.assert_array_equal(one[:, 0], other[:, 0])
            np.testing.assert_array_equal(one[0], other[0])
        assert np.all(np.asarray(same.scale[1:, 1]) < np.asarray(changed.scale[1:, 1]))


def test_nvfp4_sizes():
    stored = encode(_rows((2, 3, 40)), "nvfp4")
    assert isinstance(stored, precision.Scaled) and stored.block_scale is not None
    assert (stored.codes.shape, stored.block_scale.shape, stored.scale.shape) == (
        (2, 3, 20),
        (2, 3, 3),
        (2, 3),
    )
    with pytest.raises(ValueError, match="even d_state, got 33"):
        encode(_rows((2, 33)), "nvfp4")


def test_unknown_format():
    with pytest.raises(ValueError, match="read must be one of fp32, .*nvfp4, got 'int8'"):
        precision.check_format("read", "int8")
