"""The benchmark's check of a launch, fed with results of the tests' own float64 loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import kernel_check
from bench.peers.base import mamba2_rates
from bench.shapes import Shape
from replayssm_jax import precision
from tests.pallas_kernels import cases

SHAPES = {
    "mamba2": Shape(recurrence="mamba2", groups=2, heads=4, head_dim=8, d_state=16),
    "gated_delta": Shape(recurrence="gated_delta", groups=2, heads=4, head_dim=8, d_state=16),
}


def test_a_row_of_each_kind_is_chosen():
    np.testing.assert_array_equal(kernel_check.chosen_rows(np.array([False, True, True])), [1, 0])
    np.testing.assert_array_equal(kernel_check.chosen_rows(np.array([True, True])), [0, 0])


@pytest.mark.parametrize("recurrence", SHAPES)
def test_right_results_pass_and_wrong_ones_show(recurrence):
    shape = SHAPES[recurrence]
    case = cases.draw(shape, batch=2, tokens=2, buffer_length=8, slots=12)
    if recurrence == "mamba2":
        case = dataclasses.replace(case, constants=jnp.stack(mamba2_rates(shape.heads)))
    outputs, folded = cases.truth(case)
    checkpoint = np.asarray(case.checkpoint)
    # The second row flushes.
    after = np.stack([checkpoint[0], folded[1].astype(np.float32)])
    ring, new, reader, start, length = jax.tree.map(
        np.asarray, (case.ring, case.new, case.reader, case.start, case.length)
    )

    def errors(after, outputs):
        return kernel_check.errors(
            shape, (checkpoint, ring), (new, reader), (after, ring), outputs, start, length
        )

    assert errors(after, outputs.astype(np.float32)).keys() == {"error", "state_error"}
    assert max(errors(after, outputs.astype(np.float32)).values()) < 2e-7
    assert errors(after, outputs * 1.05)["error"] == pytest.approx(0.05)
    assert errors(after * 1.05, outputs)["state_error"] > 0.02
    assert errors(checkpoint, outputs).keys() == {"error"}


def test_rows_are_taken_from_every_array():
    taken = kernel_check.take({"a": jnp.arange(6), "b": jnp.arange(12).reshape(6, 2)}, np.array([4, 1]))
    np.testing.assert_array_equal(taken["a"], [4, 1])
    np.testing.assert_array_equal(taken["b"], [[8, 9], [2, 3]])


def test_rows_that_flush_work_on_the_checkpoint_and_others_on_the_copy():
    exact = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 4, 128)), jnp.float32)
    copy = precision.in_order(precision.encode(exact, "nvfp4"), lanes=True)
    states, ring = kernel_check.states_of((exact, copy, "ring"), np.array([True, False]))
    assert ring == "ring"
    np.testing.assert_array_equal(states[0], exact[0])
    np.testing.assert_array_equal(states[1], precision.decode(precision.encode(exact, "nvfp4"))[1])
    np.testing.assert_array_equal(kernel_check.states_of((exact, None, "ring"), np.array([False]))[0], exact)
    assert len(kernel_check.states_of((exact,), np.array([True, False]))) == 1


def test_an_eager_launch_is_one_token_from_the_old_state():
    shape = SHAPES["mamba2"]
    case = cases.draw(shape, batch=1, tokens=1, buffer_length=8, slots=12)
    case = dataclasses.replace(
        case, constants=jnp.stack(mamba2_rates(shape.heads)), length=jnp.zeros(1, jnp.int32)
    )
    outputs, _ = cases.truth(case)
    _, after = cases.truth(
        dataclasses.replace(case, ring=case.new, start=jnp.zeros(1, int), length=jnp.ones(1, int))
    )
    new, reader = jax.tree.map(np.asarray, (case.new, case.reader))
    before = (np.asarray(case.checkpoint),)
    zero = np.zeros(1, int)
    made = kernel_check.errors(shape, before, (new, reader), (after,), outputs, zero, zero)
    assert max(made.values()) < 2e-7
