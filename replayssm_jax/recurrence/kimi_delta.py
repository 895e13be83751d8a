"""Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay for every key channel.

With a_t = exp(log_decay_t): u_t = beta_t (v_t - S_{t-1} (a_t * k_t)), S_t = S_{t-1} diag(a_t) + u_t k_t^T and
y_t = S_t q_t.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from replayssm_jax.recurrence.segment import einsum, in_age_order, scan_chunks, select_rows


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
    k, q = inputs.k.astype(jnp.float32), reader.astype(jnp.float32)
    decayed = state * jnp.exp(inputs.log_decay)
    v = inputs.v.astype(jnp.float32)[:, :, 0]
    u = jnp.moveaxis(inputs.beta, 1, 2) * (v - jnp.sum(decayed * k, axis=-1))
    new = decayed + u[..., None] * k
    return jnp.sum(new * q, axis=-1)[:, None], new


def _segment_decay(log_decay: Float32[Array, "B H T K"]) -> Float32[Array, "B H T T K"]:
    """Returns at (i, j) the decay between tokens j and i, exp(sum of log_decay[j+1..i]), one for j >= i."""
    tokens = log_decay.shape[2]
    later = jnp.tril(jnp.ones((tokens, tokens), bool), -1)[None, None, :, :, None]
    return jnp.exp(jnp.cumsum(jnp.where(later, log_decay[:, :, :, None, :], 0.0), axis=2))


def _updates(
    state: Float32[Array, "B H V K"], inputs: Inputs, decay: Float32[Array, "B H T T K"]
) -> Float32[Array, "B H T V"]:
    """Returns the update vectors of all tokens by forward substitution (the WY form)."""
    k = inputs.k.astype(jnp.float32)
    beta = jnp.moveaxis(inputs.beta, 1, 2)[..., None]
    earlier = jnp.tril(jnp.ones((k.shape[2], k.shape[2]), bool), -1)[None, None]
    scores = jnp.sum(decay * k[:, :, None, :, :] * k[:, :, :, None, :], axis=-1)
    interactions = jnp.where(earlier, beta * scores, 0.0)
    carried = einsum("bhik,bhvk->bhiv", jnp.exp(jnp.cumsum(inputs.log_decay, axis=2)) * k, state)
    right = beta * (inputs.v.astype(jnp.float32) - carried)
    return jax.lax.linalg.triangular_solve(
        interactions, right, left_side=True, lower=True, unit_diagonal=True
    )


def _absorb(
    state: Float32[Array, "B H V K"],
    inputs: Inputs,
    decay: Float32[Array, "B H T T K"],
    updates: Float32[Array, "B H T V"],
) -> Float32[Array, "B H V K"]:
    """Returns S diag(exp(total)) + sum_j u_j (decay(end, j) * k_j)^T, the state after all the tokens."""
    keys = decay[:, :, -1] * inputs.k.astype(jnp.float32)
    total = jnp.exp(jnp.sum(inputs.log_decay, axis=2))[:, :, None, :]
    return state * total + einsum("bhtv,bhtk->bhvk", updates, keys)


def _chunk(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B H T K"]
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    tokens = reader.shape[2]
    k, q = inputs.k.astype(jnp.float32), reader.astype(jnp.float32)
    decay = _segment_decay(inputs.log_decay)
    updates = _updates(state, inputs, decay)
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None]
    scores = jnp.sum(decay * k[:, :, None, :, :] * q[:, :, :, None, :], axis=-1)
    weights = jnp.where(causal, scores, 0.0)
    outputs = einsum("bhik,bhvk->bhiv", jnp.exp(jnp.cumsum(inputs.log_decay, axis=2)) * q, state)
    outputs = outputs + einsum("bhij,bhjv->bhiv", weights, updates)
    return jnp.moveaxis(outputs, 2, 1), _absorb(state, inputs, decay, updates)


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

    The adjoint chain goes from the newest token to the oldest: c_j = beta_j k_j . z and
    z <- a_j * (z - c_j k_j), with z = q at first; then O = sum_j c_j v_j + S z. It needs the decays of R tokens,
    a matrix form those of R^2 pairs.

    Args:
      checkpoint: state before token `start`.
      ring: R slots, token p in slot p mod R, holding the `length` committed tokens from `start` and then the
        T tokens of the window. Other slots hold anything finite.
      reader: q of the window's tokens.
      heads: constants of the heads.
      start, length: cursors of every row.
    """
    tokens, slots = reader.shape[2], ring.k.shape[2]
    ordered = in_age_order(ring, start, length + tokens)
    last = length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    ages = jnp.arange(slots, dtype=jnp.int32)
    seen = ages[:, None, None] <= last[None]  # [R, B, T]
    parts = (
        jnp.moveaxis(ordered.k.astype(jnp.float32), 2, 0),
        jnp.moveaxis(jnp.exp(ordered.log_decay), 2, 0),
        jnp.moveaxis(ordered.beta, 1, 0),
        seen,
    )

    def older(z: Array, part: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        k, decay, beta, seen = part
        c = beta[:, :, None] * jnp.sum(z * k[:, :, None, :], axis=-1)
        moved = decay[:, :, None, :] * (z - c[..., None] * k[:, :, None, :])
        seen = seen[:, None, :]
        return jnp.where(seen[..., None], moved, z), jnp.where(seen, c, 0.0)

    z, coefficients = jax.lax.scan(older, reader.astype(jnp.float32), parts, reverse=True)
    outputs = einsum("rbht,bhrv->bthv", coefficients, ordered.v.astype(jnp.float32))
    return outputs + einsum("bhtk,bhvk->bthv", z, checkpoint)


def fold(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B H V K"]:
    """Returns the checkpoint moved over `length` tokens from `start`; a row of length 0 keeps its bits."""
    ordered = in_age_order(ring, start, length)
    decay = _segment_decay(ordered.log_decay)
    updates = _updates(checkpoint, ordered, decay)
    return select_rows(length > 0, _absorb(checkpoint, ordered, decay, updates), checkpoint)
