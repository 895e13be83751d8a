"""Copies of single ring rows to shared memory by the threads of a warpgroup.

Only rows in use are read, 16 bytes a thread at once. A barrier then counts the threads once a tile; with
copies by the copy engine every thread arrives for each of them. For compiled kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp

WARPGROUP = 128
PIECE_BYTES = 16


def _integer(bits: int) -> Any:
    from jaxlib.mlir import ir

    return ir.IntegerType.get_signless(bits)


def _barrier(barriers: Any, stage: Any) -> Any:
    from jax.experimental.mosaic.gpu import utils

    return utils.getelementptr(utils.memref_ptr(barriers), [stage], _integer(64))


def init_barriers(plgpu: Any, barriers: Any) -> None:
    """Lets each of the barriers, int32 [n, 2], wait for the threads of a warpgroup; `commit_smem` must
    follow."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import nvvm

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def init(_, barriers):
        first = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        for i in range(barriers.type.shape[0]):
            nvvm.mbarrier_init(_barrier(barriers, i), utils.c(WARPGROUP, _integer(32)), predicate=first)

    init(barriers)


def wait_rows(plgpu: Any, barriers: Any, stage: jax.Array, parity: jax.Array) -> None:
    """Waits for all copies of a stage; parity: of the times that the stage was filled before."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import nvvm

    from pallas_kernels.lanes import first_element

    scalar = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar))
    def wait(_, barriers, stage, parity):
        place = _barrier(barriers, first_element(stage).raw)
        # It tries again after that many nanoseconds.
        nvvm.mbarrier_try_wait_parity(place, first_element(parity).raw, utils.c(10_000_000, _integer(32)))

    wait(barriers, stage, parity)


def copy_rows(
    plgpu: Any,
    ring: Any,
    new: Any,
    target: Any,
    barriers: Any,
    place: tuple[jax.Array, jax.Array, jax.Array],
    begin: jax.Array,
    length: jax.Array,
) -> None:
    """Begins to copy a tile's values of the committed ring slots and of the new tokens.

    ring [blocks, R, tiles, 64] and new [blocks, T, tiles, 64] in global memory; target [slots, 64] in shared
    memory: the ring's slots, then the new tokens; rows that are not in use stay as they are. place: stage,
    block and tile; begin: slot of the oldest of `length` committed tokens.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, nvvm

    from pallas_kernels.lanes import Lanes, Number, first_element

    ref, scalar = plgpu.RefType(), plgpu.Layout.WGMMA
    slots, tiles, width = ring.shape[1:]
    tokens = new.shape[1]
    itemsize = jnp.dtype(ring.dtype).itemsize
    pieces = width * itemsize // PIECE_BYTES
    rows = WARPGROUP // pieces

    @plgpu.inline_mgpu(arg_types=((ref,) * 4, (scalar,) * 5))
    def copy(_, refs, scalars):
        ops = Lanes()
        ring, new, target, barriers = refs
        stage, block, tile, begin, length = map(first_element, scalars)
        element = ir.MemRefType(target.type).element_type
        thread = ops.warp * 32 + ops.lane
        row, column = thread // pieces, (thread & (pieces - 1)) * (PIECE_BYTES // itemsize)

        def address(source: Any, index: Number) -> Any:
            offset = (index * tiles + tile) * width + column
            base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(source))
            return utils.getelementptr(base, [offset.raw], element)

        for first in range(0, slots + tokens, rows):
            slot = row + first
            in_ring = slot < slots
            age = slot - begin
            age = ops.select(age < 0, age + slots, age)
            live = ops.select(in_ring, age < length, slot < slots + tokens)
            source = arith.select(
                in_ring.raw,
                address(ring, block * slots + slot),
                address(new, block * tokens + (slot - slots)),
            )
            with utils.when(live.raw):
                into = utils.getelementptr(utils.memref_ptr(target), [(slot * width + column).raw], element)
                nvvm.cp_async_shared_global(into, source, PIECE_BYTES, nvvm.LoadCacheModifierKind.CG)
        nvvm.cp_async_mbarrier_arrive(_barrier(barriers, stage.raw), noinc=True)

    copy((ring, new, target, barriers), (*place, begin, length))
