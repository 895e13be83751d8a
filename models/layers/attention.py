"""Causal grouped-query attention over a cache of keys and values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.layers.norm import RMSNorm
from models.layers.rope import rotate, turns
from pallas_kernels.parts import AttentionParts
from replayssm_jax.backend import kernel_attention, kernel_attention_inputs
from replayssm_jax.cache import AttentionLayer
from replayssm_jax.replay import Segment

# Tokens of one row up to which they are written one by one.
_UNROLLED = 8
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


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
    size = layer.k.shape[2]
    column = (
        jnp.where(segment.valid, segment.positions, size) if segment.mode == "prefill" else segment.positions
    )
    layer = AttentionLayer(k=_written(layer.k, k, column), v=_written(layer.v, v, column))
    if segment.mode == "step":
        return _read(q, layer, segment), layer
    reach = jnp.arange(size, dtype=jnp.int32)[None, None, None, :]
    mask = reach <= segment.positions[:, None, :, None]
    k, v = (jnp.swapaxes(cached, 1, 2) for cached in (layer.k, layer.v))
    return jax.nn.dot_product_attention(q, k, v, mask=mask), layer


@jax.named_scope("attention")
def attend_projected(
    projected: Float[Array, "B T P"],
    parts: AttentionParts,
    layer: AttentionLayer | None,
    segment: Segment,
    *,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    theta: float | None = None,
) -> tuple[Float[Array, "B T Nq D"], AttentionLayer | None]:
    """`attend` for queries, keys and values that are channels of a projection still; others as for `split`.

    In a step on a GPU one kernel makes them and stores keys and values.
    """
    if layer is not None and segment.mode == "step" and segment.kernels:
        weights = None if norms is None else (norms[0].weight[...], norms[1].weight[...])
        turned = None
        if theta is not None:
            turned = turns(segment.positions, rotary_dim=parts.rotated, theta=theta)
        served = kernel_attention_inputs(
            projected, layer.k, layer.v, segment.position, weights, turned, parts
        )
        if served is not None:
            q, k, v = served
            layer = AttentionLayer(k=k, v=v)
            return _read(q, layer, segment), layer
    q, k, v = split(projected, parts, segment.positions, norms=norms, theta=theta)
    return attend(q, k, v, layer, segment)


def split(
    projected: Float[Array, "B T P"],
    parts: AttentionParts,
    positions: Int32[Array, "B T"],
    *,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    theta: float | None = None,
) -> tuple[Float[Array, "B T Nq D"], Float[Array, "B T N D"], Float[Array, "B T N D"]]:
    """Queries, keys and values of a projection's channels, without the queries' gates.

    norms: of queries and of keys. theta: base of the rotation's frequencies, None where nothing rotates.
    """
    heads = projected.reshape(*projected.shape[:2], -1, parts.width)
    queries = parts.heads * parts.queries_every
    q, k, v = jnp.split(heads, (queries, queries + parts.groups), axis=2)
    q = q[:, :, :: parts.queries_every]
    if norms is not None:
        q, k = (norm(x) for norm, x in zip(norms, (q, k), strict=True))
    if theta is not None:
        q, k = (rotate(x, positions, rotary_dim=parts.rotated, theta=theta) for x in (q, k))
    return q, k, v


def gates(projected: Float[Array, "B T P"], parts: AttentionParts) -> Float[Array, "B T Nq D"]:
    """The channels behind each head of gated queries."""
    heads = projected[..., : 2 * parts.heads * parts.width]
    return heads.reshape(*projected.shape[:2], parts.heads, 2, parts.width)[:, :, :, 1]


def _read(q: Float[Array, "B T Nq D"], layer: AttentionLayer, segment: Segment) -> Float[Array, "B T Nq D"]:
    """Attention of a step's tokens, whose keys and values are stored."""
    if segment.kernels:
        outputs = kernel_attention(q, layer.k, layer.v, segment.position)
        if outputs is not None:
            return outputs
    return _few_queries(q, layer.k, layer.v, segment.positions)


def _written(
    cached: Float[Array, "B N S D"], new: Float[Array, "B T N D"], column: Int32[Array, "B T"]
) -> Float[Array, "B N S D"]:
    """The cache with new tokens in their columns; columns at or beyond its end are dropped."""
    batch, tokens, heads, _ = new.shape

    def scattered(cached: Array, new: Array, column: Array) -> Array:
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        head = jnp.arange(heads, dtype=jnp.int32)[None, None, :]
        return cached.at[rows, head, column[:, :, None]].set(new, mode="drop")

    def sliced(cached: Array, new: Array, column: Array) -> Array:
        # One index makes it a plain update of a slice; on a GPU, scattering by a few takes 30 to 60 us.
        for t in range(tokens):
            cached = cached.at[0, :, column[0, t]].set(new[0, t], mode="drop")
        return cached

    if batch > 1 or tokens > _UNROLLED:
        return scattered(cached, new, column)
    # On a CPU a slice that may be dropped is a choice between two whole caches, and copies both.
    return jax.lax.platform_dependent(cached, new, column, cpu=scattered, default=sliced)


def _few_queries(
    q: Float[Array, "B T Nq D"],
    k: Float[Array, "B N S D"],
    v: Float[Array, "B N S D"],
    positions: Int32[Array, "B T"],
) -> Float[Array, "B T Nq D"]:
    """Attention of the few tokens of a step: the queries of a key head are the rows of one matrix.

    Scores and softmax in float32.
    """
    batch, tokens, heads, width = q.shape
    groups = k.shape[1]
    rows = tokens * heads // groups
    # Tensor cores take 16-bit rows by eights; other counts go to much slower kernels.
    padding = -rows % 8 if q.dtype.itemsize == 2 else 0
    packed = jnp.moveaxis(q.reshape(batch, tokens, groups, -1, width), 2, 1).reshape(
        batch, groups, rows, width
    )
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, padding), (0, 0)))
    last = jnp.pad(jnp.repeat(positions, rows // tokens, axis=1), ((0, 0), (0, padding)))
    scores = jnp.einsum("bnmd,bnsd->bnms", packed, k, preferred_element_type=jnp.float32) * width**-0.5
    reach = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None, None, :]
    scores = jnp.where(reach <= last[:, None, :, None], scores, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    outputs = jnp.einsum("bnms,bnsd->bnmd", weights, v)[:, :, :rows]
    outputs = jnp.moveaxis(outputs.reshape(batch, groups, tokens, -1, width), 1, 2)
    return outputs.reshape(q.shape)
