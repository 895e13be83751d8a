"""The streaming window kernel: reads every state tile once and adds what the ring and the new tokens
contribute.

A recurrence supplies coefficients a (row, group): readers z, a scale and weights of slots, where slots 0..R-1
are the ring and R..R+T-1 the new tokens. Then

    y[t] = scale[t, head] * S z[t] + sum_slot weight[t, head, slot] x[slot]

A CTA takes chunks, tiles of one group. It has an equal share of all tiles, or it claims chunks until none is
left: some multiprocessors get more memory bandwidth than others, but a claim takes a while. A claimed chunk
is a whole group at first and a few tiles towards the end. One warpgroup takes the tiles; the coefficients may
have their own; one may do other work.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fold import claim, synchronise
from pallas_kernels.launch import TILE, LaunchParameters, flushes_beside, mosaic_gpu
from pallas_kernels.packing import pack_readers, reader_parts
from pallas_kernels.pipeline import (
    CTA_SHARED_BYTES,
    SMS,
    Geometry,
    Group,
    Operands,
    Recurrence,
    fit,
    granule_live,
    listed_rows,
    pin_plain,
    run_kernel,
    shared_bytes,
)
from pallas_kernels.readout import Readout, store_row
from pallas_kernels.rows import WARPGROUP, copy_rows, init_barriers, wait_rows
from pallas_kernels.window_parts import Ahead, Work, aligned_head, append_group, split_stages

# Chunks that are known at once: two whose tiles are at work or ready for it, and two whose coefficients are.
KNOWN = 4


class Chunk(NamedTuple):
    """Tiles of one group: its ticket, or the first tile's index in a share; its row's cursor; the first tile
    in the row, and how many (0: no more chunks); the group's bits of `Operands.forgotten`."""

    ticket: jax.Array
    row: jax.Array
    start: jax.Array
    length: jax.Array
    within: jax.Array
    count: jax.Array
    forgotten: jax.Array


def chunk_tiles(tiles: int, least: int, share: int) -> int:
    """Tiles of a small chunk: the smallest divisor of a group's tiles from `least`, or a CTA's share, on."""
    wanted = max(1, min(least, share))
    return min((size for size in range(wanted, tiles) if tiles % size == 0), default=tiles)


