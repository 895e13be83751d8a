"""The error of the state that is read, head by head, when all configurations see the same layer inputs.

Only the FP32 rows go through the model; every recurrent layer carries the state of each configuration along
under their inputs, so an error is that of the stored formats alone.
"""

import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32

from bench.drift_layers import Configuration, SimulatedLayer, simulated_layers, window_segment
from bench.drift_streams import numbers
from models.base import HybridModel
from replayssm_jax.cache import static
from replayssm_jax.recurrence import mamba2
from replayssm_jax.replay import Segment

SEPARATE = Configuration("fp32", "nvfp4")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadSums:
    """Sums over windows and texts.

    error: squares of (what is read - the FP32 state), by interval. norm: squares of the FP32 state.
    predicted: those of a shared state by the decay alone. Each rounding adds an independent error of the size
    of the NVFP4 copy's, and each window multiplies what is there by its decay.
    log_decay, square: of the log decay over a window's L tokens, and of exp(2 log decay). windows: their
    number, times texts.
    """

    error: Float32[Array, "I C H"]
    norm: Float32[Array, "I H"]
    predicted: Float32[Array, "I H"]
    log_decay: Float32[Array, " H"]
    square: Float32[Array, " H"]
    windows: Float32[Array, ""]

    @classmethod
    def zeros(cls, intervals: int, configurations: int, heads: int) -> "HeadSums":
        """Sums of nothing."""
        return cls(
            error=jnp.zeros((intervals, configurations, heads), jnp.float32),
            norm=jnp.zeros((intervals, heads), jnp.float32),
            predicted=jnp.zeros((intervals, heads), jnp.float32),
            log_decay=jnp.zeros((heads,), jnp.float32),
            square=jnp.zeros((heads,), jnp.float32),
            windows=jnp.float32(0.0),
        )


