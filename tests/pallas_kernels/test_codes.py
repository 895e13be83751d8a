"""Codes of low-precision formats against ml_dtypes: every code, rounding boundary and random word."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import numerics

# One program a call instead of one an operation; `test_codes_under_jit_are_the_same` holds both together.
encode_float = jax.jit(numerics.encode_float, static_argnums=1)
encode_e2m1 = jax.jit(numerics.encode_e2m1)
to_lane_order, from_lane_order = jax.jit(numerics.to_lane_order), jax.jit(numerics.from_lane_order)

FORMATS = {
    "bf16": (numerics.BFLOAT16, ml_dtypes.bfloat16, np.uint16),
    "fp16": (numerics.FLOAT16, np.float16, np.uint16),
    "e4m3": (numerics.E4M3, ml_dtypes.float8_e4m3fn, np.uint8),
}
GRID = np.asarray(numerics.E2M1_VALUES)
# All positive finite E4M3 numbers.
SCALES = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _finite(dtype, bits):
    """Every finite value of a format, float32."""
    codes = np.arange(2 ** (8 * np.dtype(bits).itemsize), dtype=bits).view(dtype)
    values = codes.astype(np.float32)
    return values[np.isfinite(values)]


def _boundaries(dtype, bits):
    """Every finite value, the midpoints between neighbours, and the float32 numbers next to both."""
    values = np.unique(_finite(dtype, bits).astype(np.float64))
    middle = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middle]).astype(np.float32)
    lower, upper = np.float32(-np.inf), np.float32(np.inf)
    points = np.concatenate([points, np.nextafter(points, lower), np.nextafter(points, upper)])
    return points[(np.abs(points) >= 2.0**-126) & np.isfinite(points)]


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_rounding_equals_ml_dtypes(name):
    to, dtype, bits = FORMATS[name]
    points = _boundaries(dtype, bits)
    largest = np.asarray(to.largest, bits).view(dtype).astype(np.float32)
    expected = np.clip(points, -largest, largest).astype(dtype).view(bits)
    np.testing.assert_array_equal(encode_float(jnp.asarray(points), to), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_every_finite_code_returns(name):
    to, dtype, bits = FORMATS[name]
    codes = np.arange(2 ** (8 * np.dtype(bits).itemsize), dtype=bits)
    values = codes.view(dtype).astype(np.float32)
    kept = np.isfinite(values) & ((np.abs(values) >= 2.0**-126) | (values == 0))
    np.testing.assert_array_equal(encode_float(jnp.asarray(values[kept]), to), codes[kept])
    words = jnp.full(int(kept.sum()), 0xFFFFFFFF, jnp.uint32)
    np.testing.assert_array_equal(encode_float(jnp.asarray(values[kept]), to, words), codes[kept])


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_not_numbers_and_small_ones(name):
    to, _, _ = FORMATS[name]
    tiny = np.asarray([1, 0x7FFFFF], np.uint32).view(np.float32)
    huge = np.finfo(np.float32).max
    x = jnp.asarray([np.inf, -np.inf, np.nan, huge, -huge, 0.0, -0.0, *tiny, *-tiny], jnp.float32)
    expected = [to.infinity, to.infinity | to.sign, to.nan, to.largest, to.largest | to.sign, 0, to.sign]
    expected += [0, 0, to.sign, to.sign]
    random = jnp.full(x.shape, 0xFFFFFFFF, jnp.uint32)
    np.testing.assert_array_equal(encode_float(x, to), expected)
    np.testing.assert_array_equal(encode_float(x, to, random), expected)


def test_decode_of_every_e4m3_and_e2m1_code():
    codes = np.arange(256, dtype=np.uint8)
    decoded = np.asarray(numerics.decode_e4m3(jnp.asarray(codes, jnp.uint32)))
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.signbit(decoded), codes >= 128)
    codes = np.arange(16, dtype=np.uint8)
    decoded = np.asarray(numerics.decode_e2m1(jnp.asarray(codes, jnp.uint32)))
    np.testing.assert_array_equal(decoded, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(decoded), codes >= 8)


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_over_all_words_is_exactly_unbiased(name):
    """The dropped bits of a normal number decide; a subnormal one drops more, one bit a power of two."""
    to, dtype, bits = FORMATS[name]
    drop = 23 - to.mantissa
    words = jnp.arange(2**drop, dtype=jnp.uint32)
    rng = np.random.default_rng(0)
    for exponent in (to.lowest, to.lowest + 5):
        low = np.float32(2.0**exponent * (1 + rng.integers(2**to.mantissa) / 2.0**to.mantissa))
        share = int(rng.integers(1, 2**drop))
        x = (low.view(np.uint32) + np.uint32(share)).view(np.float32)
        codes = np.asarray(encode_float(jnp.full(words.shape, -x), to, words)).astype(bits)
        values = codes.view(dtype).astype(np.float64)
        assert np.mean(values) == -np.float64(x)
        assert np.unique(values).size == 2


def test_stochastic_rounding_of_subnormal_codes_is_unbiased():
    draws = jnp.arange(2**16, dtype=jnp.uint32)
    for exponent, significand in ((-11, 1.5), (-7, 1.453125), (-12, 1.25)):
        x = significand * 2.0**exponent
        dropped = 20 - 6 - exponent  # the significand's other bits are zeros: 2^16 words tell all
        words = draws << jnp.uint32(dropped - 16)
        codes = encode_float(jnp.full(words.shape, x, jnp.float32), numerics.E4M3, words)
        assert np.mean(np.asarray(codes, np.float64)) * 2.0**-9 == x
    far = jnp.full((1,), 2.0**-22, jnp.float32)  # 2^-13 of the smallest number
    for word, code in ((2**31 - 2**18 - 1, 0), (2**31 - 2**18, 1)):
        drawn = encode_float(far, numerics.E4M3, jnp.full((1,), word, jnp.uint32))
        assert int(drawn[0]) == code


def _round_e2m1(quotient):
    """Nearest code of float64 quotients, ties to even, by distances."""
    distance = np.abs(np.abs(quotient)[..., None] - GRID)
    even_first = np.asarray([0, 2, 4, 6, 1, 3, 5, 7])
    return even_first[np.argmin(distance[..., even_first], axis=-1)]


def test_e2m1_at_scale_one_equals_ml_dtypes():
    points = _boundaries(ml_dtypes.float8_e4m3fn, np.uint8)  # they hold the values and midpoints of E2M1
    points = points[np.abs(points) < 8]
    expected = np.clip(points, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = encode_e2m1(jnp.asarray(points), jnp.ones(points.shape, jnp.float32))
    np.testing.assert_array_equal(codes, expected)


def test_e2m1_boundaries_at_every_scale():
    marks = np.concatenate([GRID, (GRID[1:] + GRID[:-1]) / 2, [7.0]])
    points = (marks * SCALES[:, None].astype(np.float64)).astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, 0), np.nextafter(points, np.float32(np.inf))], axis=1
    )
    expected = _round_e2m1(points.astype(np.float64) / SCALES[:, None])
    scale = jnp.asarray(SCALES[:, None])
    np.testing.assert_array_equal(encode_e2m1(jnp.asarray(points), scale), expected)
    negative = np.asarray(encode_e2m1(jnp.asarray(-points), scale))
    np.testing.assert_array_equal(negative, expected + 8)


def test_e2m1_where_the_scale_is_zero_or_nan():
    x = jnp.asarray([0.0, 1.0, jnp.nan, jnp.inf], jnp.float32)
    for scale in (0.0, jnp.nan):
        np.testing.assert_array_equal(encode_e2m1(x, jnp.full((4,), scale, jnp.float32)), 0)


def test_stochastic_e2m1_over_all_words():
    words = jnp.arange(2**16, dtype=jnp.uint32) << jnp.uint32(16)
    rng = np.random.default_rng(1)
    for scale in (0.001953125, 0.0546875, 13.0, 448.0):
        for step in range(7):
            gap = GRID[step + 1] - GRID[step]
            x = np.float32((GRID[step] + rng.uniform() * gap) * scale)
            codes = encode_e2m1(jnp.full(words.shape, x), jnp.full((1,), scale, jnp.float32), words)
            values = GRID[np.asarray(codes)] * scale
            # 2^16 equal draws at odd multiples of 2^-17.
            assert abs(np.mean(values) - np.float64(x)) <= 2.0**-17 * gap * scale * (1 + 1e-9)
            assert set(np.unique(codes)) <= {step, step + 1}
        exact = jnp.asarray(np.tile(GRID * scale, (2, 1)).astype(np.float32))
        ends = jnp.broadcast_to(jnp.asarray([[0], [0xFFFFFFFF]], jnp.uint32), exact.shape)
        codes = encode_e2m1(exact, jnp.full((1, 1), scale, jnp.float32), ends)
        np.testing.assert_array_equal(codes, np.tile(np.arange(8), (2, 1)))


@pytest.mark.parametrize(("limit", "smallest"), [(448.0, -9), (6.0 * 448.0, -10)])
def test_power_of_two_scale(limit, smallest):
    edges = limit * 2.0 ** np.arange(-150, 118)
    edges = edges[edges < 3.4e38].astype(np.float32)
    largest = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, np.float32(np.inf))])
    largest = largest[largest >= 2.0**-126]
    power_of_two_scale = jax.jit(numerics.power_of_two_scale, static_argnums=(1, 2))
    scale, inverse = map(np.asarray, power_of_two_scale(jnp.asarray(largest), limit, smallest))
    exponent = np.ceil(np.log2(largest.astype(np.float64) / limit))
    np.testing.assert_array_equal(scale, 2.0 ** np.maximum(exponent, -126 - smallest))
    np.testing.assert_array_equal(inverse * scale.astype(np.float64), 1.0)
    empty, inverse = power_of_two_scale(jnp.asarray([0.0, 1e-42], jnp.float32), limit, smallest)
    np.testing.assert_array_equal(empty, 0.0)
    assert np.all(np.isfinite(inverse))


def test_block_scale_is_the_lowest_that_clips_nothing():
    edges = (6 * SCALES).astype(np.float32)
    largest = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges[:-1], np.float32(np.inf))])
    block_scale = jax.jit(numerics.encode_block_scale)
    chosen = np.asarray(block_scale(jnp.asarray(largest)))
    expected = np.searchsorted(6 * SCALES.astype(np.float64), largest.astype(np.float64)) + 1
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_array_equal(block_scale(jnp.asarray([0.0, 1e-30], jnp.float32)), [0, 1])


def test_nibbles_low_is_even():
    codes = jnp.asarray([[1, 2, 3, 15]], jnp.uint8)
    packed = numerics.pack_nibbles(codes)
    np.testing.assert_array_equal(packed, [[0x21, 0xF3]])
    np.testing.assert_array_equal(numerics.unpack_nibbles(packed), codes)


@pytest.mark.parametrize("k", [32, 128])
def test_lane_order_is_a_bijection_on_bits(k):
    """One bit in, one bit out, each at a place of its own; and zero stays zero."""
    bits = np.packbits(np.eye(4 * k, dtype=np.uint8), axis=1, bitorder="little")
    ordered = np.asarray(to_lane_order(jnp.asarray(bits)))
    moved = np.unpackbits(ordered, axis=1, bitorder="little")
    np.testing.assert_array_equal(moved.sum(axis=0), 1)
    np.testing.assert_array_equal(moved.sum(axis=1), 1)
    both = np.random.default_rng(2).integers(0, 256, (3, k // 2), dtype=np.uint8)
    ordered = np.asarray(to_lane_order(jnp.asarray(both)))
    # Linear over bits: the images of the single bits tell the image of everything.
    picked = np.unpackbits(both, axis=1, bitorder="little") @ moved
    np.testing.assert_array_equal(np.unpackbits(ordered, axis=1, bitorder="little"), picked)
    np.testing.assert_array_equal(from_lane_order(jnp.asarray(ordered)), both)


def test_lane_order_unpacks_to_float16_pairs_by_shifts():
    """What a lane does with its words, in NumPy: every code, at the place that a matrix product wants."""
    k = 64
    codes = np.random.default_rng(3).integers(0, 16, k).astype(np.uint8)
    codes[:16] = np.arange(16)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ordered = np.asarray(to_lane_order(numerics.pack_nibbles(jnp.asarray(codes))))
    words = ordered.view(np.uint32).reshape(4, k // 32)
    magnitude, sign = np.uint32(0x0E000E00), np.uint32(0x80008000)
    for lane in range(4):
        for group, word in enumerate(words[lane]):
            pairs = (
                word & (magnitude | sign),
                (word << np.uint32(3)) & (magnitude | sign),
                ((word << np.uint32(6)) & magnitude) | ((word << np.uint32(1)) & sign),
                ((word << np.uint32(9)) & magnitude) | ((word << np.uint32(2)) & sign),
            )
            for position, pair in enumerate(pairs):
                block = 2 * group + position // 2
                first = 16 * block + 4 * lane + 2 * (position % 2)
                read = np.asarray([pair], np.uint32).view(np.float16).astype(np.float32) * 2.0**14
                np.testing.assert_array_equal(read, values[first : first + 2])


def test_lane_order_refuses_other_sizes():
    with pytest.raises(ValueError, match="multiple of 32 elements, got 48"):
        numerics.to_lane_order(jnp.zeros((24,), jnp.uint8))


def test_codes_under_jit_are_the_same():
    x = jnp.asarray(np.random.default_rng(4).normal(size=(4, 16)), jnp.float32)
    words = numerics.hash_uint32(jnp.arange(64, dtype=jnp.uint32).reshape(4, 16))
    scale = jnp.full((4, 1), 0.40625, jnp.float32)

    def run(x, words):
        return (
            *(numerics.encode_float(x, to, words) for to, _, _ in FORMATS.values()),
            numerics.encode_e2m1(x, scale, words),
            numerics.decode_e4m3(numerics.encode_float(x, numerics.E4M3)),
        )

    for one, other in zip(run(x, words), jax.jit(run)(x, words), strict=True):
        np.testing.assert_array_equal(one, other)
