"""One step, one commit: how tokens pass through a cache of checkpoints and rings.

`prefill`, `step` and `commit` are jitted and donate the cache. The `*_core` functions are the same operations
to be used inside other jitted programs. Inside a model, a `Segment` tells every layer which tokens it gets,
and `recur` runs a recurrence on a layer's buffers.
"""

import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32, UInt32

from replayssm_jax.backend import constants_of, kernel_step, row_plan, stored_kernel_step
from replayssm_jax.cache import Cache, RecurrentLayer, check_usable, static
from replayssm_jax.config import EagerConfig, ReplayConfig
from replayssm_jax.flush import flush, folded, kernel_words, read_source, rewrite
from replayssm_jax.forgotten import forgotten, heard, prefilled, without
from replayssm_jax.precision import decode, format_of
from replayssm_jax.sharding import in_place, split_recurrence, split_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segment:
    """T tokens a row that one forward pass consumes.

    position: tokens committed before the segment. lengths: real tokens of each row, the rest are pads on
    the right. fold: committed ring entries to fold into the checkpoint first (0: none). start, length:
    the cursors after that flush.
    mode: "prefill" (chunked recurrence, the state is written) or "step" (T outputs from checkpoint and
    ring, or one eager step). tokens: T.
    plan: the row plan of the GPU kernels in steps that they serve; in eager steps it lists every row.
    mesh: devices that share the rows and heads; each then has a plan of its own rows.
    seed: the rows' seeds where a rewritten checkpoint is rounded stochastically, else None.
    skips: leave out the reads of heads that have forgotten their checkpoint.
    head: entries of a prediction head, which has no recurrences, beside a cache that the GPU kernels serve.
    layer: index of the layer, for every row, where the rounding is stochastic and one program serves several
    layers; else None, and the layer's buffers say it.
    """

    position: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    fold: Int32[Array, " B"]
    start: Int32[Array, " B"]
    length: Int32[Array, " B"]
    plan: tuple[Int32[Array, "B 4"], Int32[Array, " counts"]] | None
    mode: Literal["prefill", "step"] = static()
    tokens: int = static()
    mesh: Mesh | None = static(default=None)
    seed: UInt32[Array, " B"] | None = None
    skips: bool = static(default=False)
    head: bool = static(default=False)
    layer: Int32[Array, " B"] | None = None

    @property
    def kernels(self) -> bool:
        """Whether GPU kernels may serve the layers around the recurrences too."""
        return (self.plan is not None or self.head) and self.mesh is None

    @property
    def positions(self) -> Int32[Array, "B T"]:
        """Absolute position of every token, pads included."""
        return self.position[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)[None, :]

    @property
    def valid(self) -> Bool[Array, "B T"]:
        """True for real tokens, False for pads."""
        return jnp.arange(self.tokens, dtype=jnp.int32)[None, :] < self.lengths[:, None]


def fresh_segment(batch: int, tokens: int, lengths: Int32[Array, " B"] | None = None) -> Segment:
    """A prefill from position 0 that needs no cache (training, scoring)."""
    zero = jnp.zeros((batch,), jnp.int32)
    if lengths is None:
        lengths = jnp.full((batch,), tokens, jnp.int32)
    return Segment(
        position=zero,
        lengths=lengths,
        fold=zero,
        start=zero,
        length=zero,
        plan=None,
        mode="prefill",
        tokens=tokens,
    )


def _rounding_seed(cache: Cache) -> UInt32[Array, " B"] | None:
    stochastic = isinstance(cache.replay, ReplayConfig) and cache.replay.rounding == "stochastic"
    return cache.seed if stochastic else None


def prefill_segment(cache: Cache, lengths: Int32[Array, " B"], tokens: int) -> Segment:
    """Rows with tokens fold their ring first; rows without are left alone."""
    fold = jnp.where(lengths > 0, cache.length, 0)
    return Segment(
        position=cache.position,
        lengths=lengths,
        fold=fold,
        start=cache.start + fold,
        length=cache.length - fold,
        plan=None,
        mode="prefill",
        tokens=tokens,
        mesh=cache.mesh,
        seed=_rounding_seed(cache),
    )


def flush_due(cache: Cache, tokens: int) -> Bool[Array, " B"]:
    """Rows whose next step of `tokens` tokens begins with a flush; known before the step."""
    return cache.length + tokens > cache.flush_at


