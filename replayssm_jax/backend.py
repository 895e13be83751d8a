"""Which backend serves a cache, and the calls into the GPU kernels."""

import dataclasses
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replayssm_jax.config import ReplayConfig

logger = logging.getLogger(__name__)

KERNELS = {"mamba2": "pallas_kernels.mamba2", "gated_delta": "pallas_kernels.gated_delta"}
_logged: set[str] = set()


def resolve(replay: ReplayConfig, specs: Sequence[Any], batch: int) -> ReplayConfig:
    """The same configuration with the backend that will serve it: "xla" or "pallas".

    specs: a model's layer specs. "auto" takes the portable backend and logs once why: the kernels have been
    checked alone on a GPU, not yet inside whole models. Raises ValueError when "pallas" is asked for and
    cannot be served.
    """
    if replay.implementation == "xla":
        return replay
    reason = _refusal(replay, specs, batch)
    if replay.implementation == "pallas":
        if reason is not None:
            raise ValueError(f'implementation="pallas" cannot be served: {reason}.')
        return replay
    reason = reason or 'the GPU kernels serve on request only, implementation="pallas"'
    if reason not in _logged:
        _logged.add(reason)
        logger.info("decoding with the portable backend: %s", reason)
    return dataclasses.replace(replay, implementation="xla")


def _refusal(replay: ReplayConfig, specs: Sequence[Any], batch: int) -> str | None:
    """Why the GPU kernels cannot serve a cache; None when they can."""
    from pallas_kernels import launch

    try:
        launch.require_jax()
    except launch.Unsupported as error:
        return str(error)
    if jax.default_backend() != "gpu":
        return f"the Pallas kernels need a GPU, and the default backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", "0.0"))
    if float(capability) < 9.0:
        return f"the Pallas kernels need a Hopper GPU or newer, this one has compute capability {capability}"
    return size_refusal(replay, specs, batch)


def size_refusal(replay: ReplayConfig, specs: Sequence[Any], batch: int) -> str | None:
    """Why the GPU kernels cannot serve these sizes; None when they can."""
    from pallas_kernels import launch
    from pallas_kernels.pipeline import Geometry

    slots = ring_slots(dataclasses.replace(replay, implementation="pallas"))
    for spec in specs:
        name = getattr(spec, "recurrence", None)
        if name is None:
            continue
        if name not in KERNELS:
            return f"there are no Pallas kernels for {name}"
        geometry = Geometry(batch, spec.groups, spec.heads, spec.head_dim, spec.d_state, slots, replay.window)
        try:
            importlib.import_module(KERNELS[name]).KERNELS.check(geometry)
        except launch.Unsupported as error:
            return str(error)
    return None


def ring_slots(replay: ReplayConfig) -> int:
    """R: slots of a ring, at least buffer_length + window; the GPU kernels read a multiple of 8."""
    granule = 8 if replay.implementation == "pallas" else 1
    return -(-(replay.buffer_length + replay.window) // granule) * granule


def row_plan(flush: jax.Array, start: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows that do not flush, then those that do, for the kernels of every layer of a step.

    flush: bool [B]. start, length: int32 [B], before the flush.
    """
    from pallas_kernels import launch

    return launch.plan(flush, start, length)


def kernel_step(
    recurrence: str, checkpoint: jax.Array, ring: Any, inputs: Any, reader: jax.Array, heads: Any, plan: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """Fold, outputs and append of one layer by the GPU kernels: (outputs, checkpoint, ring), in place.

    Arguments as for `recur`, the ring without the new tokens; plan from `row_plan`.
    """
    return _kernel_step(checkpoint, ring, inputs, reader, heads, plan, recurrence=recurrence)


def _step(checkpoint, ring, inputs, reader, heads, plan, *, recurrence: str):
    constants = jax.tree.leaves(heads)
    outputs, checkpoint, slots = importlib.import_module(KERNELS[recurrence]).step(
        checkpoint,
        tuple(jax.tree.leaves(ring)),
        tuple(jax.tree.leaves(inputs)),
        reader,
        jnp.stack(constants) if constants else None,
        plan,
    )
    return outputs, checkpoint, jax.tree.unflatten(jax.tree.structure(ring), slots)


# One inner program a layer kind: its kernels are traced and lowered once, however many layers use them.
_kernel_step = jax.jit(_step, static_argnames="recurrence")
