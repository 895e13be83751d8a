"""Numerics that the kernels and the portable backend share: gates, key normalisation, counter-based hash, and
the codes of low-precision formats.

The codes are made by integer arithmetic on bit patterns, exact products and comparisons: casts, divisions and
subnormal float32 numbers, which backends treat differently, do not occur, so all of them give the same bits.
"""

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.parts import Gate

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
HASH_STEP = 0x9E3779B9  # 2^32 over the golden ratio
_MIX_FIRST = 0x21F0AAAD
_MIX_SECOND = 0x735A2D97


def _float32(x: jax.Array) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)


def _like(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcasts a float32 copy of `parameter` over the leading axes of `x`."""
    return jnp.broadcast_to(_float32(parameter), x.shape)


def series_log1p(x: jax.Array) -> jax.Array:
    """log(1 + x) of x >= 0 where there is no log1p, to 3e-7 of itself; by a series for small x."""
    s = x / (2.0 + x)
    square = s * s
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9))))
    return jnp.where(x < 0.25, 2.0 * s * series, jnp.log(1.0 + x))


def softplus(x: jax.Array, log1p: Callable = jnp.log1p) -> jax.Array:
    """Returns log(1 + exp(x)), the identity above 20, in the shape and dtype of `x`."""
    return jnp.where(x > 20.0, x, log1p(jnp.exp(jnp.minimum(x, 20.0))))


def mamba2_dt(
    raw: jax.Array, bias: jax.Array, limit: tuple[float, float], log1p: Callable = jnp.log1p
) -> jax.Array:
    """Returns the step size of Mamba-2, clip(softplus(raw + bias), *limit).

    Args:
      raw: [..., H], any float dtype.
      bias: [H], any float dtype.
      limit: lowest and highest step size; the highest may be infinite.
      log1p: for `softplus`.

    Returns:
      float32 [..., H]. Source: Mamba-2 (arXiv 2405.21060), section 7; the limit is `time_step_limit`.
    """
    low, high = (min(float(bound), _FLOAT32_MAX) for bound in limit)
    raw = _float32(raw)
    return jnp.clip(softplus(raw + _like(bias, raw), log1p), low, high)


def gated_delta_log_decay(
    a: jax.Array, a_log: jax.Array, dt_bias: jax.Array, log1p: Callable = jnp.log1p
) -> jax.Array:
    """Returns the log decay of Gated DeltaNet, -exp(A_log) softplus(a + dt_bias).

    Args:
      a: [..., H], any float dtype.
      a_log, dt_bias: [H], any float dtype.
      log1p: for `softplus`.

    Returns:
      float32 [..., H], never positive. Source: Gated Delta Networks (arXiv 2412.06464), section 3.
    """
    a = _float32(a)
    return -jnp.exp(_like(a_log, a)) * softplus(a + _like(dt_bias, a), log1p)


def gate_value(
    gate: Gate, raw: jax.Array, constants: Sequence[jax.Array], log1p: Callable = jnp.log1p
) -> jax.Array:
    """A gate, float32 [..., H], from its channels of a projection, raw [..., H], and constants [H].

    log1p: for `softplus`.
    """
    if gate.function == "sigmoid":
        return jax.nn.sigmoid(_float32(raw))
    if gate.function == "gated_delta_log_decay":
        a_log, dt_bias = constants
        return gated_delta_log_decay(raw, a_log, dt_bias, log1p)
    if gate.function == "mamba2_dt" and gate.limit is not None:
        (bias,) = constants
        return mamba2_dt(raw, bias, gate.limit, log1p)
    raise ValueError(f"there is no gate {gate!r}.")


def kimi_delta_log_decay(
    raw: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None = None
) -> jax.Array:
    """Returns the log decay of every key channel of Kimi Delta Attention, softplus or bounded.

    Args:
      raw: [..., H, K], any float dtype.
      a_log: [H], any float dtype.
      dt_bias: [H, K], any float dtype.
      lower_bound: None for -exp(A_log) softplus(raw + dt_bias), or a negative number for
        lower_bound * sigmoid(exp(A_log) (raw + dt_bias)).

    Returns:
      float32 [..., H, K], never positive. Source: Kimi Linear (arXiv 2510.26692), section 3.
    """
    raw = _float32(raw)
    shifted = raw + _like(dt_bias, raw)
    rate = jnp.exp(_like(jnp.expand_dims(a_log, -1), raw))
    if lower_bound is None:
        return -rate * softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def l2_normalize(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Returns x / sqrt(sum(x^2) + eps) over the last axis, float32 [..., K] for `x` of any float dtype."""
    x = _float32(x)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def mixed(x: Any, shifted: Callable[[Any, int], Any]) -> Any:
    """Mixes the bits of 32-bit `x` one to one (an xorshift-multiply with measured low avalanche bias).

    shifted(x, n): x >> n, zeros from above.
    """
    x = (x ^ shifted(x, 16)) * _MIX_FIRST
    x = (x ^ shifted(x, 15)) * _MIX_SECOND
    return x ^ shifted(x, 15)


def _mix(x: jax.Array) -> jax.Array:
    return mixed(x, lambda x, count: x >> jnp.uint32(count))


def _word(value: jax.Array | int) -> jax.Array:
    if isinstance(value, int):
        return jnp.uint32(value & 0xFFFFFFFF)
    return jnp.asarray(value).astype(jnp.uint32)


def hash_uint32(*words: jax.Array | int) -> jax.Array:
    """Returns a counter-based hash of integer words: the same words give the same bits on every backend.

    Args:
      words: integers or integer arrays of shapes that broadcast, each taken modulo 2^32. The word that varies
        fastest goes last: then the others are mixed before the broadcast.

    Returns:
      uint32 of the broadcast shape.
    """
    return hash_on(jnp.uint32(HASH_STEP), *words)


def hash_on(state: jax.Array, *words: jax.Array | int) -> jax.Array:
    """Returns `hash_uint32` of more words, from its value `state` for those before."""
    for value in words:
        word = _word(value)
        shape = jnp.broadcast_shapes(state.shape, word.shape)
        state = _mix(jnp.broadcast_to(state, shape) ^ jnp.broadcast_to(word, shape)) + jnp.uint32(HASH_STEP)
    return state


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A binary float format narrower than float32.

    mantissa: bits after the point. lowest: exponent of the smallest normal number. largest: code of the
    largest finite number. infinity, nan: codes; infinity is that of NaN in a format that has none. sign: its
    bit.
    """

    mantissa: int
    lowest: int
    largest: int
    infinity: int
    nan: int
    sign: int


BFLOAT16 = FloatFormat(mantissa=7, lowest=-126, largest=0x7F7F, infinity=0x7F80, nan=0x7FC0, sign=0x8000)
FLOAT16 = FloatFormat(mantissa=10, lowest=-14, largest=0x7BFF, infinity=0x7C00, nan=0x7E00, sign=0x8000)
E4M3 = FloatFormat(mantissa=3, lowest=-6, largest=0x7E, infinity=0x7F, nan=0x7F, sign=0x80)

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Products of scales and codes up to these stay below 2^128, whichever way they were rounded.
E4M3_BOUND = E4M3_MAX * 2.0**119
NVFP4_BOUND = E2M1_MAX * E4M3_MAX * 2.0**116
# Exponents of the smallest numbers above zero.
SMALLEST_E4M3, SMALLEST_E2M1 = -9, -1
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INFINITY = 0x7F800000
_SMALLEST_NORMAL = -126


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _real(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def float32_code(number: float) -> int:
    """Bit pattern of a float32 number that is known when the program is built."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent, float32, for int32 exponents in -126..127."""
    return _real((exponent + jnp.int32(127)).astype(jnp.uint32) << jnp.uint32(23))


def bounded(x: jax.Array, limit: float) -> jax.Array:
    """Returns float32 `x` with zeros for magnitudes below 2^-126, and `limit` for finite ones above it.

    Signs, infinities and NaN stay.
    """
    bits = _bits(x)
    sign, magnitude = bits & jnp.uint32(0x80000000), bits & jnp.uint32(0x7FFFFFFF)
    largest = jnp.uint32(float32_code(limit))
    kept = jnp.where(magnitude < jnp.uint32(_INFINITY), jnp.minimum(magnitude, largest), magnitude)
    return _real(sign | jnp.where(magnitude < jnp.uint32(0x800000), jnp.uint32(0), kept))


def finite_magnitude(x: jax.Array) -> jax.Array:
    """Returns |x|, float32, with 0 in the place of infinities, NaN and magnitudes below 2^-126."""
    magnitude = _bits(x) & jnp.uint32(0x7FFFFFFF)
    kept = (magnitude >= jnp.uint32(0x800000)) & (magnitude < jnp.uint32(_INFINITY))
    return _real(jnp.where(kept, magnitude, jnp.uint32(0)))


def not_finite(x: jax.Array) -> jax.Array:
    """Whether float32 `x` is infinite or NaN."""
    return (_bits(x) & jnp.uint32(_INFINITY)) == jnp.uint32(_INFINITY)


def encode_float(x: jax.Array, to: FloatFormat, random: jax.Array | None = None) -> jax.Array:
    """Returns the codes of float32 `x` in a narrower format, uint32 of the shape of `x`.

    Rounds to nearest even, or stochastically with uint32 `random`, uniform words of the shape of `x`: the
    mean over all words is then `x`, for magnitudes up to the format's largest, but for less than 2^-31 of
    its smallest number. Finite numbers saturate; inputs below 2^-126 count as zero.
    """
    bits = _bits(x)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    exponent = (magnitude >> jnp.uint32(23)).astype(jnp.int32)
    significand = (magnitude & jnp.uint32(0x7FFFFF)) | jnp.uint32(0x800000)
    significand = jnp.where(exponent > 0, significand, jnp.uint32(0))

    above = exponent - jnp.int32(to.lowest + 127)
    drop = jnp.int32(23 - to.mantissa) + jnp.maximum(-above, jnp.int32(0))
    beyond = jnp.clip(drop - jnp.int32(31), 0, 31).astype(jnp.uint32)
    shift = jnp.minimum(drop, jnp.int32(31)).astype(jnp.uint32)
    significand = significand >> beyond
    one = jnp.uint32(1)
    if random is None:
        odd = (significand >> shift) & one
        added = (one << (shift - one)) - one + odd
    else:
        added = random & ((one << shift) - one)
    # A carry out of the significand raises the exponent: the code is one number.
    code = (significand + added) >> shift
    code = code + (jnp.maximum(above, jnp.int32(0)).astype(jnp.uint32) << jnp.uint32(to.mantissa))
    code = jnp.minimum(code, jnp.uint32(to.largest))
    code = jnp.where(magnitude == jnp.uint32(_INFINITY), jnp.uint32(to.infinity), code)
    code = jnp.where(magnitude > jnp.uint32(_INFINITY), jnp.uint32(to.nan), code)
    return code | jnp.where(bits >> jnp.uint32(31) == one, jnp.uint32(to.sign), jnp.uint32(0))


def decode_e4m3(code: jax.Array) -> jax.Array:
    """Returns the float32 values of E4M3 codes, uint32 in 0..255."""
    magnitude = code & jnp.uint32(0x7F)
    normal = _real((magnitude << jnp.uint32(20)) + jnp.uint32(120 << 23))
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-9)
    value = jnp.where(magnitude < jnp.uint32(8), subnormal, normal)
    value = jnp.where(magnitude == jnp.uint32(E4M3.nan), jnp.float32(jnp.nan), value)
    return _real(_bits(value) | ((code & jnp.uint32(E4M3.sign)) << jnp.uint32(24)))


