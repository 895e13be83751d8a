"""The whole loop of speculative decoding: texts, states and cursors against runs that never draft."""

import dataclasses
import functools
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import scheduler
from replayssm_jax.api import Loaded
from replayssm_jax.drafters import NGramDrafter, Speculative
from replayssm_jax.generate import generate, stream, warmup
from replayssm_jax.sampling import Sampling
from tests.replayssm_jax.chain_model import byte_tokenizer, chain, loaded_chain
from tests.replayssm_jax.planted import Planted
from tests.replayssm_jax.states import assert_same_state
from tests.tiny_models import FAMILIES, VOCAB, full_logits, hot_model, nemotron_config, random_tokens

LAYERS = {"mamba2": 2, "gated_delta": 1, "kimi_delta": 1}


@functools.cache
def hot(family: str) -> Loaded:
    """M* of Nemotron-H, or one layer of the other recurrences, with hot weights."""
    model = hot_model(family, layers=LAYERS[family])
    return Loaded(
        model=model,
        config=nemotron_config(),
        tokenizer=None,
        stop_ids=(),
        vocab_size=VOCAB,
        path=Path(family),
    )


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [random_tokens(length, seed=seed + i).tolist() for i, length in enumerate(lengths)]


def alone(family: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens by whole forward passes, without any cache."""
    texts = []
    for start in range(0, len(prompts), 4):
        group = [list(prompt) for prompt in prompts[start : start + 4]]
        for _ in range(count):
            logits = full_logits(hot(family).model, whole(group, [[]] * len(group)))
            for row, text in enumerate(group):
                text.append(int(logits[row, len(text) - 1].argmax()))
        texts += group
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def whole(prompts, continuations, size=64) -> np.ndarray:
    texts = np.zeros((len(prompts), size), np.int32)
    for row, prompt, more in zip(texts, prompts, continuations, strict=True):
        row[: len(prompt) + len(more)] = [*prompt, *more]
    return texts


def position(out) -> list[int]:
    return (np.asarray(out.cache.start) + np.asarray(out.cache.length)).tolist()


def every_commit(monkeypatch, loaded, prompts, sampling, **options):
    """Yields the cache after every window, and after the prompts."""
    schedulers = []

    class Remembered(scheduler.Scheduler):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            schedulers.append(self)

    # `rs.generate` is the function, so the module has to be asked for by name.
    monkeypatch.setattr(importlib.import_module("replayssm_jax.generate"), "Scheduler", Remembered)
    monkeypatch.setattr(scheduler, "STREAMED_TOKENS", 1)
    seen = None
    for _ in stream(loaded, prompts, sampling, **options):
        cache = schedulers[-1].cache
        if cache is not seen:
            yield cache
        seen = cache


def drafted(prompts, texts, plan, drafts: int, vocab: int = VOCAB) -> Speculative:
    return Speculative(Planted.of(prompts, texts, plan, vocab), drafts)


def only(default: set, often: set, cases) -> list:
    """All cases, of which those outside `default` are slow, and those outside `often` too long for CI."""

    def marks(case):
        if case in default:
            return []
        return [pytest.mark.slow] if case in often else [pytest.mark.slow, pytest.mark.long]

    return [pytest.param(*case, marks=marks(case), id="-".join(map(str, case))) for case in cases]


B18 = [(family, drafts, rows) for family in FAMILIES for drafts in (1, 3, 5, 7) for rows in (1, 3)]
B18_OFTEN = {(family, drafts, 3) for family in FAMILIES for drafts in (5, 7)}


@pytest.mark.parametrize(("family", "drafts", "rows"), only({("mamba2", 3, 3)}, B18_OFTEN, B18))
def test_B18_rejected_drafts_leave_no_trace(family, drafts, rows, monkeypatch):
    loaded, sampling = hot(family), Sampling(max_new_tokens=48)
    # Every row takes several prompts one after the other, for 40 rounds in all.
    prompts = random_prompts(*[3, 4, 5, 16, 1, 2, 7, 8, 9, 6, 3, 2][: rows * (2 + (drafts + 1) // 4)])
    texts = alone(family, prompts, 48)
    # The wrong token stands at every place, and nowhere, in another order in each row.
    plan = [[(drafts, (r + 2 * i) % (drafts + 1)) for r in range(drafts + 1)] for i in range(len(prompts))]
    options = {"speculative": drafted(prompts, texts, plan, drafts), "max_length": 64}
    out = generate(loaded, prompts, sampling, max_rows=rows, **options)
    assert out.tokens == texts
    assert out.stats.steps >= 40
    assert 0.3 < out.stats.draft_acceptance < 0.7
    expected, cache = whole(prompts[:rows], texts[:rows]), None
    for cache in every_commit(monkeypatch, loaded, prompts[:rows], sampling, **options):
        if np.asarray(cache.position).all():
            assert_same_state(loaded.model, cache, expected)
    assert np.asarray(cache.position).tolist() == [len(prompt) + 47 for prompt in prompts[:rows]]


B19 = [(length, window) for length in (1, 2, 3, 4, 5, 8, 16) for window in (1, 2, 4, 8)]
B19_OFTEN = {(1, 1), (3, 2), (5, 4), (8, 8), (16, 8)}


@pytest.mark.parametrize(("length", "window"), only({(1, 2), (4, 8)}, B19_OFTEN, B19))
def test_B19_ring_length_against_window(length, window, monkeypatch):
    family = FAMILIES[(length + window + 2) % 3]
    loaded, prompts = hot(family), random_prompts(1, 2, 3)
    options = {"max_length": 64, "replay": rs.ReplayConfig(buffer_length=length)}
    if length < window:
        with pytest.raises(ValueError, match=f"needs window={window}, and buffer_length .* is {length}"):
            generate(loaded, prompts, speculative=Speculative("ngram", window - 1), **options)
        return
    seen, rounds = set(), 0
    rng = np.random.default_rng(length)
    # Several short runs, so that all of the text can be checked by whole forward passes.
    for seed in range(1, 10):
        prompts = random_prompts(1, 2, 3, seed=seed)
        texts = alone(family, prompts, 61)
        plan = [[(window - 1, place) for place in rng.integers(0, window, 61)] for _ in prompts]
        if window > 1:
            options["speculative"] = drafted(prompts, texts, plan, window - 1)
        cache = None
        for cache in every_commit(monkeypatch, loaded, prompts, Sampling(61), **options):
            seen |= set(np.asarray(cache.length).tolist())
            rounds += 1
        assert_same_state(loaded.model, cache, whole(prompts, texts))
        out = generate(loaded, prompts, Sampling(61), **options)
        assert out.tokens == texts
        assert out.stats.flushes > 60 // (length + window)
        if rounds >= 200 or window == 8 and rounds >= 100:
            break
    assert max(seen) == length


def test_B20_steps_without_drafts_take_turns_with_steps_that_have_some(monkeypatch):
    loaded, prompts = hot("gated_delta"), random_prompts(4, 6) * 6
    texts = alone("gated_delta", prompts[:2], 58) * 6
    mixed = [(4, 3), (0, 0), (0, 0), (3, 0), (0, 0), (4, 4), (4, 1), (0, 0)]
    plan = [mixed, [(4, r % 5) for r in range(8)]] * 6
    options = {"speculative": drafted(prompts, texts, plan, 4), "max_length": 64}
    # 57 tokens are three turns and a half of the first plan: its six prompts make more than twenty.
    assert generate(loaded, prompts, Sampling(58), max_rows=2, **options).tokens == texts
    prompts, texts = prompts[:2], texts[:2]
    for cache in every_commit(monkeypatch, loaded, prompts, Sampling(58), **options):
        if np.asarray(cache.position).all():
            assert_same_state(loaded.model, cache, whole(prompts, texts))
    # Plain steps between speculative ones, on the same cache.
    first = generate(loaded, prompts, Sampling(11), **options)
    plain = generate(loaded, None, Sampling(3), continue_from=first)
    assert [a + b for a, b in zip(first.tokens, plain.tokens, strict=True)] == [text[:14] for text in texts]
    assert_same_state(loaded.model, plain.cache, whole(prompts, texts))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutOfRange(Planted):
    """Its wrong tokens are no tokens at all, and it counts more drafts than there are."""

    def draft(self, model, state, token, position, prompt, params, count):
        drafts, moved = super().draft(model, state, token, position, prompt, params, count)
        wrong = jnp.arange(count)[None, :] == (self.plan[prompt, state % self.rounds, 1])[:, None]
        tokens = jnp.where(wrong, jnp.where(state % 2 == 0, -1, VOCAB)[:, None], drafts.tokens)
        return dataclasses.replace(drafts, tokens=tokens, count=drafts.count + 2), moved


def test_drafts_that_are_no_tokens_cost_their_window_alone():
    loaded, prompts = hot("mamba2"), random_prompts(3, 5)
    texts = alone("mamba2", prompts, 24)
    plan = [[(3, (r + i) % 4) for r in range(4)] for i in range(2)]
    wild = OutOfRange(**vars(Planted.of(prompts, texts, plan, VOCAB)))
    out = generate(loaded, prompts, Sampling(24), speculative=Speculative(wild, 3), max_length=64)
    assert out.tokens == texts
    assert_same_state(loaded.model, out.cache, whole(prompts, texts))


def script(text: list[int], stop_ids=()) -> Loaded:
    """Greedy text after any prompt of one token."""
    return loaded_chain(script=text, stop_ids=stop_ids)


def test_B21_stops_budgets_and_the_caches_end_cut_a_window():
    eos, prompts = 9, [[0]]
    text = [1, 2, eos, 4, 5] * 12
    right = drafted(prompts, [text], [[(4, 4)]], 4, 257)
    stops, goes_on = script(text, (eos,)), script(text)
    out = generate(stops, prompts, Sampling(40), speculative=right)
    assert (out.tokens, out.finish_reasons, position(out)) == ([text[:3]], ["stop"], [3])
    again = generate(stops, None, Sampling(9, stop_ids=()), continue_from=out, speculative=right)
    assert again.tokens == [text[3:12]]
    assert generate(goes_on, prompts, Sampling(40), speculative=right).tokens == [text[:40]]
    two = generate(stops, prompts, Sampling(2), speculative=right)
    assert (two.tokens, two.finish_reasons, position(two)) == ([text[:2]], ["length"], [2])
    for new in (20, 19):
        full = generate(goes_on, prompts, Sampling(new), speculative=right, max_length=20)
        assert (full.tokens, position(full)) == ([text[:new]], [new])
    with pytest.raises(ValueError, match="max_new_tokens must be an integer of at least 1, got 0"):
        Sampling(max_new_tokens=0)


def test_B21_a_draft_of_the_stop_id_that_is_not_kept_stops_nothing():
    prompt, text = [3, 4], chain([3, 4], 30)
    # The planted token of the first round is the true one + 1: the stop id.
    stop = (text[2] + 1) % 257
    assert stop not in text
    loaded = loaded_chain(stop_ids=[stop])
    out = generate(loaded, [prompt], Sampling(30), speculative=drafted([prompt], [text], [[(4, 1)]], 4, 257))
    assert (out.tokens, out.finish_reasons) == ([text], ["length"])


# Drafters.


def matches(text: list[int], longest: int, count: int) -> list[int]:
    """What prompt lookup proposes after `text`, by its definition."""
    best, place = 0, None
    for end in range(1, len(text)):
        agreement = 0
        while agreement < min(longest, end) and text[end - 1 - agreement] == text[-1 - agreement]:
            agreement += 1
        if agreement and agreement >= best:
            best, place = agreement, end
    if place is None:
        return []
    repeated = text[place:] * count
    return repeated[:count]


def test_ngram_proposes_what_followed_the_longest_and_latest_repetition():
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, vocab, size).tolist() for vocab in (2, 4, 30) for size in (1, 2, 5, 9, 40)]
    drafter, rows = NGramDrafter(3), len(texts)
    known = np.array([len(text) - 1 for text in texts], np.int32)
    tokens = np.zeros((rows, 48), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    state = drafter.init(None, rows, 40, rs.ReplayConfig())
    # Half of each text comes as prompt, the rest as a window of which further tokens were refused.
    half = known // 2
    zero = np.zeros(rows, np.int32)
    rest = np.take_along_axis(tokens, np.minimum(half[:, None] + np.arange(40), 47), axis=1)
    state = drafter.prefill(None, state, jnp.asarray(tokens), None, jnp.asarray(half), jnp.asarray(zero))
    state = drafter.commit(None, state, jnp.asarray(rest), None, jnp.asarray(known - half), jnp.asarray(half))
    newest = jnp.asarray([text[-1] for text in texts], jnp.int32)
    drafts, _ = drafter.draft(None, state, newest, jnp.asarray(known), None, None, 6)
    for row, text in enumerate(texts):
        expected = matches(text, 3, 6)
        assert drafts.tokens[row, : drafts.count[row]].tolist() == expected
    assert drafts.probabilities is None and 0 in drafts.count.tolist()


@pytest.mark.parametrize("family", ["gated_delta", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_a_smaller_model_drafts_from_a_cache_of_its_own(family):
    target, drafter = hot("gated_delta"), hot(family)
    prompts = random_prompts(3, 16, 5)
    texts = alone("gated_delta", prompts, 40)
    options = {"speculative": Speculative(drafter, 3), "max_length": 64}
    out = generate(target, prompts, Sampling(40), max_rows=2, **options)
    assert out.tokens == texts
    # With further text between, which the drafter reads after what it lacks.
    first = generate(target, prompts[:2], Sampling(13), **options)
    more = [[7, 8, 9], []]
    again = generate(target, more, Sampling(13), continue_from=first, speculative=options["speculative"])
    known = [p + t + m for p, t, m in zip(prompts[:2], first.tokens, more, strict=True)]
    assert again.tokens == alone("gated_delta", known, 13)
    # The target as its own drafter is never refused: the drafter's state is right after every window.
    for stats in (out.stats, again.stats):
        assert (stats.draft_acceptance == 1.0) == (drafter is target)


# Rows, texts and compilations, around a model whose text is known.

CHAIN = loaded_chain()
NGRAM = Speculative("ngram", 3)
# Its drafts are the chain's own, so a window is as long as the budget lets it be.
SELF = Speculative(CHAIN, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_prompt_yields_the_same_in_any_row_and_company(temperature):
    prompts = random_prompts(3, 20, 40)
    sampling = Sampling(19, temperature=temperature, top_p=0.95, seed=9)
    together = generate(CHAIN, prompts, sampling, speculative=SELF)
    assert (together.tokens == [chain(prompt, 19) for prompt in prompts]) == (temperature == 0)
    assert 1 < together.stats.tokens_per_step <= 4
    out = generate(CHAIN, prompts, sampling, speculative=SELF, max_rows=2)
    assert out.tokens == together.tokens
    # Two programs may round a log-softmax of logits up to 257 differently.
    np.testing.assert_allclose(out.logprobs, together.logprobs, atol=2 * 2**-15)
    assert position(together) == [len(prompt) + 18 for prompt in prompts]


def test_logprobs_are_the_targets_own():
    prompts = random_prompts(3, 20)
    plain = generate(CHAIN, prompts, Sampling(19))
    out = generate(CHAIN, prompts, Sampling(19), speculative=SELF)
    assert out.tokens == plain.tokens
    np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=2 * 2**-15)


def test_spread_flushes_keep_the_text():
    prompts = random_prompts(3, 3, 3)
    out = generate(CHAIN, prompts, Sampling(18), speculative=SELF, spread_flushes=True)
    assert out.tokens == [chain(prompt, 18) for prompt in prompts]


def planted_text(text: str) -> Loaded:
    """Its greedy continuation of a prompt of one token is `text` and `<end>`, over and over."""
    tokenizer = byte_tokenizer()
    script = [*tokenizer(text)["input_ids"], 256]
    return loaded_chain(tokenizer=tokenizer, stop_ids=[256], script=script)


def test_a_stop_string_cuts_a_window_and_keeps_the_row_exact():
    loaded = planted_text("One.\n\nTwo.")
    right = Speculative(loaded, 3)
    sampling = Sampling(40, stop_strings=["\n\n", "never"])
    # After the first token the windows are "ne.\n" and "\nTwo": the second is cut after its first token.
    out = generate(loaded, [[0], [0]], sampling, speculative=right)
    assert (out.text, out.finish_reasons, position(out)) == (["One."] * 2, ["stop"] * 2, [6, 6])
    assert [len(tokens) for tokens in (*out.tokens, *out.logprobs)] == [6] * 4
    rest = generate(loaded, None, Sampling(40), continue_from=out, speculative=right)
    # Two of the last three drafts lie behind the stop id.
    assert (rest.text, rest.stats.draft_acceptance) == (["Two."] * 2, 4 / 6)
    pieces = list(stream(loaded, [[0], [0]], sampling, speculative=right))
    for i in range(2):
        assert "".join(piece.text for piece in pieces if piece.prompt == i) == "One."
        assert [token for piece in pieces if piece.prompt == i for token in piece.tokens] == out.tokens[i]
    # Two rows, of which one is cut and refilled while the other goes on.
    three = generate(loaded, [[0], [0, 1], [0]], sampling, speculative=right, max_rows=2)
    assert three.text == ["One.", "ne.", "One."]


def test_streamed_windows_join_to_the_text():
    loaded = planted_text("naïve – 日本 👩‍🚀!")
    pieces = list(stream(loaded, [[0], [0]], speculative=Speculative(loaded, 3)))
    for i in range(2):
        assert "".join(piece.text for piece in pieces if piece.prompt == i) == "naïve – 日本 👩‍🚀!"


def test_B24_accepted_counts_and_options_compile_nothing():
    loaded = loaded_chain(vocab=103)
    prompts = random_prompts(3, 9, 20, 2)
    texts = [chain(prompt, 60, 103) for prompt in prompts]
    plan = [[(3, place) for place in range(4)], [(0, 0), (2, 1)] * 2, [(1, 1)] * 4, [(3, 3)] * 4]
    given = drafted(prompts, texts, plan, 3, 103)
    assert warmup(loaded, rows=2, longest_prompt=20, speculative=given).compilations > 0
    for sampling in (Sampling(60), Sampling(30, temperature=1.0, top_k=5), Sampling(7, stop_ids=(4,))):
        out = generate(loaded, prompts, sampling, max_rows=2, speculative=given)
        assert out.stats.compilations == 0


def test_statistics_of_the_drafts():
    text = chain([1], 49)
    # Windows of 5, 1, 5, 1, ... tokens: 48 tokens after the first in 16 steps. 32 drafts of 60 stand, as the
    # last window has no room for any.
    given = drafted([[1]], [text], [[(4, 4), (4, 0)]], 4, 257)
    stats = generate(CHAIN, [[1]], Sampling(49), speculative=given).stats
    assert (stats.steps, stats.tokens_per_step, stats.draft_acceptance) == (16, 3.0, 32 / 60)
    length = entries = flushes = 0
    for step in range(16):
        if length + 5 > 16:
            length, flushes = 0, flushes + 1
        entries += length
        length += 1 if step % 2 else 5
    assert (stats.flushes, stats.flush_rate) == (flushes, flushes / 16)
    assert stats.ring_occupancy == entries / 16
    plain = generate(CHAIN, [[1]] * 2, Sampling(41)).stats
    assert (plain.tokens_per_step, plain.draft_acceptance) == (1.0, 0.0)
    # The only token comes from the prefill: there is nothing to take a mean of.
    none = generate(CHAIN, [[1]], Sampling(1), speculative=given).stats
    assert (none.tokens, none.steps, none.tokens_per_step) == (1, 0, 0.0)
    assert (none.draft_acceptance, none.flush_rate, none.ring_occupancy) == (0.0, 0.0, 0.0)


# What is refused.


@pytest.mark.parametrize(
    ("drafter", "count", "message"),
    [
        ("mtp", 0, "draft_tokens must be an integer of at least 1, got 0"),
        ("mtp", True, "draft_tokens must be an integer of at least 1, got True"),
        ("medusa", 3, 'drafter must be "mtp", "ngram", a model from load, or a Drafter, got .medusa'),
        (None, 3, "drafter must be .* got None"),
    ],
)
def test_what_cannot_draft_is_refused(drafter, count, message):
    with pytest.raises(ValueError, match=message):
        Speculative(drafter, count)


def test_what_does_not_fit_the_checkpoint_is_refused():
    prompts = [[1, 2]] * 2
    for options, message in (
        ({"speculative": Speculative("mtp")}, 'drafter="mtp", but .* has no multi-token-prediction head'),
        ({"speculative": NGRAM, "replay": None}, r"draft_tokens=3 needs window=4, but an eager cache"),
        (
            {"speculative": NGRAM, "replay": rs.ReplayConfig(window=2)},
            "draft_tokens=3 needs window=4, but replay has window=2",
        ),
        (
            {"speculative": NGRAM, "replay": rs.ReplayConfig(buffer_length=3)},
            "draft_tokens=3 needs window=4, and buffer_length must be at least that, but it is 3",
        ),
        (
            {"speculative": Speculative(loaded_chain(vocab=101), 3)},
            "has a vocabulary of 101 ids, of which 101 are tokens, but .* has one of 257 and 257",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            generate(CHAIN, prompts, **options)
    plain = generate(CHAIN, prompts, Sampling(3))
    with pytest.raises(ValueError, match="continue_from has window=1, but draft_tokens=3 needs window=4"):
        generate(CHAIN, None, Sampling(3), continue_from=plain, speculative=NGRAM)
    drafted_once = generate(CHAIN, prompts, Sampling(3), speculative=NGRAM)
    with pytest.raises(ValueError, match="continue_from was made with another drafter, or without one"):
        generate(CHAIN, None, Sampling(3), continue_from=drafted_once, speculative=SELF)
    again = generate(CHAIN, None, Sampling(3), continue_from=drafted_once)
    with pytest.raises(ValueError, match="continue_from was made with another drafter, or without one"):
        generate(CHAIN, None, Sampling(3), continue_from=again, speculative=NGRAM)
