"""From the stored layouts to arithmetic by head, [B, H, ...]; head h belongs to group h // (H/G)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from replayssm_jax.few_rows import MOST_ROWS

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def heads_first(scalars: Float32[Array, "B T H"]) -> Float32[Array, "B H T"]:
    """Returns per-token scalars of heads, tokens last."""
    return jnp.moveaxis(scalars, 1, 2)


def values_by_head(stored: Float[Array, "B G T MV"], head_dim: int) -> Float32[Array, "B H T V"]:
    """Returns x or v of every head in float32."""
    batch, groups, tokens, width = stored.shape
    values = stored.astype(jnp.float32).reshape(batch, groups, tokens, width // head_dim, head_dim)
    return jnp.moveaxis(values, 3, 2).reshape(batch, -1, tokens, head_dim)


def per_head(x: Float[Array, "B G *rest"], heads: int) -> Float32[Array, "B H *rest"]:
    """Repeats every group's entries for its consecutive heads, in float32."""
    return jnp.repeat(x.astype(jnp.float32), heads // x.shape[1], axis=1)


def weigh_slots(
    weights: Float32[Array, "B H T R"], stored: Float[Array, "B G R MV"], size: int
) -> Float32[Array, "B H T V"]:
    """Returns sum_r weights_r stored_r in float32, where a slot holds one vector of `size` a head or a group.

    Written out slot by slot: XLA fuses the sum into one pass over the ring, while a product of matrices would
    first copy the ring into another layout.
    """
    batch, groups, slots, width = stored.shape
    vectors = stored.reshape(batch, groups, slots, width // size, 1, size)
    weights = weights.reshape(batch, groups, -1, weights.shape[2], slots)
    terms = (weights[..., r, None] * vectors[:, :, r].astype(jnp.float32) for r in range(slots))
    return functools.reduce(jnp.add, terms).reshape(batch, -1, weights.shape[3], size)


def read_state(
    state: Float32[Array, "B H V K"], readers: Float32[Array, "B H T K"]
) -> Float32[Array, "B H T V"]:
    """Returns the state times every reader. The state is never reshaped: on a CPU that would copy it."""
    return einsum("bhtk,bhvk->bhtv", readers, state)


def by_token(
    read: Callable[..., Float32[Array, "B H T V"]], *fields: Float32[Array, "B H T ..."]
) -> Float32[Array, "B H T V"]:
    """Returns read(*fields), where no token's output depends on another token.

    A CPU takes the few tokens of a window one by one: XLA's loops over channels and its products of a matrix
    and a vector are fast there for one token, and for several slower than as many of one.
    """
    if not 1 < fields[0].shape[2] <= MOST_ROWS:
        return read(*fields)

    def one_by_one(*fields: Array) -> Array:
        tokens = [jnp.moveaxis(field, 2, 0)[:, :, :, None] for field in fields]
        outputs = jax.lax.map(lambda token: read(*token), tokens)
        return jnp.moveaxis(outputs[:, :, :, 0], 0, 2)

    return jax.lax.platform_dependent(*fields, cpu=one_by_one, default=read)


def add_products(
    decayed: Float32[Array, "B H V K"],
    values: Float32[Array, "B H T V"],
    keys: Float32[Array, "B H T K"],
) -> Float32[Array, "B H V K"]:
    """Returns the decayed state plus the sum over tokens of value key^T."""
    return decayed + einsum("bhtv,bhtk->bhvk", values, keys)


def largest_products(
    values: Float[Array, "B G T MV"], keys: Float[Array, "B G T K"], heads: int
) -> Float32[Array, "B T H"]:
    """Returns the largest row norm of value key^T: the largest absolute value times the key's norm."""
    by_head = values_by_head(values, values.shape[1] * values.shape[3] // heads)
    norm = per_head(jnp.linalg.norm(keys.astype(jnp.float32), axis=-1), heads)
    return jnp.moveaxis(jnp.max(jnp.abs(by_head), axis=-1) * norm, 1, 2)
