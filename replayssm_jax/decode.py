"""The device side of generation: prompts enter rows by chunks, rows then decode windows.

A window is a row's newest token and its drafts: one token in plain decoding, whose drafter is `NoDrafts`.
Everything that changes from call to call (lengths, positions, options, which rows are busy, how many drafts
stand) is traced, so programs are compiled once for every prefill bucket and once for every number of rows.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.numerics import hash_uint32
from replayssm_jax.cache import Cache, insert, reset, static
from replayssm_jax.config import DecodingConfig
from replayssm_jax.replay import commit_core, prefill_core, step_core, will_flush
from replayssm_jax.sampling import Purpose, SamplingParams, ends_text, sample, token_keys
from replayssm_jax.speculative import accept, at_index, cut_short, usable

DISPATCH_STEPS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatModel:
    """A model or drafter as a list of arrays, which a program takes in a tenth of the NNX module's time."""

    arrays: list
    structure: Any = static()

    @classmethod
    def of(cls, model: Any) -> "FlatModel":
        """Shares the model's arrays."""
        return cls(*jax.tree.flatten(model))

    def unflatten(self) -> Any:
        """The model again."""
        return jax.tree.unflatten(self.structure, self.arrays)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What decoding knows of each row beside its cache.

    token: the newest token; it is not in the cache yet. active: the row still decodes.
    remaining: tokens it may still draw. prompt: index of its prompt.
    finite: its logits held neither NaN nor +inf so far.
    """

    token: Int32[Array, " B"]
    active: Bool[Array, " B"]
    remaining: Int32[Array, " B"]
    prompt: Int32[Array, " B"]
    finite: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """Counts of one step or more.

    steps: forward passes over all rows. row_steps: rows that decoded, summed over steps. flushes: of these,
    those that rewrote the row's checkpoint. entries: committed ring entries read, summed over row steps.
    drafted, accepted: drafts that were verified, and those of them that were returned.
    """

    steps: Int32[Array, ""]
    row_steps: Int32[Array, ""]
    flushes: Int32[Array, ""]
    entries: Int32[Array, ""]
    drafted: Int32[Array, ""]
    accepted: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """A verified window of T tokens a row that is not committed yet.

    tokens, logprobs: the first `count` (0..T) entries of each row are new; a row that is not active has none.
    finite: the logits behind a row's new tokens held neither NaN nor +inf.
    inputs, hidden, position: what was fed, the hidden states there, and the committed tokens before.
    """

    tokens: Int32[Array, "B T"]
    logprobs: Float32[Array, "B T"]
    count: Int32[Array, " B"]
    finite: Bool[Array, " B"]
    tally: Tally
    inputs: Int32[Array, "B T"]
    hidden: Float[Array, "B T H"]
    position: Int32[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """The tokens of one dispatch: the first `count` entries of each row are new."""

    tokens: Int32[Array, "B N"]
    logprobs: Float32[Array, "B N"]
    count: Int32[Array, " B"]
    tally: Tally


@functools.partial(jax.jit, static_argnames=("batch", "max_length", "replay"))
def empty_cache(model: FlatModel, batch: int, max_length: int, replay: DecodingConfig | None) -> Cache:
    """`model.init_cache` as one program instead of one for every buffer."""
    return model.unflatten().init_cache(batch, max_length, replay)


@functools.partial(jax.jit, static_argnames=("batch", "max_length", "replay"))
def empty_state(
    model: FlatModel, drafter: FlatModel, batch: int, max_length: int, replay: DecodingConfig | None
) -> Any:
    """A drafter's state of empty rows."""
    return drafter.unflatten().init(model.unflatten(), batch, max_length, replay)


@jax.jit
def select_state(drafter: FlatModel, state: Any, rows: Int32[Array, " n"]) -> Any:
    """A drafter's state of the given rows."""
    return drafter.unflatten().select(state, rows)


@functools.partial(jax.jit, donate_argnums=(1, 2))
def insert_rows(
    drafter: FlatModel,
    cache: Cache,
    state: Any,
    part: Cache,
    part_state: Any,
    rows: Int32[Array, " n"],
) -> tuple[Cache, Any]:
    """A cache and drafter's state with those of a part in place of `rows`; indices beyond are dropped."""
    return insert(cache, part, rows), drafter.unflatten().insert(state, part_state, rows)


