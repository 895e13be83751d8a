"""What every hybrid model offers to the decoding loop."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.config import ModelConfig
from models.layers.embedding import Embedding
from models.layers.norm import RMSNorm
from models.layers.program import run_layers
from models.layers.residual import entered
from models.mtp import MTPDrafter, MTPHead
from replayssm_jax.cache import Cache, LayerSpec, init_cache
from replayssm_jax.config import DEFAULT_REPLAY, DecodingConfig
from replayssm_jax.replay import Segment, fresh_segment


class HybridModel(nnx.Module):
    """A stack of blocks between an embedding and an output head; subclasses fill in the fields.

    layers: blocks called as block(x, segment, layer_cache) -> (x, layer_cache), each with `spec` (its cache's
    sizes, or None) and `heads()` (its recurrence's per-head constants, or None).
    lm_head: None where the output head is the embedding matrix.
    mtp: the multi-token-prediction head, or None.
    """

    config: ModelConfig
    embed: Embedding
    layers: nnx.List
    norm: RMSNorm
    lm_head: Embedding | None
    mtp: MTPHead | None = None

    def __call__(
        self, tokens: Int32[Array, "B T"], segment: Segment, layers: tuple | None
    ) -> tuple[Float[Array, "B T D"], tuple]:
        """Hidden states after the final norm, and the layers' caches moved on (layers=None: no cache)."""
        x, caches = run_layers(self.layers, self.embed(tokens), segment, layers)
        return entered(self.norm, x)[1], caches

    def forward(
        self, tokens: Int32[Array, "B T"], lengths: Int32[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm of whole texts from position 0, right-padded; differentiable."""
        return self(tokens, fresh_segment(*tokens.shape, lengths=lengths), None)[0]

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """Next-token logits, float32."""
        head = self.embed if self.lm_head is None else self.lm_head
        return head.scores(hidden)

    def own_drafter(self) -> MTPDrafter | None:
        """What drafts with the model's own multi-token-prediction head; None without one."""
        return None if self.mtp is None else MTPDrafter()

    def cache_specs(self) -> tuple[LayerSpec, ...]:
        """Sizes of every layer's cache."""
        return tuple(block.spec for block in self.layers)

    def init_cache(
        self,
        batch: int,
        max_length: int,
        replay: DecodingConfig | None = DEFAULT_REPLAY,
        *,
        flush_at=None,
        seed: int = 0,
    ) -> Cache:
        """An empty cache of `batch` rows that can hold `max_length` tokens each; see `cache.init_cache`."""
        return init_cache(
            self.cache_specs(),
            tuple(block.heads() for block in self.layers),
            batch,
            max_length,
            replay=replay,
            dtype=jnp.dtype(self.embed.weight.dtype),
            flush_at=flush_at,
            seed=seed,
        )
