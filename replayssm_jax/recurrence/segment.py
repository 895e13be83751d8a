"""What the recurrences share: sums over segments of tokens, slots by age, chunk scans, folds by row."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from replayssm_jax.recurrence.layout import einsum

Inputs = TypeVar("Inputs")


def token_axis(field: Array) -> int:
    """Returns the axis of tokens in a field of `Inputs`: 2 with four axes, 1 with three."""
    return field.ndim - 2


def causal(tokens: int, *, itself: bool) -> Bool[Array, "1 1 T T"]:
    """Whether token j (last axis) lies before token i, or is token i where `itself` says so."""
    return jnp.tril(jnp.ones((tokens, tokens), bool), 0 if itself else -1)[None, None]


def _between(tokens: int) -> Float32[Array, "T T T"]:
    """1 at (i, j, l) where j < l <= i, else 0."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    i, j, between = token[:, None, None], token[None, :, None], token[None, None, :]
    return ((j < between) & (between <= i)).astype(jnp.float32)


def segment_sum(x: Float32[Array, "B H T"]) -> Float32[Array, "B H T T"]:
    """Returns at (i, j) the sum of x[j+1..i], zero for j >= i.

    Every entry adds the elements of its own segment only. A difference of two prefix sums would carry the
    rounding of everything before the segment, which one log decay of -200 makes larger than the segment
    itself. Sums are products with 0 and 1, which are exact and run faster than scans.
    """
    return einsum("bhl,ijl->bhij", x, _between(x.shape[-1]))


def channel_segment_sum(x: Float32[Array, "B H T K"]) -> Float32[Array, "B H T T K"]:
    """`segment_sum` of every channel."""
    return einsum("bhlk,ijl->bhijk", x, _between(x.shape[2]))


def prefix_sum(x: Float32[Array, "*b T"]) -> Float32[Array, "*b T"]:
    """Returns at i the sum of x[..i], x[i] included."""
    return einsum("...l,il->...i", x, causal(x.shape[-1], itself=True)[0, 0].astype(jnp.float32))


def suffix_sum(x: Float32[Array, "*b T"]) -> Float32[Array, "*b T"]:
    """Returns at j the sum of x[j+1..], the elements after j."""
    return einsum("...l,lj->...j", x, causal(x.shape[-1], itself=False)[0, 0].astype(jnp.float32))


def slot_age(start: Int32[Array, " B"], slots: int) -> Int32[Array, "B R"]:
    """Returns how many tokens after `start` the token of each slot lies, 0..slots-1."""
    return jnp.mod(jnp.arange(slots, dtype=jnp.int32)[None, :] - start[:, None], slots)


def at_slots(field: Array, slots: Int32[Array, "B n"], axis: int) -> Array:
    """Returns each row's entries at its own `slots` along `axis`."""
    index = jnp.expand_dims(slots, [other for other in range(1, field.ndim) if other != axis])
    return jnp.take_along_axis(field, index, axis=axis, mode="promise_in_bounds")


def in_age_order(ring: Inputs, start: Int32[Array, " B"], count: Int32[Array, " B"]) -> Inputs:
    """Returns the `count` tokens from `start` in order, row by row, and neutral zeros behind them."""

    def turn(field: Array) -> Array:
        axis = token_axis(field)
        age = jnp.arange(field.shape[axis], dtype=jnp.int32)[None, :]
        live = jnp.expand_dims(age < count[:, None], [a for a in range(1, field.ndim) if a != axis])
        turned = at_slots(field, jnp.mod(start[:, None] + age, field.shape[axis]), axis)
        return jnp.where(live, turned, jnp.zeros((), field.dtype))

    return jax.tree.map(turn, ring)


def forward_substitution(
    interactions: Float32[Array, "B H T T"], right: Float32[Array, "B H T V"]
) -> Float32[Array, "B H T V"]:
    """Returns (I + A)^-1 right for a strictly lower triangular A, for few tokens."""

    def eliminate(token: Array, rows: Array) -> Array:
        column = jax.lax.dynamic_slice_in_dim(interactions, token, 1, axis=3)
        return rows - column * jax.lax.dynamic_slice_in_dim(rows, token, 1, axis=2)

    return jax.lax.fori_loop(0, right.shape[2] - 1, eliminate, right)


def unit_lower_inverse(interactions: Float32[Array, "B H T T"]) -> Float32[Array, "B H T T"]:
    """Returns (I + A)^-1 for a strictly lower triangular A.

    Blocks on the diagonal double in size: [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]]. These are
    products alone. A CPU's triangular solve is a BLAS call a head, whose threads wait for each other a
    hundred times longer than one of them computes when other programs keep the cores busy.
    """
    tokens = interactions.shape[-1]
    place = jnp.arange(tokens, dtype=jnp.int32)

    def corners(size: int) -> Array:
        """The blocks C of A that join blocks of `size` tokens."""
        row, column = place[:, None] // size, place[None, :] // size
        return jnp.where(((row % 2 == 1) & (column == row - 1))[None, None], interactions, 0.0)

    inverse = jnp.eye(tokens, dtype=jnp.float32)[None, None] - corners(1)
    size = 2
    while size < tokens:
        inverse = inverse - einsum("bhij,bhjk,bhkl->bhil", inverse, corners(size), inverse)
        size *= 2
    return inverse


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
    """Runs `chunk(state, inputs, reader) -> (outputs [B, H, T, V], state)` over the tokens, in chunks.

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
    outputs = jnp.moveaxis(outputs, (0, 3), (1, 2)).reshape(
        state.shape[0], chunks * chunk_size, *state.shape[1:3]
    )
    return outputs[:, :tokens], select_rows(lengths > 0, final, state)


def fold_rows(
    absorb: Callable[[Array, Inputs], Array],
    checkpoint: Float32[Array, "B H V K"],
    ring: Inputs,
    start: Int32[Array, " B"],
    length: Int32[Array, " B"],
) -> Float32[Array, "B H V K"]:
    """Returns `absorb(checkpoint, tokens)` of the rows with tokens to fold; the others keep their bits.

    The tokens come in the order of their age, neutral zeros behind them. A CPU takes the rows one by one and
    computes only those that fold, since few rows of a batch flush at the same step.
    """

    def together(checkpoint, ring, start, length):
        return select_rows(length > 0, absorb(checkpoint, in_age_order(ring, start, length)), checkpoint)

    def one_by_one(checkpoint, ring, start, length):
        def fold_row(row: Array, checkpoint: Array) -> Array:
            taken = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), (checkpoint, ring, start, length)
            )
            return jax.lax.dynamic_update_slice_in_dim(checkpoint, together(*taken), row, axis=0)

        def visit(row: Array, checkpoint: Array) -> Array:
            return jax.lax.cond(length[row] > 0, fold_row, lambda row, kept: kept, row, checkpoint)

        return jax.lax.fori_loop(0, checkpoint.shape[0], visit, checkpoint)

    if checkpoint.shape[0] == 1:
        return together(checkpoint, ring, start, length)
    return jax.lax.platform_dependent(checkpoint, ring, start, length, cpu=one_by_one, default=together)
