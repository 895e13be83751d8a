"""What attention reads of a step's tokens, in one pass over their projection: queries and keys are normalised
and rotated, keys and values go to their columns of the cache.

A CTA takes up to four heads of a token, a warp each.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Unsupported, mosaic_gpu, require_jax
from pallas_kernels.parts import AttentionParts
from pallas_kernels.pipeline import tiled_layout

_WARPS = 4
# Channels that a warp takes at once: two a lane, or one.
_PAIRS, _SINGLES = 64, 32


def check(parts: AttentionParts, dtype: Any) -> None:
    """Raise `Unsupported`, with the reason, on what the kernel cannot serve."""
    require_jax()
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise Unsupported(f"activations must be bfloat16 or float16, got {jnp.dtype(dtype).name}")
    if parts.width % _PAIRS:
        raise Unsupported(f"heads must have a multiple of {_PAIRS} channels, got {parts.width}")
    if parts.rotated % (2 * _SINGLES):
        raise Unsupported(f"a multiple of {2 * _SINGLES} channels may be rotated, got {parts.rotated}")


def take_in(
    projected: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None = None,
    turns: tuple[jax.Array, jax.Array] | None = None,
    *,
    parts: AttentionParts,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, heads, width], and keys and values [B, groups, S, width] with the tokens in columns
    position[b] + t, those below S; keys and values are written in place where the caller donates them.

    projected: [B, T, P]. position: int32 [B]. norms: weights [width] of the RMS norms of queries and of keys,
    to which `parts.offset` is added. turns: cosines and sines, float32 [B, T, rotated / 2], of the angles by
    which channels i and i + rotated / 2 turn. Every step is rounded to the projection's dtype, as
    the layers' own functions do it.
    """
    (batch, tokens, channels), dtype = projected.shape, projected.dtype
    check(parts, dtype)
    width, columns, every = parts.width, k.shape[2], parts.queries_every
    half = parts.rotated // 2
    plgpu = mosaic_gpu()
    together = {"q": math.gcd(parts.heads, _WARPS), "k": math.gcd(parts.groups, _WARPS)}
    chunks = {"q": parts.heads // together["q"], "k": parts.groups // together["k"]}
    # Consecutive channels of all heads of a CTA, and pieces of them that are rotated against each other.
    pieces = [(0, half), (half, half), (2 * half, width - 2 * half)] if turns else [(0, width)]
    pieces = [(first, size) for first, size in pieces if size]

    def layout_of(each: int, size: int) -> Any:
        unit = _SINGLES if size % _PAIRS else _PAIRS
        warps = ((-6,) if each > 1 else ()) + ((plgpu.Replicated(_WARPS // each),) if each < _WARPS else ())
        return tiled_layout(plgpu, ((each, unit), (1, unit), (1, unit // 32)), warps, (-3,), -1)

    def body(q_in: Any, kv_in: Any, k_ref: Any, v_ref: Any, position_in: Any, *arrays: Any) -> None:
        *rest, out = arrays
        weights = dict(zip(("q", "k"), rest, strict=False)) if norms else {}
        token, chunk = lax.axis_index("token"), lax.axis_index("chunk")
        row = lax.div(token, tokens)
        column = position_in[row] + lax.rem(token, tokens)

        def head_parts(kind: str, source: Callable[[Any], Any]) -> list[jax.Array]:
            """Every piece of some heads, [heads, size], normalised and rotated where they are."""
            each = together[kind]

            def load(ref: Any, layout: Any) -> jax.Array:
                return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

            def spread(vector: jax.Array, size: int, axis: int) -> jax.Array:
                wide = lax.broadcast_in_dim(vector, (each, size), (axis,))
                return plgpu.layout_cast(wide, layout_of(each, size))

            values = [load(source(pl.ds(*piece)), layout_of(each, piece[1])) for piece in pieces]
            if kind in weights:
                squares = [jnp.sum(x * x, axis=1) for x in values]
                shared = layout_of(each, pieces[0][1]).reduce(1)
                total = sum(plgpu.layout_cast(square, shared) for square in squares)
                scale = lax.rsqrt(total * (1.0 / width) + parts.eps)
                for i, (first, size) in enumerate(pieces):
                    layout = layout_of(each, size).reduce(0)
                    weight = load(weights[kind].at[pl.ds(first, size)], layout) + parts.offset
                    normed = values[i] * spread(scale, size, 0) * spread(weight, size, 1)
                    values[i] = normed.astype(dtype).astype(jnp.float32)
            if turns:
                layout = layout_of(each, half).reduce(0)
                cos, sin = (spread(load(turn.at[token], layout), half, 1) for turn in rest[-2:])
                first, second = values[:2]
                values[:2] = first * cos - second * sin, second * cos + first * sin
            return [x.astype(dtype) for x in values]

        @pl.when(chunk < chunks["q"])
        def _():
            heads = pl.ds(chunk * together["q"], together["q"])
            for (first, size), x in zip(
                pieces, head_parts("q", lambda here: q_in.at[token, heads, 0, here]), strict=True
            ):
                out[token, heads, pl.ds(first, size)] = x

        @pl.when((chunk >= chunks["q"]) & (column < columns))
        def _():
            index = lax.rem(chunk - chunks["q"], chunks["k"]) * together["k"]
            heads = pl.ds(index, together["k"])

            @pl.when(chunk < chunks["q"] + chunks["k"])
            def _():
                given = pl.ds(every * parts.heads + index, together["k"])
                for (first, size), x in zip(
                    pieces, head_parts("k", lambda here: kv_in.at[token, given, here]), strict=True
                ):
                    k_ref[row, heads, column, pl.ds(first, size)] = x

            @pl.when(chunk >= chunks["q"] + chunks["k"])
            def _():
                given = pl.ds(every * parts.heads + parts.groups + index, together["k"])
                layout = layout_of(together["k"], width)
                v_ref[row, heads, column] = plgpu.load(kv_in.at[token, given], layout=layout, optimized=False)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * tokens, parts.heads, width), dtype),
        grid=(batch * tokens, chunks["q"] + 2 * chunks["k"]),
        grid_names=("token", "chunk"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="attention_inputs",
        **({} if interpret is None else {"interpret": interpret}),
    )
    views = (
        projected.reshape(batch * tokens, channels // (every * width), every, width),
        projected.reshape(batch * tokens, channels // width, width),
    )
    taken = [*(norms or ()), *(turn.reshape(batch * tokens, half) for turn in turns or ())]
    keys, values = jax.new_ref(k), jax.new_ref(v)
    q = kernel(*views, keys, values, position, *taken)
    return q.reshape(batch, tokens, parts.heads, width), jax.freeze(keys), jax.freeze(values)
