"""Windows with simulated formats are what single steps with the real ones give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.drift_layers import CONFIGURATIONS, decode_window, simulated, simulated_layers
from replayssm_jax.precision import decode, encode, row_random
from replayssm_jax.replay import commit_core, step_core
from tests.tiny_models import hot_model, random_tokens

TEXTS = 2


@functools.partial(jax.jit, static_argnames=("configurations", "length"))
def in_windows(model, tokens, seeds, configurations, length):
    """Logits [configuration, text, token, vocabulary]."""
    windows = jnp.moveaxis(tokens.reshape(TEXTS, -1, length), 1, 0)
    layers = simulated_layers(model, TEXTS, tokens.shape[1], configurations, seeds)

    def body(carry, window):
        layers, position = carry
        logits, layers = decode_window(model, layers, position, window)
        return (layers, position + length), logits

    _, logits = jax.lax.scan(body, (layers, jnp.int32(0)), windows)
    logits = jnp.moveaxis(logits, 0, 1)
    return logits.reshape(len(configurations), TEXTS, tokens.shape[1], -1)


@jax.jit
def in_steps(model, tokens, cache):
    """Logits [text, token, vocabulary] of single steps."""

    def body(cache, token):
        logits, _, cache = step_core(model, token[:, None], cache)
        return commit_core(cache, jnp.ones((TEXTS,), jnp.int32)), logits[:, 0]

    return jnp.moveaxis(jax.lax.scan(body, cache, tokens.T)[1], 0, 1)


def compare(family, configurations, tokens, length):
    model = hot_model(family, layers=3)
    texts = jnp.asarray(random_tokens(TEXTS, tokens))
    caches = [model.init_cache(TEXTS, tokens, item.replay(length), seed=5) for item in configurations]
    ours = in_windows(model, texts, caches[0].seed, configurations, length)
    distance = {}
    for item, cache, logits in zip(configurations, caches, ours, strict=True):
        wanted = in_steps(model, texts, cache)
        scale = np.sqrt(np.mean(np.square(wanted)))
        distance[item.name] = np.max(np.abs(np.asarray(logits - wanted)), axis=(0, 2)) / scale
    spread = np.max(np.abs(np.asarray(ours - ours[:1])), axis=(1, 3))
    return distance, spread


def test_x():
    for family in ("mamba2", "gated_delta"):
        distance, spread = compare(family, CONFIGURATIONS, 1000, 8)
        for (name, error), s in zip(distance.items(), spread, strict=True):
            print(family, name, np.median(error), error.max(), np.median(s), s.max())
