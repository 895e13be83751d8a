"""Gated DeltaNet (arXiv 2412.06464).

u_t = beta_t (v_t - alpha_t S_{t-1} k_t), S_t = alpha_t S_{t-1} + u_t k_t^T, y_t = S_t q_t.
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
    forward_substitution,
    prefix_sum,
    scan_chunks,
    segment_sum,
    slot_age,
    suffix_sum,
    unit_lower_inverse,
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
    count, head_dim = state.shape[1:3]
    v = values_by_head(inputs.v, head_dim)[:, :, 0]
    k, q = per_head(inputs.k, count), per_head(reader, count)
    alpha, beta = jnp.exp(heads_first(inputs.log_decay)), heads_first(inputs.beta)
    read = read_state(state, jnp.concatenate([k, q], axis=2))
    u = beta * (v - alpha * read[:, :, 0])
    outputs = alpha * read[:, :, 1] + u * jnp.sum(k * q, axis=-1)
    return outputs[:, None], alpha[..., None] * state + u[..., None] * k


def _updates(
    state: Float32[Array, "B H V K"], inputs: Inputs, decay: Float32[Array, "B H T T"]
) -> tuple[Float32[Array, "B H T T"], Float32[Array, "B H T V"]]:
    """Returns A_ij = beta_i decay(i, j) (k_i . k_j) for j < i and diag(beta) (V - diag(P) K S^T).

    The update vectors of all tokens are U = (I + A)^-1 times the latter (the WY form).
    """
    count, head_dim = state.shape[1:3]
    k, beta = inputs.k.astype(jnp.float32), heads_first(inputs.beta)[..., None]
    gram = per_head(einsum("bgik,bgjk->bgij", k, k), count)
    interactions = jnp.where(causal(k.shape[2], itself=False), beta * decay * gram, 0.0)
    carry = jnp.exp(prefix_sum(heads_first(inputs.log_decay)))[..., None]
    carried = carry * read_state(state, per_head(k, count))
    return interactions, beta * (values_by_head(inputs.v, head_dim) - carried)


def _after(
    state: Float32[Array, "B H V K"], inputs: Inputs, updates: Float32[Array, "B H T V"]
) -> Float32[Array, "B H V K"]:
    """Returns exp(total) S + sum_j exp(sum after j) u_j k_j^T, the state after all the tokens."""
    log_decay = heads_first(inputs.log_decay)
    weighted = jnp.exp(suffix_sum(log_decay))[..., None] * updates
    total = jnp.exp(jnp.sum(log_decay, axis=-1))[..., None, None]
    return add_products(total * state, weighted, per_head(inputs.k, state.shape[1]))


def _absorb(state: Float32[Array, "B H V K"], inputs: Inputs) -> Float32[Array, "B H V K"]:
    """Returns the state after the few tokens of a ring."""
    decay = jnp.exp(segment_sum(heads_first(inputs.log_decay)))
    return _after(state, inputs, forward_substitution(*_updates(state, inputs, decay)))


def _chunk(
    state: Float32[Array, "B H V K"], inputs: Inputs, reader: Float[Array, "B G T K"]
) -> tuple[Float32[Array, "B H T V"], Float32[Array, "B H V K"]]:
    log_decay, q = heads_first(inputs.log_decay), reader.astype(jnp.float32)
    decay = jnp.exp(segment_sum(log_decay))
    interactions, right = _updates(state, inputs, decay)
    updates = einsum("bhij,bhjv->bhiv", unit_lower_inverse(interactions), right)
    scores = per_head(einsum("bgik,bgjk->bgij", q, inputs.k.astype(jnp.float32)), state.shape[1])
    weights = jnp.where(causal(q.shape[2], itself=True), decay * scores, 0.0)
    carried = read_state(state, per_head(q, state.shape[1]))
    outputs = jnp.exp(prefix_sum(log_decay))[..., None] * carried
    return outputs + einsum("bhij,bhjv->bhiv", weights, updates), _after(state, inputs, updates)


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

    The adjoint form: from the newest token to the oldest, c_j = beta_j k_j . z and
    z <- alpha_j (z - c_j k_j), with z = q at first; then the output is sum_j c_j v_j + S z. The state is read
    T times, whatever the number of tokens in the ring. Only the products k_r . z are followed, with the help
    of k_r . k_j, and z is put together at the end: z = P q - sum_j c_j P_j k_j, P_j = alpha_0 .. alpha_j.

    Args:
      checkpoint: state before token `start`.
      ring: R slots, token p in slot p mod R, holding the `length` committed tokens from `start` and then the
        T tokens of the window. Other slots hold anything finite.
      reader: q of the window's tokens.
      heads: constants of the heads.
      start, length: cursors of every row.
    """
    count, head_dim = checkpoint.shape[1:3]
    slots = ring.k.shape[2]
    ages = jnp.arange(slots, dtype=jnp.int32)[None, :]
    age = slot_age(start, slots)
    last = length[:, None] + jnp.arange(reader.shape[2], dtype=jnp.int32)[None, :]
    seen = age[:, None, :] <= last[:, :, None]
    k, q = ring.k.astype(jnp.float32), reader.astype(jnp.float32)
    gram = einsum("bgik,bgjk->bgij", k, k)
    alpha = jnp.exp(ring.log_decay)

    def older(step: Array, products: Float32[Array, "B H T R"]) -> Float32[Array, "B H T R"]:
        newest = slots - 1 - step
        slot = jnp.mod(start + newest, slots)[:, None]
        moved = (age < newest)[:, None, :] & (newest <= last)[:, :, None]
        c = heads_first(at_slots(ring.beta, slot, 1))[..., None] * at_slots(products, slot, 3)
        next_products = products - c * per_head(at_slots(gram, slot, 2), count)
        next_products = heads_first(at_slots(alpha, slot, 1))[..., None] * next_products
        return jnp.where(moved[:, None], next_products, products)

    products = per_head(einsum("bgtk,bgrk->bgtr", q, k), count)
    products = jax.lax.fori_loop(0, slots - 1, older, products)
    c = jnp.where(seen[:, None], products * heads_first(ring.beta)[:, :, None, :], 0.0)

    live = jnp.where(age[:, :, None] <= last[:, -1:, None], ring.log_decay, 0.0)
    decay = jnp.exp(prefix_sum(heads_first(at_slots(live, jnp.mod(start[:, None] + ages, slots), 1))))
    z = at_slots(decay, last, 2)[..., None] * per_head(q, count)
    removed = c * at_slots(decay, age, 2)[:, :, None, :]

    def read(c: Array, z: Array, removed: Array) -> Float32[Array, "B H T V"]:
        z = z - weigh_slots(removed, ring.k, k.shape[3])
        return weigh_slots(c, ring.v, head_dim) + read_state(checkpoint, z)

    outputs = by_token(read, c, z, removed)
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


def log_decays(inputs: Inputs, heads: Heads) -> Float32[Array, "B T H"]:
    """Returns the log decay of every token."""
    return inputs.log_decay


def largest_rows(inputs: Inputs) -> Float32[Array, "B T H"]:
    """Returns a bound of the largest row norm of what every token adds to the decayed, projected state."""
    return inputs.beta * largest_products(inputs.v, inputs.k, inputs.beta.shape[2])


def least_reads(outputs: Float32[Array, "B T H V"], inputs: Inputs, heads: Heads) -> Float32[Array, "B T H"]:
    """Returns the smallest absolute value that a row of the state gave to the outputs."""
    return jnp.min(jnp.abs(outputs), axis=-1)
