"""Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay for every key channel.

With a_t = exp(log_decay_t): u_t = beta_t (v_t - S_{t-1} (a_t * k_t)), S_t = S_{t-1} diag(a_t) + u_t k_t^T and
y_t = S_t q_t.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from replayssm_jax.recurrence.layout import (
    add_products,
    by_token,
    einsum,
    heads_first,
    read_state,
    weigh_slots,
)
from replayssm_jax.recurrence.segment import (
    at_slots,
    causal,
    channel_segment_sum,
    fold_rows,
    forward_substitution,
    scan_chunks,
    slot_age,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the ring holds of each token; every head has its own key.

    v: [B, H, T, V], activation dtype.
    k: [B, H, T, K], activation dtype, l2-normalised before its rounding.
    log_decay: float32 [B, H, T, K], never positive.
    beta: float32 [B, T, H].
    """

    v: Array
    k: Array
    log_decay: Array
    beta: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
    """Constants of the heads: none, the gates are inputs."""


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
    """Returns neutral inputs, all zeros, of the shapes in `Inputs`; `groups` must equal `heads`."""
    if groups != heads:
        raise ValueError(f"Kimi Delta Attention has a key for every head: {groups} groups, {heads} heads")
    return Inputs(
        v=jnp.zeros((batch, heads, tokens, head_dim), dtype),
        k=jnp.zeros((batch, heads, tokens, d_state), dtype),
        log_decay=jnp.zeros((batch, heads, tokens, d_state), jnp.float32),
        beta=jnp.zeros((batch, tokens, heads), jnp.float32),
    )


def neutralize(inputs: Inputs, valid: Bool[Array, "B T"]) -> Inputs:
    """Returns the inputs with the tokens that are not valid made to change no state."""
    return dataclasses.replace(
        inputs,
        log_decay=jnp.where(valid[:, None, :, None], inputs.log_decay, 0.0),
        beta=jnp.where(valid[:, :, None], inputs.beta, 0.0),
    )


def eager_step(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B H 1 K"], heads: Heads
) -> tuple[Float32[Array, "B 1 H V"], Float32[Array, "B H V K"]]:
    """Advances the state by one token and reads it with `reader` (q, normalised and scaled by K^-0.5)."""
    # One product reads the old state twice; a state that is never reshaped is updated in place by XLA.
    k, q, v = (field.astype(jnp.float32) for field in (inputs.k, reader, inputs.v))
    decay = jnp.exp(inputs.log_decay)
    read = read_state(state, decay * jnp.concatenate([k, q], axis=2))
    u = heads_first(inputs.beta) * (v[:, :, 0] - read[:, :, 0])
    outputs = read[:, :, 1] + u * jnp.sum(k * q, axis=-1)
    return outputs[:, None], decay * state + u[..., None] * k


def _updates(
    state: Float32[Array, "B H V K"], inputs: Inputs, decay: Float32[Array, "B H T T K"]
) -> Float32[Array, "B H T V"]:
    """Returns the update vectors of all tokens (the WY form)."""
    k, beta = inputs.k.astype(jnp.float32), heads_first(inputs.beta)[..., None]
    scores = jnp.sum(decay * k[:, :, None, :, :] * k[:, :, :, None, :], axis=-1)
    interactions = jnp.where(causal(k.shape[2], itself=False), beta * scores, 0.0)
    carried = read_state(state, jnp.exp(jnp.cumsum(inputs.log_decay, axis=2)) * k)
    return forward_substitution(interactions, beta * (inputs.v.astype(jnp.float32) - carried))


def _after(
    state: Float32[Array, "B H V K"],
    inputs: Inputs,
    decay: Float32[Array, "B H T T K"],
    updates: Float32[Array, "B H T V"],
) -> Float32[Array, "B H V K"]:
    """Returns S diag(exp(total)) + sum_j u_j (decay(end, j) * k_j)^T, the state after all the tokens."""
    total = jnp.exp(jnp.sum(inputs.log_decay, axis=2, keepdims=True))
    return add_products(total * state, updates, decay[:, :, -1] * inputs.k.astype(jnp.float32))


