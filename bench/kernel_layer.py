"""One layer of ours for the kernel benchmark: random buffers, compiled step, times of its kernels."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import kernel_check, timing
from bench.kernel_cases import Case, bounds, programs, record, step_means
from bench.shapes import SHAPES, Shape
from pallas_kernels import gated_delta, launch, mamba2, rewrite
from replayssm_jax import precision
from replayssm_jax.precision import BITS

KERNELS = {"mamba2": mamba2, "gated_delta": gated_delta}
ACTIVATION = jnp.bfloat16


def draw(shape: Shape, batch: int, tokens: int, slots: int, state: str, recurrence: str = "") -> tuple:
    """Random (checkpoint, copy, ring), (new tokens, reader, constants) and ring origins of a layer.

    Formats as in `kernel_cases.Case`.
    """
    keys = iter(jax.random.split(jax.random.key(batch), 16))
    width = shape.heads // shape.groups * shape.head_dim

    def normal(*size: int, dtype: Any) -> jax.Array:
        return jax.random.normal(next(keys), size, jnp.float32).astype(dtype)

    def uniform(low: float, high: float, *size: int) -> jax.Array:
        return jax.random.uniform(next(keys), size, jnp.float32, low, high)

    def tokens_of(count: int) -> tuple:
        values = normal(batch, shape.groups, count, width, dtype=ACTIVATION)
        vectors = normal(batch, shape.groups, count, shape.d_state, dtype=jnp.float32)
        vectors = (vectors / np.sqrt(shape.d_state)).astype(ACTIVATION)
        heads = (batch, count, shape.heads)
        if shape.recurrence == "mamba2":
            return values, vectors, uniform(0.001, 0.1, *heads)
        return values, vectors, -uniform(0.001, 0.5, *heads), uniform(0.1, 0.9, *heads)

    constants = None
    if shape.recurrence == "mamba2":
        constants = jnp.stack([jnp.linspace(-8.0, -1.0, shape.heads), jnp.ones(shape.heads)])
    exact = normal(batch, shape.heads, shape.head_dim, shape.d_state, dtype=jnp.float32)
    checkpoint, copy = precision.encode(exact, recurrence or state), None
    if recurrence:
        copy = precision.encode(precision.decode(checkpoint), state)
        copy = precision.in_order(copy, lanes=True) if isinstance(copy, precision.Scaled) else copy
    ring = tokens_of(slots)
    reader = normal(batch, shape.groups, tokens, shape.d_state, dtype=ACTIVATION)
    start = jax.random.randint(next(keys), (batch,), 0, 10_000)
    return (checkpoint, copy, ring), (tokens_of(tokens), reader, constants), start


def replay_step(case: Case, kernels: Any, parameters: launch.LaunchParameters) -> Callable:
    """The step of buffers as `draw` makes them, inputs and a row plan: outputs and the buffers after it."""
    options = {"out_dtype": ACTIVATION, "parameters": parameters}

    def plain(buffers: tuple, inputs: tuple, plan: tuple) -> tuple:
        checkpoint, copy, ring = buffers
        outputs, checkpoint, ring = kernels.step(checkpoint, ring, *inputs, plan, **options)
        return outputs, checkpoint, copy, ring

    def stored(buffers: tuple, inputs: tuple, plan: tuple) -> tuple:
        *both, ring = buffers
        arrays = (tuple(jax.tree.leaves(one)) for one in both)
        formats = rewrite.Formats(case.recurrence, case.state)
        outputs, *new, ring = kernels.KERNELS.stored_step(*arrays, ring, *inputs, plan, formats, **options)
        kept = (jax.tree.unflatten(jax.tree.structure(a), b) for a, b in zip(both, new, strict=True))
        return outputs, *kept, ring

    return stored if case.recurrence else plain


@functools.cache
def helpers(case: Case) -> tuple:
    """Compiled programs around the step, whatever its launch parameters: buffers and inputs, row plan, rows
    to check, and a read that fills the L2 cache; then the shapes that the first two return."""
    slots = launch.ring_slots(case.buffer_length, case.tokens)
    sizes = SHAPES[case.shape], case.batch, case.tokens, slots, case.state, case.recurrence
    make = jax.jit(functools.partial(draw, *sizes))
    buffers, inputs, start = jax.eval_shape(make)
    rows = jax.ShapeDtypeStruct((case.batch,), jnp.bool_), start, start
    plan = jax.jit(launch.plan).lower(*rows)
    outputs = jax.ShapeDtypeStruct(
        (case.batch, case.tokens, SHAPES[case.shape].heads, SHAPES[case.shape].head_dim), ACTIVATION
    )
    seen = buffers[: 1 if case.method == "eager" else None], inputs[:2], outputs
    cold = jax.ShapeDtypeStruct((timing.FLUSH_BYTES // 4,), jnp.int32)
    return (
        make.lower().compile(),
        plan.compile(),
        kernel_check.take.lower(seen, jax.ShapeDtypeStruct((2,), jnp.int32)).compile(),
        jax.jit(jnp.sum).lower(cold).compile(),
        (buffers, inputs, plan.out_info),
    )


class OwnLayer:
    """Our kernels: traced and compiled at once; `measure` draws the buffers and times."""

    def __init__(self, case: Case, repeats: int) -> None:
        self.case, self.repeats = case, repeats
        shape = SHAPES[case.shape]
        parameters = launch.step_parameters(
            jax.devices()[0].device_kind, shape.recurrence, case.tokens, BITS[case.state] / 8
        )
        parameters = dataclasses.replace(parameters, **dict(case.launch))
        kernels = KERNELS[shape.recurrence]
        self.make, self.plan, self.take, self.cool, shapes = helpers(dataclasses.replace(case, launch=()))
        buffers, inputs, plan = shapes
        step = replay_step(case, kernels, parameters)
        if case.method == "eager":

            def step(buffers: tuple, inputs: tuple, plan: tuple) -> tuple:
                del plan
                return kernels.eager(buffers[0], *inputs, out_dtype=ACTIVATION)

            buffers = buffers[:1]
        self.step = jax.jit(step, donate_argnums=0).lower(buffers, inputs, plan).compile()

    def measure(self) -> list[dict]:
        case = self.case
        buffers, inputs, start = self.make()
        replay = case.method == "replay"
        if not replay:
            buffers = buffers[:1]
        cold = jnp.ones(timing.FLUSH_BYTES // 4, jnp.int32)
        held = {"buffers": buffers, "sum": None}
        del buffers

        def go(plan: tuple) -> None:
            held["outputs"], *held["buffers"] = self.step(tuple(held["buffers"]), inputs, plan)

        def cool() -> None:
            held["sum"] = self.cool(cold)

        length = case.buffer_length
        listed = programs(case) if replay else [("decode", "synchronised", np.full((1, case.batch), length))]
        launches, sizes = [], []
        for _, _, lengths in listed:
            plans = [
                self.plan(jnp.asarray(row + case.tokens > length), start, jnp.asarray(row, jnp.int32))
                for row in lengths
            ]
            passes = max(1, self.repeats // (timing.ROUNDS * len(plans)))
            launches += [functools.partial(go, plan) for plan in plans] * passes
            sizes.append((len(plans), passes))
        launches[0]()
        clock = {
            "cool": cool,
            "wait": lambda: jax.block_until_ready(held),
            "keep": lambda name: "mosaic" in name,
        }
        times = np.array([timing.kernel_times(launches, **clock) for _ in timing.rounds()])
        records = []
        for (operation, phase, lengths), (steps, passes) in zip(listed, sizes, strict=True):
            mine, times = times[:, : steps * passes], times[:, steps * passes :]
            # Eager: every row rewrites its state and reads no ring.
            read = lengths if replay else np.zeros_like(lengths)
            fields = bounds(case, read, lengths + case.tokens > length)
            records.append(record(case, step_means(mine, steps), operation, phase, **fields))
        lengths = np.asarray(listed[0][2][0]) if replay else np.zeros(case.batch, int)
        rows = kernel_check.chosen_rows(lengths + case.tokens > length)

        def seen() -> tuple:
            arrays = tuple(held["buffers"]), inputs[:2], held["outputs"]
            return jax.tree.map(np.asarray, self.take(arrays, rows))

        before, *_ = seen()
        launches[0]()
        after, given, outputs = seen()
        self.checked = before, given, after, outputs, np.asarray(start)[rows], lengths[rows]
        self.records = records
        return records

    def check(self) -> None:
        """Compares outputs and states of two rows of the timed launch with a serial float64 loop."""
        before, given, after, outputs, start, lengths = self.checked
        flushes = lengths + self.case.tokens > self.case.buffer_length
        with jax.default_device(jax.devices("cpu")[0]):
            before, after = (kernel_check.states_of(buffers, flushes) for buffers in (before, after))
        errors = kernel_check.errors(SHAPES[self.case.shape], before, given, after, outputs, start, lengths)
        if not errors["error"] < kernel_check.TOLERANCE:
            raise RuntimeError(f"wrong results: {errors}")
        for one in self.records:
            one.update(errors)
