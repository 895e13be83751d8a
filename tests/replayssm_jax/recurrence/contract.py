"""What every recurrence must do on every backend: one abstract class for replay, one for prefill.

A backend subclasses `ReplayContract` and overrides `step`, `fold` and `eager_step`, pure functions that the
contract compiles.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax.recurrence import RECURRENCES
from tests import oracles
from tests.replayssm_jax.recurrence.cases import (
    Shape,
    append,
    draw,
    draw_heads,
    draw_state,
    empty_ring,
    fields,
    one_by_one,
    rms_error,
    serial,
    tokens_of,
    tolerance,
)

GARBAGE = 1e30
# The optimisation that other tests leave out.
AS_USERS_DO = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
SCHEDULES = [(length, window) for length in (1, 2, 8, 16, 32) for window in (1, 2, 4, 5) if length >= window]


@functools.cache
def _jitted(contract: type, function: str):
    call = getattr(contract(), function)
    return jax.jit(call, compiler_options=contract.compiler_options)


def _rng(*words: int):
    return np.random.default_rng([11, *words])


def _int32(values):
    return jnp.asarray(np.asarray(values, np.int32))


@functools.cache
def _jitted_prefill(name: str, chunk_size: int):
    function = functools.partial(RECURRENCES[name].prefill, chunk_size=chunk_size)
    return jax.jit(function, compiler_options=ReplayContract.compiler_options)


@functools.cache
def _jitted_gradients(name: str, chunk_size: int):
    """Gradients of a weighted sum of outputs and state, through prefill and through eager steps."""
    module = RECURRENCES[name]

    def chunked(arguments, weights, lengths):
        results = module.prefill(*arguments, lengths, chunk_size=chunk_size)
        return sum(jnp.sum(weight * result) for weight, result in zip(weights, results, strict=True))

    def stepwise(arguments, weights, lengths):
        state, inputs, reader, heads = arguments
        valid = jnp.arange(reader.shape[2], dtype=jnp.int32)[None, :] < lengths[:, None]

        def advance(state, part):
            outputs, state = module.eager_step(state, *part, heads)
            return state, outputs[:, 0]

        parts = one_by_one((module.neutralize(inputs, valid), reader))
        state, outputs = jax.lax.scan(advance, state, parts)
        return jnp.sum(weights[0] * jnp.moveaxis(outputs, 0, 1)) + jnp.sum(weights[1] * state)

    options = ReplayContract.compiler_options
    return tuple(jax.jit(jax.grad(loss), compiler_options=options) for loss in (chunked, stepwise))


@functools.cache
def _jitted_long_runs(contract: type, buffer_length: int):
    """Decoding of many tokens in one program, by replay and by eager steps: (outputs, state) of each."""
    backend = contract()

    def flushed(checkpoint, ring, heads, start, length):
        fold = functools.partial(backend.fold, ring=ring, heads=heads, start=start, length=length)
        return jax.lax.cond(jnp.any(length > 0), fold, lambda checkpoint: checkpoint, checkpoint)

    def replay(state, ring, inputs, reader, heads):
        def advance(carry, part):
            checkpoint, ring, start, length = carry
            flush = jnp.where(length + 1 > buffer_length, length, 0)
            checkpoint = flushed(checkpoint, ring, heads, start, flush)
            start, length = start + flush, length - flush
            outputs, ring = backend.step(checkpoint, ring, *part, heads, start, length)
            return (checkpoint, ring, start, length + 1), outputs[:, 0]

        zero = jnp.zeros(state.shape[0], jnp.int32)
        carry, outputs = jax.lax.scan(advance, (state, ring, zero, zero), one_by_one((inputs, reader)))
        checkpoint, ring, start, length = carry
        return jnp.moveaxis(outputs, 0, 1), backend.fold(checkpoint, ring, heads, start, length)

    def eager(state, inputs, reader, heads):
        def advance(state, part):
            outputs, state = backend.eager_step(state, *part, heads)
            return state, outputs[:, 0]

        state, outputs = jax.lax.scan(advance, state, one_by_one((inputs, reader)))
        return jnp.moveaxis(outputs, 0, 1), state

    return tuple(jax.jit(function, compiler_options=AS_USERS_DO) for function in (replay, eager))


class ReplayContract:
    """Outputs from checkpoint and ring, and the fold of the ring, against the serial float64 loop."""

    recurrence: str
    # Most of a test is LLVM's optimisation of small programs. The long runs compile as users do.
    compiler_options: dict | None = {"xla_backend_optimization_level": 0}

    def served(self, shape: Shape) -> Shape:
        """The nearest sizes that the backend serves."""
        return shape.for_recurrence(self.recurrence)

    def slots(self, least: int) -> int:
        """Slots of a ring that is to hold `least` tokens."""
        return least

    def step(self, checkpoint, ring, inputs, reader, heads, start, length):
        """Appends T tokens to the ring and returns (their outputs, the ring)."""
        ring = append(ring, inputs, start + length)
        outputs = RECURRENCES[self.recurrence].window(checkpoint, ring, reader, heads, start, length)
        return outputs, ring

    def fold(self, checkpoint, ring, heads, start, length):
        """Returns the checkpoint moved over `length` tokens."""
        return RECURRENCES[self.recurrence].fold(checkpoint, ring, heads, start, length)

    def eager_step(self, state, inputs, reader, heads):
        """Returns (outputs, state) after one token."""
        return RECURRENCES[self.recurrence].eager_step(state, inputs, reader, heads)

    def run(self, function, *arguments):
        """Calls the compiled `step`, `fold` or `eager_step`."""
        return _jitted(type(self), function)(*arguments)

    def tolerance(self, tokens: int) -> float:
        """RMS ratio allowed after `tokens` tokens."""
        return tolerance(tokens)

    def check_replay(
        self, shape, buffer_length, window, rounds, *, seed=0, decays="mixed", dtype=jnp.float32, slots=None
    ):
        """Compares every output of `rounds` steps with random acceptance, and the last state."""
        name, shape = self.recurrence, self.served(shape)
        rng = _rng(seed, buffer_length, window)
        heads = draw_heads(name, rng, shape, decays)
        checkpoint = draw_state(rng, shape)
        truth = np.asarray(checkpoint, np.float64)
        slots = self.slots(slots or buffer_length + window)
        ring = empty_ring(name, shape, slots, dtype, fill=GARBAGE)
        start, length = rng.integers(0, 1000, shape.batch), np.zeros(shape.batch, int)
        worst = 0.0
        for _ in range(rounds):
            inputs, reader = draw(name, rng, shape, window, heads, decays=decays, dtype=dtype)
            accepted = rng.integers(0, window + 1, shape.batch)
            flush = np.where(length + window > buffer_length, length, 0)
            if flush.any():
                checkpoint = self.run("fold", checkpoint, ring, heads, _int32(start), _int32(flush))
            start, length = start + flush, length - flush
            outputs, ring = self.run(
                "step", checkpoint, ring, inputs, reader, heads, _int32(start), _int32(length)
            )
            length = length + accepted
            worst = max(worst, rms_error(outputs, serial(name, truth, inputs, reader, heads)[0]))
            truth = serial(name, truth, inputs, reader, heads, accepted)[1]
        state = self.run("fold", checkpoint, ring, heads, _int32(start), _int32(length))
        assert worst <= self.tolerance(rounds * window)
        assert rms_error(state, truth) <= self.tolerance(rounds * window)

    @pytest.mark.parametrize(("buffer_length", "window"), SCHEDULES)
    def test_replay_equals_the_serial_loop(self, buffer_length, window):
        per_group = {1: 4, 2: 3, 4: 2, 5: 1}[window]
        decays = ("mixed", "spiky")[window % 2]
        shape = Shape(batch=3, groups=2, heads=2 * per_group, head_dim=6, d_state=8)
        rounds = 6 + 4 * buffer_length // window
        # As many slots for every buffer length: a ring may have spare ones, and compilations are shared.
        self.check_replay(shape, buffer_length, window, rounds, decays=decays, slots=37)

    def test_a_ring_without_a_slot_to_spare(self):
        self.check_replay(Shape(), buffer_length=5, window=5, rounds=12, seed=5)

    @pytest.mark.slow
    @pytest.mark.parametrize("per_group", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4))])
    @pytest.mark.parametrize(("buffer_length", "window"), SCHEDULES)
    def test_replay_equals_the_serial_loop_for_many_rounds(self, buffer_length, window, per_group):
        decays = ("mixed", "slow", "spiky")[(buffer_length + window + per_group) % 3]
        shape = Shape(batch=7, groups=2, heads=2 * per_group, head_dim=16, d_state=20)
        # Rings of the least size for one of four, else of one size for all, which share their programs.
        slots = None if per_group == 1 else 37
        self.check_replay(shape, buffer_length, window, 60, seed=per_group, decays=decays, slots=slots)

    @pytest.mark.parametrize(
        "shape",
        [
            Shape(batch=3, heads=2, groups=1, head_dim=80, d_state=96),
            Shape(batch=7, heads=6, groups=1, head_dim=24, d_state=18),
            Shape(batch=3, heads=2, groups=2, head_dim=96, d_state=80),
        ],
        ids=lambda shape: f"{shape.batch}x{shape.heads}x{shape.head_dim}x{shape.d_state}",
    )
    def test_b23_sizes_that_are_no_powers_of_two(self, shape):
        self.check_replay(shape, buffer_length=6, window=3, rounds=8, seed=23)

    def test_bfloat16_inputs_agree_with_the_loop_on_the_rounded_inputs(self):
        self.check_replay(Shape(), buffer_length=8, window=2, rounds=16, decays="slow", dtype=jnp.bfloat16)

    def _filled(self, seed, fill, slots=9, window=2):
        """A case in mid-window: rows at several phases, and `fill` in every slot that holds no token."""
        name, shape, slots = self.recurrence, self.served(Shape()), self.slots(slots)
        rng = _rng(seed)
        heads = draw_heads(name, rng, shape)
        checkpoint = draw_state(rng, shape)
        start, length = np.array([4, 0, 16]), np.array([5, 0, 3])
        before, _ = draw(name, rng, shape, slots, heads)
        token = (np.arange(slots)[None, :] - start[:, None]) % slots
        live = token < length[:, None]

        def place(field):
            index = token[:, None, :, None] if field.ndim == 4 else token[:, :, None]
            mask = live[:, None, :, None] if field.ndim == 4 else live[:, :, None]
            turned = np.take_along_axis(np.asarray(field), index, axis=field.ndim - 2)
            return jnp.asarray(np.where(mask, turned, np.float32(fill)))

        inputs, reader = draw(name, rng, shape, window, heads)
        return checkpoint, jax.tree.map(place, before), inputs, reader, heads, _int32(start), _int32(length)

    def test_slots_that_are_not_live_count_for_nothing(self):
        clean, dirty = self._filled(1, 0.0), self._filled(1, GARBAGE)
        outputs, _ = self.run("step", *clean)
        outputs_beside_garbage, _ = self.run("step", *dirty)
        np.testing.assert_array_equal(outputs, outputs_beside_garbage)
        folded, folded_beside_garbage = (self.run("fold", *case[:2], *case[4:]) for case in (clean, dirty))
        np.testing.assert_array_equal(folded, folded_beside_garbage)

    def test_fold_of_no_tokens_keeps_every_bit(self):
        checkpoint, ring, _, _, heads, start, length = self._filled(2, GARBAGE)
        folded = self.run("fold", checkpoint, ring, heads, start, length)
        np.testing.assert_array_equal(folded[1], checkpoint[1])
        assert np.all(np.any(np.asarray(folded[0]) != np.asarray(checkpoint[0]), axis=(1, 2)))
        unchanged = self.run("fold", checkpoint, ring, heads, start, _int32(np.zeros(3)))
        np.testing.assert_array_equal(unchanged, checkpoint)

    def test_uncommitted_tokens_are_not_folded(self):
        checkpoint, ring, inputs, reader, heads, start, length = self._filled(3, 0.0)
        _, appended = self.run("step", checkpoint, ring, inputs, reader, heads, start, length)
        np.testing.assert_array_equal(
            self.run("fold", checkpoint, appended, heads, start, length),
            self.run("fold", checkpoint, ring, heads, start, length),
        )

    def test_b06_heads_read_their_own_group(self):
        name, shape = self.recurrence, self.served(Shape(batch=1, d_state=8))
        rng = _rng(6)
        heads = draw_heads(name, rng, shape)
        inputs, _ = draw(name, rng, shape, 1, heads)
        # Keys and readers of group g point along axis g, so a head's state shows which group it read.
        axes = jnp.asarray(np.eye(shape.groups, shape.d_state, dtype=np.float32)[None, :, None, :])
        key = {"mamba2": "b"}.get(name, "k")
        inputs = type(inputs)(**{**vars(inputs), key: axes})
        checkpoint = jnp.zeros((1, shape.heads, shape.head_dim, shape.d_state), jnp.float32)
        zero, one = _int32([0]), _int32([1])
        ring = append(empty_ring(name, shape, self.slots(3)), inputs, zero)
        eager_outputs, eager_state = self.run("eager_step", checkpoint, inputs, axes, heads)
        folded = self.run("fold", checkpoint, ring, heads, zero, one)
        outputs, _ = self.run("step", checkpoint, ring, inputs, axes, heads, zero, zero)
        for state in (eager_state, folded):
            used = np.any(np.asarray(state[0]) != 0, axis=1)  # [H, K]
            group = [head * shape.groups // shape.heads for head in range(shape.heads)]
            np.testing.assert_array_equal(used, np.eye(shape.d_state, dtype=bool)[group])
        assert rms_error(outputs, eager_outputs) <= self.tolerance(1)

    def test_eager_steps_equal_the_serial_loop(self):
        name, shape = self.recurrence, self.served(Shape(heads=6))
        rng = _rng(7)
        for decays in ("mixed", "spiky"):
            heads = draw_heads(name, rng, shape, decays)
            inputs, reader = draw(name, rng, shape, 24, heads, decays=decays)
            state = initial = draw_state(rng, shape)
            outputs = []
            for token in range(24):
                parts = tokens_of(inputs, token, token + 1), tokens_of(reader, token, token + 1)
                output, state = self.run("eager_step", state, *parts, heads)
                outputs.append(output)
            expected, truth = serial(name, initial, inputs, reader, heads)
            assert rms_error(np.concatenate(outputs, 1), expected) <= self.tolerance(24)
            assert rms_error(state, truth) <= self.tolerance(24)

    @pytest.mark.parametrize("decays", ["slow", "spiky"])
    def test_errors_grow_no_faster_than_with_eager_steps(self, decays, tokens=2000, buffer_length=16):
        name = self.recurrence
        shape = self.served(Shape(batch=2, heads=2, groups=1, head_dim=8, d_state=8))
        rng = _rng(8)
        heads = draw_heads(name, rng, shape, decays)
        inputs, reader = draw(name, rng, shape, tokens, heads, decays=decays)
        initial = draw_state(rng, shape)
        ring = empty_ring(name, shape, self.slots(buffer_length + 1))
        replay, eager = _jitted_long_runs(type(self), buffer_length)
        results = replay(initial, ring, inputs, reader, heads)
        peers = eager(initial, inputs, reader, heads)
        expected, truth = serial(name, initial, inputs, reader, heads)
        # What an output or a fold rounds within its own window, which no history can take away.
        own = float(np.finfo(np.float32).eps) * buffer_length**0.5
        for block in (slice(0, 500), slice(tokens - 500, tokens)):
            error, peer = (rms_error(run[0][:, block], expected[:, block]) for run in (results, peers))
            assert error <= max(peer, own)
        error, peer = (rms_error(run[1], truth) for run in (results, peers))
        assert error <= max(peer, own)


class PrefillContract:
    """The chunked prefill against the serial loop: lengths, cuts, hard keys, gradients."""

    recurrence: str

    def prefill(self, state, inputs, reader, heads, lengths, chunk_size):
        """Returns (outputs, state)."""
        return _jitted_prefill(self.recurrence, chunk_size)(state, inputs, reader, heads, _int32(lengths))

    def case(self, seed, tokens, shape=None, **options):
        """Random (state, inputs, reader, heads)."""
        name, rng = self.recurrence, _rng(seed)
        shape = (shape or Shape()).for_recurrence(name)
        heads = draw_heads(name, rng, shape, options.get("decays", "mixed"))
        state = draw_state(rng, shape)
        return state, *draw(name, rng, shape, tokens, heads, **options), heads

    def check(self, case, lengths, chunk_size, allowed):
        """Compares the outputs of real tokens and the state."""
        outputs, state = self.prefill(*case, lengths, chunk_size)
        expected, truth = serial(self.recurrence, *case, lengths)
        real = np.arange(outputs.shape[1])[None, :] < np.asarray(lengths)[:, None]
        assert np.all(np.isfinite(outputs))
        assert rms_error(np.where(real[:, :, None, None], outputs, 0.0), expected) <= allowed
        assert rms_error(state, truth) <= allowed
        return state

    @pytest.mark.parametrize("decays", ["mixed", "spiky"])
    @pytest.mark.parametrize("chunk_size", [1, 16, 64])
    def test_prefill_equals_the_serial_loop(self, chunk_size, decays):
        lengths = [37, 0, 1, 20, 33]
        case = self.case(chunk_size, 37, Shape(batch=5, heads=6), decays=decays)
        state = self.check(case, lengths, chunk_size, tolerance(37))
        np.testing.assert_array_equal(state[1], case[0][1])

    def test_near_equal_keys(self):
        case = self.case(2, 100, Shape(head_dim=16, d_state=16), decays="slow", keys="near-equal")
        self.check(case, [100, 64, 99], 32, tolerance(100))

    def test_bfloat16_inputs(self):
        self.check(self.case(3, 20, dtype=jnp.bfloat16), [20, 7, 0], 16, tolerance(20))

    def test_b23_sizes_that_are_no_powers_of_two(self):
        case = self.case(4, 11, Shape(batch=7, heads=3, groups=1, head_dim=80, d_state=96))
        self.check(case, [11, 0, 1, 2, 3, 10, 11], 4, tolerance(11))

    def test_b05_the_cut_of_the_prompt_does_not_matter(self):
        state, inputs, reader, heads = self.case(5, 48, Shape(batch=2))
        whole = tokens_of(inputs, 0, 37), tokens_of(reader, 0, 37)
        expected, truth = serial(self.recurrence, state, *whole, heads)
        for cut in ([37], [8, 8, 8, 8, 5], [5, 7, 1, 16, 8], [36, 1], [1] * 37):
            carried, outputs, first = state, [], 0
            for size in cut:
                # Right-padded, as callers do, so that the sizes share compilations; single tokens stay alone.
                padded = 1 if cut[0] == 1 else -(-size // 8) * 8
                parts = tokens_of(inputs, first, first + padded), tokens_of(reader, first, first + padded)
                output, carried = self.prefill(carried, *parts, heads, [size, size], 8)
                outputs.append(np.asarray(output)[:, :size])
                first += size
            assert rms_error(np.concatenate(outputs, 1), expected) <= tolerance(37), cut
            assert rms_error(carried, truth) <= tolerance(37), cut

    @pytest.mark.parametrize("decays", ["mixed", "spiky"])
    def test_gradients(self, decays, tokens=11, chunk_size=4):
        name, rng = self.recurrence, _rng(9)
        shape = Shape(batch=2, heads=4, head_dim=3, d_state=5).for_recurrence(name)
        arguments = self.case(6, tokens, shape, decays=decays)
        lengths = np.array([tokens, 7])
        real = np.arange(tokens)[None, :, None, None] < lengths[:, None, None, None]
        weight = real * rng.normal(size=(shape.batch, tokens, shape.heads, shape.head_dim))
        weights = jnp.asarray(weight, jnp.float32), draw_state(rng, shape)
        chunked, stepwise = _jitted_gradients(name, chunk_size)
        gradients = jax.tree.leaves(chunked(arguments, weights, _int32(lengths)))
        peers = jax.tree.leaves(stepwise(arguments, weights, _int32(lengths)))
        allowed = 8 * tolerance(tokens)  # forward, backward and the peer each round at every token
        for gradient, peer in zip(gradients, peers, strict=True):
            assert np.all(np.isfinite(gradient))
            assert rms_error(gradient[None], peer[None]) <= allowed

        exact, exact_weights = fields(arguments), fields(weights)

        def truth(leaves):
            results = getattr(oracles, name)(*leaves, lengths)
            return sum(np.sum(weight * result) for weight, result in zip(exact_weights, results, strict=True))

        for index, gradient in enumerate(gradients):
            direction = rng.normal(size=exact[index].shape)
            ahead, behind = list(exact), list(exact)
            ahead[index], behind[index] = exact[index] + 1e-6 * direction, exact[index] - 1e-6 * direction
            slope = (truth(ahead) - truth(behind)) / 2e-6
            gradient = np.asarray(gradient, np.float64)
            scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
            assert abs(np.sum(gradient * direction) - slope) <= allowed * scale
