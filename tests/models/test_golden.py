"""The loaded models give the logits and the greedy texts that transformers gave for the same checkpoints.

The golden files come from `python -m tests.parity.make_golden`; the parity suite makes the comparison live.
"""

from pathlib import Path

import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax.api import load
from tests.models.tiny import write
from tests.parity.cases import CASES, LENGTHS, NEAR_TIE, followed, margin, prompts, tolerance

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


# CI makes the comparison live for all of them; here one a family stands for where torch is not installed.
ONE_EACH = ("nemotron-groups2-head80", "qwen-ratio3")
NAMES = [
    pytest.param(name, marks=[] if name in ONE_EACH else [pytest.mark.slow, pytest.mark.long])
    for name in CASES
]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_256_greedy_tokens_are_those_of_transformers(name, tmp_path):
    golden = np.load(GOLDEN / f"{name}.npz")
    loaded = load(write(tmp_path / name, CASES[name]))
    rows = prompts(name)
    assert len(rows) == len(LENGTHS) == len(golden["logits"])
    texts = np.broadcast_to(golden["tokens"], (len(rows), len(golden["tokens"])))
    logits = followed(loaded.model, rows, texts, rs.ReplayConfig(buffer_length=16))
    np.testing.assert_allclose(logits[:, 0], golden["logits"], rtol=0, atol=tolerance(name))
    sure = golden["margins"] > NEAR_TIE
    chosen = logits[-1].argmax(-1)
    assert (chosen[sure] == golden["tokens"][sure]).all()
    np.testing.assert_allclose(margin(logits[-1]), golden["margins"], rtol=0, atol=2 * tolerance(name))