def power_of_two_scale(largest: jax.Array, limit: float, smallest: int) -> tuple[jax.Array, jax.Array]:
    """Returns the lowest power of two, `scale`, with largest <= limit * scale, and its inverse; float32.

    largest: float32, finite and not negative; below 2^-126 the scale is 0, the inverse finite.
    smallest: the exponent of the format's smallest number; times the scale it is at least 2^-126.
    """
    bits = _bits(largest)
    limit_bits = float32_code(limit)
    exponent = (bits >> jnp.uint32(23)).astype(jnp.int32) - jnp.int32(limit_bits >> 23)
    over = (bits & jnp.uint32(0x7FFFFF)) > jnp.uint32(limit_bits & 0x7FFFFF)
    exponent = jnp.maximum(exponent + over.astype(jnp.int32), jnp.int32(_SMALLEST_NORMAL - smallest))
    empty = bits < jnp.uint32(0x800000)
    return jnp.where(empty, jnp.float32(0.0), _power_of_two(exponent)), _power_of_two(-exponent)


def encode_block_scale(largest: jax.Array) -> jax.Array:
    """Returns the E4M3 code, uint32, of the lowest scale s with largest <= 6 s, for `largest` in 0..2688.

    Rounding up clips no value of the block, which would bias stochastic rounding, and gives no block that
    holds anything a scale of 0.
    """
    sixth = largest * jnp.float32(1.0 / 6.0)
    below = encode_float(sixth, E4M3, random=jnp.zeros_like(sixth, dtype=jnp.uint32))  # towards zero
    reached = jnp.float32(E2M1_MAX) * decode_e4m3(below)
    return below + (reached < largest).astype(jnp.uint32)


