"""Mamba-2 (arXiv 2405.21060): S_t = exp(a dt_t) S_{t-1} + dt_t x_t b_t^T, y_t = S_t c_t + d x_t."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from replayssm_jax.recurrence.layout import (
    grouped,
    outputs_by_token,
    per_head,
    state_by_group,
    values_by_group,
)
from replayssm_jax.recurrence.segment import (
    einsum,
    scan_chunks,
    segment_sum,
    select_rows,
    slot_age,
    suffix_sum,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the ring holds of each token.

    x: [B, G, T, (H/G)*V], activation dtype; head h is the (h mod H/G)-th of group h // (H/G).
    b: [B, G, T, K], activation dtype.
    dt: float32 [B, T, H], after bias, softplus and limit.
    """

    x: Array
    b: Array
    dt: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
    """Constants of the heads: decay rate a = -exp(A_log) and skip d, both float32 [H]."""

    a: Array
    d: Array


def zeros(
    batch: int,
    tokens: int,
    *,
    heads: int,
    groups: int,
    head_dim: int,
    d_state: int,
    dtype: jax.typing.DTypeLike,
) -> Inputs:
    """Returns neutral inputs, all zeros, of the shapes in `Inputs`."""
    return Inputs(
        x=jnp.zeros((batch, groups, tokens, heads // groups * head_dim), dtype),
        b=jnp.zeros((batch, groups, tokens, d_state), dtype),
        dt=jnp.zeros((batch, tokens, heads), jnp.float32),
    )


def neutralize(inputs: Inputs, valid: Bool[Array, "B T"]) -> Inputs:
    """Returns the inputs with the tokens that are not valid made to change no state."""
    return dataclasses.replace(inputs, dt=jnp.where(valid[:, :, None], inputs.dt, 0.0))


def _per_group(constant: Float32[Array, " H"], groups: int) -> Float32[Array, "1 G M 1"]:
    return constant.astype(jnp.float32).reshape(1, groups, -1, 1)


def eager_step(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B G 1 K"], heads: Heads
) -> tuple[Float32[Array, "B 1 H V"], Float32[Array, "B H V K"]]:
    """Advances the state by one token and reads it with `reader` (C); the outputs include d x."""
    # A state that is never reshaped is updated in place by XLA; a reshaped one is copied first.
    batch, count, head_dim, _ = state.shape
    x = inputs.x.astype(jnp.float32).reshape(batch, count, head_dim)
    dt = inputs.dt[:, 0, :, None]
    decay = jnp.exp(heads.a.astype(jnp.float32)[None, :, None] * dt)
    b, c = (per_head(field[:, :, 0].astype(jnp.float32), count) for field in (inputs.b, reader))
    new = decay[..., None] * state + (dt * x)[..., None] * b[:, :, None]
    outputs = jnp.sum(new * c[:, :, None], axis=-1) + heads.d.astype(jnp.float32)[None, :, None] * x
    return outputs[:, None], new


def _absorb(
    state: Float32[Array, "B H V K"],
    inputs: Inputs,
    weights: Float32[Array, "B G M T"],
    total: Float32[Array, "B G M"],
) -> Float32[Array, "B H V K"]:
    """Returns exp(total) S + sum_j weights_j x_j b_j^T, the state after all the tokens."""
    groups = inputs.b.shape[1]
    weighted = weights[..., None] * values_by_group(inputs.x, state.shape[2])
    added = einsum("bgmtv,bgtk->bgmvk", weighted, inputs.b.astype(jnp.float32))
    return (jnp.exp(total)[..., None, None] * state_by_group(state, groups) + added).reshape(state.shape)


def _chunk(
    heads: Heads, state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B G T K"]
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    groups, tokens = reader.shape[1:3]
    a, d = _per_group(heads.a, groups), _per_group(heads.d, groups)
    c = reader.astype(jnp.float32)
    dt = grouped(inputs.dt, groups)
    x = values_by_group(inputs.x, state.shape[2])
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None, None]
    decay = jnp.where(causal, jnp.exp(a[..., None] * segment_sum(dt)), 0.0)
    scores = einsum("bgik,bgjk->bgij", c, inputs.b.astype(jnp.float32))
    weights = decay * dt[:, :, :, None, :] * scores[:, :, None]
    carried = einsum("bgmvk,bgik->bgmiv", state_by_group(state, groups), c)
    outputs = jnp.exp(a * jnp.cumsum(dt, axis=-1))[..., None] * carried
    outputs = outputs + einsum("bgmij,bgmjv->bgmiv", weights, x) + d[..., None] * x
    to_end = dt * jnp.exp(a * suffix_sum(dt))
    return outputs_by_token(outputs), _absorb(
        state, inputs, to_end, (a * jnp.sum(dt, axis=-1, keepdims=True))[..., 0]
    )


def prefill(
    state: Float32[Array, "B H V K"],
    inputs: Inputs,
    reader: Float[Array, "B G T K"],
    heads: Heads,
    lengths: Int32[Array, " B"],
    *,
    chunk_size: int = 64,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    """Advances the state by the first `lengths` tokens of every row, in chunks, and reads every token.

    A chunk takes the dual form of section 6 of the paper. Outputs beyond a row's length are finite and mean
    nothing; a row of length 0 keeps its state bit for bit.
    """
    valid = jnp.arange(reader.shape[2], dtype=jnp.int32)[None, :] < lengths[:, None]
    chunk = functools.partial(_chunk, heads)
    return scan_chunks(chunk, state, neutralize(inputs, valid), reader, lengths, chunk_size)


def window(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    reader: Float[Array, "B G T K"],
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B T H V"]:
    """Reads the last T tokens from the checkpoint and the ring without forming a state; includes d x.

    Args:
      checkpoint: state before token `start`.
      ring: R slots, token p in slot p mod R, holding the `length` committed tokens from `start` and then the
        T tokens of the window. Other slots hold anything finite.
      reader: C of the window's tokens.
      heads: constants of the heads.
      start, length: cursors of every row.
    """
    groups, tokens = reader.shape[1:3]
    slots = ring.b.shape[2]
    a, d = _per_group(heads.a, groups), _per_group(heads.d, groups)
    c = reader.astype(jnp.float32)
    age = slot_age(start, slots)
    last = length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    seen = age[:, None, :] <= last[:, :, None]  # [B, T, R]: slot is read by token t
    later = seen[:, :, None, :] & (age[:, None, None, :] > age[:, None, :, None])
    dt = grouped(ring.dt, groups)
    between = jnp.sum(jnp.where(later[:, None, None], dt[:, :, :, None, None, :], 0.0), axis=-1)
    total = jnp.sum(jnp.where(seen[:, None, None], dt[:, :, :, None, :], 0.0), axis=-1)
    scores = einsum("bgtk,bgrk->bgtr", c, ring.b.astype(jnp.float32))
    weights = dt[:, :, :, None, :] * jnp.exp(a[..., None] * between) * scores[:, :, None]
    weights = jnp.where(seen[:, None, None], weights, 0.0)
    current = age[:, None, :] == last[:, :, None]
    weights = weights + jnp.where(current[:, None, None], d[..., None], 0.0)
    outputs = einsum("bgmtr,bgmrv->bgmtv", weights, values_by_group(ring.x, checkpoint.shape[2]))
    carried = einsum("bgmvk,bgtk->bgmtv", state_by_group(checkpoint, groups), c)
    return outputs_by_token(outputs + jnp.exp(a * total)[..., None] * carried)


def fold(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B H V K"]:
    """Returns the checkpoint moved over `length` tokens from `start`; a row of length 0 keeps its bits."""
    groups, slots = ring.b.shape[1:3]
    a = _per_group(heads.a, groups)
    age = slot_age(start, slots)
    live = age < length[:, None]
    later = live[:, None, :] & (age[:, None, :] > age[:, :, None])
    dt = jnp.where(live[:, None, None], grouped(ring.dt, groups), 0.0)
    to_end = jnp.sum(jnp.where(later[:, None, None], dt[:, :, :, None, :], 0.0), axis=-1)
    total = (a * jnp.sum(dt, axis=-1, keepdims=True))[..., 0]
    folded = _absorb(checkpoint, ring, dt * jnp.exp(a * to_end), total)
    return select_rows(length > 0, folded, checkpoint)
