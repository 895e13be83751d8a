"""What the kernels share: sizes, register layouts, sums along rows, and what a recurrence brings along."""

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.launch import MAX_ELEMENTS, TILE, LaunchParameters, Unsupported, mosaic_gpu

NEW_SLOTS = 8
# Hopper: multiprocessors of an H100 or H200, shared memory of one, and the most that one CTA may take.
SMS = 132
SM_SHARED_BYTES = 233472
CTA_SHARED_BYTES = 232448
MAX_STAGES = 4
# Names of `Operands`, in the order of a kernel's arguments.
ARGUMENTS = ("out", "state", "values", "keys", "scalars", "new_values", "new_keys", "new_scalars", "reader")
ARGUMENTS += ("cursor", "counts", "constants", "forgotten", "scale", "copy", "words")


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
        elements = self.batch * self.heads * self.head_dim * self.d_state
        if elements >= MAX_ELEMENTS:
            raise Unsupported(f"a layer's state may have fewer than 2^32 elements, got {elements}")
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


def warp_barrier(plgpu: Any) -> None:
    """Orders the loads of each warp before and after; for compiled kernels."""
    from jax.experimental.mosaic.gpu import utils

    @plgpu.inline_mgpu()
    def barrier(_):
        utils.warp_barrier()

    barrier()


def indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index of an array of this shape."""
    return itertools.product(*map(range, shape))


def row_products(
    plgpu: Any,
    layout: Any,
    pairs: list[tuple[jax.Array, jax.Array]],
    fused: bool,
    sums: jax.Array | None = None,
) -> jax.Array:
    """Partial sums along rows of matrix [M, N] x vector [N], added over the pairs and to `sums` of an earlier
    call: float32 [M, columns of one layout tile].

    `fused` writes one multiply-add an element; the plain form is for the interpreter, which has no inline
    code.
    """
    if not fused:
        terms = [] if sums is None else [sums]
        terms += [jnp.sum(m * lax.broadcast_in_dim(v, m.shape, (1,)), axis=1) for m, v in pairs]
        return functools.reduce(jnp.add, terms)

    from jax.experimental.mosaic.gpu import FragmentedArray
    from jaxlib.mlir.dialects import arith
    from jaxlib.mlir.dialects import math as mlir_math

    columns = layout.to_mgpu().base_tile_shape[1]

    @plgpu.inline_mgpu(
        arg_types=((layout, layout.reduce(0)) * len(pairs), () if sums is None else (layout,)),
        return_type=plgpu.ShapeDtypeStruct((pairs[0][0].shape[0], columns), jnp.float32, layout=layout),
    )
    def multiply(_, operands, earlier):
        total = operands[0].registers[:, :1].copy()
        total.fill(None)
        if earlier:
            total = earlier[0].registers.copy()
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

    return multiply(tuple(operand for pair in pairs for operand in pair), () if sums is None else (sums,))


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


def shared_bytes(scratch: Any) -> int:
    """Shared memory of a kernel with these buffers, each rounded up to 1 KB as the compiler places them, with
    1 KB for sums and 8 bytes a barrier."""
    leaves = jax.tree.leaves(scratch, is_leaf=lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves if hasattr(x, "memory_space")]
    barriers = sum(math.prod(x.num_barriers) for x in leaves if hasattr(x, "num_barriers"))
    return sum(-(-size // 1024) * 1024 for size in sizes) + 1024 + 8 * barriers


def listed_rows(batch: int, ctas: int) -> int:
    """Rows of the plan, at most, that one of `ctas` equal shares of all rows' tiles touches."""
    return min(batch, -(-batch // ctas) + 2)


def fit(launch: LaunchParameters, bytes_of: Callable[[int], int]) -> tuple[int, int]:
    """CTAs and stages that are resident at once: a persistent grid that is not runs in two waves.

    More than half of the stages asked for are enough, else each multiprocessor has one CTA with more of them.
    """
    for stages in range(launch.stages, launch.stages // 2, -1):
        resident = SM_SHARED_BYTES // (bytes_of(stages) + 1024)
        if launch.ctas <= SMS * resident:
            return launch.ctas, stages
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
    from one group's data. apart: it runs in a warpgroup of its own, up to two groups ahead of the tiles;
    ValueError with a shared reader or with constants, which are not kept for so many groups.
    compact: with exact products it reads keys and scalars of the slots in use alone and gives weights of
    the group's heads alone.
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

    def __post_init__(self):
        # The next group's copies would overwrite what this one's tiles or coefficients still read.
        if self.apart and (self.shared_reader or self.head_constants):
            raise ValueError("Coefficients apart from the tiles allow neither a shared reader nor constants.")


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
    counts int32 [4]: such rows, those that flush, and two counters (None for an eager step of all rows);
    forgotten int32 [B*G]: bit i is set where tile i of the group's state is not read but taken for zero;
    None: all are read.
    scale: reference [B*G*tiles, 64] where the state is fp8_e4m3 codes. copy: references to the parts of a
    copy for reads, by tiles. words: uint32 [B, 2] of stochastic rounding: the hash up to the element, and the
    place of the first.
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
    forgotten: jax.Array | None = None
    scale: Any = None
    copy: tuple = ()
    words: jax.Array | None = None

    def arguments(self, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """The operands that there are, by name, in the order of a kernel's arguments."""
        given = ((name, getattr(self, name)) for name in ARGUMENTS if name not in without)
        return {name: operand for name, operand in given if operand is not None}


def by_name(arguments: dict[str, Any], refs: Sequence[Any]) -> types.SimpleNamespace:
    """A kernel's references under the operands' names; None for an operand that there is not."""
    rest = iter(refs)

    def take(operand: Any) -> Any:
        return tuple(next(rest) for _ in operand) if isinstance(operand, tuple) else next(rest)

    return types.SimpleNamespace(
        **dict.fromkeys(ARGUMENTS) | {name: take(operand) for name, operand in arguments.items()}
    )


def run_kernel(
    body: Callable[..., None],
    arguments: dict[str, Any],
    ctas: int,
    name: str,
    *,
    scratch: dict | None = None,
    warpgroups: int = 1,
    interpret: Any = None,
) -> None:
    """body(references by name, buffers) in every CTA of a kernel that writes its references in place.

    Shared memory is ordered by the barriers and by commit_smem alone; one barrier a load would be a dozen a
    tile.
    """
    plgpu = mosaic_gpu()
    kernel = plgpu.kernel(
        lambda *refs, **buffers: body(by_name(arguments, refs), buffers),
        out_type=(),
        **({} if scratch is None else {"scratch_types": scratch}),
        grid=(ctas,),
        grid_names=("cta",),
        **({"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=128),
        kernel_name=name,
        **({} if interpret is None else {"interpret": interpret}),
    )
    kernel(*jax.tree.leaves(tuple(arguments.values())))