@functools.partial(jax.jit, donate_argnums=(1, 2))
def clear_rows(
    drafter: FlatModel,
    cache: Cache,
    state: Any,
    prompts: Int32[Array, " n"],
    flush_at: Int32[Array, " n"],
    params: SamplingParams,
) -> tuple[Cache, Any]:
    """Empty a cache and drafter's state of n rows for as many prompts, with their seeds and first windows."""
    rows = jnp.arange(prompts.shape[0], dtype=jnp.int32)
    seeds = hash_uint32(params.seed, prompts.astype(jnp.uint32))
    cache = replace(reset(cache, rows, seeds), flush_at=flush_at)
    return cache, drafter.unflatten().reset(state, rows)


@functools.partial(jax.jit, donate_argnums=(4, 5))
def prefill_chunk(
    model: FlatModel,
    drafter: FlatModel,
    tokens: Int32[Array, "n S"],
    lengths: Int32[Array, " n"],
    cache: Cache,
    state: Any,
) -> tuple[Float[Array, "n V"], Cache, Any]:
    """`prefill` of one chunk of n prompts, by the model and by the drafter."""
    network, position = model.unflatten(), cache.position
    logits, hidden, cache = prefill_core(network, tokens, lengths, cache)
    state = drafter.unflatten().prefill(network, state, tokens, hidden, lengths, position)
    return logits, cache, state


@jax.jit
def first_tokens(
    logits: Float[Array, "n V"],
    prompts: Int32[Array, " n"],
    position: Int32[Array, " n"],
    remaining: Int32[Array, ""],
    params: SamplingParams,
) -> tuple[Rows, Float32[Array, " n"]]:
    """Draw the tokens at `position` from prompts' prefill logits; returns rows and the tokens' logprobs.

    remaining: tokens a prompt may draw, this one included.
    """
    yes = jnp.ones(prompts.shape, bool)
    rows = Rows(
        token=jnp.zeros_like(prompts),
        active=yes,
        remaining=jnp.broadcast_to(remaining, prompts.shape),
        prompt=prompts,
        finite=yes,
    )
    keys = token_keys(params.seed, prompts, position, Purpose.SAMPLE)
    token, logprob, finite = sample(logits, keys, params)
    return _moved_on(rows, token, jnp.ones_like(prompts), finite, params), logprob


def _moved_on(
    rows: Rows,
    token: Int32[Array, " B"],
    count: Int32[Array, " B"],
    finite: Bool[Array, " B"],
    params: SamplingParams,
) -> Rows:
    """Rows after `count` further tokens each, the last of which is `token`."""
    token = jnp.where(count > 0, token, rows.token)
    remaining = rows.remaining - count
    return Rows(
        token=token,
        active=rows.active & finite & ~ends_text(token, params) & (remaining > 0),
        remaining=remaining,
        prompt=rows.prompt,
        finite=rows.finite & finite,
    )


@functools.partial(jax.jit, donate_argnums=0)
def seat(rows: Rows, new: Rows, places: Int32[Array, " n"]) -> Rows:
    """Put n rows in the given places; indices beyond the last are dropped."""
    return jax.tree.map(lambda old, one: old.at[places].set(one, mode="drop"), rows, new)


def _verify(
    network: Any, drafter: Any, rows: Rows, cache: Cache, state: Any, params: SamplingParams, drafts: int
) -> tuple[Cache, Any, Window]:
    """Draft, feed the window, and decide what each active row gets; nothing is committed.

    A row that is not active feeds its last token: neither its cursors nor, in an eager cache, its state move.
    """
    position = cache.position
    with jax.named_scope("drafts"):
        proposed, state = drafter.draft(network, state, rows.token, position, rows.prompt, params, drafts)
    proposed = usable(proposed, params.vocab_size)
    # The token after the drafts needs room in the budget too.
    count = jnp.where(rows.active, jnp.clip(rows.remaining - 1, 0, proposed.count), 0)
    proposed = replace(proposed, count=count)
    inputs = jnp.concatenate([rows.token[:, None], proposed.tokens], axis=1)
    flushes = rows.active & will_flush(cache, 1 + drafts)
    logits, hidden, cache = step_core(network, inputs, cache, rows.active)
    with jax.named_scope("sampling"):
        verdict = accept(logits, proposed, rows.prompt, position, params)
    count = jnp.where(rows.active, cut_short(verdict.tokens, verdict.count, rows.remaining, params), 0)
    index = jnp.arange(1 + drafts, dtype=jnp.int32)[None, :]

    def total(values):
        return jnp.sum(values, dtype=jnp.int32)

    window = Window(
        tokens=verdict.tokens,
        logprobs=verdict.logprobs,
        count=count,
        finite=jnp.all(verdict.finite | (index >= count[:, None]), axis=1),
        tally=Tally(
            steps=jnp.ones((), jnp.int32),
            row_steps=total(rows.active),
            flushes=total(flushes),
            entries=total(jnp.where(rows.active, cache.length, 0)),
            drafted=total(proposed.count),
            accepted=total(jnp.minimum(count, verdict.count - 1)),
        ),
        inputs=inputs,
        hidden=hidden,
        position=position,
    )
    return cache, state, window


