"""What the window kernel on coded copies brings to shared memory: tiles of a step, data of a group."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import bulk
from pallas_kernels.launch import TILE
from pallas_kernels.pipeline import Geometry, Recurrence
from pallas_kernels.rows import PIECE_BYTES, init_barriers, wait_rows
from pallas_kernels.window_parts import aligned_head


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of a kernel, all issued by one warpgroup.

    size: tiles of a step. smem: buffers of stages (codes, scales or None, row_scales, values) and of a
    group (keys, reader, scalars, row_scalars, constants or None), and landed, group_landed, which tell when
    they are filled. source: references of the same names in global memory, with new_values, new_keys and
    new_scalars; scales and constants may be missing (empty). fused: compiled, not interpreted.
    """

    plgpu: Any
    geometry: Geometry
    recurrence: Recurrence
    size: int
    smem: Any
    source: Any
    fused: bool

    @property
    def _fresh(self) -> Any:
        return pl.ds(self.geometry.ring, self.geometry.tokens)

    def begin(self) -> None:
        """Before the first copy: what is not copied has zero weights, so it must be finite."""
        if not self.fused:
            return
        for buffer in (self.smem.values, self.smem.keys, *self.smem.scalars):
            bulk.clear(self.plgpu, buffer)
        init_barriers(self.plgpu, self.smem.landed)
        init_barriers(self.plgpu, self.smem.group_landed)
        self.plgpu.commit_smem()

    def wait(self, barriers: Any, count: int, number: jax.Array) -> None:
        """Until the copies of `number`, which take turns on `count` barriers, are there."""
        place = lax.rem(number, count)
        if self.fused:
            wait_rows(self.plgpu, barriers, place, lax.rem(lax.div(number, count), 2))
        else:
            self.plgpu.barrier_wait(barriers.at[place])

    def step(self, chunk: Any, offset: jax.Array, stage: jax.Array) -> None:
        """Begins to copy the tiles of a chunk's step to a stage."""
        geo, smem, source = self.geometry, self.smem, self.source
        block, tile = chunk.row * geo.groups + chunk.group, chunk.tile + offset * self.size
        if self.fused:
            cursors = block, tile, lax.rem(chunk.start, jnp.int32(geo.ring)), chunk.length
            bulk.copy(self.plgpu, self._parts_of_step(stage), smem.landed, stage, cursors)
            return
        these, places = pl.ds(tile, self.size), pl.ds(block * geo.tiles + tile, self.size)
        values = smem.values.at[stage]
        pairs = [
            (source.codes.at[places], smem.codes.at[stage]),
            (source.row_scales.at[places], smem.row_scales.at[stage]),
            (source.values.at[block, :, these], values.at[pl.ds(0, geo.ring)]),
            (source.new_values.at[block, :, these], values.at[self._fresh]),
        ]
        if smem.scales is not None:
            pairs.append((source.scales.at[places], smem.scales.at[stage]))
        for pair in pairs:
            self.plgpu.copy_gmem_to_smem(*pair, smem.landed.at[stage])

    def _parts_of_step(self, stage: jax.Array) -> list:
        """As functions of the block, the first tile, and the ring's oldest slot and length."""
        geo, smem, source = self.geometry, self.smem, self.source

        def whole(source: Any, target: Any) -> bulk.Block:
            pieces = _pieces(target.dtype, *target.shape[1:])
            return bulk.Block(source, target, lambda block, tile, *_: (block * geo.tiles + tile) * pieces)

        def slots(source: Any, target: Any, count: int, used: Callable | None) -> bulk.Rows:
            tile_pieces = _pieces(source.dtype, TILE)
            sizes = self.size * tile_pieces, geo.tiles * tile_pieces

            def first(block: Any, tile: Any, *_: Any) -> Any:
                return (block * (count * geo.tiles) + tile) * tile_pieces

            return bulk.Rows(source, target, count, *sizes, first, used)

        values = smem.values.at[stage]
        parts: list = [
            whole(source.codes, smem.codes.at[stage]),
            whole(source.row_scales, smem.row_scales.at[stage]),
            slots(source.values, values, geo.ring, lambda block, tile, begin, length: (begin, length)),
            slots(source.new_values, values.at[self._fresh], geo.tokens, None),
        ]
        if smem.scales is not None:
            parts.append(whole(source.scales, smem.scales.at[stage]))
        return parts

    def group(self, chunk: Any) -> None:
        """Begins to copy what a chunk's coefficients need."""
        geo, smem, source = self.geometry, self.smem, self.source
        row, group = chunk.row, chunk.group
        first = aligned_head(geo, group)
        if self.fused:
            cursors = row, group, first, lax.rem(chunk.start, jnp.int32(geo.ring)), chunk.length
            bulk.copy(self.plgpu, self._parts_of_group(), smem.group_landed, jnp.int32(0), cursors)
            return
        block, heads = row * geo.groups + group, pl.ds(first, geo.head_slots)
        old = pl.ds(0, geo.ring)
        pairs = [
            (source.keys.at[block], smem.keys.at[old]),
            (source.new_keys.at[block], smem.keys.at[self._fresh]),
            (source.reader.at[block], smem.reader),
        ]
        for i in range(self.recurrence.scalars):
            pairs += [
                (source.scalars[i].at[row, :, heads], smem.scalars[i].at[old]),
                (source.new_scalars[i].at[row, :, heads], smem.scalars[i].at[self._fresh]),
                (source.new_scalars[i].at[row], smem.row_scalars[i]),
            ]
        if smem.constants is not None:
            pairs.append((source.constants.at[:, heads], smem.constants))
        for pair in pairs:
            self.plgpu.copy_gmem_to_smem(*pair, smem.group_landed.at[0])

    def _parts_of_group(self) -> list:
        """As functions of the row, the group, its aligned head, and the ring's oldest slot and length."""
        geo, smem, source = self.geometry, self.smem, self.source

        def used(row: Any, group: Any, head: Any, begin: Any, length: Any) -> tuple:
            return begin, length

        def vectors(source: Any, target: Any, count: int, used: Callable | None = None) -> bulk.Rows:
            pieces = _pieces(source.dtype, geo.d_state)

            def first(row: Any, group: Any, *_: Any) -> Any:
                return (row * geo.groups + group) * (count * pieces)

            return bulk.Rows(source, target, count, pieces, pieces, first, used)

        def of_heads(
            source: Any, target: Any, count: int, rows: int, used: Callable | None = None
        ) -> bulk.Rows:
            """Four heads are a piece. rows: of heads between rows of the batch; 0 where there are none."""

            def first(row: Any, group: Any, head: Any, *_: Any) -> Any:
                return row * (rows * geo.heads // 4) + head // 4

            def limit(row: Any, group: Any, head: Any, *_: Any) -> Any:
                # The group's last heads may be the row's last ones.
                return (head * -1 + geo.heads) // 4

            sizes = geo.head_slots // 4, geo.heads // 4
            return bulk.Rows(source, target, count, *sizes, first, used, limit)

        parts = [
            vectors(source.keys, smem.keys, geo.ring, used),
            vectors(source.new_keys, smem.keys.at[self._fresh], geo.tokens),
            vectors(source.reader, smem.reader, geo.tokens),
        ]
        row_pieces = _pieces(jnp.float32, geo.tokens, geo.heads)
        for i in range(self.recurrence.scalars):
            old, new, target = source.scalars[i], source.new_scalars[i], smem.scalars[i]
            parts += [
                of_heads(old, target, geo.ring, geo.ring, used),
                of_heads(new, target.at[self._fresh], geo.tokens, geo.tokens),
                bulk.Rows(
                    new,
                    smem.row_scalars[i],
                    1,
                    row_pieces,
                    row_pieces,
                    lambda row, *_: row * row_pieces,
                    wanted=lambda row, group, *_: group < 1,
                ),
            ]
        if smem.constants is not None:
            count = self.recurrence.head_constants
            parts.append(of_heads(source.constants, smem.constants, count, 0))
        return parts


def landing_barriers(
    plgpu: Any, recurrence: Recurrence, stages: int, *, scaled: bool, constants: bool, fused: bool
) -> dict:
    """Scratch buffers `landed` and `group_landed` of `Copies`."""
    if fused:
        return {name: plgpu.SMEM((count, 2), jnp.int32) for name, count in _barrier_counts(stages).items()}
    copies = {"landed": 4 + scaled, "group_landed": 3 + 3 * recurrence.scalars + constants}
    return {
        name: plgpu.Barrier(num_arrivals=copies[name], num_barriers=count)
        for name, count in _barrier_counts(stages).items()
    }


def _barrier_counts(stages: int) -> dict[str, int]:
    return {"landed": stages, "group_landed": 1}


def _pieces(dtype: Any, *shape: int) -> int:
    """Pieces of 16 bytes of an array."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize // PIECE_BYTES
