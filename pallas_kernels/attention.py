"""Attention of the few tokens of a step over a cache of keys and values.

A CTA takes one key head of one row, or a part of its columns where there are few rows. Its queries are the
rows of one matrix; keys and values pass through shared memory in blocks of columns, as far as the row has
tokens, with the running maximum and sum of a softmax (arXiv 2205.14135). The softmax over all columns is the
sum of the parts' outputs, weighted by the parts' sums.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Unsupported, mosaic_gpu, require_jax
from pallas_kernels.pipeline import SM_SHARED_BYTES, SMS, shared_bytes

# Rows of a product on the tensor cores; queries beyond a head's own are never stored.
ROWS = 64
COLUMNS = 64
# Columns below which a part of a row is not worth its sum with the others.
_PART_COLUMNS = 128
# Channels of a part's output that are stored at once.
_PIECE = 64
_HIDDEN = -1e30


def check(rows: int, head_dim: int, columns: int, dtype: Any) -> None:
    """Raise `Unsupported`, with the reason, on what the kernel cannot serve.

    rows: query rows of a key head, those of all tokens. columns: of the cached keys and values.
    """
    require_jax()
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise Unsupported(f"keys and values must be bfloat16 or float16, got {jnp.dtype(dtype).name}")
    if head_dim not in (64, 128, 192, 256):
        raise Unsupported(f"head_dim must be 64, 128, 192 or 256, got {head_dim}")
    if columns % 8:
        raise Unsupported(f"keys and values must have a multiple of 8 columns, got {columns}")
    if not 1 <= rows <= ROWS:
        raise Unsupported(f"a key head may have 1 to {ROWS} query rows, got {rows}")


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position: jax.Array,
    *,
    stages: int | None = None,
    parts: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Softmax attention of T tokens, scaled by D^-0.5; token t of row b reads columns 0 .. position[b] + t.

    q: [B, T, Nq, D], bfloat16 or float16; query head n reads key head n // (Nq / N). k, v: [B, N, S, D], with
    the step's own tokens; columns beyond S - 1 are not read. position: int32 [B].
    stages: blocks of columns in flight a CTA; None: as many as let two CTAs share a multiprocessor, at least
    two. parts: CTAs that share the columns of a row; None: as many as find room on the device at once.
    Returns [B, T, Nq, D]. Scores, softmax and sums in float32, its weights rounded as q is.
    """
    batch, tokens, heads, width = q.shape
    groups, size = k.shape[1:3]
    each, pairs = heads // groups, batch * groups
    queries_each = tokens * each
    check(queries_each, width, size, q.dtype)
    plgpu, dtype = mosaic_gpu(), q.dtype
    rows = -(-queries_each // 8) * 8
    packed = jnp.moveaxis(q.reshape(batch, tokens, groups, each, width), 2, 1)
    packed = packed.reshape(pairs, queries_each, width)
    # Arrays in memory have whole tiles of 8 rows, or less than one.
    held = queries_each if queries_each < 8 else rows
    packed = jnp.pad(packed, ((0, 0), (0, held - queries_each), (0, 0)))
    scale = width**-0.5 * math.log2(math.e)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def scratch(stages: int, split: bool) -> dict:
        buffers = {
            "queries": plgpu.SMEM((ROWS, width), dtype, transforms=transforms),
            "keys": plgpu.SMEM((stages, COLUMNS, width), dtype, transforms=transforms),
            "values": plgpu.SMEM((stages, COLUMNS, width), dtype, transforms=transforms),
            "query_barrier": plgpu.Barrier(num_arrivals=1),
            "key_barrier": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            "value_barrier": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        }
        if split:
            wide = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
            buffers["partial"] = plgpu.SMEM((ROWS, _PIECE), jnp.float32, transforms=wide)
            buffers["weight"] = plgpu.SMEM((ROWS,), jnp.float32)
        return buffers

    def in_flight(split: bool) -> int:
        half = SM_SHARED_BYTES // 2 - 1024
        return max(2, *(n for n in range(1, 9) if n == 1 or shared_bytes(scratch(n, split)) <= half))

    if parts is None:
        used = shared_bytes(scratch(stages or in_flight(True), True)) + 1024
        parts = max(1, min(SMS * (SM_SHARED_BYTES // used) // pairs, size // _PART_COLUMNS))
    split = parts > 1
    stages = stages or in_flight(split)
    layout = plgpu.Layout.WGMMA

    def product(left: Any, right: Any, total: Any = None) -> jax.Array:
        """left right + total on the tensor cores; the interpreter has none."""
        if interpret is not None:
            left, right = (jnp.asarray(x[...], jnp.float32) for x in (left, right))
            result = jnp.dot(left, right, precision=lax.Precision.HIGHEST)
            return result if total is None else total + result

        def multiply(accumulator: Any) -> Any:
            plgpu.wgmma(accumulator, left, right)
            return accumulator[...] if total is None else None

        if total is None:
            return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))
        return pl.run_state(multiply)(plgpu.ACC.init(total))

    def body(q_in: Any, k_in: Any, v_in: Any, position_in: Any, out: Any, *rest: Any, **smem: Any) -> None:
        queries, keys, values = smem["queries"], smem["keys"], smem["values"]
        pair, part = lax.axis_index("pair"), lax.axis_index("part")
        before = position_in[lax.div(pair, groups)]
        live = jnp.minimum(before + tokens, size)
        blocks = lax.div(live + (COLUMNS - 1), COLUMNS)
        share = lax.div(blocks + (parts - 1), parts)
        first = jnp.minimum(part * share, blocks)
        blocks = jnp.minimum(first + share, blocks)
        # Rows beyond the array's end are read as zeros and not written: a start that is no constant may go
        # there.
        packed_rows = pl.ds(pair * 0, rows)

        def issue(block: jax.Array, carry: None = None) -> None:
            stage, place = lax.rem(block - first, stages), pl.ds(block * COLUMNS, COLUMNS)
            plgpu.copy_gmem_to_smem(k_in.at[pair, place], keys.at[stage], smem["key_barrier"].at[stage])
            plgpu.copy_gmem_to_smem(v_in.at[pair, place], values.at[stage], smem["value_barrier"].at[stage])
            return carry

        plgpu.copy_gmem_to_smem(q_in.at[pair, packed_rows], queries.at[pl.ds(0, rows)], smem["query_barrier"])
        lax.fori_loop(first, jnp.minimum(blocks, first + stages), issue, None)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=layout)
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1, layout=layout)
        last = jnp.minimum(before + lax.div(row, each), size - 1)
        plgpu.barrier_wait(smem["query_barrier"])

        def one(block: jax.Array, carry: tuple) -> tuple:
            total, highest, sums = carry
            stage = lax.rem(block - first, stages)
            plgpu.barrier_wait(smem["key_barrier"].at[stage])

            scores = product(queries, keys.at[stage].T)
            scores = jnp.where(column + block * COLUMNS <= last, scores * scale, _HIDDEN)
            top = jnp.maximum(highest, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, (0,)))
            kept = jnp.exp2(highest - top)
            sums = sums * kept + jnp.sum(weights, axis=1)
            total = total * lax.broadcast_in_dim(kept, total.shape, (0,))
            plgpu.barrier_wait(smem["value_barrier"].at[stage])

            total = product(weights.astype(dtype), values.at[stage], total)
            # Every warp has read the stage before it is written again.
            plgpu.commit_smem()

            @pl.when(block + stages < blocks)
            def _():
                issue(block + stages)

            return total, top, sums

        def constant(shape: tuple, value: float, layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        vector = layout.reduce(1)
        start = (
            constant((ROWS, width), 0.0, layout),
            constant((ROWS,), _HIDDEN, vector),
            constant((ROWS,), 0.0, vector),
        )
        total, highest, sums = lax.fori_loop(first, blocks, one, start)
        if split:
            # A part without columns has no sum.
            total = total / lax.broadcast_in_dim(jnp.maximum(sums, 1e-30), total.shape, (0,))
            smem["weight"][...] = highest + jnp.log(jnp.maximum(sums, 1e-30)) * math.log2(math.e)
            for piece in range(0, width, _PIECE):
                smem["partial"][...] = total[:, piece : piece + _PIECE]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    smem["partial"].at[pl.ds(0, rows)], out.at[pair, part, :, pl.ds(piece, _PIECE)]
                )
                plgpu.wait_smem_to_gmem(0)
            plgpu.copy_smem_to_gmem(smem["weight"], rest[0].at[pair, part])
        else:
            queries[...] = (total / lax.broadcast_in_dim(sums, total.shape, (0,))).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries.at[pl.ds(0, rows)], out.at[pair, packed_rows])
        plgpu.wait_smem_to_gmem(0)

    whole = jax.ShapeDtypeStruct((pairs, held, width), dtype)
    pieces = (
        jax.ShapeDtypeStruct((pairs, parts, rows, width), jnp.float32),
        jax.ShapeDtypeStruct((pairs, parts, ROWS), jnp.float32),
    )
    kernel = plgpu.kernel(
        body,
        out_type=pieces if split else whole,
        scratch_types=scratch(stages, split),
        grid=(pairs, parts),
        grid_names=("pair", "part"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        kernel_name="decode_attention",
        **({} if interpret is None else {"interpret": interpret}),
    )
    views = (array.reshape(pairs, size, width) for array in (k, v))
    outputs = kernel(packed, *views, position)
    if split:
        totals, weights = outputs
        weights = weights[:, :, :queries_each]
        weights = jnp.exp2(weights - jnp.max(weights, axis=1, keepdims=True))
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
        outputs = jnp.sum(totals[:, :, :queries_each] * weights[..., None], axis=1).astype(dtype)
    outputs = outputs[:, :queries_each].reshape(batch, groups, tokens, each, width)
    return jnp.moveaxis(outputs, 1, 2).reshape(q.shape)
