"""Norms against float64, and which channels share a mean."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.norm import GateThenNorm, NormThenGate, RMSNorm

SILU_ONE = 1.2784645


def silu(x):
    return x / (1.0 + np.exp(-x))


def normed(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def test_b06_each_group_of_channels_has_its_own_mean():
    norm = GateThenNorm(64, groups=2, eps=1e-5, dtype=jnp.float32)
    y = jnp.concatenate([jnp.ones((1, 1, 32)), jnp.full((1, 1, 32), 10.0)], axis=-1)
    out = np.asarray(norm(y, jnp.full((1, 1, 64), SILU_ONE)))
    np.testing.assert_allclose(out, 1.0, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_b06_the_gate_comes_first_and_differs_from_channel_to_channel(groups):
    rng = np.random.default_rng(groups)
    y, gate, weight = rng.normal(size=(2, 3, 64)), rng.normal(size=(2, 3, 64)) * 3, rng.normal(size=64)
    norm = GateThenNorm(64, groups=groups, eps=1e-5, dtype=jnp.float32)
    norm.weight[...] = jnp.asarray(weight, jnp.float32)
    gated = (y * silu(gate)).reshape(2, 3, groups, -1)
    expected = normed(gated, 1e-5).reshape(2, 3, 64) * weight
    actual = norm(jnp.asarray(y, jnp.float32), jnp.asarray(gate, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_b06_the_delta_rule_norms_first_and_gates_last():
    rng = np.random.default_rng(0)
    y, gate, weight = rng.normal(size=(2, 3, 4, 16)), rng.normal(size=(2, 3, 4, 16)) * 3, rng.normal(size=16)
    norm = NormThenGate(16, eps=1e-6)
    norm.weight[...] = jnp.asarray(weight, jnp.float32)
    expected = normed(y, 1e-6) * weight * silu(gate)
    actual = norm(jnp.asarray(y, jnp.float32), jnp.asarray(gate, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_weights_may_be_stored_around_zero(offset):
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(2, 3, 24)), rng.normal(size=24)
    norm = RMSNorm(24, eps=1e-6, offset=offset, dtype=jnp.float32)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), normed(x, 1e-6), rtol=1e-5, atol=1e-5)
    norm.weight[...] = jnp.asarray(weight, jnp.float32)
    expected = normed(x, 1e-6) * (offset + weight)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once_at_the_end():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 64)), jnp.bfloat16)
    norm = RMSNorm(64, eps=1e-6, dtype=jnp.bfloat16)
    norm.weight[...] = jnp.full((64,), 1.0078125, jnp.bfloat16)
    expected = jnp.asarray(normed(np.asarray(x, np.float64), 1e-6) * 1.0078125, jnp.bfloat16)
    assert norm(x).dtype == jnp.bfloat16
    assert (np.asarray(norm(x)) == np.asarray(expected)).all()
