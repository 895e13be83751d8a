"""Acceptance: which drafts stand, and the distribution of what a window yields."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import chi2

import replayssm_jax as rs
from replayssm_jax import speculative
from replayssm_jax.cache import init_cache
from replayssm_jax.decode import FlatModel, Rows, decode
from replayssm_jax.drafters import ModelDrafter
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


def judged(logits, tokens, count, given):
    """`accept` for rows of windows of four tokens, by the one program that serves up to 500 rows."""
    rows = len(tokens)

    def padded(values, *shape, dtype):
        array = np.zeros((500, *shape), dtype)
        array[:rows] = values
        return jnp.asarray(array)

    index = jnp.arange(500, dtype=jnp.int32)
    logits = padded(logits, 4, VOCAB, dtype=np.float32)
    drafts = Drafts(padded(tokens, 3, dtype=np.int32), None, padded(count, dtype=np.int32))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], accepted(logits, drafts, index, index, given))


def scored(best: list[list[int]]) -> np.ndarray:
    """Logits [B, T, V] whose largest entries are at `best`."""
    return np.where(np.asarray(best)[..., None] == np.arange(VOCAB), -1.0, -3.0)


def test_greedy_drafts_stand_up_to_the_first_wrong_one():
    best = [[1, 2, 3, 4]] * 7
    drafts = [[1, 2, 3], [0, 2, 3], [1, 0, 3], [1, 2, 0], [1, 2, 3], [1, 2, 3], [1, 2, 2]]
    verdict = judged(scored(best), drafts, [3, 3, 3, 3, 2, 0, 3], params())
    assert verdict.count.tolist() == [4, 1, 2, 3, 3, 1, 3]
    for row, kept in zip(verdict.tokens.tolist(), verdict.count.tolist(), strict=True):
        assert row[:kept] == [1, 2, 3, 4][:kept]
    expected = -1 - np.log(np.exp(-1) + (VOCAB - 1) * np.exp(-3))
    np.testing.assert_allclose(verdict.logprobs[0], [expected] * 4, rtol=1e-6)
    assert verdict.finite.all()


def test_B16_no_padding_row_of_the_head_is_kept_or_drawn():
    # Ids 4 and 5 are padding with the largest logits; a draft of 5 is the best of the whole head.
    logits = np.broadcast_to(np.float32([0.0, 3.0, 1.0, 2.0, 8.0, 9.0]), (500, 4, VOCAB))
    for options in ({}, {"temperature": 1.0}):
        verdict = judged(logits, [[5, 5, 5]] * 500, [3] * 500, params(vocab_size=4, **options))
        assert verdict.count.tolist() == [1] * 500
        assert verdict.tokens.max() == (1 if not options else 3)
    index = jnp.arange(500, dtype=jnp.int32)
    given = params(vocab_size=4, temperature=9.0)
    token, q = jax.jit(draw_drafts)(jnp.asarray(logits[:, 0]), index, index, given)
    assert int(token.max()) < 4 and not np.asarray(q[:, 4:]).any()


def test_logits_that_are_not_finite_count_only_where_they_decided():
    logits = scored([[1, 2, 3, 4]] * 3)
    logits[0, 2], logits[1, 1, 0], logits[2, 1] = np.nan, np.inf, np.nan
    verdict = judged(logits, [[0, 2, 3], [1, 0, 0], [1, 2, 3]], [3, 3, 3], params())
    assert verdict.count.tolist() == [1, 3, 2]
    assert verdict.finite[:, :3].tolist() == [[True, True, False], [True, False, True], [True, False, True]]


def test_drafts_end_before_the_first_that_is_no_token():
    tokens = [[1, 2, 3], [1, -1, 3], [6, 2, 3], [1, 2, 10**9], [1, 2, 3], [1, 2, 3], [-(2**31), 2, 3]]
    count = jnp.asarray([3, 3, 3, 3, 7, -2, 1], jnp.int32)
    drafts = speculative.usable(Drafts(jnp.asarray(tokens, jnp.int32), None, count), jnp.int32(VOCAB))
    assert drafts.count.tolist() == [3, 1, 0, 2, 3, 0, 0]
    assert drafts.tokens.min() >= 0 and drafts.tokens.max() < VOCAB


def test_drafts_of_probability_nan_are_refused_and_the_token_is_the_targets():
    logits = np.broadcast_to(np.float32([0.0, 1.0, -1.0, 2.0, -np.inf, 0.5]), (ROWS, 2, VOCAB))
    index = jnp.arange(ROWS, dtype=jnp.int32)
    tokens, q = jnp.full((ROWS, 1), 3, jnp.int32), jnp.full((ROWS, 1, VOCAB), jnp.nan)
    given = params(seed=5, temperature=1.0)
    verdict = accepted(jnp.asarray(logits), Drafts(tokens, q, jnp.ones_like(index)), index, index, given)
    assert (np.asarray(verdict.count) == 1).all() and np.isfinite(verdict.logprobs[:, 0]).all()
    p = np.asarray(filtered_probabilities(jnp.asarray(logits[0, 0]), given), np.float64)
    seen = np.bincount(np.asarray(verdict.tokens)[:, 0], minlength=VOCAB)
    assert seen[4] == 0
    statistic = ((seen - ROWS * p) ** 2)[p > 0] / (ROWS * p)[p > 0]
    assert statistic.sum() < chi2.isf(1e-4, VOCAB - 2)


def test_rows_without_drafts_draw_what_plain_decoding_draws():
    logits = np.random.default_rng(0).normal(size=(500, 4, VOCAB)).astype(np.float32)
    prompt = jnp.arange(500, dtype=jnp.int32)
    none, _ = NoDrafts().draft(None, (), prompt, prompt, prompt, params(), 0)
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
        given = params(seed=3, **options)
        keys = token_keys(given.seed, prompt, prompt + 1, Purpose.SAMPLE)
        token, logprob, _ = jax.jit(sample)(jnp.asarray(logits[:, 0]), keys, given)
        plain = accepted(jnp.asarray(logits[:, :1]), none, prompt, prompt, given)
        for verdict in (plain, judged(logits, [[1, 2, 3]] * 500, [0] * 500, given)):
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


class TableModel(nnx.Module):
    """Logits that depend on the last token only."""

    def __init__(self, table):
        self.table = nnx.Param(jnp.asarray(table))

    def __call__(self, tokens, segment, layers):
        return tokens[..., None].astype(jnp.float32), layers

    def logits(self, hidden):
        return self.table[...][hidden[..., 0].astype(jnp.int32)]

    def init_cache(self, batch, max_length, replay):
        return init_cache((), (), batch, max_length, replay=replay, dtype=jnp.float32)


def three_tokens_of_the_loop(given):
    """The same by the decoding loop with a model as its drafter, from texts of five tokens."""
    replay = rs.ReplayConfig(buffer_length=4, window=4)
    model, drafter = TableModel(TARGET), ModelDrafter(TableModel(DRAFTER))
    prompt, yes = jnp.arange(ROWS, dtype=jnp.int32), jnp.ones((ROWS,), bool)
    rows = Rows(jnp.zeros_like(prompt), yes, jnp.full_like(prompt, 5), prompt, jnp.copy(yes))
    cache, state = model.init_cache(ROWS, 8, replay), drafter.init(model, ROWS, 8, replay)
    flat = FlatModel.of(model), FlatModel.of(drafter)
    one = np.int32(1)
    rows, cache, _, block = decode(*flat, rows, cache, state, np.ones(ROWS, bool), 16 * one, one, given, 3)
    assert (np.asarray(block.count) == 5).all() and (np.asarray(cache.position) == 5).all()
    assert 0.1 < int(block.tally.accepted) / int(block.tally.drafted) < 0.9
    return block.tokens[:, :3]


def deviation(texts, given) -> tuple[float, int]:
    """Chi-square of texts of three tokens against the target's own distribution; degrees of freedom."""
    counts = np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(np.asarray(texts).T), 1)
    p = np.asarray(filtered_probabilities(jnp.asarray(TARGET), given), np.float64)
    expected = ROWS * p[0][:, None, None] * p[:, :, None] * p[None]
    assert not counts[expected == 0].any()
    # The rule of thumb for chi-square: cells that expect fewer than five texts are counted as one.
    rare = expected < 5
    seen, wanted = (np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1


FILTERS = [
    params(seed=11, temperature=1.0),
    params(seed=12, temperature=0.8, top_k=4, top_p=0.9),
    params(seed=13, temperature=1.5, min_p=0.3),
]


@pytest.mark.parametrize(
    "texts_of",
    [
        functools.partial(three_tokens, drafts=3, deterministic=False),
        functools.partial(three_tokens, drafts=3, deterministic=True),
        three_tokens_of_the_loop,
    ],
    ids=["drawn", "deterministic", "loop"],
)
def test_sampled_texts_have_the_targets_distribution(texts_of):
    for given in FILTERS:
        statistic, freedom = deviation(texts_of(given), given)
        assert statistic < chi2.isf(1e-4, freedom)


def test_the_same_test_fails_for_a_wrong_rule(monkeypatch):
    by_chance = speculative._by_chance
    monkeypatch.setattr(speculative, "residual", lambda p, q: p)
    # A new function, of which JAX remembers no trace.
    monkeypatch.setattr(speculative, "_by_chance", lambda *arguments: by_chance(*arguments))
    three_tokens.clear_cache()
    try:
        statistic, freedom = deviation(three_tokens(FILTERS[0], 1, False), FILTERS[0])
    finally:
        three_tokens.clear_cache()
    assert statistic > chi2.isf(1e-12, freedom)
