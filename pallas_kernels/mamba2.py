"""Mamba-2 kernels: window, flush and eager decode on arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import Warp
from pallas_kernels.fold import Tile, TokenRule
from pallas_kernels.pipeline import (
    Group,
    Recurrence,
    coefficient_layout,
    rank_one,
    row_layout,
    scale_rows,
)
from pallas_kernels.replay import Kernels
from pallas_kernels.segments import by_lanes


def _coefficients(group: Group) -> None:
    """Weights dt_s exp(A sum of later dt) (B_s . C_t), scale exp(A sum of all dt) and D of one (row,
    group)."""
    if group.exact:
        by_lanes(group)
        return
    plgpu, geo = group.plgpu, group.geometry
    ring = geo.ring
    rows = row_layout(plgpu, geo.d_state, group.keys.dtype)
    keys = plgpu.load(group.keys, layout=rows, optimized=False).astype(jnp.float32)
    for t in range(geo.tokens):
        reader = plgpu.load(group.reader.at[t], layout=rows.reduce(0), optimized=False).astype(jnp.float32)
        products = jnp.sum(keys * lax.broadcast_in_dim(reader, keys.shape, (1,)), axis=1)
        group.scratch["products"].at[t][...] = products
    plgpu.commit_smem()

    layout = coefficient_layout(plgpu)
    shape = (geo.head_slots, geo.slots)
    dt_ref = group.scalars[0]
    dt = plgpu.load(dt_ref.T, layout=layout, optimized=False)
    a = plgpu.load(group.constants.at[0], layout=layout.reduce(1), optimized=False)
    d = plgpu.load(group.constants.at[1], layout=layout.reduce(1), optimized=False)
    slot = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    begin = lax.rem(group.start, jnp.int32(ring))
    age = slot - begin
    age = jnp.where(age < 0, age + ring, age)
    is_ring = slot < ring
    committed = is_ring & (age < group.length)

    tail = jnp.zeros(shape, jnp.float32)
    history = jnp.zeros((geo.head_slots,), jnp.float32)
    for i in range(ring):
        position = lax.rem(i - begin + ring, jnp.int32(ring))
        live = position < group.length
        decay = plgpu.load(dt_ref.at[i], layout=layout.reduce(1), optimized=False) * a
        newer = age < jnp.where(live, position, -1)
        tail = tail + jnp.where(newer, lax.broadcast_in_dim(decay, shape, (0,)), 0.0)
        history = history + decay * live.astype(jnp.float32)

    tail = jnp.where(is_ring, tail, 0.0)
    for t in range(geo.tokens):
        decay = plgpu.load(dt_ref.at[ring + t], layout=layout.reduce(1), optimized=False) * a
        tail = tail + jnp.where(slot < ring + t, lax.broadcast_in_dim(decay, shape, (0,)), 0.0)
        history = history + decay
        products = plgpu.load(group.scratch["products"].at[t], layout=layout.reduce(0), optimized=False)
        seen = committed | ((slot >= ring) & (slot <= ring + t))
        weight = dt * jnp.exp(tail) * lax.broadcast_in_dim(products, shape, (1,))
        skip = jnp.where(slot == ring + t, lax.broadcast_in_dim(d, shape, (0,)), 0.0)
        group.weights.at[t][...] = jnp.where(seen, weight, 0.0) + skip
        group.scale.at[t][...] = jnp.exp(history)


MAMBA2 = Recurrence(
    scalars=1,
    head_constants=2,
    shared_reader=True,
    coefficients=_coefficients,
    scratch=lambda plgpu, geo, exact: {
        "products": plgpu.SMEM(((2 if exact else 1) * geo.tokens, geo.slots), jnp.float32)
    },
)


def _token(tile: Tile, state: jax.Array, value: jax.Array, key: jax.Array, scalars: tuple) -> jax.Array:
    a, _ = tile.constants
    (dt,) = scalars
    return rank_one(tile.plgpu, tile.layout, scale_rows(state, jnp.exp(a * dt)), value * dt, key, tile.fused)


def _read(tile: Tile, readouts: tuple, value: jax.Array, scalars: tuple) -> jax.Array:
    a, d = tile.constants
    (dt,) = scalars
    from_reader, key_reader = readouts
    return jnp.exp(a * dt) * from_reader + (dt * key_reader + d) * value


def _history(tile: Tile, state: jax.Array, length: jax.Array, read: Any, read_scalars: Any) -> jax.Array:
    """exp(A sum dt) S + sum_j dt_j exp(A sum_{i>j} dt_i) x_j B_j^T, newest token first: one multiply-add an
    element."""
    a, _ = tile.constants

    def log_decay(j: jax.Array) -> jax.Array:
        return a * read_scalars(j)[0]

    zero = jnp.zeros_like(a)
    total = lax.fori_loop(0, length, lambda j, total: total + log_decay(j), zero)
    state = scale_rows(state, jnp.exp(total))

    def add(i: jax.Array, carry: tuple) -> tuple:
        state, tail = carry
        value, key, (dt,) = read(length - 1 - i)
        state = rank_one(tile.plgpu, tile.layout, state, value * (dt * jnp.exp(tail)), key, tile.fused)
        return tile.plgpu.layout_cast(state, tile.layout), tail + a * dt

    return lax.fori_loop(0, length, add, (state, zero))[0]


def _block(warp: Warp) -> list:
    """The same sum for a block of tokens at once."""
    a, _ = warp.constants
    dt = warp.scalar(0)
    weights = warp.of_tokens(dt)
    columns = [
        [x * weights[n][i % 2] for i, x in enumerate(part)] for n, part in enumerate(warp.own_values())
    ]
    return warp.folded(dt * a, columns)


KERNELS = Kernels(
    name="mamba2",
    window_rule=MAMBA2,
    token_rule=TokenRule(
        token=_token,
        read=_read,
        history=_history,
        block=_block,
        factors=lambda ops, constants, scalars: (ops.exp(constants[0] * scalars[0]), scalars[0]),
        reads_key=False,
        scalars=1,
        head_constants=2,
        skip=1,
    ),
)
window, eager, step, snapshots = KERNELS.window, KERNELS.eager, KERNELS.step, KERNELS.snapshots
