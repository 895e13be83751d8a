"""Causal grouped-query attention over a cache of keys and values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from replayssm_jax.cache import AttentionLayer
from replayssm_jax.replay import Segment


def attend(
    q: Float[Array, "B T Nq D"],
    k: Float[Array, "B T N D"],
    v: Float[Array, "B T N D"],
    layer: AttentionLayer | None,
    segment: Segment,
) -> tuple[Float[Array, "B T Nq D"], AttentionLayer | None]:
    """Each token attends to the committed ones and to those of the segment up to itself, scaled by D^-0.5.

    Query head n reads key head n // (Nq / N). Keys and values of pads, and of positions at or beyond the
    cache's end, are not stored. Without a cache the segment starts at position 0.
    """
    if layer is None:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), None
    size = layer.k.shape[1]
    column = (
        jnp.where(segment.valid, segment.positions, size) if segment.mode == "prefill" else segment.positions
    )
    rows = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    layer = AttentionLayer(
        k=layer.k.at[rows, column].set(k, mode="drop"), v=layer.v.at[rows, column].set(v, mode="drop")
    )
    reach = jnp.arange(size, dtype=jnp.int32)[None, None, None, :]
    mask = reach <= segment.positions[:, None, :, None]
    return jax.nn.dot_product_attention(q, layer.k, layer.v, mask=mask), layer
