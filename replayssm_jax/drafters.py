"""The drafters that come with the library, and how a caller names one."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from replayssm_jax import cache as caches
from replayssm_jax.api import Loaded
from replayssm_jax.cache import Cache
from replayssm_jax.config import DecodingConfig, EagerConfig
from replayssm_jax.replay import commit_core, prefill_core, step_core
from replayssm_jax.speculative import Drafter, Drafts, NoDrafts, at_index, draw_draft

NAMES = ("mtp", "ngram")


@dataclass(frozen=True)
class Speculative:
    """Speculative decoding: every step verifies one token and `draft_tokens` proposals for those after it.

    drafter: "mtp", the checkpoint's own multi-token-prediction head; "ngram", what followed the last tokens
        earlier in the text; a smaller model of the same vocabulary, from `load`; or a `Drafter`.
    draft_tokens: proposals a step, at least 1. The cache's window is draft_tokens + 1.

    Raises ValueError for anything else.
    """

    drafter: Any
    draft_tokens: int = 4

    def __post_init__(self):
        count = self.draft_tokens
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"draft_tokens must be an integer of at least 1, got {count!r}.")
        object.__setattr__(self, "draft_tokens", int(count))
        if self.drafter not in NAMES if isinstance(self.drafter, str) else not _can_draft(self.drafter):
            raise ValueError(
                f'drafter must be "mtp", "ngram", a model from load, or a Drafter, got {self.drafter!r}.'
            )

    @property
    def window(self) -> int:
        """T: tokens that a step feeds."""
        return 1 + self.draft_tokens


def _can_draft(drafter: Any) -> bool:
    return isinstance(drafter, Loaded | Drafter)


def drafter_of(speculative: Speculative | None, loaded: Loaded) -> Drafter:
    """The drafter that `speculative` means for a checkpoint; `NoDrafts` for None.

    Raises ValueError for a checkpoint without a multi-token-prediction head, and for a smaller model with
    another vocabulary.
    """
    if speculative is None:
        return NoDrafts()
    drafter = speculative.drafter
    if isinstance(drafter, Drafter):
        return drafter
    if drafter == "ngram":
        return NGramDrafter()
    if drafter == "mtp":
        own = getattr(loaded.model, "own_drafter", lambda: None)()
        if own is None:
            raise ValueError(f'drafter="mtp", but {loaded.path} has no multi-token-prediction head.')
        return own
    _refuse_other_vocabulary(drafter, loaded)
    return ModelDrafter(drafter.model)


def _refuse_other_vocabulary(drafter: Loaded, loaded: Loaded) -> None:
    sizes = [(item.config.vocab_size, item.vocab_size) for item in (drafter, loaded)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The drafter {drafter.path} has a vocabulary of {sizes[0][0]} ids, of which {sizes[0][1]} are "
            f"tokens, but {loaded.path} has one of {sizes[1][0]} and {sizes[1][1]}."
        )
    ids = [item.tokenizer and item.tokenizer.get_vocab() for item in (drafter, loaded)]
    if None not in ids and ids[0] != ids[1]:
        raise ValueError(f"The drafter {drafter.path} gives tokens other ids than {loaded.path} does.")


def with_window(replay: DecodingConfig | None, speculative: Speculative | None) -> DecodingConfig | None:
    """The configuration of a cache that verifies the windows of `speculative`.

    Raises ValueError for an eager cache, another window than 1 (the default) or the needed one, and a
    buffer_length below it.
    """
    if speculative is None or (replay is not None and not isinstance(replay, DecodingConfig)):
        return replay
    need = f"draft_tokens={speculative.draft_tokens} needs window={speculative.window}"
    if replay is None or isinstance(replay, EagerConfig):
        raise ValueError(f"{need}, but an eager cache (replay=None) takes one token a step.")
    if replay.window not in (1, speculative.window):
        raise ValueError(f"{need}, but replay has window={replay.window}.")
    if replay.buffer_length < speculative.window:
        raise ValueError(
            f"{need}, and buffer_length must be at least that, but it is {replay.buffer_length}."
        )
    return dataclasses.replace(replay, window=speculative.window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NGramDrafter(Drafter):
    """Proposes what followed the last tokens when they stood in the row's text before (prompt lookup).

    Of the earlier places whose last tokens agree with the text's, the one with the longest agreement counts,
    up to `longest` tokens, and the latest of those. A place fewer tokens back than drafts are wanted is taken
    as the beginning of a repetition. No place, no drafts.
    """

    longest: int = dataclasses.field(default=4, metadata={"static": True})

    def init(self, model, batch, max_length, replay):
        """The text of every row, int32 [B, max_length], token p in column p."""
        return jnp.zeros((batch, max_length), jnp.int32)

    def prefill(self, model, state, tokens, hidden, lengths, position):
        return _written(state, tokens, position, lengths)

    def draft(self, model, state, token, position, prompt, params, count):
        text = _written(state, token[:, None], position, jnp.ones_like(position))
        column = jnp.arange(text.shape[1], dtype=jnp.int32)[None, :]
        agrees = column < position[:, None]
        agreement = jnp.zeros_like(text)
        for back in range(self.longest):
            last = token if back == 0 else at_index(text, jnp.maximum(position - back, 0))
            # Column c of `before` is the token `back` places before c.
            before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, : text.shape[1]]
            agrees &= (before == last[:, None]) & (column >= back)
            agreement += agrees.astype(jnp.int32)
        score = jnp.where(agreement > 0, agreement * text.shape[1] + column, 0)
        best = jnp.argmax(score, axis=1).astype(jnp.int32)
        found = at_index(agreement, best) > 0
        period = jnp.maximum(position - best, 1)[:, None]
        offset = jnp.arange(count, dtype=jnp.int32)[None, :] % period
        drafts = jnp.take_along_axis(text, best[:, None] + 1 + offset, axis=1, mode="clip")
        return Drafts(drafts, None, jnp.where(found, jnp.int32(count), 0)), text

    def commit(self, model, state, tokens, hidden, accepted, position):
        return _written(state, tokens, position, accepted)


def _written(
    text: Int32[Array, "B S"], tokens: Int32[Array, "B N"], position, lengths
) -> Int32[Array, "B S"]:
    """`text` with the first `lengths` of `tokens` from column `position` on; nothing beyond the end."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    column = jnp.where(index < lengths[:, None], position[:, None] + index, text.shape[1])
    rows = jnp.arange(text.shape[0], dtype=jnp.int32)[:, None]
    return text.at[rows, column].set(tokens, mode="drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelState:
    """A smaller model's cache, and each row's last committed token.

    When all drafts stood, the cache lacks the last of them: the model never had to read it.
    """

    cache: Cache
    last: Int32[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Proposes what a smaller hybrid model draws, one token after the other, from a cache of its own.

    Its cache is rolled back by its cursor too: it flushes at the beginning of a round or not at all.
    """

    network: Any

    def init(self, model, batch, max_length, replay):
        if replay is not None and replay.implementation == "pallas":
            # The target's kernels need not serve a smaller model's sizes.
            replay = replace(replay, implementation="auto")
        return ModelState(self.network.init_cache(batch, max_length, replay), jnp.zeros((batch,), jnp.int32))

    def prefill(self, model, state, tokens, hidden, lengths, position):
        lacking = position > state.cache.position
        last, cache = state.last[:, None], state.cache
        fed = jnp.where(
            lacking[:, None],
            jnp.concatenate([last, tokens], axis=1),
            jnp.concatenate([tokens, last], axis=1),
        )
        given = lengths > 0
        count = jnp.where(given, lengths + lacking.astype(jnp.int32), 0)
        _, _, cache = prefill_core(self.network, fed, count, cache)
        newest = at_index(tokens, jnp.maximum(lengths - 1, 0))
        return ModelState(cache, jnp.where(given, newest, state.last))

    def draft(self, model, state, token, position, prompt, params, count):
        cache = _flushing_now_or_not_at_all(state.cache, 1 + count)
        lacking = (position > cache.position).astype(jnp.int32)
        first = jnp.where(lacking > 0, state.last, token)
        logits, _, cache = step_core(self.network, jnp.stack([first, token], axis=1), cache)
        cache = commit_core(cache, 1 + lacking)
        q = jnp.zeros((token.shape[0], count, logits.shape[-1]), jnp.float32)
        draft, q = draw_draft(at_index(logits, lacking), prompt, position + 1, params, q, 0)

        def one_more(carry, place):
            draft, cache, q = carry
            logits, _, cache = step_core(self.network, draft[:, None], cache)
            cache = commit_core(cache, jnp.ones_like(draft))
            draft, q = draw_draft(logits[:, 0], prompt, position + place, params, q, place - 1)
            return (draft, cache, q), draft

        tokens = draft[:, None]
        if count > 1:
            places = jnp.arange(2, 1 + count, dtype=jnp.int32)
            (_, cache, q), later = jax.lax.scan(one_more, (draft, cache, q), places)
            tokens = jnp.concatenate([tokens, later.T], axis=1)
        return Drafts(tokens, q, jnp.full_like(token, count)), replace(state, cache=cache)

    def commit(self, model, state, tokens, hidden, accepted, position):
        cache = state.cache
        end = jnp.minimum(position + accepted, cache.position)
        last = at_index(tokens, jnp.maximum(accepted - 1, 0))
        return ModelState(replace(cache, length=end - cache.start), jnp.where(accepted > 0, last, state.last))

    def select(self, state, rows):
        last = jnp.take(state.last, rows, mode="clip")
        return ModelState(caches.select(state.cache, rows), last)

    def insert(self, state, part, rows):
        last = state.last.at[rows].set(part.last, mode="drop")
        return ModelState(caches.insert(state.cache, part.cache, rows), last)

    def reset(self, state, rows):
        last = state.last.at[rows].set(0, mode="drop")
        return ModelState(caches.reset(state.cache, rows), last)


def _flushing_now_or_not_at_all(cache: Cache, tokens: int) -> Cache:
    """Set `flush_at` so that rows without room for `tokens` more ring entries flush at the next step.

    Entries fed after that are not folded before they are committed for good.
    """
    full = cache.replay.buffer_length
    crowded = cache.length + tokens > full
    return replace(cache, flush_at=jnp.where(crowded, cache.length, jnp.int32(full)))
