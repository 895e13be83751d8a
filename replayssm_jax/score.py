"""Scoring text: the log-probability that a model gives to every token of a prompt."""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from replayssm_jax.api import Loaded
from replayssm_jax.buckets import prefill_chunks, rounded_length
from replayssm_jax.cache import Cache, reset
from replayssm_jax.compilations import Compilations
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
    with Compilations():
        model = FlatModel.of(loaded.model)
        cache = empty_cache(model, 1, rounded_length(max(map(len, encoded)), None), None)
        scores = []
        for i, ids in enumerate(encoded):
            cache = reset(cache, np.zeros(1, np.int32))
            logprobs, cache = _score_prompt(model, ids, cache, allowed)
            _refuse_nan(logprobs, i)
            scores.append(logprobs)
    return scores


def _score_prompt(
    model: FlatModel, ids: list[int], cache: Cache, vocab_size: np.int32
) -> tuple[np.ndarray, Cache]:
    parts, start = [], 0
    for size, count in prefill_chunks(len(ids), cache.max_length):
        # One token more than is fed: the last one's target is the next chunk's first token.
        window = np.zeros(size + 1, np.int32)
        window[: count + 1][: len(ids) - start] = ids[start : start + count + 1]
        lengths = np.array([count], np.int32)
        part, cache = _score_chunk(model, window[None, :-1], window[1:], lengths, cache, vocab_size)
        parts.append(np.asarray(part)[:count])
        start += count
    return np.concatenate(parts)[:-1], cache


def _refuse_nan(logprobs: np.ndarray, prompt: int) -> None:
    if np.isnan(logprobs).any():
        known = int(np.isnan(logprobs).argmax()) + 1
        raise FloatingPointError(
            f"The logits of prompt {prompt} are NaN after {known} tokens: weights are damaged, or a value "
            "left the range of the dtype."
        )
