"""Generation around a model whose text is known, and on tiny models with hot weights."""

import functools
import logging
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax import decode, memory, scheduler
from replayssm_jax.api import Loaded
from replayssm_jax.buckets import prefill_buckets, prefill_chunks
from replayssm_jax.cache import Cache, RecurrentLayer, materialize
from replayssm_jax.config import EagerConfig, ReplayConfig
from replayssm_jax.flush import spread_flush_at
from replayssm_jax.generate import Generation, generate, stream, warmup
from replayssm_jax.sampling import Sampling, sampling_params
from replayssm_jax.scheduler import spreading_is_free
from replayssm_jax.speculative import NoDrafts
from tests.replayssm_jax.chain_model import byte_tokenizer, chain, loaded_chain, successor
from tests.tiny_models import VOCAB, assert_close, full_logits, hot_model, nemotron_config, random_tokens

MODES = (ReplayConfig(), None)
CHAIN = loaded_chain()


def position(out: Generation) -> list[int]:
    return (np.asarray(out.cache.start) + np.asarray(out.cache.length)).tolist()


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of ids below 97, the vocabulary of the tiny models."""
    return [random_tokens(length, seed=seed + i).tolist() for i, length in enumerate(lengths)]


# Queue, rows and stops.


@pytest.mark.parametrize("replay", MODES)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_every_prompt_gets_its_own_text(replay, rows):
    prompts = random_prompts(3, 20, 1, 40, 7)
    out = generate(CHAIN, prompts, Sampling(max_new_tokens=19), replay=replay, max_rows=rows)
    assert out.tokens == [chain(prompt, 19) for prompt in prompts]
    assert out.finish_reasons == ["length"] * 5
    assert (out.stats.rows, out.stats.tokens, out.stats.prompt_tokens) == (rows, 95, 71)
    assert (out.text, out.cache) == (None, None)
    out = generate(CHAIN, prompts[:rows], Sampling(max_new_tokens=19), replay=replay)
    assert out.tokens == [chain(prompt, 19) for prompt in prompts[:rows]]
    assert position(out) == [len(prompt) + 18 for prompt in prompts[:rows]]


@pytest.mark.parametrize("replay", MODES)
def test_B21_a_stop_id_ends_a_row_wherever_it_falls_in_a_dispatch(replay):
    prompts = random_prompts(3, 5, 8)
    texts = [chain(prompt, 40) for prompt in prompts]
    stop = texts[0][2]
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in texts]
    loaded = loaded_chain(stop_ids=[stop])
    sampling = Sampling(max_new_tokens=40)
    assert generate(loaded, prompts, sampling, replay=replay, max_rows=2).tokens == expected
    out = generate(loaded, prompts, sampling, replay=replay)
    assert out.tokens == expected
    assert out.finish_reasons == ["stop" if text[-1] == stop else "length" for text in expected]
    assert set(out.finish_reasons) == {"stop", "length"}
    assert [len(row) for row in out.logprobs] == [len(row) for row in out.tokens]
    assert position(out) == [len(p) + len(t) - 1 for p, t in zip(prompts, expected, strict=True)]
    again = generate(loaded, None, Sampling(max_new_tokens=5, stop_ids=()), continue_from=out)
    assert again.tokens == [chain(p + t, 5) for p, t in zip(prompts, expected, strict=True)]
    ignored = generate(loaded, prompts, Sampling(max_new_tokens=40, stop_ids=()), replay=replay)
    assert ignored.tokens == texts
    assert generate(loaded, prompts, Sampling(max_new_tokens=2), replay=replay).tokens == [
        t[:2] for t in texts
    ]


def test_B21_a_first_token_may_be_the_last():
    prompt = [4, 5, 6]
    loaded = loaded_chain(stop_ids=chain(prompt, 1))
    out = generate(loaded, [prompt] * 3, max_rows=1)
    assert out.tokens == [chain(prompt, 1)] * 3
    assert out.stats.steps == 0
    assert generate(CHAIN, [prompt], Sampling(max_new_tokens=1)).tokens == [chain(prompt, 1)]


def test_B21_the_last_position_is_used_and_none_beyond():
    prompt = random_prompts(300)[0]
    for new in (17, 18):
        out = generate(CHAIN, [prompt], Sampling(max_new_tokens=new), max_length=317)
        assert out.tokens == [chain(prompt, new)]
    assert position(out) == [317]
    with pytest.raises(
        ValueError, match=r"prompt 0 needs 318 positions .*300 tokens.*19 new.*max_length is 317"
    ):
        generate(CHAIN, [prompt], Sampling(max_new_tokens=19), max_length=317)


def test_more_stop_ids_than_usual():
    prompt = [1, 2]
    text = chain(prompt, 30)
    others = [token for token in range(97) if token not in text[:6]]
    out = generate(CHAIN, [prompt], Sampling(max_new_tokens=30, stop_ids=others))
    assert out.tokens[0] == text[: next(i for i, token in enumerate(text) if token in others) + 1]


# Random numbers.


def test_a_prompt_draws_the_same_tokens_in_any_company():
    prompts = random_prompts(3, 20, 1)
    sampling = Sampling(max_new_tokens=21, temperature=1.5, top_p=0.95, seed=9)
    together = generate(CHAIN, prompts, sampling)
    assert together.tokens != [chain(prompt, 21) for prompt in prompts]
    for max_rows in (1, 2):
        out = generate(CHAIN, prompts, sampling, max_rows=max_rows, replay=None)
        assert (out.tokens, out.logprobs) == (together.tokens, together.logprobs)
    assert generate(CHAIN, prompts[:2], sampling).tokens == together.tokens[:2]
    other = Sampling(max_new_tokens=21, temperature=1.5, top_p=0.95, seed=10)
    assert generate(CHAIN, prompts, other).tokens != together.tokens
    same = generate(CHAIN, [prompts[0]] * 2, sampling).tokens
    assert same[0] != same[1]


@pytest.mark.parametrize("replay", MODES)
def test_a_continued_sample_is_the_one_long_sample(replay):
    prompts = random_prompts(3, 20)
    options = {"temperature": 1.0, "top_k": 20, "seed": 5}
    whole = generate(CHAIN, prompts, Sampling(max_new_tokens=25, **options), replay=replay)
    first = generate(CHAIN, prompts, Sampling(max_new_tokens=11, **options), replay=replay)
    rest = generate(CHAIN, None, Sampling(max_new_tokens=14, **options), continue_from=first)
    assert [a + b for a, b in zip(first.tokens, rest.tokens, strict=True)] == whole.tokens
    assert position(rest) == position(whole)


def test_row_seeds_come_from_the_prompt_index():
    prompts = random_prompts(3, 4)
    seeds = [np.asarray(generate(CHAIN, prompts, Sampling(2, seed=seed)).cache.seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(seeds[0], seeds[1])
    assert len({*seeds[0].tolist(), *seeds[2].tolist()}) == 4


# Continuation.


@pytest.mark.parametrize("replay", MODES)
def test_rows_go_on_with_different_further_prompts(replay):
    prompts = random_prompts(3, 20, 1)
    out = generate(CHAIN, prompts, Sampling(max_new_tokens=6), replay=replay)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    more = [[], *random_prompts(18, 2, seed=5)]
    again = generate(CHAIN, more, Sampling(max_new_tokens=7), continue_from=out)
    texts = [text + extra for text, extra in zip(texts, more, strict=True)]
    assert again.tokens == [chain(text, 7) for text in texts]
    assert position(again) == [len(text) + 6 for text in texts]
    with pytest.raises(ValueError, match="cache of continue_from was donated"):
        generate(CHAIN, None, continue_from=out)


def test_what_cannot_be_continued_is_refused():
    prompts = random_prompts(3, 4)
    out = generate(CHAIN, prompts, Sampling(max_new_tokens=4))
    one_new = Sampling(max_new_tokens=1)
    with pytest.raises(ValueError, match="prompt 1 needs 257 positions .*max_length is 256"):
        generate(CHAIN, None, Sampling(max_new_tokens=250), continue_from=out)
    with pytest.raises(ValueError, match="continue_from has 2 rows, but there are 1 prompts"):
        generate(CHAIN, [[1]], one_new, continue_from=out)
    with pytest.raises(ValueError, match="continue_from has 2 rows, but max_rows=1"):
        generate(CHAIN, None, one_new, continue_from=out, max_rows=1)
    with pytest.raises(ValueError, match="continue_from has replay=ReplayConfig.*but replay=None"):
        generate(CHAIN, None, one_new, continue_from=out, replay=None)
    with pytest.raises(ValueError, match="continue_from has max_length=256, but max_length=64"):
        generate(CHAIN, None, one_new, continue_from=out, max_length=64)
    assert generate(CHAIN, None, one_new, continue_from=out, max_length=256).stats.tokens == 2
    queued = generate(CHAIN, prompts, one_new, max_rows=1)
    with pytest.raises(ValueError, match="continue_from has no cache, since it had more prompts than rows"):
        generate(CHAIN, None, continue_from=queued)


# Flushes.


@pytest.mark.parametrize("new", [1, 2, 17, 18, 33, 34, 60])
def test_flushes_are_counted(new):
    out = generate(CHAIN, [[1, 2, 3]], Sampling(max_new_tokens=new))
    assert out.stats.flushes == max(new - 2, 0) // 16
    assert out.stats.steps == new - 1
    assert generate(CHAIN, [[1, 2, 3]], Sampling(max_new_tokens=new), replay=None).stats.flushes == 0


def test_spread_flushes_follow_the_prompt_and_not_its_row():
    prompts = random_prompts(3, 3, 3)
    lengths = []
    for batch in (prompts, prompts[:2]):
        out = generate(CHAIN, batch, Sampling(max_new_tokens=18), spread_flushes=True)
        assert out.tokens == [chain(prompt, 18) for prompt in batch]
        lengths.append(np.asarray(out.cache.length).tolist())
    assert lengths[0][:2] == lengths[1]
    assert lengths[0] == [17 % 16, *(17 - spread_flush_at([1, 2], 16))]


@pytest.mark.parametrize("buffer_length", [1, 4, 7, 16, 32])
@pytest.mark.parametrize("tokens", [1, 4])
def test_first_windows_are_even(buffer_length, tokens):
    if tokens > buffer_length:
        return
    windows = spread_flush_at(np.arange(20, 20 + 256), buffer_length, tokens)
    counts = np.bincount(windows, minlength=buffer_length + 1)
    assert counts[:tokens].sum() == 0
    # Multiples of the golden ratio leave no more than three different gaps: counts differ by a few.
    assert np.abs(counts[tokens:] - 256 / (buffer_length - tokens + 1)).max() <= 2
    assert spread_flush_at(0, buffer_length, tokens) == buffer_length


def test_flushes_are_spread_by_default_only_where_it_is_free():
    pallas = ReplayConfig(implementation="pallas")
    assert spreading_is_free(pallas)
    assert not spreading_is_free(replace(pallas, implementation="xla"))
    assert not spreading_is_free(replace(pallas, read="nvfp4"))
    assert not spreading_is_free(replace(pallas, recurrence="fp16", read="fp16"))
    assert not spreading_is_free(EagerConfig(implementation="pallas"))
    out = generate(CHAIN, random_prompts(3, 3, 3), Sampling(max_new_tokens=18))
    assert np.asarray(out.cache.length).tolist() == [1, 1, 1]


# Text.

TEXT = loaded_chain(tokenizer=byte_tokenizer(), vocab_size=256)


def test_text_prompts_and_text_out():
    prompts = ["RÔMEO:", "x"]
    ids = [TEXT.tokenizer(prompt)["input_ids"] for prompt in prompts]
    out = generate(TEXT, prompts, Sampling(max_new_tokens=12))
    assert out.tokens == [chain(prompt, 12) for prompt in ids]
    assert out.text == [TEXT.tokenizer.decode(tokens) for tokens in out.tokens]
    mixed = generate(TEXT, [prompts[0], ids[1]], Sampling(max_new_tokens=12))
    assert mixed.tokens == out.tokens


def planted(text: str) -> Loaded:
    """Its greedy continuation of a prompt of one token is `text`, `<end>`, `text`, `<end>` and so on."""
    script = [*TEXT.tokenizer(text)["input_ids"], 256]
    return loaded_chain(tokenizer=TEXT.tokenizer, stop_ids=[256], script=script)


def test_the_stop_id_is_a_token_but_no_text():
    out = generate(planted("Grüße"), [[0]])
    assert out.tokens[0][-1] == 256
    assert (out.text, out.finish_reasons) == (["Grüße"], ["stop"])


@pytest.mark.parametrize("replay", MODES)
def test_stop_strings_span_tokens_and_keep_the_row_exact(replay):
    loaded = planted("One.\n\nTwo.")
    sampling = Sampling(max_new_tokens=40, stop_strings=["\n\n", "never"])
    out = generate(loaded, [[0]], sampling, replay=replay)
    assert (out.text, out.finish_reasons) == (["One."], ["stop"])
    assert len(out.tokens[0]) == 6
    assert position(out) == [6]
    rest = generate(loaded, None, Sampling(max_new_tokens=40), continue_from=out)
    assert rest.text == ["Two."]
    pieces = list(stream(loaded, [[0]], sampling, replay=replay))
    assert "".join(piece.text for piece in pieces) == "One."
    assert [token for piece in pieces for token in piece.tokens] == out.tokens[0]


def test_streaming_yields_whole_characters_as_they_come():
    loaded = planted("naïve – 日本 👩‍🚀!")
    prompts = [[0], [0], [0]]
    pieces = []
    iterator = stream(loaded, prompts, max_rows=2)
    while True:
        try:
            pieces.append(next(iterator))
        except StopIteration as end:
            out = end.value
            break
    assert out.text == ["naïve – 日本 👩‍🚀!"] * 3
    for i in range(3):
        mine = [piece for piece in pieces if piece.prompt == i]
        assert "".join(piece.text for piece in mine) == out.text[i]
        assert [token for piece in mine for token in piece.tokens] == out.tokens[i]
        assert len(mine) > 3
    assert "\ufffd" not in "".join(piece.text for piece in pieces)
    assert pieces[0].prompt == 0 and pieces[1].prompt == 1


def test_an_abandoned_stream_leaves_nothing_behind():
    iterator = stream(CHAIN, [[1, 2]], Sampling(max_new_tokens=30))
    next(iterator)
    iterator.close()
    assert generate(CHAIN, [[1, 2]], Sampling(max_new_tokens=4)).tokens == [chain([1, 2], 4)]


def test_an_interrupt_leaves_nothing_behind(monkeypatch, capsys):
    decode = scheduler.decode
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(scheduler, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(CHAIN, [[1, 2]], Sampling(max_new_tokens=60), progress=True)
    # The bar is closed: its line is cleared or ended.
    assert capsys.readouterr().err.endswith(("\r", "\n"))
    assert generate(CHAIN, [[1, 2]], Sampling(max_new_tokens=60)).tokens == [chain([1, 2], 60)]


def test_progress_shows_when_asked(capsys):
    generate(CHAIN, [[1, 2]], Sampling(max_new_tokens=5), progress=True)
    assert "tok" in capsys.readouterr().err
    generate(CHAIN, [[1, 2]], Sampling(max_new_tokens=5))
    assert capsys.readouterr().err == ""


# Compilations.


def compiled(caplog) -> list[str]:
    """Names of the programs compiled since the last call."""
    names = [record.args[0] for record in caplog.records if record.name == "replayssm_jax.compilations"]
    caplog.clear()
    return names


def test_B24_lengths_rows_counts_and_options_compile_nothing(caplog):
    caplog.set_level(logging.INFO, "replayssm_jax.compilations")
    # A vocabulary of no other test: its programs are not compiled yet.
    loaded = loaded_chain(vocab=101)
    count = warmup(loaded, rows=3, longest_prompt=40).compilations
    names = compiled(caplog)
    assert len(names) == count
    assert names.count("jit(empty_cache)") == 2
    assert names.count("jit(prefill_chunk)") == 3
    assert names.count("jit(decode)") == 1
    for prompts, sampling in (
        (random_prompts(*range(1, 41)), Sampling(max_new_tokens=100)),
        (random_prompts(40, 2, 39), Sampling(max_new_tokens=7)),
        (random_prompts(*range(20, 5, -1)), Sampling(30, temperature=1.0, top_k=3, seed=4, stop_ids=(1, 2))),
        (random_prompts(16, 17, 32, 33), Sampling(max_new_tokens=90, min_p=0.1, vocab_size=90)),
    ):
        assert generate(loaded, prompts, sampling, max_rows=3).stats.compilations == 0
    new = Sampling(max_new_tokens=100)
    generate(loaded, random_prompts(5, 6), new)
    assert compiled(caplog).count("jit(decode)") == 1
    for rows in (3, 2, 3):
        assert generate(loaded, random_prompts(*[5] * rows), new).stats.compilations == 0
    assert compiled(caplog) == []


def test_B24_the_top_bucket_is_never_above_the_limit():
    assert prefill_buckets(317) == (16, 32, 64, 128, 256, 317)
    assert prefill_buckets(2048) == (16, 32, 64, 128, 256, 512)
    assert prefill_buckets(10) == (10,)
    assert prefill_chunks(1100, 2048) == [(512, 512), (512, 512), (128, 76)]
    assert prefill_chunks(512, 2048) == [(512, 512)]
    assert prefill_chunks(17, 2048) == [(32, 17)]
    prompts = random_prompts(316, 317, 318)
    for prompt, new in zip(prompts[:2], (2, 1), strict=True):
        out = generate(CHAIN, [prompt], Sampling(max_new_tokens=new), max_length=317)
        assert out.tokens == [chain(prompt, new)]
    with pytest.raises(ValueError, match="prompt 0 needs 318 positions .* max_length is 317"):
        generate(CHAIN, prompts[2:], Sampling(max_new_tokens=1), max_length=317)


def test_long_prompts_go_in_by_chunks():
    prompt = random_prompts(1100)[0]
    assert generate(CHAIN, [prompt], Sampling(max_new_tokens=1)).tokens == [chain(prompt, 1)]


def test_the_context_bounds_what_is_asked_for_unless_max_length_does():
    loaded = loaded_chain(context=200)
    prompt = random_prompts(200)[0]
    assert generate(loaded, [prompt], Sampling(max_new_tokens=1)).cache.max_length == 200
    with pytest.raises(ValueError, match=r"prompt 0 needs 201 positions .*context is 200 \(pass max_length"):
        generate(loaded, [prompt], Sampling(max_new_tokens=2))
    out = generate(loaded, [prompt], Sampling(max_new_tokens=12), max_length=256)
    assert out.tokens == [chain(prompt, 12)]


# What is refused.


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[1], []], "prompt 1 is empty"),
        ("text", r"prompts must be a list; for a single prompt write \[prompt\]"),
        (["text"], "prompt 0 is a text, but the checkpoint has no tokenizer"),
        ([[1, 257]], r"prompt 0 has the token id 257, outside the vocabulary 0\.\.256"),
        ([[1], [-1]], "prompt 1 has the token id -1"),
        ([[1.5]], "some of its items are no integers"),
        ([[[1]]], "some of its items are no integers"),
        ([3], "prompt 0 must be a text or a list of token ids, got 3"),
        (5, "prompts must be a list of texts or of token-id lists, got int"),
        (np.zeros((2, 3), np.float32), "prompt 0 must be a text or a list of integer token ids, got float32"),
    ],
)
def test_B04_prompts_that_do_not_fit_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(CHAIN, prompts)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_arrays_are_prompts_too(array):
    prompts = random_prompts(4, 4)
    assert generate(CHAIN, array(prompts), Sampling(3)).tokens == [chain(prompt, 3) for prompt in prompts]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 0, 1]], "attention_mask of prompt 0 has a hole"),
        ([[1, 1]], "attention_mask of prompt 0 must be 3 zeros and ones"),
        ([[1, 2, 1]], "attention_mask of prompt 0 must be 3 zeros and ones"),
        ([[1, 1, 1]] * 2, "attention_mask has 2 rows for 1 prompts"),
        ([[0, 0, 0]], "prompt 0 is empty"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        generate(CHAIN, [[1, 2, 3]], attention_mask=mask)


def test_masks_go_with_token_ids():
    with pytest.raises(ValueError, match="attention_mask goes with token ids"):
        generate(TEXT, ["text"], attention_mask=[[1, 1, 1, 1]])


def test_other_arguments_that_do_not_fit_are_refused():
    for name in ("max_rows", "max_length"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, or None, got 0"):
            generate(CHAIN, [[1]], **{name: 0})
    with pytest.raises(ValueError, match=r"prompt 1 has '\\udcff' at position 1, which is no Unicode"):
        generate(TEXT, ["a", "b\udcff"])
    with pytest.raises(ValueError, match="stop_strings need text, but the checkpoint has no tokenizer"):
        generate(CHAIN, [[1]], Sampling(stop_strings=["a"]))
    with pytest.raises(ValueError, match="vocab_size is 258, but the checkpoint has 257 token ids"):
        generate(CHAIN, [[1]], Sampling(vocab_size=258))
    with pytest.raises(ValueError, match="max_rows must be an integer of at least 1"):
        stream(CHAIN, [[1]], max_rows=0)


def test_a_batch_beyond_the_memory_says_how_many_rows_would_fit(monkeypatch):
    each = memory.row_bytes(CHAIN.model, 256, ReplayConfig())
    monkeypatch.setattr(memory, "free_bytes", lambda model: 4 * each)
    with pytest.raises(ValueError, match="5 rows of 256 positions need .* 3 rows would fit"):
        generate(CHAIN, [[1]] * 5)
    assert generate(CHAIN, [[1]] * 5, Sampling(2), max_rows=3).stats.rows == 3
    monkeypatch.setattr(memory, "free_bytes", lambda model: each)
    with pytest.raises(ValueError, match="2 rows of .* 1 rows would fit"):
        generate(CHAIN, [[1]] * 2)
    monkeypatch.setattr(memory, "free_bytes", lambda model: 0)
    with pytest.raises(ValueError, match="1 rows of .* 0 rows would fit"):
        generate(CHAIN, [[1]])


@pytest.mark.parametrize("max_rows", [None, 1])
def test_logits_that_are_not_finite_name_the_prompt(max_rows):
    prompts = random_prompts(3, 4)
    texts = [chain(prompt, 20) for prompt in prompts]
    bad = next(token for token in texts[1] if token not in prompts[0] + prompts[1] + texts[0])
    loaded = loaded_chain(bad_token=bad)
    known = 4 + texts[1].index(bad) + 1
    row = 0 if max_rows else 1
    message = rf"logits of prompt 1 \(row {row}\) are NaN or infinite after {known} tokens"
    with pytest.raises(FloatingPointError, match=message):
        generate(loaded, prompts, Sampling(max_new_tokens=20), max_rows=max_rows)
    with pytest.raises(FloatingPointError, match=r"prompt 0 \(row 0\) are NaN or infinite after 2 tokens"):
        generate(loaded, [[1, bad]])


def test_B16_rows_of_padding_in_the_head_are_never_chosen():
    loaded = loaded_chain(vocab_size=97)
    prompts = random_prompts(3, 9)
    for options in ({}, {"temperature": 30.0}):
        out = generate(loaded, prompts, Sampling(max_new_tokens=60, **options))
        assert max(map(max, out.tokens)) < 97
    # Where the best id is one of the padding's, the best real one is the next around: 0.
    best = [successor(prompt[-1], len(prompt) - 1) for prompt in prompts]
    assert max(best) >= 97
    assert [tokens[0] for tokens in generate(loaded, prompts, Sampling(2)).tokens] == [
        token if token < 97 else 0 for token in best
    ]
    assert max(map(max, generate(loaded, prompts, Sampling(60, vocab_size=50)).tokens)) < 50


# Real layers: what a wrong state would change.

HOT_LENGTH = 64


@functools.cache
def hot(family: str) -> Loaded:
    # M* has attention beside the recurrence; one Gated DeltaNet layer is enough to see its state.
    model = hot_model(family, layers=2 if family == "mamba2" else 1)
    return Loaded(
        model=model, config=nemotron_config(), tokenizer=None, stop_ids=(), vocab_size=VOCAB, path=Path()
    )


def alone(family: str, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and log-probabilities of a prompt by whole forward passes, without any cache."""
    model = hot(family).model
    tokens = np.zeros((1, HOT_LENGTH), np.int32)
    tokens[0, : len(prompt)] = prompt
    length, logprobs = len(prompt), []
    for _ in range(count):
        logits = full_logits(model, tokens)[0, length - 1].astype(np.float64)
        tokens[0, length] = logits.argmax()
        logprobs.append(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        length += 1
    return tokens[0, len(prompt) : length].tolist(), logprobs


def assert_alone(family: str, prompts: list[list[int]], out: Generation) -> None:
    for prompt, tokens, logprobs in zip(prompts, out.tokens, out.logprobs, strict=True):
        expected, expected_logprobs = alone(family, prompt, len(tokens))
        assert tokens == expected
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-3)


