"""The device side of generation: a prompt enters a row by chunks, rows then decode several tokens a dispatch.

Everything that changes from call to call (lengths, positions, options, which rows are busy) is traced, so
programs are compiled once for every prefill bucket and once for every number of rows.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.numerics import hash_uint32
from replayssm_jax.cache import Cache, reset, static
from replayssm_jax.config import ReplayConfig
from replayssm_jax.replay import commit_core, prefill_core, step_core, will_flush
from replayssm_jax.sampling import Purpose, SamplingParams, ends_text, sample, token_keys

DISPATCH_TOKENS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatModel:
    """A model as a list of arrays: passing it to a jitted program takes a tenth of the NNX module's time."""

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
class Block:
    """The tokens of one dispatch.

    tokens, logprobs: the first `count` entries of each row are new.
    steps: tokens that the longest row made. flushes: checkpoint rewrites, summed over rows.
    """

    tokens: Int32[Array, "B N"]
    logprobs: Float32[Array, "B N"]
    count: Int32[Array, " B"]
    steps: Int32[Array, ""]
    flushes: Int32[Array, ""]


def _draw(
    rows: Rows, logits: Float[Array, "B V"], position: Int32[Array, " B"], params: SamplingParams
) -> tuple[Rows, Float32[Array, " B"]]:
    """Choose the token at `position` of every active row; returns its log-probabilities too."""
    keys = token_keys(params.seed, rows.prompt, position, Purpose.SAMPLE)
    token, logprob, finite = sample(logits, keys, params)
    finite |= ~rows.active
    remaining = rows.remaining - rows.active.astype(jnp.int32)
    drawn = Rows(
        token=jnp.where(rows.active, token, rows.token),
        active=rows.active & finite & ~ends_text(token, params) & (remaining > 0),
        remaining=remaining,
        prompt=rows.prompt,
        finite=rows.finite & finite,
    )
    return drawn, logprob


@functools.partial(jax.jit, static_argnames=("batch", "max_length", "replay"))
def empty_cache(model: FlatModel, batch: int, max_length: int, replay: ReplayConfig | None) -> Cache:
    """`model.init_cache` as one program instead of one for every buffer."""
    return model.unflatten().init_cache(batch, max_length, replay)


@functools.partial(jax.jit, donate_argnums=0)
def clear_row(
    cache: Cache, prompt: Int32[Array, ""], flush_at: Int32[Array, ""], params: SamplingParams
) -> Cache:
    """Empty a one-row cache for a prompt, with the prompt's own seed and first window."""
    seeds = hash_uint32(params.seed, prompt.astype(jnp.uint32))[None]
    return replace(reset(cache, jnp.zeros((1,), jnp.int32), seeds), flush_at=flush_at[None])


@functools.partial(jax.jit, donate_argnums=3)
def prefill_chunk(
    model: FlatModel, tokens: Int32[Array, "1 S"], lengths: Int32[Array, " 1"], cache: Cache
) -> tuple[Float[Array, "1 V"], Cache]:
    """`prefill` of one chunk of a prompt."""
    logits, _, cache = prefill_core(model.unflatten(), tokens, lengths, cache)
    return logits, cache


@jax.jit
def first_token(
    logits: Float[Array, "1 V"],
    prompt: Int32[Array, ""],
    position: Int32[Array, ""],
    remaining: Int32[Array, ""],
    params: SamplingParams,
) -> tuple[Rows, Float32[Array, " 1"]]:
    """Draw the token at `position` from a prompt's prefill logits; returns a row and the token's logprob.

    remaining: tokens the prompt may draw, this one included.
    """
    yes = jnp.ones((1,), bool)
    row = Rows(
        token=jnp.zeros((1,), jnp.int32),
        active=yes,
        remaining=remaining[None],
        prompt=prompt[None],
        finite=yes,
    )
    return _draw(row, logits, position[None], params)


@functools.partial(jax.jit, donate_argnums=0)
def seat(rows: Rows, one: Rows, row: Int32[Array, ""]) -> Rows:
    """Put one row in the place of row `row`."""
    return jax.tree.map(lambda old, new: old.at[row].set(new[0]), rows, one)


@functools.partial(jax.jit, donate_argnums=(1, 2))
def decode(
    model: FlatModel,
    rows: Rows,
    cache: Cache,
    busy: Bool[Array, " B"],
    limit: Int32[Array, ""],
    least_active: Int32[Array, ""],
    params: SamplingParams,
) -> tuple[Rows, Cache, Block]:
    """Up to `limit` <= 16 steps of every active row, while at least `least_active` rows are active.

    busy: rows that the host still wants; the others become inactive first. A row that is not active feeds its
    last token with accepted 0: neither its cursors nor, in an eager cache, its state move.
    """
    network = model.unflatten()
    batch = rows.token.shape[0]
    block = Block(
        tokens=jnp.zeros((batch, DISPATCH_TOKENS), jnp.int32),
        logprobs=jnp.zeros((batch, DISPATCH_TOKENS), jnp.float32),
        count=jnp.zeros((batch,), jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        flushes=jnp.zeros((), jnp.int32),
    )

    def goes_on(carry):
        rows, _, block = carry
        return (block.steps < limit) & (jnp.sum(rows.active, dtype=jnp.int32) >= least_active)

    def one_token(carry):
        rows, cache, block = carry
        advance = rows.active.astype(jnp.int32)
        flushes = jnp.sum(will_flush(cache, 1), dtype=jnp.int32)
        logits, _, cache = step_core(network, rows.token[:, None], cache, rows.active)
        cache = commit_core(cache, advance)
        rows, logprob = _draw(rows, logits[:, 0], cache.position, params)
        block = Block(
            tokens=jax.lax.dynamic_update_index_in_dim(block.tokens, rows.token, block.steps, axis=1),
            logprobs=jax.lax.dynamic_update_index_in_dim(block.logprobs, logprob, block.steps, axis=1),
            count=block.count + advance,
            steps=block.steps + 1,
            flushes=block.flushes + flushes,
        )
        return rows, cache, block

    rows = replace(rows, active=rows.active & busy)
    return jax.lax.while_loop(goes_on, one_token, (rows, cache, block))
