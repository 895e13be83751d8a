"""Random inputs of the GPU kernels and their truth: the serial float64 loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.shapes import Shape
from pallas_kernels import gated_delta, mamba2
from tests import oracles

KERNELS = {"mamba2": mamba2, "gated_delta": gated_delta}


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one kernel call: checkpoint, ring, new tokens, reader, constants and cursors."""

    shape: Shape
    checkpoint: Any
    ring: tuple
    new: tuple
    reader: Any
    constants: Any
    start: Any
    length: Any

    def arguments(self) -> tuple:
        return (
            self.checkpoint, self.ring, self.new, self.reader, self.constants, self.start, self.length
        )  # fmt: skip

    @property
    def kernels(self) -> Any:
        return KERNELS[self.shape.recurrence]

    @property
    def slots(self) -> int:
        return self.ring[0].shape[2]

    @property
    def tokens(self) -> int:
        return self.new[0].shape[2]


def draw(
    shape: Shape,
    *,
    batch: int,
    tokens: int,
    buffer_length: int,
    slots: int,
    activation: Any = jnp.bfloat16,
    state: Any = jnp.float32,
    seed: int = 0,
) -> Case:
    """A random case with rows in random phases and random ring origins."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    groups, heads, d_state = shape.groups, shape.heads, shape.d_state
    width = heads // groups * shape.head_dim

    def normal(*size: int, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.normal(next(keys), size, jnp.float32).astype(dtype)

    def unit(*size: int) -> jax.Array:
        x = normal(*size)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(activation)

    def uniform(low: float, high: float, *size: int) -> jax.Array:
        return jax.random.uniform(next(keys), size, jnp.float32, low, high)

    def tokens_of(count: int) -> tuple:
        values = normal(batch, groups, count, width, dtype=activation)
        if shape.recurrence == "mamba2":
            keys_of = normal(batch, groups, count, d_state, dtype=activation)
            return values, keys_of, uniform(0.001, 0.3, batch, count, heads)
        decay = -uniform(0.001, 0.8, batch, count, heads)
        return values, unit(batch, groups, count, d_state), decay, uniform(0.05, 1.0, batch, count, heads)

    mamba = shape.recurrence == "mamba2"
    return Case(
        shape=shape,
        checkpoint=normal(batch, heads, shape.head_dim, d_state, dtype=state),
        ring=tokens_of(slots),
        new=tokens_of(tokens),
        reader=normal(batch, groups, tokens, d_state, dtype=activation)
        if mamba
        else unit(batch, groups, tokens, d_state),
        constants=jnp.stack([-uniform(0.5, 4.0, heads), normal(heads)]) if mamba else None,
        start=jax.random.randint(next(keys), (batch,), 0, 1000),
        length=jax.random.randint(next(keys), (batch,), 0, buffer_length - tokens + 1),
    )


def spiky(case: Case) -> Case:
    """The case with some log decays near -200, which erase all that came before."""
    if case.constants is None:
        hit = jax.random.bernoulli(jax.random.key(1), 0.1, case.ring[2].shape)
        return dataclasses.replace(
            case, ring=(*case.ring[:2], jnp.where(hit, -200.0, case.ring[2]), case.ring[3])
        )
    rate, skip = case.constants
    return dataclasses.replace(case, constants=jnp.stack([rate.at[::5].multiply(1000.0), skip]))


def of_every_length(shape: Shape, *, tokens: int, buffer_length: int, slots: int) -> Case:
    """One row of each length that can be followed by a flush, with ring origins of both parities."""
    count = buffer_length + 1
    case = draw(shape, batch=count, tokens=tokens, buffer_length=buffer_length, slots=slots)
    length = jnp.arange(count, dtype=jnp.int32)
    return dataclasses.replace(case, length=length, start=7 * length + 3)


def _float64(array: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(array, jnp.float32), np.float64)


def truth(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, T, H, V] and folded checkpoints [B, H, V, K] of the float64 loop."""
    start, length = np.asarray(case.start), np.asarray(case.length)
    ring, new = [_float64(x) for x in case.ring], [_float64(x) for x in case.new]
    reader = _float64(case.reader)
    outputs, folded = [], []
    for row in range(len(start)):
        one = slice(row, row + 1)
        slots = [(int(start[row]) + j) % case.slots for j in range(int(length[row]))]
        committed = [np.take(x[one], slots, axis=2 if x.ndim == 4 else 1) for x in ring]
        state = _float64(case.checkpoint)[one]
        no_reader = np.zeros((1, reader.shape[1], len(slots), reader.shape[3]))
        _, state = _run(case, state, committed, no_reader)
        folded.append(np.array(state))
        outputs.append(_run(case, state, [x[one] for x in new], reader[one])[0])
    return np.concatenate(outputs), np.concatenate(folded)


def _run(case: Case, state: np.ndarray, tokens: list, reader: np.ndarray) -> tuple:
    if case.shape.recurrence == "mamba2":
        a, d = _float64(case.constants)
        return oracles.mamba2(state, *tokens, reader, a, d)
    return oracles.gated_delta(state, *tokens, reader)


def error(measured: Any, wanted: np.ndarray) -> float:
    """Root mean square of the difference over that of the truth."""
    difference = _float64(measured) - wanted
    return float(np.sqrt(np.mean(difference**2) / np.mean(wanted**2)))


def appended(case: Case) -> tuple:
    """The ring with the new tokens in their slots."""
    ring = [np.array(jnp.asarray(x, jnp.float32)) for x in case.ring]
    for row in range(len(case.start)):
        for t in range(case.tokens):
            slot = (int(case.start[row]) + int(case.length[row]) + t) % case.slots
            for target, source in zip(ring, case.new, strict=True):
                value = np.asarray(jnp.asarray(source, jnp.float32))[row]
                if target.ndim == 4:
                    target[row, :, slot] = value[:, t]
                else:
                    target[row, slot] = value[t]
    return tuple(ring)
