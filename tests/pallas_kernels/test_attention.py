"""The attention kernel against a float64 softmax: in the interpreter, lowered, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention, launch
from replayssm_jax import backend

pytestmark = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels run from jax 0.11.2 on"
)


def draw(batch, tokens, groups, each, width, columns, dtype=jnp.bfloat16):
    """Queries, keys, values and positions; the first rows are empty and full."""
    keys = jax.random.split(jax.random.key(tokens), 4)
    q = 2 * jax.random.normal(keys[0], (batch, tokens, groups * each, width))
    k, v = (jax.random.normal(key, (batch, groups, columns, width)) for key in keys[1:3])
    position = jax.random.randint(keys[3], (batch,), 0, columns - tokens + 1, jnp.int32)
    position = position.at[0].set(0).at[1].set(columns - 1)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), position


def truth(q, k, v, position):
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("btnd,bnsd->bnts", q, k) * q.shape[-1] ** -0.5
    last = np.asarray(position)[:, None] + np.arange(q.shape[1])
    seen = np.arange(k.shape[2])[None, None, None] <= last[:, None, :, None]
    weights = np.where(seen, np.exp(scores), 0.0)
    return np.einsum("bnts,bnsd->btnd", weights / weights.sum(axis=-1, keepdims=True), v)


def check(case, **options):
    outputs = jax.jit(lambda *case: attention.attend(*case, **options))(*case)
    wanted = truth(*case)
    error = np.asarray(outputs.astype(jnp.float32), np.float64) - wanted
    eps = float(jnp.finfo(case[0].dtype).eps)
    # One rounding of the weights and one of the outputs, random in sign.
    assert np.sqrt(np.mean(error**2) / np.mean(wanted**2)) < eps
    assert np.abs(error).max() < 4 * eps * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("tokens", "each", "dtype", "parts"),
    [(1, 5, jnp.bfloat16, 1), pytest.param(3, 4, jnp.float16, 2, marks=pytest.mark.slow)],
)
def test_the_interpreted_kernel_is_the_softmax_over_live_columns(tokens, each, dtype, parts):
    case = draw(3, tokens, 2, each, 64, 152, dtype)
    # Six heads of rows on four CTAs: two take a second one.
    check(case, stages=2, parts=parts, ctas=4, interpret=launch.mosaic_gpu().InterpretGPUParams())


@pytest.mark.parametrize(
    ("batch", "tokens", "groups", "each", "width"), [(256, 1, 8, 5, 128), (4, 4, 8, 5, 128)]
)
def test_the_kernel_lowers_to_cuda(batch, tokens, groups, each, width):
    case = jax.eval_shape(lambda: draw(batch, tokens, groups, each, width, 640))
    jax.jit(attention.attend).trace(*case).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize(("groups", "each", "width"), [(8, 5, 128), (4, 4, 256), (2, 8, 64)])
def test_the_compiled_kernel_is_the_softmax_over_live_columns(groups, each, width, tokens):
    check(draw(5, tokens, groups, each, width, 704))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [None, 1, 2, 7])
@pytest.mark.parametrize(
    ("tokens", "groups", "each", "width"), [(1, 8, 5, 128), (4, 4, 4, 256), (8, 2, 8, 64)]
)
def test_the_parts_of_a_long_row_add_up(tokens, groups, each, width, parts):
    check(draw(3, tokens, groups, each, width, 4104), parts=parts)


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [1, 9])
@pytest.mark.parametrize(("tokens", "groups", "each", "width"), [(1, 8, 5, 128), (4, 4, 4, 256)])
def test_a_cta_takes_several_heads(tokens, groups, each, width, ctas):
    check(draw(7, tokens, groups, each, width, 264), parts=1, ctas=ctas)


@pytest.mark.parametrize(
    ("rows", "width", "columns", "dtype", "reason"),
    [
        (65, 128, 64, jnp.bfloat16, "1 to 64 query rows, got 65"),
        (8, 96, 64, jnp.bfloat16, "got 96"),
        (8, 128, 700, jnp.bfloat16, "a multiple of 8 columns, got 700"),
        (8, 128, 64, jnp.float32, "got float32"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(rows, width, columns, dtype, reason):
    with pytest.raises(launch.Unsupported, match=reason):
        attention.check(rows, width, columns, dtype)


@pytest.mark.parametrize(("columns", "served"), [(704, True), (700, False)])
def test_a_step_asks_for_the_kernel_where_it_serves(columns, served, monkeypatch):
    monkeypatch.setattr(backend, "_kernel_attention", lambda q, k, v, position: q)
    assert (backend.kernel_attention(*draw(2, 1, 2, 4, 64, columns)) is not None) == served
