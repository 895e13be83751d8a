"""Readouts of state tiles that are stored as E4M3 or E2M1 codes, by the lanes of a warp.

A warp takes a whole tile of 64 rows. Codes become float16 in registers, exactly, and products of 16 columns
with the readers run on the tensor cores. Readers are float16 parts times a power of two of their own. Each
reader owns `spread` columns of a product, and its b-th block of 16 elements stands in column b mod `spread`
alone: so the sums of several blocks come out of one accumulator side by side, and a lane scales two blocks
a row.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.launch import TILE
from pallas_kernels.pipeline import Geometry

BLOCK = 16
# Accumulators of a warp that are filled side by side, so that a product need not wait for the one before.
INTERLEAVED = 4
# A float16 part of a reader lies this far below the one before, which is rounded to 11 bits.
_PART_STEP = 2.0**-11
_LARGEST_READER = 14  # exponent of a packed reader's largest element
_SIGNS, _SIGNS_AND_MAGNITUDES, _MAGNITUDES = 0x80008000, 0x8E008E00, 0x0E000E00


@dataclasses.dataclass(frozen=True)
class Codes:
    """How a state is coded: "fp8_e4m3" or "nvfp4", and its contracted size."""

    format: str
    d_state: int

    @property
    def scaled(self) -> bool:
        """Whether every block of 16 has a scale."""
        return self.format == "nvfp4"

    @property
    def row_bytes(self) -> int:
        return self.d_state // 2 if self.scaled else self.d_state

    @property
    def blocks(self) -> int:
        return self.d_state // BLOCK

    @property
    def unit_exponent(self) -> int:
        """Exponent of what a decoded float16 of 1 stands for."""
        return 14 if self.scaled else 0


@dataclasses.dataclass(frozen=True)
class Readers:
    """How the readers of a call share the columns of a product: `parts` float16 each, `tokens` of them."""

    tokens: int
    parts: int

    @property
    def vectors(self) -> int:
        return self.tokens * self.parts

    @property
    def spread(self) -> int:
        """Columns a vector."""
        return next(n for n in (8, 4, 2, 1) if n == 1 or n * self.vectors <= 8)

    @property
    def passes(self) -> int:
        """Products a block, of eight columns each."""
        return -(-self.vectors * self.spread // 8)


def reader_parts(dtype: Any) -> int:
    """Float16 parts that hold a reader at float32 accuracy."""
    return 2 if jnp.dtype(dtype) == jnp.float32 else 1


def unpack(ops: Any, codes: Codes, ref: Any, row: Any) -> list:
    """The lane's share of a row: of each block, two words of two float16 times 2^-`codes.unit_exponent`."""
    per_lane = codes.row_bytes // 4
    start = row * codes.row_bytes + (ops.lane & 3) * per_lane
    size = min(per_lane // 4, 4)
    words = [x for i in range(0, per_lane // 4, size) for x in ops.words(ref, start + 4 * i, size)]
    if not codes.scaled:
        return [ops.e4m3_halves(word) for word in words]
    blocks = []
    for word in words:
        blocks.append([ops.bits(word, shift, _SIGNS_AND_MAGNITUDES) for shift in (0, 3)])
        blocks.append(
            [
                ops.join(ops.bits(word, 6 + i * 3, _MAGNITUDES), ops.bits(word, 1 + i, _SIGNS))
                for i in range(2)
            ]
        )
    return blocks


def right_operands(ops: Any, codes: Codes, readers: Readers, packed: Any, first: Any, number: int) -> list:
    """Right operands of every block for one pass over the packed readers [vectors, K] from element `first`
    on."""
    quad, column = ops.lane & 3, ops.lane // 4
    spread = readers.spread
    vector = column // spread + number * (8 // spread)
    own = column - column // spread * spread
    there = vector < readers.vectors
    start = first + ops.select(there, vector, vector * 0) * codes.d_state
    operands = []
    for block in range(codes.blocks):
        place = quad * 4 + block * BLOCK if codes.scaled else quad * (codes.d_state // 4) + block * 4
        mine = there & ops.equal(own, block % spread)
        operands.append(
            [ops.select(mine, word, word * 0) for word in ops.words(packed, (start + place) * 2, 2)]
        )
    return operands


def block_scales(ops: Any, codes: Codes, spread: int, ref: Any, row: Any) -> list:
    """Scales of the lane's two columns of a row, for every accumulator."""
    start = row * codes.blocks
    if spread > 1:
        column = (ops.lane & 3) * 2
        own = column - column // spread * spread
        return [
            ops.e4m3_reals(ops.short(ref, start + own + first)) for first in range(0, codes.blocks, spread)
        ]
    pairs = [ops.e4m3_reals(ops.short(ref, start + first)) for first in range(0, codes.blocks, 2)]
    return [[scale, scale] for pair in pairs for scale in pair]


def checkpoint_readouts(
    ops: Any, codes: Codes, readers: Readers, tile: tuple, operands: list, target: Any, base: Any
) -> None:
    """target[base + 64 t + row] = sum of the tile's row times reader t, up to the row's and the reader's
    factors, for all 64 rows and the tokens.

    tile: its codes, block scales or None, in shared memory, and its index there. operands: right operands a
    pass.
    """
    code_ref, scale_ref, index = tile
    row, quad = ops.lane // 4, ops.lane & 3
    spread, parts = readers.spread, readers.parts
    zero = ops.low(quad & 0)
    width = spread * parts
    part = quad * 2 // spread
    part = part - part // parts * parts
    complete = 8 // width * readers.passes == readers.tokens

    def put(token: Any, r: Any, value: Any) -> None:
        there = None if complete else token < readers.tokens
        ops.put(target, base + token * TILE + r, [value], there)

    accumulators = -(-codes.blocks // spread) if codes.scaled else 1
    together = max(1, INTERLEAVED // (accumulators * parts))
    for start in range(0, TILE // BLOCK, together):
        pieces = [[row + (BLOCK * m + 8 * half) for half in range(2)] for m in range(start, start + together)]
        lefts, scales = [], []
        for rows in pieces:
            halves = [unpack(ops, codes, code_ref, index * TILE + r) for r in rows]
            lefts.append(
                [[top[0], bottom[0], top[1], bottom[1]] for top, bottom in zip(*halves, strict=True)]
            )
            if codes.scaled:
                scales.append([block_scales(ops, codes, spread, scale_ref, index * TILE + r) for r in rows])
        for number, right in enumerate(operands):
            sums = [[[zero] * 4 for _ in range(accumulators)] for _ in pieces]
            for block in range(codes.blocks):
                at = block // spread if codes.scaled else 0
                for total, left in zip(sums, lefts, strict=True):
                    total[at] = ops.product(total[at], left[block], right[block], "f16")
            first = number * (8 // width)
            for i, rows in enumerate(pieces):
                for half, r in enumerate(rows):
                    own = [
                        _scaled_sum(
                            ops,
                            [four[2 * half + column] for four in sums[i]],
                            [pair[column] for pair in scales[i][half]] if codes.scaled else None,
                        )
                        for column in range(2)
                    ]
                    if width == 1:
                        for column, value in enumerate(own):
                            put(quad * 2 + (first + column), r, value)
                        continue
                    if spread == 1:
                        value = ops.fma(own[1], zero + _PART_STEP, own[0])
                    else:
                        value = own[0] + own[1]
                        if parts == 2:
                            value = ops.select(ops.equal(part, 0), value, value * _PART_STEP)
                    for distance in (1, 2):
                        if distance < width // 2:
                            value = value + ops.across(value, distance)
                    put(quad // max(width // 2, 1) + first, r, value)


def _scaled_sum(ops: Any, values: list, scales: list | None) -> Any:
    if scales is None:
        return functools.reduce(operator.add, values)
    total = values[0] * scales[0]
    for value, scale in zip(values[1:], scales[1:], strict=True):
        total = ops.fma(value, scale, total)
    return total


@dataclasses.dataclass(frozen=True)
class Step:
    """Static sizes of the program that reads the tiles of one step.

    tiles: of the step, of one group; warps: that share them. weight_heads: heads of the weights' axis.
    shared: the group has one reader, and every head a scale.
    """

    codes: Codes
    readers: Readers
    geometry: Geometry
    tiles: int
    warps: int
    weight_heads: int
    shared: bool


def read_tiles(ops: Any, step: Step, buffers: dict, cursors: tuple, first_warp: int = 0) -> None:
    """Outputs and appended values of a step's tiles, a tile a warp at a time; `first_warp`: of the warpgroup.

    buffers, in shared memory: codes, scales (of blocks, or None), row_scales [tiles, 64], values [R + T,
    tiles, 64], weights [T, heads, slots], head_scale [T, heads] or None, packed [heads, T * parts, K],
    factors [heads, T], sums [warps, T, 64]; in global memory out [B, T, G, tiles, 64] and ring [B * G, R,
    tiles, 64].
    cursors int32: row, group, the step's first tile in the group, the slot of the oldest committed token, how
    many there are, and the first head's place in weights and head_scale.
    """
    geo, codes, readers = step.geometry, step.codes, step.readers
    row, group, first, begin, length, offset = cursors
    warp, pair = ops.warp + first_warp, ops.lane * 2
    tokens, ring = geo.tokens, geo.ring
    base = warp * (tokens * TILE)
    block = row * geo.groups + group
    policy = ops.policy()

    def operands_of(head: Any) -> list:
        start = head * (readers.vectors * codes.d_state)
        return [
            right_operands(ops, codes, readers, buffers["packed"], start, number)
            for number in range(readers.passes)
        ]

    shared = operands_of(ops.lane & 0) if step.shared else None
    # Four slots at a time, from the oldest token's on.
    granule = begin // 4
    covered = (begin - granule * 4 + length + 3) // 4
    covered = ops.select(length < 1, covered * 0, covered)
    covered = ops.select(covered < ring // 4, covered, covered * 0 + ring // 4)

    def one(i: Any, carry: list) -> list:
        index = warp + i * step.warps
        place = (first + index) * TILE
        operands = shared if shared is not None else operands_of(place // geo.head_dim)
        ops.sync()
        tile = buffers["codes"], buffers["scales"], index
        checkpoint_readouts(ops, codes, readers, tile, operands, buffers["sums"], base)
        ops.sync()
        head = (place + pair) // geo.head_dim
        weight_place = [((offset + head) + t * step.weight_heads) * geo.slots for t in range(tokens)]
        scales = ops.elements(buffers["row_scales"], index * TILE + pair, 2)
        sums = []
        for t in range(tokens):
            if step.shared:
                (factor,) = ops.elements(buffers["factors"], ops.lane * 0 + t, 1)
                at = (offset + head) + t * step.weight_heads
                factor = factor * ops.elements(buffers["head_scale"], at, 1)[0]
            else:
                (factor,) = ops.elements(buffers["factors"], head * tokens + t, 1)
            read = ops.elements(buffers["sums"], base + pair + t * TILE, 2)
            sums += [x * (scale * factor) for x, scale in zip(read, scales, strict=True)]

        def values_at(slot: Any) -> list:
            return ops.elements(buffers["values"], (slot * step.tiles + index) * TILE + pair, 2)

        def four_slots(j: Any, sums: list) -> list:
            four = granule + j
            four = ops.select(four < ring // 4, four, four - ring // 4) * 4
            values = [values_at(four + s) for s in range(4)]
            for t in range(tokens):
                weights = ops.elements(buffers["weights"], weight_place[t] + four, 4)
                for weight, value in zip(weights, values, strict=True):
                    sums[2 * t : 2 * t + 2] = [
                        ops.fma(weight, x, y) for x, y in zip(value, sums[2 * t : 2 * t + 2], strict=True)
                    ]
            return sums

        sums = ops.loop(covered, four_slots, sums)
        for new in range(tokens):
            value = values_at(ops.lane * 0 + (ring + new))
            for t in range(new, tokens):
                (weight,) = ops.elements(buffers["weights"], weight_place[t] + (ring + new), 1)
                sums[2 * t : 2 * t + 2] = [
                    ops.fma(weight, x, y) for x, y in zip(value, sums[2 * t : 2 * t + 2], strict=True)
                ]
            slot = begin + length + new
            slot = ops.select(slot < ring, slot, slot - ring)
            kept = ((block * ring + slot) * geo.tiles + first + index) * TILE + pair
            ops.put_pair(buffers["ring"], kept, value, policy)
        for t in range(tokens):
            at = (((row * tokens + t) * geo.groups + group) * geo.tiles + first + index) * TILE + pair
            ops.put_pair(buffers["out"], at, sums[2 * t : 2 * t + 2], policy)
        return carry

    count = step.tiles // step.warps
    if step.tiles % step.warps:
        count = (warp * -1 + (step.tiles + step.warps - 1)) // step.warps
    ops.loop(count, one, [])


def pack_readers(ops: Any, step: Step, source: Any, packed: Any, factors: Any) -> None:
    """Readers as float16 parts and the factors that undo their scaling.

    source: [T, K] (shared) or float32 [T, heads, K]; packed, factors: as in `read_tiles`. Four warps take
    turns.
    """
    codes, readers, tokens = step.codes, step.readers, step.readers.tokens
    heads = 1 if step.shared else step.geometry.group_heads
    d_state = codes.d_state
    columns = [ops.lane * 4 + start for start in range(0, d_state, 128)]

    def one(i: Any, carry: list) -> list:
        number = ops.warp + i * 4
        token, head = number // heads, number - number // heads * heads
        largest = ops.lane * 0 + 15
        values = []
        for column in columns:
            inside = column < d_state
            place = number * d_state + ops.select(inside, column, column * 0)
            values.append(ops.elements(source, place, 4))
            for x in values[-1]:
                largest = ops.larger(largest, ops.select(inside, ops.exponent(x), 0.0))
        for distance in (1, 2, 4, 8, 16):
            largest = ops.larger(largest, ops.across(largest, distance))
        scale = ops.power(largest * -1 + (127 + _LARGEST_READER))
        for column, four in zip(columns, values, strict=True):
            rest = [x * scale for x in four]
            for part in range(readers.parts):
                halves = [ops.half(x) for x in rest]
                vector = head * readers.vectors + token * readers.parts + part
                ops.put(packed, vector * d_state + column, halves, column < d_state)
                rest = [(x - half) * (1 / _PART_STEP) for x, half in zip(rest, halves, strict=True)]
        factor = ops.power(largest - (127 + _LARGEST_READER) + codes.unit_exponent)
        ops.put(factors, head * tokens + token, [factor], ops.equal(ops.lane, 0))
        return carry

    count = (ops.warp * -1 + (tokens * heads + 3)) // 4
    ops.loop(count, one, [])
