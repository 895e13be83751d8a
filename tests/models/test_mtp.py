"""Multi-token-prediction heads: against float64, one entry at a time, and as drafters beside the trunk."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from bench.embedded_drafts import draft_outputs
from models import mtp
from models.layers import attention
from models.mtp import MTPDrafter
from replayssm_jax.replay import fresh_segment
from replayssm_jax.sampling import Sampling, sampling_params
from tests.models.oracle import oracle_hidden, oracle_logits, oracle_mtp, oracle_scores
from tests.models.test_families import assert_equal_numbers
from tests.models.tiny import GDN_MTP, M2_MTP, tensors, write
from tests.parity.cases import NEAR_TIE, margin

# Short trunks, which compile fast.
CASES = {
    "M2": M2_MTP | {"hybrid_override_pattern": "M*"},
    "GDN": GDN_MTP | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
ROWS, TEXT, WINDOW = 3, 40, 4
GREEDY = sampling_params(Sampling(), 97, ())


@dataclass
class Headed:
    """A tiny model, fixed random texts, and what a head that never drafted makes of them, in float64."""

    raw: dict
    loaded: rs.Loaded
    model: Any
    tokens: np.ndarray
    hidden: np.ndarray
    outputs: np.ndarray
    logits: np.ndarray


@pytest.fixture(scope="module", params=CASES)
def headed(request, tmp_path_factory) -> Headed:
    raw = CASES[request.param]
    weights = tensors(raw)
    tokens = np.random.RandomState(5).randint(0, 97, (ROWS, TEXT + 1)).astype(np.int32)
    hidden = np.stack([oracle_hidden(raw, weights, row[:-1]) for row in tokens])
    outputs = np.stack([oracle_mtp(raw, weights, row[1:], h) for row, h in zip(tokens, hidden, strict=True)])
    loaded = rs.load(write(tmp_path_factory.mktemp(request.param), raw, weights))
    return Headed(
        raw=raw,
        loaded=loaded,
        model=loaded.model,
        tokens=tokens,
        hidden=hidden.astype(np.float32),
        outputs=outputs,
        logits=oracle_scores(raw, weights, outputs),
    )


@jax.jit
def entries(model, caches, tokens, hidden, position):
    """Head outputs of entries from `position` on, with or without caches."""
    segment = dataclasses.replace(fresh_segment(*tokens.shape), position=position)
    return model.mtp(model.embed(tokens), hidden, segment, caches)


def test_a_whole_text_at_once(headed):
    start = jnp.zeros((ROWS,), jnp.int32)
    found, _ = entries(headed.model, None, headed.tokens[:, 1:], headed.hidden, start)
    assert_equal_numbers(found, headed.outputs)
    assert_equal_numbers(headed.model.logits(found), headed.logits)


def test_one_entry_at_a_time(headed):
    caches, found = headed.model.mtp.init_caches(ROWS, TEXT, jnp.float32), []
    for p in range(TEXT):
        one = headed.tokens[:, p + 1, None], headed.hidden[:, p, None], jnp.full((ROWS,), p, jnp.int32)
        output, caches = entries(headed.model, caches, *one)
        found.append(output[:, 0])
    assert_equal_numbers(np.stack(found, axis=1), headed.outputs)


def keys_and_values(caches) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(caches)]


@pytest.fixture(scope="module")
def never_drafted(headed) -> list[np.ndarray]:
    """Keys and values of every entry of the texts."""
    caches = headed.model.mtp.init_caches(ROWS, TEXT, jnp.float32)
    start = jnp.zeros((ROWS,), jnp.int32)
    _, caches = entries(headed.model, caches, headed.tokens[:, 1:], headed.hidden, start)
    return keys_and_values(caches)


draft = jax.jit(MTPDrafter().draft, static_argnums=6)
prefill, commit = jax.jit(MTPDrafter().prefill), jax.jit(MTPDrafter().commit)


class Follower:
    """A drafter beside its trunk, along the fixed texts; every row at a pace of its own."""

    def __init__(self, headed: Headed):
        self.headed, self.model = headed, headed.model
        self.drafter = self.model.own_drafter()
        replay = rs.ReplayConfig(buffer_length=6, window=WINDOW)
        self.cache = self.model.init_cache(ROWS, TEXT, replay)
        self.state = self.drafter.init(self.model, ROWS, TEXT, replay)
        self.prompt = jnp.arange(ROWS, dtype=jnp.int32)

    @property
    def position(self) -> np.ndarray:
        return np.asarray(self.cache.position)

    def text(self, start: np.ndarray, count: int) -> np.ndarray:
        """The `count` tokens of each row's text from `start` on."""
        column = np.minimum(start[:, None] + np.arange(count), TEXT)
        return np.take_along_axis(self.headed.tokens, column, axis=1)

    def prefill(self, lengths: list[int], size: int = 5) -> None:
        """`lengths` further tokens of each row, padded to `size`."""
        position, count = self.cache.position, jnp.asarray(lengths, jnp.int32)
        tokens = jnp.asarray(self.text(self.position, size))
        _, hidden, self.cache = rs.prefill(self.model, tokens, count, self.cache, return_hidden=True)
        self.state = prefill(self.model, self.state, tokens, hidden, count, position)

    def draft(self):
        token = jnp.asarray(self.text(self.position, 1)[:, 0])
        position = self.cache.position
        drafts, self.state = draft(self.model, self.state, token, position, self.prompt, GREEDY, WINDOW - 1)
        return drafts

    def round(self, accepted: np.ndarray) -> None:
        """Draft, then verify a window whose first `accepted` inputs are the text and the others are not."""
        self.draft()
        position = self.cache.position
        fed = self.text(self.position, WINDOW)
        fed = np.where(np.arange(WINDOW) < np.maximum(accepted, 1)[:, None], fed, (fed + 7) % 97)
        _, hidden, self.cache = rs.step(self.model, jnp.asarray(fed), self.cache, return_hidden=True)
        count = jnp.asarray(accepted, jnp.int32)
        self.cache = rs.commit(self.cache, count)
        self.state = commit(self.model, self.state, jnp.asarray(fed), hidden, count, position)

    def assert_like(self, never_drafted: list[np.ndarray]) -> None:
        """Every entry below each row's position is that of a head that saw committed tokens only."""
        self.draft()
        for found, truth in zip(keys_and_values(self.state.caches), never_drafted, strict=True):
            for row, position in enumerate(self.position):
                assert_equal_numbers(found[row, :, :position], truth[row, :, :position])  # [B, N, S, D]


