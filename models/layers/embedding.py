"""Token embeddings and the output head over the same kind of matrix."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from replayssm_jax.few_rows import dot_general


class Embedding(nnx.Module):
    """A (vocabulary, hidden) matrix: looks tokens up, or scores hidden states against every row."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype, rngs: nnx.Rngs):
        scale = hidden_size**-0.5
        self.weight = nnx.Param(
            (scale * jax.random.normal(rngs.params(), (vocab_size, hidden_size))).astype(dtype)
        )

    @jax.named_scope("embedding")
    def __call__(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the matrix, in its dtype; tokens must lie inside the vocabulary."""
        return jnp.take(self.weight[...], tokens, axis=0)

    @jax.named_scope("lm_head")
    def scores(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """Inner products with every row, accumulated and returned in float32."""
        return dot_general(
            hidden,
            self.weight[...],
            (((hidden.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
