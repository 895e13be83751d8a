"""Prompts that enter by groups: what they yield, against prompts that enter alone and against known texts."""

import functools
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from models.config import MTPConfig
from models.qwen3_5 import Qwen35
from replayssm_jax import backend, buckets, memory, scheduler
from replayssm_jax.api import Loaded
from replayssm_jax.buckets import covering_lengths, prefill_chunks, prefill_groups, rows_together
from replayssm_jax.cache import materialize
from replayssm_jax.config import ReplayConfig
from replayssm_jax.drafters import Speculative
from replayssm_jax.flush import spread_flush_at
from replayssm_jax.generate import Generation, generate, warmup
from replayssm_jax.sampling import Sampling
from tests.replayssm_jax.chain_model import chain, loaded_chain
from tests.replayssm_jax.states import assert_same_state
from tests.tiny_models import VOCAB, assert_close, heat, hot_model, qwen_config, random_tokens, randomize

CHAIN = loaded_chain()
ROWS = 8
ONE = Sampling(max_new_tokens=1)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [random_tokens(length, seed=seed + i).tolist() for i, length in enumerate(lengths)]


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """Groups as on a GPU, of half the batch, with chunks of 32 tokens; (rows, bucket) of every call."""
    shapes = []
    prefill_chunk = scheduler.prefill_chunk

    def recorded(model, drafter, tokens, *rest):
        shapes.append(tokens.shape)
        return prefill_chunk(model, drafter, tokens, *rest)

    monkeypatch.setattr(scheduler, "prefill_chunk", recorded)
    monkeypatch.setattr(backend, "prefill_tokens", lambda: 64)
    monkeypatch.setattr(buckets, "GROUP_SHARE", 2)
    monkeypatch.setattr(buckets, "PREFILL_CHUNK", 32)
    return shapes


