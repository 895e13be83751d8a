"""The recurrences in plain JAX; every module has the same functions, in the same order."""

from replayssm_jax.recurrence import gated_delta, kimi_delta, mamba2

RECURRENCES = {"mamba2": mamba2, "gated_delta": gated_delta, "kimi_delta": kimi_delta}

__all__ = ["RECURRENCES", "gated_delta", "kimi_delta", "mamba2"]
