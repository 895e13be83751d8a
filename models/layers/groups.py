"""From a projection's channels to the grouped layout of recurrence inputs."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.numerics import l2_normalize
from pallas_kernels.parts import Part


def by_group(x: Float[Array, "B T D"], groups: int) -> Float[Array, "B G T E"]:
    """Splits consecutive channels into groups and puts the groups before the tokens, E = D / G."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], groups, -1), 2, 1)


def grouped(x: Float[Array, "B T D"], part: Part) -> Float[Array, "B G T E"]:
    """A part's channels by group, normalised and scaled where the part says so; in the dtype of x."""
    groups = by_group(x, part.groups)
    return groups if part.scale is None else (l2_normalize(groups) * part.scale).astype(x.dtype)
