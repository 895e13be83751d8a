"""The kernels in the Mosaic interpreter, on small shapes, against the float64 loop; needs no GPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.shapes import Shape
from pallas_kernels import launch
from tests.pallas_kernels import cases

old = launch.jax_version() < launch.MINIMUM_JAX
needs_interpreter = pytest.mark.skipif(old, reason="the interpreter runs the kernels from jax 0.11.2 on")

SMALL = {
    "mamba2": Shape(recurrence="mamba2", groups=2, heads=4, head_dim=32, d_state=64),
    "mamba2-head-80": Shape(recurrence="mamba2", groups=1, heads=4, head_dim=80, d_state=64),
    "gated_delta": Shape(recurrence="gated_delta", groups=2, heads=4, head_dim=64, d_state=128),
}
SLOW = pytest.mark.slow


def interpreter(detect_races=False):
    return launch.mosaic_gpu().InterpretGPUParams(detect_races=detect_races)


def check_step(case, flush, **options):
    wanted, folded = cases.truth(case)
    plan = launch.plan(jnp.asarray(flush), case.start, case.length)
    call = functools.partial(case.kernels.step, **options)
    call = call if options else jax.jit(call)
    outputs, checkpoint, ring = call(*case.arguments()[:5], plan)
    assert cases.error(outputs, wanted) < 1e-6
    flush = np.asarray(flush)
    before = np.asarray(case.checkpoint.astype(jnp.float32))
    after = np.asarray(checkpoint.astype(jnp.float32))
    np.testing.assert_array_equal(after[~flush], before[~flush])
    empty = np.asarray(case.length) == 0
    np.testing.assert_array_equal(after[empty], before[empty])
    if (flush & ~empty).any():
        assert cases.error(after[flush], folded[flush]) < 1e-6
    for got, want in zip(ring, cases.appended(case), strict=True):
        np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), want)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "tokens", "dtypes"),
    [
        ("mamba2", 1, {}),
        ("gated_delta", 2, {}),
        pytest.param("mamba2-head-80", 2, {}, marks=SLOW),
        pytest.param("gated_delta", 1, {}, marks=SLOW),
        pytest.param("gated_delta", 3, {"activation": jnp.float32}, marks=SLOW),
        pytest.param("mamba2", 4, {"activation": jnp.float32}, marks=SLOW),
    ],
)
def test_step_is_the_float64_loop(name, tokens, dtypes):
    case = cases.draw(SMALL[name], batch=3, tokens=tokens, buffer_length=7, slots=8, seed=tokens, **dtypes)
    check_step(
        case,
        [True, False, True],
        interpret=interpreter(),
        parameters=launch.LaunchParameters(2, 2, 8, beside=tokens % 2, claims=tokens > 1),
    )


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(("rows_of_one_launch", "flushing"), [(0, [0, 5, 6]), (16, [5])])
@pytest.mark.parametrize("name", ["mamba2", "gated_delta"])
def test_rows_flush_in_the_kernel_of_the_window(name, rows_of_one_launch, flushing, monkeypatch):
    monkeypatch.setattr(launch, "ONE_LAUNCH_ROWS", rows_of_one_launch)
    case = cases.draw(SMALL[name], batch=8, tokens=1, buffer_length=7, slots=8)
    parameters = launch.LaunchParameters(3, 2, 8, beside=2, claims=True)
    check_step(case, [row in flushing for row in range(8)], interpret=interpreter(), parameters=parameters)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "tokens", "dtypes"),
    [
        ("mamba2", 1, {"state": jnp.bfloat16}),
        ("gated_delta", 2, {"state": jnp.float16}),
        pytest.param("mamba2", 2, {"state": jnp.float16, "activation": jnp.float32}, marks=SLOW),
        pytest.param("gated_delta", 1, {}, marks=SLOW),
    ],
)
def test_window_is_exact_and_races_on_dead_ring_slots_only(name, tokens, dtypes, capsys):
    """Outputs as exact as those of a float32 state; copies into shared memory never race with its readers.

    A copy of live slots may take dead ones along while another CTA appends to them; their weight is zero.
    """
    case = cases.draw(SMALL[name], batch=3, tokens=tokens, buffer_length=7, slots=8, seed=tokens, **dtypes)
    wanted, _ = cases.truth(case)
    outputs, _ = case.kernels.window(
        *case.arguments(),
        interpret=interpreter(detect_races=True),
        parameters=launch.LaunchParameters(2, 2, 8),
    )
    assert cases.error(outputs, wanted) < 1e-6
    global_memory = "0"
    assert set(re.findall(r" of \w+\(memory_space_id=(\d+)", capsys.readouterr().out)) == {global_memory}


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "gated_delta"])
def test_a_step_with_fewer_tiles_than_ctas(name):
    case = cases.draw(SMALL[name], batch=3, tokens=1, buffer_length=7, slots=8)
    parameters = launch.LaunchParameters(7, 2, 8)
    check_step(case, [True, False, True], interpret=interpreter(), parameters=parameters)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "gated_delta"])
def test_eager_step_is_the_float64_loop(name):
    case = cases.draw(SMALL[name], batch=2, tokens=1, buffer_length=1, slots=8)
    wanted, _ = cases.truth(case)
    outputs, state = case.kernels.eager(
        case.checkpoint, case.new, case.reader, case.constants, interpret=interpreter()
    )
    assert cases.error(outputs, wanted) < 1e-6
    assert state.shape == case.checkpoint.shape


@needs_interpreter
@pytest.mark.parametrize("name", ["mamba2", pytest.param("gated_delta", marks=SLOW)])
def test_snapshots_keep_the_state_after_every_token(name):
    """Three slots, two tokens: the state of the last committed token is read, two others are replaced."""
    case = cases.draw(SMALL[name], batch=2, tokens=2, buffer_length=2, slots=8)
    case = dataclasses.replace(case, length=jnp.zeros((2,), jnp.int32))
    position = np.array([4, 9], np.int32)
    rows = np.arange(2)
    others = np.float32(np.random.default_rng(0).normal(size=(3, *case.checkpoint.shape)))
    others[(position - 1) % 3, rows] = np.asarray(case.checkpoint)
    outputs, states = case.kernels.snapshots(
        jnp.asarray(others),
        case.new,
        case.reader,
        case.constants,
        jnp.asarray(position),
        interpret=interpreter(),
    )
    wanted, _ = cases.truth(case)
    assert cases.error(outputs, wanted) < 1e-6
    for count in (1, 2):
        new = tuple(x[:, :, :count] if x.ndim == 4 else x[:, :count] for x in case.new)
        committed = tuple(jnp.concatenate([x] * 4, axis=2 if x.ndim == 4 else 1) for x in new)
        after = dataclasses.replace(
            case, ring=committed, start=jnp.zeros((2,), jnp.int32), length=jnp.full((2,), count, jnp.int32)
        )
        _, folded = cases.truth(after)
        assert cases.error(states[(position + count - 1) % 3, rows], folded) < 1e-6
    kept = np.asarray(states)[(position - 1) % 3, rows]
    np.testing.assert_array_equal(kept, np.asarray(case.checkpoint))


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize(("name", "seen"), [("mamba2", True), ("gated_delta", False)])
def test_the_only_race_of_a_step_is_between_an_append_and_copies_of_its_dead_slot(name, seen, capsys):
    """A copy of a granule of ring rows may overtake the append into it: that slot's weight is 0. Gated
    DeltaNet's copies come so early that the interpreter sees none."""
    case = cases.draw(SMALL[name], batch=3, tokens=2, buffer_length=7, slots=8)
    parameters = launch.LaunchParameters(2, 2, 8)
    check_step(case, [True, False, True], interpret=interpreter(detect_races=True), parameters=parameters)
    races = capsys.readouterr().out.split("RACE DETECTED")[1:]
    assert races or not seen
    for race in races:
        write, read = (
            next(line for line in race.splitlines() if kind in line) for kind in ("write of", "read of")
        )
        assert "append_group" in write and ".issue" in read


