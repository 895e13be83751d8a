"""Sampling: the filters, the keys, and the tokens drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_jax import sampling
from replayssm_jax.sampling import (
    Purpose,
    Sampling,
    ends_text,
    filtered_logits,
    filtered_probabilities,
    sample,
    sampling_params,
    token_keys,
)

VOCAB = 104
DRAWS = np.arange(10_000)

probabilities_of = jax.jit(filtered_probabilities)
sampled = jax.jit(sample)
keys_of = jax.jit(token_keys, static_argnums=3)


def params(vocab_size=VOCAB, stop_ids=(), **options):
    return sampling_params(Sampling(**options), vocab_size, stop_ids)


def reference(logits, temperature, top_k, top_p, min_p):
    """The distribution by the definition of each filter, one row, float64, in the documented order."""
    logits = logits.astype(np.float64) / temperature
    keep = np.ones(len(logits), bool)
    if top_k:
        keep &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]

    def probabilities():
        weights = np.where(keep, np.exp(logits - logits.max()), 0.0)
        return weights / weights.sum()

    p, mass, kept = probabilities(), 0.0, np.zeros_like(keep)
    for token in np.argsort(-p, kind="stable"):
        if mass < top_p:
            kept[token] = keep[token]
        mass += p[token]
    keep = kept if top_p < 1 else keep
    p = probabilities()
    keep &= p >= min_p * p.max()
    return probabilities()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_filters_follow_their_definitions(options):
    logits = np.random.RandomState(0).normal(size=(6, VOCAB)).astype(np.float32) * 2
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    actual = probabilities_of(jnp.asarray(logits), params(**options))
    for row, expected in zip(np.asarray(actual), (reference(row, **full) for row in logits), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-6)
        np.testing.assert_array_equal(row > 0, expected > 0)


def test_ties_with_the_last_kept_token_are_kept():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, 0.0]], jnp.float32)
    kept = np.isfinite(filtered_logits(logits, params(temperature=1.0, top_k=2, vocab_size=5)))
    assert kept.tolist() == [[False, True, True, True, False]]


def test_temperature_0_is_a_distribution_on_the_first_of_the_best():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 2.0]], jnp.float32)
    probabilities = probabilities_of(logits, params(vocab_size=4))
    assert np.asarray(probabilities).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_the_smallest_temperatures_do_not_overflow():
    logits = jnp.asarray([[-3e38, 3e38, 1.0]], jnp.float32)
    for temperature in (1e-30, 1e-45):
        p = probabilities_of(logits, params(temperature=temperature, vocab_size=3))
        assert np.asarray(p).tolist() == [[0.0, 1.0, 0.0]]


def draw(logits, options):
    """A token at each of 10,000 positions, all with the same logits."""
    positions = jnp.asarray(DRAWS, jnp.int32)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None, :], (len(DRAWS), VOCAB))
    keys = keys_of(options.seed, jnp.zeros_like(positions), positions, Purpose.SAMPLE)
    return sampled(rows, keys, options)


def test_frequencies_are_the_filtered_probabilities():
    logits = np.random.RandomState(1).normal(size=VOCAB) * 1.5
    options = params(temperature=0.9, top_k=20, min_p=0.02)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None, :], (6, VOCAB))
    expected = np.asarray(probabilities_of(rows, options))[0]
    tokens, _, _ = draw(logits, options)
    seen = np.bincount(np.asarray(tokens), minlength=VOCAB) / len(DRAWS)
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(DRAWS)))


def test_logprobs_are_those_of_the_raw_logits():
    logits = np.random.RandomState(2).normal(size=VOCAB)
    tokens, logprobs, finite = draw(logits, params(temperature=0.5, top_k=3, vocab_size=20))
    raw = logits[:20] - np.log(np.exp(logits[:20]).sum())
    np.testing.assert_allclose(logprobs, raw[np.asarray(tokens)], atol=1e-5)
    assert np.all(finite)


def test_a_key_depends_on_seed_prompt_position_and_purpose():
    def key(seed=0, prompt=0, position=0, purpose=Purpose.SAMPLE):
        one = jnp.asarray([prompt], jnp.int32), jnp.asarray([position], jnp.int32)
        return tuple(np.asarray(jax.random.key_data(keys_of(jnp.uint32(seed), *one, purpose)))[0].tolist())

    keys = [key(), key(seed=1), key(seed=2**32 - 1), key(prompt=1), key(position=1)]
    keys += [key(purpose=purpose) for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL)]
    assert len(set(keys)) == len(keys)
    assert key(prompt=3, position=5) == key(prompt=3, position=5)
    assert key(prompt=3, position=5) != key(prompt=5, position=3)


def test_batch_mates_change_nothing():
    random = np.random.RandomState(3)
    logits = jnp.asarray(random.normal(size=(5, VOCAB)), jnp.float32)
    prompt, position = jnp.arange(5, dtype=jnp.int32), jnp.arange(10, 15, dtype=jnp.int32)
    options = params(temperature=1.3, top_p=0.9, seed=7)

    def tokens(rows):
        rows = np.asarray(rows)
        keys = keys_of(options.seed, prompt[rows], position[rows], Purpose.SAMPLE)
        return np.asarray(sampled(logits[rows], keys, options)[0]).tolist()

    together = tokens([0, 1, 2, 3, 4])
    assert [tokens([row])[0] for row in range(5)] == together
    assert tokens([4, 2, 0, 1, 3]) == [together[row] for row in (4, 2, 0, 1, 3)]


def test_B24_changing_options_compiles_nothing():
    traces = []

    @jax.jit
    def run(logits, keys, options):
        traces.append(1)
        return sample(logits, keys, options)

    logits, position = jnp.zeros((2, VOCAB), jnp.float32), jnp.zeros((2,), jnp.int32)
    for options in (
        params(),
        params(temperature=0.7, seed=3),
        params(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, stop_ids=(1, 2, 3), vocab_size=20),
    ):
        run(logits, keys_of(options.seed, position, position, Purpose.SAMPLE), options)
    assert len(traces) == 1


def test_B16_ids_beyond_the_vocabulary_are_never_chosen():
    # The seven rows of padding have logit 0, all real ones lie in [-9, -1].
    logits = np.concatenate([np.linspace(-9.0, -1.0, 97), np.zeros(7)])
    tokens, logprobs, _ = draw(logits, params(vocab_size=97))
    assert np.all(np.asarray(tokens) == 96)
    real = logits[:97]
    np.testing.assert_allclose(logprobs[0], real[96] - np.log(np.exp(real).sum()), atol=1e-5)
    for options in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.001}):
        tokens, _, _ = draw(logits, params(temperature=1.0, vocab_size=97, **options))
        assert np.asarray(tokens).max() < 97


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_with_bad_logits_are_reported(bad):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, 4] = bad
    position = jnp.zeros((3,), jnp.int32)
    options = params(temperature=1.0)
    keys = keys_of(options.seed, position, position, Purpose.SAMPLE)
    _, _, finite = sampled(jnp.asarray(logits), keys, options)
    assert finite.tolist() == [True, False, True]


def test_one_reading_of_the_logits_tells_what_three_do():
    rng = np.random.default_rng(4)
    logits = (
        rng.normal(size=(7, 2, 3000)).astype(np.float32) * np.float32([1, 30, 1, 1, 1, 1, 1])[:, None, None]
    )
    logits[2, :, 100:2000:100] = logits[2].max(axis=-1, keepdims=True) + 1
    logits[3, 0, 5], logits[3, 1, 2998] = np.nan, np.nan
    logits[4, :, 7], logits[5, :, ::2] = np.inf, -np.inf
    logits[6, :, 2500:] += 100
    for vocab_size in (3000, 2100):
        size = jnp.int32(vocab_size)
        best, largest, total = (np.asarray(x) for x in jax.jit(sampling._in_one_pass)(logits, size))
        kept = logits[..., :vocab_size].astype(np.float64)
        np.testing.assert_array_equal(largest, kept.max(axis=-1))
        fine = np.isfinite(largest)
        assert fine[:3].all() and not fine[4].any() and fine[3].tolist() == [False, vocab_size < 2998]
        np.testing.assert_array_equal(best[fine], kept.argmax(axis=-1)[fine])
        kept, below = kept[fine], total[fine] - largest[fine]
        expected = np.log(np.exp(kept - kept.max(axis=-1, keepdims=True)).sum(axis=-1))
        np.testing.assert_allclose(below, expected, rtol=0, atol=2**-18)
        for one, other in zip(
            (best, largest, total), jax.jit(sampling._by_passes)(logits, size), strict=True
        ):
            np.testing.assert_allclose(one[fine], np.asarray(other)[fine], rtol=2**-20)


def test_ends_text():
    options = params(stop_ids=tuple(range(2, 22, 2)))
    tokens = jnp.asarray([2, 3, 20, 21, 0], jnp.int32)
    assert ends_text(tokens, options).tolist() == [True, False, True, False, False]
    assert not np.any(ends_text(tokens, params(stop_ids=())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_k": -1}, "top_k must be an integer of at least 1, or 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"seed": 2**32}, "seed must be an integer from 0"),
        ({"stop_ids": (-1,)}, "stop_ids must be token ids"),
        ({"stop_ids": (2**31,)}, "stop_ids must be token ids"),
        ({"stop_strings": "end"}, "stop_strings must be a list"),
        ({"stop_strings": ("",)}, "stop_strings must be a list"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_options_take_what_configurations_hold():
    sampling = Sampling(1, 1, None, None, None, 3, [5, 6], ["a"])
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
    assert (sampling.stop_ids, sampling.stop_strings) == ((5, 6), ("a",))
    assert hash(sampling) == hash(Sampling(1, 1, stop_ids=(5, 6), stop_strings=("a",), seed=3))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_the_best_token_always_stays(seed, temperature, top_k, top_p, min_p):
    logits = np.random.RandomState(seed).normal(size=(2, VOCAB)).astype(np.float32) * 5
    options = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = np.asarray(probabilities_of(jnp.asarray(logits), options))
    np.testing.assert_allclose(p.sum(-1), 1.0, atol=1e-5)
    np.testing.assert_array_equal(p.argmax(-1), logits.argmax(-1))