def _absorb(state: Float32[Array, "B H V K"], inputs: Inputs) -> Float32[Array, "B H V K"]:
    """Returns the state after all the tokens."""
    decay = jnp.exp(channel_segment_sum(inputs.log_decay))
    return _after(state, inputs, decay, _updates(state, inputs, decay))


def _chunk(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B H T K"]
) -> tuple[Float32[Array, "B H T V"], Float32[Array, "B H V K"]]:
    k, q = inputs.k.astype(jnp.float32), reader.astype(jnp.float32)
    decay = jnp.exp(channel_segment_sum(inputs.log_decay))
    updates = _updates(state, inputs, decay)
    scores = jnp.sum(decay * k[:, :, None, :, :] * q[:, :, :, None, :], axis=-1)
    weights = jnp.where(causal(q.shape[2], itself=True), scores, 0.0)
    outputs = read_state(state, jnp.exp(jnp.cumsum(inputs.log_decay, axis=2)) * q)
    return outputs + einsum("bhij,bhjv->bhiv", weights, updates), _after(state, inputs, decay, updates)


def prefill(
    state: Float32[Array, "B H V K"],
    inputs: Inputs,
    reader: Float[Array, "B H T K"],
    heads: Heads,
    lengths: Int32[Array, " B"],
    *,
    chunk_size: int = 16,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    """Advances the state by the first `lengths` tokens of every row, in chunks, and reads every token.

    A chunk takes the WY form; the decays between its tokens are chunk_size^2 K numbers a head, hence the
    small chunk. Outputs beyond a row's length are finite and mean nothing; a row of length 0 keeps its state
    bit for bit.
    """
    valid = jnp.arange(reader.shape[2], dtype=jnp.int32)[None, :] < lengths[:, None]
    return scan_chunks(_chunk, state, neutralize(inputs, valid), reader, lengths, chunk_size)


def window(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    reader: Float[Array, "B H T K"],
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B T H V"]:
    """Reads the last T tokens from the checkpoint and the ring without forming a state.

    The adjoint form: from the newest token to the oldest, c_j = beta_j k_j . z and
    z <- a_j * (z - c_j k_j), with z = q at first; then the output is sum_j c_j v_j + S z. The chain needs the
    decays of R tokens, a matrix those of R^2 pairs.

    Args:
      checkpoint: state before token `start`.
      ring: R slots, token p in slot p mod R, holding the `length` committed tokens from `start` and then the
        T tokens of the window. Other slots hold anything finite.
      reader: q of the window's tokens.
      heads: constants of the heads.
      start, length: cursors of every row.
    """
    slots = ring.k.shape[2]
    age = slot_age(start, slots)
    last = length[:, None] + jnp.arange(reader.shape[2], dtype=jnp.int32)[None, :]

    def older(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        z, coefficients = carry
        newest = slots - 1 - step
        slot = jnp.mod(start + newest, slots)[:, None]
        k = at_slots(ring.k, slot, 2).astype(jnp.float32)
        seen = (newest <= last)[:, None, :, None]
        c = heads_first(at_slots(ring.beta, slot, 1))[..., None] * jnp.sum(z * k, axis=-1, keepdims=True)
        moved = jnp.exp(at_slots(ring.log_decay, slot, 2)) * (z - c * k)
        kept = jnp.where(seen & (age == newest)[:, None, None, :], c, coefficients)
        return jnp.where(seen, moved, z), kept

    q = reader.astype(jnp.float32)
    z, coefficients = jax.lax.fori_loop(0, slots, older, (q, jnp.zeros((*q.shape[:3], slots), jnp.float32)))

    def read(coefficients: Array, z: Array) -> Float32[Array, "B H T V"]:
        return weigh_slots(coefficients, ring.v, ring.v.shape[3]) + read_state(checkpoint, z)

    outputs = by_token(read, coefficients, z)
    return jnp.moveaxis(outputs, 2, 1)


def fold(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B H V K"]:
    """Returns the checkpoint moved over `length` tokens from `start`; a row of length 0 keeps its bits."""
    return fold_rows(_absorb, checkpoint, ring, start, length)
