"""KimiDelta: replay, fold, eager steps and prefill against the serial float64 loop."""

from tests.replayssm_jax.recurrence.contract import PrefillContract, ReplayContract


class TestKimiDeltaReplay(ReplayContract):
    recurrence = "kimi_delta"


class TestKimiDeltaPrefill(PrefillContract):
    recurrence = "kimi_delta"
