"""Tests that need four devices; `test_sharding.py` runs them on four that XLA makes of one CPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import replayssm_jax as rs
from pallas_kernels import launch
from replayssm_jax import precision, replay
from replayssm_jax.cache import RecurrentLayer
from replayssm_jax.recurrence import RECURRENCES
from replayssm_jax.sharding import partition_specs
from tests.replayssm_jax.recurrence.cases import Shape, draw, draw_heads, draw_state
from tests.tiny_models import assert_close, hot_model, random_tokens

COLLECTIVE = re.compile(r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(.*")


def mesh(**axes):
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def layer_and_inputs(name, shape, *, tokens, slots=12):
    """A layer in mid-window, with the inputs, reader and constants of `recur`."""
    rng = np.random.default_rng(3)
    heads = draw_heads(name, rng, shape)
    ring, _ = draw(name, rng, shape, slots, heads)
    inputs, reader = draw(name, rng, shape, tokens, heads)
    layer = RecurrentLayer(
        checkpoint=draw_state(rng, shape),
        ring=ring,
        conv=jnp.zeros((shape.batch, 3, 5)),
        heads=heads,
        recurrence=name,
    )
    return layer, inputs, reader, heads


def segment_of(batch, tokens, mode):
    """Rows in different phases, of which every second folds its ring."""
    rows = jnp.arange(batch, dtype=jnp.int32)
    length = 1 + rows % 5
    fold = jnp.where(rows % 2 == 0, length, 0)
    return replay.Segment(
        position=10 + rows + length,
        lengths=1 + rows % tokens,
        fold=fold,
        start=10 + rows + fold,
        length=length - fold,
        plan=None,
        mode=mode,
        tokens=tokens,
    )


@pytest.mark.parametrize("mode", ["step", pytest.param("prefill", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(RECURRENCES))
def test_a_recurrence_runs_on_four_devices_without_a_collective(name, mode):
    tokens = 20 if mode == "prefill" else 3
    devices = mesh(data=2, tensor=2)
    shape = Shape(batch=4, heads=4, groups=2).for_recurrence(name)
    case = layer_and_inputs(name, shape, tokens=tokens)
    segment = segment_of(4, tokens, mode)
    run = functools.partial(replay.recur, RECURRENCES[name])
    expected = jax.jit(run)(*case, segment)
    arguments = (*case, dataclasses.replace(segment, mesh=devices))
    program = jax.jit(run).lower(*arguments).compile()
    assert not COLLECTIVE.search(program.as_text())
    outputs = program(*jax.tree.map(jax.device_put, arguments, program.input_shardings[0]))
    assert len(outputs[0].sharding.device_set) == 4
    for ours, truth in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert_close(ours, truth, 1e-6)


@pytest.mark.slow
def test_stochastic_rounding_on_four_devices_draws_the_words_of_one():
    """Every device knows which heads it holds."""
    devices = mesh(data=2, tensor=2)
    shape = Shape(batch=4, heads=4, groups=2, d_state=16)
    layer, inputs, reader, heads = layer_and_inputs("gated_delta", shape, tokens=1)
    layer = dataclasses.replace(
        layer,
        checkpoint=precision.encode(layer.checkpoint, "fp8_e4m3"),
        copy=precision.encode(layer.checkpoint, "nvfp4"),
        index=3,
    )
    segment = dataclasses.replace(segment_of(4, 1, "step"), seed=jnp.arange(4, dtype=jnp.uint32))
    run = jax.jit(functools.partial(replay.recur, RECURRENCES["gated_delta"]))
    _, expected = run(layer, inputs, reader, heads, segment)
    _, split = run(layer, inputs, reader, heads, dataclasses.replace(segment, mesh=devices))
    assert len(split.checkpoint.codes.sharding.device_set) == 4
    same = np.asarray(split.checkpoint.codes) == np.asarray(expected.checkpoint.codes)
    # A fold whose sums are rounded otherwise decides otherwise once in some ten thousand draws.
    assert np.mean(same[::2]) > 0.99
    copy = precision.encode(precision.decode(split.checkpoint), "nvfp4")
    np.testing.assert_array_equal(split.copy.codes[::2], copy.codes[::2])


@pytest.mark.parametrize(
    ("family", "layers", "method", "axes"),
    [
        ("mamba2", 2, rs.ReplayConfig(buffer_length=5, window=3), {"data": 2, "tensor": 2}),
        pytest.param("gated_delta", 1, rs.EagerConfig(), {"tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_steps_of_a_split_cache_equal_those_of_one_device(family, layers, method, axes):
    model, texts, devices = hot_model(family, layers=layers), random_tokens(4, 40), mesh(**axes)
    lengths = np.array([3, 7, 5, 8])
    copies = jax.device_put(model, NamedSharding(devices, PartitionSpec()))
    caches = [model.init_cache(4, 64, method), rs.shard_cache(model.init_cache(4, 64, method), devices)]
    logits, states = [], []
    for network, cache in zip((model, copies), caches, strict=True):
        _, cache = rs.prefill(network, texts[:, :8], lengths, cache)
        rng, position = np.random.default_rng(0), lengths
        for _ in range(6):
            tokens = np.stack([row[p : p + cache.window] for row, p in zip(texts, position, strict=True)])
            out, cache = rs.step(network, tokens, cache)
            accepted = rng.integers(0, cache.window + 1, 4) if cache.window > 1 else np.ones(4, np.int32)
            cache, position = rs.commit(cache, accepted), position + accepted
            logits.append(np.asarray(out))
        states.append(rs.materialize(cache))
    assert_close(np.stack(logits[6:]), np.stack(logits[:6]), 1e-5)
    for ours, truth in zip(*reversed(states), strict=True):
        assert_close(ours, truth, 1e-5)
    specs = jax.tree.leaves(partition_specs(cache, devices), is_leaf=lambda x: isinstance(x, PartitionSpec))
    for leaf, spec in zip(jax.tree.leaves(cache), specs, strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(devices, spec), leaf.ndim)

    tokens = jnp.zeros((4, method.window), jnp.int32)
    program = replay._step.lower(copies, tokens, cache, return_hidden=False).compile()
    found = [match[0] for match in COLLECTIVE.finditer(program.as_text())]
    assert found and not [line for line in found if "shard_map" in line]
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
    assert program.memory_analysis().alias_size_in_bytes == own


def test_what_cannot_be_split_is_refused():
    cache = hot_model("mamba2", layers=1).init_cache(3, 8)
    with pytest.raises(ValueError, match='3 rows cannot be split over the 2 devices of mesh axis "data"'):
        rs.shard_cache(cache, mesh(data=2))
    with pytest.raises(ValueError, match='2 groups of heads .* 4 devices of mesh axis "tensor"'):
        rs.shard_cache(cache, mesh(tensor=4))
    with pytest.raises(ValueError, match="mesh axes of type Auto"):
        rs.shard_cache(cache, jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)))


@pytest.mark.slow
@pytest.mark.skipif(launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels need a newer JAX")
@pytest.mark.parametrize("method", [rs.ReplayConfig(buffer_length=14, window=2), rs.EagerConfig()])
@pytest.mark.parametrize("name", ["mamba2", "gated_delta"])
def test_the_kernels_lower_for_four_gpus(name, method):
    shape = Shape(batch=4, heads=8, groups=4, head_dim=64, d_state=128)
    layer, *rest = layer_and_inputs(name, shape, tokens=method.window, slots=16)
    if isinstance(method, rs.EagerConfig):
        layer = dataclasses.replace(layer, ring=None)
    count = jnp.zeros((4,), jnp.int32)
    cache = rs.shard_cache(
        rs.Cache(
            layers=(layer,),
            start=count,
            length=count,
            pending=count,
            flush_at=count + method.buffer_length,
            seed=count.astype(jnp.uint32),
            replay=dataclasses.replace(method, implementation="pallas"),
            max_length=8,
        ),
        mesh(data=2, tensor=2),
    )

    def run(cache, inputs, reader, heads):
        segment = replay.step_segment(cache, method.window)
        return replay.recur(RECURRENCES[name], cache.layers[0], inputs, reader, heads, segment)

    lowered = jax.jit(run).trace(cache, *rest).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "mosaic_gpu" in text and "manual_axes" in text
    assert not COLLECTIVE.search(text.replace("_", "-"))
