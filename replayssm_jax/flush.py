"""How a layer's checkpoint is rewritten and read, with its copy for reads where there is one.

A new checkpoint comes from the old one and the ring alone. The copy is made from it and is only ever read
for outputs, so no error of the copy enters the recurrence.
"""

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from replayssm_jax.cache import RecurrentLayer
from replayssm_jax.forgotten import without
from replayssm_jax.precision import decode, encode_like, format_of, row_random, row_words
from replayssm_jax.sharding import HEADS

if TYPE_CHECKING:
    from replayssm_jax.replay import Segment


def spread_flush_at(prompts: Any, buffer_length: int, tokens: int = 1) -> np.ndarray:
    """`flush_at` of prompts that start together, so that their rows flush at different steps.

    prompts: their indices, integers of any shape. tokens: that a step takes; a first window below that would
    end at once, empty. Returns int32 in tokens..buffer_length of the indices' shape: consecutive indices lie
    evenly over the range, and index 0 has the full window.
    """
    # Fibonacci hashing: multiples of the golden ratio are even over any interval and in step with nothing.
    fraction = np.asarray(prompts, np.uint64) * np.uint64(0x9E3779B1) % np.uint64(2**32)
    shorter = fraction * np.uint64(buffer_length - tokens + 1) // np.uint64(2**32)
    return np.asarray(buffer_length - shorter, np.int32)


def folded(
    recurrence: ModuleType, layer: RecurrentLayer, heads: Any, segment: "Segment"
) -> Float32[Array, "B H V K"]:
    """The state with `segment.fold` committed entries folded in, unrounded."""
    state = decode(layer.checkpoint)
    if layer.ring is None:
        return state
    return jax.lax.cond(
        jnp.any(segment.fold > 0),
        lambda state: recurrence.fold(
            state, layer.ring, heads, segment.position - segment.fold, segment.fold
        ),
        lambda state: state,
        state,
    )


def flush(
    recurrence: ModuleType,
    layer: RecurrentLayer,
    heads: Any,
    segment: "Segment",
    gone: Bool[Array, "B H"] | None = None,
) -> RecurrentLayer:
    """The layer with `segment.fold` committed entries folded into its checkpoint; rows of 0 keep theirs.

    gone: heads whose old checkpoint is left out, in rows that fold.
    """

    def fold(checkpoint: Any, copy: Any) -> tuple[Any, Any]:
        state = decode(checkpoint)
        if gone is not None:
            state = without(state, gone)
        state = recurrence.fold(state, layer.ring, heads, segment.position - segment.fold, segment.fold)
        before = replace(layer, checkpoint=checkpoint, copy=copy)
        after = rewrite(before, state, segment.fold > 0, segment.start, segment)
        return after.checkpoint, after.copy

    checkpoint, copy = jax.lax.cond(
        jnp.any(segment.fold > 0), fold, lambda *kept: kept, layer.checkpoint, layer.copy
    )
    return replace(layer, checkpoint=checkpoint, copy=copy)


def rewrite(
    layer: RecurrentLayer,
    state: Float32[Array, "B H V K"],
    rows: Bool[Array, " B"],
    start: Int32[Array, " B"],
    segment: "Segment",
) -> RecurrentLayer:
    """The layer whose given rows have `state`, rounded, as the checkpoint at token `start`, and a fresh copy.

    state: the other rows hold their checkpoint. segment: brings the seeds where the rounding is stochastic.
    """
    if format_of(layer.checkpoint) == "fp32" and layer.copy is None:
        return replace(layer, checkpoint=state)
    # Or XLA may compute the state twice, with other bits, for the checkpoint and for the copy.
    state = jax.lax.optimization_barrier(state)
    checkpoint = encode_like(state, layer.checkpoint, _random(layer, state, start, segment))
    copy = None if layer.copy is None else encode_like(decode(checkpoint), layer.copy)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    written = jax.tree.map(chosen, (checkpoint, copy), (layer.checkpoint, layer.copy))
    return replace(layer, checkpoint=written[0], copy=written[1])


def _random(
    layer: RecurrentLayer, state: Float32[Array, "B H V K"], start: Int32[Array, " B"], segment: "Segment"
) -> UInt32[Array, "B H V K"] | None:
    if segment.seed is None:
        return None
    first = _first_element(state.size // state.shape[0], segment)
    return row_random(segment.seed, _index(layer, segment), start, state.shape[1:], first)


def _index(layer: RecurrentLayer, segment: "Segment") -> Int32[Array, " B"] | int:
    return layer.index if segment.layer is None else segment.layer


def _first_element(size: int, segment: "Segment") -> Int32[Array, ""] | int:
    """Place in a row's whole state of the first of the `size` elements that this device holds."""
    if segment.mesh is not None and HEADS in segment.mesh.shape:
        return jax.lax.axis_index(HEADS) * size
    return 0


def kernel_words(layer: RecurrentLayer, segment: "Segment") -> UInt32[Array, "B 2"] | None:
    """What the GPU kernels need of a row for the random words of `rewrite`: the hash of all but the element's
    place, and the first place."""
    if segment.seed is None:
        return None
    elements = jax.tree.leaves(layer.checkpoint)[0]
    first = _first_element(elements.size // elements.shape[0], segment)
    words = row_words(segment.seed, _index(layer, segment), segment.start)
    return jnp.stack([words, jnp.broadcast_to(jnp.asarray(first).astype(jnp.uint32), words.shape)], axis=1)


def read_source(layer: RecurrentLayer, flushed: Bool[Array, " B"]) -> Float32[Array, "B H V K"]:
    """What outputs read: the checkpoint of rows that the step has flushed, else the copy if there is one."""
    checkpoint = decode(layer.checkpoint)
    if layer.copy is None:
        return checkpoint
    return jnp.where(flushed[:, None, None, None], checkpoint, decode(layer.copy))
