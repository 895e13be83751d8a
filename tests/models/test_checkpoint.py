"""Loading whole checkpoints: every tensor in its place and dtype, every disagreement named."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.checkpoint import load_model, parameter_count, read_config
from models.config import CheckpointError
from replayssm_jax.api import load
from tests.models.tiny import GDN, M2, tensors, write

ROOT = Path(__file__).resolve().parents[2]
EMBED, HEAD = "backbone.embeddings.weight", "lm_head.weight"


def parameters(model) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


def assert_same_bits(first, second) -> None:
    for a, b in zip(parameters(first), parameters(second), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def renamed(weights: dict[str, np.ndarray], prefix: str, head: str = HEAD) -> dict[str, np.ndarray]:
    """The weights of GDN under another prefix."""
    return {head if n == HEAD else n.replace("model.", prefix, 1): a for n, a in weights.items()}


def with_raw(directory: Path, **changes) -> Path:
    """The directory with keys of its config.json changed, or removed where None."""
    raw = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return directory


@pytest.fixture
def no_device(monkeypatch):
    """Fails the test when anything is placed on the device."""
    monkeypatch.setattr(jax, "device_put", lambda *args, **kwargs: pytest.fail("device memory was used"))


@pytest.mark.parametrize("raw", [M2, GDN], ids=["M2", "GDN"])
def test_every_tensor_arrives_in_its_place(raw, tmp_path):
    weights = tensors(raw)
    model = load_model(write(tmp_path, raw, weights))
    assert parameter_count(read_config(tmp_path)) == sum(a.size for a in weights.values())
    assert sum(a.size for a in parameters(model)) == sum(a.size for a in weights.values())
    mixer = model.layers[0].mixer
    name = "backbone.layers.0.mixer" if raw is M2 else "model.layers.0.linear_attn"
    np.testing.assert_array_equal(mixer.out_proj.kernel[...], weights[f"{name}.out_proj.weight"].T)
    np.testing.assert_array_equal(mixer.conv1d.weight[...], weights[f"{name}.conv1d.weight"][:, 0].T)
    np.testing.assert_array_equal(mixer.dt_bias[...], weights[f"{name}.dt_bias"])
    np.testing.assert_array_equal(model.lm_head.weight[...], weights[HEAD])
    if raw is M2:
        merged, names = model.layers[1].mixer.qkv_proj, [f"backbone.layers.1.mixer.{n}_proj" for n in "qkv"]
    else:
        merged, names = mixer.in_proj, [f"{name}.in_proj_{n}" for n in ("qkv", "z", "b", "a")]
    rows = np.concatenate([weights[f"{n}.weight"] for n in names])
    np.testing.assert_array_equal(merged.kernel[...], rows.T)


SCALARS = ("A_log", "D", "dt_bias")


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_b08_scalars_of_the_recurrence_are_float32(stored, tmp_path):
    weights = tensors(M2)
    for name, value in weights.items():
        if name.endswith("A_log"):
            value[0] = math.log(13.0)
        if stored == "bfloat16" or not name.endswith(SCALARS):
            weights[name] = value.astype(ml_dtypes.bfloat16)
    model = load_model(write(tmp_path, M2, weights), jnp.bfloat16)
    mixer = model.layers[0].mixer
    for name in SCALARS:
        assert getattr(mixer, name).dtype == jnp.float32
    assert mixer.in_proj.kernel.dtype == jnp.bfloat16
    expected = -13.0 if stored == "float32" else -np.exp(np.float32(ml_dtypes.bfloat16(math.log(13.0))))
    np.testing.assert_allclose(mixer.heads().a[0], expected, rtol=3e-7)


def test_b08_float32_tensors_stay_float32_unless_a_dtype_is_asked(tmp_path, monkeypatch):
    weights = {n: a.astype(ml_dtypes.bfloat16) for n, a in tensors(GDN).items()}
    norms = [n for n in weights if n.endswith(("linear_attn.norm.weight", "input_layernorm.weight"))]
    weights |= {n: weights[n].astype(np.float32) for n in norms}
    directory = write(tmp_path, GDN, weights)
    # On an accelerator the stored dtypes are kept.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kept = load_model(directory).layers[0]
    assert (kept.mixer.norm.weight.dtype, kept.input_norm.weight.dtype) == (jnp.float32, jnp.float32)
    assert (kept.mlp_norm.weight.dtype, kept.mlp.gate_up_proj.kernel.dtype) == (jnp.bfloat16, jnp.bfloat16)
    asked = load_model(directory, jnp.bfloat16).layers[0]
    assert asked.input_norm.weight.dtype == jnp.bfloat16
    assert asked.mixer.norm.weight.dtype == jnp.float32, "as the reference computes it"
    monkeypatch.undo()
    assert {a.dtype for a in parameters(load_model(directory))} == {np.dtype(np.float32)}


def test_a_dtype_that_no_model_computes_in_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="dtype int8 is not supported.*float32, bfloat16"):
        load_model(write(tmp_path, M2), jnp.int8)
    with pytest.raises(CheckpointError, match="dtype floaty is not supported"):
        load_model(tmp_path, "floaty")


@pytest.mark.parametrize("raw", [M2, GDN], ids=["M2", "GDN"])
@pytest.mark.parametrize("head", ["absent", "equal"])
def test_b09_tied_logits_are_products_with_the_embedding(raw, head, tmp_path):
    tied = raw | {"tie_word_embeddings": True}
    weights = tensors(tied)
    table = next(weights[n] for n in weights if "embed" in n)
    if head == "equal":
        weights[HEAD] = table.copy()
    model = load_model(write(tmp_path, tied, weights))
    hidden = np.random.RandomState(0).standard_normal((2, 64)).astype(np.float32)
    np.testing.assert_allclose(model.logits(jnp.asarray(hidden)), hidden @ table.T, rtol=0, atol=1e-5)


def test_b09_a_different_head_beside_tied_embeddings_is_refused(tmp_path, no_device):
    tied = M2 | {"tie_word_embeddings": True}
    weights = tensors(tied)
    weights[HEAD] = weights[EMBED] + np.float32(1e-3)
    words = f"tie_word_embeddings is true, but {HEAD} differs from {EMBED}"
    with pytest.raises(CheckpointError, match=words):
        load_model(write(tmp_path, tied, weights))


def test_b09_an_untied_model_without_a_head_is_refused(tmp_path, no_device):
    weights = tensors(M2)
    del weights[HEAD]
    with pytest.raises(CheckpointError, match="missing lm_head.weight"):
        load_model(write(tmp_path, M2, weights))


@pytest.mark.parametrize("raw", [M2, GDN], ids=["M2", "GDN"])
def test_b09_an_absent_flag_means_untied_as_in_the_config_class(raw, tmp_path):
    directory = with_raw(write(tmp_path / "with", raw), tie_word_embeddings=None)
    assert load_model(directory).lm_head is not None
    without = {n: a for n, a in tensors(raw).items() if n != HEAD}
    with pytest.raises(CheckpointError, match="missing lm_head.weight"):
        load_model(with_raw(write(tmp_path / "without", raw, without), tie_word_embeddings=None))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("model.language_model.", HEAD), ("language_model.model.", f"language_model.{HEAD}")],
)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
def test_b13_other_prefixes_give_identical_parameters(prefix, head, nested, tmp_path):
    plain = load_model(write(tmp_path / "plain", GDN))
    weights = renamed(tensors(GDN), prefix, head)
    weights["model.visual.patch.weight"] = weights["visual.norm.weight"] = np.ones(3, np.float32)
    weights["mtp.fc.weight"] = np.ones((2, 2), np.float32)
    raw = {"model_type": "qwen3_5", "text_config": GDN} if nested else GDN
    assert_same_bits(load_model(write(tmp_path / "other", raw, weights)), plain)


def test_b13_a_nemotron_h_may_use_the_name_in_memory(tmp_path):
    plain = load_model(write(tmp_path / "plain", M2))
    weights = {name.replace("backbone.", "model."): value for name, value in tensors(M2).items()}
    assert_same_bits(load_model(write(tmp_path / "other", M2, weights)), plain)


def test_b13_a_prefix_nested_three_times_shows_found_and_expected_names(tmp_path, no_device):
    weights = renamed(tensors(GDN), "model." + 3 * "language_model.")
    with pytest.raises(CheckpointError) as problem:
        load_model(write(tmp_path, GDN, weights))
    assert "missing embed_tokens.weight" in str(problem.value)
    assert "unknown model.language_model.language_model.language_model.embed_tokens.weight" in str(
        problem.value
    )


def test_b13_every_problem_is_named_in_one_sentence(tmp_path, no_device):
    weights = tensors(GDN)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.9.odd.weight"] = np.ones(3, np.float32)
    weights["model.norm.weight"] = np.ones(65, np.float32)
    weights["model.layers.0.linear_attn.A_log"] = np.zeros(4, np.int64)
    weights["model.language_model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError) as problem:
        load_model(write(tmp_path, GDN, weights))
    for words in (
        "missing model.layers.1.mlp.up_proj.weight",
        "unknown model.layers.9.odd.weight",
        "model.norm.weight has the shape (65,), expected (64,)",
        "model.layers.0.linear_attn.A_log has the unsupported dtype I64",
        "model.language_model.layers.0.mlp.up_proj.weight and model.layers.0.mlp.up_proj.weight are the same",
    ):
        assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def test_b14_a_file_of_four_float_formats_loads_bit_for_bit(tmp_path):
    weights = tensors(M2)
    bits = np.array([1.0, 1.0078125, 3.389e38, -0.0, 1e-40], np.float32)
    weights[EMBED][0, :5] = bits
    weights[EMBED] = weights[EMBED].astype(ml_dtypes.bfloat16)
    weights[HEAD] = weights[HEAD].astype(np.float16)
    model = load_model(write(tmp_path, M2, weights), jnp.float32)
    loaded = np.asarray(model.embed.weight)
    assert loaded.tobytes() == weights[EMBED].astype(np.float32).tobytes()
    assert np.signbit(loaded[0, 3]) and 0.0 < loaded[0, 4] < 1e-39
    np.testing.assert_array_equal(model.lm_head.weight[...], weights[HEAD].astype(np.float32))
    narrow = load_model(tmp_path, jnp.bfloat16)
    assert np.asarray(narrow.embed.weight).tobytes() == weights[EMBED].tobytes()


def test_b14_eight_bit_floats_load_exactly(tmp_path):
    import struct

    from models.safetensors_io import SINGLE, read_header

    weights = tensors(M2)
    weights[HEAD] = weights[HEAD].astype(ml_dtypes.float8_e4m3fn)
    write(tmp_path, M2, weights | {HEAD: weights[HEAD].view(np.uint8)})
    file = tmp_path / SINGLE
    # safetensors cannot write 8-bit floats from NumPy, so the dtype's name is set in the header.
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header[HEAD]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    assert read_header(file)[HEAD].dtype == "F8_E4M3"
    np.testing.assert_array_equal(load_model(tmp_path).lm_head.weight[...], weights[HEAD].astype(np.float32))


def test_b14_loads_where_torch_is_not_installed(tmp_path):
    directory = write(tmp_path, M2, dtype="bfloat16")
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import replayssm_jax.api as api\n"
        f"print(api.load({str(directory)!r}).model.embed.weight.dtype)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "float32\n"


def test_b15_a_missing_shard_is_named_before_device_memory_is_used(tmp_path, no_device):
    directory = write(tmp_path, M2, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the shard model-00002-of-00003.safetensors is missing"):
        load(directory)


def test_b15_shards_and_one_file_give_identical_parameters(tmp_path):
    first, second = write(tmp_path / "one", M2), write(tmp_path / "three", M2, shards=3)
    assert_same_bits(load_model(first), load_model(second))


def test_b15_what_an_entry_promises_is_named_with_its_file(tmp_path, no_device):
    directory = write(tmp_path, M2, shards=2)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["backbone.ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors lacks backbone.ghost.weight"):
        load(directory)


def test_b16_the_width_of_the_head_is_that_of_the_file(tmp_path):
    loaded = load(write(tmp_path, M2 | {"vocab_size": 104}))
    assert loaded.model.lm_head.weight.shape == (104, 64)
    assert loaded.vocab_size == 104, "without a tokenizer every row may be meant"


def test_config_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="has no config.json"):
        load(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="config.json"):
            load(tmp_path)
    write(tmp_path, M2)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json cannot be read"):
        load(tmp_path)


def test_stop_ids_of_generation_config_are_loaded(tmp_path):
    assert load(write(tmp_path, M2, generation={"eos_token_id": [2, 11]})).stop_ids == (2, 11)
