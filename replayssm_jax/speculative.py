"""Speculative decoding: what a drafter is, and which of its drafts a verified window keeps.

A step feeds a row's newest token and D drafts as one window of T = 1 + D tokens. The target's logits after
token i of the window judge draft i + 1. The window keeps the drafts up to the first one that is refused, and
one further token is drawn after those: 1 to T tokens a step, distributed as if drafting had never happened
(Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1). Inputs that
were not kept are forgotten by `commit`, which does not move the cursors over them.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from replayssm_jax.config import DecodingConfig
from replayssm_jax.sampling import (
    Purpose,
    SamplingParams,
    Survey,
    draw,
    least_kept,
    scores,
    survey,
    token_keys,
    warped,
    within_vocabulary,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """Tokens that a drafter proposes for the positions after each row's newest token.

    tokens: the first `count` (0..D) of each row are proposals, up to the first that is no id of the
    vocabulary; the rest are ignored.
    probabilities: of the whole vocabulary at each draft, filtered as the target's: what the draft was drawn
    from. None when the drafter is deterministic.
    """

    tokens: Int32[Array, "B D"]
    probabilities: Float32[Array, "B D V"] | None
    count: Int32[Array, " B"]


class Drafter:
    """What proposes tokens; a registered pytree (its weights are leaves) of pure functions.

    `state` is a pytree whose leaves have rows first, made by `init`; it is passed in, returned and donated.
    `model` is the target. `position` counts a row's committed tokens, as `Cache.position` does; the newest
    token is not committed and has that position. Entries of the state that belong to positions from there on
    are scratch, so rolling back is ignoring them.
    """

    def init(self, model: Any, batch: int, max_length: int, replay: DecodingConfig | None) -> Any:
        """State of `batch` empty rows that can hold `max_length` tokens; drafts are replay.window - 1."""
        return ()

    def prefill(
        self,
        model: Any,
        state: Any,
        tokens: Int32[Array, "B S"],
        hidden: Float[Array, "B S H"],
        lengths: Int32[Array, " B"],
        position: Int32[Array, " B"],
    ) -> Any:
        """Take a chunk of prompt: `lengths` tokens from `position` on, with the target's hidden states there.

        hidden: after the final norm. A row with length 0 keeps its state.
        """
        return state

    def draft(
        self,
        model: Any,
        state: Any,
        token: Int32[Array, " B"],
        position: Int32[Array, " B"],
        prompt: Int32[Array, " B"],
        params: SamplingParams,
        count: int,
    ) -> tuple[Drafts, Any]:
        """Propose `count` tokens after each row's newest `token`; draft i gets position + 1 + i.

        prompt: index of each row's prompt, for `draw_drafts`.
        """
        raise NotImplementedError

    def commit(
        self,
        model: Any,
        state: Any,
        tokens: Int32[Array, "B T"],
        hidden: Float[Array, "B T H"],
        accepted: Int32[Array, " B"],
        position: Int32[Array, " B"],
    ) -> Any:
        """The target verified a window of T tokens from `position` on and keeps the first `accepted` (0..T).

        position: before the window. With accepted 0 the row's state stands for the same text as before.
        """
        return state

    def select(self, state: Any, rows: Int32[Array, " n"]) -> Any:
        """A state of the given rows."""
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), state)

    def insert(self, state: Any, part: Any, rows: Int32[Array, " n"]) -> Any:
        """`state` with the rows of `part` in place of `rows`; indices >= B are dropped."""
        return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), state, part)

    def reset(self, state: Any, rows: Int32[Array, " n"]) -> Any:
        """`state` with `rows` empty; indices >= B are dropped."""
        return jax.tree.map(lambda leaf: leaf.at[rows].set(jnp.zeros((), leaf.dtype), mode="drop"), state)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoDrafts(Drafter):
    """Proposes nothing: windows of one token, plain decoding."""

    def draft(self, model, state, token, position, prompt, params, count):
        none = jnp.zeros((token.shape[0], count), jnp.int32)
        return Drafts(none, None, jnp.zeros_like(token)), state


def draw_drafts(
    logits: Float[Array, "B V"],
    prompt: Int32[Array, " B"],
    position: Int32[Array, " B"],
    params: SamplingParams,
) -> tuple[Int32[Array, " B"], Float32[Array, "B V"]]:
    """Draw each row's draft for `position` from a drafter's raw logits.

    Returns the tokens and the probabilities that they were drawn from, by the target's own filters; at
    temperature 0, where nobody reads them, zeros.
    """
    empty = jnp.zeros((logits.shape[0], 1, logits.shape[1]), jnp.float32)
    tokens, probabilities = draw_draft(logits, prompt, position, params, empty, 0)
    return tokens, probabilities[:, 0]


def draw_draft(
    logits: Float[Array, "B V"],
    prompt: Int32[Array, " B"],
    position: Int32[Array, " B"],
    params: SamplingParams,
    probabilities: Float32[Array, "B D V"],
    index: int | Int32[Array, ""],
) -> tuple[Int32[Array, " B"], Float32[Array, "B D V"]]:
    """`draw_drafts` of draft `index`, whose probabilities are written into those of the window."""
    known = survey(logits, params)

    def by_chance(logits, known, probabilities):
        filtered = warped(logits, params, known.largest)
        keys = token_keys(params.seed, prompt, position, Purpose.DRAFT)
        chances = jax.nn.softmax(filtered, axis=-1)[:, None]
        written = jax.lax.dynamic_update_slice_in_dim(probabilities, chances, index, axis=1)
        return draw(filtered, keys), written

    def greedily(logits, known, probabilities):
        return known.best, probabilities

    return jax.lax.cond(params.temperature > 0, by_chance, greedily, logits, known, probabilities)


def usable(drafts: Drafts, vocab_size: Int32[Array, ""]) -> Drafts:
    """The drafts before the first that is no token of the vocabulary: the target must not read that one.

    A drafter's mistake then costs its window and not the text.
    """
    known = (drafts.tokens >= 0) & (drafts.tokens < vocab_size)
    return replace(drafts, tokens=jnp.where(known, drafts.tokens, 0), count=_leading(known, drafts))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What a verified window yields.

    tokens: the first `count` (1..T) of each row: the drafts kept, then one token drawn after them.
    logprobs: log-softmax of the raw target logits at `tokens`.
    finite: the logits that decided about each of `tokens` held neither NaN nor +inf.
    """

    tokens: Int32[Array, "B T"]
    logprobs: Float32[Array, "B T"]
    count: Int32[Array, " B"]
    finite: Bool[Array, "B T"]


