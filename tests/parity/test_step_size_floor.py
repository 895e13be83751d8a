"""The one place where transformers is not the trained model: a lower bound on the Mamba-2 step size.

Its prefill clamps dt to at least `time_step_min` (0.001); its own single-token decode, Megatron and
the published `time_step_limit` do not. We follow the weights, and take the bound as a parameter.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax.api import load
from tests.models.tiny import M2, tensors, write
from tests.parity.cases import followed, tolerance

pytestmark = pytest.mark.parity

TOLERANCE = tolerance("nemotron")


@pytest.fixture
def small_steps(tmp_path):
    """transformers with its clamp, our directory, and a text; dt is about 2e-4 in every head."""
    import torch
    from transformers import AutoModelForCausalLM

    weights = tensors(M2)
    for name, value in weights.items():
        if name.endswith("dt_bias"):
            value[:] = -8.5
    directory = write(tmp_path / "small", M2, weights)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, directory, np.random.RandomState(1).randint(0, 97, 37)


def whole(loaded, text: np.ndarray) -> np.ndarray:
    cache = loaded.model.init_cache(batch=1, max_length=len(text))
    lengths = jnp.asarray([len(text)], jnp.int32)
    return np.asarray(rs.prefill(loaded.model, jnp.asarray(text[None], jnp.int32), lengths, cache)[0])[0]


def test_the_bound_is_only_in_the_prefill_of_transformers(small_steps):
    from tests.parity.reference import full_logits

    model, directory, text = small_steps
    clamped = full_logits(model, text[None])[0, -1]
    faithful = whole(load(directory), text)
    assert np.abs(faithful - clamped).max() > 100 * TOLERANCE

    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "time_step_limit": [0.001, None]}))
    np.testing.assert_allclose(whole(load(directory), text), clamped, rtol=0, atol=TOLERANCE)


def test_single_steps_of_transformers_have_no_bound(small_steps):
    from tests.parity.reference import stepped_logits

    model, directory, text = small_steps
    # The first token of transformers is a prefill, which would clamp: so both begin with it unbounded.
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    first = stepped_logits(model, text)
    ours = followed(load(directory).model, [text[:1]], text[None, 1:], rs.ReplayConfig())
    np.testing.assert_allclose(ours[0], first[:-1], rtol=0, atol=TOLERANCE)