def test_old_jax_is_refused_in_a_sentence():
    if not old:
        launch.require_jax()
        return
    draw = functools.partial(cases.draw, SMALL["mamba2"], batch=1, tokens=1, buffer_length=1, slots=8)
    shapes = jax.eval_shape(lambda: draw().arguments())
    arguments = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)
    with pytest.raises(launch.Unsupported, match=r"need jax >= 0\.11\.2, this is jax"):
        cases.KERNELS["mamba2"].window(*arguments)


@needs_interpreter
def test_sizes_that_cannot_be_served_are_refused_with_the_sizes():
    odd = Shape(recurrence="mamba2", groups=1, heads=6, head_dim=24, d_state=18)
    draw = functools.partial(cases.draw, odd, batch=1, tokens=1, buffer_length=1, slots=8)
    shapes = jax.eval_shape(lambda: draw().arguments())
    arguments = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)
    with pytest.raises(launch.Unsupported, match="multiple of 64, got 6 x 24"):
        cases.KERNELS["mamba2"].window(*arguments)


def test_plan_puts_flushing_rows_last():
    index = jnp.arange(5, dtype=jnp.int32)
    cursor, counts = jax.jit(launch.plan)(
        jnp.asarray([True, False, True, False, False]), index + 10, index + 20
    )
    assert counts.tolist() == [3, 2, 0, 0]
    assert cursor.tolist() == [[row, row + 10, row + 20, 0] for row in (1, 3, 4, 0, 2)]