def encode_e2m1(x: jax.Array, scale: jax.Array, random: jax.Array | None = None) -> jax.Array:
    """Returns the E2M1 codes of x / scale, uint32 in 0..15 with the sign at bit 3.

    Rounds to nearest even, or stochastically with uint32 `random`, whose mean over all words is x / scale but
    for 2^-17 of the gap between codes. Saturates at 6. Nothing is divided: `x` is compared with multiples of
    the scale, which are exact.

    Args:
      x: float32.
      scale: float32 of a shape that broadcasts to that of `x`, a value of E4M3 and not negative. Where it is
        NaN or 0 the magnitude is 0.
      random: None, or uniform words of the shape of `x`.
    """
    magnitude = finite_magnitude(x)
    scale = jnp.broadcast_to(scale, x.shape)
    code = jnp.zeros_like(magnitude, dtype=jnp.uint32)
    if random is not None:
        draw = ((random >> jnp.uint32(16)) * jnp.uint32(2) + jnp.uint32(1)).astype(jnp.int32)
        share = draw.astype(jnp.float32) * jnp.float32(2.0**-17)
    for step, (low, high) in enumerate(zip(E2M1_VALUES, E2M1_VALUES[1:], strict=False)):
        if random is not None:
            up = magnitude > (jnp.float32(low) + share * jnp.float32(high - low)) * scale
        elif step % 2 == 0:
            up = magnitude > jnp.float32((low + high) / 2) * scale
        else:
            up = magnitude >= jnp.float32((low + high) / 2) * scale
        code = code + up.astype(jnp.uint32)
    code = jnp.where(scale > 0.0, code, jnp.uint32(0))
    return code | ((_bits(x) >> jnp.uint32(28)) & jnp.uint32(8))


