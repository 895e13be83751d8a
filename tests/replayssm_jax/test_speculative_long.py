"""Long texts: no token of a thousand differs, and ten thousand leave no more error than plain replay does."""

import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replayssm_jax as rs
from replayssm_jax.api import Loaded
from replayssm_jax.cache import RecurrentSpec, init_cache
from replayssm_jax.recurrence import RECURRENCES
from replayssm_jax.replay import recur
from tests import oracles
from tests.replayssm_jax.chain_model import ChainConfig, chain, successor
from tests.replayssm_jax.planted import Planted

pytestmark = pytest.mark.slow


# One thousand tokens of trained models.

PROMPT = "KING HENRY.\n"
TOKENS = 1000


@functools.cache
def plain(name: str) -> tuple[Loaded, list[int], list[int], np.ndarray]:
    """A trained model, a prompt, its plain greedy text, and how far the best logit leads at each token."""
    loaded = rs.load(name, dtype=jnp.float32)
    prompt = list(loaded.tokenizer(PROMPT)["input_ids"])
    text = rs.generate(loaded, [prompt], rs.Sampling(TOKENS, stop_ids=())).tokens[0]
    tokens = jnp.asarray([prompt + text[:-1]], jnp.int32)
    logits = jax.jit(lambda model, tokens: model.logits(model.forward(tokens)))(loaded.model, tokens)
    best = np.sort(np.asarray(logits)[0, len(prompt) - 1 :], axis=-1)[:, -2:]
    return loaded, prompt, text, best[:, 1] - best[:, 0]


OFTEN = {(2, 8), (4, 16), (8, 32)}


def _grid() -> list:
    """Every window with every buffer length; CI has time for some of them."""
    grid = itertools.product((2, 4, 8), (8, 16, 32))
    return [pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.long) for case in grid]


@pytest.mark.parametrize(("window", "length"), _grid())
@pytest.mark.parametrize("name", ["tiny-nemotron-h", "tiny-qwen3.5"])
def test_greedy_texts_are_those_of_plain_decoding(name, window, length):
    loaded, prompt, text, gaps = plain(name)
    places = np.random.default_rng(length).integers(0, window, 97)
    planted = Planted.of([prompt], [text], [[(window - 1, place) for place in places]], loaded.vocab_size)
    trained_head = name == "tiny-qwen3.5" and length != 4 * window
    for drafter in (planted, "mtp" if trained_head else "ngram"):
        out = rs.generate(
            loaded,
            [prompt],
            rs.Sampling(TOKENS, stop_ids=()),
            replay=rs.ReplayConfig(buffer_length=length),
            speculative=rs.Speculative(drafter, window - 1),
        )
        assert out.stats.tokens_per_step > 1.3
        differ = [place for place in range(TOKENS) if out.tokens[0][place] != text[place]]
        # Where two logits all but tie, rounding decides, and the rest of the text is another one.
        assert not differ or gaps[differ[0]] <= 1e-3
        assert not differ or differ[0] > 100


# Ten thousand tokens of one recurrent layer.

VOCAB, HEADS, WIDTH = 257, 2, 16


class OneLayer(nnx.Module):
    """A recurrence whose inputs are looked up by token; the text does not depend on its outputs."""

    def __init__(self, family: str):
        rng = np.random.default_rng(3)
        self.family = family
        key = rng.normal(size=(VOCAB, WIDTH))
        fields = {
            "values": rng.normal(size=(VOCAB, HEADS * WIDTH)),
            "key": key / np.linalg.norm(key, axis=1, keepdims=True),
            # Slow decay: an error lives for a thousand tokens.
            "rate": rng.uniform(0.0005, 0.002, (VOCAB, HEADS)),
            "beta": rng.uniform(0.05, 0.95, (VOCAB, HEADS)),
        }
        for name, field in fields.items():
            setattr(self, name, nnx.Param(jnp.asarray(field, jnp.float32)))

    @property
    def heads(self):
        ones = jnp.ones((HEADS,), jnp.float32)
        return RECURRENCES[self.family].Heads(*(() if self.family == "gated_delta" else (-ones, 0 * ones)))

    def inputs(self, tokens):
        """The fields of the tokens [1, T]: by group [1, 1, T, ...], scalars [1, T, H]."""
        values, key = self.values[...][tokens][:, None], self.key[...][tokens][:, None]
        rate = self.rate[...][tokens]
        rest = (rate,) if self.family == "mamba2" else (-rate, self.beta[...][tokens])
        return RECURRENCES[self.family].Inputs(values, key, *rest)

    def __call__(self, tokens, segment, layers):
        inputs = self.inputs(tokens)
        reader = self.key[...][tokens][:, None]
        _, layer = recur(RECURRENCES[self.family], layers[0], inputs, reader, self.heads, segment)
        return jnp.stack([tokens, segment.positions], axis=-1).astype(jnp.float32), (layer,)

    def logits(self, hidden):
        best = successor(hidden[..., 0].astype(jnp.int32), hidden[..., 1].astype(jnp.int32), VOCAB)
        return jax.nn.one_hot(best, VOCAB, dtype=jnp.float32)

    def init_cache(self, batch, max_length, replay):
        spec = RecurrentSpec(
            recurrence=self.family,
            heads=HEADS,
            groups=1,
            head_dim=WIDTH,
            d_state=WIDTH,
            conv_channels=1,
            conv_kernel=2,
        )
        return init_cache((spec,), (self.heads,), batch, max_length, replay=replay, dtype=jnp.float32)


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_ten_thousand_tokens_drift_no_further_than_plain_replay(family):
    model, new = OneLayer(family), 10_000
    loaded = Loaded(
        model=model,
        config=ChainConfig(VOCAB, None),
        tokenizer=None,
        stop_ids=(),
        vocab_size=VOCAB,
        path=Path(),
    )
    prompts = [[i] for i in range(4)]
    texts = [chain(prompt, new) for prompt in prompts]
    tokens = [[*prompt, *text[:-1]] for prompt, text in zip(prompts, texts, strict=True)]
    fields = [np.asarray(leaf) for leaf in jax.tree.leaves(model.inputs(jnp.asarray(tokens, jnp.int32)))]
    heads = [np.asarray(leaf) for leaf in jax.tree.leaves(model.heads)]
    unread = np.zeros((4, 1, new, WIDTH))
    _, truth = getattr(oracles, family)(np.zeros((4, HEADS, WIDTH, WIDTH)), *fields, unread, *heads)
    rng = np.random.default_rng(0)
    plan = [[(3, place) for place in rng.integers(0, 4, 997)] for _ in prompts]
    planted = rs.Speculative(Planted.of(prompts, texts, plan, VOCAB), 3)
    drift, flushes = [], []
    for speculative in (None, planted):
        out = rs.generate(loaded, prompts, rs.Sampling(new), speculative=speculative, max_length=new)
        assert out.tokens == texts
        state = np.asarray(rs.materialize(out.cache)[0], np.float64)
        drift.append(np.sqrt(np.mean((state - truth) ** 2) / np.mean(truth**2)))
        flushes.append(out.stats.flushes)
    # Each flush rounds the state once, independently, so errors add up as the root of their number; the two
    # samples of errors scatter.
    assert drift[1] <= 1.2 * drift[0] * np.sqrt(flushes[1] / flushes[0])
    # A thousand tokens' worth of flushes, a unit in the last place each.
    assert drift[0] < 2**-23 * np.sqrt(1000 / 16)
