"""Random inputs of the recurrences, the call of their serial float64 loops, and the measure of errors."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.recurrence import RECURRENCES
from tests import oracles

TARGET = 1e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a case; `groups` are groups of B/C or key heads."""

    batch: int = 3
    heads: int = 4
    groups: int = 2
    head_dim: int = 8
    d_state: int = 12

    def for_recurrence(self, name: str) -> "Shape":
        """The same sizes with a key for every head where the recurrence asks for that."""
        return dataclasses.replace(self, groups=self.heads) if name == "kimi_delta" else self


def tolerance(tokens: int) -> float:
    """RMS ratio allowed in float32 after `tokens` roundings: they add up like sqrt(tokens)."""
    return min(TARGET, 16 * float(np.finfo(np.float32).eps) * math.sqrt(tokens))


def rms_error(actual, expected) -> float:
    """Largest over rows of RMS(actual - expected) / RMS(expected)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    axes = tuple(range(1, expected.ndim))
    error = np.sqrt(np.mean((actual - expected) ** 2, axis=axes))
    size = np.sqrt(np.mean(expected**2, axis=axes))
    return float(np.max(np.where(error == 0, 0.0, error / np.maximum(size, 1e-300))))


def _unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _log_decays(rng, size, decays):
    if decays == "spiky":
        return np.where(rng.random(size) < 0.15, -200.0, -1e-3)
    if decays == "slow":
        return -1e-3 * rng.random(size)
    return -np.exp(rng.uniform(math.log(1e-3), math.log(5.0), size))


def draw_heads(name: str, rng, shape: Shape, decays: str = "mixed"):
    """Per-head constants of a recurrence."""
    if name != "mamba2":
        return RECURRENCES[name].Heads()
    rate = rng.uniform(50.0, 100.0, shape.heads) if decays == "spiky" else rng.uniform(0.5, 4.0, shape.heads)
    skip = rng.normal(size=shape.heads)
    return RECURRENCES[name].Heads(a=jnp.asarray(-rate, jnp.float32), d=jnp.asarray(skip, jnp.float32))


def draw(
    name: str, rng, shape: Shape, tokens: int, heads, *, decays="mixed", keys="random", dtype=jnp.float32
):
    """Random (inputs, reader) of `tokens` tokens. decays: mixed, slow, spiky. keys: random or near-equal."""
    rows, groups, per_group = shape.batch, shape.groups, shape.heads // shape.groups
    vectors = rng.normal(size=(rows, groups, tokens, shape.d_state))
    if keys == "near-equal":
        vectors = rng.normal(size=(rows, groups, 1, shape.d_state)) + 0.01 * vectors
    values = jnp.asarray(rng.normal(size=(rows, groups, tokens, per_group * shape.head_dim)), dtype)
    per_head = (rows, tokens, shape.heads)
    reader = rng.normal(size=(rows, groups, tokens, shape.d_state))
    module = RECURRENCES[name]
    if name == "mamba2":
        dt = _log_decays(rng, per_head, decays) / np.asarray(heads.a)
        inputs = module.Inputs(x=values, b=jnp.asarray(vectors, dtype), dt=jnp.asarray(dt, jnp.float32))
        return inputs, jnp.asarray(reader, dtype)
    beta = np.full(per_head, 0.999) if keys == "near-equal" else rng.random(per_head)
    channels = (rows, shape.heads, tokens, shape.d_state) if name == "kimi_delta" else per_head
    inputs = module.Inputs(
        v=values,
        k=jnp.asarray(_unit(vectors), dtype),
        log_decay=jnp.asarray(_log_decays(rng, channels, decays), jnp.float32),
        beta=jnp.asarray(beta, jnp.float32),
    )
    return inputs, jnp.asarray(_unit(reader) * shape.d_state**-0.5, dtype)


def draw_state(rng, shape: Shape):
    """A random state [B, H, V, K]."""
    size = (shape.batch, shape.heads, shape.head_dim, shape.d_state)
    return jnp.asarray(rng.normal(size=size), jnp.float32)


def fields(tree) -> list[np.ndarray]:
    """The leaves as float64 arrays, exactly."""
    return [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]


def serial(name: str, state, inputs, reader, heads, lengths=None):
    """Outputs and state of the serial float64 loop; `state` may be the float64 state of an earlier call."""
    constants = fields(heads)
    return getattr(oracles, name)(state, *fields(inputs), *fields(reader), *constants, lengths)


def tokens_of(tree, first: int, last: int):
    """Tokens first..last-1 of inputs or a reader."""

    def cut(field):
        index = (slice(None),) * (field.ndim - 2) + (slice(first, last),)
        return jnp.asarray(np.asarray(field)[index])  # in NumPy: JAX would compile every cut

    return jax.tree.map(cut, tree)


def one_by_one(tree):
    """Every token of inputs or a reader alone, as the leading axis of a scan."""

    def split(field):
        return jnp.expand_dims(jnp.moveaxis(field, field.ndim - 2, 0), field.ndim - 1)

    return jax.tree.map(split, tree)


@jax.jit
def append(ring, inputs, position):
    """The ring with the tokens of `inputs` in slots position, position + 1, ... modulo its size."""

    def write(slots, new):
        axis = slots.ndim - 2
        tokens = jnp.arange(new.shape[axis], dtype=jnp.int32)[None, :]
        index = (position[:, None] + tokens) % slots.shape[axis]

        def row(slots, new, index):
            if axis == 1:
                return slots.at[index].set(new)
            return slots.at[:, index].set(new)

        return jax.vmap(row)(slots, new, index)

    return jax.tree.map(write, ring, inputs)


def empty_ring(name: str, shape: Shape, slots: int, dtype=jnp.float32, fill: float = 0.0):
    """A ring of `slots` slots, every entry `fill`."""
    ring = RECURRENCES[name].zeros(
        shape.batch,
        slots,
        heads=shape.heads,
        groups=shape.groups,
        head_dim=shape.head_dim,
        d_state=shape.d_state,
        dtype=dtype,
    )
    return jax.tree.map(lambda field: jnp.asarray(np.full(field.shape, fill, field.dtype)), ring)
