"""Steps on checkpoints and copies below float32: bits of what is stored, outputs against the float64 loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.shapes import SHAPES
from pallas_kernels import launch, numerics
from pallas_kernels.rewrite import READS, RECURRENCES, Formats
from replayssm_jax import precision
from tests.pallas_kernels import cases
from tests.pallas_kernels.test_interpret import SLOW, SMALL, interpreter

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels run and lower from jax 0.11.2 on"
)

LAYER = 3


def lanes(stored):
    """The arrays of a stored state as the kernels take them."""
    if isinstance(stored, precision.Scaled):
        stored = precision.in_order(stored, lanes=True)
    return tuple(jax.tree.leaves(stored))


def decode(parts, format):
    """The values of `lanes`."""
    if format in ("fp8_e4m3", "nvfp4"):
        codes, scale, block_scale = (*parts, None)[:3]
        stored = precision.Scaled(codes, scale, block_scale, format, lanes=format == "nvfp4")
    else:
        (stored,) = parts
    return jax.jit(precision.decode)(stored)


def check_stored_step(case, flush, formats, **options):
    """A step from a checkpoint in `formats`: `step` of the float32 kernels says what is folded."""
    flush = np.asarray(flush)
    read = formats.read or formats.recurrence
    encode = jax.jit(
        lambda x, format, random=None: lanes(precision.encode(x, format, random)), static_argnums=1
    )
    checkpoint = encode(case.checkpoint, formats.recurrence)
    state = decode(checkpoint, formats.recurrence)
    copy = None if formats.read is None else encode(state, read)
    plan = launch.plan(jnp.asarray(flush), case.start, case.length)
    words = random = None
    if formats.stochastic:
        seed, start = jnp.arange(len(flush), dtype=jnp.uint32), case.start + case.length
        hashed = precision.row_words(seed, LAYER, start)
        words = jnp.stack([hashed, jnp.zeros_like(hashed)], axis=1)
        random = jax.jit(precision.row_random, static_argnums=(1, 3))(seed, LAYER, start, state.shape[1:])
    rest = case.ring, case.new, case.reader, case.constants, plan

    def run(call, *arguments, **more):
        call = functools.partial(call, **options, **more)
        return (call if options else jax.jit(call))(*arguments)

    _, folded, ring = run(case.kernels.step, state, *rest)
    outputs, stored, copied, same_ring = run(
        lambda *arguments, **more: case.kernels.KERNELS.stored_step(*arguments, formats, words, **more),
        checkpoint, copy, *rest,
    )  # fmt: skip

    def rows(arrays, which):
        return [np.asarray(array)[which].tobytes() for array in arrays]

    kept = ~flush | (np.asarray(case.length) == 0)
    wanted = encode(folded, formats.recurrence, random)
    values = decode(stored, formats.recurrence)
    assert rows(stored, kept) == rows(checkpoint, kept)
    assert rows(stored, ~kept) == rows(wanted, ~kept)
    if copy is not None:
        assert rows(copied, kept) == rows(copy, kept)
        assert rows(copied, ~kept) == rows(encode(values, read), ~kept)
    assert rows(ring, slice(None)) == rows(same_ring, slice(None))

    def truth(state, **changes):
        return cases.truth(dataclasses.replace(case, checkpoint=state, **changes))[0]

    source = state if copy is None else decode(copy, read)
    if not flush.all():
        assert cases.error(outputs[~flush], truth(source)[~flush]) < 1e-6
    if flush.any():
        after = {"start": case.start + case.length, "length": jnp.zeros_like(case.length)}
        assert cases.error(outputs[flush], truth(values, **after)[flush]) < 1e-6


CASES = [
    ("mamba2", 1, Formats("fp32", "nvfp4")),
    pytest.param("gated_delta", 2, Formats("fp8_e4m3", "nvfp4", stochastic=True), marks=SLOW),
    pytest.param(
        "mamba2-head-80", 2, Formats("fp16", "fp8_e4m3", stochastic=True), marks=[SLOW, pytest.mark.long]
    ),
    pytest.param("mamba2", 1, Formats("fp8_e4m3"), marks=SLOW),
    pytest.param("mamba2", 1, Formats("fp32", "bf16"), marks=SLOW),
]


@pytest.mark.parametrize(("name", "tokens", "formats"), CASES)
def test_step_stores_the_bits_of_the_portable_formats(name, tokens, formats):
    case = cases.draw(SMALL[name], batch=3, tokens=tokens, buffer_length=7, slots=8, seed=tokens)
    # The flush has a kernel of its own, whatever the parameters ask for.
    parameters = launch.LaunchParameters(1, 2, 8, beside=1, step=2)
    if tokens > 1:
        parameters = launch.LaunchParameters(1, 4, 8, step=1, workers=2, claims=True, apart=True)
    check_stored_step(case, [True, False, True], formats, interpret=interpreter(), parameters=parameters)


def lower(name, tokens, formats, batch=256):
    shape = SHAPES[name]
    draw = functools.partial(
        cases.draw, shape, batch=batch, tokens=tokens, buffer_length=16, slots=launch.ring_slots(16, tokens)
    )
    arguments = jax.eval_shape(lambda: draw().arguments())

    def stored(format):
        return jax.eval_shape(lambda: lanes(precision.encode(jnp.zeros(arguments[0].shape), format)))

    copy = None if formats.read is None else stored(formats.read)
    plan = jax.ShapeDtypeStruct((batch, 4), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    words = jax.ShapeDtypeStruct((batch, 2), jnp.uint32) if formats.stochastic else None

    def step(checkpoint, copy, ring, *rest):
        *rest, words = rest
        kernels = cases.KERNELS[shape.recurrence].KERNELS
        return kernels.stored_step(checkpoint, copy, ring, *rest, formats, words)

    kept = stored(formats.recurrence), copy, arguments[1]
    traced = jax.jit(step, donate_argnums=(0, 1, 2)).trace(*kept, *arguments[2:5], plan, words)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Checkpoint, copy and ring are written where they are.
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves(kept))


def test_stored_steps_lower_to_cuda():
    lower("super", 1, Formats("fp8_e4m3", "nvfp4", stochastic=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "formats"),
    [
        ("q122", 4, Formats("fp32", "nvfp4")),
        ("nano-4b", 8, Formats("fp16", "fp8_e4m3", stochastic=True)),
        ("qwen3.5-27b", 2, Formats("bf16", "nvfp4")),
        ("qwen3.5-2b", 1, Formats("fp8_e4m3")),
        ("nano-30b", 1, Formats("fp32", "bf16")),
        # Little shared memory is left.
        ("qwen3.5-4b", 4, Formats("fp16", "fp8_e4m3", stochastic=True)),
    ],
)
def test_stored_steps_lower_to_cuda_at_more_shapes(name, tokens, formats):
    lower(name, tokens, formats)


def test_formats_that_the_kernels_do_not_serve_are_named():
    with pytest.raises(launch.Unsupported, match="keep no checkpoint in nvfp4"):
        Formats("nvfp4").check()
    odd = dataclasses.replace(SMALL["mamba2"], heads=16, head_dim=8)
    case = jax.eval_shape(lambda: cases.draw(odd, batch=1, tokens=1, buffer_length=1, slots=8).arguments())
    with pytest.raises(launch.Unsupported, match="head_dim that is a multiple of 16, got 8"):
        jax.eval_shape(
            lambda state, ring, new, reader, constants, start, length: cases.KERNELS[
                "mamba2"
            ].KERNELS.stored_step(
                (state,),
                (state.astype(jnp.bfloat16),),
                ring,
                new,
                reader,
                constants,
                launch.plan(start > 0, start, length),
                Formats("fp32", "bf16"),
            ),
            *case,
        )


GPU_NAMES = ["super", "nano-4b", "q122", "qwen3.5-4b"]
GPU_FORMATS = [
    Formats("fp32", "nvfp4"),
    Formats("fp8_e4m3", "nvfp4", stochastic=True),
    Formats("fp16", "fp8_e4m3", stochastic=True),
    Formats("fp32", "bf16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("formats", GPU_FORMATS, ids=str)
@pytest.mark.parametrize("name", GPU_NAMES)
def test_compiled_steps_store_the_bits_of_the_portable_formats(name, formats, tokens):
    slots = launch.ring_slots(16, tokens)
    case = cases.draw(SHAPES[name], batch=4, tokens=tokens, buffer_length=16, slots=slots, seed=tokens)
    check_stored_step(case, [True, False, True, False], formats)


@pytest.mark.gpu
@pytest.mark.parametrize("flushing", [[3, 11], range(2, 30), range(32)], ids=["few", "many", "all"])
@pytest.mark.parametrize("name", ["super", "q122"])
def test_rows_flush_while_others_read_codes(name, flushing):
    case = cases.draw(SHAPES[name], batch=32, tokens=1, buffer_length=16, slots=launch.ring_slots(16, 1))
    check_stored_step(case, [row in flushing for row in range(32)], Formats("fp32", "nvfp4"))


@pytest.mark.gpu
@pytest.mark.parametrize("format", READS)
def test_a_copy_of_numbers_of_every_kind_has_the_portable_bits(format):
    """dt = 0: the fold leaves the checkpoint alone, whatever it holds."""
    case = cases.draw(SHAPES["super"], batch=2, tokens=1, buffer_length=16, slots=24)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, case.checkpoint.shape, dtype=np.uint64).astype(np.uint32)
    # Random exponents over all of float32; rows of zeros, one infinity, one NaN.
    state = bits.view(np.float32).copy()
    state[~np.isfinite(state)] = 0
    state[0, 0, 0], state[0, 0, 1, 5], state[0, 0, 2, 7] = 0, np.inf, np.nan
    ring = (*case.ring[:2], jnp.zeros_like(case.ring[2]))
    plan = launch.plan(jnp.ones(2, jnp.bool_), case.start, jnp.full(2, 3, jnp.int32))
    encode = jax.jit(lambda x: lanes(precision.encode(x, format)))
    state = jnp.asarray(state)
    zeros = jax.tree.map(jnp.zeros_like, encode(state))
    call = jax.jit(functools.partial(case.kernels.KERNELS.stored_step, formats=Formats("fp32", format)))
    _, stored, copied, _ = call((state,), zeros, ring, case.new, case.reader, case.constants, plan)
    finite = np.isfinite(np.asarray(state)) & (np.abs(np.asarray(state)) >= 2.0**-126)
    np.testing.assert_array_equal(np.asarray(stored[0])[finite], np.asarray(state)[finite])
    for got, wanted in zip(copied, encode(state), strict=True):
        got, wanted = (
            np.asarray(x) if x.dtype != jnp.bfloat16 else np.asarray(x).view(np.uint16) for x in (got, wanted)
        )
        np.testing.assert_array_equal(got, wanted)


def test_every_configuration_but_an_nvfp4_checkpoint_is_served():
    from replayssm_jax.config import PRECISIONS

    for recurrence, read in PRECISIONS:
        formats = Formats(recurrence, None if read == recurrence else read)
        if recurrence == "nvfp4":
            continue
        formats.check()
    assert set(RECURRENCES) == set(precision.FORMATS) - {"nvfp4"}
    assert numerics.E4M3_MAX == 448.0