def will_flush(cache: Cache, tokens: int) -> Bool[Array, " B"]:
    """Rows whose next step of `tokens` tokens rewrites their checkpoint; a flush of no entries does not."""
    return flush_due(cache, tokens) & (cache.length > 0)


def step_segment(cache: Cache, tokens: int, active: Bool[Array, " B"] | None = None) -> Segment:
    """T tokens for every row; rows that are not active change no eager state."""
    fold = jnp.where(flush_due(cache, tokens), cache.length, 0)
    count = jnp.full_like(cache.start, tokens)
    plan = functools.partial(row_plan, cache.replay)
    if cache.mesh is not None:
        plan = functools.partial(split_rows, plan, cache.mesh)
    return Segment(
        position=cache.position,
        lengths=count if active is None else jnp.where(active, count, 0),
        fold=fold,
        start=cache.start + fold,
        length=cache.length - fold,
        plan=plan(fold, cache.start, cache.length),
        mode="step",
        tokens=tokens,
        mesh=cache.mesh,
        seed=_rounding_seed(cache),
        skips=isinstance(cache.replay, ReplayConfig) and cache.replay.skip_forgotten != "off",
    )


@jax.named_scope("state_update")
def recur(
    recurrence: ModuleType,
    layer: Any,
    inputs: Any,
    reader: Float[Array, "B G T K"],
    heads: Any,
    segment: Segment,
) -> tuple[Float[Array, "B T H V"], Any]:
    """Run one recurrence over a segment.

    recurrence: a module of `replayssm_jax.recurrence`. layer: its buffers, or None to start from a zero state
    and keep nothing; buffers of another method than eager and replay bring their own `recur`. inputs, reader,
    heads: as that module defines them.
    Returns outputs float32 [B, T, H, V] and the layer's new buffers.
    """
    if layer is None:
        state = _zero_state(inputs, reader)
        return recurrence.prefill(state, inputs, reader, heads, segment.lengths)[0], None
    if not isinstance(layer, RecurrentLayer):
        return layer.recur(recurrence, inputs, reader, heads, segment)
    run = functools.partial(_recur, recurrence)
    if segment.mesh is not None:
        run = functools.partial(split_recurrence, run, segment.mesh)
    return run(layer, inputs, reader, heads, segment)


def _recur(
    recurrence: ModuleType, layer: RecurrentLayer, inputs: Any, reader: Array, heads: Any, segment: Segment
) -> tuple[Array, RecurrentLayer]:
    if segment.mode == "prefill":
        state = folded(recurrence, layer, heads, segment)
        outputs, state = recurrence.prefill(state, inputs, reader, heads, segment.lengths)
        position = segment.position + segment.lengths
        layer = rewrite(layer, state, segment.lengths > 0, position, segment)
        # The model's weights may have changed since the cache was made.
        constants = None if layer.constants is None else constants_of(heads)
        return outputs, replace(layer, reach=prefilled(layer, outputs, segment), constants=constants)
    if layer.ring is None:
        inputs = recurrence.neutralize(inputs, segment.valid)
    by_fold = by_reads = gone = None
    if segment.skips:
        by_fold, by_reads, reach = forgotten(recurrence, layer, inputs, reader, heads, segment)
        gone = jnp.where(segment.fold[:, None] > 0, by_fold, by_reads)
        layer = replace(layer, reach=reach)
    known = functools.partial(heard, recurrence, inputs=inputs, reader=reader, heads=heads, segment=segment)
    if segment.plan is not None:
        constants = constants_of(heads) if layer.constants is None else layer.constants
        given = inputs, reader, constants, segment.plan
        if layer.copy is not None or format_of(layer.checkpoint) != "fp32":
            kept = layer.checkpoint, layer.copy, layer.ring
            words = kernel_words(layer, segment)
            outputs, checkpoint, copy, ring = stored_kernel_step(layer.recurrence, *kept, *given, words)
            return outputs, replace(layer, checkpoint=checkpoint, copy=copy, ring=ring)
        state = decode(layer.checkpoint)
        outputs, checkpoint, ring = kernel_step(layer.recurrence, state, layer.ring, *given, gone)
        layer = replace(layer, checkpoint=checkpoint, ring=ring)
        return outputs, replace(layer, reach=known(layer.reach, outputs))
    if layer.ring is None:
        outputs, state = recurrence.eager_step(layer.checkpoint, inputs, reader, heads)
        return outputs, replace(layer, checkpoint=state)
    layer = flush(recurrence, layer, heads, segment, by_fold)
    ring = append(layer.ring, inputs, segment.position)
    state = read_source(layer, segment.fold > 0)
    if by_reads is not None:
        state = without(state, by_reads)
    outputs = recurrence.window(state, ring, reader, heads, segment.start, segment.length)
    return outputs, replace(layer, ring=ring, reach=known(layer.reach, outputs))


