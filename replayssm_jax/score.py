"""Scoring text: the log-probability that a model gives to every token of a prompt."""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from replayssm_jax.api import Loaded
from replayssm_jax.buckets import prefill_chunks, rounded_length
from replayssm_jax.cache import Cache, reset
from replayssm_jax.decode import FlatModel, empty_cache
from replayssm_jax.generate import chosen_vocabulary
from replayssm_jax.prompts import encode_prompts, refuse_empty
from replayssm_jax.replay import prefill_core
from replayssm_jax.sampling import log_probabilities, within_vocabulary

SCORED_TOGETHER = 64


@functools.partial(jax.jit, donate_argnums=4)
def _score_chunk(
    model: FlatModel,
    tokens: Int32[Array, "1 S"],
    targets: Int32[Array, " S"],
    lengths: Int32[Array, " 1"],
    cache: Cache,
    vocab_size: Int32[Array, ""],
) -> tuple[Float32[Array, " S"], Cache]:
    """Feed a chunk; returns log-probabilities of `targets`, the token after each."""
    network = model.unflatten()
    _, hidden, cache = prefill_core(network, tokens, lengths, cache)

    def score(pair):
        hidden, target = pair
        return log_probabilities(within_vocabulary(network.logits(hidden), vocab_size), target)

    # Logits of 64 tokens at a time are alive, whatever the chunk and the vocabulary.
    return jax.lax.map(score, (hidden[0], targets), batch_size=SCORED_TOGETHER), cache


def score(
    loaded: Loaded, prompts: Any, *, attention_mask: Any = None, vocab_size: int | None = None
) -> list[np.ndarray]:
    """Teacher-forced log-probabilities of tokens 1..n-1 of every prompt, each given the tokens before it.

    prompts, attention_mask: as for `generate`; vocab_size: as in `Sampling`. Returns float32 [n - 1] for a
    prompt of n tokens. Prompts are fed one by one in the chunks of `generate`, so lengths do not decide what
    is compiled. Raises ValueError for prompts that do not fit, FloatingPointError when logits are not finite.
    """
    config = loaded.config
    encoded = encode_prompts(prompts, loaded.tokenizer, config.vocab_size, attention_mask=attention_mask)
    refuse_empty(encoded)
    allowed = np.int32(chosen_vocabulary(loaded, vocab_size))
    longest = max(map(len, encoded))
    model = FlatModel.of(loaded.model)
    cache = empty_cache(model, 1, rounded_length(longest, None), None)
    scores = []
    for i, ids in enumerate(encoded):
        cache = reset(cache, np.zeros(1, np.int32))
        parts = []
        start = 0
        for size, count in prefill_chunks(len(ids), cache.max_length):
            padded = np.zeros(size + 1, np.int32)
            real = ids[start : start + count + 1]
            padded[: len(real)] = real
            lengths = np.array([count], np.int32)
            part, cache = _score_chunk(model, padded[None, :-1], padded[1:], lengths, cache, allowed)
            parts.append(np.asarray(part)[:count])
            start += count
        scores.append(np.concatenate(parts)[:-1])
        if np.isnan(scores[-1]).any():
            known = int(np.isnan(scores[-1]).argmax()) + 1
            raise FloatingPointError(
                f"The logits of prompt {i} are NaN after {known} tokens: weights are damaged, or a "
                "value left the range of the dtype."
            )
    return scores
