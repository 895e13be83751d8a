"""Requirements, launch parameters and the row plan shared by the GPU kernels."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

MINIMUM_JAX = (0, 11, 2)
MAX_ELEMENTS = 2**31
TILE = 64
GRANULE = 8


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """Launch parameters of one kernel: CTAs on the device, pipeline stages a CTA, ring rows a copy."""

    ctas: int
    stages: int
    granule: int = GRANULE


# Measured by `python -m bench.kernel_decode --sweep` on one H200; kept a device kind so that others can be added.
_WINDOW_TABLE = {
    "NVIDIA H200": {1: LaunchParameters(264, 2), 2: LaunchParameters(264, 2), 4: LaunchParameters(132, 4)},
}
_DEFAULT_KIND = "NVIDIA H200"


def window_parameters(kind: str | None, tokens: int) -> LaunchParameters:
    """Launch parameters of the window kernel for a device kind (None: the default) and a token count."""
    table = _WINDOW_TABLE.get(kind or _DEFAULT_KIND, _WINDOW_TABLE[_DEFAULT_KIND])
    return table[min(size for size in (*table, max(table)) if size >= min(tokens, max(table)))]


# One tile a CTA at a time; many resident CTAs hide the latency. The eager grid holds every tile.
FLUSH_CTAS = 528
EAGER_CTAS = 1 << 30


class Unsupported(ValueError):
    """A request that the Pallas kernels cannot serve; the message is one sentence with the reason."""


def jax_version() -> tuple[int, ...]:
    """Version of the running JAX as integers, without suffixes."""
    return tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def require_jax() -> None:
    """Raise `Unsupported` unless this JAX can lower the kernels."""
    if jax_version() < MINIMUM_JAX:
        wanted = ".".join(map(str, MINIMUM_JAX))
        raise Unsupported(f"the Pallas kernels need jax >= {wanted}, this is jax {jax.__version__}")


@functools.cache
def mosaic_gpu() -> Any:
    """The Pallas Mosaic GPU module, imported on first use; raises `Unsupported` on a JAX that is too old."""
    require_jax()
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def ring_slots(buffer_length: int, window: int) -> int:
    """Slots of a ring that the kernels can read: buffer_length + window rounded up to a multiple of 8."""
    return -(-(buffer_length + window) // GRANULE) * GRANULE


def plan(flush: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row order for a step: rows that do not flush first, and how many of each there are.

    flush bool [B]. Returns order int32 [B] and counts int32 [2] = (not flushing, flushing).
    Computed once a step and shared by all layers.
    """
    batch = flush.shape[0]
    flushing = flush.astype(jnp.int32)
    total = jnp.sum(flushing)
    after = jnp.cumsum(flushing)
    index = jnp.arange(batch, dtype=jnp.int32)
    place = jnp.where(flush, batch - total + after - 1, index - after)
    order = jnp.zeros((batch,), jnp.int32).at[place].set(index, unique_indices=True)
    return order, jnp.stack([batch - total, total]).astype(jnp.int32)


def cursors(
    start: jax.Array, length: jax.Array, rows: tuple[jax.Array, jax.Array] | None
) -> dict[str, jax.Array]:
    """Kernel operands that name the rows to serve: cursor int32 [B, 4] = (row, start, length, 0) and count int32 [1]."""
    batch = start.shape[0]
    if rows is None:
        order, count = jnp.arange(batch, dtype=jnp.int32), jnp.full((1,), batch, jnp.int32)
        starts, lengths = start, length
    else:
        order, count = rows
        starts, lengths = start[order], length[order]
    return {"cursor": jnp.stack([order, starts, lengths, jnp.zeros_like(order)], axis=1), "count": count}
