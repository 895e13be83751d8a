"""Which backend serves a cache, and the wiring of the GPU kernels into a step."""

import dataclasses
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from pallas_kernels import launch
from replayssm_jax import backend, recurrence
from replayssm_jax import replay as replay_module
from replayssm_jax.cache import RecurrentSpec
from tests.tiny_models import assert_close, full_logits, hot_model, random_tokens

NO_GPU = jax.default_backend() != "gpu"


@pytest.mark.skipif(not NO_GPU, reason="says what happens where there is no GPU")
def test_b25_an_explicit_request_that_cannot_be_served_says_why(caplog):
    model = hot_model("mamba2", layers=1)
    reason = "jax >= 0.11.2" if launch.jax_version() < launch.MINIMUM_JAX else "need a GPU.*cpu"
    with pytest.raises(ValueError, match=f'"pallas" cannot be served: .*{reason}'):
        model.init_cache(1, 8, rs.ReplayConfig(implementation="pallas"))
    backend._logged.clear()
    with caplog.at_level(logging.INFO, logger="replayssm_jax.backend"):
        for _ in range(2):
            assert model.init_cache(1, 8).replay.implementation == "xla"
    assert len([record for record in caplog.records if "portable backend" in record.message]) == 1


@pytest.mark.skipif(launch.jax_version() < launch.MINIMUM_JAX, reason="older JAX is refused before the sizes")
def test_b25_sizes_that_the_kernels_cannot_serve_are_named():
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

    replay = rs.ReplayConfig(window=4)
    assert backend.size_refusal(replay, [None, spec()], 256) is None
    assert backend.size_refusal(replay, [spec(heads=96, head_dim=80)], 256) is None
    for changes, message in (
        ({"d_state": 96}, "96"),
        ({"heads": 6, "groups": 2}, "multiple of 4"),
        ({"recurrence": "kimi_delta"}, "no Pallas kernels for kimi_delta"),
        ({"recurrence": "gated_delta", "head_dim": 80, "heads": 64, "groups": 16}, "80"),
    ):
        assert message in backend.size_refusal(replay, [spec(**changes)], 256)
    assert "2^31" in backend.size_refusal(replay, [spec()], 2**12)


def portable_step(module):
    """The contract of the kernels' `step`, by the portable recurrence."""

    def step(checkpoint, ring, new, reader, constants, plan):
        cursor, counts = plan
        order = jnp.argsort(cursor[:, 0])
        start, length = cursor[order, 1], cursor[order, 2]
        flush = order >= counts[0]
        heads = module.Heads() if constants is None else module.Heads(*constants)
        fold = jnp.where(flush, length, 0)
        checkpoint = module.fold(checkpoint, module.Inputs(*ring), heads, start, fold)
        slots = replay_module.append(module.Inputs(*ring), module.Inputs(*new), start + length)
        outputs = module.window(checkpoint, slots, reader, heads, start + fold, length - fold)
        return outputs, checkpoint, tuple(jax.tree.leaves(slots))

    return step


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_a_step_hands_the_kernels_what_they_ask_for(family, monkeypatch):
    name = f"tests.portable_{family}"
    kernels = types.ModuleType(name)
    kernels.step = portable_step(recurrence.RECURRENCES[family])
    monkeypatch.setitem(sys.modules, name, kernels)
    monkeypatch.setitem(backend.KERNELS, family, name)
    model = hot_model(family, layers=1)
    texts = random_tokens(3, 60)
    expected = full_logits(model, texts)
    cache = model.init_cache(3, 64, rs.ReplayConfig(buffer_length=5, window=3))
    served = dataclasses.replace(cache.replay, implementation="pallas")
    _, cache = rs.prefill(
        model, texts[:, :16], np.array([3, 7, 5]), dataclasses.replace(cache, replay=served)
    )
    rng, position = np.random.default_rng(0), np.array([3, 7, 5])
    while position.max() < 40:
        tokens = np.stack([row[p : p + 3] for row, p in zip(texts, position, strict=True)])
        logits, cache = rs.step(model, tokens, cache)
        for row, p in enumerate(position):
            assert_close(logits[row], expected[row, p : p + 3])
        accepted = rng.integers(0, 4, 3)
        cache, position = rs.commit(cache, accepted), position + accepted
    backend._kernel_step.clear_cache()


@pytest.mark.slow
@pytest.mark.skipif(launch.jax_version() < launch.MINIMUM_JAX, reason="the kernels need a newer JAX")
@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_a_step_with_kernels_lowers_for_cuda_on_any_machine(family):
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
    cache = model.init_cache(2, 64, rs.ReplayConfig(buffer_length=14, window=2))
    cache = dataclasses.replace(cache, replay=dataclasses.replace(cache.replay, implementation="pallas"))
    tokens = jnp.zeros((2, 2), jnp.int32)
    lowered = replay_module._step.trace(model, tokens, cache, return_hidden=False).lower(
        lowering_platforms=("cuda",)
    )
    assert lowered.as_text().count("mosaic_gpu") >= 2
