"""The streaming window kernel: reads every state tile once and adds what the ring and the new tokens contribute.

A recurrence supplies coefficients a (row, group): readers z, a scale and weights of ring slots and new tokens. Then

    y[t] = scale[t, head] * S z[t] + sum_slot weight[t, head, slot] x[slot] + sum_u weight[t, head, R + u] x_new[u]
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import TILE, LaunchParameters, Unsupported, mosaic_gpu

NEW_SLOTS = 8


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Static sizes of one launch; letters as in the formulas of the recurrence."""

    batch: int
    groups: int
    heads: int
    head_dim: int
    d_state: int
    ring: int
    tokens: int

    @property
    def group_heads(self) -> int:
        return self.heads // self.groups

    @property
    def tiles(self) -> int:
        return self.group_heads * self.head_dim // TILE

    @property
    def head_slots(self) -> int:
        return -(-self.group_heads // 16) * 16

    @property
    def slots(self) -> int:
        return -(-(self.ring + NEW_SLOTS) // 32) * 32

    @property
    def tile_heads(self) -> int:
        if self.head_dim % TILE == 0:
            return 1
        if TILE % self.head_dim == 0:
            return TILE // self.head_dim
        return -(-(TILE - 1) // self.head_dim) + 1

    def check(self) -> None:
        """Raise `Unsupported` with the reason when the kernels cannot serve these sizes."""
        if self.group_heads * self.head_dim % TILE:
            raise Unsupported(
                f"heads of a group times head_dim must be a multiple of {TILE}, "
                f"got {self.group_heads} x {self.head_dim}"
            )
        if self.d_state % 64 or self.d_state > 256:
            raise Unsupported(f"d_state must be 64, 128, 192 or 256, got {self.d_state}")
        if self.heads % 4:
            raise Unsupported(f"the number of heads must be a multiple of 4, got {self.heads}")
        if self.ring % 8 or not 8 <= self.ring <= 56:
            raise Unsupported(f"the ring must have 8 to 56 slots in steps of 8, got {self.ring}")
        if not 1 <= self.tokens <= NEW_SLOTS:
            raise Unsupported(f"the window must have 1 to {NEW_SLOTS} tokens, got {self.tokens}")
        if self.tiles > 256:
            raise Unsupported(f"a group may have at most {256 * TILE} state rows, got {self.tiles * TILE}")


def tiled_layout(plgpu: Any, tiles: tuple, warp_dims: tuple, lane_dims: tuple, vector_dim: int) -> Any:
    """A canonical register layout from a tiling that need not be canonical."""
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

    layout = TiledLayout(
        plgpu.Tiling(tiles), warp_dims, lane_dims, vector_dim, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def row_layout(plgpu: Any, d_state: int) -> Any:
    """Layout of [rows, d_state] for sums along a row: 16 rows at a time, eight lanes a row."""
    return tiled_layout(plgpu, ((16, d_state), (4, d_state), (1, 64), (1, 8)), (-8,), (-6, -3), -1)


def coefficient_layout(plgpu: Any) -> Any:
    """Layout of [heads, slots]: 16 heads x 32 slots, four slots a thread."""
    return tiled_layout(plgpu, ((16, 32), (4, 32), (1, 4)), (-6,), (-4, -3), -1)


def granule_live(first: int, size: int, start: jax.Array, length: jax.Array, ring: int) -> jax.Array:
    """Whether ring slots first..first+size-1 hold any of the `length` tokens that begin at position `start`."""
    begin = lax.rem(start, jnp.int32(ring))
    ahead = lax.rem(first - begin + ring, jnp.int32(ring))
    return (ahead < length) | ((ahead > ring - size) & (length > 0))


def readout(plgpu: Any, state: jax.Array, reader: jax.Array, fused: bool) -> jax.Array:
    """Partial sums [64, 8] of state [64, K] times reader [K] along K; one fused multiply-add an element."""
    layout = plgpu.Layout.WGMMA
    if not fused:
        return jnp.sum(state * lax.broadcast_in_dim(reader, state.shape, (1,)), axis=1)

    from jax.experimental.mosaic.gpu import FragmentedArray
    from jax._src.lib.mlir.dialects import math as mlir_math
    import numpy as np

    @plgpu.inline_mgpu(
        arg_types=(layout, layout.reduce(0)),
        return_type=plgpu.ShapeDtypeStruct((TILE, 8), jnp.float32, layout=layout),
    )
    def multiply(_, matrix, vector):
        wide = vector.broadcast_in_dim(matrix.shape, (1,), matrix.layout)
        rows = np.moveaxis(matrix.registers, 1, 0)
        factors = np.moveaxis(wide.registers, 1, 0)
        total = [a * b if False else None for a, b in zip(rows[0].flat, factors[0].flat, strict=True)]
        return total

    return multiply(state, reader)