def stream_window(
    recurrence: Recurrence,
    geometry: Geometry,
    operands: Operands,
    launch: LaunchParameters,
    *,
    beside: Work | None = None,
    before: Callable[[int], Work] | None = None,
    interpret: Any = None,
) -> None:
    """Outputs of the reading rows into operands.out; appends their new tokens to the rings in place.

    launch.claims: CTAs claim chunks by operands.counts[3], which is 0 again at the end; else they have equal
    shares. beside: folds the rows that flush in a warpgroup of every CTA while the others read. before(n):
    work that folds them in n warpgroups, as many as shared memory allows, before anything is read, where they
    are too many for `beside` (`launch.flushes_beside`); the stages take its memory afterwards.
    """
    plgpu = mosaic_gpu()
    geometry.check()
    recurrence.check(geometry)
    geo, fused, apart = geometry, interpret is None, recurrence.apart
    ring, tokens, tiles, groups = geo.ring, geo.tokens, geo.tiles, geo.groups
    granule = launch.granule
    granules = ring // granule
    row_tiles = groups * tiles
    state_dtype, value_dtype = operands.state.dtype, operands.new_values.dtype
    has_constants = operands.constants is not None
    group_copies = granules + 2 + 3 * recurrence.scalars + (1 if has_constants else 0)
    parts = reader_parts(state_dtype, operands.reader.dtype if recurrence.shared_reader else jnp.float32)
    columns = -(-tokens * parts // 8) * 8
    readout = Readout(plgpu, geo, state_dtype, recurrence.shared_reader, parts, columns, fused)
    exact = fused and jnp.dtype(operands.new_keys.dtype) == jnp.dtype(operands.reader.dtype) == jnp.bfloat16
    compact = exact and recurrence.compact
    claims = launch.claims
    forgets = operands.forgotten is not None

    def transforms(dtype: Any) -> tuple:
        return (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))

    def staged(stages: int) -> dict:
        return {
            "state": plgpu.SMEM((stages, TILE, geo.d_state), state_dtype, transforms=transforms(state_dtype)),
            "values": plgpu.SMEM((stages, geo.tile_slots, TILE), value_dtype),
        }

    # What a group's tiles need is kept twice when the next group's is computed meanwhile.
    halves = 2 if apart else 1
    # Keys and scalars of the slots in use; without exact products vectors of all slots are read.
    held = ring + tokens if compact else geo.slots

    def kept(count: int, rows: int, columns: int, dtype: Any) -> Any:
        """[count, rows or a few more, columns] in shared memory, every one at a multiple of 128 bytes, where
        copies may begin."""
        line = 128 // jnp.dtype(dtype).itemsize
        return plgpu.SMEM(
            (count, next(n for n in itertools.count(rows) if n * columns % line == 0), columns), dtype
        )

    def buffers_of(copies: int) -> dict:
        """Shared memory but for the stages; copies: groups whose copies are kept at once."""

        def of_scalars(rows: int, heads: int) -> tuple:
            return (kept(copies, rows, heads, jnp.float32),) * recurrence.scalars

        readers = max(copies, 2 if recurrence.shared_reader else 1)
        scratch = {
            "keys": kept(copies, held, geo.d_state, operands.new_keys.dtype),
            "reader": kept(readers, tokens, geo.d_state, operands.reader.dtype),
            "scalars": of_scalars(held, geo.head_slots),
            "row_scalars": of_scalars(tokens, geo.heads),
            "weights": plgpu.SMEM(
                (halves, tokens, geo.group_heads if compact else geo.head_slots, geo.slots), jnp.float32
            ),
            "ticket": plgpu.SMEM((WARPGROUP,), jnp.int32),
            "group_barrier": plgpu.Barrier(num_arrivals=group_copies, num_barriers=copies),
            "constants": None,
            "scale": None,
            "readers": None,
            "packed": None,
            "extra": recurrence.scratch(plgpu, geo, exact),
        }
        if apart:
            if claims:
                scratch["chunks"] = plgpu.SMEM((KNOWN, len(Chunk._fields)), jnp.int32)
                scratch["known"] = plgpu.Barrier(num_arrivals=1, num_barriers=KNOWN)
            scratch["ready"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
            scratch["free"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
        if has_constants:
            scratch["constants"] = plgpu.SMEM((recurrence.head_constants, geo.head_slots), jnp.float32)
        if recurrence.shared_reader:
            scratch["scale"] = plgpu.SMEM((halves, tokens, geo.head_slots), jnp.float32)
        else:
            scratch["readers"] = plgpu.SMEM((halves, tokens, geo.group_heads, geo.d_state), jnp.float32)
        if parts:
            heads = 1 if recurrence.shared_reader else geo.group_heads
            scratch["packed"] = plgpu.SMEM(
                (halves, heads, columns, geo.d_state), state_dtype, transforms=transforms(state_dtype)
            )
        if beside is not None:
            scratch["beside"] = beside.scratch
        return scratch

    def waiting(stages: int, ctas: int) -> dict:
        """What the stages and the CTA's share of the plan need besides."""
        arrivals = 1 if fused else 2 + granules
        made = {"tile_barrier": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)}
        if not claims:
            made["cursor"] = plgpu.SMEM((listed_rows(geo.batch, ctas), 4), jnp.int32)
            made["cursor_barrier"] = plgpu.Barrier(num_arrivals=1)
        if fused:
            made["rows_landed"] = plgpu.SMEM((stages, 2), jnp.int32)
        return made

    warpgroups = 1 + apart + (beside is not None)
    # A stage is a tile: of a state half as wide, twice as many keep the same bytes in flight.
    deeper = dataclasses.replace(launch, stages=launch.stages * 4 // jnp.dtype(state_dtype).itemsize)

    def arranged(copies: int) -> tuple[dict, Ahead | None, Callable[[int], Any], tuple[int, int]]:
        """Shared memory, earlier work, the stages in the memory that this has used, and CTAs and stages."""
        scratch = buffers_of(copies)
        earlier = Ahead.fitting(before, launch.flush_workers, warpgroups, scratch, fused)
        if earlier is not None:
            scratch |= earlier.scratch(plgpu)

        def stages_or_work(stages: int) -> Any:
            return earlier.and_stages(plgpu, staged(stages)) if earlier else staged(stages)

        sizes = fit(deeper, lambda stages: needed(scratch, stages_or_work, stages))
        return scratch, earlier, stages_or_work, sizes

    def needed(scratch: dict, stages_or_work: Callable[[int], Any], stages: int) -> int:
        return shared_bytes((scratch, stages_or_work(stages), waiting(stages, SMS)))

    def costs(arrangement: tuple) -> tuple:
        scratch, earlier, stages_or_work, sizes = arrangement
        fits = needed(scratch, stages_or_work, sizes[1]) <= CTA_SHARED_BYTES
        return sizes, earlier and earlier.work.workers, fits

    # The next group's copies come during the work on this one where neither stages nor workers go for that.
    once, twice = arranged(1), arranged(2) if apart else None
    copies, arrangement = (2, twice) if twice and costs(twice) == costs(once) else (1, once)
    scratch, earlier, stages_or_work, (ctas, stages) = arrangement
    if earlier is not None:
        warpgroups = earlier.warpgroups
    all_tiles = geo.batch * row_tiles
    # Coefficients that need a warpgroup of their own take longer than `stages` tiles.
    span = chunk_tiles(tiles, 2 * stages if apart else stages, all_tiles // ctas)
    ctas = min(ctas, all_tiles // span if claims else all_tiles)
    listed = listed_rows(geo.batch, ctas)
    scratch |= {"stages": stages_or_work(stages)} | waiting(stages, ctas)
    reader_halves = scratch["reader"].shape[0]

    def body(source: Any, buffers: dict) -> None:
        buffers, work_buffers = split_stages(earlier, buffers)
        smem = types.SimpleNamespace(**buffers)
        scalar_rings, cursor_in, counts_in = source.scalars, source.cursor, source.counts
        if fused:
            plain = ("values", "keys", "reader", "weights", "constants", "scale", "readers", "scalars")
            plain += ("row_scalars", "extra", "ticket", "rows_landed")
            pin_plain(plgpu, jax.tree.leaves([buffers[name] for name in plain]))

        cta = lax.axis_index("cta")
        total = counts_in[0] * row_tiles
        if not claims:
            first_row = jnp.minimum(lax.div(lax.div(cta * total, ctas), row_tiles), geo.batch - listed)
        whole = jnp.maximum(counts_in[0] * groups - ctas, 0)
        all_chunks = whole + lax.div(total - whole * tiles, span)
        fresh = pl.ds(ring, tokens)

        def forgotten_of(row: jax.Array, within: jax.Array) -> jax.Array:
            return source.forgotten[row * groups + lax.div(within, tiles)] if forgets else jnp.int32(0)

        def chunk_of(ticket: jax.Array) -> Chunk:
            small = ticket - whole
            first = jnp.where(small < 0, ticket * tiles, whole * tiles + small * span)
            count = jnp.where(first < total, jnp.where(small < 0, tiles, span), 0)
            at = jnp.minimum(lax.div(first, row_tiles), geo.batch - 1)
            row, start, length = (cursor_in[at, i] for i in range(3))
            within = lax.rem(first, row_tiles)
            return Chunk(ticket, row, start, length, within, count, forgotten_of(row, within))

        begin, end = lax.div(cta * total, ctas), lax.div((cta + 1) * total, ctas)

        def chunk_at(first: jax.Array) -> Chunk:
            """The chunk of the CTA's share that begins with tile `first`."""
            count = jnp.maximum(jnp.minimum(end, (lax.div(first, tiles) + 1) * tiles) - first, 0)
            at = jnp.minimum(lax.div(first, row_tiles) - first_row, listed - 1)
            row, start, length = (smem.cursor[at, i] for i in range(3))
            within = lax.rem(first, row_tiles)
            return Chunk(first, row, start, length, within, count, forgotten_of(row, within))

        def opening() -> Chunk:
            if claims:
                return chunk_of(cta)
            plgpu.barrier_wait(smem.cursor_barrier)
            return chunk_at(begin)

        def claim_next(chunk: Chunk) -> jax.Array | None:
            """A ticket that is on its way, for `keep_ticket`: using it at once would wait for memory."""
            if not claims:
                return None
            if fused:
                return claim(plgpu, counts_in, all_chunks - 1, place=3)
            return jnp.full((WARPGROUP,), chunk.ticket, jnp.int32)

        def keep_ticket(ticket: jax.Array | None) -> None:
            if claims:
                smem.ticket[...] = ticket

        def following(chunk: Chunk) -> Chunk:
            """What was claimed last, behind those that all CTAs begin with; or the next one of the share."""
            if claims:
                return chunk_of(smem.ticket[0] + (1 + apart) * ctas)
            return chunk_at(chunk.ticket + chunk.count)

        def skip(wanted: jax.Array, index: jax.Array, beyond: int) -> jax.Array:
            # A leading index out of range makes the copy engine write zeros without reading memory.
            return index if interpret is not None else jnp.where(wanted, index, beyond)

        def ring_copies(chunk: Chunk, copy: Callable[[jax.Array, Any], None]) -> None:
            """copy(index of the row's group or one beyond, slots) of every granule of the ring."""
            block = chunk.row * groups + lax.div(chunk.within, tiles)
            for g in range(granules):
                live = granule_live(g * granule, granule, chunk.start, chunk.length, ring)
                copy(skip(live, block, geo.batch * groups), pl.ds(g * granule, granule))

        def issue_tile(chunk: Chunk, offset: jax.Array, stage: jax.Array) -> None:
            within = chunk.within + offset
            block, tile = chunk.row * groups + lax.div(within, tiles), lax.rem(within, tiles)
            barrier, values = smem.tile_barrier.at[stage], smem.values.at[stage]
            place = chunk.row * row_tiles + within
            if forgets:
                known = lax.bitwise_and(lax.shift_right_logical(chunk.forgotten, tile), 1) == 0
                place = skip(known, place, geo.batch * row_tiles)
            plgpu.copy_gmem_to_smem(source.state.at[place], smem.state.at[stage], barrier)
            if fused:
                begin = lax.rem(chunk.start, jnp.int32(ring))
                places, landed = (stage, block, tile), smem.rows_landed
                rings = source.values, source.new_values, values, landed
                copy_rows(plgpu, *rings, places, begin, chunk.length)
                return
            ring_copies(
                chunk,
                lambda block, slots: plgpu.copy_gmem_to_smem(
                    source.values.at[block, slots, tile], values.at[slots], barrier
                ),
            )
            plgpu.copy_gmem_to_smem(source.new_values.at[block, :, tile], values.at[fresh], barrier)

        def issue_group(chunk: Chunk, number: jax.Array) -> None:
            row, group, half = chunk.row, lax.div(chunk.within, tiles), lax.rem(number, copies)
            block, keys = row * groups + group, smem.keys.at[half]
            heads = pl.ds(aligned_head(geo, group), geo.head_slots)

            def load(array: Any, target: Any) -> None:
                plgpu.copy_gmem_to_smem(array, target, smem.group_barrier.at[half])

            ring_copies(chunk, lambda block, slots: load(source.keys.at[block, slots], keys.at[slots]))
            load(source.new_keys.at[block], keys.at[fresh])
            load(source.reader.at[block], smem.reader.at[lax.rem(number, reader_halves)])
            for old, new, target in zip(scalar_rings, source.new_scalars, smem.scalars, strict=True):
                load(old.at[row, :, heads], target.at[half, pl.ds(0, ring)])
                load(new.at[row, :, heads], target.at[half, fresh])
            all_heads = skip(group == 0, row, geo.batch)
            for new, target in zip(source.new_scalars, smem.row_scalars, strict=True):
                load(new.at[all_heads], target.at[half, pl.ds(0, tokens)])
            if has_constants:
                load(source.constants.at[:, heads], smem.constants)

        def prepare(chunk: Chunk, number: jax.Array) -> None:
            """What the tiles of a chunk need; claims another chunk."""
            ticket = claim_next(chunk)
            half, reader_half = lax.rem(number, halves), lax.rem(number, reader_halves)
            place = lax.rem(number, copies)
            keys, scalars, row_scalars = (
                jax.tree.map(lambda one: one.at[place], both)
                for both in (smem.keys, smem.scalars, smem.row_scalars)
            )
            plgpu.barrier_wait(smem.group_barrier.at[place])
            group = lax.div(chunk.within, tiles)

            @pl.when(lax.rem(chunk.within, tiles) == 0)
            def _():
                position = chunk.start + chunk.length
                append_group(plgpu, geo, keys, row_scalars, source, chunk.row, group, position)

            recurrence.coefficients(
                Group(
                    plgpu=plgpu,
                    geometry=geo,
                    fused=fused,
                    exact=exact,
                    start=chunk.start,
                    length=chunk.length,
                    offset=group * geo.group_heads - aligned_head(geo, group),
                    keys=keys,
                    reader=smem.reader.at[reader_half],
                    scalars=scalars,
                    constants=smem.constants,
                    weights=smem.weights.at[half],
                    scale=smem.scale.at[half] if recurrence.shared_reader else None,
                    readers=None if recurrence.shared_reader else smem.readers.at[half],
                    scratch=smem.extra,
                )
            )
            if parts:
                plgpu.commit_smem()
                for h in range(smem.packed.shape[1]):
                    sources = [
                        smem.reader.at[reader_half, t]
                        if recurrence.shared_reader
                        else smem.readers.at[half, t, h]
                        for t in range(tokens)
                    ]
                    pack_readers(plgpu, sources, smem.packed.at[half, h], parts)
            keep_ticket(ticket)
            plgpu.commit_smem()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def read_tile(chunk: Chunk, offset: jax.Array, number: jax.Array, turn: jax.Array) -> None:
            """turn: tiles of the CTA before this one."""
            half, stage = lax.rem(number, halves), lax.rem(turn, stages)
            within = chunk.within + offset
            group, tile = lax.div(within, tiles), lax.rem(within, tiles)
            readers = smem.reader.at[lax.rem(number, reader_halves)]
            plgpu.barrier_wait(smem.tile_barrier.at[stage])
            if fused:
                wait_rows(plgpu, smem.rows_landed, stage, lax.rem(lax.div(turn, stages), 2))
            outputs = readout(
                smem.state.at[stage],
                smem.values.at[stage],
                (
                    smem.weights.at[half],
                    smem.scale.at[half] if recurrence.shared_reader else None,
                    readers if recurrence.shared_reader else smem.readers.at[half],
                    smem.packed.at[half] if parts else None,
                ),
                lax.div(tile * TILE, geo.head_dim),
                jnp.int32(0) if compact else group * geo.group_heads - aligned_head(geo, group),
                tile * TILE,
            )

            for t, y in enumerate(outputs):
                store_row(plgpu, source.out.at[chunk.row, t, group, tile], y.astype(source.out.dtype), fused)
                slot = lax.rem(chunk.start + chunk.length + t, ring)
                new = plgpu.load(smem.values.at[stage, ring + t], layout=plgpu.Layout.WGMMA.reduce(1))
                store_row(plgpu, source.values.at[chunk.row * groups + group, slot, tile], new, fused)
            # Every warp has read the stage, and the group's coefficients, before either is written again.
            synchronise(plgpu, fused)

        def known_chunk(number: jax.Array) -> Chunk:
            place = lax.rem(number, KNOWN)
            plgpu.barrier_wait(smem.known.at[place])
            return Chunk(*(smem.chunks[place, i] for i in range(len(Chunk._fields))))

        def publish(chunk: Chunk, number: jax.Array) -> None:
            place = lax.rem(number, KNOWN)
            for i, field in enumerate(chunk):
                smem.chunks[place, i] = field
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.known.at[place])

        def wait_free(number: jax.Array) -> None:
            @pl.when(number >= 0)
            def _():
                plgpu.barrier_wait(smem.free.at[lax.rem(number, 2)])

        def serve_groups() -> None:
            """The coefficients of all chunks, up to two ahead of the tiles."""

            def issue(chunk: Chunk, number: jax.Array) -> None:
                pl.when(chunk.count > 0)(functools.partial(issue_group, chunk, number))

            def one(carry: tuple) -> tuple:
                number, chunk, after = carry
                if claims:
                    publish(after, number + 1)
                if copies > 1:
                    issue(after, number + 1)
                wait_free(number - 2)
                prepare(chunk, number)
                plgpu.barrier_arrive(smem.ready.at[lax.rem(number, 2)])
                if copies == 1:
                    issue(after, number + 1)
                return number + 1, after, following(after)

            first, zero = opening(), jnp.int32(0)
            if claims:
                publish(first, zero)
            issue(first, zero)
            second = chunk_of(cta + ctas) if claims else following(first)
            number, *_ = lax.while_loop(lambda carry: carry[1].count > 0, one, (zero, first, second))
            wait_free(number - 2)
            wait_free(number - 1)
            plgpu.wait_smem_to_gmem(0)

        def serve_tiles() -> None:
            # Rows that are not copied have zero weights, so they must be finite.
            for stage in range(stages):
                smem.values.at[stage][...] = jnp.zeros((geo.tile_slots, TILE), value_dtype)
            if fused:
                init_barriers(plgpu, smem.rows_landed)
            plgpu.commit_smem()
            if not claims:
                cursors = cursor_in.at[pl.ds(first_row, listed)]
                plgpu.copy_gmem_to_smem(cursors, smem.cursor, smem.cursor_barrier)
            first = known_chunk(jnp.int32(0)) if apart and claims else opening()
            issued = jnp.minimum(first.count, stages)

            def issue_first(n: jax.Array, carry: None) -> None:
                issue_tile(first, n, n)
                return carry

            if not apart:

                @pl.when(first.count > 0)
                def _():
                    issue_group(first, jnp.int32(0))

            lax.fori_loop(0, issued, issue_first, None)

            def one(carry: tuple) -> tuple:
                number, done, issued, chunk = carry
                if apart:
                    plgpu.barrier_wait(smem.ready.at[lax.rem(number, 2)])
                    after = known_chunk(number + 1) if claims else following(chunk)
                else:
                    prepare(chunk, number)
                    after = following(chunk)

                    @pl.when(after.count > 0)
                    def _():
                        issue_group(after, number + 1)

                end = done + chunk.count

                def tile(offset: jax.Array, issued: jax.Array) -> jax.Array:
                    read_tile(chunk, offset, number, done + offset)

                    def issue(n: jax.Array, carry: None) -> None:
                        here = n < end
                        source = jax.tree.map(lambda a, b: jnp.where(here, a, b), chunk, after)
                        issue_tile(source, n - jnp.where(here, done, end), lax.rem(n, stages))
                        return carry

                    until = jnp.minimum(done + offset + 1 + stages, end + after.count)
                    lax.fori_loop(issued, until, issue, None)
                    return until

                issued = lax.fori_loop(0, chunk.count, tile, issued)
                if apart:
                    plgpu.barrier_arrive(smem.free.at[lax.rem(number, 2)])
                return number + 1, end, issued, after

            zero = jnp.int32(0)
            lax.while_loop(lambda carry: carry[3].count > 0, one, (zero, zero, issued, first))
            plgpu.wait_smem_to_gmem(0)

        few = flushes_beside(counts_in)

        def fold_beside(work: Work) -> None:
            rows = counts_in[1] if earlier is None else jnp.where(few, counts_in[1], 0)
            work.serve(source, cta, ctas, smem.beside, rows)

        if earlier is not None:
            place = cta, ctas
            fold = functools.partial(earlier.run, plgpu, source, smem, work_buffers, place, counts_in[1])
            pl.when(~few)(fold)

        roles = [serve_tiles, *([serve_groups] if apart else [])]
        if beside is not None:
            roles.append(functools.partial(fold_beside, beside))
        if warpgroups == 1:
            serve_tiles()
        else:
            for index, role in enumerate(roles):
                pl.when(lax.axis_index("warpgroup") == index)(role)

    arguments = operands.arguments(without=("scale", "copy", "words"))
    options = {"scratch": scratch, "warpgroups": warpgroups, "interpret": interpret}
    run_kernel(body, arguments, ctas, "replay_window", **options)
