"""What the recurrences share: sums over segments of tokens, the order of ring slots, the scan over chunks."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

Inputs = TypeVar("Inputs")

einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def token_axis(field: Array) -> int:
    """Returns the axis of tokens in a field of `Inputs`: 2 with four axes, 1 with three."""
    return field.ndim - 2


def segment_sum(x: Float32[Array, "*b T"]) -> Float32[Array, "*b T T"]:
    """Returns at (i, j) the sum of x[j+1..i], zero for j >= i.

    Every entry adds the elements of its own segment only. A difference of two prefix sums would carry the
    rounding of everything before the segment, which one log decay of -200 makes larger than the segment
    itself.
    """
    tokens = x.shape[-1]
    later = jnp.tril(jnp.ones((tokens, tokens), bool), -1)
    columns = jnp.broadcast_to(x[..., :, None], (*x.shape, tokens))
    return jnp.cumsum(jnp.where(jnp.broadcast_to(later, columns.shape), columns, 0.0), axis=-2)


def suffix_sum(x: Float32[Array, "*b T"]) -> Float32[Array, "*b T"]:
    """Returns at j the sum of x[j+1..], the elements after j."""
    shifted = jnp.concatenate([x[..., 1:], jnp.zeros_like(x[..., :1])], axis=-1)
    return jnp.flip(jnp.cumsum(jnp.flip(shifted, -1), axis=-1), -1)


def slot_age(start: Int32[Array, " B"], slots: int) -> Int32[Array, "B R"]:
    """Returns how many tokens after `start` the token of each slot lies, 0..slots-1."""
    return jnp.mod(jnp.arange(slots, dtype=jnp.int32)[None, :] - start[:, None], slots)


def in_age_order(ring: Inputs, start: Int32[Array, " B"], count: Int32[Array, " B"]) -> Inputs:
    """Returns the `count` tokens from `start` in order, row by row, and neutral zeros behind them."""

    def turn(field: Array) -> Array:
        axis = token_axis(field)
        slots = field.shape[axis]
        others = [a for a in range(1, field.ndim) if a != axis]
        age = jnp.arange(slots, dtype=jnp.int32)[None, :]
        order = jnp.expand_dims(jnp.mod(start[:, None] + age, slots), others)
        live = jnp.expand_dims(age < count[:, None], others)
        turned = jnp.take_along_axis(field, order, axis=axis, mode="promise_in_bounds")
        return jnp.where(live, turned, jnp.zeros((), field.dtype))

    return jax.tree.map(turn, ring)


def select_rows(
    rows: Bool[Array, " B"], chosen: Float32[Array, "B H V K"], other: Float32[Array, "B H V K"]
) -> Float32[Array, "B H V K"]:
    """Returns the rows of `chosen` where `rows` holds and, bit for bit, those of `other` elsewhere."""
    return jnp.where(rows[:, None, None, None], chosen, other)


def scan_chunks(
    chunk: Callable[[Array, Inputs, Array], tuple[Array, Array]],
    state: Float32[Array, "B H V K"],
    inputs: Inputs,
    reader: Float[Array, "B G T K"],
    lengths: Int32[Array, " B"],
    chunk_size: int,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    """Runs `chunk(state, inputs, reader) -> (outputs, state)` over the tokens, `chunk_size` at a time.

    The tokens are padded with zeros to whole chunks; `inputs` must already be neutral beyond `lengths`. Rows
    of length 0 keep their state bit for bit.
    """
    tokens = reader.shape[2]
    chunk_size = min(chunk_size, tokens)
    chunks = -(-tokens // chunk_size)

    def split(field: Array) -> Array:
        axis = token_axis(field)
        pad = [(0, 0)] * field.ndim
        pad[axis] = (0, chunks * chunk_size - tokens)
        field = jnp.pad(field, pad)
        shape = (*field.shape[:axis], chunks, chunk_size, *field.shape[axis + 1 :])
        return jnp.moveaxis(field.reshape(shape), axis, 0)

    def body(carry: Array, part: tuple[Inputs, Array]) -> tuple[Array, Array]:
        outputs, carry = chunk(carry, *part)
        return carry, outputs

    final, outputs = jax.lax.scan(body, state, jax.tree.map(split, (inputs, reader)))
    outputs = jnp.moveaxis(outputs, 0, 1).reshape(state.shape[0], chunks * chunk_size, *state.shape[1:3])
    return outputs[:, :tokens], select_rows(lengths > 0, final, state)
