"""Choosing tokens: sampling options, the filters they stand for, and one random key a token.

Filters apply in the order of the transformers library: temperature, top-k, top-p, min-p. All options are
traced, so changing them compiles nothing. A token's key depends on (seed, prompt index, absolute position,
purpose) alone, so neither batch mates, nor the row a prompt sits in, nor how a run was cut into calls changes
what is drawn.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, UInt32

SEED_LIMIT = 2**32


class Purpose(IntEnum):
    """What a random number is for; draws for different purposes are independent."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when a text ends.

    max_new_tokens: tokens returned for a prompt at most, the stop id included.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 or None keeps all. Ties with the k-th are kept.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 or None keeps all.
    min_p: keep tokens at least min_p times as likely as the most likely one; 0 or None keeps all.
    seed: 0..2**32 - 1.
    stop_ids: tokens that end a text; None means the checkpoint's, () none at all.
    stop_strings: texts that end a text; they may span tokens.
    vocab_size: ids at or beyond it are never chosen; None means the tokenizer's length, or the checkpoint's
        vocabulary where there is no tokenizer.

    Raises ValueError naming the option that is out of range.
    """

    max_new_tokens: int = 128
    temperature: float | int = 0.0
    top_k: int | None = 0
    top_p: float | int | None = 1.0
    min_p: float | int | None = 0.0
    seed: int = 0
    stop_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()
    vocab_size: int | None = None

    def __post_init__(self):
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, off)
        for name, (kind, holds, wanted) in _RULES.items():
            value = getattr(self, name)
            if not kind(value) or not holds(value):
                raise ValueError(f"{name} must be {wanted}, got {value!r}.")
        object.__setattr__(self, "stop_ids", _stop_ids(self.stop_ids))
        object.__setattr__(self, "stop_strings", _stop_strings(self.stop_strings))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_size_or_none(value: Any) -> bool:
    return value is None or _is_integer(value)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float | np.floating) and math.isfinite(value))


_RULES: dict[str, tuple[Callable, Callable, str]] = {
    "max_new_tokens": (_is_integer, lambda n: n >= 1, "an integer of at least 1"),
    "temperature": (_is_number, lambda t: t >= 0, "0 (greedy) or a positive number"),
    "top_k": (_is_integer, lambda k: 0 <= k < 2**31, "an integer of at least 1, or 0 for all"),
    "top_p": (_is_number, lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "min_p": (_is_number, lambda p: 0 <= p <= 1, "between 0 and 1"),
    "seed": (_is_integer, lambda s: 0 <= s < SEED_LIMIT, "an integer from 0 to 2**32 - 1"),
    "vocab_size": (_is_size_or_none, lambda n: n is None or n >= 1, "an integer of at least 1, or None"),
}


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _stop_ids(ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not _is_list(ids) or not all(_is_integer(i) and 0 <= i < 2**31 for i in ids):
        raise ValueError(f"stop_ids must be token ids from 0 up, or None for the checkpoint's, got {ids!r}.")
    return tuple(int(i) for i in ids)


def _stop_strings(strings: Any) -> tuple[str, ...]:
    if not _is_list(strings) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop_strings must be a list of texts that are not empty, got {strings!r}.")
    return tuple(strings)


DEFAULT_SAMPLING = Sampling()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """`Sampling` on the device: traced, so that changing an option compiles nothing.

    stop_ids: padded with -1 to a power of two of at least 8.
    """

    temperature: Float32[Array, ""]
    top_k: Int32[Array, ""]
    top_p: Float32[Array, ""]
    min_p: Float32[Array, ""]
    seed: UInt32[Array, ""]
    vocab_size: Int32[Array, ""]
    stop_ids: Int32[Array, " N"]


def sampling_params(sampling: Sampling, vocab_size: int, stop_ids: Sequence[int]) -> SamplingParams:
    """Put the options on the device, with the vocabulary and the stop ids they resolve to."""
    width = max(8, 1 << (len(stop_ids) - 1).bit_length()) if stop_ids else 8
    padded = np.full(width, -1, np.int32)
    padded[: len(stop_ids)] = stop_ids
    return SamplingParams(
        temperature=jnp.asarray(np.float32(sampling.temperature)),
        top_k=jnp.asarray(np.int32(sampling.top_k or 0)),
        top_p=jnp.asarray(np.float32(sampling.top_p)),
        min_p=jnp.asarray(np.float32(sampling.min_p)),
        seed=jnp.asarray(np.uint32(sampling.seed)),
        vocab_size=jnp.asarray(np.int32(vocab_size)),
        stop_ids=jnp.asarray(padded),
    )


def token_keys(
    seed: UInt32[Array, ""],
    prompt: Int32[Array, " B"],
    position: Int32[Array, " B"],
    purpose: int | Int32[Array, " B"],
) -> Key[Array, " B"]:
    """The key of the token at each row's `position`, for one `Purpose` or a row's own.

    prompt: index of each row's prompt in the call. position: tokens before the one to be drawn, prompt
    included.
    """

    def key(*words):
        key = jax.random.key(seed, impl="threefry2x32")
        for word in words:
            key = jax.random.fold_in(key, word)
        return key

    purpose = jnp.broadcast_to(jnp.asarray(purpose, jnp.int32), prompt.shape)
    return jax.vmap(key)(prompt, position, purpose)


def within_vocabulary(logits: Float[Array, "*B V"], vocab_size: Int32[Array, ""]) -> Float32[Array, "*B V"]:
    """Logits in float32 with -inf at ids from `vocab_size` on."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(ids < vocab_size, logits.astype(jnp.float32), -jnp.inf)


