"""Equal layers of a model are calls of one lowered function."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replayssm_jax as rs
from models.checkpoint import abstract_model
from models.layers.program import run_layers
from replayssm_jax import replay as replay_module
from replayssm_jax.cache import LayerSpec, static
from replayssm_jax.flush import kernel_words
from tests.tiny_models import hot_model, nemotron_config, qwen_config

STOCHASTIC = rs.ReplayConfig(
    buffer_length=6, window=2, recurrence="fp8_e4m3", read="nvfp4", rounding="stochastic"
)
METHODS = [rs.ReplayConfig(buffer_length=6, window=2), STOCHASTIC, rs.EagerConfig()]
KINDS = {
    "mamba2": ["attention_layer", "mamba2_layer", "mlp_layer"],
    "gated_delta": ["attention_layer", "gated_delta_layer"],
}


def config(family, repeats):
    if family == "mamba2":
        return nemotron_config(layer_pattern="M*-" * repeats)
    return qwen_config(layer_types=("linear_attention", "full_attention") * repeats)


def lowered(family, repeats, method, mode):
    """The text of one step or prefill of two rows, and the cache that comes out of it."""
    model = abstract_model(config(family, repeats), np.dtype(np.float32))
    cache = jax.eval_shape(lambda model: model.init_cache(2, 64, method), model)
    tokens, lengths = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    if mode == "step":
        traced = replay_module._step.trace(model, tokens, cache, return_hidden=False)
    else:
        traced = replay_module._prefill.trace(model, tokens, lengths, cache, return_hidden=False)
    return traced.lower().as_text(), traced.out_info[1]


@pytest.mark.parametrize(
    ("mode", "method"),
    [*(("step", method) for method in METHODS), ("prefill", METHODS[0])],
    ids=["step-replay", "step-stochastic", "step-eager", "prefill"],
)
@pytest.mark.parametrize("family", KINDS)
def test_a_layer_kind_is_lowered_once_whatever_the_depth(family, mode, method):
    texts, caches = zip(*(lowered(family, repeats, method, mode) for repeats in (1, 2)), strict=True)
    for text, repeats in zip(texts, (1, 2), strict=True):
        assert sorted(re.findall(r"func\.func private @(\w+_layer\w*)\(", text)) == KINDS[family]
        assert len(re.findall(r"call @\w+_layer\w*\(", text)) == repeats * len(KINDS[family])
    short, deep = (text.count("stablehlo.dot_general") for text in texts)
    assert short == deep > 0
    # Every layer still knows which one it is, and its caches keep their structure.
    indices = [layer.index for layer in caches[1].layers if hasattr(layer, "index")]
    assert indices == list(range(0, 2 * len(KINDS[family]), len(KINDS[family])))


def words(layer, segment):
    """Its random words as [B, W, C] columns."""
    drawn = kernel_words(layer, segment)
    assert drawn is not None
    return drawn[:, None].astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WordsOfALayer:
    """A block that keeps the first random words of its rounding in place of its convolution's columns."""

    spec: LayerSpec = static()

    def __call__(self, x, segment, layer):
        return x, dataclasses.replace(layer, conv=words(layer, segment))


def test_layers_that_share_a_program_draw_words_of_their_own():
    cache = hot_model("mamba2").init_cache(2, 64, STOCHASTIC, seed=5)
    layers = [dataclasses.replace(cache.layers[0], index=index) for index in (0, 3)]
    block = WordsOfALayer(hot_model("mamba2").cache_specs()[0])
    segment = replay_module.step_segment(cache, 1)
    _, moved = run_layers([block, block], jnp.zeros((2, 1, 64)), segment, layers)
    for layer, after in zip(layers, moved, strict=True):
        assert after.index == layer.index
        np.testing.assert_array_equal(after.conv, words(layer, segment))
    assert (np.asarray(moved[0].conv[:, 0, 0]) != np.asarray(moved[1].conv[:, 0, 0])).all()
