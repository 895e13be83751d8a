"""Products of a step's few rows with the columns of a large matrix, which passes through once at bandwidth.

A CTA takes 64 columns, or a part of their rows where there are few columns. Its block of the matrix streams
through shared memory; the tensor cores take it with the rows, of which 64 cost them as much as one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Unsupported, mosaic_gpu, require_jax
from pallas_kernels.pipeline import SM_SHARED_BYTES, SMS

ROWS = 64
COLUMNS = 64
_STEP = 64
_MOST_STAGES = 8
# Bytes of a tile's line in shared memory.
_LINE = 128
# Activations: of a product alone, and of its first half of the columns times the second.
SQUARED_RELU, GATED_SILU = "squared relu", "gated silu"


def check(rows: int, inputs: int, outputs: int, dtype: Any, activation: str | None = None) -> None:
    """Raise `Unsupported`, with the reason, on what the kernel cannot serve.

    rows: of the left side. inputs, outputs: rows and columns of the matrix.
    """
    require_jax()
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise Unsupported(f"the matrix must be bfloat16 or float16, got {jnp.dtype(dtype).name}")
    if inputs % _STEP or outputs % (2 * COLUMNS if activation == GATED_SILU else COLUMNS):
        raise Unsupported(f"a matrix of {inputs} x {outputs} cannot be cut into {_STEP} x {COLUMNS}")
    if not 1 <= rows <= ROWS:
        raise Unsupported(f"there may be 1 to {ROWS} rows, got {rows}")


def parts_of(inputs: int, outputs: int) -> int:
    """CTAs that share a column's rows so that two are at work on every multiprocessor."""
    return max(1, min(2 * SMS // -(-outputs // COLUMNS), inputs // (8 * _STEP)))


def activated(totals: Sequence[jax.Array], activation: str | None, dtype: Any) -> jax.Array:
    """The activation of float32 products, or of a gate and what it gates; they are rounded first."""
    if activation is None:
        return totals[0]
    rounded = [total.astype(dtype).astype(jnp.float32) for total in totals]
    if activation == SQUARED_RELU:
        positive = jnp.maximum(rounded[0], 0.0)
        return positive * positive
    gate, up = rounded
    return (gate / (1.0 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32) * up


def multiply(
    x: jax.Array,
    matrix: jax.Array,
    *,
    activation: str | None = None,
    parts: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """x matrix, sums in float32: [M, N] in the dtype of x, or float32 [parts, M, N], to be added.

    x: [M, K]; matrix: [K, N]. activation: "squared relu" of the product as rounded, or "gated silu",
    silu(left half) times right half, [M, N / 2]. parts: sums over as many parts of K; None: one, as rounded.
    """
    (count, inputs), outputs, dtype = x.shape, matrix.shape[1], x.dtype
    check(count, inputs, outputs, dtype, activation)
    plgpu = mosaic_gpu()
    gated = activation == GATED_SILU
    width = outputs // 2 if gated else outputs
    blocks, rows = (2 if gated else 1), -(-count // 8) * 8
    steps = inputs // _STEP
    share = -(-steps // (parts or 1))
    out_dtype = dtype if parts is None else jnp.float32
    piece = _LINE // jnp.dtype(out_dtype).itemsize
    pieces = COLUMNS // piece
    resident = -(-(-(-width // COLUMNS) * (parts or 1)) // SMS)
    room = SM_SHARED_BYTES // resident - pieces * ROWS * _LINE - 3 * 1024
    stages = max(2, min(_MOST_STAGES, room // ((ROWS + blocks * COLUMNS) * _STEP * 2)))

    def viewed(shape: tuple[int, ...], dtype: Any) -> Any:
        """A buffer of lines of 128 bytes in tiles of 8, as products and registers have it, and, in the same
        places, without tiles, as copies do: arrays in memory may then have any number of rows."""
        lines = plgpu.SwizzleTransform(_LINE)
        tiles = plgpu.TilingTransform((8, _LINE // jnp.dtype(dtype).itemsize))
        plain = plgpu.SMEM(shape, dtype, transforms=(lines,))
        if interpret is not None:
            return plain
        return plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(tiles, lines)), plain)

    def body(x_in: Any, matrix_in: Any, out: Any, *scratch: Any) -> None:
        *buffers, ready = scratch
        # The interpreter has neither tiles nor two views of the same places.
        views = [(buffer, buffer) if interpret is not None else buffer for buffer in buffers]
        (left, rows_landing), (right, landing), (staged, leaving) = views
        column = lax.axis_index("columns") * COLUMNS
        part = lax.axis_index("part")
        first = part * share
        mine = jnp.minimum(share, steps - first)
        # Rows beyond the arrays' ends are read as zeros and not written: a start that is no constant may go
        # there.
        here = pl.ds(part * 0, rows)

        def issue(i: jax.Array, carry: None = None) -> None:
            stage, place = lax.rem(i, stages), pl.ds((first + i) * _STEP, _STEP)
            destination = rows_landing.at[stage, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(x_in.at[here, place], destination, ready.at[stage])
            for block in range(blocks):
                source = matrix_in.at[place, pl.ds(column + block * width, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, landing.at[stage, block], ready.at[stage])
            return carry

        lax.fori_loop(0, jnp.minimum(mine, stages), issue, None)

        def advance(i: jax.Array) -> None:
            # Every warp has read the stage before it is written again.
            plgpu.commit_smem()

            @pl.when((i >= 1) & (i - 1 + stages < mine))
            def _():
                issue(i - 1 + stages)

        def compute(*totals: Any) -> list:
            def one(i: jax.Array, carry: None) -> None:
                stage = lax.rem(i, stages)
                plgpu.barrier_wait(ready.at[stage])
                for block, total in enumerate(totals):
                    plgpu.wgmma(total, left.at[stage], right.at[stage, block])
                plgpu.wgmma_wait(blocks)
                advance(i)
                return carry

            lax.fori_loop(0, mine, one, None)
            plgpu.wgmma_wait(0)
            return [total[...] for total in totals]

        def interpreted() -> list:
            def one(i: jax.Array, totals: list) -> list:
                stage = lax.rem(i, stages)
                plgpu.barrier_wait(ready.at[stage])
                x = left[stage].astype(jnp.float32)
                totals = [
                    total + jnp.dot(x, right[stage, block].astype(jnp.float32), precision="highest")
                    for block, total in enumerate(totals)
                ]
                advance(i)
                return totals

            return lax.fori_loop(0, mine, one, [jnp.zeros((ROWS, COLUMNS), jnp.float32)] * blocks)

        if interpret is None:
            accumulators = [plgpu.ACC((ROWS, COLUMNS), jnp.float32)] * blocks
            totals = pl.run_scoped(compute, *accumulators)
        else:
            totals = interpreted()
        result = activated(totals, activation, dtype).astype(out_dtype)
        target = out if parts is None else out.at[part]
        for i in range(pieces):
            staged[i] = result[:, i * piece : (i + 1) * piece]
        plgpu.commit_smem()
        for i in range(pieces):
            columns = pl.ds(column + i * piece, piece)
            plgpu.copy_smem_to_gmem(leaving.at[i, pl.ds(0, rows)], target.at[here, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    shape = (count, width) if parts is None else (parts, count, width)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, out_dtype),
        scratch_types=(
            viewed((stages, ROWS, _STEP), dtype),
            viewed((stages, blocks, _STEP, COLUMNS), dtype),
            viewed((pieces, ROWS, piece), out_dtype),
            plgpu.Barrier(num_arrivals=1 + blocks, num_barriers=stages),
        ),
        grid=(-(-width // COLUMNS), parts or 1),
        grid_names=("columns", "part"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        kernel_name="few_rows",
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, matrix)
