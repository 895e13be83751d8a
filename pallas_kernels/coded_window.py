"""The window kernel on a coded copy of the state: E4M3, or E2M1 with block scales.

Outputs are those of `window.py`. A copy has a fourth or an eighth of a float32 state's bytes, so here what
counts is work a tile: one warpgroup issues all copies, several tiles a step, one computes coefficients, the
others read tiles, each warp its own, and no two warps of them ever wait for each other.
"""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import coded, numerics
from pallas_kernels.coded_copies import Copies, landing_barriers
from pallas_kernels.fold import claim
from pallas_kernels.launch import TILE, LaunchParameters, mosaic_gpu
from pallas_kernels.pipeline import (
    SMS,
    Geometry,
    Group,
    Operands,
    Recurrence,
    fit,
    listed_rows,
    pin_plain,
    run_kernel,
    shared_bytes,
)
from pallas_kernels.window_parts import aligned_head, append_group

# A chunk is announced while the tiles of up to three before it are read.
ANNOUNCED = 4


class Chunk(NamedTuple):
    """Steps of one group: the chunk's ticket, or its first step in a share; the row's cursor, the group, its
    first tile, and how many steps (0: no more)."""

    ticket: jax.Array
    row: jax.Array
    start: jax.Array
    length: jax.Array
    group: jax.Array
    tile: jax.Array
    count: jax.Array


def step_tiles(tiles: int, most: int) -> int:
    """Tiles of a step: the largest divisor of a group's tiles up to `most`."""
    return max(size for size in range(1, most + 1) if tiles % size == 0)


