"""Speculative verification the conventional way, the baseline of `bench.e2e_spec_decode_throughput`.

A row keeps its state after each of the last S tokens, so that decoding goes on from any of them: S states of
memory and T states written a step. The state after position p lies in slot p mod S; a commit moves the cursor
and nothing else, since the cursor says which slot is read next. Convolution windows, keys and values roll
back by position as in replay. `step_core` and `commit_core` of `replayssm_jax.replay` serve the cache; a row
must accept at least one token of every step.
"""

import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.base import HybridModel
from pallas_kernels import gated_delta, mamba2
from replayssm_jax.cache import Cache, RecurrentLayer, static
from replayssm_jax.precision import decode
from replayssm_jax.replay import Segment

KERNELS = {"mamba2": mamba2, "gated_delta": gated_delta}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConventionalLayer:
    """One recurrent layer's buffers.

    states: the state after position p in slot p mod S. conv, heads, recurrence: as in `RecurrentLayer`.
    implementation: "xla" (portable, copies states) or "pallas" (one kernel, in place).
    """

    states: Float[Array, "S B H V K"]
    conv: Float[Array, "B W C"]
    heads: Any
    recurrence: str = static()
    implementation: str = static()

    def state(self, position: Int32[Array, " B"]) -> Float[Array, "B H V K"]:
        """The state of every row before the token at `position`."""
        return self.states[self._slot(position - 1), self._rows()]

    def recur(
        self,
        recurrence: ModuleType,
        inputs: Any,
        reader: Float[Array, "B G T K"],
        heads: Any,
        segment: Segment,
    ) -> tuple[Float[Array, "B T H V"], "ConventionalLayer"]:
        """Outputs of a segment, and the layer with the state after every token of a step (prefill: the
        last)."""
        if segment.mode == "prefill":
            before = self.state(segment.position)
            outputs, state = recurrence.prefill(before, inputs, reader, heads, segment.lengths)
            return outputs, self._with(segment.position + segment.lengths - 1, state)
        if self.implementation == "pallas":
            outputs, states = _kernel(
                self.states, inputs, reader, heads, segment.position, recurrence=self.recurrence
            )
            return outputs, replace(self, states=states)
        layer, outputs, state = self, [], self.state(segment.position)
        for t in range(segment.tokens):
            token = jax.tree.map(functools.partial(_token, t=t), inputs)
            output, state = recurrence.eager_step(state, token, _token(reader, t=t), heads)
            outputs.append(output)
            layer = layer._with(segment.position + t, state)
        return jnp.concatenate(outputs, axis=1), layer

    def _slot(self, position: Int32[Array, " B"]) -> Int32[Array, " B"]:
        return position % self.states.shape[0]

    def _rows(self) -> Int32[Array, " B"]:
        return jnp.arange(self.states.shape[1], dtype=jnp.int32)

    def _with(self, position: Int32[Array, " B"], state: Float[Array, "B H V K"]) -> "ConventionalLayer":
        states = self.states.at[self._slot(position), self._rows()].set(state, unique_indices=True)
        return replace(self, states=states)


def _token(field: Array, t: int) -> Array:
    """Token t of a field of a recurrence's inputs, its axis kept."""
    return jax.lax.slice_in_dim(field, t, t + 1, axis=field.ndim - 2)


# One inner program a layer kind, as for the kernels of the library.
@functools.partial(jax.jit, static_argnames="recurrence")
def _kernel(states, inputs, reader, heads, position, *, recurrence: str):
    constants = jax.tree.leaves(heads)
    return KERNELS[recurrence].snapshots(
        states,
        tuple(jax.tree.leaves(inputs)),
        reader,
        jnp.stack(constants) if constants else None,
        position,
    )


def conventional_cache(
    model: HybridModel, batch: int, max_length: int, window: int, implementation: str = "xla"
) -> Cache:
    """An empty cache of `batch` rows whose steps take up to `window` tokens; call it inside `jit`.

    It holds `window` float32 states a row and recurrent layer. max_length: tokens a row can hold.
    """
    cache = model.init_cache(batch, max_length, None)

    def layer(eager):
        if not isinstance(eager, RecurrentLayer):
            return eager
        batch, columns, channels = eager.conv.shape
        return ConventionalLayer(
            states=jnp.zeros((window, *decode(eager.checkpoint).shape), jnp.float32),
            conv=jnp.zeros((batch, columns - cache.window + window, channels), eager.conv.dtype),
            heads=eager.heads,
            recurrence=eager.recurrence,
            implementation=implementation,
        )

    return replace(cache, layers=tuple(layer(eager) for eager in cache.layers))


def states(cache: Cache) -> tuple[Float[Array, "B H V K"], ...]:
    """The state of every recurrent layer at the committed position, as `rs.materialize` of other caches."""
    return tuple(
        layer.state(cache.position) for layer in cache.layers if isinstance(layer, ConventionalLayer)
    )
