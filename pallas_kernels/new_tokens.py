"""Outputs of a call's tokens from a state tile in registers, without moving the tile.

All keys and readers of the call are projected at once. Token after token, S <- decay S + u k^T then moves the
projections alone: p_i <- decay p_i + u (k . z_i) for every later key and reader z_i.
"""

from collections.abc import Callable
from typing import Any

from pallas_kernels.blocks import BLOCK, Fragments


class NewTokens(Fragments):
    """The tokens of a call and their projections by a warp's 16 rows of a state tile.

    call: values [T, 64], probes [2 T, K] (keys, then readers) and scalars [8, heads]; target: where the
    outputs go, float32 [T, 64]; all in shared memory. head: the rows' column of scalars. factors(scalars):
    decay and rate of a token: u = rate (value - decay S k) or, unless `reads_key`, rate value. skip: weight
    of a token's own value in its output, or None.

    Columns of the projections are the keys, where they are needed, then the readers, from a multiple of four
    on. A product over columns is [tile][rows g, g, g + 8, g + 8] for columns 8 tile + 2 q and + 1.
    """

    def __init__(
        self,
        ops: Any,
        call: tuple,
        target: Any,
        head: Any,
        factors: Callable,
        skip: Any,
        *,
        reads_key: bool,
        part_count: int = 3,
    ) -> None:
        super().__init__(ops, part_count)
        self.values, self.probes, self.scalars = call
        self.target, self.head, self.factors, self.skip = target, head, factors, skip
        self.count, self.reads_key = ops.rows(target), reads_key
        self.first_reader = (4 if self.count <= 4 else 8) if reads_key else 0
        self.tiles = 2 if self.first_reader == 8 else 1
        self._places = [self._probe(self.row + 8 * n) for n in range(self.tiles)]
        self._key_place = ops.select(self.row < self.count, self.row, self.row * 0)
        four = [self.zero] * 4
        self._sums, self._gram, self.cross = (
            [[four] * part_count] * self.tiles,
            [four] * self.tiles,
            [four] * self.tiles,
        )

    def _probe(self, column: Any) -> Any:
        """Row of `probes` that a column stands for; columns to spare repeat the first of their kind."""
        ops, zero = self.ops, column * 0
        reader = column - self.first_reader
        reader = ops.select(reader < self.count, reader, zero) + self.count
        key = ops.select(column < self.count, column, zero)
        return ops.select(column < self.first_reader, key, reader)

    def project(self, p: Any, left: list, others: list | None = None) -> None:
        """Adds columns 16 p .. 16 p + 15 of the rows, as left operands, and of the keys; `cross`: of other
        rows, a left operand."""
        ops = self.ops
        columns = [ops.quad(self.probes, place, self.quad * 4, p * 16) for place in self._places]
        # The first columns are the keys, if any are.
        key = columns[0] if self.reads_key else ops.quad(self.probes, self._key_place, self.quad * 4, p * 16)
        keys = [key[0], key[0], key[1], key[1]]
        self._sums = self.products(self._sums, left, columns)
        self._gram = [
            ops.product(total, keys, right) for total, right in zip(self._gram, columns, strict=True)
        ]
        if others is not None:
            self.cross = [
                ops.product(total, others, right) for total, right in zip(self.cross, columns, strict=True)
            ]

    def projections(self) -> list:
        """Rows x columns^T."""
        return self.joined(self._sums)

    def _seen_from(self, tile: int, odd: int, token: int) -> Any:
        """Whether the column 8 tile + 2 quad + odd is the reader of `token` or a later one."""
        return self.quad * 0 + (self.first_reader + token - 1) < self.quad * 2 + (8 * tile + odd)

    def outputs(self, projections: list) -> list:
        """Outputs in the columns of the readers, from the projections."""
        ops = self.ops
        projections = list(projections)
        for token in range(self.count):
            at = self.quad * 0 + token
            decay, rate = self.factors([ops.real(ref, at, self.head) for ref in self.scalars])
            values = [ops.real(self.values, at, ops.warp * BLOCK + self.row + 8 * half) for half in range(2)]
            updates = values
            if self.reads_key:
                owner = self.row * 4 + token // 2
                read = [ops.shuffle(projections[0][2 * half + token % 2], owner) for half in range(2)]
                updates = [value - decay * x for value, x in zip(values, read, strict=True)]
            updates = [rate * x for x in updates]
            for n, olds in enumerate(projections):
                news = []
                for i, old in enumerate(olds):
                    half, odd = i // 2, i % 2
                    product = ops.shuffle(self._gram[n][odd], self.quad + 4 * token)
                    new = ops.fma(updates[half], product, decay * old)
                    if self.skip is not None:
                        own = ops.equal(self.quad * 2 + (8 * n + odd), self.first_reader + token)
                        new = new + ops.select(own, self.skip * values[half], 0.0)
                    if token and self.first_reader < 8 * (n + 1):
                        seen = self._seen_from(n, odd, token)
                        if self.first_reader > 8 * n:
                            seen = seen | (self.quad * 2 + odd < self.first_reader)
                        new = ops.select(seen, new, old)
                    news.append(new)
                projections[n] = news
        return projections

    def store(self, projections: list) -> None:
        """Stores the outputs of these projections."""
        ops = self.ops
        for n, four in enumerate(self.outputs(projections)):
            for i, value in enumerate(four):
                half, odd = i // 2, i % 2
                column = self.quad * 2 + (8 * n + odd)
                there = self._seen_from(n, odd, 0) & (column < self.first_reader + self.count)
                row = ops.warp * BLOCK + self.row + 8 * half
                ops.store(self.target, column - self.first_reader, row, [value], there)


def write_single_output(
    ops: Any, rows: list, call: tuple, target: Any, head: Any, factors: Callable, skip: Any
) -> None:
    """Stores the output of a call's only token, of a rule that does not read the key.

    For one token sums in the lanes take fewer instructions than products of a tile in three parts. rows:
    `blocks.tile_rows` of the tile; the rest as for `NewTokens`.
    """
    values, probes, scalars = call
    row, quad = ops.lane // 4, ops.lane & 3
    first = quad & 0
    zero = ops.low(first)
    sums, gram = [zero, zero], zero
    for p, halves in enumerate(rows):
        key, reader = (_reals(ops, probes, first + i, quad * 4, p * BLOCK) for i in range(2))
        for k, z, *xs in zip(key, reader, *halves, strict=True):
            gram = ops.fma(k, z, gram)
            sums = [ops.fma(x, z, total) for x, total in zip(xs, sums, strict=True)]
    gram, *sums = map(ops.quad_sum, (gram, *sums))
    decay, rate = factors([ops.real(ref, first, head) for ref in scalars])
    for half, total in enumerate(sums):
        place = ops.warp * BLOCK + row + 8 * half
        value = ops.real(values, first, place)
        output = ops.fma(rate * value, gram, decay * total)
        if skip is not None:
            output = output + skip * value
        ops.store(target, first, place, [output], ops.equal(quad, 0))


def _reals(ops: Any, ref: Any, row: Any, column: Any, at: int) -> list:
    """Four bfloat16 from a column on, as float32."""
    pairs = ops.quad(ref, row, column, at)
    return [half(pair) for pair in pairs for half in (ops.low, ops.high)]