def accept(
    logits: Float[Array, "B T V"],
    drafts: Drafts,
    prompt: Int32[Array, " B"],
    position: Int32[Array, " B"],
    params: SamplingParams,
) -> Verdict:
    """Decide which drafts of a window of T = 1 + D tokens stand, and draw the token after them.

    logits: raw, of the target after each token of the window. drafts: `usable` ones. prompt: index of each
    row's prompt. position: of the window's first token. Greedy (temperature 0): a draft stands when it is the
    best token. Otherwise draft d, drawn from q, stands with probability min(1, p(d) / q(d)), p being the
    target's filtered distribution; after a refusal the token is drawn from `residual(p, q)`, after none from
    p. A row without drafts draws what plain decoding draws, from the same random numbers.
    """
    known = survey(logits, params)
    kept, last = jax.lax.cond(
        params.temperature > 0, _by_chance, _greedily, logits, known, drafts, prompt, position, params
    )
    index = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    # The token drawn stands in the rest of the window too, where it is ignored.
    proposed = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(index < kept[:, None], proposed, last[:, None])
    return Verdict(tokens, known.log_probabilities(logits, tokens), kept + 1, known.finite)


def residual(p: Float32[Array, "B V"], q: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Unnormalised distribution of the token after a refused draft: max(p - q, 0)."""
    left = jnp.maximum(p - q, 0)
    # Where p equals q nothing can be refused, but for the rounding of p / q.
    return jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p)


def _leading(stands: Bool[Array, "B D"], drafts: Drafts) -> Int32[Array, " B"]:
    """How many of each row's drafts stand before the first that does not."""
    index = jnp.arange(stands.shape[1], dtype=jnp.int32)[None, :]
    stands = stands & (index < drafts.count[:, None])
    return jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def at_index(values: Array, index: Int32[Array, " B"]) -> Array:
    """values[b, index[b]] of every row b."""
    index = index.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _greedily(logits, known: Survey, drafts: Drafts, prompt, position, params):
    kept = _leading(drafts.tokens == known.best[:, :-1], drafts)
    return kept, at_index(known.best, kept)


def _by_chance(logits, known: Survey, drafts: Drafts, prompt, position, params):
    rows, window, vocab = logits.shape
    least = least_kept(logits, known.largest, params)
    kept = jnp.zeros_like(position)
    if window > 1:
        chance, p = _chances(logits, known, least, drafts, prompt, position, params)
        kept = _leading(chance < p, drafts)
    # One column a row from here on: that of the token to be drawn.
    filtered = warped(at_index(logits, kept), params, at_index(known.largest, kept), at_index(least, kept))
    refused = kept < drafts.count
    if window > 1:
        place = jnp.minimum(kept, window - 2)
        if drafts.probabilities is None:
            q = jax.nn.one_hot(at_index(drafts.tokens, place), vocab, dtype=jnp.float32)
        else:
            q = at_index(drafts.probabilities, place)
        left = jnp.log(residual(jax.nn.softmax(filtered, axis=-1), q))
        filtered = jnp.where(refused[:, None], left, filtered)
    purpose = jnp.where(refused, jnp.int32(Purpose.RESIDUAL), jnp.int32(Purpose.SAMPLE))
    return kept, draw(filtered, token_keys(params.seed, prompt, position + kept + 1, purpose))


def _chances(
    logits, known: Survey, least: Float32[Array, "B T"], drafts: Drafts, prompt, position, params
) -> tuple[Float32[Array, "B D"], Float32[Array, "B D"]]:
    """A uniform number times q, and p, of every draft: it stands where the first is less."""
    count = drafts.tokens.shape[1]
    largest, least = known.largest[:, :count, None], least[:, :count, None]
    judged = within_vocabulary(logits[:, :count], params.vocab_size)
    # The largest score is 0, so nothing overflows.
    total = jnp.sum(jnp.exp(scores(judged, largest, least, params)), axis=-1)
    drafted = jnp.take_along_axis(judged, drafts.tokens[..., None], axis=-1)
    p = jnp.exp(scores(drafted, largest, least, params)[..., 0]) / total
    place = position[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)[None, :]
    keys = token_keys(params.seed, jnp.repeat(prompt, count), place.reshape(-1), Purpose.ACCEPT)
    chance = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys).reshape(place.shape)
    if drafts.probabilities is not None:
        chance *= jnp.take_along_axis(drafts.probabilities, drafts.tokens[..., None], axis=-1)[..., 0]
    return chance, p


def cut_short(
    tokens: Int32[Array, "B T"],
    count: Int32[Array, " B"],
    remaining: Int32[Array, " B"],
    params: SamplingParams,
) -> Int32[Array, " B"]:
    """How many of a window's first `count` tokens a row may return.

    remaining: tokens the row may still return. The first stop id is returned, nothing after it.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    stops = jnp.any(tokens[:, :, None] == params.stop_ids[None, None, :], axis=-1)
    until_stop = jnp.min(jnp.where(stops, index + 1, tokens.shape[1]), axis=1)
    return jnp.minimum(jnp.minimum(count, remaining), until_stop)