run_hot = functools.partial(generate, max_length=HOT_LENGTH)


# Their programs differ from those of the other family in the recurrence only.
BY_HAND = [pytest.mark.slow, pytest.mark.long]
VARIANTS = [
    ("mamba2", MODES[0]),
    ("mamba2", MODES[1]),
    pytest.param("gated_delta", MODES[0], marks=BY_HAND),
]


@pytest.mark.parametrize(("family", "replay"), VARIANTS)
def test_B01_B02_B03_B04_padding_lengths_and_rows_leak_nowhere(family, replay):
    # B03: 3, 11, 16 and 1 tokens in one batch. B04: 1 to 4 tokens, below and at the convolution's width.
    loaded, sampling = hot(family), Sampling(max_new_tokens=18)
    prompts = random_prompts(3, 11, 16, 1, 2, 4)
    out = run_hot(loaded, prompts, sampling, replay=replay, max_rows=2)
    assert_alone(family, prompts, out)
    # B01: left-padded, whatever the pad id; the same padded on the right.
    a, b = prompts[:2]
    for pad in (0, 5, 96):
        padded, mask = np.asarray([[pad] * 8 + a, b]), np.asarray([[0] * 8 + [1] * 3, [1] * 11])
        left = run_hot(loaded, padded, sampling, replay=replay, attention_mask=mask)
        assert (left.tokens, left.logprobs[0]) == (out.tokens[:2], out.logprobs[0])
    mask = [[1] * 3 + [0] * 8, [1] * 11]
    right = run_hot(loaded, [a + [5] * 8, b], sampling, replay=replay, attention_mask=mask)
    assert right.tokens == left.tokens