def _zero_state(inputs: Any, reader: Float[Array, "B G T K"]) -> Float[Array, "B H V K"]:
    fields = jax.tree.leaves(inputs)
    values, scalars = fields[0], next(leaf for leaf in fields if leaf.ndim == 3)
    batch, groups, _, d_state = reader.shape
    heads = scalars.shape[-1]
    return jnp.zeros((batch, heads, values.shape[-1] * groups // heads, d_state), jnp.float32)


def append(ring: Any, inputs: Any, position: Int32[Array, " B"]) -> Any:
    """Write T tokens into the ring, token p into slot p mod R; 4-D fields have tokens on axis 2, 3-D on 1."""

    def write(slots, new):
        axis = 2 if slots.ndim == 4 else 1
        tokens = jnp.arange(new.shape[axis], dtype=jnp.int32)[None, :]
        index = (position[:, None] + tokens) % slots.shape[axis]
        rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
        if axis == 1:
            return slots.at[rows, index].set(new, unique_indices=True)
        return slots.at[rows, :, index].set(jnp.moveaxis(new, 2, 1), unique_indices=True)

    return jax.tree.map(write, ring, inputs)


def prefill_core(model, tokens: Int32[Array, "B S"], lengths: Int32[Array, " B"], cache: Cache):
    """`prefill` without jit, checks or donation; returns (logits, hidden, cache)."""
    segment = prefill_segment(cache, lengths, tokens.shape[1])
    hidden, layers = model(tokens, segment, cache.layers)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    logits = model.logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0])
    given = lengths > 0
    cache = replace(
        cache,
        layers=layers,
        start=jnp.where(given, segment.position + lengths, cache.start),
        length=jnp.where(given, 0, cache.length),
        pending=jnp.where(given, 0, cache.pending),
    )
    return logits, hidden, in_place(cache)


def step_core(model, tokens: Int32[Array, "B T"], cache: Cache, active: Bool[Array, " B"] | None = None):
    """`step` without jit, checks or donation; returns (logits, hidden, cache).

    active: rows that are False leave an eager state unchanged; in replay mode give them accepted 0.
    """
    count = tokens.shape[1]
    segment = step_segment(cache, count, active)
    hidden, layers = model(tokens, segment, cache.layers)
    cache = replace(
        cache,
        layers=layers,
        start=segment.start,
        length=segment.length,
        pending=jnp.full_like(cache.pending, count),
        flush_at=jnp.where(flush_due(cache, count), cache.replay.buffer_length, cache.flush_at),
    )
    return model.logits(hidden), hidden, in_place(cache)


def commit_core(cache: Cache, accepted: Int32[Array, " B"]) -> Cache:
    """`commit` without jit, checks or donation."""
    count = jnp.clip(accepted, 0, cache.pending)
    moved = "length" if isinstance(cache.replay, ReplayConfig) else "start"
    cursor = {moved: getattr(cache, moved) + count}
    return in_place(replace(cache, pending=jnp.zeros_like(cache.pending), **cursor))


@functools.partial(jax.jit, donate_argnums=3, static_argnames="return_hidden", keep_unused=True)
def _prefill(model, tokens, lengths, cache, return_hidden: bool):
    logits, hidden, cache = prefill_core(model, tokens, lengths, cache)
    return (logits, hidden, cache) if return_hidden else (logits, cache)


@functools.partial(jax.jit, donate_argnums=2, static_argnames="return_hidden", keep_unused=True)
def _step(model, tokens, cache, return_hidden: bool):
    logits, hidden, cache = step_core(model, tokens, cache)
    return (logits, hidden, cache) if return_hidden else (logits, cache)


