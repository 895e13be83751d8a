"""The short causal convolution in front of a recurrence, and its cached window."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from models.layers.groups import grouped
from pallas_kernels.parts import Gate, Part
from replayssm_jax.backend import gate_values, kernel_convolution
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
        """Returns silu(conv(x)) in the dtype of x, and the layer (buffers with a `conv`, or None) moved on.

        Steps write their T columns; a prefill only the last taps - 1 real ones of each row.
        """
        past, tokens = self.taps - 1, x.shape[1]
        if layer is not None and segment.mode == "step":
            before = _columns(layer.conv, segment, -past, past)
            # Every column by itself: old and new ones joined to one array would be copied first.
            columns = [before[:, i] for i in range(past)] + [x[:, t] for t in range(tokens)]
            outputs = [self._weighed(columns[t : t + self.taps]) for t in range(tokens)]
            layer = replace(layer, conv=_write(layer.conv, x, segment.position))
            return jnp.stack(outputs, axis=1), layer
        if layer is None:
            columns = jnp.pad(x, ((0, 0), (past, 0), (0, 0)))
        else:
            columns = jnp.concatenate([_columns(layer.conv, segment, -past, past), x], axis=1)
            last = segment.lengths[:, None] + jnp.arange(past, dtype=jnp.int32)[None, :]
            kept = jnp.take_along_axis(columns, last[:, :, None], axis=1)
            moved_on = _write(layer.conv, kept, segment.position + segment.lengths - past)
            layer = replace(layer, conv=moved_on)
        return self._weighed([columns[:, tap : tap + tokens] for tap in range(self.taps)]), layer

    @jax.named_scope("convolution")
    def by_group(
        self,
        projected: Float[Array, "B T P"],
        offset: int,
        parts: tuple[Part, ...],
        gates: tuple[tuple[Gate, *tuple[Float[Array, " H"], ...]], ...],
        layer: Any,
        segment: Segment,
    ) -> tuple[tuple[Float[Array, "B G T E"], ...], tuple[Float32[Array, "B T H"], ...], Any]:
        """What a recurrence takes: the convolution's outputs part by part, the gates, and the layer moved on.

        projected: its channels from `offset` on are the convolution's. parts: of those, in order. gates: of
        other channels, each with its constants of the heads.
        """
        constants = tuple(tuple(arrays) for _, *arrays in gates)
        functions = tuple(gate for gate, *_ in gates)
        if layer is not None and segment.mode == "step" and segment.kernels:
            bias = None if self.bias is None else self.bias[...]
            served = kernel_convolution(
                layer.conv,
                projected,
                self.weight[...],
                bias,
                segment.position,
                parts,
                offset,
                functions,
                constants,
            )
            if served is not None:
                outputs, values, window = served
                return outputs, values, replace(layer, conv=window)
        channels = sum(part.channels for part in parts)
        mixed, layer = self(projected[..., offset : offset + channels], layer, segment)
        outputs, first = [], 0
        for part in parts:
            outputs.append(grouped(mixed[..., first : first + part.channels], part))
            first += part.channels
        return tuple(outputs), gate_values(projected, functions, constants), layer

    def _weighed(self, columns: Sequence[Float[Array, "*batch C"]]) -> Float[Array, "*batch C"]:
        """silu of the columns under the taps, oldest first, times their weights; in the columns' dtype."""
        terms = [
            column.astype(jnp.float32) * jnp.broadcast_to(tap.astype(jnp.float32), column.shape)
            for column, tap in zip(columns, self.weight[...], strict=True)
        ]
        out = functools.reduce(jnp.add, terms)
        if self.bias is not None:
            out = out + jnp.broadcast_to(self.bias[...].astype(jnp.float32), out.shape)
        return jax.nn.silu(out).astype(columns[0].dtype)


def _columns(window: Float[Array, "B W C"], segment: Segment, first: int, count: int):
    """The columns of `count` positions from position + first on."""
    offsets = first + jnp.arange(count, dtype=jnp.int32)
    index = (segment.position[:, None] + offsets[None, :]) % window.shape[1]
    return jnp.take_along_axis(window, index[:, :, None], axis=1)


def _write(window: Float[Array, "B W C"], columns: Float[Array, "B P C"], position):
    batch, count = columns.shape[:2]
    index = (position[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]) % window.shape[1]
    if batch == 1:
        # One index makes it a plain update of a slice; on a GPU, scattering by a few takes 30 to 60 us.
        for i in range(count):
            window = window.at[0, index[0, i]].set(columns[0, i])
        return window
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return window.at[rows, index].set(columns, unique_indices=True)
