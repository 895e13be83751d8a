"""Loaded models against the float64 oracle: the step-size limits and the rotary embedding, on every path."""

import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from models.config import parse_config
from models.layers.rope import inverse_frequencies, rotate
from pallas_kernels.numerics import mamba2_dt
from replayssm_jax.api import load
from tests.models.oracle import oracle_logits
from tests.models.tiny import GDN, M2, tensors, write
from tests.parity.cases import BUCKET, followed, right_padded


def assert_equal_numbers(found, truth) -> None:
    """float32: within 1e-4 of the largest magnitude."""
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-4 * np.abs(truth).max())


def test_b07_the_step_size_is_bounded_by_the_limit_alone():
    initialisation = {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4}
    zero = jnp.zeros((1, 1, 1), jnp.float32)
    for limit, bias, expected in (
        ([0.0, float("inf")], -8.5, 2.0344e-4),
        (None, -8.5, 2.0344e-4),
        ([0.0, None], -8.5, 2.0344e-4),
        ([0.0, 1e308], -8.5, 2.0344e-4),
        ([0.0, 0.05], 0.54, 0.05),
    ):
        config = parse_config(M2 | initialisation | {"time_step_limit": limit})
        dt = mamba2_dt(zero, jnp.asarray([bias], jnp.float32), config.dt_limit)
        np.testing.assert_allclose(np.ravel(dt), [expected], rtol=1e-4)


def test_b07_the_limit_holds_in_prefill_decode_verify_and_replay_alike(tmp_path):
    raw = M2 | {"time_step_limit": [0.0, 0.05], "hybrid_override_pattern": "MM"}
    replay = rs.ReplayConfig(buffer_length=4, window=4)
    weights = tensors(raw)
    for name, value in weights.items():
        if name.endswith("dt_bias"):
            value[:] = 0.54
    model = load(write(tmp_path, raw, weights)).model
    text = np.random.RandomState(0).randint(0, 97, 24)
    truth = oracle_logits(raw, weights, text)
    unbounded = oracle_logits(raw | {"time_step_limit": [0.0, np.inf]}, weights, text)
    assert np.abs(truth - unbounded).max() > 0.1, "the limit matters here"
    for method in (replay, None):
        logits = followed(model, [text[:12]], text[None, 12:], method)
        assert_equal_numbers(logits[0], truth[11:-1])
    cache = model.init_cache(batch=1, max_length=BUCKET + 12, replay=replay)
    _, cache = rs.prefill(model, *right_padded([text[:12]]), cache)
    for start in range(12, 24, 4):
        tokens = jnp.asarray(text[None, start : start + 4], jnp.int32)
        logits, cache = rs.step(model, tokens, cache)
        cache = rs.commit(cache, jnp.asarray([4], jnp.int32))
        assert_equal_numbers(logits[0], truth[start : start + 4])


def test_b10_the_second_inverse_frequency():
    np.testing.assert_allclose(inverse_frequencies(64, 1e7)[1], 0.6043, atol=1e-4)
    np.testing.assert_allclose(inverse_frequencies(64, 1e4)[1], 0.7499, atol=1e-4)


def test_b11_only_the_first_channels_rotate():
    x = jnp.asarray(np.random.RandomState(0).standard_normal((1, 5, 2, 16)), jnp.float32)
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    turned = np.asarray(rotate(x, positions, rotary_dim=4, theta=1e7))
    assert turned[..., 4:].tobytes() == np.asarray(x)[..., 4:].tobytes()
    assert (turned[:, 1:, :, :4] != np.asarray(x)[:, 1:, :, :4]).all()
    angle = 3 * 1e7 ** (-2 / 4)
    pair = np.asarray(x)[0, 3, 0, [1, 3]]
    expected = [
        pair[0] * np.cos(angle) - pair[1] * np.sin(angle),
        pair[1] * np.cos(angle) + pair[0] * np.sin(angle),
    ]
    np.testing.assert_allclose(turned[0, 3, 0, [1, 3]], expected, rtol=1e-5)


@pytest.mark.parametrize("raw", [GDN, M2], ids=["partial_rotary", "no_positions"])
def test_b11_prompts_of_8_and_of_600_tokens(raw, tmp_path):
    model = load(write(tmp_path, raw)).model
    text = np.random.RandomState(1).randint(0, 97, 600)
    truth = oracle_logits(raw, tensors(raw), text)
    cache = model.init_cache(batch=2, max_length=600)
    logits, _ = rs.prefill(model, *right_padded([text[:8], text], 600), cache)
    assert_equal_numbers(logits, truth[[7, 599]])
