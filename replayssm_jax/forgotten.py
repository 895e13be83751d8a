"""Heads that have forgotten their checkpoint: reads of it and folds of it that can be left out.

A step n tokens after the checkpoint S reads it as total * S z, where total is the product of n decays. Where
that can no longer be seen in the output, the read is left out; where it can no longer be seen in the next
checkpoint, a flush writes what the ring holds and nothing else.

"exact": total is so far below float32's least number that no element of a state is kept, so outputs and
checkpoints keep their bits. "bounded": also where total * |largest row of S| * |z| is below 2^-9 (16-bit
activations) or 2^-25 times the RMS of the head's output at the last flush, and, for a flush, where
total * |largest row| is below 2^-25 of every row of the next checkpoint. No state is read for either. The
largest row is bounded by the decayed old one plus what every token added. A row of the next checkpoint S' is
at least |S' z| / |z|, of the output that its last token had: a row of zeros keeps its head's old checkpoint.
For the delta rule the product of decays bounds what is read just so: the projections I - beta k k^T of the
tokens (|k| = 1, 0 <= beta <= 1) shorten what they are applied to.
"""

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from replayssm_jax.cache import Reach, RecurrentLayer
from replayssm_jax.precision import decode
from replayssm_jax.recurrence.layout import heads_first, per_head
from replayssm_jax.recurrence.segment import at_slots, in_age_order, slot_age, suffix_sum

if TYPE_CHECKING:
    from replayssm_jax.replay import Segment

# exp of less is below 2^-150. In float32 it is 0 from 2^-126 down already, but folds and readers multiply by
# the decays token by token, or a block at a time: from here on elements up to 2^24 are 0 in any order.
LOG_ZERO = -104.0
# Of the RMS of a head's output, by bytes of an activation.
LEAST_READ = {2: 2.0**-9, 4: 2.0**-25}
# Of the smallest row of the next checkpoint.
LEAST_FOLD = 2.0**-25
# Readers of zeros show nothing of a row.
TINY = 2.0**-100


def forgotten(
    recurrence: ModuleType,
    layer: RecurrentLayer,
    inputs: Any,
    reader: Float[Array, "B G T K"],
    heads: Any,
    segment: "Segment",
) -> tuple[Bool[Array, "B H"], Bool[Array, "B H"], Reach | None]:
    """Which heads a step can do without, from what is known before it.

    layer: before the flush. inputs, reader: of the step's tokens.
    Returns heads whose checkpoint adds nothing when `segment.fold` entries are folded (False in rows without
    any), heads whose checkpoint, after that flush, shows in no output of the step, and what is then known of
    it.
    """
    decays = recurrence.log_decays(layer.ring, heads)
    first = recurrence.log_decays(inputs, heads)[:, 0]
    start, flushes = segment.start - segment.fold, segment.fold[:, None] > 0
    # A row folds all of its committed entries, or reads behind them all.
    live = slot_age(start, decays.shape[1]) < (segment.fold + segment.length)[:, None]
    committed = jnp.sum(jnp.where(live[:, :, None], decays, 0.0), axis=1)
    read_total = jnp.where(flushes, 0.0, committed) + first
    by_fold, by_reads = flushes & (committed < LOG_ZERO), read_total < LOG_ZERO
    reach = layer.reach
    if reach is None:
        return by_fold, by_reads, None
    folded, added = in_age_order((decays, reach.added), start, segment.fold)
    kept = jnp.where(flushes, jnp.exp(committed), 1.0) * reach.largest
    largest = kept + jnp.sum(jnp.exp(suffix_sum(heads_first(folded))) * heads_first(added), axis=-1)
    last = jnp.mod(start + segment.fold - 1, decays.shape[1])[:, None]
    by_fold |= flushes & (kept < LEAST_FOLD * at_slots(reach.least, last, 1)[:, 0])
    added = _placed(reach.added, recurrence.largest_rows(inputs), segment)
    reach = replace(reach, added=added, largest=largest)
    longest = jnp.max(_norms(reader, largest.shape[1]), axis=1)
    shown = jnp.exp(read_total) * largest * longest
    by_reads |= shown < LEAST_READ[reader.dtype.itemsize] * reach.output
    return by_fold, by_reads, reach


def _placed(
    slots: Float32[Array, "B R H"], new: Float32[Array, "B T H"], segment: "Segment"
) -> Float32[Array, "B R H"]:
    """The slots with the entries of the step's tokens in their places."""
    index = segment.positions % slots.shape[1]
    rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
    return slots.at[rows, index].set(new, unique_indices=True)


def _norms(reader: Float[Array, "B G T K"], heads: int) -> Float32[Array, "B T H"]:
    found = jnp.linalg.norm(reader.astype(jnp.float32), axis=-1)
    return jnp.moveaxis(per_head(found, heads), 1, 2)


def without(state: Float32[Array, "B H V K"], gone: Bool[Array, "B H"]) -> Float32[Array, "B H V K"]:
    """The state with zeros in the heads that are `gone`."""
    return jnp.where(gone[:, :, None, None], 0.0, state)


def heard(
    recurrence: ModuleType,
    reach: Reach | None,
    outputs: Float32[Array, "B T H V"],
    inputs: Any,
    reader: Float[Array, "B G T K"],
    heads: Any,
    segment: "Segment",
) -> Reach | None:
    """What is known after a step: rows that flushed keep the RMS of their first output."""
    if reach is None:
        return None
    flushed = segment.fold[:, None] > 0
    least = recurrence.least_reads(outputs, inputs, heads)
    least = least / jnp.maximum(_norms(reader, least.shape[2]), TINY)
    return replace(
        reach,
        least=_placed(reach.least, least, segment),
        output=jnp.where(flushed, _size(outputs[:, 0]), reach.output),
    )


def prefilled(layer: RecurrentLayer, outputs: Float[Array, "B T H V"], segment: "Segment") -> Reach | None:
    """What is known after a prefill; rows without tokens keep what they had."""
    if layer.reach is None:
        return None
    given = segment.lengths[:, None] > 0
    last = jnp.maximum(segment.lengths - 1, 0)[:, None, None, None]
    size = _size(jnp.take_along_axis(outputs, last, axis=1)[:, 0])
    largest = jnp.max(jnp.linalg.norm(decode(layer.checkpoint), axis=-1), axis=-1)
    return replace(
        layer.reach,
        largest=jnp.where(given, largest, layer.reach.largest),
        output=jnp.where(given, size, layer.reach.output),
    )


def _size(output: Float[Array, "B H V"]) -> Float32[Array, "B H"]:
    return jnp.sqrt(jnp.mean(jnp.square(output.astype(jnp.float32)), axis=-1))
