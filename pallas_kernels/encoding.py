"""NVFP4 codes of a state tile by the lanes of four warps: the bits of `numerics`, in a quarter of the
instructions that its functions take an element at a time.

Lanes hold a tile as `blocks.block_layout` has it: four columns of each block of 16 in two rows.
"""

import functools
from typing import Any

from pallas_kernels import numerics
from pallas_kernels.numerics import E2M1_MAX, E2M1_VALUES, E4M3, E4M3_MAX, MAGNITUDE_BITS, SIGN_BITS

BLOCK = 16
_INFINITY, _SMALLEST_NORMAL = 0x7F800000, 0x800000
_LIMIT = numerics.float32_code(E2M1_MAX * E4M3_MAX)
_BOUND = numerics.float32_code(numerics.NVFP4_BOUND)
_LEAST_EXPONENT = -126 - numerics.SMALLEST_E2M1 - numerics.SMALLEST_E4M3
_MIDDLES = [(low + high) / 2 for low, high in zip(E2M1_VALUES, E2M1_VALUES[1:], strict=False)]


def write_nvfp4(ops: Any, fours: list, code_ref: Any, scale_ref: Any, block_ref: Any) -> None:
    """Stores the tile's codes [64, K / 2] in lane order, row scales [64] and block scales [64, K / 16].

    fours[2 b + half]: the lane's four float32 of block b in rows g and g + 8 of the warp's sixteen.
    """
    for half in range(2):
        _write_row(ops, fours[half::2], half, code_ref, scale_ref, block_ref)


def _write_row(ops: Any, blocks: list, half: int, code_ref: Any, scale_ref: Any, block_ref: Any) -> None:
    quad = ops.lane & 3
    place = ops.warp * BLOCK + ops.lane // 4 + 8 * half
    count = len(blocks)
    kept, tops, broken = [], [], quad * 0
    for b, four in enumerate(blocks):
        words = [ops.word(x) & 0x7FFFFFFF for x in four]
        sizes = [_finite(ops, word) for word in words]
        largest = functools.reduce(ops.larger, words)
        broken = ops.join(broken, ops.select(largest < _INFINITY, largest * 0, largest * 0 + (1 << b)))
        top = functools.reduce(ops.larger, sizes)
        for distance in (1, 2):
            top = ops.larger(top, ops.across(top, distance))
        kept.append([ops.number(size) for size in sizes])
        tops.append(top)
    for distance in (1, 2):
        broken = ops.join(broken, ops.across(broken, distance))
    scale, inverse = _row_scale(ops, functools.reduce(ops.larger, tops))
    ops.put(scale_ref, place, [scale], ops.equal(quad, 0))

    # A lane finds the scales of every fourth block.
    codes, scales = [], []
    for first in range(0, count, 4):
        top = tops[first]
        for i in range(1, 4):
            top = ops.select(ops.equal(quad, i), tops[first + i], top)
        code = _block_code(ops, ops.number(top) * inverse)
        codes.append(code)
        scales.append(_decoded(ops, code))
    for i, code in enumerate(codes):
        flag = ops.shifted(broken, quad + 4 * i) & 1
        code = ops.select(ops.equal(flag, 0), code, code * 0 + E4M3.nan)
        ops.put_byte(block_ref, place * count + quad + 4 * i, code)

    words = []
    for b, (four, sizes) in enumerate(zip(blocks, kept, strict=True)):
        own = ops.shuffle(scales[b // 4], ops.lane // 4 * 4 + b % 4)
        whole = ops.equal(ops.bit(broken, b), 0) & ops.above(own, 0.0)
        # Nothing exceeds the thresholds of a block without a scale.
        own = ops.select(whole, own, 2.0**120)
        middles = [own * middle for middle in _MIDDLES]
        if b % 2 == 0:
            words.append(quad * 0)
        for e, (x, size) in enumerate(zip(four, sizes, strict=True)):
            at = b % 2 * 2 + e // 2
            code = _code(ops, size * inverse, middles, MAGNITUDE_BITS[at] + 16 * (e % 2))
            sign = ops.bits(ops.bit(ops.word(x), 31), SIGN_BITS[at] + 16 * (e % 2), 0xFFFFFFFF)
            words[-1] = ops.join(ops.join(words[-1], code), sign)
    size = min(len(words), 4)
    for first in range(0, len(words), size):
        at = place * (count * 8) + quad * (count * 2) + 4 * first
        ops.put_words(code_ref, at, words[first : first + size])


def _finite(ops: Any, word: Any) -> Any:
    """Bits of a magnitude up to the bound; 0 for infinities, NaN and what is below 2^-126."""
    bounded = ops.select(word < _BOUND, word, word * 0 + _BOUND)
    bounded = ops.select(word < _INFINITY, bounded, word * 0)
    return ops.select(word < _SMALLEST_NORMAL, word * 0, bounded)


def _row_scale(ops: Any, largest: Any) -> tuple:
    """`numerics.power_of_two_scale` of the bits of a row's largest magnitude."""
    exponent = largest // (1 << 23) - (_LIMIT >> 23)
    fits = (largest & 0x7FFFFF) < (_LIMIT & 0x7FFFFF) + 1
    exponent = ops.select(fits, exponent, exponent + 1)
    exponent = ops.larger(exponent, exponent * 0 + _LEAST_EXPONENT)
    scale = ops.select(largest < _SMALLEST_NORMAL, ops.power(exponent) * 0.0, ops.power(exponent))
    return scale, ops.power(exponent * -1)


def _block_code(ops: Any, largest: Any) -> Any:
    """`numerics.encode_block_scale` of a largest magnitude, which counts as zero below 2^-126."""
    largest = ops.select(ops.word(largest) < _SMALLEST_NORMAL, largest * 0.0, largest)
    word = ops.word(largest * (1.0 / 6.0))
    above = word // (1 << 23) - (E4M3.lowest + 127)
    significand = ops.join(word & 0x7FFFFF, word * 0 + 0x800000)
    significand = ops.select(word < _SMALLEST_NORMAL, word * 0, significand)
    low = ops.select(above < 0, above, above * 0)
    drop = low * -1 + (23 - E4M3.mantissa)
    drop = ops.select(drop < 31, drop, drop * 0 + 31)
    below = ops.shifted(significand, drop) + (above - low) * (1 << E4M3.mantissa)
    reached = _decoded(ops, below) * E2M1_MAX
    return below + ops.select(ops.above(largest, reached), below * 0 + 1, below * 0)


def _decoded(ops: Any, code: Any) -> Any:
    """`numerics.decode_e4m3` of a positive finite code."""
    normal = ops.number(code * (1 << 20) + (120 << 23))
    return ops.select(code < 8, ops.real_of(code) * 2.0**numerics.SMALLEST_E4M3, normal)


def _code(ops: Any, size: Any, middles: list, shift: int) -> Any:
    """The magnitude's code at bit `shift`: how many of the seven middles it has passed; even ones only when
    it lies above."""
    high = ops.reaches(size, middles[3])
    middle = ops.reaches(size, ops.select(high, middles[5], middles[1]))
    last = ops.select(
        middle, ops.select(high, middles[6], middles[2]), ops.select(high, middles[4], middles[0])
    )
    code = None
    for there, weight in ((high, 4), (middle, 2), (ops.above(size, last), 1)):
        zero = ops.lane * 0
        part = ops.select(there, zero + (weight << shift), zero)
        code = part if code is None else ops.join(code, part)
    return code
