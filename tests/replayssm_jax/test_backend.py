"""Which backend serves a cache, and the wiring of the GPU kernels into a step."""

import dataclasses
import logging
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from bench.shapes import SHAPES
from pallas_kernels import launch
from replayssm_jax import backend, recurrence
from replayssm_jax import replay as replay_module
from replayssm_jax.cache import RecurrentSpec
from replayssm_jax.drafters import ModelDrafter
from tests.tiny_models import assert_close, full_logits, hot_model, random_tokens

NO_GPU = jax.default_backend() != "gpu"
needs_kernels = pytest.mark.skipif(
    launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels need a newer JAX"
)


@pytest.mark.skipif(not NO_GPU, reason="says what happens where there is no GPU")
def test_b25_an_explicit_request_that_cannot_be_served_says_why(caplog):
    model = hot_model("mamba2", layers=1)
    reason = "jax >= 0.11.2" if launch.jax_version() < launch.MINIMUM_JAX else "need a GPU.*cpu"
    with pytest.raises(ValueError, match=f'"pallas" cannot be served: .*{reason}'):
        model.init_cache(1, 8, rs.ReplayConfig(implementation="pallas"))
    with pytest.raises(ValueError, match=f'"pallas" cannot be served: .*{reason}'):
        model.init_cache(1, 8, rs.EagerConfig(implementation="pallas"))
    backend._logged.clear()
    with caplog.at_level(logging.INFO, logger="replayssm_jax.backend"):
        for _ in range(2):
            assert model.init_cache(1, 8).replay.implementation == "xla"
            assert model.init_cache(1, 8, None).replay == rs.EagerConfig(implementation="xla")
    assert len([record for record in caplog.records if "portable backend" in record.message]) == 1


class Gpu:
    """A stand-in for the default device."""

    platform = "gpu"

    def __init__(self, compute_capability):
        self.compute_capability = compute_capability


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(backend, "_default_device", lambda: Gpu("9.0"))
    monkeypatch.setattr(backend, "_logged", set())


def spec(**changes):
    sizes = {
        "recurrence": "mamba2",
        "heads": 128,
        "groups": 8,
        "head_dim": 64,
        "d_state": 128,
        "conv_channels": 10240,
        "conv_kernel": 4,
    }
    return RecurrentSpec(**(sizes | changes))


REPLAY = rs.ReplayConfig(window=4)


@needs_kernels
@pytest.mark.parametrize("method", [REPLAY, rs.EagerConfig()])
def test_b25_auto_takes_the_kernels_on_a_gpu_that_can_serve(method, on_gpu, monkeypatch):
    for served in (spec(), spec(heads=96, head_dim=80), spec(recurrence="gated_delta", heads=64, groups=16)):
        resolved = backend.resolve(method, [None, served], 256)
        assert resolved == dataclasses.replace(method, implementation="pallas")
        assert backend.resolve(resolved, [None, served], 256) == resolved
    portable = dataclasses.replace(method, implementation="xla")
    assert backend.resolve(portable, [spec()], 256) == portable
    monkeypatch.setattr(backend, "_default_device", lambda: Gpu("8.0"))
    assert backend.resolve(method, [spec()], 256) == portable
    with pytest.raises(ValueError, match="Hopper GPU or newer, this one has compute capability 8.0"):
        backend.resolve(dataclasses.replace(method, implementation="pallas"), [spec()], 256)


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "batch", "reason"),
    [
        ({"heads": 2, "groups": 1, "head_dim": 80, "d_state": 96}, 3, "multiple of 64, got 2 x 80"),
        ({"head_dim": 80, "heads": 32, "d_state": 96}, 7, "d_state must be 64, 128, 192 or 256, got 96"),
        ({"heads": 6, "groups": 1, "head_dim": 24, "d_state": 18}, 3, "multiple of 64, got 6 x 24"),
        ({"heads": 6, "groups": 2}, 3, "multiple of 4, got 6"),
        (
            {"recurrence": "gated_delta", "heads": 64, "groups": 16, "head_dim": 96, "d_state": 80},
            7,
            "d_state must be .* got 80",
        ),
        ({"recurrence": "gated_delta", "heads": 64, "groups": 16, "head_dim": 80}, 3, "got 80 and 128"),
        ({"recurrence": "kimi_delta"}, 3, "no Pallas kernels for kimi_delta"),
        ({}, 2**12, r"fewer than 2\^32 elements, got 4294967296"),
    ],
)
def test_b23_b25_sizes_that_the_kernels_cannot_serve_are_named(changes, batch, reason, on_gpu, caplog):
    specs = [spec(), None, spec(**changes)]
    with pytest.raises(ValueError, match=f'"pallas" cannot be served: .*{reason}'):
        backend.resolve(dataclasses.replace(REPLAY, implementation="pallas"), specs, batch)
    with caplog.at_level(logging.INFO, logger="replayssm_jax.backend"):
        for _ in range(2):
            assert backend.resolve(REPLAY, specs, batch).implementation == "xla"
    (record,) = caplog.records
    assert re.search(f"portable backend: .*{reason}", record.message)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "eager", "replay"), [("super", 4, 8), ("nano-4b", 4, 8), ("q122", 4, 8), ("qwen3.5-4b", 8, 16)]
)
def test_few_rows_decode_by_the_eager_kernels_where_nobody_says_how(name, eager, replay, on_gpu):
    """The most rows at which the eager kernel was faster, and the fewest measured at which replay was."""
    specs = [None, spec(**dataclasses.asdict(SHAPES[name]))]
    model = types.SimpleNamespace(cache_specs=lambda: specs)
    assert backend.default_method(model, 1) == backend.default_method(model, eager) == rs.EagerConfig()
    assert backend.default_method(model, replay) == backend.default_method(model, 256) == rs.ReplayConfig()
    specs.append(spec(recurrence="kimi_delta"))
    assert backend.default_method(model, 1) == rs.ReplayConfig()