@pytest.fixture
def one_by_one(monkeypatch):
    """Runs something with prompts that enter alone."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "prefill_tokens", lambda: 1)
            return function()

    return run


def hot_loaded(model) -> Loaded:
    return Loaded(
        model=model, config=model.config, tokenizer=None, stop_ids=(), vocab_size=VOCAB, path=Path()
    )


def position(out: Generation) -> list[int]:
    return (np.asarray(out.cache.start) + np.asarray(out.cache.length)).tolist()


# Which prompts enter together.


def test_a_call_has_as_many_rows_as_tokens_and_the_batch_allow():
    sizes = buckets.prefill_buckets(2048)
    assert [rows_together(size, 256, 512) for size in sizes] == [32, 16, 8, 4, 2, 1]
    assert [rows_together(size, 64, 512) for size in sizes] == [8, 8, 8, 4, 2, 1]
    assert [rows_together(size, 15, 512) for size in sizes] == [1] * 6
    assert [rows_together(size, 256, 1) for size in sizes] == [1] * 6
    assert backend.prefill_tokens() == (1 if jax.default_backend() == "cpu" else 512)


@pytest.mark.parametrize("batch", [1, 24, 256])
def test_a_prompt_passes_through_the_same_program_in_any_company(batch):
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 1200, rng.integers(1, batch + 1)).tolist()
        groups = prefill_groups(lengths, 2048, batch, 512)
        assert sorted(i for _, members in groups for i in members) == list(range(len(lengths)))
        for rows, members in groups:
            (bucket,) = {prefill_chunks(lengths[i], 2048)[-1][0] for i in members}
            assert rows == rows_together(bucket, batch, 512) >= len(members)
        # None but a bucket's last group has rows to spare.
        full = [rows == len(members) for rows, members in groups]
        assert full.count(False) <= len(buckets.prefill_buckets(2048))


# What they yield.


def test_every_prompt_gets_its_own_text(calls):
    prompts = random_prompts(1, 16, 17, 3, 32, 33, 64, 65, 2, 110, 5, 48, 16, 7, 30, 8, 9, 10, 11)
    out = generate(CHAIN, prompts, Sampling(max_new_tokens=6), max_rows=ROWS)
    assert out.tokens == [chain(prompt, 6) for prompt in prompts]
    # Whole chunks before the last have a row of their own.
    whole = sum(len(prefill_chunks(len(prompt), 256)) - 1 for prompt in prompts)
    assert (calls.count((1, 32)), set(calls)) == (whole, {(1, 32), (2, 32), (4, 16)})
    assert len(calls) - whole < len(prompts) / 2


def test_finished_rows_wait_for_a_group_of_prompts(calls):
    texts = [chain(prompt, 40) for prompt in random_prompts(*[4] * 24)]
    out = generate(CHAIN, random_prompts(*[4] * 24), Sampling(max_new_tokens=40), max_rows=ROWS)
    assert out.tokens == texts
    assert calls == [(4, 16)] * 6
    del calls[:]
    # Rows that stop one by one: of 16 steps, none waits longer.
    stop = texts[0][2]
    loaded = loaded_chain(stop_ids=[stop])
    out = generate(loaded, random_prompts(*[4] * 24), Sampling(max_new_tokens=40), max_rows=ROWS)
    assert out.tokens == [text[: text.index(stop) + 1] if stop in text else text for text in texts]
    assert set(calls) == {(4, 16)}


def test_a_prompt_draws_the_same_tokens_alone_and_in_a_group(calls, one_by_one):
    prompts = random_prompts(3, 20, 1, 18, 5, 6, 7, 30, 2, 4)
    sampling = Sampling(max_new_tokens=9, temperature=1.5, top_p=0.95, seed=9)
    run = functools.partial(generate, CHAIN, prompts, sampling, max_rows=ROWS)
    grouped, alone = run(), one_by_one(run)
    assert (grouped.tokens, grouped.logprobs) == (alone.tokens, alone.logprobs)
    run = functools.partial(generate, CHAIN, prompts[:ROWS], sampling, spread_flushes=True)
    grouped, alone = run(), one_by_one(run)
    for name in ("seed", "start", "length", "flush_at"):
        np.testing.assert_array_equal(getattr(grouped.cache, name), getattr(alone.cache, name))
    first = np.asarray(generate(CHAIN, prompts[:ROWS], ONE, spread_flushes=True).cache.flush_at)
    np.testing.assert_array_equal(first, spread_flush_at(np.arange(ROWS), 16))


# One token, a whole bucket, one token more than a chunk; three groups of three rows, the last not full.
LENGTHS = (16, 1, 33, 5, 3, 2, 4)
CALLS = [(1, 32), (3, 16), (3, 16), (3, 16)]


def test_states_are_those_of_the_whole_text_whatever_the_company(calls):
    model = hot_model("mamba2", layers=2)
    loaded, prompts = hot_loaded(model), random_prompts(*LENGTHS)
    run = functools.partial(generate, loaded, sampling=ONE, max_length=64)
    out = run(prompts)
    assert calls == CALLS
    texts = np.zeros((len(prompts), 64), np.int32)
    for row, prompt in zip(texts, prompts, strict=True):
        row[: len(prompt)] = prompt
    assert_same_state(model, out.cache, texts)
    # The first prompt keeps its place, and its bits.
    others = random_prompts(*LENGTHS, seed=50)
    for company in ([prompts[0], *others[1:]], [prompts[0], *random_prompts(7, 16, 2, 40, 33, 1)]):
        again = run(company)
        assert (again.tokens[0], again.logprobs[0]) == (out.tokens[0], out.logprobs[0])
        for state, expected in zip(materialize(again.cache), materialize(out.cache), strict=True):
            np.testing.assert_array_equal(state[0], expected[0])


def test_rows_go_on_by_groups(calls, monkeypatch):
    left, admit = [], scheduler.Scheduler._admit

    def admitted(self, *group):
        drawn = admit(self, *group)
        left.append(len(self._parts))
        return drawn

    monkeypatch.setattr(scheduler.Scheduler, "_admit", admitted)
    prompts = random_prompts(*LENGTHS)
    out = generate(CHAIN, prompts, Sampling(max_new_tokens=6))
    texts = [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    more = [[], *random_prompts(18, 2, 1, 3, 40, 6, seed=5)]
    del calls[:]
    again = generate(CHAIN, more, Sampling(max_new_tokens=7), continue_from=out)
    texts = [text + extra for text, extra in zip(texts, more, strict=True)]
    assert again.tokens == [chain(text, 7) for text in texts]
    assert position(again) == [len(text) + 6 for text in texts]
    assert calls == [(3, 16), (1, 32), (3, 16), (2, 32)]
    # Their groups are picked from the cache, and none is kept beside the next.
    assert left[-3:] == [0, 0, 0]


def test_the_own_head_enters_too(calls, one_by_one):
    config = qwen_config(layer_types=("linear_attention",), mtp=MTPConfig(layers=("full_attention",)))
    model = heat(randomize(lambda: Qwen35(config, rngs=nnx.Rngs(7))))
    prompts = random_prompts(*LENGTHS)
    run = functools.partial(
        generate, hot_loaded(model), prompts, ONE, speculative=Speculative("mtp", 2), max_length=64
    )
    grouped, alone = run(), one_by_one(run)
    assert (calls[:4], set(calls[4:])) == (CALLS, {(1, 16), (1, 32)})
    assert grouped.tokens == alone.tokens
    for state, expected in zip(materialize(grouped.cache), materialize(alone.cache), strict=True):
        assert_close(state, expected)
    for leaf, expected in zip(
        *map(jax.tree.leaves, (grouped.drafter_state, alone.drafter_state)), strict=True
    ):
        assert np.abs(expected).max() > 0
        assert_close(leaf, expected)


def test_a_drafter_by_lookup_sees_the_whole_prompt(calls):
    prompts = random_prompts(*LENGTHS)
    out = generate(CHAIN, prompts, ONE, speculative=Speculative("ngram", 3))
    for row, prompt in zip(np.asarray(out.drafter_state), prompts, strict=True):
        np.testing.assert_array_equal(row, prompt + [0] * (len(row) - len(prompt)))


# What surrounds them.


def test_logits_that_are_not_finite_name_the_prompt_of_a_group(calls):
    bad = 11
    prompts = [[token if token != bad else 12 for token in prompt] for prompt in random_prompts(*[4] * 8)]
    prompts[5][-1] = bad
    with pytest.raises(FloatingPointError, match=r"prompt 5 \(row 5\) are NaN or infinite after 4 tokens"):
        generate(loaded_chain(bad_token=bad), prompts, ONE)


def test_B24_nothing_compiles_after_warmup(calls, caplog):
    caplog.set_level(logging.INFO, "replayssm_jax.compilations")
    loaded = loaded_chain(vocab=103)
    count = warmup(loaded, rows=ROWS, longest_prompt=42, max_length=128).compilations
    names = [record.args[0] for record in caplog.records if record.name == "replayssm_jax.compilations"]
    assert len(names) == count
    assert names.count("jit(prefill_chunk)") == 3
    for lengths in ((1, 2), (16, 17, 31, 32), (33, 42, 40, 16, 7, 9, 3)):
        prompts = random_prompts(*lengths, *[1] * ROWS)
        out = generate(loaded, prompts, Sampling(max_new_tokens=9), max_rows=ROWS, max_length=128)
        assert out.stats.compilations == 0
        assert out.tokens == [chain(prompt, 9, 103) for prompt in prompts]


@pytest.mark.parametrize(
    ("longest", "max_length"), [(1, 16), (40, 144), (144, 144), (600, 1024), (5000, 8192)]
)
@pytest.mark.parametrize("batch", [1, 256])
def test_warmup_needs_few_prompts_for_all_programs(longest, max_length, batch):
    def programs(lengths):
        """Shapes of the calls, and of the joins of a row with a group."""
        made = set()
        for length in lengths:
            *whole, (bucket, _) = prefill_chunks(length, max_length)
            rows = rows_together(bucket, batch, 512)
            made |= {("call", rows, bucket)} | {("call", 1, size) for size, _ in whole}
            made |= {("join", rows)} if whole and rows > 1 else set()
        return made

    covering = covering_lengths(longest, max_length, batch, 512)
    assert max(covering) <= longest
    assert programs(covering) == programs(range(1, longest + 1))


def test_memory_counts_the_group(calls, monkeypatch):
    each = memory.row_bytes(CHAIN.model, 256, ReplayConfig())
    # Half as many rows on their way in, and one for whole chunks: 8 + 4 + 1.
    monkeypatch.setattr(memory, "free_bytes", lambda model: 13 * each)
    assert generate(CHAIN, [[1]] * 8, ONE).stats.rows == 8
    with pytest.raises(ValueError, match="9 rows of 256 positions need .* 8 rows would fit"):
        generate(CHAIN, [[1]] * 9, ONE, max_rows=9)
    monkeypatch.setattr(memory, "free_bytes", lambda model: 12 * each)
    with pytest.raises(ValueError, match="8 rows of 256 positions need .* 7 rows would fit"):
        generate(CHAIN, [[1]] * 8, ONE)
