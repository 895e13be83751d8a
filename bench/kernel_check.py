"""Errors of a timed launch of ours against a serial float64 loop over checkpoint, ring and new tokens."""

from typing import Any

import jax
import numpy as np

from bench.peers.base import Token, serial_step
from bench.shapes import Shape
from replayssm_jax import precision

TOLERANCE = 1e-2  # RMS ratio of bfloat16 outputs; a wrong term gives a tenth and more.


def chosen_rows(flushes: np.ndarray) -> np.ndarray:
    """int32 [2]: a row that flushes and one that does not, where there are both; flushes bool [B]."""
    return np.array([np.argmax(flushes), np.argmin(flushes)], np.int32)


@jax.jit
def take(arrays: Any, rows: jax.Array) -> Any:
    """The rows of every array."""
    return jax.tree.map(lambda array: array[rows], arrays)


def states_of(buffers: tuple, flushes: np.ndarray) -> tuple:
    """What the rows of a launch work on: (states float32 [B, H, V, K], ring) of (checkpoint, copy, ring), the
    states of rows that flush from the checkpoint, others' from the copy where there is one; (state,) of an
    eager one."""
    states = np.asarray(precision.decode(buffers[0]))
    if len(buffers) == 1:
        return (states,)
    if buffers[1] is not None:
        states = np.where(flushes[:, None, None, None], states, precision.decode(buffers[1]))
    return states, buffers[2]


def tokens_of(shape: Shape, arrays: tuple, place: int, reader: np.ndarray | None = None) -> Token:
    """The token at a place of arrays (values [B, G, S, (H/G) V], vectors [B, G, S, K], scalars [B, S, H])."""
    values, vectors, *scalars = (np.asarray(array, np.float64) for array in arrays)
    rows = len(values)
    keys = vectors[:, :, place]
    first, second = (scalars * 2)[:2]
    return {
        "values": values[:, :, place].reshape(rows, shape.heads, shape.head_dim),
        "keys": keys,
        "reader": np.zeros_like(keys) if reader is None else reader,
        "first": first[:, place],
        "second": second[:, place],
    }


def errors(
    shape: Shape,
    before: tuple,
    given: tuple,
    after: tuple,
    outputs: np.ndarray,
    start: np.ndarray,
    lengths: np.ndarray,
) -> dict[str, float]:
    """RMS ratios `error` of the outputs and, where a state was written, `state_error` of the states.

    before, after: from `states_of`, around the launch; given: the
    new tokens and readers [B, G, T, K]; outputs [B, T, H, V]; start, lengths [B]: position of the first
    committed token, and how many there are.
    """
    new, readers = given
    readers = np.asarray(readers, np.float64)
    replay, wanted, folded, written = len(before) > 1, [], [], []
    for row, (origin, length) in enumerate(zip(start, lengths, strict=True)):
        one = slice(row, row + 1)
        state = np.asarray(before[0][one], np.float64)
        if replay:
            ring = tuple(array[one] for array in before[1])
            for position in range(origin, origin + length):
                place = position % ring[0].shape[2]
                _, state = serial_step(shape, state, tokens_of(shape, ring, place))
        stored, outputs_of_row = state, []
        for place in range(readers.shape[2]):
            token = tokens_of(shape, tuple(array[one] for array in new), place, readers[one, :, place])
            output, state = serial_step(shape, state, token)
            outputs_of_row.append(output[0])
        wanted.append(np.stack(outputs_of_row))
        if not np.array_equal(after[0][one], before[0][one]):
            folded.append(stored if replay else state)
            written.append(after[0][one])
    result = {"error": _ratio(outputs, np.stack(wanted))}
    if written:
        result["state_error"] = _ratio(np.concatenate(written), np.concatenate(folded))
    return result


def _ratio(measured: np.ndarray, wanted: np.ndarray) -> float:
    difference = np.asarray(measured, np.float64) - wanted
    return float(f"{np.sqrt(np.mean(difference**2) / np.mean(wanted**2)):.2g}")
