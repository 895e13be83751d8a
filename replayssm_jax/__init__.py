"""Fast, exact decoding of hybrid language models in JAX with ReplaySSM.

The state of a recurrent layer is kept as an old state (the checkpoint) and a ring of the inputs since then.
Outputs come from both; the state is written only when the ring is full.
"""

from replayssm_jax.api import Loaded, convert, load
from replayssm_jax.cache import Cache, insert, materialize, reset, select
from replayssm_jax.cache_io import restore_cache, save_cache
from replayssm_jax.config import EagerConfig, ReplayConfig
from replayssm_jax.drafters import Speculative
from replayssm_jax.flush import spread_flush_at
from replayssm_jax.generate import Generation, Piece, generate, stream, warmup
from replayssm_jax.replay import commit, prefill, step
from replayssm_jax.sampling import Sampling
from replayssm_jax.score import score
from replayssm_jax.sharding import shard_cache
from replayssm_jax.speculative import Drafter, Drafts

__all__ = [
    "Cache",
    "Drafter",
    "Drafts",
    "EagerConfig",
    "Generation",
    "Loaded",
    "Piece",
    "ReplayConfig",
    "Sampling",
    "Speculative",
    "commit",
    "convert",
    "generate",
    "insert",
    "load",
    "materialize",
    "prefill",
    "reset",
    "restore_cache",
    "save_cache",
    "score",
    "select",
    "shard_cache",
    "spread_flush_at",
    "step",
    "stream",
    "warmup",
]
