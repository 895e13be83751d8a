"""Requirements, launch parameters and the row plan shared by the GPU kernels."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.launch_table import TABLE

MINIMUM_JAX = (0, 11, 2)
MAX_ELEMENTS = 2**32
# Rows up to which the window's kernel folds all that flush, so that a step is one launch.
ONE_LAUNCH_ROWS = 16
TILE = 64
GRANULE = 8


@dataclasses.dataclass(frozen=True)
class LaunchParameters:
    """Launch parameters of a step: CTAs on the device, pipeline stages a CTA, rows a copy of ring keys;
    warpgroups of a CTA that flush; tiles in flight of the flush beside the window (0: a kernel of its own
    serves all rows that flush); whether CTAs claim their tiles, else they have equal shares. On coded copies:
    tiles of a step at most, the warpgroups that read them, and whether coefficients have a warpgroup apart
    from the one that copies."""

    ctas: int
    stages: int
    granule: int = GRANULE
    flush_workers: int = 3
    beside: int = 0
    claims: bool = False
    step: int = 0
    workers: int = 1
    apart: bool = False


_DEFAULT_KIND = "NVIDIA H200"
# Copies of one byte an element and less, measured on one H200.
_CODED = {
    ("mamba2", 4): LaunchParameters(264, 2, step=4),
    ("mamba2", 8): LaunchParameters(132, 4, step=4, workers=2, claims=True, apart=True),
    ("gated_delta", 4): LaunchParameters(264, 2, step=4, claims=True),
    ("gated_delta", 8): LaunchParameters(264, 2, step=4),
}


def step_parameters(
    kind: str | None, recurrence: str, tokens: int, state_bytes: float | int = 4
) -> LaunchParameters:
    """Launch parameters of a step for a device kind (None or unknown: the default), recurrence, window and
    bytes of a state element."""
    if state_bytes < 2:
        return _CODED[recurrence, int(8 * state_bytes)]
    table = TABLE.get(kind or _DEFAULT_KIND, TABLE[_DEFAULT_KIND])[recurrence]
    window = min(most for size, most in table if size == state_bytes and most >= tokens)
    return LaunchParameters(**table[int(state_bytes), window])


def device_kind() -> str:
    """Kind of the first device, as `step_parameters` takes it."""
    return jax.devices()[0].device_kind


def flushes_beside(counts: Any) -> jax.Array:
    """Whether the rows that flush are so few (an eighth) that a warpgroup beside the window folds them in
    time."""
    return counts[1] * 7 <= counts[0]


# One tile a CTA: many short CTAs write the state faster than a persistent grid.
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


def plan(flush: jax.Array, start: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row plan of a step: cursor int32 [B, 4] of (row, start, length, 0) and counts int32 [4] of the two
    kinds, 0 and 0.

    flush bool [B]; start, length int32 [B] before the flush. Rows that do not flush come first, in order;
    rows that do come last. Computed once a step and shared by all layers. The last two counts number the
    tickets by which CTAs claim tiles to flush and chunks to read; kernels leave them at 0.
    """
    batch = flush.shape[0]
    flushing = flush.astype(jnp.int32)
    total = jnp.sum(flushing)
    after = jnp.cumsum(flushing)
    index = jnp.arange(batch, dtype=jnp.int32)
    place = jnp.where(flush, batch - total + after - 1, index - after)
    rows = jnp.stack([index, start, length, jnp.zeros_like(index)], axis=1)
    cursor = jnp.zeros((batch, 4), jnp.int32).at[place].set(rows, unique_indices=True)
    return cursor, jnp.stack([batch - total, total, *[jnp.zeros_like(total)] * 2]).astype(jnp.int32)
