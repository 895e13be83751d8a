"""GatedDelta: replay, fold, eager steps and prefill against the serial float64 loop."""

from tests.replayssm_jax.recurrence.contract import PrefillContract, ReplayContract


class TestGatedDeltaReplay(ReplayContract):
    recurrence = "gated_delta"


class TestGatedDeltaPrefill(PrefillContract):
    recurrence = "gated_delta"