@pytest.mark.parametrize("family", ["mamba2", pytest.param("gated_delta", marks=BY_HAND)])
def test_spread_flushes_keep_text_and_logprobs(family):
    loaded, sampling = hot(family), Sampling(max_new_tokens=18)
    prompts = random_prompts(3, 11, 16, 1, 2, 4)
    out = run_hot(loaded, prompts, sampling, max_rows=2, spread_flushes=True)
    assert_alone(family, prompts, out)
    together = run_hot(loaded, prompts, sampling, max_rows=2)
    assert out.stats.ring_occupancy < together.stats.ring_occupancy


def test_B02_a_mask_counts_in_a_batch_of_one():
    loaded, sampling = hot("mamba2"), Sampling(max_new_tokens=8)
    prompt = random_prompts(3)[0]
    out = run_hot(loaded, [[0] * 8 + prompt], sampling, attention_mask=[[0] * 8 + [1] * 3])
    assert_alone("mamba2", [prompt], out)
    # Four further tokens at once, with and without a mask of their own.
    for mask in (None, [[0, 1, 1, 1, 1]]):
        more = [[7, 8, 9, 10]] if mask is None else [[0, 7, 8, 9, 10]]
        text = prompt + out.tokens[0] + [7, 8, 9, 10]
        out = generate(loaded, more, sampling, continue_from=out, attention_mask=mask)
        assert_alone("mamba2", [text], out)
        prompt = text


