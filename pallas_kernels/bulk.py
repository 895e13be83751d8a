"""Copies to shared memory by the threads of one warpgroup: blocks that lie together by the copy engine,
single rows 16 bytes a thread.

Only rows in use are read. A barrier counts the threads of the warpgroup and the bytes of the blocks. For
compiled kernels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.rows import PIECE_BYTES, WARPGROUP, _barrier, _integer


@dataclasses.dataclass(frozen=True)
class Block:
    """All of `target` from piece first(cursors) of `source` on; a piece has 16 bytes."""

    source: Any
    target: Any
    first: Callable


@dataclasses.dataclass(frozen=True)
class Rows:
    """`count` rows of `pieces` pieces from piece first(cursors) of `source` on, `stride` pieces apart there.

    used(cursors): of rows that are a ring, the oldest in use and how many are; None: all. limit(cursors):
    pieces that a row has at most; None: all. wanted(cursors): whether to copy at all; None: yes.
    """

    source: Any
    target: Any
    count: int
    pieces: int
    stride: int
    first: Callable
    used: Callable | None = None
    limit: Callable | None = None
    wanted: Callable | None = None


def clear(plgpu: Any, buffer: Any) -> None:
    """Fills a buffer in shared memory, a multiple of 16 bytes, with zeros."""
    from pallas_kernels.code_lanes import CodeLanes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def fill(_, buffer):
        ops = CodeLanes()
        pieces = _bytes_of(buffer) // PIECE_BYTES
        thread, zero = ops.warp * 32 + ops.lane, ops.lane * 0

        def one(i: Any, carry: list) -> list:
            piece = thread + i * WARPGROUP
            ops.put_words(buffer, piece * PIECE_BYTES, [zero] * 4, piece < pieces)
            return carry

        ops.loop(-(-pieces // WARPGROUP), one, [])

    fill(buffer)


def copy(
    plgpu: Any, parts: list[Block | Rows], barriers: Any, stage: jax.Array, cursors: tuple[jax.Array, ...]
) -> None:
    """Begins to copy all parts; the barrier of a stage, one of `rows.init_barriers`, tells when they have
    landed. Functions of parts take the cursors as numbers of a lane."""
    from pallas_kernels.lanes import Lanes, first_element

    ref, scalar = plgpu.RefType(), plgpu.Layout.WGMMA
    pairs = tuple((part.source, part.target) for part in parts)

    @plgpu.inline_mgpu(arg_types=(((ref, ref),) * len(parts), ref, (scalar,) * (1 + len(cursors))))
    def run(_, pairs, barriers, numbers):
        from jaxlib.mlir.dialects import nvvm

        stage, *cursors = map(first_element, numbers)
        ops, barrier = Lanes(), _barrier(barriers, stage.raw)
        given = [
            dataclasses.replace(part, source=source, target=target)
            for part, (source, target) in zip(parts, pairs, strict=True)
        ]
        _copy_blocks(ops, [part for part in given if isinstance(part, Block)], barrier, cursors)
        for part in given:
            if isinstance(part, Rows):
                _copy_rows(ops, part, cursors)
        nvvm.cp_async_mbarrier_arrive(barrier, noinc=True)

    run(pairs, barriers, (stage, *cursors))


def _copy_blocks(ops: Any, blocks: list[Block], barrier: Any, cursors: list) -> None:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    if not blocks:
        return

    def shared(pointer: Any) -> Any:
        return llvm.ptrtoint(_integer(32), pointer)

    def run(values: list, text: str, constraints: str) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), values, text, constraints, has_side_effects=True)

    with utils.when(ops.equal(ops.warp * 32 + ops.lane, 0).raw):
        total = utils.c(sum(_bytes_of(block.target) for block in blocks), _integer(32))
        run([shared(barrier), total], "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", "r,r")
        for block in blocks:
            run(
                [
                    shared(utils.memref_ptr(block.target)),
                    _global(block.source, block.first(*cursors)),
                    utils.c(_bytes_of(block.target), _integer(32)),
                    shared(barrier),
                ],
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                "r,l,r,r",
            )


def _copy_rows(ops: Any, part: Rows, cursors: list) -> None:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import nvvm

    zero = ops.lane * 0
    begin, count = zero, zero + part.count
    if part.used is not None:
        begin, count = part.used(*cursors)
        count = ops.select(count < part.count, count, zero + part.count)
    all_pieces, first = count * part.pieces, part.first(*cursors)
    if part.wanted is not None:
        all_pieces = ops.select(part.wanted(*cursors), all_pieces, zero)

    def one(i: Any, carry: list) -> list:
        place = ops.warp * 32 + ops.lane + i * WARPGROUP
        row = place // part.pieces
        piece = place - row * part.pieces
        row = row + begin
        row = ops.select(row < part.count, row, row - part.count)
        there = place < all_pieces
        if part.limit is not None:
            there = there & (piece < part.limit(*cursors))
        with utils.when(there.raw):
            target = utils.getelementptr(
                utils.memref_ptr(part.target), [(row * part.pieces + piece).raw], _piece()
            )
            source = _global(part.source, first + row * part.stride + piece)
            nvvm.cp_async_shared_global(target, source, PIECE_BYTES, nvvm.LoadCacheModifierKind.CG)
        return carry

    turns = -(-part.count * part.pieces // WARPGROUP)
    if part.used is not None and turns > 2:
        ops.loop((all_pieces + (WARPGROUP - 1)) // WARPGROUP, one, [])
        return
    for i in range(turns):
        one(i, [])


def _piece() -> Any:
    from jaxlib.mlir import ir

    return ir.VectorType.get((4,), _integer(32))


def _global(reference: Any, piece: Any) -> Any:
    """Address of a piece in global memory."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import llvm

    base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(reference))
    return utils.getelementptr(base, [piece.raw], _piece())


def _bytes_of(reference: Any) -> int:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    memref = ir.MemRefType(reference.type)
    size = utils.bitwidth(memref.element_type) // 8
    for n in memref.shape:
        size *= n
    return size
