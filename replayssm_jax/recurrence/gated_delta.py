"""Gated DeltaNet (arXiv 2412.06464).

u_t = beta_t (v_t - alpha_t S_{t-1} k_t), S_t = alpha_t S_{t-1} + u_t k_t^T, y_t = S_t q_t.
"""

import dataclasses

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
    in_age_order,
    scan_chunks,
    segment_sum,
    select_rows,
    suffix_sum,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the ring holds of each token.

    v: [B, G, T, (H/G)*V], activation dtype; head h is the (h mod H/G)-th of key head h // (H/G).
    k: [B, G, T, K], activation dtype, l2-normalised before its rounding.
    log_decay: float32 [B, T, H], log alpha, never positive.
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
    """Returns neutral inputs, all zeros, of the shapes in `Inputs`."""
    return Inputs(
        v=jnp.zeros((batch, groups, tokens, heads // groups * head_dim), dtype),
        k=jnp.zeros((batch, groups, tokens, d_state), dtype),
        log_decay=jnp.zeros((batch, tokens, heads), jnp.float32),
        beta=jnp.zeros((batch, tokens, heads), jnp.float32),
    )


def neutralize(inputs: Inputs, valid: Bool[Array, "B T"]) -> Inputs:
    """Returns the inputs with the tokens that are not valid made to change no state."""
    valid = valid[:, :, None]
    return dataclasses.replace(
        inputs,
        log_decay=jnp.where(valid, inputs.log_decay, 0.0),
        beta=jnp.where(valid, inputs.beta, 0.0),
    )


def eager_step(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B G 1 K"], heads: Heads
) -> tuple[Float32[Array, "B 1 H V"], Float32[Array, "B H V K"]]:
    """Advances the state by one token and reads it with `reader` (q, normalised and scaled by K^-0.5)."""
    # One product reads the old state twice; a state that is never reshaped is updated in place by XLA.
    batch, count, head_dim, _ = state.shape
    v = inputs.v.astype(jnp.float32).reshape(batch, count, head_dim)
    k, q = (per_head(field[:, :, 0].astype(jnp.float32), count) for field in (inputs.k, reader))
    alpha, beta = jnp.exp(inputs.log_decay[:, 0, :, None]), inputs.beta[:, 0, :, None]
    read = einsum("bhvk,bhtk->bhtv", state, jnp.stack([k, q], axis=2))
    u = beta * (v - alpha * read[:, :, 0])
    outputs = alpha * read[:, :, 1] + u * jnp.sum(k * q, axis=-1, keepdims=True)
    return outputs[:, None], alpha[..., None] * state + u[..., None] * k[:, :, None]


def _interactions(inputs: Inputs, decay: Float32[Array, "B G M T T"]) -> Float32[Array, "B G M T T"]:
    """Returns A_ij = beta_i decay(i, j) (k_i . k_j) for j < i, zero elsewhere."""
    groups, tokens = inputs.k.shape[1:3]
    k = inputs.k.astype(jnp.float32)
    gram = einsum("bgik,bgjk->bgij", k, k)[:, :, None]
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool), -1)[None, None, None]
    return jnp.where(earlier, grouped(inputs.beta, groups)[..., None] * decay * gram, 0.0)


def _updates(
    state: Float32[Array, "B H V K"],
    inputs: Inputs,
    interactions: Float32[Array, "B G M T T"],
    carry_decay: Float32[Array, "B G M T"],
) -> Float32[Array, "B G M T V"]:
    """Returns all update vectors, U = (I + A)^-1 diag(beta) (V - diag(P) K S^T) (the WY form)."""
    groups = inputs.k.shape[1]
    carried = einsum("bgik,bgmvk->bgmiv", inputs.k.astype(jnp.float32), state_by_group(state, groups))
    right = values_by_group(inputs.v, state.shape[2]) - carry_decay[..., None] * carried
    right = grouped(inputs.beta, groups)[..., None] * right
    return jax.lax.linalg.triangular_solve(
        interactions, right, left_side=True, lower=True, unit_diagonal=True
    )


def _absorb(
    state: Float32[Array, "B H V K"], inputs: Inputs, updates: Float32[Array, "B G M T V"]
) -> Float32[Array, "B H V K"]:
    """Returns exp(total) S + sum_j exp(sum after j) u_j k_j^T, the state after all the tokens."""
    groups = inputs.k.shape[1]
    log_decay = grouped(inputs.log_decay, groups)
    weighted = jnp.exp(suffix_sum(log_decay))[..., None] * updates
    added = einsum("bgmtv,bgtk->bgmvk", weighted, inputs.k.astype(jnp.float32))
    total = jnp.exp(jnp.sum(log_decay, axis=-1))[..., None, None]
    return (total * state_by_group(state, groups) + added).reshape(state.shape)


