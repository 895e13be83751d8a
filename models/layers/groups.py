"""From a projection's channels to the grouped layout of recurrence inputs."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def by_group(x: Float[Array, "B T D"], groups: int) -> Float[Array, "B G T E"]:
    """Splits consecutive channels into groups and puts the groups before the tokens, E = D / G."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], groups, -1), 2, 1)
