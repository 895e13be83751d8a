"""The kernels behind the contract that the portable backend keeps: compiled on a GPU, or interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import launch
from tests.pallas_kernels.cases import KERNELS
from tests.replayssm_jax.recurrence.cases import Shape
from tests.replayssm_jax.recurrence.contract import ReplayContract


class KernelContract(ReplayContract):
    """Steps, folds and eager steps by the kernels; `interpret` as for them."""

    compiler_options = None
    interpret = None

    def served(self, shape):
        """Whole tiles of 64 rows a group, heads in fours; the delta rule's keys in steps of 128."""
        unit, keys = (16, 64) if self.recurrence == "mamba2" else (64, 128)
        per_group, head_dim = shape.heads // shape.groups, -(-shape.head_dim // unit) * unit
        while shape.groups * per_group % 4:
            per_group += 1
        while per_group * head_dim % 64:
            head_dim += unit
        return dataclasses.replace(
            shape, heads=shape.groups * per_group, head_dim=head_dim, d_state=-(-shape.d_state // keys) * keys
        )

    def slots(self, least):
        return -(-least // launch.GRANULE) * launch.GRANULE

    def _call(self, name, *arguments):
        return getattr(KERNELS[self.recurrence], name)(*arguments, interpret=self.interpret)

    def step(self, checkpoint, ring, inputs, reader, heads, start, length):
        leaves = (tuple(jax.tree.leaves(part)) for part in (ring, inputs))
        outputs, slots = self._call("window", checkpoint, *leaves, reader, _stack(heads), start, length)
        return outputs, type(ring)(*slots)

    def fold(self, checkpoint, ring, heads, start, length):
        slots = tuple(jax.tree.leaves(ring))
        token = tuple(jnp.zeros_like(field[:, :, :1] if field.ndim == 4 else field[:, :1]) for field in slots)
        plan = launch.plan(jnp.ones(length.shape, bool), start, length)
        return self._call("step", checkpoint, slots, token, token[1], _stack(heads), plan)[1]

    def eager_step(self, state, inputs, reader, heads):
        return self._call("eager", state, tuple(jax.tree.leaves(inputs)), reader, _stack(heads))


def _stack(heads):
    constants = jax.tree.leaves(heads)
    return jnp.stack(constants) if constants else None


@pytest.mark.gpu
class TestMamba2Kernels(KernelContract):
    recurrence = "mamba2"


@pytest.mark.gpu
class TestGatedDeltaKernels(KernelContract):
    recurrence = "gated_delta"


class Interpreted(KernelContract):
    """Some of the contract in the interpreter, which takes seconds a call."""

    test_replay_equals_the_serial_loop = None
    test_replay_equals_the_serial_loop_for_many_rounds = None
    test_eager_steps_equal_the_serial_loop = None
    test_errors_grow_no_faster_than_with_eager_steps = None
    test_b23_sizes_that_are_no_powers_of_two = None
    test_bfloat16_inputs_agree_with_the_loop_on_the_rounded_inputs = None
    test_a_ring_without_a_slot_to_spare = None
    test_b06_heads_read_their_own_group = None
    test_uncommitted_tokens_are_not_folded = None

    @property
    def interpret(self):
        return launch.mosaic_gpu().InterpretGPUParams()

    def run(self, function, *arguments):
        return getattr(self, function)(*arguments)

    def test_a_few_steps_equal_the_serial_loop(self):
        self.check_replay(Shape(batch=2), buffer_length=5, window=3, rounds=5)

    @pytest.mark.long
    def test_a_few_bfloat16_steps_equal_the_serial_loop(self):
        self.check_replay(Shape(batch=2), buffer_length=2, window=1, rounds=4, dtype=jnp.bfloat16)


needs_interpreter = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the interpreter runs the kernels from jax 0.11.2 on"
)


@pytest.mark.slow
@needs_interpreter
class TestMamba2Interpreted(Interpreted):
    recurrence = "mamba2"


@pytest.mark.slow
@needs_interpreter
class TestGatedDeltaInterpreted(Interpreted):
    recurrence = "gated_delta"