@pytest.mark.parametrize("headed", ["GDN", pytest.param("M2", marks=pytest.mark.slow)], indirect=True)
def test_entries_after_every_commit_are_those_of_a_run_that_never_drafted(headed, never_drafted):
    stream, follower = np.random.RandomState(11), Follower(headed)
    follower.prefill([5, 1, 0])
    follower.prefill([0, 2, 1])
    follower.assert_like(never_drafted)
    seen = set()
    for turn in range(24):
        # At the end of the cache, drafts and inputs beyond it are dropped.
        accepted = np.minimum(stream.randint(0, WINDOW + 1, ROWS), TEXT - follower.position)
        seen |= set(accepted.tolist())
        follower.round(accepted)
        follower.assert_like(never_drafted)
        if turn == 4:
            # Further text: the entries of the last window still wait for its first token.
            follower.round(np.asarray([3, 0, 4]))
            follower.prefill([2, 3, 0])
            follower.assert_like(never_drafted)
    assert seen == set(range(WINDOW + 1))
    assert (follower.position == TEXT).all()


def test_the_first_draft_is_the_best_token_of_the_head(headed):
    follower = Follower(headed)
    follower.prefill([5, 3, 1])
    for accepted in ([4, 1, 2], [1, 3, 4]):
        follower.round(np.asarray(accepted))
        best = headed.logits[np.arange(ROWS), follower.position - 1].argmax(-1)
        first = follower.draft().tokens[:, 0]
        assert first.tolist() == best.tolist()
        assert follower.draft().tokens[:, 0].tolist() == best.tolist(), "drafting again changes nothing"


