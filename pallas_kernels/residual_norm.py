"""The residual stream's sum and the RMS norm behind it in one pass, a CTA a row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Unsupported, mosaic_gpu, require_jax
from pallas_kernels.pipeline import tiled_layout

# Channels that the four warps of a CTA take together, four a lane; every warp takes the rest, two a lane.
_TOGETHER = 512
_CHANNELS = 64


def check(channels: int, dtype: Any) -> None:
    """Raise `Unsupported`, with the reason, on what the kernel cannot serve."""
    require_jax()
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise Unsupported(f"the residual stream must be bfloat16 or float16, got {jnp.dtype(dtype).name}")
    if channels % _CHANNELS or channels > 8192:
        raise Unsupported(f"channels must be a multiple of {_CHANNELS} up to 8192, got {channels}")


def add_then_norm(
    x: jax.Array, parts: jax.Array, weight: jax.Array, *, eps: float, offset: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """z = x + sum of parts, and (offset + weight) z / rms(z); both [M, D] in the dtype of x.

    x: [M, D]. parts: [S, M, D], added in float32. weight: [D]. The norm is that of z as stored.
    """
    (count, channels), addends = x.shape, parts.shape[0]
    check(channels, x.dtype)
    plgpu, dtype = mosaic_gpu(), x.dtype
    rest = channels % _TOGETHER
    pieces = []
    if channels > rest:
        pieces.append((pl.ds(0, channels - rest), plgpu.Layout.WG_STRIDED((channels - rest,), 4)))
    if rest:
        layout = tiled_layout(plgpu, ((_CHANNELS,), (2,)), (plgpu.Replicated(4),), (-2,), -1)
        pieces.append((pl.ds(channels - rest, rest), layout))

    def body(x_in: Any, parts_in: Any, weight_in: Any, sums_out: Any, normed_out: Any) -> None:
        row = lax.axis_index("rows")

        def load(ref: Any, layout: Any) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        def summed(here: Any, layout: Any) -> jax.Array:
            total = load(parts_in.at[0, row, here], layout)
            for part in range(1, addends):
                total = total + load(parts_in.at[part, row, here], layout)
            return (load(x_in.at[row, here], layout) + total).astype(dtype)

        # All loads come before the first store, which might be to the same place.
        sums = [summed(*piece) for piece in pieces]
        weights = [load(weight_in.at[here], layout) + offset for here, layout in pieces]
        stored = [z.astype(jnp.float32) for z in sums]
        squares = sum(jnp.sum(z * z) for z in stored)
        scale = lax.rsqrt(squares * (1.0 / channels) + eps)
        for (here, _), z, weight, total in zip(pieces, stored, weights, sums, strict=True):
            sums_out[row, here] = total
            normed_out[row, here] = (z * scale * weight).astype(dtype)

    stream = jax.ShapeDtypeStruct(x.shape, dtype)
    kernel = plgpu.kernel(
        body,
        out_type=(stream, stream),
        grid=(count,),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="residual_norm",
        **({} if interpret is None else {"interpret": interpret}),
    )
    return tuple(kernel(x, parts, weight))
