"""Steps of whole models with the GPU kernels: `pytest -m gpu tests/replayssm_jax`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replayssm_jax as rs
from models.nemotron_h import NemotronH
from models.qwen3_5 import Qwen35
from replayssm_jax import replay as replay_module
from tests.tiny_models import VOCAB, heat, nemotron_config, qwen_config, randomize

pytestmark = pytest.mark.gpu


def gpu_model(family, dtype):
    def make():
        if family == "mamba2":
            sizes = {"mamba_num_heads": 8, "mamba_head_dim": 80, "d_state": 128, "layer_pattern": "MM*-"}
            return NemotronH(nemotron_config(**sizes), dtype=dtype, rngs=nnx.Rngs(0))
        sizes = {"value_heads": 4, "key_head_dim": 128, "value_head_dim": 128}
        return Qwen35(qwen_config(**sizes), dtype=dtype, rngs=nnx.Rngs(0))

    return heat(randomize(make))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_steps_equal_those_of_the_portable_backend(family, dtype):
    model = gpu_model(family, dtype)
    texts = np.random.default_rng(0).integers(0, VOCAB, (3, 64), dtype=np.int32)
    runs = {}
    with jax.default_matmul_precision("highest"):
        for implementation in ("pallas", "xla"):
            replay = rs.ReplayConfig(buffer_length=8, window=3, implementation=implementation)
            cache = model.init_cache(3, 64, replay)
            _, cache = rs.prefill(model, texts[:, :16], np.array([16, 3, 9], np.int32), cache)
            rng, position, logits = np.random.default_rng(1), np.array([16, 3, 9]), []
            while position.max() < 60:
                tokens = np.stack([row[p : p + 3] for row, p in zip(texts, position, strict=True)])
                out, cache = rs.step(model, tokens, cache)
                logits.append(np.asarray(out))
                accepted = rng.integers(0, 4, 3)
                cache, position = rs.commit(cache, accepted), position + accepted
            runs[implementation] = np.stack(logits), rs.materialize(cache)
    bound = 1e-4 if dtype == jnp.float32 else 5e-2
    for ours, truth in zip(jax.tree.leaves(runs["pallas"]), jax.tree.leaves(runs["xla"]), strict=True):
        ours, truth = np.asarray(ours, np.float64), np.asarray(truth, np.float64)
        assert np.sqrt(np.mean((ours - truth) ** 2) / np.mean(truth**2)) < bound


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_the_compiled_step_copies_no_buffer_of_the_cache(family):
    model = gpu_model(family, jnp.bfloat16)
    cache = model.init_cache(3, 64, rs.ReplayConfig(buffer_length=8, window=2, implementation="pallas"))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    tokens = jnp.zeros((3, 2), jnp.int32)
    compiled = replay_module._step.lower(model, tokens, cache, return_hidden=False).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == size
    state = cache.layers[0].checkpoint
    shape = "f32[{}]".format(",".join(map(str, state.shape)))
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and shape in line]
