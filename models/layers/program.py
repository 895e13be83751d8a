"""A layer as one inner program, so that equal layers of a model are traced and lowered once."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax.cache import AttentionSpec, LayerSpec, RecurrentLayer, RecurrentSpec
from replayssm_jax.replay import Segment


def run_layers(blocks: Sequence, x: Any, segment: Segment, layers: Sequence | None) -> tuple[Any, tuple]:
    """The blocks one after the other: the last one's stream, and the layers' caches moved on.

    layers: the blocks' caches; blocks of one kind that keep something of the same sizes are calls of one
    program, which XLA inlines. None (training, scoring): nothing is kept, and the blocks are called as they
    are.
    """
    caches = []
    for index, block in enumerate(blocks):
        if layers is None:
            x, cache = block(x, segment, None)
        else:
            x, cache = _run(block, x, segment, layers[index])
        caches.append(cache)
    return x, tuple(caches)


def _run(block: Any, x: Any, segment: Segment, layer: Any) -> tuple[Any, Any]:
    program = _program(_kind(block.spec))
    if not isinstance(layer, RecurrentLayer):
        return program(block, x, segment, layer)
    # What tells equal layers apart goes in as an array, and only where it is needed.
    if segment.seed is not None:
        segment = replace(segment, layer=jnp.full_like(segment.position, layer.index))
    x, moved = program(block, x, segment, replace(layer, index=0))
    return x, replace(moved, index=layer.index)


def _kind(spec: LayerSpec) -> str:
    if isinstance(spec, RecurrentSpec):
        return spec.recurrence
    return "attention" if isinstance(spec, AttentionSpec) else "mlp"


@functools.cache
def _program(kind: str) -> Callable:
    """One for a kind; JAX keeps a trace for every structure of its arguments."""

    def run(block, x, segment, layer):
        return block(x, segment, layer)

    run.__name__ = run.__qualname__ = f"{kind}_layer"
    return jax.jit(run)
