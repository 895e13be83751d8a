"""The residual stream; in a step of few rows on a GPU a layer's output is added where the next norm reads."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from models.layers.norm import RMSNorm
from models.layers.projection import Parts
from replayssm_jax.backend import kernel_residual_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stream:
    """A residual stream to which `added` is still to be added."""

    before: Float[Array, "B T D"]
    added: Parts


def joined(x: Float[Array, "B T D"], y: Float[Array, "B T D"] | Parts) -> Float[Array, "B T D"] | Stream:
    """The stream after a layer that read x and returned y."""
    return Stream(x, y) if isinstance(y, Parts) else x + y


@jax.named_scope("norm")
def entered(
    norm: RMSNorm, x: Float[Array, "B T D"] | Stream
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """The stream with everything added, and its norm."""
    if not isinstance(x, Stream):
        return x, norm(x)
    parts = x.added.parts
    served = kernel_residual_norm(x.before, parts, norm.weight[...], norm.eps, norm.offset)
    if served is not None:
        return served
    summed = (x.before + parts.sum(axis=0).reshape(x.before.shape)).astype(x.before.dtype)
    return summed, norm(summed)
