"""The convolution kernel against a float64 loop: in the interpreter, lowered, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import convolution, launch
from pallas_kernels.parts import Gate, Part

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels run from jax 0.11.2 on"
)

SMALL = {
    "plain": (Part(8, 192), Part(8, 64)),
    "normed": (Part(4, 128, 0.5), Part(4, 128, 1.0), Part(4, 256)),
}
PUBLISHED = {
    "nano-4b": (Part(8, 960), Part(8, 128), Part(8, 128)),
    "qwen3.5-4b": (Part(16, 128, 128**-0.5), Part(16, 128, 1.0), Part(16, 256)),
}
OFFSET = 64
HEADS = 32
# Of channels before and behind the convolution's.
LIMIT = (0.001, 4.0)
GATES = (
    Gate("mamba2_dt", 0, HEADS, LIMIT),
    Gate("gated_delta_log_decay", HEADS, HEADS),
    Gate("sigmoid", OFFSET, HEADS),
)


def draw(parts, batch, tokens, taps, *, bias=True, dtype=jnp.bfloat16):
    channels = sum(part.channels for part in parts)
    keys = jax.random.split(jax.random.key(tokens), 5)
    window = jax.random.normal(keys[0], (batch, taps + tokens, channels)).astype(dtype)
    projected = jax.random.normal(keys[1], (batch, tokens, OFFSET + channels + 32)).astype(dtype)
    weight = (0.5 * jax.random.normal(keys[2], (taps, channels))).astype(dtype)
    shift = jax.random.normal(keys[3], (channels,)).astype(dtype) if bias else None
    position = jax.random.randint(keys[4], (batch,), 0, 50, jnp.int32).at[0].set(0)
    return window, projected, weight, shift, position


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def draw_constants():
    a_log, bias = 3 * jax.random.normal(jax.random.key(7), (2, HEADS))
    return (bias,), (a_log, bias), ()


def gates_of(projected, constants):
    """The gates in float64."""
    (bias,), (a_log, other), _ = (tuple(map(wide, arrays)) for arrays in constants)
    raw, a, b = (wide(projected)[..., gate.first : gate.first + HEADS] for gate in GATES)
    return (
        np.clip(np.log1p(np.exp(raw + bias)), *LIMIT),
        -np.exp(a_log) * np.log1p(np.exp(a + other)),
        1.0 / (1.0 + np.exp(-b)),
    )


def truth(parts, window, projected, weight, bias, position):
    """Outputs of every part [B, G, T, width], and the window with the new columns."""
    window, weight = wide(window), wide(weight)
    taps, columns = len(weight), window.shape[1]
    new = wide(projected)[:, :, OFFSET : OFFSET + window.shape[2]]
    outputs = np.zeros(new.shape)
    for row, token in np.ndindex(new.shape[:2]):
        first = int(position[row]) - taps + 1
        line = [window[row, (first + i) % columns] for i in range(taps - 1)] + list(new[row])
        total = sum(line[token + tap] * weight[tap] for tap in range(taps))
        total = total if bias is None else total + wide(bias)
        outputs[row, token] = total / (1.0 + np.exp(-total))
    for row, token in np.ndindex(new.shape[:2]):
        window[row, (int(position[row]) + token) % columns] = new[row, token]
    groups, first = [], 0
    for part in parts:
        x = outputs[:, :, first : first + part.channels].reshape(*new.shape[:2], part.groups, part.width)
        first += part.channels
        if part.scale is not None:
            x = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) * part.scale
        groups.append(np.moveaxis(x, 2, 1))
    return groups, window


def check(parts, case, **options):
    constants = draw_constants()

    def call(case, constants):
        window, *others = case
        options_of = {"offset": OFFSET, "gates": GATES, "constants": constants} | options
        return convolution.convolve(window, *others, parts=parts, **options_of)

    outputs, gates, window = jax.jit(call)(case, constants)
    wanted, columns = truth(parts, *case)
    np.testing.assert_array_equal(wide(window), columns)
    for ours, exact in zip(outputs, wanted, strict=True):
        assert ours.dtype == case[1].dtype
        # One rounding, two where a vector is normalised after the first.
        error = np.sqrt(np.mean((wide(ours) - exact) ** 2) / np.mean(exact**2))
        assert error < float(jnp.finfo(ours.dtype).eps)
    for ours, exact in zip(gates, gates_of(case[1], constants), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(wide(ours), exact, rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "tokens", "taps", "bias", "dtype", "rows"),
    [
        ("normed", 3, 4, False, jnp.bfloat16, 2),
        pytest.param("plain", 1, 3, True, jnp.float16, None, marks=pytest.mark.slow),
    ],
)
def test_the_interpreted_kernel_is_the_float64_loop(name, tokens, taps, bias, dtype, rows):
    case = draw(SMALL[name], 2, tokens, taps, bias=bias, dtype=dtype)
    check(SMALL[name], case, rows=rows, interpret=launch.mosaic_gpu().InterpretGPUParams())


@pytest.mark.parametrize(("name", "tokens"), [("nano-4b", 1), ("qwen3.5-4b", 4)])
def test_the_kernel_lowers_to_cuda(name, tokens):
    parts = PUBLISHED[name]
    case = jax.eval_shape(lambda: draw(parts, 256, tokens, 4))

    def call(window, *others):
        options = {"offset": OFFSET, "gates": GATES, "constants": draw_constants()}
        return convolution.convolve(window, *others, parts=parts, **options)

    jax.jit(call, donate_argnums=0).trace(*case).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("name", [*SMALL, *PUBLISHED])
def test_the_compiled_kernel_is_the_float64_loop(name, tokens):
    parts = (SMALL | PUBLISHED)[name]
    check(parts, draw(parts, 3, tokens, 4, bias=tokens == 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_cta_takes_several_rows(name):
    check(PUBLISHED[name], draw(PUBLISHED[name], 68, 1, 4))


@pytest.mark.parametrize(
    ("parts", "tokens", "dtype", "reason"),
    [
        ([Part(3, 128)], 1, jnp.bfloat16, "multiple of 512"),
        ([Part(16, 96)], 1, jnp.bfloat16, "of 64 a group"),
        ([Part(8, 64, 1.0)], 1, jnp.bfloat16, "128 channels, got 64"),
        ([Part(8, 64)], 9, jnp.bfloat16, "1 to 8 tokens, got 9"),
        ([Part(8, 64)], 1, jnp.float32, "got float32"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(parts, tokens, dtype, reason):
    with pytest.raises(launch.Unsupported, match=reason):
        convolution.check(parts, dtype, tokens)
    with pytest.raises(launch.Unsupported, match="multiple of 32 heads, got 48"):
        convolution.check([Part(8, 64)], jnp.bfloat16, 1, [Gate("sigmoid", 0, 48)])
