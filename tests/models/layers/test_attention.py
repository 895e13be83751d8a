"""Attention of a step against a float64 softmax, queries packed by key head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.attention import attend
from replayssm_jax.cache import AttentionLayer
from replayssm_jax.replay import Segment


def truth(q, k, v, positions):
    """float64 [B, T, Nq, D] of cached keys and values [B, N, S, D], query head n reads key head
    n // (Nq / N)."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("btnd,bnsd->bnts", q, k) * q.shape[-1] ** -0.5
    reach = np.arange(k.shape[2])[None, None, None] <= positions[:, None, :, None]
    weights = np.where(reach, np.exp(scores), 0.0)
    return np.einsum("bnts,bnsd->btnd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("position", "tokens", "dtype"),
    [([4, 11], 1, jnp.bfloat16), ([4, 22], 3, jnp.float32), ([22], 3, jnp.bfloat16)],
)
def test_a_step_is_the_softmax_over_committed_and_earlier_tokens(position, tokens, dtype):
    """Five query heads a key head: 16-bit rows are padded to eight. What lies behind a position is noise.

    Of three tokens from position 22 on, the last has no column.
    """
    batch = len(position)
    keys = jax.random.split(jax.random.key(tokens), 4)
    q = jax.random.normal(keys[0], (batch, tokens, 10, 16)).astype(dtype)
    k, v = (jax.random.normal(key, (batch, tokens, 2, 16)).astype(dtype) for key in keys[1:3])
    past = jax.random.normal(keys[3], (batch, 2, 24, 16)).astype(dtype)
    position = jnp.array(position, jnp.int32)
    zero = jnp.zeros_like(position)
    segment = Segment(
        position=position,
        lengths=zero + tokens,
        fold=zero,
        start=position,
        length=zero,
        plan=None,
        mode="step",
        tokens=tokens,
    )
    outputs, layer = jax.jit(attend)(q, k, v, AttentionLayer(k=past, v=past), segment)
    positions = np.asarray(position)[:, None] + np.arange(tokens)
    wanted_k = np.asarray(past).copy()
    for row, token in np.ndindex(positions.shape):
        if positions[row, token] < 24:
            wanted_k[row, :, positions[row, token]] = k[row, token]
    np.testing.assert_array_equal(layer.k, wanted_k)
    error = np.asarray(outputs.astype(jnp.float32), np.float64) - truth(q, layer.k, layer.v, positions)
    # Roundings of weights and outputs in the dtype, random in sign, below the values' own size of about one.
    assert np.abs(error).max() < 4 * float(jnp.finfo(dtype).eps)