_commit = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)(commit_core)


def _integers(value, shape: tuple, name: str) -> Int32[Array, "..."]:
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}.")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}.")
    return array.astype(jnp.int32)


def _tokens(tokens, model, cache: Cache) -> Int32[Array, "B T"]:
    array = jnp.asarray(tokens)
    if array.ndim != 2 or array.shape[0] != cache.batch or array.shape[1] < 1:
        raise ValueError(
            f"tokens must have shape [{cache.batch}, T] with T >= 1 for this cache, got {list(array.shape)}."
        )
    ids = _integers(array, array.shape, "tokens")
    # Tokens that are on the device already are trusted: reading them back would wait for the device.
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocab_size is not None and not isinstance(tokens, jax.Array):
        host = np.asarray(tokens)
        if host.min() < 0 or host.max() >= vocab_size:
            raise ValueError(
                f"tokens must lie in 0..{vocab_size - 1}, got {int(host.min())}..{int(host.max())}."
            )
    return ids


def prefill(model, tokens, lengths, cache: Cache, *, return_hidden: bool = False):
    """Feed prompts, or further text, into every row; all of it is committed.

    tokens: int [B, S], right-padded. lengths: int [B], 0..S real tokens a row; a row of 0 stays bit-equal.
    cache: donated; any position (its ring is folded first). Compiles once for every S.
    Returns logits float32 [B, V] at each row's last real token, then, with return_hidden, the hidden states
    [B, S, hidden_size] after the final norm, then the cache with length 0. Hidden of pads and logits of rows
    with length 0 are finite but mean nothing.
    Raises ValueError for a donated cache, wrong shapes or dtypes, lengths outside 0..S, ids outside the
    vocabulary (where the tokens are on the host), and rows that would outgrow max_length.
    """
    check_usable(cache)
    tokens = _tokens(tokens, model, cache)
    lengths = _integers(lengths, (cache.batch,), "lengths")
    if not any(isinstance(item, Tracer) for item in (lengths, cache.start)):
        counts, position = np.asarray(lengths), np.asarray(cache.position)
        if counts.min() < 0 or counts.max() > tokens.shape[1]:
            raise ValueError(f"lengths must lie in 0..{tokens.shape[1]}, got {counts.tolist()}.")
        needed = np.where(counts > 0, position + counts, 0)
        if needed.max() > cache.max_length:
            raise ValueError(
                f"Row {int(needed.argmax())} would hold {int(needed.max())} tokens, but the cache has room "
                f"for max_length={cache.max_length}."
            )
    return _prefill(model, tokens, lengths, cache, return_hidden=return_hidden)


def step(model, tokens, cache: Cache, *, return_hidden: bool = False):
    """Outputs for T further tokens of every row; they lie in the ring, uncommitted.

    tokens: int [B, T], T <= window (1 in eager caches). cache: donated. A step without a commit in between
    overwrites the tokens of the last one. Compiles once for every T.
    Returns logits float32 [B, T, V], with return_hidden the hidden states [B, T, hidden_size] after the final
    norm, and the cache. Tokens at or beyond max_length are not kept by attention layers: stop there.
    Raises ValueError for a donated cache, wrong shapes or dtypes, ids outside the vocabulary (where the
    tokens are on the host), and T above the window.
    """
    check_usable(cache)
    tokens = _tokens(tokens, model, cache)
    if tokens.shape[1] > cache.window:
        kind = (
            "an eager cache takes"
            if isinstance(cache.replay, EagerConfig)
            else f"this cache has window={cache.window} and takes"
        )
        raise ValueError(f"{kind} at most {cache.window} tokens a step, got {tokens.shape[1]}.")
    return _step(model, tokens, cache, return_hidden=return_hidden)


def commit(cache: Cache, accepted) -> Cache:
    """Keep the first `accepted` input tokens of the last step; the others are forgotten.

    accepted: int [B], clipped to 0..pending. Decoding: 1; verification: 1 + accepted drafts; an idle row: 0
    (in an eager cache such a row is undefined until reset). cache: donated; only cursors move.
    Raises ValueError for a donated cache and wrong shapes or dtypes.
    """
    check_usable(cache)
    return _commit(cache, _integers(accepted, (cache.batch,), "accepted"))