def filtered_logits(logits: Float[Array, "*B V"], params: SamplingParams) -> Float32[Array, "*B V"]:
    """Unnormalised log-probabilities of the distribution that tokens are drawn from.

    logits: raw, any float dtype. Tokens that are never chosen get -inf; at temperature 0 all but the most
    likely one do. `softmax` of the result is the p (or q) that speculative sampling compares.
    """
    return jax.lax.cond(params.temperature > 0, warped, _only_the_best, logits, params)


def filtered_probabilities(logits: Float[Array, "*B V"], params: SamplingParams) -> Float32[Array, "*B V"]:
    """Probabilities of the distribution that tokens are drawn from; see `filtered_logits`."""
    return jax.nn.softmax(filtered_logits(logits, params), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Survey:
    """What one reading of raw logits over the vocabulary tells.

    best: the first id with the largest logit; some id where a logit is NaN. largest: that logit, NaN where
    one is. total: log of the summed exponentials.
    """

    best: Int32[Array, "*B"]
    largest: Float32[Array, "*B"]
    total: Float32[Array, "*B"]

    @property
    def finite(self) -> Bool[Array, "*B"]:
        """The logits held neither NaN nor +inf."""
        return jnp.isfinite(self.largest)

    def log_probabilities(
        self, logits: Float[Array, "*B V"], tokens: Int32[Array, "*B"]
    ) -> Float32[Array, "*B"]:
        """Log-softmax at `tokens` of the logits that were read; tokens lie inside the vocabulary."""
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return chosen.astype(jnp.float32) - self.total


def survey(logits: Float[Array, "*B V"], params: SamplingParams) -> Survey:
    """Best token, largest logit and log of the summed exponentials of raw logits within the vocabulary."""
    found = jax.lax.platform_dependent(logits, params.vocab_size, cpu=_by_passes, default=_in_one_pass)
    return Survey(*found)


def _by_passes(logits: Float[Array, "*B V"], vocab_size: Int32[Array, ""]) -> tuple:
    """A CPU vectorises reductions of one value, and no others."""
    allowed = within_vocabulary(logits, vocab_size)
    return most_likely(allowed), jnp.max(allowed, axis=-1), jax.nn.logsumexp(allowed, axis=-1)


def _in_one_pass(logits: Float[Array, "*B V"], vocab_size: Int32[Array, ""]) -> tuple:
    """A GPU waits for the logits, half a gigabyte of them in a step of 1,024 tokens."""
    allowed = within_vocabulary(logits, vocab_size)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)

    def merged(one: tuple, other: tuple) -> tuple:
        (largest, total, best), (largest_2, total_2, best_2) = one, other
        same = largest == largest_2
        # The distance of two infinite logits is no number, and a NaN wins.
        smaller = jnp.exp(jnp.where(same, jnp.float32(0), -jnp.abs(largest - largest_2)))
        first = (largest > largest_2) | (largest != largest) | (same & (best < best_2))
        summed = jnp.where(first, total + smaller * total_2, total_2 + smaller * total)
        return jnp.where(first, largest, largest_2), summed, jnp.where(first, best, best_2)

    nothing = jnp.float32(-jnp.inf), jnp.float32(0), jnp.int32(logits.shape[-1] - 1)
    operands = allowed, jnp.ones_like(allowed), ids
    largest, total, best = jax.lax.reduce(operands, nothing, merged, (logits.ndim - 1,))
    return best, largest, largest + jnp.log(total)


def most_likely(logits: Float32[Array, "*B V"]) -> Int32[Array, "*B"]:
    """The first id with the largest logit; some id where a logit is NaN."""
    # As two reductions that a CPU vectorises: XLA's argmax takes six times as long for several rows.
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    last = logits.shape[-1] - 1
    return jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), ids, last), axis=-1)


def _only_the_best(logits: Float[Array, "*B V"], params: SamplingParams) -> Float32[Array, "*B V"]:
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    best = survey(logits, params).best[..., None]
    return jnp.where(ids == best, jnp.float32(0), -jnp.inf)