@needs_kernels
def test_a_smaller_model_drafts_by_the_portable_backend_where_the_kernels_serve_the_target_alone(on_gpu):
    """As with a cache that goes on, whose configuration names the backend that was found for the target."""
    served = dataclasses.replace(REPLAY, implementation="pallas")
    drafter = ModelDrafter(hot_model("gated_delta", layers=1))
    state = jax.eval_shape(lambda: drafter.init(None, 3, 64, served))
    assert state.cache.replay == dataclasses.replace(REPLAY, implementation="xla")


def portable_kernels(module, name):
    """The contract of the kernels' `step` and `eager`, by the portable recurrence."""

    def constants_of(constants):
        return module.Heads() if constants is None else module.Heads(*constants)

    def step(checkpoint, ring, new, reader, constants, plan, *, forgotten=None):
        assert forgotten is None
        cursor, counts = plan
        order = jnp.argsort(cursor[:, 0])
        start, length = cursor[order, 1], cursor[order, 2]
        flush = order >= counts[0]
        heads = constants_of(constants)
        fold = jnp.where(flush, length, 0)
        checkpoint = module.fold(checkpoint, module.Inputs(*ring), heads, start, fold)
        slots = replay_module.append(module.Inputs(*ring), module.Inputs(*new), start + length)
        outputs = module.window(checkpoint, slots, reader, heads, start + fold, length - fold)
        return outputs, checkpoint, tuple(jax.tree.leaves(slots))

    def eager(state, new, reader, constants, plan):
        cursor, counts = plan
        outputs, after = module.eager_step(state, module.Inputs(*new), reader, constants_of(constants))
        served = jnp.argsort(cursor[:, 0]) >= counts[0]
        return outputs, jnp.where(served[:, None, None, None], after, state)

    kernels = types.ModuleType(name)
    kernels.step, kernels.eager = step, eager
    return kernels


@pytest.mark.parametrize("method", [rs.ReplayConfig(buffer_length=5, window=3), rs.EagerConfig()])
@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_a_step_hands_the_kernels_what_they_ask_for(family, method, monkeypatch):
    name = f"tests.portable_{family}"
    monkeypatch.setitem(sys.modules, name, portable_kernels(recurrence.RECURRENCES[family], name))
    monkeypatch.setitem(backend.KERNELS, family, name)
    model, step = hot_model(family, layers=1), jax.jit(replay_module.step_core)
    texts = random_tokens(3, 60)
    expected = full_logits(model, texts)
    cache = model.init_cache(3, 64, method)
    served = dataclasses.replace(cache.replay, implementation="pallas")
    cache = dataclasses.replace(cache, replay=served)
    rng, position = np.random.default_rng(0), np.array([3, 7, 5])
    _, cache = rs.prefill(model, texts[:, :16], position, cache)
    while position.max() < 40:
        tokens = np.stack([row[p : p + method.window] for row, p in zip(texts, position, strict=True)])
        accepted = rng.integers(0, method.window + 1, 3)
        logits, _, cache = step(model, tokens, cache, accepted > 0)
        for row, p in enumerate(position):
            if accepted[row]:
                assert_close(logits[row], expected[row, p : p + method.window])
        cache, position = rs.commit(cache, accepted), position + accepted
    backend._kernel_step.clear_cache()


