"""Acceptance: which drafts stand, and the distribution of what a window yields."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from replayssm_jax import speculative
from replayssm_jax.sampling import (
    Purpose,
    Sampling,
    filtered_probabilities,
    sample,
    sampling_params,
    token_keys,
)
from replayssm_jax.speculative import Drafts, NoDrafts, accept, cut_short, draw_drafts

VOCAB = 6
ROWS = 24_000
accepted = jax.jit(accept)


def params(vocab_size=VOCAB, stop_ids=(), **options):
    return sampling_params(Sampling(**options), vocab_size, stop_ids)


def scored(best: list[list[int]]) -> jnp.ndarray:
    """Logits [B, T, V] whose largest entries are at `best`."""
    return jnp.where(jax.nn.one_hot(jnp.asarray(best), VOCAB) > 0, -1.0, -3.0)


def drafted(tokens: list[list[int]], count: list[int]) -> Drafts:
    return Drafts(jnp.asarray(tokens, jnp.int32), None, jnp.asarray(count, jnp.int32))


def test_greedy_drafts_stand_up_to_the_first_wrong_one():
    best = [[1, 2, 3, 4]] * 7
    drafts = [[1, 2, 3], [0, 2, 3], [1, 0, 3], [1, 2, 0], [1, 2, 3], [1, 2, 3], [1, 2, 2]]
    count = [3, 3, 3, 3, 2, 0, 3]
    zero = jnp.zeros((7,), jnp.int32)
    verdict = accepted(scored(best), drafted(drafts, count), zero, zero, params())
    assert verdict.count.tolist() == [4, 1, 2, 3, 3, 1, 3]
    for row, kept in zip(verdict.tokens.tolist(), verdict.count.tolist(), strict=True):
        assert row[:kept] == [1, 2, 3, 4][:kept]
    expected = -1 - np.log(np.exp(-1) + (VOCAB - 1) * np.exp(-3))
    np.testing.assert_allclose(verdict.logprobs[0], [expected] * 4, rtol=1e-6)
    assert verdict.finite.all()


def test_B16_no_padding_row_of_the_head_is_kept_or_drawn():
    # Ids 4 and 5 are padding with the largest logits; a draft of 5 is the best of the whole head.
    logits = jnp.broadcast_to(jnp.asarray([0.0, 3.0, 1.0, 2.0, 8.0, 9.0]), (500, 2, VOCAB))
    index = jnp.arange(500, dtype=jnp.int32)
    drafts = Drafts(jnp.full((500, 1), 5, jnp.int32), None, jnp.ones_like(index))
    for options in ({}, {"temperature": 1.0}):
        verdict = accepted(logits, drafts, index, index, params(vocab_size=4, **options))
        assert verdict.count.tolist() == [1] * 500
        assert int(verdict.tokens.max()) == (1 if not options else 3)
    token, q = draw_drafts(logits[:, 0], index, index, params(vocab_size=4, temperature=9.0))
    assert int(token.max()) < 4 and not np.asarray(q[:, 4:]).any()


def test_logits_that_are_not_finite_count_only_where_they_decided():
    logits = scored([[1, 2, 3]] * 3)
    logits = logits.at[0, 2].set(jnp.nan).at[1, 1, 0].set(jnp.inf).at[2, 1].set(jnp.nan)
    zero = jnp.zeros((3,), jnp.int32)
    verdict = accepted(logits, drafted([[0, 2], [1, 0], [1, 2]], [2, 2, 2]), zero, zero, params())
    assert verdict.count.tolist() == [1, 3, 2]
    assert verdict.finite.tolist() == [[True, True, False], [True, False, True], [True, False, True]]


def test_rows_without_drafts_draw_what_plain_decoding_draws():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(500, 3, VOCAB)), jnp.float32)
    prompt = jnp.arange(500, dtype=jnp.int32)
    none, _ = NoDrafts().draft(None, (), prompt, prompt, prompt, params(), 0)
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
        given = params(seed=3, **options)
        keys = token_keys(given.seed, prompt, prompt + 1, Purpose.SAMPLE)
        token, logprob, _ = jax.jit(sample)(logits[:, 0], keys, given)
        for window, drafts in ((1, none), (3, drafted([[1, 2]] * 500, [0] * 500))):
            verdict = accepted(logits[:, :window], drafts, prompt, prompt, given)
            assert verdict.count.tolist() == [1] * 500
            np.testing.assert_array_equal(verdict.tokens[:, 0], token)
            # Two programs round a log-softmax of logits up to 4 differently.
            np.testing.assert_allclose(verdict.logprobs[:, 0], logprob, atol=4 * 2**-21)


def test_B21_a_window_ends_at_a_stop_id_and_at_the_budget():
    tokens = jnp.asarray([[1, 9, 3, 9]] * 5, jnp.int32)
    count = cut_short(
        tokens,
        jnp.asarray([4, 1, 4, 4, 0], jnp.int32),
        jnp.asarray([9, 9, 1, 2, 9], jnp.int32),
        params(vocab_size=97, stop_ids=(9,)),
    )
    assert count.tolist() == [2, 1, 1, 2, 0]


# The distribution of whole texts: a target and a drafter that know the last token only.

TARGET, DRAFTER = (np.random.default_rng(i).normal(size=(VOCAB, VOCAB)).astype(np.float32) for i in (1, 2))


@functools.partial(jax.jit, static_argnames=("drafts", "deterministic"))
def three_tokens(given, drafts: int, deterministic: bool):
    """The first three tokens of 24,000 texts, by three windows, each of which yields at least one."""
    prompt = jnp.arange(ROWS, dtype=jnp.int32)

    def window(_, carry):
        text, position = carry
        tokens, proposals = [jnp.take_along_axis(text, position[:, None], axis=1)[:, 0]], []
        for i in range(drafts):
            logits = jnp.asarray(DRAFTER)[tokens[-1]]
            draft, q = draw_drafts(logits, prompt, position + 1 + i, given)
            if deterministic:
                draft = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            tokens.append(draft)
            proposals.append(q)
        proposed = Drafts(
            tokens=jnp.stack(tokens[1:], axis=1),
            probabilities=None if deterministic else jnp.stack(proposals, axis=1),
            # Rows with fewer drafts than the window has room for are among them.
            count=jnp.where(prompt % 3 == 0, drafts - 1, drafts),
        )
        logits = jnp.asarray(TARGET)[jnp.stack(tokens, axis=1)]
        verdict = accept(logits, proposed, prompt, position, given)
        column = position[:, None] + 1 + jnp.arange(1 + drafts, dtype=jnp.int32)[None, :]
        text = text.at[prompt[:, None], column].set(verdict.tokens, mode="drop")
        return text, position + verdict.count

    text = jnp.zeros((ROWS, 4 + 3 * drafts), jnp.int32)
    text, _ = jax.lax.fori_loop(0, 3, window, (text, jnp.zeros_like(prompt)))
    return text[:, 1:4]


def deviation(options: dict, drafts: int, deterministic: bool) -> tuple[float, int]:
    """Chi-square of the three-token texts against the target's own distribution; degrees of freedom."""
    given = params(seed=11, **options)
    counts = np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(np.asarray(three_tokens(given, drafts, deterministic)).T), 1)
    p = np.asarray(filtered_probabilities(jnp.asarray(TARGET), given), np.float64)
    expected = ROWS * p[0][:, None, None] * p[:, :, None] * p[None]
    assert not counts[expected == 0].any()
    # The rule of thumb for chi-square: cells that expect fewer than five texts are counted as one.
    rare = expected < 5
    cells = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    seen, wanted = (values[cells[1] > 0] for values in cells)
    return float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.3},
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("drafts", [1, 3])
def test_sampled_texts_have_the_targets_distribution(drafts, deterministic):
    for options in FILTERS:
        statistic, freedom = deviation(options, drafts, deterministic)
        assert statistic < chi2.isf(1e-4, freedom)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_test_fails_for_a_wrong_rule(deterministic, monkeypatch):
    by_chance = speculative._by_chance
    monkeypatch.setattr(speculative, "residual", lambda p, q: p)
    # A new function, of which JAX remembers no trace.
    monkeypatch.setattr(speculative, "_by_chance", lambda *arguments: by_chance(*arguments))
    three_tokens.clear_cache()
    try:
        statistic, freedom = deviation(FILTERS[0], 1, deterministic)
    finally:
        three_tokens.clear_cache()
    assert statistic > chi2.isf(1e-12, freedom)
