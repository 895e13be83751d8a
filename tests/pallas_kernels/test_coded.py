"""The program that reads coded tiles, its lanes run in NumPy, against float64 on the decoded state."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import coded, numerics, segments
from pallas_kernels.pipeline import NEW_SLOTS, Geometry
from replayssm_jax import precision
from tests.pallas_kernels.test_blocks import NumpyLanes


class NumpyCodeLanes(NumpyLanes):
    """The operations of `CodeLanes` on arrays of 32 lanes."""

    across = staticmethod(lambda x, distance: x[np.arange(32) ^ distance])
    larger = staticmethod(np.maximum)
    join = staticmethod(np.bitwise_or)
    policy = staticmethod(lambda: None)

    def bits(self, word, shift, mask):
        return (word << shift) & mask

    def words(self, ref, place, count):
        assert not np.any(place % (4 * count))
        flat = ref.reshape(-1).view(np.uint32).astype(np.int64)
        return [flat[place // 4 + i] for i in range(count)]

    def short(self, ref, place):
        assert not np.any(place % 2)
        return ref.reshape(-1).view(np.uint16).astype(np.int64)[place // 2]

    def elements(self, ref, place, count):
        assert not np.any(place % count)
        return [ref.reshape(-1)[place + i].astype(np.float32) for i in range(count)]

    def put(self, ref, place, values, condition=None):
        there = np.full(32, True) if condition is None else condition
        for i, value in enumerate(values):
            ref.reshape(-1)[(place + i)[there]] = value[there].astype(ref.dtype)

    def put_pair(self, ref, place, values, policy):
        assert not np.any(place % 2)
        self.put(ref, place, values)

    def _words(self, pairs):
        return pairs.view(np.uint32).reshape(-1).astype(np.int64)

    def e4m3_halves(self, word):
        codes = word.astype(np.uint32).view(np.uint8).reshape(32, 4).view(ml_dtypes.float8_e4m3fn)
        halves = codes.astype(np.float16)
        return [self._words(np.ascontiguousarray(halves[:, i : i + 2])) for i in (0, 2)]

    def _halves(self, word):
        return word.astype(np.uint32).view(np.float16).reshape(32, 2).astype(np.float32)

    def e4m3_reals(self, short):
        both = self._halves(self.e4m3_halves(short)[0])
        return [both[:, 0], both[:, 1]]

    def half(self, x):
        return x.astype(np.float16).astype(np.float32)

    def exponent(self, x):
        return x.astype(np.float32).view(np.uint32).astype(np.int64) >> 23 & 0xFF

    def power(self, exponent):
        assert np.all((exponent >= -126) & (exponent <= 127))
        return np.ldexp(np.float32(1), exponent).astype(np.float32)

    number = staticmethod(lambda word: word.astype(np.uint32).view(np.float32))
    word = staticmethod(lambda x: x.astype(np.float32).view(np.uint32).astype(np.int64))
    real_of = staticmethod(lambda number: number.astype(np.float32))
    shifted = staticmethod(lambda word, count: word >> count)
    bit = staticmethod(lambda word, place: word >> place & 1)
    above = staticmethod(np.greater)
    moved = staticmethod(lambda word, count: (word << count if count > 0 else word >> -count) & 0xFFFFFFFF)
    masked = staticmethod(np.bitwise_and)
    smaller = staticmethod(np.minimum)
    negated = staticmethod(np.logical_not)
    shifted_by = staticmethod(lambda word, count: (word & 0xFFFFFFFF) >> count)
    shifted_left = staticmethod(lambda word, count: word << count)
    choose = staticmethod(lambda condition, count, yes, no: yes() if np.any(condition) else no())
    magnitude = staticmethod(np.abs)
    reciprocal = staticmethod(lambda x: np.float32(1) / x)
    any = staticmethod(lambda condition: bool(np.any(condition)))
    when = staticmethod(lambda condition, yes, no: yes() if condition else no())
    reaches = staticmethod(np.greater_equal)

    def e4m3_codes(self, four):
        largest = np.float32(448)
        codes = [np.clip(x, -largest, largest).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in four]
        return sum(code.astype(np.int64) << 8 * i for i, code in enumerate(codes))

    def half_reals(self, word):
        both = self._halves(word)
        return [both[:, 0], both[:, 1]]

    def put_byte(self, ref, place, value):
        ref.reshape(-1)[place] = value

    def put_words(self, ref, place, words, condition=None):
        there = np.full(32, True) if condition is None else condition
        for i, word in enumerate(words):
            ref.reshape(-1).view(np.uint32)[(place // 4 + i)[there]] = word[there] & 0xFFFFFFFF

    def product(self, total, left, right, kind):
        assert kind == "f16"
        return HalfLanes(0).product(total, left, right)


class HalfLanes(NumpyLanes):
    """`NumpyLanes` whose 16-bit numbers are float16."""

    def low(self, packed):
        return (packed & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)


@functools.partial(jax.jit, static_argnums=1)
def _encoded(state, format):
    stored = precision.encode(state, format)
    codes = numerics.to_lane_order(stored.codes) if format == "nvfp4" else stored.codes
    return codes, stored.block_scale, stored.scale, precision.decode(stored)


def encoded(state, format):
    """Codes as the kernels keep them, block scales or None, row scales; and their values."""
    return jax.tree.map(np.asarray, _encoded(jnp.asarray(state, jnp.float32), format))


CASES = [
    ("nvfp4", 1, jnp.bfloat16, True, 64, 128),
    ("nvfp4", 2, jnp.bfloat16, True, 80, 128),
    ("nvfp4", 3, jnp.float32, True, 64, 64),
    ("nvfp4", 4, jnp.bfloat16, False, 64, 128),
    ("nvfp4", 8, jnp.bfloat16, True, 32, 128),
    ("fp8_e4m3", 1, jnp.bfloat16, True, 64, 128),
    ("fp8_e4m3", 2, jnp.bfloat16, False, 128, 128),
    ("fp8_e4m3", 5, jnp.float32, True, 80, 256),
]


@pytest.mark.parametrize(("format", "tokens", "dtype", "shared", "head_dim", "d_state"), CASES)
def test_tiles_of_codes_are_read_exactly(format, tokens, dtype, shared, head_dim, d_state):
    rng = np.random.default_rng(tokens)
    group_heads = 320 // head_dim if head_dim == 80 else 256 // head_dim
    batch, groups, ring, heads = 2, 2, 16, 2 * group_heads
    geo = Geometry(batch, groups, heads, head_dim, d_state, ring, tokens)
    row, group, begin, length, offset = 1, 1, 13, 9, 3
    parts = coded.reader_parts(dtype if shared else jnp.float32)
    step = coded.Step(
        codes=coded.Codes(format, d_state),
        readers=coded.Readers(tokens, parts),
        geometry=geo,
        tiles=geo.tiles - 1 if head_dim != 32 else geo.tiles,
        warps=8,
        weight_heads=geo.head_slots,
        shared=shared,
    )
    first = geo.tiles - step.tiles
    state = rng.standard_normal((step.tiles * 64, d_state)) * np.exp(
        3 * rng.standard_normal((step.tiles * 64, 1))
    )
    codes, scales, row_scales, values = encoded(state, format)
    sources = rng.standard_normal((tokens, 1 if shared else group_heads, d_state)) * 1e-4
    kind = np.float32 if dtype == jnp.float32 or not shared else ml_dtypes.bfloat16
    sources = sources.astype(kind)
    x = rng.standard_normal((ring + tokens, step.tiles, 64)).astype(ml_dtypes.bfloat16)
    weights = rng.standard_normal((tokens, geo.head_slots, geo.slots)).astype(np.float32)
    ages = (np.arange(ring) - begin) % ring
    weights[:, :, :ring][:, :, ages >= length] = 0
    for t in range(tokens):
        weights[t, :, ring + t + 1 :] = 0
    head_scale = rng.standard_normal((tokens, geo.head_slots)).astype(np.float32)
    buffers = {
        "codes": codes,
        "scales": scales,
        "row_scales": row_scales,
        "values": x,
        "weights": weights,
        "head_scale": head_scale if shared else None,
        "packed": np.zeros((1 if shared else group_heads, tokens * parts, d_state), np.float16),
        "factors": np.zeros((1 if shared else group_heads, tokens), np.float32),
        "sums": np.zeros((8, tokens, 64), np.float32),
        "out": np.zeros((batch, tokens, groups, geo.tiles, 64), np.float32),
        "ring": np.zeros((batch * groups, ring, geo.tiles, 64), ml_dtypes.bfloat16),
    }
    cursors = tuple(np.full(32, c) for c in (row, group, first, begin, length, offset))
    for warp in range(4):
        coded.pack_readers(NumpyCodeLanes(warp), step, sources, buffers["packed"], buffers["factors"])
    for warp in range(8):
        coded.read_tiles(NumpyCodeLanes(warp % 4), step, buffers, cursors, warp // 4 * 4)

    rows = np.arange(step.tiles * 64)
    head = (first * 64 + rows) // head_dim
    wide = sources.astype(np.float64)
    x64 = x.astype(np.float64).reshape(ring + tokens, -1)
    for t in range(tokens):
        reader = wide[t, 0][None] if shared else wide[t, head]
        read = np.sum(values.astype(np.float64) * reader, axis=1)
        if shared:
            read = read * head_scale[t, offset + head]
        added = np.einsum("rs,sr->r", weights[t, offset + head, : ring + tokens].astype(np.float64), x64)
        got = buffers["out"][row, t, group, first:].reshape(-1)
        error = np.sqrt(np.mean((got - read - added) ** 2) / np.mean((read + added) ** 2))
        assert error < 3e-7
        slot = (begin + length + t) % ring
        np.testing.assert_array_equal(buffers["ring"][row * groups + group, slot, first:], x[ring + t])
    assert NEW_SLOTS >= tokens
    untouched = np.delete(buffers["out"].reshape(batch, tokens, groups, -1), row, axis=0)
    assert not untouched.any()


@pytest.mark.parametrize(
    ("tokens", "ring", "begin", "length", "d_state", "group_heads"),
    [(1, 24, 20, 16, 128, 16), (4, 24, 3, 0, 128, 12), (8, 56, 50, 48, 64, 32), (2, 16, 15, 5, 192, 4)],
)
def test_mamba2_coefficients_by_lanes(tokens, ring, begin, length, d_state, group_heads):
    rng = np.random.default_rng(tokens)
    geo = Geometry(1, 1, group_heads, 64, d_state, ring, tokens)
    keys = rng.standard_normal((geo.slots, d_state)).astype(ml_dtypes.bfloat16)
    keys[ring + tokens :] = np.nan
    readers = rng.standard_normal((tokens, d_state)).astype(ml_dtypes.bfloat16)
    dt = rng.uniform(0.001, 0.3, (geo.slots, geo.head_slots)).astype(np.float32)
    dt[:, 0] *= 1000
    dt[ring + tokens :] = np.nan
    constants = np.stack([-rng.uniform(0.5, 4, geo.head_slots), rng.standard_normal(geo.head_slots)])
    constants = constants.astype(np.float32)
    products = np.zeros((2 * tokens, geo.slots), np.float32)
    weights = np.full((tokens * geo.head_slots, geo.slots), np.nan, np.float32)
    scale = np.full((tokens, geo.head_slots), np.nan, np.float32)
    for warp in range(4):
        segments.key_products(NumpyLanes(warp), geo, keys, readers, products)
    refs = dt, constants, products, weights, scale
    cursors = np.full(32, begin), np.full(32, length)
    for warp in range(4):
        segments.decay_weights(NumpyLanes(warp), geo, refs, *cursors)

    order = [(begin + i) % ring for i in range(length)] + [ring + t for t in range(tokens)]
    a, d = constants.astype(np.float64)
    logs = dt.astype(np.float64)[order] * a
    dots = keys.astype(np.float64)[order] @ readers.astype(np.float64).T
    weights = weights.reshape(tokens, geo.head_slots, geo.slots)
    for t in range(tokens):
        seen = length + t + 1
        tails = np.stack([logs[i + 1 : seen].sum(axis=0) for i in range(seen)])
        wanted = np.zeros((geo.head_slots, ring + tokens))
        wanted[:, order[:seen]] = (dt.astype(np.float64)[order[:seen]] * np.exp(tails)).T * dots[:seen, t]
        wanted[:, ring + t] += d
        np.testing.assert_allclose(weights[t, :, : ring + tokens], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(weights[t, :, ring + t + 1 :], 0)
        np.testing.assert_allclose(scale[t], np.exp(logs[:seen].sum(axis=0)), rtol=1e-5, atol=1e-30)
