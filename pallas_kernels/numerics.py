"""Numerics that the kernels and the portable backend share: gates, key normalisation, counter-based hash."""

import jax
import jax.numpy as jnp

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)
_HASH_STEP = 0x9E3779B9  # 2^32 over the golden ratio
_MIX_FIRST = 0x21F0AAAD
_MIX_SECOND = 0x735A2D97


def _float32(x: jax.Array) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)


def _like(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcasts a float32 copy of `parameter` over the leading axes of `x`."""
    return jnp.broadcast_to(_float32(parameter), x.shape)


def softplus(x: jax.Array) -> jax.Array:
    """Returns log(1 + exp(x)), the identity above 20, in the shape and dtype of `x`."""
    return jnp.where(x > 20.0, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20.0))))


def mamba2_dt(raw: jax.Array, bias: jax.Array, limit: tuple[float, float]) -> jax.Array:
    """Returns the step size of Mamba-2, clip(softplus(raw + bias), *limit).

    Args:
      raw: [..., H], any float dtype.
      bias: [H], any float dtype.
      limit: lowest and highest step size; the highest may be infinite.

    Returns:
      float32 [..., H]. Source: Mamba-2 (arXiv 2405.21060), section 7; the limit is `time_step_limit`.
    """
    low, high = (min(float(bound), _FLOAT32_MAX) for bound in limit)
    raw = _float32(raw)
    return jnp.clip(softplus(raw + _like(bias, raw)), low, high)


def gated_delta_log_decay(a: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """Returns the log decay of Gated DeltaNet, -exp(A_log) softplus(a + dt_bias).

    Args:
      a: [..., H], any float dtype.
      a_log, dt_bias: [H], any float dtype.

    Returns:
      float32 [..., H], never positive. Source: Gated Delta Networks (arXiv 2412.06464), section 3.
    """
    a = _float32(a)
    return -jnp.exp(_like(a_log, a)) * softplus(a + _like(dt_bias, a))


def kimi_delta_log_decay(
    raw: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None = None
) -> jax.Array:
    """Returns the log decay of every key channel of Kimi Delta Attention, softplus or bounded.

    Args:
      raw: [..., H, K], any float dtype.
      a_log: [H], any float dtype.
      dt_bias: [H, K], any float dtype.
      lower_bound: None for -exp(A_log) softplus(raw + dt_bias), or a negative number for
        lower_bound * sigmoid(exp(A_log) (raw + dt_bias)).

    Returns:
      float32 [..., H, K], never positive. Source: Kimi Linear (arXiv 2510.26692), section 3.
    """
    raw = _float32(raw)
    shifted = raw + _like(dt_bias, raw)
    rate = jnp.exp(_like(jnp.expand_dims(a_log, -1), raw))
    if lower_bound is None:
        return -rate * softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def l2_normalize(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Returns x / sqrt(sum(x^2) + eps) over the last axis, float32 [..., K] for `x` of any float dtype."""
    x = _float32(x)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def _mix(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 `x` one to one (an xorshift-multiply with measured low avalanche bias)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(_MIX_FIRST)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(_MIX_SECOND)
    return x ^ (x >> jnp.uint32(15))


def _word(value: jax.Array | int) -> jax.Array:
    if isinstance(value, int):
        return jnp.uint32(value & 0xFFFFFFFF)
    return jnp.asarray(value).astype(jnp.uint32)


def hash_uint32(*words: jax.Array | int) -> jax.Array:
    """Returns a counter-based hash of integer words: the same words give the same bits on every backend.

    Args:
      words: integers or integer arrays of shapes that broadcast, each taken modulo 2^32. The word that varies
        fastest goes last: then the others are mixed before the broadcast.

    Returns:
      uint32 of the broadcast shape.
    """
    state = jnp.uint32(_HASH_STEP)
    for value in words:
        word = _word(value)
        shape = jnp.broadcast_shapes(state.shape, word.shape)
        state = _mix(jnp.broadcast_to(state, shape) ^ jnp.broadcast_to(word, shape)) + jnp.uint32(_HASH_STEP)
    return state
