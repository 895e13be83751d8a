"""What a cache should hold, from one eager prefill of the same texts."""

import numpy as np

import replayssm_jax as rs
from replayssm_jax.cache import AttentionLayer, RecurrentLayer
from tests.tiny_models import assert_close

# Few shapes and configurations, so that most tests find their programs compiled.
MAX_LENGTH = 64
WIDE = rs.ReplayConfig(buffer_length=8, window=8)


def prefilled(model, texts, lengths, replay, **options):
    """A cache holding texts[i, :lengths[i]], and the logits after them."""
    cache = model.init_cache(len(texts), MAX_LENGTH, replay, **options)
    return rs.prefill(model, texts[:, :16], np.asarray(lengths, np.int32), cache)


def windows(texts, position, count):
    return np.stack([row[p : p + count] for row, p in zip(texts, position, strict=True)])


def eager_cache(model, texts, position):
    """A cache of texts[i, :position[i]] by one eager prefill a row, from nothing."""
    size = 56 if np.max(position) <= 56 else texts.shape[1]
    padded = np.zeros((len(texts), size), np.int32)
    padded[:, : texts.shape[1]] = texts[:, :size]
    cache = model.init_cache(len(texts), max(MAX_LENGTH, size), None)
    return rs.prefill(model, padded, np.asarray(position, np.int32), cache)[1]


def states_of(model, texts, position):
    """Materialised states and convolution windows of texts[i, :position[i]]."""
    cache = eager_cache(model, texts, position)
    return rs.materialize(cache), conv_windows(cache)


def conv_windows(cache):
    """The last taps - 1 convolution columns of every row, oldest first; zero before position 0."""
    windows = []
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            past = layer.conv.shape[1] - cache.window
            index = (np.asarray(cache.position)[:, None] + np.arange(-past, 0)) % layer.conv.shape[1]
            windows.append(np.take_along_axis(np.asarray(layer.conv), index[:, :, None], axis=1))
    return windows


def assert_same_state(model, cache, texts):
    """The cache holds what a run that never drafted would hold: states, convolutions, keys and values."""
    expected = eager_cache(model, texts, cache.position)
    for actual, state in zip(rs.materialize(cache), rs.materialize(expected), strict=True):
        assert_close(actual, state)
    for actual, window in zip(conv_windows(cache), conv_windows(expected), strict=True):
        assert_close(actual, window)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if isinstance(layer, AttentionLayer):
            for row, length in enumerate(np.asarray(cache.position)):
                assert_close(layer.k[row, :, :length], other.k[row, :, :length])
                assert_close(layer.v[row, :, :length], other.v[row, :, :length])
