"""Outputs of a call's tokens from a state tile in registers, without moving the tile.

All keys and readers of the call are projected at once. Token after token, S <- decay S + u k^T then moves the
projections alone: p_i <- decay p_i + u (k . z_i) for every later key and reader z_i.
"""

from typing import Any

import jax

from pallas_kernels.blocks import BLOCK, Fragments, tile_rows


class NewTokens(Fragments):
    """A warp's 16 rows of a state tile and the tokens of a call.

    rows: as in `Products`. call, in shared memory: values [T, 64], probes [2 T, K] (keys, then readers) and
    scalars [8, heads]. head: the rows' column of scalars; constants: those of their head; reads_key: updates
    depend on the state times the key.

    Columns of the projections are the keys, where they are needed, then the readers, from a multiple of four
    on.
    """

    def __init__(
        self, ops: Any, rows: list, call: tuple, head: Any, constants: tuple, tokens: int, *, reads_key: bool
    ) -> None:
        super().__init__(ops)
        self.rows, self.head, self.constants = rows, head, constants
        self.values, self.probes, self.scalars = call
        self.count, self.reads_key = tokens, reads_key
        self.first_reader = (4 if tokens <= 4 else 8) if reads_key else 0
        self.tiles = 2 if self.first_reader == 8 else 1

    def _probe(self, column: Any) -> Any:
        """Row of `probes` that a column stands for; columns to spare repeat the last reader."""
        ops, last = self.ops, self.count - 1
        reader = column - self.first_reader
        reader = ops.select(reader < last, reader, reader * 0 + last) + self.count
        key = ops.select(column < last, column, column * 0 + last)
        return ops.select(column < self.first_reader, key, reader)

    def _project(self) -> tuple[list, list]:
        """Rows x columns^T, and at row g the key of token g x columns^T: [tile][four] each."""
        ops = self.ops
        places = [self._probe(self.row + 8 * n) for n in range(self.tiles)]
        last = self.count - 1
        key_place = ops.select(self.row < last, self.row, self.row * 0 + last)
        four = [self.zero] * 4
        sums, gram = [[four] * 3] * self.tiles, [four] * self.tiles
        for p, halves in enumerate(self.rows):
            left = self.left(*halves)
            columns = [ops.quad(self.probes, place, self.quad * 4 + p * 16) for place in places]
            key = columns[0]
            if not self.reads_key:
                key = ops.quad(self.probes, key_place, self.quad * 4 + p * 16)
            key = [key[0], key[0], key[1], key[1]]
            sums = [
                [ops.product(total, part, right) for total, part in zip(parts, left, strict=True)]
                for parts, right in zip(sums, columns, strict=True)
            ]
            gram = [ops.product(total, key, right) for total, right in zip(gram, columns, strict=True)]
        return self.joined(sums), gram

    def _sees(self, tile: int, odd: int, token: int) -> Any:
        """Whether the column 8 tile + 2 quad + odd is a key, or the reader of `token` or a later one."""
        column = self.quad * 2 + (8 * tile + odd)
        later = self.quad * 0 + (self.first_reader + token - 1) < column
        return later | (column < self.first_reader) if self.first_reader else later

    def outputs(self, factors: Any, skip: int | None) -> list:
        """Outputs of the columns: [tile][rows g, g, g + 8, g + 8]."""
        ops = self.ops
        projections, gram = self._project()
        for token in range(self.count):
            at = self.quad * 0 + token
            scalars = [ops.real(ref, at, self.head) for ref in self.scalars]
            decay, rate = factors(ops, self.constants, scalars)
            update, direct = [], []
            for half in range(2):
                value = ops.real(self.values, at, ops.warp * BLOCK + self.row + 8 * half)
                if self.reads_key:
                    mine = ops.shuffle(projections[0][2 * half + token % 2], self.row * 4 + token // 2)
                    update.append(rate * (value - decay * mine))
                else:
                    update.append(rate * value)
                if skip is not None:
                    direct.append(self.constants[skip] * value)
            for n in range(self.tiles):
                moved = []
                for i, old in enumerate(projections[n]):
                    half, odd = i // 2, i % 2
                    product = ops.shuffle(gram[n][odd], self.quad + 4 * token)
                    new = ops.fma(update[half], product, decay * old)
                    if skip is not None:
                        own = ops.equal(self.quad * 2 + (8 * n + odd), self.first_reader + token)
                        new = new + ops.select(own, direct[half], 0.0)
                    moved.append(ops.select(self._sees(n, odd, token), new, old) if token else new)
                projections[n] = moved
        return projections

    def store(self, projections: list, outputs: Any) -> None:
        """outputs [T, 64] = those of the readers."""
        ops = self.ops
        for n, four in enumerate(projections):
            for i, value in enumerate(four):
                half, odd = i // 2, i % 2
                column = self.quad * 2 + (8 * n + odd)
                there = self._sees(n, odd, 0) & (column < self.first_reader + self.count)
                if self.first_reader:
                    there = there & (self.quad * 0 + (self.first_reader - 1) < column)
                row = ops.warp * BLOCK + self.row + 8 * half
                ops.store(outputs, column - self.first_reader, row, [value], there)


def write_outputs(
    plgpu: Any,
    layout: Any,
    factors: Any,
    skip: int | None,
    state: jax.Array,
    buffers: tuple,
    cursors: tuple[jax.Array, ...],
    constants: tuple,
    outputs: Any,
    head_dim: int,
    *,
    reads_key: bool,
) -> None:
    """outputs [T, 64] (float32, shared memory) of the call's tokens after a state tile [64, K].

    buffers: values [T, 64], probes [2 T, K] and a tuple of scalars [8, heads] in shared memory; cursors
    int32: the scalars' column of the tile's first row, and that row's place in the group. constants: a scalar
    or [64] each.
    """
    from pallas_kernels.lanes import Lanes, first_element, unpack

    values, probes, scalars = buffers
    ref = plgpu.RefType()
    tokens = outputs.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(
            layout,
            (ref,) * 3,
            (ref,) * len(scalars),
            (layout,) * len(cursors),
            (layout.reduce(1),) * len(constants),
        )
    )
    def write(_, tile, refs, scalars, cursors, constants):
        ops = Lanes()
        values, probes, outputs = refs
        column, row = map(first_element, cursors)
        head = column + ((row + ops.warp * BLOCK) // head_dim - row // head_dim)
        rows = tile_rows(unpack(tile.registers.flat))
        per_head = tuple(map(first_element, constants))
        new = NewTokens(ops, rows, (values, probes, scalars), head, per_head, tokens, reads_key=reads_key)
        new.store(new.outputs(factors, skip), outputs)

    write(state, (values, probes, outputs), scalars, cursors, constants)
