"""Codes by lanes, run in NumPy, against the portable encoder, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import encoding, numerics
from replayssm_jax import precision
from tests.pallas_kernels.test_coded import NumpyCodeLanes


def states():
    rng = np.random.default_rng(0)
    yield rng.standard_normal((64, 128))
    yield rng.standard_normal((64, 64)) * np.exp(8 * rng.standard_normal((64, 1)))
    # Ties of codes and scales; numbers of every exponent; zeros, infinities, NaN, subnormal ones.
    yield rng.integers(-28, 29, (64, 128)) * 0.25 * 2.0 ** rng.integers(-3, 4, (64, 1))
    bits = rng.integers(0, 2**32, (64, 128), dtype=np.uint64).astype(np.uint32)
    kinds = bits.view(np.float32).copy()
    kinds[:16][~np.isfinite(kinds[:16])] = 1
    kinds[1], kinds[2, :16], kinds[3, 5], kinds[4, 9], kinds[5] = 0, 0, np.inf, np.nan, 1e-40
    kinds[6] = np.where(rng.random(128) < 0.5, -0.0, 3.4e38)
    kinds[7], kinds[8] = 2.0**-126, rng.standard_normal(128) * 2.0**-120
    kinds[9], kinds[9, 0] = 2.0**-30, 1e38
    yield kinds
    yield rng.standard_normal((64, 128)) * np.exp(12 * rng.standard_normal((64, 128)))


@pytest.mark.parametrize("number", range(5))
def test_nvfp4_by_lanes_has_the_portable_bits(number):
    state = np.float32(list(states())[number])
    columns = state.shape[1]
    stored = jax.jit(lambda x: precision.in_order(precision.encode(x, "nvfp4"), lanes=True))(
        jnp.asarray(state)
    )
    codes, scale = np.zeros((64, columns // 2), np.uint8), np.zeros(64, np.float32)
    blocks = np.zeros((64, columns // 16), np.uint8)
    lane = np.arange(32)
    for warp in range(4):
        rows = [16 * warp + lane // 4 + 8 * half for half in range(2)]
        fours = [
            [state[row, 16 * b + 4 * (lane % 4) + e] for e in range(4)]
            for b in range(columns // 16)
            for row in rows
        ]
        with np.errstate(all="ignore"):
            encoding.write_nvfp4(NumpyCodeLanes(warp), fours, codes, scale, blocks)
    np.testing.assert_array_equal(scale, stored.scale)
    np.testing.assert_array_equal(blocks, stored.block_scale)
    np.testing.assert_array_equal(codes, stored.codes)


FLOATS = [("fp8_e4m3", False), ("fp8_e4m3", True), ("fp16", True), ("bf16", True)]


@pytest.mark.parametrize("number", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 1, 2, 4))])
@pytest.mark.parametrize(("format", "stochastic"), FLOATS)
def test_codes_of_floats_by_lanes_are_the_portable_ones(format, stochastic, number):
    state = np.float32(list(states())[number])
    columns, hashed, first = state.shape[1], 0x9ABCDEF0, 12345
    random = None
    if stochastic:
        places = first + np.arange(state.size, dtype=np.uint32).reshape(state.shape)
        random = numerics.hash_on(jnp.uint32(hashed), jnp.asarray(places))
    stored = jax.jit(precision.encode, static_argnums=1)(jnp.asarray(state), format, random)
    scaled = format == "fp8_e4m3"
    wanted = np.asarray(stored.codes) if scaled else np.asarray(stored).view(np.uint16)
    to = {"fp8_e4m3": numerics.E4M3, "fp16": numerics.FLOAT16, "bf16": numerics.BFLOAT16}[format]
    values = np.asarray(precision.decode(stored))
    lane = np.arange(32)
    for warp in range(4):
        rows = [16 * warp + lane // 4 + 8 * half for half in range(2)]
        at = [
            (row, [16 * b + 4 * (lane % 4) + e for e in range(4)])
            for b in range(columns // 16)
            for row in rows
        ]
        fours = [[state[row, column] for column in four] for row, four in at]
        words = encoding.Words(np.int64(hashed), np.int64(first)) if stochastic else None
        with np.errstate(all="ignore"):
            codes, kept, scales = encoding.encode_rows(NumpyCodeLanes(warp), fours, columns, to, words)
        for (row, four), packed, numbers in zip(at, codes, kept, strict=True):
            both = np.stack([x.astype(np.uint32) for x in packed], axis=1).view(wanted.dtype)
            np.testing.assert_array_equal(both, np.stack([wanted[row, column] for column in four], axis=1))
            for column, number_ in zip(four, numbers, strict=True):
                np.testing.assert_array_equal(number_, values[row, column])
        if scaled:
            for row, scale in zip(rows, scales, strict=True):
                np.testing.assert_array_equal(scale, np.asarray(stored.scale)[row])