def portable_product(x, matrix, *, activation, parts):
    """The contract of `products.multiply`: parts are sums over pieces of the inner axis, in float32."""
    from models.layers.projection import gated_silu, squared_relu

    if parts is not None:
        pieces = [jnp.dot(*pair) for pair in zip(jnp.split(x, 2, 1), jnp.split(matrix, 2), strict=True)]
        return jnp.stack(pieces).astype(jnp.float32)
    return {None: lambda y: y, "squared relu": squared_relu, "gated silu": gated_silu}[activation](x @ matrix)


def portable_residual_norm(x, parts, weight, *, eps, offset):
    """The contract of `residual_norm.add_then_norm`."""
    sums = x + parts.sum(0)
    scale = jax.lax.rsqrt(jnp.square(sums).mean(-1, keepdims=True) + eps)
    return sums, (offset + weight)[None] * sums * scale


def portable_attention_inputs(projected, k, v, position, norms, turns, *, parts):
    """The contract of `attention_inputs.take_in`."""
    first = parts.queries_every * parts.heads
    units = projected.reshape(*projected.shape[:2], -1, parts.width)
    q = units[:, :, : first : parts.queries_every]
    new_k, new_v = jnp.split(units[:, :, first:], 2, axis=2)
    taken = []
    for i, x in enumerate((q, new_k)):
        if norms is not None:
            scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + parts.eps)
            x = x * scale * (parts.offset + norms[i])[None, None, None]
        if turns is not None:
            half = parts.rotated // 2
            cos, sin = (turn[:, :, None] for turn in turns)
            a, b, rest = jnp.split(x, (half, 2 * half), axis=3)
            x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=3)
        taken.append(x)
    row = jnp.arange(x.shape[0])[:, None, None]
    column = (position[:, None] + jnp.arange(x.shape[1])[None])[:, :, None]
    at = row, jnp.arange(parts.groups)[None, None], column
    return taken[0], k.at[at].set(taken[1], mode="drop"), v.at[at].set(new_v, mode="drop")


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_layers_of_few_rows_hand_the_kernels_what_they_ask_for(family, monkeypatch):
    from pallas_kernels import attention_inputs, products, residual_norm

    name, asked = f"tests.portable_{family}", []
    monkeypatch.setitem(sys.modules, name, portable_kernels(recurrence.RECURRENCES[family], name))
    monkeypatch.setitem(backend.KERNELS, family, name)
    monkeypatch.setattr(backend, "_kernel_product", portable_product)
    monkeypatch.setattr(backend, "_kernel_residual_norm", portable_residual_norm)
    monkeypatch.setattr(backend, "_kernel_attention_inputs", portable_attention_inputs)

    def serves(check, *sizes):
        asked.append(check)
        return check in (products.check, residual_norm.check, attention_inputs.check)

    monkeypatch.setattr(backend, "_serves", serves)
    model, texts = hot_model(family, layers=None if family == "gated_delta" else 2), random_tokens(3, 24)
    cache = model.init_cache(3, 32, rs.ReplayConfig(buffer_length=5, window=2))
    cache = dataclasses.replace(cache, replay=dataclasses.replace(cache.replay, implementation="pallas"))
    _, cache = rs.prefill(model, texts[:, :16], np.array([3, 7, 5]), cache)
    logits, _, _ = jax.jit(replay_module.step_core)(
        model, np.stack([row[p : p + 2] for row, p in zip(texts, (3, 7, 5), strict=True)]), cache
    )
    expected = full_logits(model, texts)
    for row, p in enumerate((3, 7, 5)):
        assert_close(logits[row], expected[row, p : p + 2])
    # Every layer's last product goes to the norm behind it.
    assert asked.count(residual_norm.check) >= 2 and asked.count(products.check) > 2
    assert asked.count(attention_inputs.check) == sum(hasattr(layer, "k") for layer in cache.layers) > 0
    backend._kernel_step.clear_cache()