def window_log_decay(recurrence: ModuleType, inputs: Any, heads: Any) -> Float32[Array, "B H"]:
    """Log decay of every head over all tokens of a window."""
    if recurrence is mamba2:
        return jnp.sum(inputs.dt * heads.a.reshape(1, 1, -1), axis=1)
    return jnp.sum(inputs.log_decay, axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeasuredLayer:
    """A recurrent layer of rows [text] with the states of every configuration.

    states: of rows [configuration, text], FP32 first. conv: columns of the rows. edges: where intervals of
    positions begin. variance: predicted squared error of a shared NVFP4 state.
    """

    states: SimulatedLayer
    conv: Float[Array, "texts W C"]
    sums: HeadSums
    variance: Float32[Array, "texts H"]
    edges: tuple[int, ...] = static()

    def recur(
        self, recurrence: ModuleType, inputs: Any, reader: Array, heads: Any, segment: Segment
    ) -> tuple[Float32[Array, "texts L H V"], "MeasuredLayer"]:
        """Outputs of a window under FP32, and the layer with the window's errors added."""
        texts, count = reader.shape[0], len(self.states.configurations)
        read = self.states.read().reshape(count, texts, *self.states.checkpoint.shape[1:])
        exact = read[:1]
        error = jnp.sum(jnp.square(read - exact), axis=(3, 4))
        norm = jnp.sum(jnp.square(exact[0]), axis=(0, 2, 3))
        total = window_log_decay(recurrence, inputs, heads)
        # The state that a window begins with has been rounded once more since the window before.
        variance = self.variance + error[self.states.configurations.index(SEPARATE)]
        error = jnp.sum(error, axis=1)
        edges = jnp.asarray(self.edges, jnp.int32)
        here = (jnp.sum(segment.position[0] >= edges) - 1 == jnp.arange(edges.size)).astype(jnp.float32)
        sums = HeadSums(
            error=self.sums.error + here[:, None, None] * error[None],
            norm=self.sums.norm + here[:, None] * norm[None],
            predicted=self.sums.predicted + here[:, None] * jnp.sum(variance, axis=0)[None],
            log_decay=self.sums.log_decay + jnp.sum(total, axis=0),
            square=self.sums.square + jnp.sum(jnp.exp(2.0 * total), axis=0),
            windows=self.sums.windows + texts,
        )
        inputs, reader = jax.tree.map(
            lambda field: jnp.tile(field, (count, *(1,) * (field.ndim - 1))), (inputs, reader)
        )
        before = self.states.checkpoint
        outputs, state = self.states.through(recurrence, before, inputs, reader, heads, segment)
        states = self.states.rewritten(state, segment)
        variance = variance * jnp.exp(2.0 * total)
        return outputs[:texts], replace(self, states=states, sums=sums, variance=variance)


def measured_layers(
    model: HybridModel,
    texts: int,
    max_length: int,
    configurations: tuple[Configuration, ...],
    seeds: UInt32[Array, " texts"],
    edges: tuple[int, ...],
) -> tuple:
    """Empty layers for rows [text]; see `simulated_layers`."""
    columns = simulated_layers(model, texts, max_length, configurations[:1], seeds)
    states = simulated_layers(model, texts, 1, configurations, seeds)

    def layer(plain: Any, own: Any) -> Any:
        if not isinstance(plain, SimulatedLayer):
            return plain
        heads = plain.checkpoint.shape[1]
        sums = HeadSums.zeros(len(edges), len(configurations), heads)
        own = replace(own, conv=jnp.zeros((0,), plain.conv.dtype))
        variance = jnp.zeros((texts, heads), jnp.float32)
        return MeasuredLayer(states=own, conv=plain.conv, sums=sums, variance=variance, edges=edges)

    return tuple(map(layer, columns, states))


@functools.partial(jax.jit, donate_argnums=(1, 2))
def measure_windows(
    model: HybridModel, layers: tuple, position: Int32[Array, ""], windows: Int32[Array, "n texts L"]
) -> tuple[tuple, None]:
    """The layers and the position behind n windows of every text, and nothing else."""

    def body(carry: tuple, window: Array) -> tuple[tuple, None]:
        layers, position = carry
        _, layers = model(window, window_segment(position, *window.shape), layers)
        return (layers, position + jnp.int32(window.shape[1])), None

    return jax.lax.scan(body, (layers, position), windows)


def head_record(layers: tuple, configurations: tuple[Configuration, ...], length: int) -> dict:
    """The fields of a record, by recurrent layer and head.

    memory: tokens over which the state decays by e. rho_squared: mean over windows of the squared decay over
    L tokens. predicted: of a shared NVFP4 state, as `HeadSums` has it, relative, at the longest interval.
    errors: for every configuration relative squared errors of what is read, at the longest
    interval. growth: their median over heads, by interval.
    """
    measured = [layer for layer in layers if isinstance(layer, MeasuredLayer)]
    sums = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), layer.sums) for layer in measured]
    relative = [s.error / np.maximum(s.norm[:, None], 1e-300) for s in sums]
    longest = int(np.flatnonzero(sums[0].norm.sum(axis=1))[-1])

    def rows(values: list) -> list:
        return [numbers(row, 5) for row in values]

    def growth(index: int) -> list:
        typical = [np.median(np.concatenate([r[i, index] for r in relative])) for i in range(longest + 1)]
        return numbers(np.asarray(typical), 5)

    return {
        "layers": [layer.states.index for layer in measured],
        "memory": rows([-length * s.windows / np.minimum(s.log_decay, -1e-9) for s in sums]),
        "rho_squared": rows([s.square / s.windows for s in sums]),
        "predicted": rows([s.predicted[longest] / np.maximum(s.norm[longest], 1e-300) for s in sums]),
        "errors": {
            item.name: rows([r[longest, index] for r in relative])
            for index, item in enumerate(configurations)
        },
        "growth": {item.name: growth(index) for index, item in enumerate(configurations)},
    }
