"""Teacher-forced scores."""

import dataclasses
import logging

import numpy as np
import pytest

from replayssm_jax.generate import generate
from replayssm_jax.sampling import Sampling
from replayssm_jax.score import score
from tests.replayssm_jax.chain_model import VOCAB, loaded_chain, successor
from tests.replayssm_jax.test_generate import compiled, hot, random_prompts
from tests.tiny_models import full_logits

CHAIN = loaded_chain()


def chain_scores(prompt: list[int], vocab_size: int = VOCAB) -> np.ndarray:
    """Log-softmax of the chain model's logits at the next token, by the definition."""
    ids = np.arange(vocab_size)
    scores = []
    for position, (token, following) in enumerate(zip(prompt, prompt[1:], strict=False)):
        logits = -((ids - successor(token, position)) % VOCAB) - 1.0
        scores.append(logits[following] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    return np.asarray(scores)


def test_scores_are_the_log_probabilities_of_each_next_token():
    # 600 tokens take two chunks; the token after a chunk's last is the next chunk's first.
    prompts = random_prompts(3, 17, 1, 64, 600)
    scores = score(CHAIN, prompts)
    for prompt, actual in zip(prompts, scores, strict=True):
        assert actual.dtype == np.float32
        assert actual.shape == (len(prompt) - 1,)
        np.testing.assert_allclose(actual, chain_scores(prompt), rtol=1e-5)
    np.testing.assert_allclose(
        score(CHAIN, prompts[1:2], vocab_size=97)[0], chain_scores(prompts[1], 97), rtol=1e-5
    )


@pytest.mark.parametrize("family", ["mamba2"])
def test_scores_equal_whole_forward_passes_and_generated_logprobs(family):
    loaded = hot(family)
    prompts = random_prompts(5, 24)
    for prompt, actual in zip(prompts, score(loaded, prompts), strict=True):
        logits = full_logits(loaded.model, np.asarray([prompt], np.int32))[0, :-1].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = np.take_along_axis(logits, np.asarray(prompt)[1:, None], 1)[:, 0]
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    out = generate(loaded, prompts[:1], Sampling(max_new_tokens=12, temperature=1.0), max_length=64)
    scored = score(loaded, [prompts[0] + out.tokens[0]])[0]
    np.testing.assert_allclose(scored[4:], out.logprobs[0], rtol=1e-3, atol=1e-3)


def test_padded_prompts_score_like_unpadded_ones():
    prompts = random_prompts(3, 8)
    padded = [[0] * 5 + prompts[0], prompts[1]]
    mask = [[0] * 5 + [1] * 3, [1] * 8]
    for actual, expected in zip(
        score(CHAIN, padded, attention_mask=mask), score(CHAIN, prompts), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_B24_lengths_compile_nothing(caplog):
    caplog.set_level(logging.INFO, "replayssm_jax.compilations")
    loaded = loaded_chain(vocab=107)
    score(loaded, random_prompts(*range(1, 40)))
    assert compiled(caplog).count("jit(_score_chunk)") == 3
    score(loaded, random_prompts(40, 18, 33, 1))
    assert compiled(caplog) == []


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="prompts is empty"):
        score(CHAIN, [])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        score(CHAIN, [[1], []])
    with pytest.raises(ValueError, match="prompt 0 has the token id 257"):
        score(CHAIN, [[257]])
    with pytest.raises(FloatingPointError, match="logits of prompt 0 are NaN after 3 tokens"):
        score(loaded_chain(bad_token=7), [[1, 2, 7, 3, 4]])
    assert score(dataclasses.replace(CHAIN, vocab_size=5), [[1, 2]])[0].shape == (1,)
