"""Mamba2: replay, fold, eager steps and prefill against the serial float64 loop."""

from tests.replayssm_jax.recurrence.contract import PrefillContract, ReplayContract


class TestMamba2Replay(ReplayContract):
    recurrence = "mamba2"


class TestMamba2Prefill(PrefillContract):
    recurrence = "mamba2"
