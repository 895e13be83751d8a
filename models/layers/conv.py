"""The short causal convolution in front of a recurrence, and its cached window."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from replayssm_jax.replay import Segment


class CausalConv(nnx.Module):
    """Depthwise causal convolution with silu; the last tap multiplies the current token."""

    def __init__(self, channels: int, taps: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        weight = jax.random.uniform(rngs.params(), (taps, channels), minval=-1.0, maxval=1.0)
        self.weight = nnx.Param((weight * taps**-0.5).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype)) if bias else None
        self.taps = taps

    def __call__(
        self, x: Float[Array, "B T C"], layer: Any, segment: Segment
    ) -> tuple[Float[Array, "B T C"], Any]:
        """Returns silu(conv(x)) in the dtype of x, and the layer (buffers with a `conv`, or None) with its
        window moved on."""
        past = self.taps - 1
        if layer is None:
            columns = jnp.pad(x, ((0, 0), (past, 0), (0, 0)))
        else:
            columns = jnp.concatenate([_columns(layer.conv, segment, -past, past), x], axis=1)
            layer = replace(layer, conv=self._moved_on(layer.conv, columns, segment))
        weight = self.weight[...].astype(jnp.float32)
        tokens = x.shape[1]
        out = sum(
            columns[:, tap : tap + tokens].astype(jnp.float32) * weight[None, None, tap]
            for tap in range(self.taps)
        )
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)[None, None]
        return jax.nn.silu(out).astype(x.dtype), layer

    def _moved_on(self, window: Float[Array, "B W C"], columns: Float[Array, "B P C"], segment: Segment):
        """Steps write their T columns; a prefill only the last taps - 1 real ones of each row."""
        past = self.taps - 1
        if segment.mode == "step":
            return _write(window, columns[:, past:], segment.position)
        last = segment.lengths[:, None] + jnp.arange(past, dtype=jnp.int32)[None, :]
        kept = jnp.take_along_axis(columns, last[:, :, None], axis=1)
        return _write(window, kept, segment.position + segment.lengths - past)


def _columns(window: Float[Array, "B W C"], segment: Segment, first: int, count: int):
    """The columns of `count` positions from position + first on."""
    offsets = first + jnp.arange(count, dtype=jnp.int32)
    index = (segment.position[:, None] + offsets[None, :]) % window.shape[1]
    return jnp.take_along_axis(window, index[:, :, None], axis=1)


def _write(window: Float[Array, "B W C"], columns: Float[Array, "B P C"], position):
    index = (position[:, None] + jnp.arange(columns.shape[1], dtype=jnp.int32)[None, :]) % window.shape[1]
    rows = jnp.arange(window.shape[0], dtype=jnp.int32)[:, None]
    return window.at[rows, index].set(columns, unique_indices=True)
