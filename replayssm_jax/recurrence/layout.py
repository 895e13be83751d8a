"""Between the stored layouts and arithmetic by group: head h is head m of group g, h = g * (H/G) + m."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def grouped(per_head: Float32[Array, "B T H"], groups: int) -> Float32[Array, "B G M T"]:
    """Returns per-token scalars of heads by group, tokens last."""
    batch, tokens, heads = per_head.shape
    return jnp.moveaxis(per_head, 1, 2).reshape(batch, groups, heads // groups, tokens)


def values_by_group(stored: Float[Array, "B G T MV"], head_dim: int) -> Float32[Array, "B G M T V"]:
    """Returns x or v of every head in float32."""
    values = stored.astype(jnp.float32)
    return jnp.moveaxis(values.reshape(*values.shape[:3], -1, head_dim), 3, 2)


def state_by_group(state: Float32[Array, "B H V K"], groups: int) -> Float32[Array, "B G M V K"]:
    """Returns the state with its heads split by group."""
    return state.reshape(state.shape[0], groups, -1, *state.shape[2:])


def outputs_by_token(outputs: Float32[Array, "B G M T V"]) -> Float32[Array, "B T H V"]:
    """Returns outputs by group in the order in which models use them."""
    batch, groups, per_group, tokens, head_dim = outputs.shape
    return jnp.moveaxis(outputs, 3, 1).reshape(batch, tokens, groups * per_group, head_dim)


def per_head(x: Float32[Array, "B G K"], heads: int) -> Float32[Array, "B H K"]:
    """Repeats every group's vector for its consecutive heads."""
    return jnp.repeat(x, heads // x.shape[1], axis=1)