def stream_coded_window(
    recurrence: Recurrence,
    geometry: Geometry,
    operands: Operands,
    format: str,
    launch: LaunchParameters,
    *,
    interpret: Any = None,
) -> None:
    """As `window.stream_window`, from operands.copy, or the checkpoint where there is none, in `format`."""
    plgpu = mosaic_gpu()
    geometry.check()
    recurrence.check(geometry)
    geo, fused = geometry, interpret is None
    ring, tokens, tiles, groups = geo.ring, geo.tokens, geo.tiles, geo.groups
    codes = coded.Codes(format, geo.d_state)
    size = step_tiles(tiles, launch.step)
    group_steps = tiles // size
    # Tiles of a claim towards the end: enough to be worth a group's coefficients.
    span = max(n for n in range(1, group_steps + 1) if group_steps % n == 0 and (n == 1 or n * size <= 8))
    # A claim takes longer than the tiles of one step.
    claims, apart = launch.claims and group_steps > 1, launch.apart
    row_steps = groups * group_steps
    has_constants = operands.constants is not None
    shared = recurrence.shared_reader
    exact = fused and jnp.dtype(operands.new_keys.dtype) == jnp.dtype(operands.reader.dtype) == jnp.bfloat16
    compact = exact and recurrence.compact
    weight_heads = geo.group_heads if compact else geo.head_slots
    parts = coded.reader_parts(operands.reader.dtype if shared else jnp.float32)
    readers = coded.Readers(tokens, parts)
    workers = launch.workers
    value_dtype = operands.new_values.dtype
    stored: tuple = operands.copy or (operands.state, operands.scale)

    def staged(stages: int) -> dict:
        return {
            "codes": plgpu.SMEM((stages, size, *stored[0].shape[1:]), jnp.uint8),
            "scales": plgpu.SMEM((stages, size, *stored[2].shape[1:]), jnp.uint8) if codes.scaled else None,
            "row_scales": plgpu.SMEM((stages, size, TILE), jnp.float32),
            "values": plgpu.SMEM((stages, ring + tokens, size, TILE), value_dtype),
        }

    reader_heads = 1 if shared else geo.group_heads
    scratch = {
        "keys": plgpu.SMEM((geo.slots, geo.d_state), operands.new_keys.dtype),
        "reader": plgpu.SMEM((tokens, geo.d_state), operands.reader.dtype),
        "scalars": tuple(
            plgpu.SMEM((geo.slots, geo.head_slots), jnp.float32) for _ in range(recurrence.scalars)
        ),
        "row_scalars": tuple(plgpu.SMEM((tokens, geo.heads), jnp.float32) for _ in range(recurrence.scalars)),
        "constants": plgpu.SMEM((recurrence.head_constants, geo.head_slots), jnp.float32)
        if has_constants
        else None,
        "readers": None if shared else plgpu.SMEM((tokens, geo.group_heads, geo.d_state), jnp.float32),
        "weights": plgpu.SMEM((2, tokens, weight_heads, geo.slots), jnp.float32),
        "scale": plgpu.SMEM((2, tokens, geo.head_slots), jnp.float32) if shared else None,
        "packed": plgpu.SMEM(
            (2, reader_heads, readers.vectors, geo.d_state), jnp.float16 if fused else jnp.float32
        ),
        "factors": plgpu.SMEM((2, reader_heads, tokens), jnp.float32),
        "sums": plgpu.SMEM((4 * workers, tokens, TILE), jnp.float32),
        "extra": recurrence.scratch(plgpu, geo, exact),
        "chunks": plgpu.SMEM((ANNOUNCED, len(Chunk._fields)), jnp.int32),
        "ticket": plgpu.SMEM((128,), jnp.int32),
        "known": plgpu.Barrier(num_arrivals=1, num_barriers=ANNOUNCED),
        "used": plgpu.Barrier(num_arrivals=1),
        "ready": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "free": plgpu.Barrier(num_arrivals=workers, num_barriers=2),
    }

    def waiting(stages: int, ctas: int) -> dict:
        """What the stages and the CTA's share of the plan need besides."""
        options = {"scaled": codes.scaled, "constants": has_constants, "fused": fused}
        made = landing_barriers(plgpu, recurrence, stages, **options)
        made["emptied"] = plgpu.Barrier(num_arrivals=team_of(stages), num_barriers=stages)
        if not claims:
            made["cursor"] = plgpu.SMEM((listed_rows(geo.batch, ctas), 4), jnp.int32)
            made["cursor_barrier"] = plgpu.Barrier(num_arrivals=1)
        return made

    def team_of(stages: int) -> int:
        """Workers that read the tiles of a step together; steps go round the teams. A stage is always the
        same team's, which could not tell a turn that it missed from the next."""
        team = max(n for n in range(1, workers + 1) if workers % n == 0 and (n == 1 or 4 * n <= size))
        return workers if stages < workers // team else team

    ctas, stages = fit(launch, lambda stages: shared_bytes((scratch, staged(stages), waiting(stages, SMS))))
    team = team_of(stages)
    teams = workers // team
    stages -= stages % teams
    program = coded.Step(codes, readers, geo, size, 4 * team, weight_heads, shared)
    ctas = min(ctas, geo.batch * row_steps)
    listed = listed_rows(geo.batch, ctas)
    scratch |= staged(stages) | waiting(stages, ctas)

    def body(source: Any, buffers: dict) -> None:
        smem = types.SimpleNamespace(**buffers)
        state = source.copy or (source.state, source.scale)
        parts_of_state = dict(zip(("codes", "row_scales", "scales"), (*state, None), strict=False))
        sources = types.SimpleNamespace(**vars(source) | parts_of_state)
        copies = Copies(plgpu, geo, recurrence, size, smem, sources, fused)
        cursor_in, counts_in = source.cursor, source.counts
        if fused:
            others = {"cursor", "chunks", "cursor_barrier", "known", "used", "ready", "free"}
            others |= {"emptied"}
            plain = {name: buffer for name, buffer in buffers.items() if name not in others}
            pin_plain(plgpu, jax.tree.leaves(plain))

        cta = lax.axis_index("cta")
        total = counts_in[0] * row_steps
        begin, end = lax.div(cta * total, ctas), lax.div((cta + 1) * total, ctas)
        all_groups = counts_in[0] * groups
        whole = jnp.maximum(all_groups - ctas, 0)
        tickets = whole + (all_groups - whole) * (group_steps // span)
        first_row = jnp.minimum(lax.div(begin, row_steps), geo.batch - listed)

        def chunk_of(ticket: jax.Array) -> Chunk:
            small = ticket - whole
            first = jnp.where(small < 0, ticket * group_steps, whole * group_steps + small * span)
            count = jnp.where(first < total, jnp.where(small < 0, group_steps, span), 0)
            at = jnp.minimum(lax.div(first, row_steps), geo.batch - 1)
            row, start, length = (cursor_in[at, i] for i in range(3))
            within = lax.rem(first, row_steps)
            group, step = lax.div(within, group_steps), lax.rem(within, group_steps)
            return Chunk(ticket, row, start, length, group, step * size, count)

        def chunk_at(first: jax.Array) -> Chunk:
            """The chunk of the CTA's share that begins with step `first`."""
            count = jnp.maximum(jnp.minimum(end, (lax.div(first, group_steps) + 1) * group_steps) - first, 0)
            at = jnp.minimum(lax.div(first, row_steps) - first_row, listed - 1)
            row, start, length = (smem.cursor[at, i] for i in range(3))
            within = lax.rem(first, row_steps)
            group, step = lax.div(within, group_steps), lax.rem(within, group_steps)
            return Chunk(first, row, start, length, group, step * size, count)

        def announce(chunk: Chunk, number: jax.Array) -> None:
            """Tells what chunk `number` is, and begins to copy what its coefficients need."""

            @pl.when(number > 0)
            def _():
                plgpu.barrier_wait(smem.used)

            place = lax.rem(number, ANNOUNCED)
            for i, field in enumerate(chunk):
                smem.chunks[place, i] = field
            plgpu.commit_smem()
            if apart:
                plgpu.barrier_arrive(smem.known.at[place])

            @pl.when(chunk.count > 0)
            def _():
                copies.group(chunk)

        def chunk_number(number: jax.Array, barrier: Any) -> Chunk:
            """What was announced, once the barrier says that it may be read."""
            plgpu.barrier_wait(barrier)
            return Chunk(*(smem.chunks[lax.rem(number, ANNOUNCED), i] for i in range(len(Chunk._fields))))

        def wait(barriers: Any, count: int, number: jax.Array) -> None:
            """Until the use before of what `number` (no earlier than 0) takes its turn on is over."""

            @pl.when(number >= 0)
            def _():
                plgpu.barrier_wait(barriers.at[lax.rem(number, count)])

        def first_head(chunk: Chunk) -> jax.Array:
            """Place of the group's first head among the scalars that were copied."""
            return chunk.group * geo.group_heads - aligned_head(geo, chunk.group)

        def prepare(chunk: Chunk, number: jax.Array) -> None:
            """What the tiles of a chunk need."""
            half = lax.rem(number, 2)
            copies.wait(smem.group_landed, 1, number)
            # Threads copied what the copy engine appends to the ring.
            plgpu.commit_smem()

            @pl.when(chunk.tile == 0)
            def _():
                position = chunk.start + chunk.length
                held = smem.keys, smem.row_scalars
                append_group(plgpu, geo, *held, source, chunk.row, chunk.group, position)

            recurrence.coefficients(
                Group(
                    plgpu=plgpu,
                    geometry=geo,
                    fused=fused,
                    exact=exact,
                    start=chunk.start,
                    length=chunk.length,
                    offset=first_head(chunk),
                    keys=smem.keys,
                    reader=smem.reader,
                    scalars=smem.scalars,
                    constants=smem.constants,
                    weights=smem.weights.at[half],
                    scale=smem.scale.at[half] if shared else None,
                    readers=smem.readers,
                    scratch=smem.extra,
                )
            )
            if not shared:
                plgpu.commit_smem()
            readers_of = smem.reader if shared else smem.readers
            pack = _pack if fused else _plain_pack
            pack(plgpu, program, readers_of, smem.packed.at[half], smem.factors.at[half])
            plgpu.commit_smem()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def compute(chunk: Chunk, number: jax.Array) -> None:
            """The coefficients of a chunk, up to two ahead of the tiles."""
            wait(smem.free, 2, number - 2)
            prepare(chunk, number)
            plgpu.barrier_arrive(smem.used)
            plgpu.barrier_arrive(smem.ready.at[lax.rem(number, 2)])

        def finish(number: jax.Array) -> None:
            """After all `number` chunks."""
            wait(smem.free, 2, number - 2)
            plgpu.barrier_arrive(smem.ready.at[lax.rem(number, 2)])
            wait(smem.free, 2, number - 1)
            plgpu.wait_smem_to_gmem(0)

        def serve_groups() -> None:
            """All coefficients."""

            def at(number: jax.Array) -> Chunk:
                return chunk_number(number, smem.known.at[lax.rem(number, ANNOUNCED)])

            def one(carry: tuple) -> tuple:
                number, chunk = carry
                compute(chunk, number)
                return number + 1, at(number + 1)

            zero = jnp.int32(0)
            number, _ = lax.while_loop(lambda carry: carry[1].count > 0, one, (zero, at(zero)))
            finish(number)

        def serve_copies() -> None:
            """All copies to shared memory; coefficients too, unless another warpgroup computes them."""
            copies.begin()
            if claims:
                first, second = chunk_of(cta), chunk_of(cta + ctas)
            else:
                cursors = cursor_in.at[pl.ds(first_row, listed)]
                plgpu.copy_gmem_to_smem(cursors, smem.cursor, smem.cursor_barrier)
                plgpu.barrier_wait(smem.cursor_barrier)
                first = chunk_at(begin)
                second = chunk_at(first.ticket + first.count)

            def one(carry: tuple) -> tuple:
                number, done, chunk, after = carry
                if claims and fused:
                    ticket = claim(plgpu, counts_in, tickets - 1, place=3)

                def issue(offset: jax.Array, carry: None) -> None:
                    wait(smem.emptied, stages, done + offset - stages)
                    copies.step(chunk, offset, lax.rem(done + offset, stages))
                    return carry

                if not apart:
                    compute(chunk, number)
                    announce(after, number + 1)
                lax.fori_loop(0, chunk.count, issue, None)
                if apart:
                    announce(after, number + 1)
                if claims and fused:
                    smem.ticket[...] = ticket
                    plgpu.commit_smem()
                    following = chunk_of(2 * ctas + smem.ticket[0])
                elif claims:
                    following = chunk_of(after.ticket + ctas)
                else:
                    following = chunk_at(after.ticket + after.count)
                return number + 1, done + chunk.count, after, following

            zero = jnp.int32(0)
            announce(first, zero)
            opening: tuple = zero, zero, first, second
            number, done, *_ = lax.while_loop(lambda carry: carry[2].count > 0, one, opening)
            if not apart:
                finish(number)
            for last in range(stages, 0, -1):
                wait(smem.emptied, stages, done - last)

        def serve_tiles(worker: int) -> None:
            mine, part = divmod(worker, team)

            def at(number: jax.Array) -> Chunk:
                return chunk_number(number, smem.ready.at[lax.rem(number, 2)])

            def one(carry: tuple) -> tuple:
                number, done, chunk = carry
                half = lax.rem(number, 2)

                def step(offset: jax.Array) -> None:
                    stage = lax.rem(done + offset, stages)
                    copies.wait(smem.landed, stages, done + offset)
                    chunk_buffers = {
                        "codes": smem.codes.at[stage],
                        "scales": smem.scales.at[stage] if codes.scaled else None,
                        "row_scales": smem.row_scales.at[stage],
                        "values": smem.values.at[stage],
                        "weights": smem.weights.at[half],
                        "head_scale": smem.scale.at[half] if shared else None,
                        "packed": smem.packed.at[half],
                        "factors": smem.factors.at[half],
                        "sums": smem.sums.at[pl.ds(mine * 4 * team, 4 * team)],
                        "out": source.out,
                        "ring": source.values,
                    }
                    head = jnp.int32(0) if compact else first_head(chunk)
                    cursors = (
                        chunk.row,
                        chunk.group,
                        chunk.tile + offset * size,
                        lax.rem(chunk.start, ring),
                        chunk.length,
                        head,
                    )
                    read = _read if fused else _plain_read
                    read(plgpu, program, chunk_buffers, cursors, part)
                    plgpu.barrier_arrive(smem.emptied.at[stage])

                first = lax.rem(mine - lax.rem(done, teams) + teams, teams)

                def turn(i: jax.Array, carry: None) -> None:
                    step(first + i * teams)
                    return carry

                lax.fori_loop(0, lax.div(chunk.count - first + teams - 1, teams), turn, None)
                plgpu.barrier_arrive(smem.free.at[half])
                return number + 1, done + chunk.count, at(number + 1)

            zero = jnp.int32(0)
            lax.while_loop(lambda carry: carry[2].count > 0, one, (zero, zero, at(zero)))

        roles = [serve_copies, *([serve_groups] if apart else [])]
        roles += [lambda worker=worker: serve_tiles(worker) for worker in range(workers)]
        for index, role in enumerate(roles):
            pl.when(lax.axis_index("warpgroup") == index)(role)

    options = {"scratch": scratch, "warpgroups": 1 + apart + workers, "interpret": interpret}
    run_kernel(body, operands.arguments(), ctas, "replay_coded_window", **options)


def _read(plgpu: Any, program: coded.Step, buffers: dict, cursors: tuple, worker: int) -> None:
    ref = plgpu.RefType()
    names = [name for name, buffer in buffers.items() if buffer is not None]

    @plgpu.inline_mgpu(
        arg_types=((ref,) * len(names), (plgpu.Layout.WGMMA,) * len(cursors)),
    )
    def read(_, refs, cursors):
        from pallas_kernels.code_lanes import CodeLanes
        from pallas_kernels.lanes import first_element

        given = dict.fromkeys(buffers) | dict(zip(names, refs, strict=True))
        coded.read_tiles(CodeLanes(), program, given, tuple(map(first_element, cursors)), 4 * worker)

    read(tuple(buffers[name] for name in names), cursors)


def _pack(plgpu: Any, program: coded.Step, source: Any, packed: Any, factors: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def pack(_, *refs):
        from pallas_kernels.code_lanes import CodeLanes

        coded.pack_readers(CodeLanes(), program, *refs)

    pack(source, packed, factors)


def _plain_pack(plgpu: Any, program: coded.Step, source: Any, packed: Any, factors: Any) -> None:
    """`coded.pack_readers` for the interpreter, which has no inline code: readers as they are."""
    del plgpu, factors
    for t in range(program.readers.tokens):
        vector = t * program.readers.parts
        if program.shared:
            packed[0, vector] = source[t].astype(jnp.float32)
            continue
        for head in range(program.geometry.group_heads):
            packed[head, vector] = source[t, head]


def _plain_read(plgpu: Any, program: coded.Step, buffers: dict, cursors: tuple, worker: int) -> None:
    """`coded.read_tiles` for the interpreter."""
    del plgpu
    geo, codes = program.geometry, program.codes
    row, group, first, begin, length, offset = cursors
    block = row * geo.groups + group
    for index in range(worker, program.tiles, program.warps // 4):
        packed = buffers["codes"][index].reshape(TILE, codes.row_bytes)
        scale = buffers["row_scales"][index][:, None]
        if codes.scaled:
            blocks = numerics.decode_e4m3(buffers["scales"][index].reshape(TILE, -1).astype(jnp.uint32))
            scale = scale * jnp.repeat(blocks, coded.BLOCK, axis=1)
            packed = numerics.unpack_nibbles(numerics.from_lane_order(packed)).astype(jnp.uint32)
            state = numerics.decode_e2m1(packed) * scale
        else:
            state = numerics.decode_e4m3(packed.astype(jnp.uint32)) * scale
        head = lax.div((first + index) * TILE + jnp.arange(TILE, dtype=jnp.int32), geo.head_dim)
        values = buffers["values"][:, index].astype(jnp.float32)
        for t in range(geo.tokens):
            reader = buffers["packed"][:, t * program.readers.parts]
            reader = reader[jnp.zeros_like(head) if program.shared else head]
            read = jnp.sum(state * reader, axis=1)
            if program.shared:
                read = read * buffers["head_scale"][t][offset + head]
            weights = buffers["weights"][t][offset + head, : values.shape[0]]
            y = read + jnp.sum(weights * values.T, axis=1)
            buffers["out"][row, t, group, first + index] = y.astype(buffers["out"].dtype)
            slot = lax.rem(begin + length + t, geo.ring)
            buffers["ring"][block, slot, first + index] = buffers["values"][geo.ring + t, index]