def warped(
    logits: Float[Array, "*B V"],
    params: SamplingParams,
    largest: Float32[Array, "*B"] | None = None,
    least: Float32[Array, "*B"] | None = None,
) -> Float32[Array, "*B V"]:
    """`filtered_logits` at a temperature above 0; the largest result is 0.

    logits: raw. largest: as in `survey`; least: from `least_kept`; found here where they are None.
    """
    allowed = within_vocabulary(logits, params.vocab_size)
    largest = jnp.max(allowed, axis=-1) if largest is None else largest
    least = least_kept(logits, largest, params) if least is None else least
    return scores(allowed, largest[..., None], least[..., None], params)


def scores(
    allowed: Float32[Array, "*#B"],
    largest: Float32[Array, "*#B"],
    least: Float32[Array, "*#B"],
    params: SamplingParams,
) -> Float32[Array, "*B"]:
    """`warped` of single logits `within_vocabulary`, given the largest one and the smallest one kept."""
    tempered = _tempered(allowed, largest, params)
    # Probabilities relative to the best token are exp(tempered), whatever the two other filters removed.
    return jnp.where((allowed >= least) & (tempered >= jnp.log(params.min_p)), tempered, -jnp.inf)


def _tempered(allowed: Float32[Array, "*#B"], largest: Float32[Array, "*#B"], params: SamplingParams):
    # The largest logit is subtracted first: no temperature, however small, then overflows.
    return (allowed - largest) / jnp.maximum(params.temperature, jnp.finfo(jnp.float32).tiny)


def least_kept(
    logits: Float[Array, "*B V"], largest: Float32[Array, "*B"], params: SamplingParams
) -> Float32[Array, "*B"]:
    """The smallest raw logit that top-k and then top-p keep; -inf where both are off.

    largest: as in `survey`. Of windows [B, T, V] one sorted column is alive.
    """

    def all_kept(logits, largest, params):
        return jnp.full_like(largest, -jnp.inf)

    def by_column(logits, largest, params):
        def column(index):
            of = functools.partial(jax.lax.dynamic_index_in_dim, index=index, axis=1, keepdims=False)
            return _top_k_top_p(of(logits), of(largest), params)

        return jax.lax.map(column, jnp.arange(logits.shape[1], dtype=jnp.int32)).T

    restricted = (params.top_k > 0) | (params.top_p < 1)
    kept = by_column if logits.ndim == 3 else _top_k_top_p
    return jax.lax.cond(restricted, kept, all_kept, logits, largest, params)


def _top_k_top_p(logits: Float[Array, "*B V"], largest: Float32[Array, "*B"], params: SamplingParams):
    size = logits.shape[-1]
    # Equal logits need no order among them; a stable sort would carry their places along.
    descending = -jnp.sort(-within_vocabulary(logits, params.vocab_size), axis=-1, stable=False)
    rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    last = jnp.clip(jnp.where(params.top_k > 0, params.top_k, size), 1, size) - 1
    kept = descending >= jax.lax.dynamic_slice_in_dim(descending, last, 1, axis=-1)
    tempered = _tempered(descending, largest[..., None], params)
    probabilities = jax.nn.softmax(jnp.where(kept, tempered, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept &= (mass_before < params.top_p) | (params.top_p >= 1) | (rank == 0)
    return jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1)


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], params: SamplingParams
) -> tuple[Int32[Array, " B"], Float32[Array, " B"], Bool[Array, " B"]]:
    """Choose one token a row with the row's own key.

    logits: raw. Returns the tokens; their log-probabilities, which are the log-softmax of the *raw* logits
    over the vocabulary, before temperature and filters; and whether a row's logits held no NaN and no +inf
    (where they did, its token and log-probability mean nothing).
    """
    known = survey(logits, params)

    def by_chance(logits, known):
        return draw(warped(logits, params, known.largest), keys)

    tokens = jax.lax.cond(params.temperature > 0, by_chance, lambda _, known: known.best, logits, known)
    return tokens, known.log_probabilities(logits, tokens), known.finite


def draw(scores: Float32[Array, "B V"], keys: Key[Array, " B"]) -> Int32[Array, " B"]:
    """One token a row from unnormalised log-probabilities, by the Gumbel-max rule."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[-1:], jnp.float32))(keys)
    return jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)


def log_probabilities(logits: Float32[Array, "*B V"], tokens: Int32[Array, "*B"]) -> Float32[Array, "*B"]:
    """Log-softmax of `logits` at `tokens`."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def ends_text(tokens: Int32[Array, " B"], params: SamplingParams) -> Bool[Array, " B"]:
    """True where a token is a stop id."""
    return jnp.any(tokens[:, None] == params.stop_ids[None, :], axis=-1)
