"""Gates against float64, and the hash against plain Python integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import numerics
from tests import oracles

EPS = float(np.finfo(np.float32).eps)


def _random(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_softplus_equals_float64():
    x = jnp.asarray(np.concatenate([np.linspace(-80, 80, 641), [-8.5, 19.999, 20.0, 20.001]]), jnp.float32)
    np.testing.assert_allclose(numerics.softplus(x), oracles.softplus(np.asarray(x)), rtol=4 * EPS)


def test_softplus_gradient_is_the_sigmoid():
    x = jnp.asarray([-100.0, -8.5, 0.0, 19.0, 21.0, 100.0], jnp.float32)
    gradient = jax.vmap(jax.grad(numerics.softplus))(x)
    expected = 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))
    np.testing.assert_allclose(gradient, expected, rtol=8 * EPS, atol=np.finfo(np.float32).tiny)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.0, 1e308), (0.01, 0.05)])
def test_mamba2_dt(limit):
    raw, bias = _random(2, 5, 3), jnp.asarray([-8.5, 0.54, 30.0], jnp.float32)
    dt = numerics.mamba2_dt(raw, bias, limit)
    assert dt.dtype == jnp.float32
    expected = oracles.mamba2_dt(np.asarray(raw), np.asarray(bias), limit)
    # The sum raw + bias is rounded at the size of its terms, before softplus.
    np.testing.assert_allclose(dt, expected, rtol=32 * EPS)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.0, 1e308)])
def test_b07_small_steps_are_not_clamped(limit):
    dt = numerics.mamba2_dt(jnp.zeros((1, 1), jnp.float32), jnp.asarray([-8.5], jnp.float32), limit)
    np.testing.assert_allclose(dt, 2.0344e-4, rtol=1e-4)


def test_b07_the_limit_holds():
    dt = numerics.mamba2_dt(jnp.zeros((1, 1), jnp.float32), jnp.asarray([0.54], jnp.float32), (0.0, 0.05))
    np.testing.assert_array_equal(dt, np.float32(0.05))


def test_gates_read_bfloat16_and_compute_in_float32():
    raw = _random(2, 3, 4, scale=3.0).astype(jnp.bfloat16)
    bias, a_log = _random(4, seed=1).astype(jnp.bfloat16), _random(4, seed=2).astype(jnp.bfloat16)
    exact = [np.asarray(array).astype(np.float64) for array in (raw, a_log, bias)]
    decay = numerics.gated_delta_log_decay(raw, a_log, bias)
    assert decay.dtype == jnp.float32
    np.testing.assert_allclose(decay, oracles.gated_delta_log_decay(*exact), rtol=32 * EPS)
    dt = numerics.mamba2_dt(raw, bias, (0.0, float("inf")))
    np.testing.assert_allclose(dt, oracles.mamba2_dt(exact[0], exact[2], (0.0, np.inf)), rtol=32 * EPS)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kimi_delta_log_decay(lower_bound):
    raw, a_log, bias = _random(2, 3, 4, 5, scale=4.0), _random(4, seed=1), _random(4, 5, seed=2)
    decay = numerics.kimi_delta_log_decay(raw, a_log, bias, lower_bound)
    expected = oracles.kimi_delta_log_decay(
        *(np.asarray(array, np.float64) for array in (raw, a_log, bias)), lower_bound
    )
    np.testing.assert_allclose(decay, expected, rtol=128 * EPS)
    assert np.all(np.asarray(decay) <= 0)
    assert lower_bound is None or np.all(np.asarray(decay) >= lower_bound)


def test_l2_normalize():
    x = _random(3, 80)
    exact = np.asarray(x, np.float64)
    expected = exact / np.sqrt(np.sum(exact**2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(numerics.l2_normalize(x), expected, rtol=16 * EPS)
    half = numerics.l2_normalize(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.float32


def test_l2_normalize_of_zeros_is_zero_with_a_finite_gradient():
    zero = jnp.zeros((2, 4), jnp.float32)
    np.testing.assert_array_equal(numerics.l2_normalize(zero), zero)
    gradient = jax.grad(lambda x: jnp.sum(numerics.l2_normalize(x)))(zero)
    np.testing.assert_allclose(gradient, 1e3, rtol=1e-5)


def _python_hash(*words):
    """The hash in unbounded integers."""
    mask, step = 0xFFFFFFFF, 0x9E3779B9
    state = step
    for word in words:
        x = state ^ (word & mask)
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & mask
        x = ((x ^ (x >> 15)) * 0x735A2D97) & mask
        state = ((x ^ (x >> 15)) + step) & mask
    return state


def test_hash_equals_plain_integers():
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, (64, 3), dtype=np.uint32)
    hashed = numerics.hash_uint32(*(jnp.asarray(words[:, i]) for i in range(3)))
    assert hashed.dtype == jnp.uint32
    np.testing.assert_array_equal(hashed, [_python_hash(*map(int, row)) for row in words])


@pytest.mark.parametrize(
    ("words", "expected"), [((0,), 0x0299C9EB), ((1, 2, 3), 0xA081B942), ((0xFFFFFFFF, -1), 0xD1311884)]
)
def test_hash_golden_values(words, expected):
    """Stored random bits depend on these values: they must never change."""
    assert int(numerics.hash_uint32(*words)) == expected == _python_hash(*words)


def test_hash_broadcasts_words_and_takes_signed_integers():
    rows = jnp.asarray([[-1], [7]], jnp.int32)
    elements = jnp.asarray([[0, 1, 2]], jnp.uint32)
    hashed = numerics.hash_uint32(rows, 5, elements)
    expected = [[_python_hash(row, 5, element) for element in range(3)] for row in (-1, 7)]
    np.testing.assert_array_equal(hashed, expected)
    np.testing.assert_array_equal(jax.jit(numerics.hash_uint32)(rows, 5, elements), expected)


def test_hash_avalanche():
    """One flipped input bit flips every output bit in half of the cases, whichever the word."""
    samples = 2048
    rng = np.random.default_rng(4)
    words = rng.integers(0, 2**32, (2, samples), dtype=np.uint32)
    flips = np.uint32(1) << np.arange(32, dtype=np.uint32)[:, None]
    bits = np.arange(32, dtype=np.uint32)
    base = np.asarray(numerics.hash_uint32(*map(jnp.asarray, words)))
    for word in range(2):
        changed = [
            jnp.asarray(np.broadcast_to(words[i] ^ (flips if i == word else 0), (32, samples)))
            for i in (0, 1)
        ]
        difference = np.asarray(numerics.hash_uint32(*changed)) ^ base[None]
        rate = np.mean((difference[:, :, None] >> bits) & 1, axis=1)
        # 1,024 rates of 2,048 fair draws each: five standard deviations.
        assert np.max(np.abs(rate - 0.5)) <= 5 * 0.5 / np.sqrt(samples)


def test_hash_of_different_words_differs():
    """Counters, their order and the number of words all matter."""
    elements = jnp.arange(4096, dtype=jnp.uint32)
    hashes = [
        np.asarray(numerics.hash_uint32(*words, elements)) for words in ((), (0,), (1,), (0, 1), (1, 0))
    ]
    together = np.concatenate(hashes)
    # 20,480 values of 32 bits: 0.05 equal pairs are expected.
    assert np.unique(together).size >= together.size - 3
    assert all(np.unique(values).size == values.size for values in hashes)