def _settle(
    network: Any,
    drafter: Any,
    rows: Rows,
    cache: Cache,
    state: Any,
    window: Window,
    count: Int32[Array, " B"],
    params: SamplingParams,
) -> tuple[Rows, Cache, Any]:
    """Keep the first `count` <= window.count new tokens of each row: as many inputs are committed."""
    cache = commit_core(cache, count)
    state = drafter.commit(network, state, window.inputs, window.hidden, count, window.position)
    last = at_index(window.tokens, jnp.maximum(count - 1, 0))
    return _moved_on(rows, last, count, window.finite, params), cache, state


@functools.partial(jax.jit, donate_argnums=(2, 3, 4), static_argnames="drafts")
def decode(
    model: FlatModel,
    drafter: FlatModel,
    rows: Rows,
    cache: Cache,
    state: Any,
    busy: Bool[Array, " B"],
    limit: Int32[Array, ""],
    least_active: Int32[Array, ""],
    params: SamplingParams,
    drafts: int,
) -> tuple[Rows, Cache, Any, Block]:
    """Up to `limit` <= 16 windows of every active row, while at least `least_active` rows are active.

    busy: rows that the host still wants; the others become inactive first. state: the drafter's.
    drafts: proposed a window.
    """
    network, proposer = model.unflatten(), drafter.unflatten()
    batch, width = rows.token.shape[0], DISPATCH_STEPS * (1 + drafts)
    zero = jnp.zeros((), jnp.int32)
    block = Block(
        tokens=jnp.zeros((batch, width), jnp.int32),
        logprobs=jnp.zeros((batch, width), jnp.float32),
        count=jnp.zeros((batch,), jnp.int32),
        tally=Tally(zero, zero, zero, zero, zero, zero),
    )
    index = jnp.arange(1 + drafts, dtype=jnp.int32)[None, :]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def goes_on(carry):
        rows, _, _, block = carry
        return (block.tally.steps < limit) & (jnp.sum(rows.active, dtype=jnp.int32) >= least_active)

    def one_window(carry):
        rows, cache, state, block = carry
        cache, state, window = _verify(network, proposer, rows, cache, state, params, drafts)
        rows, cache, state = _settle(network, proposer, rows, cache, state, window, window.count, params)
        column = jnp.where(index < window.count[:, None], block.count[:, None] + index, width)
        block = Block(
            tokens=block.tokens.at[row, column].set(window.tokens, mode="drop"),
            logprobs=block.logprobs.at[row, column].set(window.logprobs, mode="drop"),
            count=block.count + window.count,
            tally=jax.tree.map(jnp.add, block.tally, window.tally),
        )
        return rows, cache, state, block

    rows = replace(rows, active=rows.active & busy)
    return jax.lax.while_loop(goes_on, one_window, (rows, cache, state, block))


@functools.partial(jax.jit, donate_argnums=(2, 3, 4), static_argnames="drafts")
def verify(
    model: FlatModel,
    drafter: FlatModel,
    rows: Rows,
    cache: Cache,
    state: Any,
    busy: Bool[Array, " B"],
    params: SamplingParams,
    drafts: int,
) -> tuple[Rows, Cache, Any, Window]:
    """The first half of one window of `decode`, for a host that decides how much of it is kept."""
    rows = replace(rows, active=rows.active & busy)
    cache, state, window = _verify(model.unflatten(), drafter.unflatten(), rows, cache, state, params, drafts)
    return rows, cache, state, window


@functools.partial(jax.jit, donate_argnums=(2, 3, 4))
def settle(
    model: FlatModel,
    drafter: FlatModel,
    rows: Rows,
    cache: Cache,
    state: Any,
    window: Window,
    count: Int32[Array, " B"],
    params: SamplingParams,
) -> tuple[Rows, Cache, Any]:
    """The second half: keep the first `count` <= window.count new tokens of each row."""
    return _settle(model.unflatten(), drafter.unflatten(), rows, cache, state, window, count, params)