def _chunk(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B G T K"]
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    groups, tokens = reader.shape[1:3]
    q = reader.astype(jnp.float32)
    log_decay = grouped(inputs.log_decay, groups)
    decay = jnp.exp(segment_sum(log_decay))
    carry_decay = jnp.exp(jnp.cumsum(log_decay, axis=-1))
    updates = _updates(state, inputs, _interactions(inputs, decay), carry_decay)
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None, None, None]
    scores = einsum("bgik,bgjk->bgij", q, inputs.k.astype(jnp.float32))[:, :, None]
    weights = jnp.where(causal, decay * scores, 0.0)
    carried = einsum("bgik,bgmvk->bgmiv", q, state_by_group(state, groups))
    outputs = carry_decay[..., None] * carried + einsum("bgmij,bgmjv->bgmiv", weights, updates)
    return outputs_by_token(outputs), _absorb(state, inputs, updates)


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

    A chunk takes the WY form of the delta rule (arXiv 2406.06484). Outputs beyond a row's length are finite
    and mean nothing; a row of length 0 keeps its state bit for bit.
    """
    valid = jnp.arange(reader.shape[2], dtype=jnp.int32)[None, :] < lengths[:, None]
    return scan_chunks(_chunk, state, neutralize(inputs, valid), reader, lengths, chunk_size)


def window(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    reader: Float[Array, "B G T K"],
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B T H V"]:
    """Reads the last T tokens from the checkpoint and the ring without forming a state.

    The adjoint form solves W (I + A) = F. With c_ij = W_ij beta_j and z_i = P_i q_i - sum_j c_ij P_j k_j the
    output is O_i = sum_j c_ij v_j + S z_i: the state is read T times, whatever the number of tokens in the
    ring.

    Args:
      checkpoint: state before token `start`.
      ring: R slots, token p in slot p mod R, holding the `length` committed tokens from `start` and then the
        T tokens of the window. Other slots hold anything finite.
      reader: q of the window's tokens.
      heads: constants of the heads.
      start, length: cursors of every row.
    """
    groups, tokens = reader.shape[1:3]
    slots = ring.k.shape[2]
    index = jnp.arange(slots, dtype=jnp.int32)
    last = length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    seen = (index[None, None, :] <= last[:, :, None])[:, None, None]  # [B, 1, 1, T, R]
    ordered = in_age_order(ring, start, length + tokens)
    k, q = ordered.k.astype(jnp.float32), reader.astype(jnp.float32)
    log_decay = grouped(ordered.log_decay, groups)
    sums = segment_sum(log_decay)
    rows = jnp.broadcast_to(last[:, None, None, :, None], (*log_decay.shape[:3], tokens, slots))
    decay = jnp.exp(jnp.take_along_axis(sums, rows, axis=-2, mode="promise_in_bounds"))
    scores = einsum("bgtk,bgrk->bgtr", q, k)[:, :, None]
    weights = jnp.where(seen, decay * scores, 0.0)
    solved = jax.lax.linalg.triangular_solve(
        _interactions(ordered, jnp.exp(sums)), weights, left_side=False, lower=True, unit_diagonal=True
    )
    coefficients = jnp.where(seen, solved * grouped(ordered.beta, groups)[:, :, :, None, :], 0.0)
    carry_decay = jnp.exp(jnp.cumsum(log_decay, axis=-1))
    read_decay = jnp.exp(jnp.sum(jnp.where(seen, log_decay[:, :, :, None, :], 0.0), axis=-1))
    z = read_decay[..., None] * q[:, :, None]
    z = z - einsum("bgmtr,bgrk->bgmtk", coefficients * carry_decay[:, :, :, None, :], k)
    outputs = einsum("bgmtr,bgmrv->bgmtv", coefficients, values_by_group(ordered.v, checkpoint.shape[2]))
    return outputs_by_token(outputs + einsum("bgmtk,bgmvk->bgmtv", z, state_by_group(checkpoint, groups)))


def fold(
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    heads: Heads,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B H V K"]:
    """Returns the checkpoint moved over `length` tokens from `start`; a row of length 0 keeps its bits."""
    ordered = in_age_order(ring, start, length)
    log_decay = grouped(ordered.log_decay, ring.k.shape[1])
    interactions = _interactions(ordered, jnp.exp(segment_sum(log_decay)))
    updates = _updates(checkpoint, ordered, interactions, jnp.exp(jnp.cumsum(log_decay, axis=-1)))
    return select_rows(length > 0, _absorb(checkpoint, ordered, updates), checkpoint)