@pytest.mark.parametrize("headed", ["GDN"], indirect=True)
def test_the_kernels_may_serve_a_head_where_they_serve_the_cache(headed, monkeypatch):
    follower, asked = Follower(headed), []
    # A stand-in that leaves the attention to the portable backend, as the kernel does with other sizes.
    monkeypatch.setattr(attention, "kernel_attention", lambda q, *_: asked.append(q.shape[1]))
    rest = follower.prompt, follower.cache.position, follower.prompt, GREEDY
    trace = functools.partial(follower.drafter.draft, count=WINDOW - 1)
    jax.eval_shape(trace, follower.model, follower.state, *rest)
    assert not asked
    monkeypatch.setattr(
        mtp, "resolve", lambda method, *_: dataclasses.replace(method, implementation="pallas")
    )
    state = follower.drafter.init(follower.model, ROWS, TEXT, follower.cache.replay)
    jax.eval_shape(trace, follower.model, state, *rest)
    assert set(asked) == {WINDOW, 1}


def test_rows_are_moved_and_emptied_with_their_waiting_entries(headed, never_drafted):
    first, other = Follower(headed), Follower(headed)
    for follower in (first, other):
        follower.prefill([5, 3, 1])
        follower.round(np.asarray([4, 0, 2]))
    rows = jnp.asarray([2, 0], jnp.int32)
    part = first.drafter.select(first.state, rows), rs.select(first.cache, rows)
    back = jnp.asarray([2, ROWS], jnp.int32)
    other.round(np.asarray([0, 2, 3]))
    other.state = other.drafter.insert(other.state, part[0], back)
    other.cache = rs.insert(other.cache, part[1], back)
    other.assert_like(never_drafted)
    empty = jnp.asarray([1], jnp.int32)
    other.state, other.cache = other.drafter.reset(other.state, empty), rs.reset(other.cache, empty)
    other.prefill([1, 5, 0])
    other.assert_like(never_drafted)


@pytest.mark.parametrize("headed", ["GDN"], indirect=True)  # the layout that the training knows
def test_the_training_loss_sees_the_outputs_of_decoding(headed):
    """Drafts 2 and 3 of the training's one pass are those that the drafter makes one by one."""
    follower = Follower(headed)
    follower.prefill([5, 5, 5])
    drafts = np.asarray(follower.draft().tokens)
    tokens = np.concatenate([headed.tokens[:, 1:6], drafts[:, :2]], axis=1)
    hidden = np.concatenate([headed.hidden[:, :5], np.zeros_like(headed.hidden[:, :2])], axis=1)
    outputs = jax.jit(draft_outputs, static_argnums=3)(headed.model, tokens, hidden, 3)
    for depth, output in enumerate(outputs):
        best = headed.model.logits(output[:, 4 + depth]).argmax(-1)
        assert best.tolist() == drafts[:, depth].tolist()


@pytest.mark.parametrize("headed", ["GDN", pytest.param("M2", marks=pytest.mark.slow)], indirect=True)
def test_greedy_text_is_that_of_plain_decoding(headed):
    """Two rows for three prompts: a row's head is emptied for its next prompt."""
    prompts = [row[:length].tolist() for row, length in zip(headed.tokens, (1, 9, 5), strict=True)]
    sampling = rs.Sampling(max_new_tokens=30, stop_ids=())
    out = rs.generate(
        headed.loaded,
        prompts,
        sampling,
        speculative=rs.Speculative("mtp", WINDOW - 1),
        max_rows=2,
        max_length=TEXT,
    )
    assert out.stats.tokens_per_step >= 1
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        text = np.asarray(prompt + tokens)
        logits = oracle_logits(headed.raw, tensors(headed.raw), text)[len(prompt) - 1 : -1]
        sure = margin(logits) > NEAR_TIE
        assert (logits.argmax(-1)[sure] == np.asarray(tokens)[sure]).all()
        assert sure.mean() > 0.9
