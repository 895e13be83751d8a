"""The conventional verification decodes as the plain eager method does, whatever is accepted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from bench.conventional import conventional_cache, states
from replayssm_jax.replay import commit_core, prefill_core, step_core
from tests.tiny_models import assert_close, full_logits, hot_model, random_tokens

WINDOW, PROMPTS = 3, np.array([5, 2], np.int32)


@functools.partial(jax.jit, donate_argnums=2)
def verify(model, tokens, cache, accepted):
    logits, _, cache = step_core(model, tokens, cache)
    return logits, commit_core(cache, accepted)


@pytest.mark.parametrize("family", ["mamba2", pytest.param("gated_delta", marks=pytest.mark.slow)])
def test_random_accepted_counts_decode_as_plain_decoding(family):
    """Drafts behind the accepted ones are wrong, so a state, column or key that outlives them shows."""
    model = hot_model(family, layers=3)
    texts = random_tokens(2, 40)
    wanted = full_logits(model, texts)
    cache = jax.jit(functools.partial(conventional_cache, model, 2, 48, WINDOW))()
    prompts = jnp.asarray(texts[:, :5])
    _, _, cache = jax.jit(prefill_core)(model, prompts, jnp.asarray(PROMPTS), cache)
    rng, position = np.random.default_rng(3), PROMPTS.copy()
    while position.max() < 36:
        accepted = rng.integers(1, WINDOW + 1, 2).astype(np.int32)
        tokens = np.stack([row[p : p + WINDOW] for row, p in zip(texts, position, strict=True)])
        wrong = np.arange(WINDOW)[None] >= accepted[:, None]
        logits, cache = verify(model, jnp.asarray(np.where(wrong, 96 - tokens, tokens)), cache, accepted)
        for row in range(2):
            there = slice(position[row], position[row] + accepted[row])
            assert_close(logits[row, : accepted[row]], wanted[row, there])
        position += accepted
    np.testing.assert_array_equal(cache.position, position)
    plain = model.init_cache(2, 48, replay=None)
    _, plain = rs.prefill(model, texts, position, plain)
    for ours, truth in zip(states(cache), rs.materialize(plain), strict=True):
        assert_close(ours, truth)
