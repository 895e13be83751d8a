"""Published configurations, depth cuts and random weights of the end-to-end benchmarks."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import model_options
from bench.e2e_models import depth_cut, layer_kinds, published, published_json, random_model
from models.checkpoint import parameter_count
from models.config import parse_config
from tests.tiny_models import nemotron_config


def test_published_sizes():
    """Nemotron-3-Nano-4B has 3,973,556,832 parameters; the text part of Qwen3.5-4B about 4.2 billion."""
    assert parameter_count(published("nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16")) == 3_973_556_832
    assert 4.1e9 < parameter_count(published("Qwen/Qwen3.5-4B")) < 4.3e9


def test_a_depth_cut_keeps_the_mix_of_layers():
    assert Counter(depth_cut(published("nano-4b"), 10).layer_pattern) == {"M": 5, "-": 4, "*": 1}
    assert Counter(layer_kinds(depth_cut(published("super"), 11))) == {"M": 5, "-": 5, "*": 1}
    kinds = Counter(layer_kinds(depth_cut(published("qwen3.5-4b"), 8)))
    assert kinds == {"linear_attention": 6, "full_attention": 2}
    assert depth_cut(published("q122"), None) == published("q122")
    with pytest.raises(ValueError, match=r"1\.\.42, got 43"):
        depth_cut(published("nano-4b"), 43)


@pytest.mark.parametrize(("name", "layers"), [("nano-4b", 10), ("qwen3.5-4b", 8), ("Qwen/Qwen3.5-4B", None)])
def test_the_json_of_a_depth_cut_is_read_back(name, layers):
    raw = published_json(name, layers)
    assert parse_config(raw) == depth_cut(published(name), layers)
    assert raw["num_hidden_layers"] == len(layer_kinds(parse_config(raw)))


def test_command_lines_take_hub_names_and_cuts_of_any_depth():
    def parsed(*words):
        return model_options.parser(None, repeats=7).parse_args([*words, "--commit", "0"])

    options = parsed("--model-id", "Qwen/Qwen3.5-4B")
    assert (options.model, options.repeats, model_options.cut(options)) == ("qwen3.5-4b", 7, 8)
    assert model_options.cut(parsed("--layers", "0")) is None
    assert model_options.cut(parsed("--layers", "2")) == 2
    with pytest.raises(SystemExit):
        parsed("--model", "nano-5b")


def test_unknown_models_are_refused_by_name():
    with pytest.raises(ValueError, match="no model 'nano-5b'; known models are nano-4b, qwen3.5-4b"):
        published("nano-5b")


def test_random_matrices_have_the_variance_of_their_inputs():
    config = nemotron_config(layer_pattern="M-", hidden_size=96, vocab_size=512)
    model = random_model(config, jnp.float32)
    mixer = model.layers[0].mixer
    for weight, inputs in (
        (mixer.in_proj.kernel, 96),
        (model.layers[1].mixer.down_proj.kernel, 96),
        (model.embed.weight, 96),
        (mixer.conv1d.weight, 4),
    ):
        values = np.asarray(weight[...])
        # The variance of n uniform draws has a relative error of sqrt(0.8 / n).
        assert abs(values.var() * inputs - 1.0) < 5 * np.sqrt(0.8 / values.size)
    assert not np.array_equal(model.embed.weight[...], model.lm_head.weight[...])
    np.testing.assert_allclose(mixer.A_log[...], np.log(np.linspace(1.0, 16.0, 4)), rtol=1e-6)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))
