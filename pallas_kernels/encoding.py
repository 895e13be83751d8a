"""Codes of a state tile by the lanes of four warps: the bits of `numerics`, in a fraction of the instructions
that its functions take an element at a time.

Lanes hold a tile as `blocks.block_layout` has it: four columns of each block of 16 in two rows.
"""

import dataclasses
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


# Rows whose largest magnitude lies between these take the quick way: nothing overflows or vanishes there.
_ORDINARY = numerics.float32_code(2.0**-100), numerics.float32_code(2.0**100)
# Codes with a fraction of 20 bits, in the significand of numbers from 8 to 16.
_FRACTION = 20
_MARGIN = 4


def write_nvfp4(ops: Any, fours: list, code_ref: Any, scale_ref: Any, block_ref: Any) -> None:
    """Stores the tile's codes [64, K / 2] in lane order, row scales [64] and block scales [64, K / 16].

    fours[2 b + half]: the lane's four float32 of block b in rows g and g + 8 of the warp's sixteen.
    """
    for half in range(2):
        _write_row(ops, fours[half::2], half, code_ref, scale_ref, block_ref)


def _write_row(ops: Any, blocks: list, half: int, code_ref: Any, scale_ref: Any, block_ref: Any) -> None:
    """The quick way: a code is a concave function of the magnitude over the block's scale, rounded. A warp
    that has a magnitude too near to the middle between two codes to be sure takes `_write_row_exactly`.
    """
    quad = ops.lane & 3
    place = ops.warp * BLOCK + ops.lane // 4 + 8 * half
    count, zero = len(blocks), ops.low(quad & 0)
    tops = []
    for four in blocks:
        top = functools.reduce(ops.larger, [ops.word(x) & 0x7FFFFFFF for x in four])
        for distance in (1, 2):
            top = ops.larger(top, ops.across(top, distance))
        tops.append(top)
    largest = functools.reduce(ops.larger, tops)
    low, high = _ORDINARY
    odd = (largest < high) & (ops.equal(largest, 0) | ((largest * -1) < -low))
    sure = ops.select(odd, quad * 0 + (1 << _FRACTION), quad * 0)
    scale, inverse = _row_scale(ops, largest)

    codes, inverses = _block_codes(ops, tops, inverse), []
    for code in codes:
        empty = ops.equal(code, 0)
        own = ops.reciprocal(ops.select(empty, zero + 1.0, _decoded(ops, code))) * inverse
        inverses.append(ops.select(empty, zero, own))

    words = []
    base = 8.5 + _MARGIN * 2.0**-_FRACTION
    for b, four in enumerate(blocks):
        own = ops.shuffle(inverses[b // 4], ops.lane // 4 * 4 + b % 4)
        if b % 2 == 0:
            words.append(quad * 0)
        for e, x in enumerate(four):
            size = ops.magnitude(x) * own
            lines = (ops.fma(size, zero + 2.0, zero + base), size + (base + 2.0))
            lines += (ops.fma(size, zero + 0.5, zero + (base + 4.0)),)
            line = functools.reduce(ops.smaller, map(ops.word, lines))
            sure = ops.smaller(sure, line & ((1 << _FRACTION) - 1))
            at = b % 2 * 2 + e // 2
            shift = MAGNITUDE_BITS[at] + 16 * (e % 2)
            code = ops.moved(line, shift - _FRACTION) & (7 << shift)
            shift = SIGN_BITS[at] + 16 * (e % 2)
            sign = ops.masked(ops.moved(ops.word(x), shift - 31), 1 << shift)
            words[-1] = ops.join(ops.join(words[-1], code), sign)
    slow = ops.any(sure < 2 * _MARGIN)

    def store() -> None:
        ops.put(scale_ref, place, [scale], ops.equal(quad, 0))
        for i, code in enumerate(codes):
            ops.put_byte(block_ref, place * count + quad + 4 * i, code)
        _put_codes(ops, code_ref, place, words)

    ops.when(slow, lambda: _write_row_exactly(ops, blocks, half, code_ref, scale_ref, block_ref), store)


def _write_row_exactly(
    ops: Any, blocks: list, half: int, code_ref: Any, scale_ref: Any, block_ref: Any
) -> None:
    """Every number against the thresholds of its block, which are exact products."""
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

    codes = _block_codes(ops, tops, inverse)
    scales = [_decoded(ops, code) for code in codes]
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
    _put_codes(ops, code_ref, place, words)


def _put_codes(ops: Any, ref: Any, row: Any, words: list) -> None:
    """Stores a lane's codes of a row, a word for two blocks of it."""
    start = row * (len(words) * BLOCK) + (ops.lane & 3) * (len(words) * 4)
    size = min(len(words), 4)
    for first in range(0, len(words), size):
        ops.put_words(ref, start + 4 * first, words[first : first + size])


def _finite(ops: Any, word: Any, bound: int = _BOUND) -> Any:
    """Bits of a magnitude up to the bound; 0 for infinities, NaN and what is below 2^-126."""
    bounded = ops.select(word < bound, word, word * 0 + bound)
    bounded = ops.select(word < _INFINITY, bounded, word * 0)
    return ops.select(word < _SMALLEST_NORMAL, word * 0, bounded)


def _row_scale(ops: Any, largest: Any, limit: int = _LIMIT, least: int = _LEAST_EXPONENT) -> tuple:
    """`numerics.power_of_two_scale` of the bits of a row's largest magnitude and of the limit."""
    exponent = largest // (1 << 23) - (limit >> 23)
    fits = (largest & 0x7FFFFF) < (limit & 0x7FFFFF) + 1
    exponent = ops.select(fits, exponent, exponent + 1)
    exponent = ops.larger(exponent, exponent * 0 + least)
    scale = ops.select(largest < _SMALLEST_NORMAL, ops.power(exponent) * 0.0, ops.power(exponent))
    return scale, ops.power(exponent * -1)


def _block_codes(ops: Any, tops: list, inverse: Any) -> list:
    """Codes of the scales that the lane finds, of every fourth block from its place in the quad on; tops:
    bits of the largest magnitudes of all blocks."""
    quad = ops.lane & 3
    codes = []
    for first in range(0, len(tops), 4):
        top = tops[first]
        for i in range(1, 4):
            top = ops.select(ops.equal(quad, i), tops[first + i], top)
        codes.append(_block_code(ops, ops.number(top) * inverse))
    return codes


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


@dataclasses.dataclass(frozen=True)
class Words:
    """The random words of a tile: the row's hash up to the element, and the place of the tile's first element
    in its row; both numbers of a lane."""

    hashed: Any
    first: Any

    def of(self, ops: Any, place: Any) -> Any:
        """`numerics.hash_on` of the element `place` of the tile."""
        word = numerics.mixed(self.hashed ^ (self.first + place), ops.shifted_by)
        return word + (numerics.HASH_STEP - (1 << 32))


def encode_rows(
    ops: Any, fours: list, columns: int, format: numerics.FloatFormat, words: Words | None
) -> tuple[list, list, list]:
    """Codes of a tile in E4M3, with a scale a row, or in 16 bits, as `numerics.encode_float` makes them.

    fours: as in `write_nvfp4`. words: of stochastic rounding, or None (E4M3 alone). Returns what stands in
    the place of each four: words of codes, and their values; then the scales of rows g and g + 8, if any.
    """
    quad = ops.lane & 3
    codes: list = [None] * len(fours)
    values: list = [None] * len(fours)
    scales = []
    for half in range(2):
        blocks = fours[half::2]
        scale = inverse = None
        careful = ops.equal(quad, -1)
        if format == E4M3:
            scale, inverse, careful = _scale_of_row(ops, blocks)
            scales.append(scale)
        row = ops.warp * BLOCK + ops.lane // 4 + 8 * half
        for b, four in enumerate(blocks):
            place = row * columns + quad * 4 + b * BLOCK
            random = None if words is None else [words.of(ops, place + e) for e in range(4)]
            packed = _four_codes(ops, four, inverse, careful, format, random)
            codes[2 * b + half] = packed
            values[2 * b + half] = _values(ops, packed, format, scale)
    return codes, values, scales


def _values(ops: Any, packed: list, format: numerics.FloatFormat, scale: Any) -> list:
    if format == E4M3:
        pairs = [ops.e4m3_reals(packed[0] & 0xFFFF), ops.e4m3_reals(ops.moved(packed[0], -16))]
        return [x * scale for pair in pairs for x in pair]
    if format == numerics.FLOAT16:
        return [x for word in packed for x in ops.half_reals(word)]
    return [half(word) for word in packed for half in (ops.low, ops.high)]


def _scale_of_row(ops: Any, blocks: list) -> tuple:
    """Scale of a row of E4M3 codes, its inverse, and whether a row holds anything but ordinary numbers."""

    def largest_of(size: Any) -> Any:
        top = functools.reduce(ops.larger, [size(ops.word(x) & 0x7FFFFFFF) for four in blocks for x in four])
        for distance in (1, 2):
            top = ops.larger(top, ops.across(top, distance))
        return top

    bound = numerics.float32_code(numerics.E4M3_BOUND)
    top = largest_of(lambda word: word)
    odd = ops.any(ops.negated(top < bound) | (top < _SMALLEST_NORMAL))
    (top,) = ops.choose(
        odd, 1, lambda: [largest_of(lambda word: _finite(ops, word, bound))], lambda: [top]
    )  # fmt: skip
    limit = numerics.float32_code(E4M3_MAX)
    return *_row_scale(ops, top, limit, -126 - numerics.SMALLEST_E4M3), odd


def _four_codes(
    ops: Any, four: list, inverse: Any, careful: Any, format: numerics.FloatFormat, random: list | None
) -> list:
    """Codes of four numbers in one word or two. Numbers of a warp that are normal in the format take the
    quick way."""
    drop = 23 - format.mantissa
    each = 4 if format == E4M3 else 2
    count = 4 // each

    def scaled(x: Any) -> Any:
        return x if inverse is None else x * inverse

    def packed(codes: list) -> list:
        """Codes with signs, in words."""
        words = []
        for first in range(0, 4, each):
            word = None
            for i in range(each):
                sign = ops.moved(ops.word(four[first + i]), format.sign.bit_length() - 32) & format.sign
                code = ops.moved(ops.join(codes[first + i], sign), 32 // each * i)
                word = code if word is None else ops.join(word, code)
            words.append(word)
        return words

    def quickly() -> list:
        if random is None:
            return [ops.e4m3_codes([scaled(x) for x in four])]
        codes = []
        for x, word in zip(four, random, strict=True):
            total = (ops.word(scaled(x)) & 0x7FFFFFFF) + (word & ((1 << drop) - 1))
            code = ops.moved(total, -drop) - ((format.lowest + 126) << format.mantissa)
            codes.append(ops.smaller(code, ops.lane * 0 + format.largest))
        return packed(codes)

    def exactly() -> list:
        words = [None] * 4 if random is None else random
        return packed(
            [_float_code(ops, x, inverse, format, word) for x, word in zip(four, words, strict=True)]
        )  # fmt: skip

    odd = careful
    if random is not None:
        sizes = [ops.word(scaled(x)) & 0x7FFFFFFF for x in four]
        low, high = functools.reduce(ops.smaller, sizes), functools.reduce(ops.larger, sizes)
        least = (format.lowest + 127) << 23
        odd = ops.any((low < least) | ops.negated(high < _INFINITY) | careful)
    return ops.choose(odd, count, exactly, quickly)


def _float_code(ops: Any, x: Any, inverse: Any, to: numerics.FloatFormat, random: Any) -> Any:
    """`numerics.encode_float` of `numerics.bounded` times the inverse, without the sign."""
    zero = ops.lane * 0
    size = ops.word(x) & 0x7FFFFFFF
    if inverse is not None:
        bound = numerics.float32_code(numerics.E4M3_BOUND)
        limited = ops.smaller(size, zero + bound)
        size = ops.select(size < _INFINITY, limited, size)
        size = ops.select(size < _SMALLEST_NORMAL, zero, size)
        size = ops.word(ops.number(size) * inverse)
    exponent = size // (1 << 23)
    significand = ops.join(size & 0x7FFFFF, zero + 0x800000)
    significand = ops.select(exponent < 1, zero, significand)
    above = exponent - (to.lowest + 127)
    low = ops.select(above < 0, above, zero)
    drop = low * -1 + (23 - to.mantissa)
    beyond = drop - 31
    beyond = ops.select(beyond < 0, zero, ops.smaller(beyond, zero + 31))
    shift = ops.smaller(drop, zero + 31)
    significand = ops.shifted(significand, beyond)
    unit = ops.shifted_left(zero + 1, shift)
    if random is None:
        odd = ops.shifted(significand, shift) & 1
        added = ops.shifted(unit, zero + 1) - 1 + odd
    else:
        added = random & (unit - 1)
    code = ops.shifted(significand + added, shift) + (above - low) * (1 << to.mantissa)
    code = ops.smaller(code, zero + to.largest)
    code = ops.select(ops.equal(size, _INFINITY), zero + to.infinity, code)
    return ops.select(size < _INFINITY + 1, code, zero + to.nan)