def decode_e2m1(code: jax.Array) -> jax.Array:
    """Returns the float32 values of E2M1 codes, uint32 in 0..15."""
    magnitude = code & jnp.uint32(7)
    normal = _real((magnitude << jnp.uint32(22)) + jnp.uint32(126 << 23))
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * jnp.float32(0.5)
    value = jnp.where(magnitude < jnp.uint32(2), subnormal, normal)
    return _real(_bits(value) | ((code & jnp.uint32(8)) << jnp.uint32(28)))


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """Returns uint8 [..., K/2] of codes in 0..15, integers [..., K]: the even one in the low nibble."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << jnp.uint8(4))


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """Returns the codes, uint8 [..., K], of uint8 [..., K/2]."""
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


# Bits of four codes in 16: the magnitudes, then the signs. Masked shifts put a code's sign, exponent and
# mantissa bit where a float16 has them.
MAGNITUDE_BITS = (9, 6, 3, 0)
SIGN_BITS = (15, 12, 14, 13)


def _lane_order(k: int) -> tuple[int, ...]:
    """The axes of K elements in groups of 32: group, block, lane of the quad, pair, element of the pair."""
    if k % 32:
        raise ValueError(f"the kernels' order of E2M1 codes needs a multiple of 32 elements, got {k}")
    return k // 32, 2, 4, 2, 2


def to_lane_order(packed: jax.Array) -> jax.Array:
    """Returns packed E2M1 codes in the order in which the kernels' lanes hold them.

    Lane t of a quad holds K/8 consecutive bytes: a 32-bit word for every 32 elements, with elements
    4 t .. 4 t + 3 of two blocks of 16. Its low half has the even ones, the high half the odd ones, two a
    block; a half is four codes with the bits of `MAGNITUDE_BITS` and `SIGN_BITS`. Shifts and masks make
    each position a pair of float16 of one block, as a matrix product of 16 elements takes it.

    Args:
      packed: uint8 [..., K/2] from `pack_nibbles`, K a multiple of 32.

    Returns:
      uint8 [..., K/2], a permutation of the bits.
    """
    *rows, half = packed.shape
    codes = unpack_nibbles(packed).reshape(*rows, *_lane_order(2 * half)).astype(jnp.uint32)
    word = jnp.zeros((*rows, half // 16, 4, 2), jnp.uint32)
    for position in range(4):
        code = codes[..., position // 2, :, position % 2, :]
        word = word | ((code & jnp.uint32(7)) << jnp.uint32(MAGNITUDE_BITS[position]))
        word = word | ((code >> jnp.uint32(3)) << jnp.uint32(SIGN_BITS[position]))
    word = jnp.swapaxes(word, -3, -2)
    both = jnp.stack([word & jnp.uint32(0xFF), word >> jnp.uint32(8)], axis=-1)
    return both.astype(jnp.uint8).reshape(packed.shape)


def from_lane_order(ordered: jax.Array) -> jax.Array:
    """Returns packed codes [..., K/2] from the order of `to_lane_order`."""
    *rows, half = ordered.shape
    groups = _lane_order(2 * half)[0]
    both = ordered.reshape(*rows, 4, groups, 2, 2).astype(jnp.uint32)
    word = jnp.swapaxes(both[..., 0] | (both[..., 1] << jnp.uint32(8)), -3, -2)
    codes = [
        ((word >> jnp.uint32(magnitude)) & jnp.uint32(7))
        | (((word >> jnp.uint32(sign)) & jnp.uint32(1)) << jnp.uint32(3))
        for magnitude, sign in zip(MAGNITUDE_BITS, SIGN_BITS, strict=True)
    ]
    blocks = jnp.stack([jnp.stack(codes[:2], axis=-2), jnp.stack(codes[2:], axis=-2)], axis=-4)
    return pack_nibbles(blocks.reshape(*rows, 2 * half))
