"""Fast, exact decoding of hybrid language models in JAX with ReplaySSM.

The state of a recurrent layer is kept as an old state (the checkpoint) and a ring of the inputs since then.
Outputs come from both; the state is written only when the ring is full.
"""

from replayssm_jax.cache import Cache, insert, materialize, reset, select
from replayssm_jax.cache_io import restore_cache, save_cache
from replayssm_jax.config import ReplayConfig
from replayssm_jax.replay import commit, prefill, step

__all__ = [
    "Cache",
    "ReplayConfig",
    "commit",
    "insert",
    "materialize",
    "prefill",
    "reset",
    "restore_cache",
    "save_cache",
    "select",
    "step",
]
