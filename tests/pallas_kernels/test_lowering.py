"""Every kernel lowers to CUDA at the published shapes on a machine without a GPU (jax >= 0.11.2)."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from bench.shapes import SHAPES, Shape
from pallas_kernels import launch, window
from tests.pallas_kernels import cases

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels lower from jax 0.11.2 on"
)

MORE = [
    ("super", 1),
    ("qwen3.5-4b", 1),
    ("super", 4),
    ("nano-4b", 8),
    ("q122", 4),
    ("qwen3.5-27b", 2),
    ("nano-30b", 1),
    ("ultra", 1),
    ("qwen3.5-2b", 1),
]
ALL = [("nano-4b", 1), ("q122", 1)]


def lower(name, tokens, *, batch=256, length=16, **dtypes):
    shape = SHAPES[name]
    slots = launch.ring_slots(length, tokens)
    draw = functools.partial(
        cases.draw, shape, batch=batch, tokens=tokens, buffer_length=length, slots=slots, **dtypes
    )
    arguments = jax.eval_shape(lambda: draw().arguments())
    kernels = cases.KERNELS[shape.recurrence]
    plan = jax.ShapeDtypeStruct((batch, 4), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    jax.jit(kernels.step, donate_argnums=(0, 1)).trace(*arguments[:5], plan).lower(
        lowering_platforms=("cuda",)
    )
    if tokens == 1:
        state, _, new, reader, constants = arguments[:5]
        jax.jit(kernels.eager, donate_argnums=0).trace(state, new, reader, constants).lower(
            lowering_platforms=("cuda",)
        )


def lower_snapshots(name, tokens, batch=256):
    shape = SHAPES[name]
    draw = functools.partial(cases.draw, shape, batch=batch, tokens=tokens, buffer_length=16, slots=24)
    state, _, new, reader, constants, position, _ = jax.eval_shape(lambda: draw().arguments())
    states = jax.ShapeDtypeStruct((tokens, *state.shape), state.dtype)
    call = jax.jit(cases.KERNELS[shape.recurrence].snapshots, donate_argnums=0)
    call.trace(states, new, reader, constants, position).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("name", "tokens"), ALL)
def test_kernels_lower_to_cuda(name, tokens):
    lower(name, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), MORE)
def test_kernels_lower_to_cuda_at_more_shapes(name, tokens):
    lower(name, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("super", 32), ("q122", 8), ("q122", 32), ("qwen3.5-27b", 32)])
def test_kernels_lower_to_cuda_at_other_lengths_of_the_ring(name, length):
    lower(name, 1, length=length)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("nano-4b", 256), ("q122", 512)])
def test_snapshots_lower_to_cuda(name, batch):
    lower_snapshots(name, 4, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["super", "q122"])
def test_kernels_lower_to_cuda_with_float32_inputs(name):
    lower(name, 1, activation=jnp.float32)


def test_float32_inputs_and_a_long_ring_leave_no_room_for_copies_of_two_groups(monkeypatch):
    small = Shape(recurrence="gated_delta", groups=2, heads=4, head_dim=64, d_state=128)
    monkeypatch.setitem(SHAPES, "small", small)
    lower("small", 1, batch=4, length=32, activation=jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("state", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["super", "q122"])
def test_kernels_lower_to_cuda_with_a_half_width_state(name, state):
    lower(name, 1, state=state)


@pytest.mark.slow
def test_a_window_that_takes_nearly_all_shared_memory_lowers_to_cuda():
    shape = Shape(recurrence="gated_delta", groups=1, heads=8, head_dim=64, d_state=128)
    draw = functools.partial(
        cases.draw, shape, batch=3, tokens=3, buffer_length=4, slots=16, activation=jnp.float32
    )
    arguments = jax.eval_shape(lambda: draw().arguments())
    jax.jit(cases.KERNELS["gated_delta"].window).trace(*arguments).lower(lowering_platforms=("cuda",))


def test_persistent_grids_are_resident():
    """Two CTAs a multiprocessor where they fit; otherwise one, with as many stages as fit."""
    from pallas_kernels.pipeline import CTA_SHARED_BYTES, SMS, fit

    wide = launch.LaunchParameters(2 * SMS, 2)
    assert fit(wide, lambda stages: 20_000 + 40_000 * stages) == (2 * SMS, 2)
    assert fit(wide, lambda stages: 50_000 + 40_000 * stages) == (SMS, 4)
    ctas, stages = fit(wide, lambda stages: 60_000 + 60_000 * stages)
    assert ctas == SMS and 60_000 + 60_000 * stages <= CTA_SHARED_BYTES


def test_small_chunks_divide_a_group():
    from pallas_kernels.window import chunk_tiles

    assert [chunk_tiles(tiles, 4, 100) for tiles in (1, 2, 6, 7, 8, 15, 16)] == [1, 2, 6, 7, 4, 5, 4]
    assert [chunk_tiles(16, 4, share) for share in (0, 1, 2, 3)] == [1, 1, 2, 4]


@pytest.mark.parametrize("change", [{"shared_reader": True}, {"head_constants": 1}])
def test_coefficients_apart_share_neither_reader_nor_constants_with_the_tiles(change):
    with pytest.raises(ValueError, match="neither a shared reader nor constants"):
        dataclasses.replace(cases.KERNELS["gated_delta"].KERNELS.window_rule, **change)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("name", list(SHAPES))
def test_copies_into_shared_memory_begin_at_multiples_of_128_bytes(name, tokens, monkeypatch):
    """The copy engine wants it so; a GPU stops at a misaligned address, which neither lowering nor the
    interpreter sees."""
    seen = {}
    monkeypatch.setattr(window, "run_kernel", lambda *_, scratch, **__: seen.update(scratch))
    monkeypatch.setattr(launch, "device_kind", lambda: None)
    slots = launch.ring_slots(16, tokens)
    draw = functools.partial(cases.draw, SHAPES[name], batch=2, tokens=tokens, buffer_length=16, slots=slots)
    jax.eval_shape(lambda: cases.KERNELS[SHAPES[name].recurrence].window(*draw().arguments()))
    copied = seen["keys"], seen["reader"], *seen["scalars"], *seen["row_scalars"]
    for buffer in copied:
        assert math.prod(buffer.shape[1:]) * jnp.dtype(buffer.dtype).itemsize % 128 == 0
