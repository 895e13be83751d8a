"""Which checkpoints have a multi-token-prediction head, and what is said about one that does not fit."""

import json

import jax
import numpy as np
import pytest

from models.checkpoint import load_model
from models.config import CheckpointError, MTPConfig, parse_config
from replayssm_jax.api import convert, load
from replayssm_jax.cli import main
from tests.models.tiny import GDN, GDN_MTP, M2, M2_MTP, tensors, write

CASES = {"M2": (M2, M2_MTP), "GDN": (GDN, GDN_MTP)}
MOE = M2_MTP | {"mtp_hybrid_override_pattern": "*E"}
each = pytest.mark.parametrize(("plain", "headed"), CASES.values(), ids=CASES)


def leaves(model) -> list[tuple]:
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(model)]


@each
def test_every_tensor_arrives_in_its_place(plain, headed, tmp_path):
    weights = tensors(headed)
    model = load_model(write(tmp_path, headed, weights))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == sum(a.size for a in weights.values())
    assert len(weights) - len(tensors(plain)) == (12 if plain is M2 else 15)
    fc = "mtp.layers.0.eh_proj.weight" if plain is M2 else "mtp.fc.weight"
    last = "mtp.layers.1.final_layernorm.weight" if plain is M2 else "mtp.norm.weight"
    assert model.mtp is not None
    np.testing.assert_array_equal(model.mtp.proj.kernel[...], weights[fc].T)
    np.testing.assert_array_equal(model.mtp.norm.weight[...], weights[last])
    assert model.own_drafter() is not None


@each
def test_a_text_model_without_its_head(plain, headed, tmp_path):
    """The head is not asked for, or its tensors are absent as after transformers' save_pretrained."""
    trunk = load_model(write(tmp_path / "plain", plain))
    both = write(tmp_path / "both", headed)
    dropped = write(tmp_path / "dropped", headed, tensors(plain))
    for model in (load_model(both, mtp=False), load_model(dropped)):
        assert model.mtp is None and model.config.mtp is None and model.own_drafter() is None
        assert leaves(model) == leaves(trunk)
    ignored = load_model(write(tmp_path / "unannounced", plain, tensors(headed)))
    assert leaves(ignored) == leaves(trunk)


@each
def test_every_problem_of_a_head_is_named(plain, headed, tmp_path):
    weights = tensors(headed)
    names = sorted(name for name in weights if name.startswith("mtp."))
    missing, wrong = (
        next(name for name in names if name.endswith(end)) for end in ("q_proj.weight", "norm.weight")
    )
    del weights[missing]
    weights[wrong] = np.ones(65, np.float32)
    weights["mtp.odd.weight"] = np.ones(3, np.float32)
    with pytest.raises(CheckpointError) as problem:
        load_model(write(tmp_path, headed, weights))
    for words in (
        f"missing {missing}",
        f"{wrong} has the shape (65,), expected (64,)",
        "unknown mtp.odd.weight",
    ):
        assert words in str(problem.value)


@each
def test_a_converted_checkpoint_keeps_its_head(plain, headed, tmp_path):
    source = write(tmp_path / "source", headed, dtype="bfloat16")
    converted = convert(source, tmp_path / "converted")
    assert leaves(load(converted).model) == leaves(load(source).model)
    assert leaves(load(converted, mtp=False).model) == leaves(load(source, mtp=False).model)
    without = convert(write(tmp_path / "plain", headed, tensors(plain)), tmp_path / "without")
    assert load_model(without).mtp is None


def test_a_head_with_experts_is_refused_and_can_be_left_out(tmp_path):
    weights = tensors(M2_MTP)
    directory = write(tmp_path, MOE, weights)
    with pytest.raises(
        CheckpointError, match=r"head in .* 'E' \(mixture of experts, not supported\).*mtp=False"
    ):
        load(directory)
    assert load_model(directory, mtp=False).mtp is None
    assert load_model(write(tmp_path / "absent", MOE, tensors(M2))).mtp is None


@pytest.mark.parametrize(
    ("raw", "layers", "unsupported"),
    [
        (M2, None, ""),
        (M2 | {"num_nextn_predict_layers": 0}, None, ""),
        (M2_MTP, ("*", "-"), ""),
        (
            M2_MTP | {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["attention", "mlp"]},
            ("*", "-"),
            "",
        ),
        (M2 | {"num_nextn_predict_layers": 1}, ("*", "E"), "mtp_layers_block_type has 'E'"),
        (
            M2_MTP | {"mtp_hybrid_override_pattern": "M"},
            ("M",),
            "mtp_hybrid_override_pattern has 'M' at position 0",
        ),
        (M2_MTP | {"num_nextn_predict_layers": 2}, ("*", "-"), "num_nextn_predict_layers is 2"),
        (GDN, None, ""),
        (GDN_MTP, ("full_attention",), ""),
        ({"model_type": "qwen3_5", "text_config": GDN_MTP}, ("full_attention",), ""),
        (GDN | {"mtp_num_hidden_layers": 2}, ("full_attention",) * 2, "mtp_num_hidden_layers is 2"),
    ],
)
def test_what_a_configuration_announces(raw, layers, unsupported):
    found = parse_config(raw).mtp
    if layers is None:
        assert found is None
    else:
        assert isinstance(found, MTPConfig)
        assert found.layers == layers
        assert found.unsupported.startswith(unsupported) and bool(found.unsupported) == bool(unsupported)


def test_a_number_of_heads_that_is_none_is_refused():
    for raw, key in ((M2, "num_nextn_predict_layers"), (GDN, "mtp_num_hidden_layers")):
        with pytest.raises(CheckpointError, match=f"{key} is 'one'"):
            parse_config(raw | {key: "one"})


@pytest.mark.parametrize("raw", [GDN, GDN_MTP, MOE], ids=["none", "one", "unsupported"])
def test_info_counts_the_head_apart(raw, tmp_path, capsys):
    weights = tensors(raw | {"mtp_hybrid_override_pattern": "*-"})
    directory = write(tmp_path, raw, weights)
    assert main(["info", str(directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    head = sum(array.size for name, array in weights.items() if name.startswith("mtp."))
    assert report["mtp_parameters"] == (0 if raw is MOE else head)
    assert report["parameters"] == sum(array.size for array in weights.values()) - head
    assert ("mtp_unsupported" in report) == (raw is MOE)
