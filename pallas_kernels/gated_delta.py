"""Gated DeltaNet kernels: window in the adjoint form, flush and eager step.

u_t = beta_t (v_t - alpha_t S_{t-1} k_t), S_t = alpha_t S_{t-1} + u_t k_t^T, y_t = S_t q_t (arXiv 2412.06464).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.adjoint import by_products
from pallas_kernels.blocks import Warp, flat, fours
from pallas_kernels.fold import Tile, TokenRule, one_by_one
from pallas_kernels.launch import TILE, Unsupported
from pallas_kernels.new_tokens import NewTokens
from pallas_kernels.pipeline import (
    Geometry,
    Group,
    Recurrence,
    coefficient_layout,
    rank_one,
    row_layout,
    row_products,
    row_sums,
    scale_rows,
)
from pallas_kernels.replay import Kernels


def _coefficients(group: Group) -> None:
    """Weights c_j and readers z of one (row, key head), by the adjoint recurrence over tokens newest first.

    With p_i = k_i . z and z = q at the start, each token j does c_j = beta_j p_j, p_i = alpha_j (p_i - c_j
    k_i . k_j); the output is S z + sum_j c_j v_j with z = P_m q - sum_j c_j P_j k_j, P_j the decay from the
    checkpoint up to j.
    """
    if group.exact:
        by_products(group)
        return
    plgpu, geo, scratch = group.plgpu, group.geometry, group.scratch
    ring, length = geo.ring, group.length
    begin = lax.rem(group.start, jnp.int32(ring))
    log_decays, betas = group.scalars

    def slot_of(age: jax.Array) -> jax.Array:
        return jnp.where(age < length, lax.rem(begin + age, jnp.int32(ring)), ring + age - length)

    rows = row_layout(plgpu, geo.d_state, group.keys.dtype)
    keys = plgpu.load(group.keys, layout=rows, optimized=False).astype(jnp.float32)

    def products(vector: jax.Array) -> jax.Array:
        return row_sums(row_products(plgpu, rows, [(keys, vector.astype(jnp.float32))], group.fused))

    for t in range(geo.tokens):
        reader = plgpu.load(group.reader.at[t], layout=rows.reduce(0), optimized=False)
        scratch["rows"].at[t, pl.ds(0, geo.slots)][...] = products(reader)

    def gram_row(age: jax.Array, carry: None) -> None:
        slot = slot_of(age)
        key = plgpu.load(group.keys.at[slot], layout=rows.reduce(0), optimized=False)
        scratch["gram"].at[slot][...] = products(key)
        return carry

    lax.fori_loop(0, length + geo.tokens, gram_row, None)
    plgpu.commit_smem()

    layout = coefficient_layout(plgpu)
    shape = (geo.head_slots, geo.slots)
    slots = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    ages = slots - begin
    ages = jnp.where(ages < 0, ages + ring, ages)
    ages = jnp.where(slots < ring, ages, slots - ring + length)

    def wide(vector: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (0,)), layout)

    def chain(i: jax.Array, carry: tuple) -> tuple:
        projections, weights, totals, decays = carry
        age = length + geo.tokens - 1 - i
        slot = slot_of(age)
        log_decay = plgpu.load(log_decays.at[slot], layout=layout.reduce(1), optimized=False)
        beta = plgpu.load(betas.at[slot], layout=layout.reduce(1), optimized=False)
        row = plgpu.load(scratch["gram"].at[slot], layout=layout.reduce(0), optimized=False)
        row = plgpu.layout_cast(lax.broadcast_in_dim(row, shape, (1,)), layout)
        here = slots == slot
        later = []
        for t in range(geo.tokens):
            active = (age <= length + t).astype(jnp.float32)
            own = jnp.sum(jnp.where(here, projections[t], 0.0), axis=1)
            weight = wide(beta * own * active)
            decay = wide(jnp.exp(log_decay * active))
            later.append(
                (
                    plgpu.layout_cast(decay * (projections[t] - weight * row), layout),
                    plgpu.layout_cast(jnp.where(here, weight, weights[t]), layout),
                    plgpu.layout_cast(totals[t] + log_decay * active, layout.reduce(1)),
                )
            )
        decays = decays + jnp.where(ages >= age, wide(log_decay), 0.0)
        return *(tuple(part) for part in zip(*later, strict=True)), plgpu.layout_cast(decays, layout)

    def start_of(t: int) -> jax.Array:
        reads = plgpu.load(
            scratch["rows"].at[t, pl.ds(0, geo.slots)], layout=layout.reduce(0), optimized=False
        )
        return plgpu.layout_cast(lax.broadcast_in_dim(reads, shape, (1,)), layout)

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    none = plgpu.layout_cast(jnp.zeros((geo.head_slots,), jnp.float32), layout.reduce(1))
    carry = (
        tuple(start_of(t) for t in range(geo.tokens)),
        (zeros,) * geo.tokens,
        (none,) * geo.tokens,
        zeros,
    )
    _, weights, totals, decays = lax.fori_loop(0, length + geo.tokens, chain, carry)
    for t in range(geo.tokens):
        group.weights.at[t][...] = weights[t]
        scratch["scaled"].at[t][...] = weights[t] * jnp.exp(decays)
        scratch["rows"].at[geo.tokens + t, pl.ds(0, geo.head_slots)][...] = jnp.exp(totals[t])
    plgpu.commit_smem()

    wide_key = plgpu.Layout.WG_STRIDED((geo.d_state,), vec_size=geo.d_state // 128)
    heads = [(t, h) for t in range(geo.tokens) for h in range(geo.group_heads)]

    def subtract(age: jax.Array, readers: tuple) -> tuple:
        slot = slot_of(age)
        key = plgpu.load(group.keys.at[slot], layout=wide_key, optimized=False).astype(jnp.float32)
        return tuple(
            plgpu.layout_cast(z - key * scratch["scaled"][t, group.offset + h, slot], wide_key)
            for z, (t, h) in zip(readers, heads, strict=True)
        )

    queries = [
        plgpu.load(group.reader.at[t], layout=wide_key, optimized=False).astype(jnp.float32)
        for t in range(geo.tokens)
    ]
    readers = tuple(
        plgpu.layout_cast(queries[t] * scratch["rows"][geo.tokens + t, group.offset + h], wide_key)
        for t, h in heads
    )
    readers = lax.fori_loop(0, length + geo.tokens, subtract, readers)
    for (t, h), reader in zip(heads, readers, strict=True):
        group.readers.at[t, h][...] = reader


def _check(geo: Geometry) -> None:
    if geo.head_dim % TILE or geo.d_state % 128:
        raise Unsupported(
            f"Gated DeltaNet needs head_dim a multiple of {TILE} and key dimension a multiple of 128, "
            f"got {geo.head_dim} and {geo.d_state}"
        )
    if geo.group_heads * geo.tokens > 32:
        raise Unsupported(
            f"value heads of a key head times window may be at most 32, got {geo.group_heads} x {geo.tokens}"
        )


def _scratch(plgpu: Any, geo: Geometry, exact: bool) -> dict:
    if exact:
        return {}
    # Small rows share a buffer, since every buffer takes a multiple of 1 KB: first k . q, then the decays of
    # the queries.
    return {
        "rows": plgpu.SMEM((2 * geo.tokens, max(geo.slots, geo.head_slots)), jnp.float32),
        "gram": plgpu.SMEM((geo.slots, geo.slots), jnp.float32),
        "scaled": plgpu.SMEM((geo.tokens, geo.head_slots, geo.slots), jnp.float32),
    }


def _token(
    tile: Tile, state: jax.Array, value: jax.Array, key: jax.Array, scalars: tuple, from_key: jax.Array
) -> jax.Array:
    log_decay, beta = scalars
    decay = jnp.exp(log_decay)
    update = beta * (value - decay * from_key)
    return rank_one(tile.plgpu, tile.layout, scale_rows(state, decay), update, key, tile.fused)


def _read(tile: Tile, readouts: tuple, value: jax.Array, scalars: tuple) -> jax.Array:
    log_decay, beta = scalars
    decay = jnp.exp(log_decay)
    from_reader, key_reader, from_key = readouts
    return decay * from_reader + beta * (value - decay * from_key) * key_reader


def _block(warp: Warp, new: NewTokens | None = None) -> list:
    """The fold by forward substitution: with p_i = S k_i of the block's tokens, token after token does
    u = beta (v - alpha p) and p_i = alpha p_i + u (k . k_i); then all u k^T are added at once.

    new: tokens of a call whose projections move along, so that their outputs are those after the block.
    """
    ops = warp.ops
    log_decay, beta = warp.scalar(0), warp.scalar(1)
    alpha = ops.exp(log_decay)
    sums, gram = warp.nothing(parts=warp.part_count)
    for p, halves in enumerate(warp.rows):
        left = warp.left(*halves)
        sums, gram = warp.project(p, left, sums, gram)
        if new is not None:
            new.project(p, left, warp.key_rows(p))
    values, cross = warp.own_values(), [] if new is None else new.cross

    def eliminate(tile: int, quad: Any, carry: list) -> list:
        four = fours(carry)
        projections, updates, others = four[:2], four[2:4], four[4:]
        for odd in range(2):
            token = quad * 2 + (8 * tile + odd)
            decay, rate = ops.shuffle(alpha, token), ops.shuffle(beta, token)
            update = []
            for half in range(2):
                at = 2 * half + odd
                mine = rate * (values[tile][at] - decay * projections[tile][at])
                updates[tile][at] = ops.select(ops.equal(warp.quad, quad), mine, updates[tile][at])
                update.append(ops.shuffle(mine, warp.row * 4 + quad))
            columns = [(projections, gram, n) for n in range(tile, 2)]
            columns += [(others, cross, n) for n in range(len(others))]
            for moved, grams, n in columns:
                products = warp.gram_row(grams, tile, quad, odd, n)
                moved[n] = [
                    ops.fma(update[i // 2], products[i % 2], decay * p) for i, p in enumerate(moved[n])
                ]
        return flat(*projections, *updates, *others)

    carry = flat(*warp.joined(sums)) + [warp.zero] * 8
    if new is not None:
        carry += flat(*new.projections())
    for tile, count in enumerate(warp.quads(warp.length - warp.first)):
        carry = ops.loop(count, functools.partial(eliminate, tile), carry)
    found = fours(carry)
    if new is not None:
        new.store(found[4:])
    return warp.folded(log_decay, found[2:4])


KERNELS = Kernels(
    name="gated_delta",
    window_rule=Recurrence(
        scalars=2,
        head_constants=0,
        shared_reader=False,
        coefficients=_coefficients,
        scratch=_scratch,
        apart=True,
        compact=True,
        check=_check,
    ),
    token_rule=TokenRule(
        token=_token,
        read=_read,
        history=one_by_one(_token),
        block=_block,
        factors=lambda ops, constants, scalars: (ops.exp(scalars[0]), scalars[1]),
        reads_key=True,
        scalars=2,
        head_constants=0,
    ),
)
window, eager, step, snapshots = KERNELS.window, KERNELS.eager, KERNELS.step, KERNELS.snapshots