@pytest.mark.parametrize(("family", "replay"), VARIANTS[:2])
def test_B04_continued_rows_take_short_chunks(family, replay):
    loaded, sampling = hot(family), Sampling(max_new_tokens=8)
    prompts = random_prompts(8, 3)
    out = run_hot(loaded, prompts, sampling, replay=replay)
    texts = [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    # Row 0 takes its last token alone, then two tokens; row 1 four, then its last alone.
    for more in ([[], [5, 6, 7]], [[9], []]):
        out = generate(loaded, more, sampling, continue_from=out)
        texts = [text + extra for text, extra in zip(texts, more, strict=True)]
        assert_alone(family, texts, out)
        texts = [text + tokens for text, tokens in zip(texts, out.tokens, strict=True)]
    assert position(out) == [len(text) - 1 for text in texts]


def spoiled(cache: Cache, rows, value: float) -> Cache:
    """The cache with state, ring, convolution, keys and values of some rows overwritten."""

    def layer(item):
        filled = jax.tree.map(
            lambda leaf: leaf.at[jnp.asarray(rows)].set(value), replace(item, **kept(item, None))
        )
        return replace(filled, **kept(item, item))

    def kept(item, source):
        return {"heads": source and source.heads} if isinstance(item, RecurrentLayer) else {}

    return replace(cache, layers=tuple(None if item is None else layer(item) for item in cache.layers))


@pytest.mark.parametrize("value", [1e4, np.nan])
@pytest.mark.parametrize("max_rows", [1, 2])
def test_B17_a_new_prompt_inherits_nothing(max_rows, value, monkeypatch):
    loaded, sampling = hot("mamba2"), Sampling(max_new_tokens=16)
    first, *later = random_prompts(16, 1, 2, 9)
    prompts = [[first, prompt, first] for prompt in later]
    fresh = [run_hot(loaded, three, sampling, max_rows=max_rows) for three in prompts]
    clear_rows, insert_rows = scheduler.clear_rows, scheduler.insert_rows

    def clear_spoiled_row(drafter, cache, *rest):
        return clear_rows(drafter, spoiled(cache, [0], value), *rest)

    def insert_over_spoiled_rows(drafter, cache, state, part, part_state, rows):
        return insert_rows(drafter, spoiled(cache, rows, value), state, part, part_state, rows)

    monkeypatch.setattr(scheduler, "clear_rows", clear_spoiled_row)
    monkeypatch.setattr(scheduler, "insert_rows", insert_over_spoiled_rows)
    for three, expected in zip(prompts, fresh, strict=True):
        out = run_hot(loaded, three, sampling, max_rows=max_rows)
        assert (out.tokens, out.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("replay", MODES)
def test_finished_rows_keep_their_state(replay):
    loaded = hot("mamba2")
    prompts = random_prompts(5, 7)
    stop = Sampling(max_new_tokens=24, stop_ids=[alone("mamba2", prompts[0], 5)[0][4]])
    both = run_hot(loaded, prompts, stop, replay=replay)
    assert len(both.tokens[0]) < len(both.tokens[1])
    twice = run_hot(loaded, [prompts[0], prompts[0]], stop, replay=replay)
    for state, expected in zip(materialize(both.cache), materialize(twice.cache), strict=True):
        assert_close(state[0], expected[0])
    again = generate(loaded, None, Sampling(max_new_tokens=6), continue_from=both)
    assert_alone("mamba2", [p + t for p, t in zip(prompts, both.tokens, strict=True)], again)


def test_a_dispatch_copies_no_cache():
    model = decode.FlatModel.of(hot("mamba2").model)
    cache = decode.empty_cache(model, 2, HOT_LENGTH, MODES[0])
    count, yes = jnp.zeros((2,), jnp.int32), jnp.ones((2,), bool)
    rows = decode.Rows(token=count, active=yes, remaining=count, prompt=count, finite=yes)
    one = np.int32(1)
    params = sampling_params(Sampling(), VOCAB, ())
    none = decode.FlatModel.of(NoDrafts())
    program = decode.decode.lower(
        model, none, rows, cache, (), np.ones(2, bool), one, one, params, drafts=0
    ).compile()
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves((rows, cache)))
    assert program.memory_analysis().alias_size_in_bytes == donated
