"""Steps of models with the GPU kernels: `pytest -m gpu tests/replayssm_jax`.

Nearly all of the time is compilation for the GPU. So models have one recurrent layer, prompts are fed on the
CPU of the same machine, and the other side of every comparison runs there too.
"""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replayssm_jax as rs
from models.config import MTPConfig
from models.mtp import _entries
from models.nemotron_h import NemotronH
from models.qwen3_5 import Qwen35
from replayssm_jax import backend
from replayssm_jax import replay as replay_module
from replayssm_jax.recurrence import RECURRENCES
from tests.replayssm_jax.recurrence.cases import (
    Shape,
    draw,
    draw_heads,
    draw_state,
    rms_error,
    serial,
    tolerance,
)
from tests.tiny_models import VOCAB, TinyKimi, heat, nemotron_config, qwen_config, random_tokens, randomize

pytestmark = pytest.mark.gpu

FAMILIES = ["mamba2", "gated_delta"]
# The kernels' rings have a multiple of 8 slots; with these sizes the portable backend's have as many.
VERIFY, DECODE = rs.ReplayConfig(buffer_length=13, window=3), rs.ReplayConfig(buffer_length=15)
PROMPTS = np.array([16, 3, 9], np.int32)


def on_cpu():
    return jax.default_device(jax.devices("cpu")[0])


def to_gpu(tree):
    return jax.device_put(tree, jax.devices("gpu")[0])


@functools.cache
def cpu_model(family, dtype=jnp.float32):
    def make():
        if family == "mamba2":
            sizes = {"mamba_num_heads": 8, "mamba_head_dim": 80, "d_state": 128, "layer_pattern": "M*"}
            return NemotronH(nemotron_config(**sizes), dtype=dtype, rngs=nnx.Rngs(0))
        sizes = {"value_heads": 4, "key_head_dim": 128, "value_head_dim": 128}
        sizes["layer_types"] = ("linear_attention",)
        return Qwen35(qwen_config(**sizes), dtype=dtype, rngs=nnx.Rngs(0))

    with on_cpu():
        return heat(randomize(make))


@functools.cache
def prefilled(family, method, dtype=jnp.float32):
    """Prompts of three lengths, fed on the CPU."""
    model = cpu_model(family, dtype)
    with on_cpu():
        return rs.prefill(model, random_tokens(3, 64)[:, :16], PROMPTS, model.init_cache(3, 64, method))[1]


@functools.cache
def gpu_step(family, method, implementation, dtype=jnp.float32):
    """The compiled step with its model, both on the GPU."""
    model = to_gpu(cpu_model(family, dtype))
    cache = served(prefilled(family, method, dtype), implementation)
    tokens = to_gpu(np.zeros((3, method.window), np.int32))
    # Tuning the products of a tiny model is most of its compile time.
    options = {"xla_gpu_autotune_level": 0}
    with jax.default_matmul_precision("highest"):
        lowered = replay_module._step.lower(model, tokens, cache, return_hidden=False)
    return model, lowered.compile(compiler_options=options)


def served(cache, implementation):
    """A copy of a cache on the GPU with another backend."""
    return to_gpu(
        jax.tree.map(np.array, replace(cache, replay=replace(cache.replay, implementation=implementation)))
    )


def check_steps(family, method, implementation, dtype=jnp.float32, *, bound):
    """Twenty steps with random acceptance, logits and final states against those of the CPU."""
    texts, window = random_tokens(3, 64), method.window
    cpu, ours = prefilled(family, method, dtype), served(prefilled(family, method, dtype), implementation)
    cpu = jax.tree.map(jnp.copy, cpu)
    model, step = gpu_step(family, method, implementation, dtype)
    rng, position, logits = np.random.default_rng(1), PROMPTS, ([], [])
    for _ in range(20):
        tokens = np.stack([row[p : p + window] for row, p in zip(texts, position, strict=True)])
        accepted = rng.integers(0, window + 1, 3) if window > 1 else np.ones(3, np.int32)
        with on_cpu():
            out, cpu = rs.step(cpu_model(family, dtype), tokens, cpu)
            cpu = rs.commit(cpu, accepted)
        logits[1].append(np.asarray(out))
        out, ours = step(model, to_gpu(tokens), ours)
        ours = rs.commit(ours, accepted)
        logits[0].append(np.asarray(out))
        position = position + accepted
    with on_cpu():
        ours = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), ours)
        states = rs.materialize(ours), rs.materialize(cpu)
    assert rms_error(np.stack(logits[0], 1), np.stack(logits[1], 1)) < bound
    for state, truth in zip(*states, strict=True):
        assert rms_error(state, truth) < bound


