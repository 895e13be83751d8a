"""Mamba-2's output norm in one pass: y silu(z), then an RMS norm in equal parts of the channels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import Unsupported, mosaic_gpu, require_jax
from pallas_kernels.pipeline import tiled_layout

# Parts of a CTA, one a warp; a lane has two channels of 64.
_PARTS = 4
_CHANNELS = 64


def check(channels: int, groups: int, dtype: Any) -> None:
    """Raise `Unsupported`, with the reason, on what the kernel cannot serve."""
    require_jax()
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise Unsupported(f"gates must be bfloat16 or float16, got {jnp.dtype(dtype).name}")
    if groups % _PARTS or channels % (groups * _CHANNELS) or channels > groups * 2048:
        raise Unsupported(
            f"channels must be in {_PARTS}n parts of at most 2048, each a multiple of {_CHANNELS}, "
            f"got {channels} in {groups}"
        )


def gate_then_norm(
    y: jax.Array,
    projected: jax.Array,
    weight: jax.Array,
    *,
    groups: int,
    eps: float,
    interpret: Any = None,
) -> jax.Array:
    """weight * y silu(z) / rms(y silu(z)), the RMS in each of `groups` parts; [B, T, channels].

    y: float32 [B, T, channels]. projected: [B, T, P], whose first channels are the gates z; the result has
    its dtype. weight: [channels].
    """
    batch, tokens, channels = y.shape
    check(channels, groups, projected.dtype)
    plgpu, dtype, width = mosaic_gpu(), projected.dtype, channels // groups
    layout = tiled_layout(plgpu, ((_PARTS, _CHANNELS), (1, _CHANNELS), (1, 2)), (-6,), (-3,), -1)

    def body(y_in: Any, projected_in: Any, weight_in: Any, out: Any) -> None:
        row, first = lax.axis_index("row"), lax.axis_index("parts") * _PARTS
        parts = pl.ds(first, _PARTS)

        def load(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        gates = projected_in.at[row, pl.ds(first * width, _PARTS * width)]
        # The interpreter cannot reshape a reference.
        z = load(gates.reshape(_PARTS, width)) if interpret is None else load(gates).reshape(_PARTS, width)
        gated = load(y_in.at[row, parts]) * (z / (1.0 + jnp.exp(-z)))
        scale = lax.rsqrt(jnp.sum(gated * gated, axis=1) * (1.0 / width) + eps)
        normed = gated * lax.broadcast_in_dim(scale, gated.shape, (0,)) * load(weight_in.at[parts])
        out[row, parts] = normed.astype(dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * tokens, groups, width), dtype),
        grid=(batch * tokens, groups // _PARTS),
        grid_names=("row", "parts"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="gated_norm",
        **({} if interpret is None else {"interpret": interpret}),
    )
    rows = batch * tokens
    out = kernel(y.reshape(rows, groups, width), projected.reshape(rows, -1), weight.reshape(groups, width))
    return out.reshape(y.shape)
