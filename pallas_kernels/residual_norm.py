"""The residual stream's sum and the RMS norm behind it in one pass."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Unsupported, mosaic_gpu, require_jax
from pallas_kernels.pipeline import tiled_layout

# Rows of a CTA, one a warp; a lane has two channels of 64.
_ROWS = 4
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
    each = _ROWS if count % _ROWS == 0 else 1
    warps = -6 if each > 1 else plgpu.Replicated(4)
    tiles = ((each, _CHANNELS), (1, _CHANNELS), (1, 2))
    layout = tiled_layout(plgpu, tiles, (warps,), (-3,), -1)

    def body(x_in: Any, parts_in: Any, weight_in: Any, sums_out: Any, normed_out: Any) -> None:
        rows = pl.ds(lax.axis_index("rows") * each, each)

        def load(ref: Any, layout: Any = layout) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        total = load(parts_in.at[0, rows])
        for part in range(1, addends):
            total = total + load(parts_in.at[part, rows])
        sums = (load(x_in.at[rows]) + total).astype(dtype)
        sums_out[rows] = sums
        z = sums.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(z * z, axis=1) * (1.0 / channels) + eps)
        weights = lax.broadcast_in_dim(load(weight_in, layout.reduce(0)) + offset, z.shape, (1,))
        normed_out[rows] = (z * lax.broadcast_in_dim(scale, z.shape, (0,)) * weights).astype(dtype)

    stream = jax.ShapeDtypeStruct(x.shape, dtype)
    kernel = plgpu.kernel(
        body,
        out_type=(stream, stream),
        grid=(count // each,),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="residual_norm",
        **({} if interpret is None else {"interpret": interpret}),
    )
    return tuple(kernel(x, parts, weight))
