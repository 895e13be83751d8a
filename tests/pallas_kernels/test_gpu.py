"""The compiled kernels on a GPU against the float64 loop: `pytest -m gpu tests/pallas_kernels`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.shapes import SHAPES
from pallas_kernels import launch
from tests.pallas_kernels import cases
from tests.pallas_kernels.test_interpret import check_step

pytestmark = pytest.mark.gpu

TOKENS = [1, 2, 4, 8]
NAMES = ["super", "nano-4b", "q122", "qwen3.5-4b", "qwen3.5-27b", "qwen3.5-2b"]


def draw(name, tokens, buffer_length=16, batch=4, **options):
    slots = launch.ring_slots(buffer_length, tokens)
    shape = SHAPES[name]
    return cases.draw(shape, batch=batch, tokens=tokens, buffer_length=buffer_length, slots=slots, **options)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", NAMES)
def test_step_is_the_float64_loop(name, tokens):
    check_step(draw(name, tokens, seed=tokens), [True, False, True, False])


@pytest.mark.parametrize("flushing", [[3, 11], range(2, 30), range(32)], ids=["few", "many", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_flush_in_the_kernel_of_the_window(name, flushing):
    case = draw(name, 1, batch=32)
    check_step(case, [row in flushing for row in range(32)])


@pytest.mark.parametrize("every", [2, 16])
@pytest.mark.parametrize("name", ["super", "q122"])
def test_one_kernel_stores_what_two_do_every_time(name, every):
    """Many rows: some CTAs read already while others fold."""
    case = draw(name, 1, batch=256)
    plan = launch.plan(jnp.arange(256) % every == 0, case.start, case.length)
    arguments = *case.arguments()[:5], plan
    parameters = launch.LaunchParameters(132, 4, claims=True)
    wanted = jax.jit(functools.partial(case.kernels.step, parameters=parameters))(*arguments)
    step = jax.jit(case.kernels.step)
    same = jax.jit(lambda a, b: jnp.stack(jax.tree.leaves(jax.tree.map(jnp.array_equal, a, b))).all())
    assert [bool(same(step(*arguments), wanted)) for _ in range(40)] == [True] * 40


@pytest.mark.parametrize("buffer_length", [8, 32])
@pytest.mark.parametrize("name", ["super", "q122"])
def test_step_at_other_buffer_lengths(name, buffer_length):
    check_step(draw(name, 1, buffer_length), [False, True, False, True])


@pytest.mark.parametrize(("tokens", "buffer_length"), [(1, 16), (3, 32)])
@pytest.mark.parametrize("name", ["nano-4b", "qwen3.5-2b", "qwen3.5-27b"])
def test_flush_of_every_length_after_spiky_decays(name, tokens, buffer_length):
    slots = launch.ring_slots(buffer_length, tokens)
    case = cases.of_every_length(SHAPES[name], tokens=tokens, buffer_length=buffer_length, slots=slots)
    check_step(cases.spiky(case), [True] * (buffer_length + 1))


@pytest.mark.parametrize(("tokens", "buffer_length"), [(1, 16), (8, 32)])
@pytest.mark.parametrize("name", ["nano-4b", "qwen3.5-2b", "qwen3.5-27b"])
def test_window_of_every_length_after_spiky_decays(name, tokens, buffer_length):
    slots = launch.ring_slots(buffer_length, tokens)
    case = cases.of_every_length(
        SHAPES[name], tokens=tokens, buffer_length=buffer_length - tokens, slots=slots
    )
    check_step(cases.spiky(case), [False] * (buffer_length - tokens + 1))


@pytest.mark.parametrize("activation", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", ["super", "q122"])
def test_step_with_other_inputs(name, activation):
    check_step(draw(name, 1, activation=activation), [True, False, True, False])


@pytest.mark.parametrize(("name", "tokens"), [("super", 1), ("q122", 1), ("nano-4b", 2), ("qwen3.5-4b", 4)])
def test_forgotten_heads_are_taken_for_zero(name, tokens):
    case = draw(name, tokens, batch=8)
    groups, heads = case.shape.groups, case.shape.heads
    # Whole groups, as a tile of heads of 80 rows is read for its neighbour's sake.
    gone = jax.random.bernoulli(jax.random.key(2), 0.5, (8, groups))
    gone = jnp.repeat(gone, heads // groups, axis=1)
    flush = np.arange(8) % 4 == 0
    plan = launch.plan(jnp.asarray(flush), case.start, case.length)
    checkpoint, *others = case.arguments()[:5]
    zeroed = jnp.where(gone[:, :, None, None], 0.0, checkpoint)
    step = jax.jit(case.kernels.step)
    wanted, folded, _ = step(zeroed, *others, plan)
    outputs, after, _ = step(checkpoint, *others, plan, forgotten=gone)
    np.testing.assert_array_equal(outputs, wanted)
    rewritten = flush & (np.asarray(case.length) > 0)
    np.testing.assert_array_equal(after[rewritten], folded[rewritten])
    np.testing.assert_array_equal(after[~rewritten], checkpoint[~rewritten])


@pytest.mark.parametrize(("state", "bound"), [(jnp.bfloat16, 4e-3), (jnp.float16, 5e-4)])
@pytest.mark.parametrize("name", ["super", "q122"])
def test_step_with_a_half_width_state(name, state, bound):
    case = draw(name, 2, state=state)
    flush = np.array([True, False, True, False])
    plan = launch.plan(jnp.asarray(flush), case.start, case.length)
    outputs, checkpoint, _ = jax.jit(case.kernels.step)(*case.arguments()[:5], plan)
    wanted, folded = cases.truth(case)
    assert cases.error(outputs[~flush], wanted[~flush]) < 1e-6
    assert cases.error(outputs[flush], wanted[flush]) < bound
    assert cases.error(checkpoint[flush], folded[flush]) < bound


@pytest.mark.parametrize("flushing", [[3, 11], range(2, 30)], ids=["few", "many"])
@pytest.mark.parametrize("name", ["super", "q122"])
def test_rows_of_a_half_width_state_flush_in_the_kernel_of_the_window(name, flushing):
    case = draw(name, 1, batch=32, state=jnp.bfloat16)
    flush = np.isin(np.arange(32), flushing)
    plan = launch.plan(jnp.asarray(flush), case.start, case.length)
    parameters = launch.LaunchParameters(132, 4, beside=1, claims=True)
    step = jax.jit(functools.partial(case.kernels.step, parameters=parameters))
    outputs, checkpoint, _ = step(*case.arguments()[:5], plan)
    wanted, folded = cases.truth(case)
    assert cases.error(outputs[~flush], wanted[~flush]) < 1e-6
    assert cases.error(outputs[flush], wanted[flush]) < 4e-3
    assert cases.error(checkpoint[flush], folded[flush]) < 4e-3


@pytest.mark.parametrize("name", NAMES)
def test_eager_step_is_the_float64_loop(name):
    case = draw(name, 1, buffer_length=1)
    wanted, _ = cases.truth(case)
    outputs, _ = jax.jit(case.kernels.eager)(case.checkpoint, case.new, case.reader, case.constants)
    assert cases.error(outputs, wanted) < 1e-6


@pytest.mark.parametrize("name", ["super", "q122"])
def test_snapshots_of_as_many_elements_as_32_bits_can_count(name):
    """Four states of 512 rows; rows at both ends are those of a call of their own."""
    case, rows = draw(name, 4, batch=512), np.array([0, 255, 256, 511])
    states = jax.jit(lambda x: jnp.stack([x, -x, 0.5 * x, x + 1.0]))(case.checkpoint)
    assert states.size == 2**31
    few, part = states[:, rows], tuple(field[rows] for field in case.new)
    call = jax.jit(case.kernels.snapshots, donate_argnums=0)
    outputs, states = call(states, case.new, case.reader, case.constants, case.start)
    wanted, kept = call(few, part, case.reader[rows], case.constants, case.start[rows])
    np.testing.assert_array_equal(outputs[rows], wanted)
    np.testing.assert_array_equal(states[:, rows], kept)


@pytest.mark.parametrize("name", ["super", "q122"])
def test_step_is_in_place(name):
    case = draw(name, 1)
    plan = launch.plan(jnp.zeros((4,), jnp.bool_), case.start, case.length)
    step = functools.partial(jax.jit, donate_argnums=(0, 1))(case.kernels.step)
    memory = step.lower(*case.arguments()[:5], plan).compile().memory_analysis()
    buffers = sum(array.nbytes for array in (case.checkpoint, *case.ring))
    assert memory.alias_size_in_bytes == buffers
    assert memory.temp_size_in_bytes < case.checkpoint.nbytes


@pytest.mark.parametrize("method", ["step", "eager"])
def test_rows_beyond_the_31st_power_of_two_are_those_of_a_small_batch(method):
    few = draw("super", 1)
    wanted, folded = cases.truth(few)
    rows = 2**31 // SHAPES["super"].state_elements() + 4
    flush = np.array([True, False, True, False])
    case, flags = jax.jit(lambda arrays: jax.tree.map(lambda x: last_rows(x, rows), arrays))(
        ({f.name: getattr(few, f.name) for f in dataclasses.fields(few) if f.name not in FIXED}, flush)
    )
    if method == "step":
        plan = jax.jit(launch.plan)(flags, case["start"], case["length"])
        step = jax.jit(few.kernels.step, donate_argnums=(0, 1))
        rest = case["new"], case["reader"], few.constants, plan
        outputs, after, _ = step(case["checkpoint"], case["ring"], *rest)
        assert cases.error(outputs[-4:], wanted) < 1e-6
        assert cases.error(after[-4:][flush], folded[flush]) < 1e-6
        np.testing.assert_array_equal(after[-4:][~flush], few.checkpoint[~flush])
    else:
        eager = jax.jit(few.kernels.eager, donate_argnums=0)
        outputs, after = eager(case["checkpoint"], case["new"], case["reader"], few.constants)
        alone = jax.jit(few.kernels.eager)(few.checkpoint, few.new, few.reader, few.constants)
        np.testing.assert_array_equal(outputs[-4:], alone[0])
        np.testing.assert_array_equal(after[-4:], alone[1])
    assert not jnp.any(after[:4]) and not jnp.any(outputs[:-4])


FIXED = ("shape", "constants")


def last_rows(array, rows):
    """The array as the last rows of one with zeros before them."""
    return jnp.pad(array, [(rows - array.shape[0], 0)] + [(0, 0)] * (array.ndim - 1))
