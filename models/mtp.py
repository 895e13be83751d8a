"""Multi-token-prediction heads: one more layer that reads the trunk and drafts the tokens after the next.

Entry p of a head joins the embedding of token p + 1 with the trunk's hidden state at p, after the trunk's
final norm; its output, through the trunk's output head, predicts token p + 2 (arXiv 2412.19437, section 2.2).
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.layers.mlp import bias_free
from models.layers.norm import RMSNorm
from replayssm_jax.cache import AttentionLayer, LayerSpec
from replayssm_jax.replay import Segment


class MTPHead(nnx.Module):
    """norm(layers(proj([embed_norm(embedding), hidden_norm(hidden)]))); embedding and output head are shared.

    layers: blocks as the trunk's, none of them recurrent. norm: makes an RMS norm of the family.
    """

    def __init__(self, size: int, layers: Sequence, *, norm: Callable[[], RMSNorm], dtype, rngs: nnx.Rngs):
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.proj = bias_free(2 * size, size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(layers)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Sizes of every layer's cache."""
        return tuple(layer.spec for layer in self.layers)

    def join(self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the first layer reads: the embedding half comes first."""
        return self.proj(jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1))

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        segment: Segment,
        caches: tuple[AttentionLayer | None, ...] | None,
    ) -> tuple[Float[Array, "B T D"], tuple[AttentionLayer | None, ...]]:
        """Normed outputs of T entries from `segment.position` on, and the caches moved on (None: none)."""
        x, moved = self.join(embedded, hidden), []
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, segment, None if caches is None else caches[index])
            moved.append(cache)
        return self.norm(x), tuple(moved)