@pytest.mark.parametrize("method", [VERIFY, rs.EagerConfig()], ids=["verify", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_those_of_the_portable_backend(family, method):
    check_steps(family, method, "pallas", bound=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_steps_equal_those_of_the_portable_backend(family):
    with jax.numpy_dtype_promotion("standard"):  # jax.nn.dot_product_attention promotes
        check_steps(family, DECODE, "pallas", jnp.bfloat16, bound=5e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_portable_backend_decodes_on_a_gpu(family):
    check_steps(family, VERIFY, "xla", bound=1e-4)


@pytest.mark.parametrize("method", [VERIFY, rs.EagerConfig()], ids=["verify", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_compiled_step_copies_no_buffer_of_the_cache(family, method):
    cache = prefilled(family, method)
    _, step = gpu_step(family, method, "pallas")
    assert step.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    copied = [line for line in step.as_text().splitlines() if " copy(" in line]
    for leaf in jax.tree.leaves(cache.layers):
        shape = "[{}]".format(",".join(map(str, leaf.shape)))
        assert leaf.ndim < 3 or not [line for line in copied if shape in line]


def test_auto_takes_the_kernels_where_they_serve():
    with on_cpu():
        kimi = TinyKimi(layers=1, rngs=nnx.Rngs(0))
        small = heat(randomize(lambda: NemotronH(nemotron_config(layer_pattern="M"), rngs=nnx.Rngs(0))))
    for method in (rs.ReplayConfig(), rs.EagerConfig(), None):
        for family in FAMILIES:
            shapes = jax.eval_shape(functools.partial(cpu_model(family).init_cache, 2, 8, method))
            assert shapes.replay.implementation == "pallas"
        for model in (kimi, small):
            shapes = jax.eval_shape(functools.partial(model.init_cache, 2, 8, method))
            assert shapes.replay.implementation == "xla"
    with pytest.raises(ValueError, match='"pallas" cannot be served: there are no Pallas kernels for kimi'):
        kimi.init_cache(2, 8, rs.ReplayConfig(implementation="pallas"))
    with on_cpu():
        assert small.init_cache(1, 8).replay.implementation == "xla"


def loaded(model):
    return rs.Loaded(
        model=model, config=model.config, tokenizer=None, stop_ids=(), vocab_size=VOCAB, path=Path()
    )


def greedy(model, **options):
    with jax.default_matmul_precision("highest"):
        return rs.generate(loaded(model), [[1, 2, 3], [4, 5]], rs.Sampling(max_new_tokens=40), **options)


def test_generate_writes_the_same_text_with_the_kernels():
    with on_cpu():
        expected = greedy(cpu_model("mamba2"), replay=DECODE)
    ours = greedy(to_gpu(cpu_model("mamba2")), replay=DECODE)
    assert ours.cache.replay.implementation == "pallas"
    assert ours.tokens == expected.tokens
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-3)


@pytest.mark.parametrize("drafting", ["mamba2", "gated_delta"])
def test_drafts_and_their_verification_by_the_kernels_keep_the_text(drafting):
    with on_cpu():
        expected = greedy(cpu_model("gated_delta"))
    drafter = rs.Speculative(loaded(to_gpu(cpu_model(drafting))), draft_tokens=2)
    ours = greedy(to_gpu(cpu_model("gated_delta")), speculative=drafter)
    assert ours.cache.replay.implementation == "pallas"
    assert ours.drafter_state.cache.replay.implementation == "pallas"
    assert ours.tokens == expected.tokens
    np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-3)
    # The model as its own drafter is never refused.
    assert (ours.stats.draft_acceptance == 1) == (drafting == "gated_delta")


@pytest.mark.parametrize("name", list(RECURRENCES))
def test_the_portable_fold_of_all_rows_together_is_the_float64_loop(name):
    shape = Shape(batch=5, heads=4, groups=2, head_dim=16, d_state=32).for_recurrence(name)
    rng = np.random.default_rng(8)
    with on_cpu():
        heads, state = draw_heads(name, rng, shape), draw_state(rng, shape)
        inputs, reader = draw(name, rng, shape, 12, heads)
    lengths = np.array([12, 0, 1, 7, 12], np.int32)
    ring = jax.tree.map(
        lambda field: np.roll(field, 7, axis=field.ndim - 2), jax.tree.map(np.asarray, inputs)
    )
    start = np.full(5, 12 * 9 + 7, np.int32)
    folded = jax.jit(RECURRENCES[name].fold)(*to_gpu((np.asarray(state), ring, heads, start, lengths)))
    truth = serial(name, state, inputs, reader, heads, lengths)[1]
    assert rms_error(folded, truth) <= tolerance(12)
    np.testing.assert_array_equal(folded[1], state[1])


@functools.cache
def wide_model(family):
    """Sizes that the kernels for convolution, gated norm, attention and most products serve."""

    def make():
        attention = {"head_dim": 64, "hidden_size": 128}
        if family == "mamba2":
            sizes = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 4, "d_state": 128}
            sizes["intermediate_size"] = 256
            config = nemotron_config(**attention, **sizes, layer_pattern="M*-")
            return NemotronH(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        sizes = {"key_heads": 4, "value_heads": 4, "key_head_dim": 128, "value_head_dim": 128}
        layers = {"layer_types": ("linear_attention", "full_attention"), "rotary_dim": 64}
        layers["intermediate_size"] = 256
        return Qwen35(qwen_config(**attention, **sizes, **layers), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    with on_cpu():
        return heat(randomize(make))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_around_the_recurrence_change_no_step(family, monkeypatch):
    model = to_gpu(wide_model(family))
    serves, asked = backend._serves, []
    texts, logits, windows = random_tokens(3, 64), [], []
    for kernels in (True, False):

        def decide(check, *sizes, kernels=kernels):
            served = serves(check, *sizes)
            asked.append((check.__module__.removeprefix("pallas_kernels."), served))
            return served and kernels

        monkeypatch.setattr(backend, "_serves", decide)
        # jax.nn.dot_product_attention promotes.
        with on_cpu(), jax.numpy_dtype_promotion("standard"):
            empty = wide_model(family).init_cache(3, 64, VERIFY)
            cache = rs.prefill(wide_model(family), texts[:, :16], PROMPTS, empty)[1]
        cache = served(cache, "pallas")
        step = jax.jit(lambda *arguments: replay_module.step_core(*arguments), donate_argnums=2)
        outputs = []
        for index in range(6):
            tokens = to_gpu(texts[:, 16 + 2 * index : 19 + 2 * index])
            out, _, cache = step(model, tokens, cache)
            cache = rs.commit(cache, np.full(3, 2, np.int32))
            outputs.append(np.asarray(out))
        logits.append(np.stack(outputs))
        windows.append(np.asarray(cache.layers[0].conv.astype(jnp.float32)))
    # So few heads have their gates from XLA, and their columns with the recurrence's inputs are no blocks.
    assert {name for name, served in asked if not served} == {"convolution", "products"}
    assert ("products", True) in asked
    around = {"convolution", "residual_norm", "attention_inputs", "attention", "products"}
    assert {name for name, _ in asked} == around | ({"gated_norm"} if family == "mamba2" else set())
    np.testing.assert_array_equal(*windows)
    assert rms_error(*logits) < 3e-2


def test_a_heads_entries_by_the_kernels_are_those_of_the_portable_backend(monkeypatch):
    head = MTPConfig(layers=("full_attention",))
    sizes = {"head_dim": 64, "num_attention_heads": 16, "rotary_dim": 16, "hidden_size": 512, "mtp": head}
    layers = {"layer_types": ("linear_attention",)}
    with on_cpu():
        config = qwen_config(**sizes, **layers)
        model = to_gpu(randomize(lambda: Qwen35(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
        rng = np.random.default_rng(2)
        caches = jax.tree.map(
            lambda leaf: to_gpu(np.asarray(rng.normal(size=leaf.shape), leaf.dtype)),
            model.mtp.init_caches(3, 64, jnp.bfloat16),
        )
    serves, asked = backend._serves, []

    def decide(check, *sizes):
        served = serves(check, *sizes)
        asked.append((check.__module__.removeprefix("pallas_kernels."), served))
        return served

    monkeypatch.setattr(backend, "_serves", decide)
    entries = jax.jit(_entries, static_argnames="kernels")
    # The last row's entries reach the end of its keys and values.
    for count, position in ((4, [9, 0, 60]), (1, [30, 63, 7])):
        tokens, position = to_gpu(random_tokens(3, count)), to_gpu(np.array(position, np.int32))
        hidden = to_gpu(np.asarray(rng.normal(size=(3, count, 512)), jnp.bfloat16))
        found, expected = (
            jax.tree.map(
                lambda leaf: np.asarray(leaf.astype(jnp.float32)),
                entries(model, caches, tokens, hidden, position, kernels=kernels),
            )
            for kernels in (True, False)
        )
        assert ("attention", True) in asked
        asked.clear()
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert rms_error(one, other) < 2e-2
