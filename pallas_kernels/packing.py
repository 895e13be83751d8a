"""Readers as sums of 16-bit parts, by which the tensor cores multiply a 16-bit state tile."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pipeline import tiled_layout

# Significant bits of the float types that a reader or a state may have.
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
# float16 keeps fewer exponents than float32, so each further part of a reader is scaled up by this.
_FLOAT16_STEP = 2.0**11


def reader_parts(state_dtype: Any, reader_dtype: Any) -> int:
    """Parts in the state's 16-bit type that add up to a reader in float32 precision; 0 for a float32 state.

    A rounded part leaves a rest one bit smaller than its own last bit.
    """
    name = jnp.dtype(state_dtype).name
    if name == "float32":
        return 0
    parts = -(-_BITS[jnp.dtype(reader_dtype).name] // (_BITS[name] + 1))
    return max(parts, 2) if name == "float16" else parts


def part_step(state_dtype: Any) -> float:
    """Factor between a part of a reader and the next."""
    return _FLOAT16_STEP if jnp.dtype(state_dtype) == jnp.float16 else 1.0


def pack_readers(plgpu: Any, readers: list[Any], target: Any, parts: int) -> None:
    """Writes the parts of readers [K] (references, one a token) into the rows of target [columns, K]."""
    columns, d_state = target.shape
    layout = tiled_layout(plgpu, ((8, 64), (2, 64), (1, 4)), (-6,), (-4, -3), -1)
    row = plgpu.broadcasted_iota(jnp.int32, (columns, d_state), 0, layout=layout)
    block = plgpu.layout_cast(jnp.zeros((columns, d_state), jnp.float32), layout)
    step = part_step(target.dtype)
    for t, reader in enumerate(readers):
        rest = plgpu.load(reader, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        for p in range(parts):
            part = rest.astype(target.dtype).astype(jnp.float32)
            block = jnp.where(row == t * parts + p, lax.broadcast_in_dim(part, block.shape, (1,)), block)
            rest = (rest - part) * step
    target[...] = block.astype(target.dtype)


def part_weights(plgpu: Any, layout: Any, columns: int, t: Any, parts: int, step: float) -> jax.Array:
    """[columns] factors that add the parts of token t's reader."""
    column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=layout)
    factors = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
    for p in range(parts):
        factors = jnp.where(column == t * parts + p, step**-p, factors)
    return factors