def test_a_cache_of_the_kernels_holds_the_constants_of_heads_in_one_array(monkeypatch):
    monkeypatch.setattr("replayssm_jax.cache.resolve", lambda method, *_: method)
    model = hot_model("mamba2", layers=2)
    cache = model.init_cache(3, 16, rs.ReplayConfig(implementation="pallas"))
    part = rs.select(cache, [2])
    caches = [rs.insert(rs.reset(cache, [0]), part, [1]), part]
    wanted = [np.stack([heads.a, heads.d]) for heads in (block.heads() for block in model.layers) if heads]
    for cache in caches:
        found = [layer.constants for layer in cache.layers if hasattr(layer, "constants")]
        for ours, expected in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours, expected)
    assert model.init_cache(1, 16).layers[0].constants is None


def test_a_prompt_brings_the_constants_of_a_model_whose_weights_changed(monkeypatch):
    monkeypatch.setattr("replayssm_jax.cache.resolve", lambda method, *_: method)
    old = hot_model("mamba2", layers=1)
    new = jax.tree.map(lambda weight: 2 * weight, old)
    cache = old.init_cache(1, 32, rs.ReplayConfig(implementation="pallas"))
    _, cache = rs.prefill(new, random_tokens(1, 16), np.array([16]), cache)
    expected = np.stack(jax.tree.leaves(new.layers[0].heads()))
    assert not np.array_equal(expected, np.stack(jax.tree.leaves(old.layers[0].heads())))
    np.testing.assert_array_equal(cache.layers[0].constants, expected)


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "served"), [((64, 1), True), ((8, 4), True), ((1, 17), True), ((65, 1), False), ((17, 4), False)]
)
def test_steps_of_up_to_64_rows_have_their_products_from_the_kernel(rows, served, monkeypatch):
    monkeypatch.setattr(backend, "_kernel_product", portable_product)
    x, matrix = jnp.ones((*rows, 128), jnp.bfloat16), jnp.ones((128, 64), jnp.bfloat16)
    assert backend.kernel_product(x.astype(jnp.float32), matrix) is None
    whole, parts = (backend.kernel_product(x, matrix, summed=summed) for summed in (True, False))
    if not served:
        assert whole is None and parts is None
        return
    assert whole is not None and whole.shape == (*rows, 64)
    assert parts is not None and parts.shape[1:] == (math.prod(rows), 64)


@needs_kernels
def test_products_of_few_tiles_come_in_parts_that_add_up():
    counts = [backend.product_split(rows, 9216, 2560) for rows in (64, 256, 512)]
    assert counts == [3, 3, 1] and backend.product_split(256, 2560, 18432) == 1
    x, matrix = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 5, 256), (256, 64)])
    )
    x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
    parts = backend.split_product(x, matrix)
    exact = (np.asarray(array.astype(jnp.float32), np.float64) for array in (x.reshape(10, -1), matrix))
    assert parts.shape == (2, 10, 64) and parts.dtype == jnp.float32
    np.testing.assert_allclose(parts.sum(0), np.matmul(*exact), rtol=0, atol=256**0.5 * 1e-5)
    assert backend.split_product(x, matrix[:, :48]) is None


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("method", [rs.ReplayConfig(buffer_length=14, window=2), rs.EagerConfig()])
@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_a_step_with_kernels_lowers_in_place_for_cuda_on_any_machine(family, method):
    from flax import nnx

    from models.nemotron_h import NemotronH
    from models.qwen3_5 import Qwen35
    from tests.tiny_models import nemotron_config, qwen_config, randomize

    def make():
        if family == "mamba2":
            sizes = {"mamba_num_heads": 8, "mamba_head_dim": 64, "d_state": 128}
            return NemotronH(nemotron_config(layer_pattern="MM*", **sizes), rngs=nnx.Rngs(0))
        sizes = {"value_heads": 4, "key_head_dim": 128, "value_head_dim": 64}
        return Qwen35(qwen_config(**sizes), rngs=nnx.Rngs(0))

    model = randomize(make)
    cache = model.init_cache(2, 64, method)
    cache = dataclasses.replace(cache, replay=dataclasses.replace(cache.replay, implementation="pallas"))
    tokens = jnp.zeros((2, method.window), jnp.int32)
    lowered = replay_module._step.trace(model, tokens, cache, return_hidden=False).lower(
        lowering_platforms=("cuda",)
    )
    text = lowered.as_text()
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves(cache))
    calls = re.findall(r"%\d+:(\d+) = stablehlo.custom_call @mosaic_gpu.*", text)
    aliases = [
        line.count("output_operand_alias<") for line in text.splitlines() if "custom_call @mosaic_gpu" in line
    ]
    assert aliases and aliases == [int(results) for results in calls]
