"""Mamba-2 kernels: window, flush and eager decode on arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import launch
from pallas_kernels.fold import Tile, TokenRule, fold_tiles
from pallas_kernels.pipeline import (
    TILE,
    Geometry,
    Group,
    Operands,
    Recurrence,
    coefficient_layout,
    rank_one,
    row_layout,
    scale_rows,
    stream_window,
)


def _coefficients(group: Group) -> None:
    """Weights dt_s exp(A sum of later dt) (B_s . C_t), scale exp(A sum of all dt) and D of one (row, group)."""
    plgpu, geo = group.plgpu, group.geometry
    ring = geo.ring
    rows = row_layout(plgpu, geo.d_state)
    keys = plgpu.load(group.keys, layout=rows, optimized=False).astype(jnp.float32)
    for t in range(geo.tokens):
        reader = plgpu.load(group.reader.at[t], layout=rows.reduce(0), optimized=False).astype(jnp.float32)
        products = jnp.sum(keys * lax.broadcast_in_dim(reader, keys.shape, (1,)), axis=1)
        group.scratch["products"].at[t][...] = products

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
    scratch=lambda plgpu, geo: {"products": plgpu.SMEM((geo.tokens, geo.slots), jnp.float32)},
)


def _token(tile: Tile, state: jax.Array, value: jax.Array, key: jax.Array, scalars: tuple) -> jax.Array:
    a, _ = tile.constants
    (dt,) = scalars
    return rank_one(tile.plgpu, tile.layout, scale_rows(state, jnp.exp(a * dt)), value * dt, key, tile.fused)


def _output(tile: Tile, readout: jax.Array, value: jax.Array) -> jax.Array:
    return readout + tile.constants[1] * value


TOKEN = TokenRule(token=_token, output=_output, scalars=1, head_constants=2)


Ring = tuple[jax.Array, jax.Array, jax.Array]
Rows = tuple[jax.Array, jax.Array]


def _geometry(checkpoint: jax.Array, new: Ring, slots: int) -> Geometry:
    batch, heads, head_dim, d_state = checkpoint.shape
    groups, tokens = new[0].shape[1:3]
    geometry = Geometry(batch, groups, heads, head_dim, d_state, slots, tokens)
    geometry.check()
    return geometry


def _operands(geo: Geometry, state: Any, ring: tuple, new: Ring, reader: jax.Array, a: Any, d: Any, rows: dict) -> Operands:
    blocks = geo.batch * geo.groups
    values, keys, dt = ring
    return Operands(
        state=state,
        values=values,
        keys=keys,
        scalars=(dt,),
        new_values=new[0].reshape(blocks, geo.tokens, geo.tiles, TILE),
        new_keys=new[1].reshape(blocks, geo.tokens, geo.d_state),
        new_scalars=(new[2],),
        reader=reader.reshape(blocks, geo.tokens, geo.d_state),
        constants=jnp.stack([a, d]),
        **rows,
    )


def _ring_views(geo: Geometry, ring: Ring) -> tuple:
    blocks = geo.batch * geo.groups
    return (
        ring[0].reshape(blocks, geo.ring, geo.tiles, TILE),
        ring[1].reshape(blocks, geo.ring, geo.d_state),
        ring[2],
    )


def _state_view(geo: Geometry, state: jax.Array) -> jax.Array:
    return state.reshape(geo.batch * geo.groups * geo.tiles, TILE, geo.d_state)


def window(
    checkpoint: jax.Array,
    ring: Ring,
    new: Ring,
    reader: jax.Array,
    a: jax.Array,
    d: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    rows: Rows | None = None,
    out_dtype: Any = jnp.float32,
    parameters: launch.LaunchParameters | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, Ring]:
    """Outputs [B, T, H, V] of T new tokens from checkpoint and ring, and the ring with the tokens appended.

    checkpoint [B, H, V, K]; ring (x [B, G, R, (H/G)*V], b [B, G, R, K], dt float32 [B, R, H]); new: the same with T
    slots; reader [B, G, T, K]; a, d float32 [H]; start, length int32 [B]; rows (order int32 [B], count int32 [1]):
    the first `count` rows of `order` are served, the outputs of others are undefined. The ring is written in place when
    it is donated. Formula: y = exp(A sum dt) S C + sum_j dt_j exp(A sum_{i>j} dt_i) (B_j . C) x_j + D x.
    """
    geo = _geometry(checkpoint, new, ring[0].shape[2])
    refs = tuple(jax.new_ref(view) for view in _ring_views(geo, ring))
    operands = _operands(
        geo, _state_view(geo, checkpoint), refs, new, reader, a, d, launch.cursors(start, length, rows)
    )
    outputs = stream_window(
        MAMBA2,
        geo,
        operands,
        parameters or launch.window_parameters(None, geo.tokens),
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return outputs, tuple(jax.freeze(ref).reshape(array.shape) for ref, array in zip(refs, ring, strict=True))


def flush(
    checkpoint: jax.Array,
    ring: Ring,
    new: Ring,
    reader: jax.Array,
    a: jax.Array,
    d: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    rows: Rows | None = None,
    out_dtype: Any = jnp.float32,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] of T new tokens on the folded checkpoint, and the checkpoint with the ring folded in.

    Arguments as in `window`; the new tokens are not appended. Rows that are not listed keep their checkpoint and have
    undefined outputs; a listed row of length 0 writes nothing. In place when the checkpoint is donated.
    """
    geo = _geometry(checkpoint, new, ring[0].shape[2])
    state = jax.new_ref(_state_view(geo, checkpoint))
    operands = _operands(
        geo, state, _ring_views(geo, ring), new, reader, a, d, launch.cursors(start, length, rows)
    )
    outputs = fold_tiles(
        TOKEN, geo, operands, ctas or launch.FLUSH_CTAS, out_dtype=out_dtype, history=True, interpret=interpret
    )
    return outputs, jax.freeze(state).reshape(checkpoint.shape)


def eager(
    state: jax.Array,
    new: Ring,
    reader: jax.Array,
    a: jax.Array,
    d: jax.Array,
    *,
    out_dtype: Any = jnp.float32,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and the new state [B, H, V, K] of one eager step (T = 1); in place when donated."""
    geo = _geometry(state, new, 8)
    batch = state.shape[0]
    zeros = jnp.zeros((batch,), jnp.int32)
    ref = jax.new_ref(_state_view(geo, state))
    operands = _operands(geo, ref, (None, None, None), new, reader, a, d, launch.cursors(zeros, zeros, None))
    outputs = fold_tiles(
        TOKEN, geo, operands, ctas or launch.EAGER_CTAS, out_dtype=out_dtype, history=False, interpret=interpret
    )
    return outputs, jax.freeze(ref).reshape(state.shape)
