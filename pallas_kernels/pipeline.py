"""The streaming window kernel: reads every state tile once and adds what the ring and the new tokens
contribute.

A recurrence supplies coefficients a (row, group): readers z, a scale and weights of slots, where slots 0..R-1
are the ring and R..R+T-1 the new tokens. Then

    y[t] = scale[t, head] * S z[t] + sum_slot weight[t, head, slot] x[slot]
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import MAX_ELEMENTS, TILE, LaunchParameters, Unsupported, mosaic_gpu

NEW_SLOTS = 8
# Hopper: multiprocessors of an H100 or H200, shared memory of one, and the most that one CTA may take.
SMS = 132
SM_SHARED_BYTES = 233472
CTA_SHARED_BYTES = 232448
MAX_STAGES = 4


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
        """Heads of a copy of scalars: it begins at a multiple of four heads (16 bytes) and covers the
        group."""
        covered = self.group_heads + (3 if self.group_heads % 4 else 0)
        return -(-covered // 16) * 16

    @property
    def slots(self) -> int:
        """Slots of a group's keys, scalars and weights: the ring, the new tokens, rounded up to 32."""
        return -(-self.tile_slots // 32) * 32

    @property
    def tile_slots(self) -> int:
        """Slots of a tile's values: the ring, then the new tokens."""
        return self.ring + NEW_SLOTS

    @property
    def tile_heads(self) -> int:
        if self.head_dim % TILE == 0:
            return 1
        if TILE % self.head_dim == 0:
            return TILE // self.head_dim
        return -(-(TILE - 1) // self.head_dim) + 1

    def check(self, copies: int = 1) -> None:
        """Raise `Unsupported` with the reason when the kernels cannot serve these sizes (copies: states a
        row)."""
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
        elements = copies * self.batch * self.heads * self.head_dim * self.d_state
        if elements >= MAX_ELEMENTS:
            raise Unsupported(f"a layer's state may have fewer than 2^31 elements, got {elements}")
        if self.tiles > 256:
            raise Unsupported(f"a group may have at most {256 * TILE} state rows, got {self.tiles * TILE}")


def tiled_layout(plgpu: Any, tiles: tuple, warp_dims: tuple, lane_dims: tuple, vector_dim: int) -> Any:
    """A canonical register layout from a tiling that need not be canonical."""
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout

    layout = TiledLayout(
        plgpu.Tiling(tiles), warp_dims, lane_dims, vector_dim, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def row_layout(plgpu: Any, d_state: int, dtype: Any) -> Any:
    """Layout of [rows, d_state] for sums along a row: 16 rows at a time, eight lanes a row, 16 bytes a
    lane."""
    vector = 16 // jnp.dtype(dtype).itemsize
    return tiled_layout(
        plgpu, ((16, d_state), (4, d_state), (1, 8 * vector), (1, vector)), (-8,), (-6, -3), -1
    )


def single_layout(plgpu: Any) -> Any:
    """The layout of matrix products with one element, not two, a register."""
    return tiled_layout(plgpu, ((64, 8), (16, 8), (8, 8), (2,), (1,)), (-8,), (-4, -3), -1)


def coefficient_layout(plgpu: Any) -> Any:
    """Layout of [heads, slots]: 16 heads x 32 slots, four slots a thread, read from rows of heads."""
    return tiled_layout(plgpu, ((16, 32), (4, 8), (1, 1)), (-6,), (-4, -3), -1)


def granule_live(first: int, size: int, start: jax.Array, length: jax.Array, ring: int) -> jax.Array:
    """Whether ring slots first..first+size-1 hold any of the `length` tokens that begin at position
    `start`."""
    begin = lax.rem(start, jnp.int32(ring))
    ahead = lax.rem(first - begin + ring, jnp.int32(ring))
    return (ahead < length) | ((ahead > ring - size) & (length > 0))


def pin_plain(plgpu: Any, refs: list) -> None:
    """Tell the layout search that these shared-memory buffers are neither tiled nor swizzled; else it does
    not end."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def nothing(_, *__):
        return None

    nothing(*refs)


def when(condition: Any) -> Callable:
    """`pl.when` that takes a Python bool as known."""
    if isinstance(condition, bool):
        return (lambda body: body()) if condition else (lambda body: None)
    return pl.when(condition)


def indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index of an array of this shape."""
    return itertools.product(*map(range, shape))


def row_products(plgpu: Any, layout: Any, pairs: list[tuple[jax.Array, jax.Array]], fused: bool) -> jax.Array:
    """Partial sums along rows of matrix [M, N] x vector [N], added over the pairs: float32 [M, columns of one
    layout tile].

    `fused` writes one multiply-add an element; the plain form is for the interpreter, which has no inline
    code.
    """
    if not fused:
        terms = [jnp.sum(m * lax.broadcast_in_dim(v, m.shape, (1,)), axis=1) for m, v in pairs]
        return functools.reduce(jnp.add, terms)

    from jax.experimental.mosaic.gpu import FragmentedArray
    from jaxlib.mlir.dialects import arith
    from jaxlib.mlir.dialects import math as mlir_math

    columns = layout.to_mgpu().base_tile_shape[1]

    @plgpu.inline_mgpu(
        arg_types=(layout, layout.reduce(0)) * len(pairs),
        return_type=plgpu.ShapeDtypeStruct((pairs[0][0].shape[0], columns), jnp.float32, layout=layout),
    )
    def multiply(_, *operands):
        total = operands[0].registers[:, :1].copy()
        total.fill(None)
        for matrix, vector in zip(operands[::2], operands[1::2], strict=True):
            wide = vector.broadcast_in_dim(matrix.shape, (1,), matrix.layout)
            for index in indices(matrix.registers.shape):
                at = (index[0], 0, *index[2:])
                value, factor = matrix.registers[index], wide.registers[index]
                if total[at] is None:
                    total[at] = arith.mulf(value, factor)
                else:
                    total[at] = mlir_math.fma(value, factor, total[at])
        return FragmentedArray(_registers=total, _layout=operands[0].layout, _is_signed=None)

    return multiply(*(operand for pair in pairs for operand in pair))


def rank_one(
    plgpu: Any, layout: Any, matrix: jax.Array, column: jax.Array, row: jax.Array, fused: bool
) -> jax.Array:
    """matrix [M, N] + column [M] x row [N], one multiply-add an element."""
    if not fused:
        shape = matrix.shape
        return matrix + lax.broadcast_in_dim(column, shape, (0,)) * lax.broadcast_in_dim(row, shape, (1,))

    from jax.experimental.mosaic.gpu import FragmentedArray
    from jaxlib.mlir.dialects import math as mlir_math

    @plgpu.inline_mgpu(
        arg_types=(layout, layout.reduce(1), layout.reduce(0)),
        return_type=plgpu.ShapeDtypeStruct(matrix.shape, jnp.float32, layout=layout),
    )
    def update(_, base, left, right):
        left = left.broadcast_in_dim(base.shape, (0,), base.layout)
        right = right.broadcast_in_dim(base.shape, (1,), base.layout)
        total = base.registers.copy()
        for index in indices(total.shape):
            total[index] = mlir_math.fma(left.registers[index], right.registers[index], base.registers[index])
        return FragmentedArray(_registers=total, _layout=base.layout, _is_signed=None)

    return update(matrix, column, row)


def scale_rows(matrix: jax.Array, factor: jax.Array) -> jax.Array:
    """matrix [M, N] times a scalar or [M] factors."""
    return matrix * (lax.broadcast_in_dim(factor, matrix.shape, (0,)) if factor.ndim else factor)


def row_sums(partial: jax.Array) -> jax.Array:
    """[64] sums of the partial sums of `row_products`."""
    return partial if partial.ndim == 1 else jnp.sum(partial, axis=1)


# Significant bits of the float types that a reader or a state may have.
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
# float16 keeps fewer exponents than float32, so each further part of a reader is scaled up by this.
_FLOAT16_STEP = 2.0**11


def reader_parts(state_dtype: Any, reader_dtype: Any) -> int:
    """Parts in the state's 16-bit type that add up to a reader in float32 precision; 0 for a float32 state.

    A rounded part leaves a rest one bit smaller than its own last bit.
    """
    name = jnp.dtype(state_dtype).name
    if name == "float32":
        return 0
    parts = -(-_BITS[jnp.dtype(reader_dtype).name] // (_BITS[name] + 1))
    return max(parts, 2) if name == "float16" else parts


def part_step(state_dtype: Any) -> float:
    """Factor between a part of a reader and the next."""
    return _FLOAT16_STEP if jnp.dtype(state_dtype) == jnp.float16 else 1.0


def pack_readers(plgpu: Any, readers: list[Any], target: Any, parts: int) -> None:
    """Writes the parts of readers [K] (references, one a token) into the rows of target [columns, K]."""
    columns, d_state = target.shape
    layout = tiled_layout(plgpu, ((8, 64), (2, 64), (1, 4)), (-6,), (-4, -3), -1)
    row = plgpu.broadcasted_iota(jnp.int32, (columns, d_state), 0, layout=layout)
    block = plgpu.layout_cast(jnp.zeros((columns, d_state), jnp.float32), layout)
    step = part_step(target.dtype)
    for t, reader in enumerate(readers):
        rest = plgpu.load(reader, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        for p in range(parts):
            part = rest.astype(target.dtype).astype(jnp.float32)
            block = jnp.where(row == t * parts + p, lax.broadcast_in_dim(part, block.shape, (1,)), block)
            rest = (rest - part) * step
    target[...] = block.astype(target.dtype)


def part_weights(plgpu: Any, layout: Any, columns: int, t: int, parts: int, step: float) -> jax.Array:
    """[columns] factors that add the parts of token t's reader."""
    column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=layout)
    factors = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
    for p in range(parts):
        factors = jnp.where(column == t * parts + p, step**-p, factors)
    return factors


def shared_bytes(scratch: Any) -> int:
    """Shared memory of buffers, each rounded up to 1 KB as the compiler places them, plus 2 KB for barriers
    and cursors."""
    leaves = jax.tree.leaves(scratch, is_leaf=lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves if hasattr(x, "memory_space")]
    return sum(-(-size // 1024) * 1024 for size in sizes) + 2048


def fit(launch: LaunchParameters, bytes_of: Callable[[int], int]) -> tuple[int, int]:
    """CTAs and stages that are resident at once: a persistent grid that is not runs in two waves."""
    resident = SM_SHARED_BYTES // (bytes_of(launch.stages) + 1024)
    if launch.ctas <= SMS * resident:
        return launch.ctas, launch.stages
    stages = max(launch.stages, MAX_STAGES)
    while stages > 1 and bytes_of(stages) > CTA_SHARED_BYTES:
        stages -= 1
    return SMS, stages


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """What a recurrence brings to the streaming kernel.

    scalars: number of float32 [B, R, H] rings. head_constants: number of float32 [H] rows of the constants
    array. shared_reader: the reader z is the group's own (kept in the activation dtype), else `coefficients`
    writes it. coefficients(context): fills context.weights, context.scale (shared_reader) or context.readers
    from one group's data. apart: it runs in a warpgroup of its own, one group ahead of the tiles.
    compact: with exact products it gives weights of the group's heads alone.
    scratch(plgpu, geometry, exact): extra SMEM buffers of `coefficients`. check(geometry): raises
    `Unsupported` on sizes that it cannot serve.
    """

    scalars: int
    head_constants: int
    shared_reader: bool
    coefficients: Callable[["Group"], None]
    scratch: Callable[[Any, Geometry, bool], dict] = lambda plgpu, geometry, exact: {}
    check: Callable[[Geometry], None] = lambda geometry: None
    apart: bool = False
    compact: bool = False


@dataclasses.dataclass
class Group:
    """References and cursors that `coefficients` works on: data of one (row, group) in shared memory.

    The group's heads begin at `offset` in the head axes of scalars, constants, weights and scale. exact: keys
    and readers are bfloat16 and the kernel is compiled, so that tensor cores may take their products.
    """

    plgpu: Any
    geometry: Geometry
    fused: bool
    exact: bool
    start: jax.Array
    length: jax.Array
    offset: jax.Array
    keys: Any
    reader: Any
    scalars: tuple
    constants: Any
    weights: Any
    scale: Any
    readers: Any
    scratch: dict


@dataclasses.dataclass(frozen=True)
class Operands:
    """Arrays of one call, viewed for the kernel.

    out: reference [B, T, G, tiles, 64]; state [B*G*tiles, 64, K]; values, keys, scalars: rings as references;
    new_*: the call's tokens; cursor int32 [B, 4] rows of (row, start, length, 0), rows that only read first;
    counts int32 [2]: such rows, and those that flush (None for an eager step of all rows).
    """

    out: Any
    state: Any
    values: Any
    keys: Any
    scalars: tuple
    new_values: jax.Array
    new_keys: jax.Array
    new_scalars: tuple
    reader: jax.Array
    constants: jax.Array | None
    cursor: jax.Array | None
    counts: jax.Array | None


def stream_window(
    recurrence: Recurrence,
    geometry: Geometry,
    operands: Operands,
    launch: LaunchParameters,
    *,
    overlap: bool = False,
    interpret: Any = None,
) -> None:
    """Outputs of the reading rows into operands.out; appends their new tokens to the rings in place.

    overlap: start while the kernel before is still running, if that one allows it; it must touch other rows
    only.
    """
    plgpu = mosaic_gpu()
    geometry.check()
    recurrence.check(geometry)
    geo = geometry
    fused = interpret is None
    ring, tokens, tiles, groups = geo.ring, geo.tokens, geo.tiles, geo.groups
    granule = launch.granule
    granules = ring // granule
    row_tiles = groups * tiles
    state_dtype = operands.state.dtype
    value_dtype = operands.new_values.dtype
    layout = plgpu.Layout.WGMMA
    # Transposed loads of 32-bit values need one element a register; the sums of rows land in the same places.
    values_layout = layout if jnp.dtype(value_dtype).itemsize == 2 else single_layout(plgpu)
    has_constants = operands.constants is not None
    copies = 2 + granules
    group_copies = granules + 2 + 3 * recurrence.scalars + (1 if has_constants else 0)

    def transforms(dtype: Any) -> tuple:
        return (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))

    def staged(stages: int) -> dict:
        return {
            "state": plgpu.SMEM((stages, TILE, geo.d_state), state_dtype, transforms=transforms(state_dtype)),
            "values": plgpu.SMEM((stages, geo.tile_slots, TILE), value_dtype),
        }

    exact = fused and jnp.dtype(operands.new_keys.dtype) == jnp.dtype(operands.reader.dtype) == jnp.bfloat16
    compact = exact and recurrence.compact
    # What a group's tiles need is kept twice when the next group's is computed meanwhile.
    halves = 2 if recurrence.apart else 1
    reader_halves = 2 if recurrence.shared_reader else 1
    scratch = {
        "keys": plgpu.SMEM((geo.slots, geo.d_state), operands.new_keys.dtype),
        "reader": plgpu.SMEM((reader_halves, tokens, geo.d_state), operands.reader.dtype),
        "scalars": tuple(
            plgpu.SMEM((geo.slots, geo.head_slots), jnp.float32) for _ in range(recurrence.scalars)
        ),
        "row_scalars": tuple(plgpu.SMEM((tokens, geo.heads), jnp.float32) for _ in range(recurrence.scalars)),
        "weights": plgpu.SMEM(
            (halves, tokens, geo.group_heads if compact else geo.head_slots, geo.slots), jnp.float32
        ),
        "group_barrier": plgpu.Barrier(num_arrivals=group_copies),
        "cursor_barrier": plgpu.Barrier(num_arrivals=1),
    }
    if recurrence.apart:
        scratch["ready"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
        scratch["free"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
    if has_constants:
        scratch["constants"] = plgpu.SMEM((recurrence.head_constants, geo.head_slots), jnp.float32)
    if recurrence.shared_reader:
        scratch["scale"] = plgpu.SMEM((halves, tokens, geo.head_slots), jnp.float32)
    else:
        scratch["readers"] = plgpu.SMEM((halves, tokens, geo.group_heads, geo.d_state), jnp.float32)
    parts = reader_parts(state_dtype, operands.reader.dtype if recurrence.shared_reader else jnp.float32)
    columns = -(-tokens * parts // 8) * 8
    if parts:
        heads = 1 if recurrence.shared_reader else geo.group_heads
        scratch["packed"] = plgpu.SMEM(
            (halves, heads, columns, geo.d_state), state_dtype, transforms=transforms(state_dtype)
        )
    scratch["extra"] = recurrence.scratch(plgpu, geo, exact)
    # A stage is a tile: of a state half as wide, twice as many keep the same bytes in flight.
    deeper = dataclasses.replace(launch, stages=launch.stages * 4 // jnp.dtype(state_dtype).itemsize)
    ctas, stages = fit(deeper, lambda stages: shared_bytes((scratch, staged(stages))))
    ctas = min(ctas, geo.batch * groups * tiles)
    listed = min(geo.batch, -(-geo.batch // ctas) + 2)
    scratch |= staged(stages)
    scratch["cursor"] = plgpu.SMEM((listed, 4), jnp.int32)
    scratch["tile_barrier"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)

    def body(
        *refs: Any,
        state: Any,
        values: Any,
        keys: Any,
        reader: Any,
        scalars: tuple,
        row_scalars: tuple,
        weights: Any,
        cursor: Any,
        tile_barrier: Any,
        group_barrier: Any,
        cursor_barrier: Any,
        constants: Any = None,
        scale: Any = None,
        readers: Any = None,
        packed: Any = None,
        ready: Any = None,
        free: Any = None,
        extra: Any = None,
    ) -> None:
        out, state_in, values_ring, keys_ring, *rest = refs
        scalar_rings, rest = rest[: recurrence.scalars], rest[recurrence.scalars :]
        values_in, keys_in, *rest = rest
        scalars_in, rest = rest[: recurrence.scalars], rest[recurrence.scalars :]
        reader_in, cursor_in, counts_in, *constants_in = rest

        if fused:
            plain = (values, keys, reader, weights, constants, scale, readers)
            pin_plain(
                plgpu, [ref for ref in (*plain, *scalars, *row_scalars, *extra.values()) if ref is not None]
            )

        fresh = pl.ds(ring, tokens)
        total = counts_in[0] * row_tiles
        cta = lax.axis_index("cta")
        begin = lax.div(cta * total, ctas)
        end = lax.div((cta + 1) * total, ctas)
        first_row = jnp.minimum(lax.div(begin, row_tiles), geo.batch - listed)
        serves_tiles = lax.axis_index("warpgroup") == 0 if recurrence.apart else True

        @when(serves_tiles)
        def _():
            plgpu.copy_gmem_to_smem(cursor_in.at[pl.ds(first_row, listed)], cursor, cursor_barrier)

        plgpu.barrier_wait(cursor_barrier)

        first_group = lax.div(begin, tiles)

        def half_of(group: jax.Array, count: int) -> jax.Array:
            return lax.rem(group - first_group, count)

        def place(index: jax.Array, size: int) -> tuple:
            at = lax.div(index, size) - first_row
            return cursor[at, 0], cursor[at, 1], cursor[at, 2], lax.rem(index, size)

        def aligned_head(group: jax.Array) -> jax.Array:
            return lax.div(group * geo.group_heads, 4) * 4

        def skip(wanted: jax.Array, index: jax.Array, beyond: int) -> jax.Array:
            # A leading index out of range makes the copy engine write zeros without reading memory.
            return index if interpret is not None else jnp.where(wanted, index, beyond)

        def issue_tile(index: jax.Array, stage: jax.Array) -> None:
            row, start, length, within = place(index, row_tiles)
            block = row * groups + lax.div(within, tiles)
            tile = lax.rem(within, tiles)
            barrier = tile_barrier.at[stage]
            plgpu.copy_gmem_to_smem(state_in.at[row * row_tiles + within], state.at[stage], barrier)
            for g in range(granules):
                live = granule_live(g * granule, granule, start, length, ring)
                source = skip(live, block, geo.batch * groups)
                rows = pl.ds(g * granule, granule)
                plgpu.copy_gmem_to_smem(values_ring.at[source, rows, tile], values.at[stage, rows], barrier)
            plgpu.copy_gmem_to_smem(values_in.at[block, :, tile], values.at[stage, fresh], barrier)

        def issue_group(index: jax.Array) -> None:
            row, start, length, group = place(index, groups)
            block = row * groups + group
            heads = pl.ds(aligned_head(group), geo.head_slots)
            for g in range(granules):
                live = granule_live(g * granule, granule, start, length, ring)
                source = skip(live, block, geo.batch * groups)
                rows = pl.ds(g * granule, granule)
                plgpu.copy_gmem_to_smem(keys_ring.at[source, rows], keys.at[rows], group_barrier)
            plgpu.copy_gmem_to_smem(keys_in.at[block], keys.at[fresh], group_barrier)
            plgpu.copy_gmem_to_smem(
                reader_in.at[block], reader.at[half_of(index, reader_halves)], group_barrier
            )
            for source, new, target in zip(scalar_rings, scalars_in, scalars, strict=True):
                plgpu.copy_gmem_to_smem(source.at[row, :, heads], target.at[pl.ds(0, ring)], group_barrier)
                plgpu.copy_gmem_to_smem(new.at[row, :, heads], target.at[fresh], group_barrier)
            all_heads = skip(group == 0, row, geo.batch)
            for new, target in zip(scalars_in, row_scalars, strict=True):
                plgpu.copy_gmem_to_smem(new.at[all_heads], target, group_barrier)
            if has_constants:
                plgpu.copy_gmem_to_smem(constants_in[0].at[:, heads], constants, group_barrier)

        def append(index: jax.Array) -> None:
            row, start, length, group = place(index, groups)
            block = row * groups + group
            for t in range(tokens):
                slot = lax.rem(start + length + t, ring)
                plgpu.copy_smem_to_gmem(
                    keys.at[pl.ds(ring + t, 1)], keys_ring.at[block, pl.ds(slot, 1)], commit_group=False
                )

                @pl.when(group == 0)
                def _(t=t, slot=slot):
                    # A whole row of heads at once: partial sectors cost a read before the write.
                    for target, source in zip(scalar_rings, row_scalars, strict=True):
                        plgpu.copy_smem_to_gmem(source.at[t], target.at[row, slot], commit_group=False)

            plgpu.commit_smem_to_gmem_group()

        def prepare(group: jax.Array, carry: None = None) -> None:
            """What the tiles of a group need, and the copies of the next one."""
            half, reader_half = half_of(group, halves), half_of(group, reader_halves)
            plgpu.barrier_wait(group_barrier)

            @pl.when(group * tiles >= begin)
            def _():
                append(group)

            _, start, length, group_of_row = place(group, groups)
            recurrence.coefficients(
                Group(
                    plgpu=plgpu,
                    geometry=geo,
                    fused=fused,
                    exact=exact,
                    start=start,
                    length=length,
                    offset=group_of_row * geo.group_heads - aligned_head(group_of_row),
                    keys=keys,
                    reader=reader.at[reader_half],
                    scalars=scalars,
                    constants=constants,
                    weights=weights.at[half],
                    scale=scale.at[half] if recurrence.shared_reader else None,
                    readers=None if recurrence.shared_reader else readers.at[half],
                    scratch=extra,
                )
            )
            if parts:
                plgpu.commit_smem()
                for h in range(packed.shape[1]):
                    sources = [
                        reader.at[reader_half, t] if recurrence.shared_reader else readers.at[half, t, h]
                        for t in range(tokens)
                    ]
                    pack_readers(plgpu, sources, packed.at[half, h], parts)
            plgpu.commit_smem()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if recurrence.apart:
                plgpu.barrier_arrive(ready.at[half])

            @pl.when((group + 1) * tiles < end)
            def _():
                if recurrence.apart:

                    @pl.when(group > first_group)
                    def _():
                        plgpu.barrier_wait(free.at[1 - half])

                issue_group(group + 1)

            return carry

        def step(index: jax.Array, carry: None) -> None:
            group = lax.div(index, tiles)
            tile = lax.rem(index, tiles)
            half, reader_half = half_of(group, halves), half_of(group, reader_halves)
            stage = lax.rem(index - begin, stages)

            @pl.when((index == begin) | (tile == 0))
            def _():
                if recurrence.apart:
                    plgpu.barrier_wait(ready.at[half])
                else:
                    prepare(group)

            plgpu.barrier_wait(tile_barrier.at[stage])
            past = plgpu.load(values.at[stage].T, layout=values_layout, optimized=False).astype(jnp.float32)
            head = lax.div(tile * TILE, geo.head_dim)
            row, start, length, within = place(index, row_tiles)
            row_group = lax.div(within, tiles)
            offset = row_group * geo.group_heads - aligned_head(row_group)
            if parts:
                # All readouts at once on the tensor cores: their products of 16-bit numbers are exact.
                operand = packed.at[half, 0 if recurrence.shared_reader else head].T

                def multiply(total: Any, stage: jax.Array = stage, operand: Any = operand) -> jax.Array:
                    plgpu.wgmma(total, state.at[stage], operand)
                    return total[...]

                matrix = pl.run_scoped(multiply, plgpu.ACC((TILE, columns), jnp.float32))
            else:
                matrix = plgpu.load(state.at[stage], layout=layout)
            if geo.tile_heads > 1:
                rows = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1))
                row_head = lax.div(tile * TILE + rows, geo.head_dim)

            def reader_of(t: int, h: jax.Array) -> jax.Array:
                if parts:
                    step = part_step(state_dtype)
                    return part_weights(plgpu, layout.reduce(0), columns, t, parts, step)
                source = reader.at[reader_half, t] if recurrence.shared_reader else readers.at[half, t, h]
                return plgpu.load(source, layout=layout.reduce(0)).astype(jnp.float32)

            def rows_of(sums: jax.Array) -> jax.Array:
                return plgpu.layout_cast(sums, layout.reduce(1)) if fused else sums

            for t in range(tokens):
                result: Any = None
                for k in range(geo.tile_heads):
                    h = jnp.minimum(head + k, geo.group_heads - 1) if geo.tile_heads > 1 else head
                    weight = plgpu.load(
                        weights.at[half, t, h if compact else offset + h, pl.ds(0, geo.tile_slots)],
                        layout=values_layout.reduce(0),
                    )
                    if recurrence.shared_reader:
                        if k == 0:
                            z = reader_of(t, h)
                            checkpoint = row_products(plgpu, layout, [(matrix, z)], fused)
                        window = row_products(plgpu, values_layout, [(past, weight)], fused)
                        if geo.tile_heads == 1 and values_layout is layout:
                            y = row_sums(checkpoint * scale[half, t, offset + h] + window)
                        else:
                            if k == 0:
                                checkpoint = row_sums(checkpoint)
                            y = checkpoint * scale[half, t, offset + h] + rows_of(row_sums(window))
                    else:
                        z = reader_of(t, h)
                        if values_layout is layout:
                            y = row_sums(row_products(plgpu, layout, [(matrix, z), (past, weight)], fused))
                        else:
                            y = row_sums(row_products(plgpu, layout, [(matrix, z)], fused))
                            y = y + rows_of(
                                row_sums(row_products(plgpu, values_layout, [(past, weight)], fused))
                            )
                    result = y if k == 0 else jnp.where(row_head >= head + k, y, result)
                out[row, t, row_group, tile] = result.astype(out.dtype)
                new = plgpu.load(values.at[stage, ring + t], layout=layout.reduce(1))
                values_ring[row * groups + row_group, lax.rem(start + length + t, ring), tile] = new

            # Every warp has read the stage, and the group's coefficients, before either is written again.
            plgpu.commit_smem()
            if recurrence.apart:

                @pl.when((tile == tiles - 1) & ((group + 2) * tiles < end))
                def _():
                    plgpu.barrier_arrive(free.at[half])

            @pl.when(index + stages < end)
            def _():
                issue_tile(index + stages, stage)

            return carry

        def serve_groups() -> None:
            @pl.when(begin < end)
            def _():
                issue_group(first_group)

            if recurrence.apart:
                # Without tiles nothing was issued, and a barrier would wait for ever.
                after = jnp.where(begin < end, lax.div(end + tiles - 1, tiles), first_group)
                lax.fori_loop(first_group, after, prepare, None)

        if recurrence.apart:
            pl.when(~serves_tiles)(serve_groups)
        else:
            serve_groups()

        @when(serves_tiles)
        def _():
            # Slots beyond the new tokens are never copied: their weights are zero, so they must be finite.
            for stage in range(stages):
                values.at[stage, pl.ds(ring, NEW_SLOTS)][...] = jnp.zeros((NEW_SLOTS, TILE), value_dtype)
            plgpu.commit_smem()
            for stage in range(stages):

                @pl.when(begin + stage < end)
                def _(stage=stage):
                    issue_tile(begin + stage, jnp.int32(stage))

            lax.fori_loop(begin, end, step, None)

        plgpu.wait_smem_to_gmem(0)
        if overlap and fused:
            # The kernel that follows waits for this one alone, so this one must outlast the one before it.
            plgpu.griddepcontrol_wait()

    kernel = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=scratch,
        grid=(ctas,),
        grid_names=("cta",),
        **({"num_threads": 2, "thread_name": "warpgroup"} if recurrence.apart else {}),
        # Shared memory is ordered by the barriers and by commit_smem; one barrier a load would be a dozen a
        # tile.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=128),
        kernel_name="replay_window",
        **({} if interpret is None else {"interpret": interpret}),
    )
    arguments = [
        operands.out,
        operands.state,
        operands.values,
        operands.keys,
        *operands.scalars,
        operands.new_values,
        operands.new_keys,
        *operands.new_scalars,
        operands.reader,
        operands.cursor,
        operands.counts,
    ]
    if has_constants:
        arguments.append(operands.constants)
    kernel(*arguments)
