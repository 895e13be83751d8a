"""Attention of the few tokens of a step over a cache of keys and values.

A CTA takes key heads of rows one after the other, or a part of one's columns where there are few rows. The
queries of a head are the rows of one matrix; keys and values pass through shared memory in blocks of columns,
as far as the row has tokens, with the running maximum and sum of a softmax (arXiv 2205.14135). The first
blocks of the next head are on their way before the last one of this head is done. The softmax over all
columns is the sum of the parts' outputs, weighted by the parts' sums.
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
# Columns of a block that are copied together; those of which a row has none are not read.
_COPIED = 32
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
    ctas: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Softmax attention of T tokens, scaled by D^-0.5; token t of row b reads columns 0 .. position[b] + t.

    q: [B, T, Nq, D], bfloat16 or float16; query head n reads key head n // (Nq / N). k, v: [B, N, S, D], with
    the step's own tokens; columns beyond S - 1 are not read. position: int32 [B].
    stages: blocks of columns in flight a CTA; None: as many as let two CTAs share a multiprocessor, at least
    two. parts: CTAs that share the columns of a row; None: as many as find room on the device at once. ctas:
    of the device where no row is shared; None: as many as find room.
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
            "queries": plgpu.SMEM((1 if split else 2, ROWS, width), dtype, transforms=transforms),
            "keys": plgpu.SMEM((stages, COLUMNS, width), dtype, transforms=transforms),
            "values": plgpu.SMEM((stages, COLUMNS, width), dtype, transforms=transforms),
            "query_barrier": plgpu.Barrier(num_arrivals=1, num_barriers=1 if split else 2),
            "key_barrier": plgpu.Barrier(num_arrivals=COLUMNS // _COPIED, num_barriers=stages),
            "value_barrier": plgpu.Barrier(num_arrivals=COLUMNS // _COPIED, num_barriers=stages),
        }
        if split:
            wide = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
            buffers["partial"] = plgpu.SMEM((ROWS, _PIECE), jnp.float32, transforms=wide)
            buffers["weight"] = plgpu.SMEM((ROWS,), jnp.float32)
        return buffers

    def in_flight(split: bool) -> int:
        half = SM_SHARED_BYTES // 2 - 1024
        return max(2, *(n for n in range(1, 9) if n == 1 or shared_bytes(scratch(n, split)) <= half))

    def resident(stages: int, split: bool) -> int:
        return SMS * (SM_SHARED_BYTES // (shared_bytes(scratch(stages, split)) + 1024))

    if parts is None:
        parts = max(1, min(resident(stages or in_flight(True), True) // pairs, size // _PART_COLUMNS))
    split = parts > 1
    stages = stages or in_flight(split)
    items = pairs * parts
    ctas = items if split else min(items, ctas or resident(stages, split))
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
        cta = lax.axis_index("cta")
        count = lax.div(items - 1 - cta, ctas) + 1

        def pair_of(item: jax.Array) -> jax.Array:
            return lax.div(cta + item * ctas, parts)

        def live_of(before: jax.Array) -> jax.Array:
            return jnp.minimum(before + tokens, size)

        def span(item: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Tokens before the step, and the first block of the item and the one behind its last."""
            before = position_in[lax.div(pair_of(item), groups)]
            live = live_of(before)
            blocks = lax.div(live + (COLUMNS - 1), COLUMNS)
            share = lax.div(blocks + (parts - 1), parts)
            first = jnp.minimum(lax.rem(cta + item * ctas, parts) * share, blocks)
            return before, first, jnp.minimum(first + share, blocks)

        # Rows beyond the array's end are read as zeros and not written: a start that is no constant may go
        # there.
        packed_rows = pl.ds(cta * 0, rows)

        def issue_queries(item: jax.Array) -> None:
            slot = lax.rem(item, queries.shape[0])
            target = queries.at[slot, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(
                q_in.at[pair_of(item), packed_rows], target, smem["query_barrier"].at[slot]
            )

        def issue(index: jax.Array, cursor: tuple) -> tuple:
            """Begins to copy the cursor's block, the index-th of this CTA; the cursor of the next one."""
            item, before, block, end = cursor

            @pl.when((item < count) & (block < end))
            def _():
                stage, pair = lax.rem(index, stages), pair_of(item)
                barriers = (smem[name].at[stage] for name in ("key_barrier", "value_barrier"))
                for source, target, barrier in zip((k_in, v_in), (keys, values), barriers, strict=True):
                    for first in range(0, COLUMNS, _COPIED):
                        place = block * COLUMNS + first
                        # A leading index out of range makes the copy engine write zeros without reading.
                        here = (
                            pair if interpret is not None else jnp.where(place < live_of(before), pair, pairs)
                        )
                        plgpu.copy_gmem_to_smem(
                            source.at[here, pl.ds(place, _COPIED)],
                            target.at[stage, pl.ds(first, _COPIED)],
                            barrier,
                        )

            def beyond() -> tuple:
                return item + 1, *span(jnp.minimum(item + 1, count - 1))

            return lax.cond(block + 1 < end, lambda: (item, before, block + 1, end), beyond)

        issue_queries(jnp.int32(0))
        cursor = (jnp.int32(0), *span(jnp.int32(0)))
        cursor = lax.fori_loop(0, stages, issue, cursor)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=layout)
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1, layout=layout)

        def constant(shape: tuple, value: float, layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def attend_item(item: jax.Array, carry: tuple) -> tuple:
            before, first, end = span(item)
            pair, slot = pair_of(item), lax.rem(item, queries.shape[0])
            last = jnp.minimum(before + lax.div(row, each), size - 1)
            if not split:
                # The outputs of the item before have left the next one's place.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(item + 1 < count)
                def _():
                    issue_queries(item + 1)

            plgpu.barrier_wait(smem["query_barrier"].at[slot])

            def one(block: jax.Array, carry: tuple) -> tuple:
                total, highest, sums, index, cursor = carry
                stage = lax.rem(index, stages)
                plgpu.barrier_wait(smem["key_barrier"].at[stage])

                scores = product(queries.at[slot], keys.at[stage].T)
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
                return total, top, sums, index + 1, issue(index + stages, cursor)

            vector = layout.reduce(1)
            start = (
                constant((ROWS, width), 0.0, layout),
                constant((ROWS,), _HIDDEN, vector),
                constant((ROWS,), 0.0, vector),
            )
            total, highest, sums, index, cursor = lax.fori_loop(first, end, one, (*start, *carry))
            if split:
                # A part without columns has no sum.
                part = lax.rem(cta, parts)
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
                queries[slot] = (total / lax.broadcast_in_dim(sums, total.shape, (0,))).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(queries.at[slot, pl.ds(0, rows)], out.at[pair, packed_rows])
            return index, cursor

        lax.fori_loop(0, count, attend_item, (jnp.int32(0), cursor))
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
        grid=(ctas,),
        grid_names=("cta",),
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
