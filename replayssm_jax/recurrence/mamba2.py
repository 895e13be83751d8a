"""Mamba-2 (arXiv 2405.21060): S_t = exp(a dt_t) S_{t-1} + dt_t x_t b_t^T, y_t = S_t c_t + d x_t."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from replayssm_jax.recurrence.layout import (
    add_products,
    by_token,
    einsum,
    heads_first,
    largest_products,
    per_head,
    read_state,
    values_by_head,
    weigh_slots,
)
from replayssm_jax.recurrence.segment import (
    at_slots,
    causal,
    fold_rows,
    prefix_sum,
    scan_chunks,
    segment_sum,
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


def _constants(heads: Heads) -> tuple[Float32[Array, "1 H 1"], Float32[Array, "1 H 1"]]:
    return heads.a.astype(jnp.float32)[None, :, None], heads.d.astype(jnp.float32)[None, :, None]


def eager_step(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B G 1 K"], heads: Heads
) -> tuple[Float32[Array, "B 1 H V"], Float32[Array, "B H V K"]]:
    """Advances the state by one token and reads it with `reader` (C); the outputs include d x."""
    # A state that is never reshaped, and read only after its update, is updated in place by XLA.
    count, head_dim = state.shape[1:3]
    a, d = _constants(heads)
    x = values_by_head(inputs.x, head_dim)[:, :, 0]
    dt = heads_first(inputs.dt)
    new = jnp.exp(a * dt)[..., None] * state + (dt * x)[..., None] * per_head(inputs.b, count)
    outputs = read_state(new, per_head(reader, count))[:, :, 0] + d * x
    return outputs[:, None], new


def _absorb(heads: Heads, state: Float32[Array, "B H V K"], inputs: Inputs) -> Float32[Array, "B H V K"]:
    """Returns the state after all the tokens."""
    count, head_dim = state.shape[1:3]
    a, _ = _constants(heads)
    dt = heads_first(inputs.dt)
    weights = dt * jnp.exp(a * suffix_sum(dt))
    total = jnp.exp(a * jnp.sum(dt, axis=-1, keepdims=True))
    x = weights[..., None] * values_by_head(inputs.x, head_dim)
    return add_products(total[..., None] * state, x, per_head(inputs.b, count))


def _chunk(
    heads: Heads, state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B G T K"]
) -> tuple[Float32[Array, "B H T V"], Float32[Array, "B H V K"]]:
    count, head_dim = state.shape[1:3]
    a, d = _constants(heads)
    x, c = values_by_head(inputs.x, head_dim), reader.astype(jnp.float32)
    dt = heads_first(inputs.dt)
    scores = per_head(einsum("bgik,bgjk->bgij", c, inputs.b.astype(jnp.float32)), count)
    weights = jnp.exp(a[..., None] * segment_sum(dt)) * dt[:, :, None, :] * scores
    weights = jnp.where(causal(reader.shape[2], itself=True), weights, 0.0)
    outputs = jnp.exp(a * prefix_sum(dt))[..., None] * read_state(state, per_head(c, count))
    outputs = outputs + einsum("bhij,bhjv->bhiv", weights, x) + d[..., None] * x
    return outputs, _absorb(heads, state, inputs)


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
    count, head_dim = checkpoint.shape[1:3]
    a, d = _constants(heads)
    slots = ring.b.shape[2]
    ages = jnp.arange(slots, dtype=jnp.int32)[None, :]
    order = jnp.mod(start[:, None] + ages, slots)
    last = length[:, None] + jnp.arange(reader.shape[2], dtype=jnp.int32)[None, :]
    seen, current = ages[:, None] <= last[:, :, None], ages[:, None] == last[:, :, None]
    # Scalars in the order of age, one copy a reading token; x and b stay in their slots.
    dt = jnp.where(seen[:, None], heads_first(at_slots(ring.dt, order, 1))[:, :, None, :], 0.0)
    later = suffix_sum(dt)
    c = reader.astype(jnp.float32)
    scores = at_slots(einsum("bgtk,bgrk->bgtr", c, ring.b.astype(jnp.float32)), order, 3)
    weights = dt * jnp.exp(a[..., None] * later) * per_head(scores, count)
    weights = jnp.where(seen[:, None], weights, 0.0) + jnp.where(current[:, None], d[..., None], 0.0)
    decay = jnp.exp(a * (later[..., 0] + dt[..., 0]))

    def read(weights: Array, decay: Array, c: Array) -> Float32[Array, "B H T V"]:
        return weigh_slots(weights, ring.x, head_dim) + decay[..., None] * read_state(checkpoint, c)

    weights = at_slots(weights, slot_age(start, slots), 3)
    outputs = by_token(read, weights, decay, per_head(c, count))
    return jnp.moveaxis(outputs, 2, 1)


def fold(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B H V K"]:
    """Returns the checkpoint moved over `length` tokens from `start`; a row of length 0 keeps its bits."""
    return fold_rows(functools.partial(_absorb, heads), checkpoint, ring, start, length)


def log_decays(inputs: Inputs, heads: Heads) -> Float32[Array, "B T H"]:
    """Returns the log decay of every token."""
    return inputs.dt * heads.a.astype(jnp.float32)[None, None, :]


def largest_rows(inputs: Inputs) -> Float32[Array, "B T H"]:
    """Returns the largest row norm of what every token adds to the state."""
    return inputs.dt * largest_products(inputs.x, inputs.b, inputs.dt.shape[2])


def least_reads(outputs: Float32[Array, "B T H V"], inputs: Inputs, heads: Heads) -> Float32[Array, "B T H"]:
    """Returns the smallest absolute value that a row of the state gave to the outputs, less rounding."""
    own = values_by_head(inputs.x, outputs.shape[3]) * heads.d.astype(jnp.float32)[None, :, None, None]
    own = jnp.moveaxis(own, 1, 2)
    return jnp.maximum(jnp.min(jnp.abs(outputs - own) - 2.0**-20 * jnp.abs(own), axis=-1), 0.0)
