"""Reading config.json: layer map, rotary settings, step-size limits, and what is refused by name."""

import json
import math

import pytest

from models.config import CheckpointError, NemotronHConfig, Qwen35Config, parse_config
from tests.models.tiny import GDN, M2

NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"


def m2(**changes) -> dict:
    return {**M2, **changes}


def gdn(**changes) -> dict:
    return {**GDN, **changes}


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def second_inverse_frequency(config: Qwen35Config) -> float:
    return config.rope_theta ** (-2 / config.rotary_dim)


def test_every_size_of_a_nemotron_h_is_read():
    config = parse_config(M2)
    assert isinstance(config, NemotronHConfig)
    assert (config.hidden_size, config.d_state, config.n_groups, config.mamba_num_heads) == (64, 32, 2, 4)
    assert (config.layer_pattern, config.chunk_size, config.conv_kernel) == ("M*M-", 8, 4)
    assert config.eos_token_ids == (2,)


def test_every_size_of_a_qwen35_is_read():
    config = parse_config(GDN)
    assert isinstance(config, Qwen35Config)
    assert (config.key_heads, config.value_heads, config.key_head_dim, config.value_head_dim) == (
        2,
        4,
        16,
        16,
    )
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.rope_theta, config.rotary_dim) == (1e7, 4)


def test_stop_ids_come_from_both_files():
    assert parse_config(m2(eos_token_id=2), {"eos_token_id": [11, 2]}).eos_token_ids == (2, 11)
    assert parse_config(m2(eos_token_id=None), {"eos_token_id": 11}).eos_token_ids == (11,)
    assert parse_config(without(M2, "eos_token_id")).eos_token_ids == (2,), "the class default"
    assert parse_config(without(GDN, "eos_token_id")).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"time_step_limit": [0.0, math.inf]}, (0.0, math.inf)),
        ({"time_step_limit": [0.0, "inf"]}, (0.0, math.inf)),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, (0.0, math.inf)),
        ({"time_step_limit": [0.0, None]}, (0.0, math.inf)),
        ({"time_step_limit": [0.0, 1e308]}, (0.0, math.inf)),
        ({"time_step_limit": None}, (0.0, math.inf)),
        ({"time_step_limit": [0.0, 0.05]}, (0.0, 0.05)),
    ],
)
def test_b07_only_the_limit_bounds_the_step_size(changes, expected):
    initialisation = {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4}
    assert parse_config(m2(**initialisation, **changes)).dt_limit == expected
    assert parse_config(without(m2(**initialisation), "time_step_limit")).dt_limit == (0.0, math.inf)


def test_b07_a_bare_infinity_is_read():
    raw = json.loads(json.dumps(M2))
    assert "Infinity" in json.dumps(M2)
    assert parse_config(raw).dt_limit == (0.0, math.inf)


@pytest.mark.parametrize("limit", [[0.1], 0.1, [0.5, 0.1], [-1.0, 1.0], ["a", 1.0], [math.nan, 1.0]])
def test_b07_a_limit_that_is_no_interval_is_refused(limit):
    with pytest.raises(CheckpointError, match="time_step_limit"):
        parse_config(m2(time_step_limit=limit))


@pytest.mark.parametrize("family", [M2, GDN])
def test_b09_an_absent_tie_flag_means_the_class_default(family):
    assert parse_config(without(family, "tie_word_embeddings")).tie_word_embeddings is False
    assert parse_config({**family, "tie_word_embeddings": True}).tie_word_embeddings is True


def test_b09_the_multimodal_flag_stands_at_the_top():
    text = {**without(GDN, "tie_word_embeddings"), "model_type": "qwen3_5_text"}
    raw = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}
    assert parse_config(raw).tie_word_embeddings is True


ROPE = {"partial_rotary_factor": 1.0, "head_dim": 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {"rope_parameters": None, "rope_theta": 1e7},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e7},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}, "rope_theta": 1e4},
    ],
    ids=["a_dictionary", "b_top_level", "d_dictionary_without_theta", "c_dictionary_wins"],
)
def test_b10_theta_is_found_where_it_stands(changes):
    flat = parse_config(gdn(**ROPE, **changes))
    assert second_inverse_frequency(flat) == pytest.approx(0.6043, abs=1e-4)
    nested = parse_config({"model_type": "qwen3_5", "text_config": gdn(**ROPE, **changes)})
    assert nested == flat, "B10 (e): the same under text_config"


def test_b10_unsupported_scaling_is_refused_by_name():
    raw = gdn(rope_parameters={"rope_type": "yarn", "factor": 4.0}, rope_theta=1e7)
    with pytest.raises(CheckpointError, match="rope_type 'yarn' is not supported"):
        parse_config(raw)
    with pytest.raises(CheckpointError, match="'linear'"):
        parse_config(gdn(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}))


def test_b10_null_theta_means_the_family_default():
    assert parse_config(gdn(rope_parameters=None, rope_theta=None)).rope_theta == 10000.0
    assert parse_config(without(GDN, "rope_parameters")).rope_theta == 10000.0


def test_b11_the_partial_factor_is_read_from_either_place():
    assert parse_config(GDN).rotary_dim == 4
    top = gdn(rope_parameters={"rope_type": "default", "rope_theta": 1e7}, partial_rotary_factor=0.5)
    assert parse_config(top).rotary_dim == 8
    default = gdn(rope_parameters={"rope_type": "default", "rope_theta": 1e7}, head_dim=64)
    assert parse_config(default).rotary_dim == 16, "the class default is 0.25"
    with pytest.raises(CheckpointError, match="partial_rotary_factor 0.2 of head_dim 16 rotates 3 channels"):
        parse_config(gdn(rope_parameters={"partial_rotary_factor": 0.2}))


def test_b11_an_unsupported_family_is_refused_by_name():
    with pytest.raises(
        CheckpointError, match="model_type 'granitemoehybrid' is not supported.*nemotron_h.*qwen3_5"
    ):
        parse_config({"model_type": "granitemoehybrid", "position_embedding_type": "nope"})


def test_b12_the_public_pattern():
    pattern = parse_config(m2(hybrid_override_pattern=NANO_4B, num_hidden_layers=42)).layer_pattern
    assert [pattern.count(letter) for letter in "M-*"] == [21, 17, 4]


def test_b12_an_unbuilt_kind_is_refused_by_name_and_position():
    with pytest.raises(CheckpointError, match=r"'E' \(mixture of experts, not supported\) at position 1, 4"):
        parse_config(m2(hybrid_override_pattern="MEM*E"))
    with pytest.raises(CheckpointError, match="layers_block_type has 'E'"):
        parse_config(without(m2(layers_block_type=["mamba", "moe"]), "hybrid_override_pattern"))


@pytest.mark.parametrize(
    "names",
    [
        ["mamba", "attention", "mamba", "mlp"],
        ["linear_attention", "full_attention", "linear_attention", "mlp"],
    ],
)
def test_b12_the_length_comes_from_the_list(names):
    raw = without(m2(layers_block_type=names), "hybrid_override_pattern")
    assert parse_config(raw).layer_pattern == "M*M-"


def test_b12_layer_counts_that_disagree_are_refused():
    with pytest.raises(
        CheckpointError, match="hybrid_override_pattern has 42 layers and num_hidden_layers is 40"
    ):
        parse_config(m2(hybrid_override_pattern=NANO_4B, num_hidden_layers=40))
    with pytest.raises(CheckpointError, match="'M\\*M-'.*'MM'"):
        parse_config(m2(layers_block_type=["mamba", "mamba"]))
    with pytest.raises(CheckpointError, match="layer_types has 4 layers and num_hidden_layers is 5"):
        parse_config(gdn(num_hidden_layers=5))


def test_b12_an_unknown_letter_is_named_with_its_position():
    with pytest.raises(CheckpointError, match="'X' at position 2"):
        parse_config(m2(hybrid_override_pattern="M*X-"))
    with pytest.raises(CheckpointError, match="'mumble' at position 1"):
        parse_config(without(m2(layers_block_type=["mamba", "mumble"]), "hybrid_override_pattern"))
    with pytest.raises(CheckpointError, match="'indexed_attention' at position 3"):
        parse_config(gdn(layer_types=["linear_attention"] * 3 + ["indexed_attention"]))


def test_b12_a_family_with_shared_blocks_is_refused_by_name():
    with pytest.raises(CheckpointError, match="model_type 'zamba2' is not supported"):
        parse_config({"model_type": "zamba2", "hybrid_layer_ids": [1, 3, 5], "num_mem_blocks": 2})


def test_layer_kinds_may_come_from_the_interval():
    raw = without(gdn(num_hidden_layers=8, full_attention_interval=4), "layer_types")
    assert parse_config(raw).layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (m2(mlp_hidden_act="gelu"), "mlp_hidden_act is 'gelu'"),
        (m2(mamba_hidden_act="gelu"), "mamba_hidden_act is 'gelu'"),
        (gdn(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (m2(use_bias=True), "use_bias is True"),
        (m2(mlp_bias=True), "mlp_bias is True"),
        (m2(attention_bias=True), "attention_bias is True"),
        (m2(mamba_proj_bias=True), "mamba_proj_bias is True"),
        (gdn(attention_bias=True), "attention_bias is True"),
        (m2(sliding_window=128), "sliding_window is 128"),
        (m2(quantization_config={"quant_method": "modelopt"}), "quantization_config.*'modelopt'"),
        (m2(hidden_size="64"), "hidden_size is '64'; it must be a positive integer"),
        (m2(hidden_size=None), "hidden_size is None"),
        (m2(layer_norm_epsilon=0), "layer_norm_epsilon is 0"),
        (m2(n_groups=3), "mamba_num_heads 4 is not a multiple of n_groups 3"),
        (gdn(linear_num_key_heads=3), "value_heads 4 is not a multiple of key_heads 3"),
        (m2(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (m2(dtype="int8"), "dtype is 'int8'"),
        (m2(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'"),
        (m2(eos_token_id="</s>"), "eos_token_id is '</s>'"),
        (without(M2, "hybrid_override_pattern"), "neither hybrid_override_pattern nor layers_block_type"),
        (m2(hybrid_override_pattern=["M"]), r"hybrid_override_pattern is \['M'\]; it must be a string"),
        (gdn(layer_types="linear_attention"), "layer_types is 'linear_attention'; it must be a list"),
        (gdn(layer_types=[{}] * 4), "layer_types has '{}' at position 0"),
        (gdn(rope_parameters="default"), "rope_parameters is 'default'; it must be an object"),
        ({"model_type": "qwen3_5", "text_config": 3}, "text_config is 3; it must be an object"),
        (m2(hybrid_override_pattern=""), "hybrid_override_pattern is empty"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_field(raw, words):
    with pytest.raises(CheckpointError, match=words):
        parse_config(raw)


def test_the_stored_dtype_is_read_under_either_name():
    assert parse_config(m2(dtype="bfloat16")).param_dtype == "bfloat16"
    assert parse_config(without(m2(torch_dtype="bfloat16"), "dtype")).param_dtype == "bfloat16"
    nested = {"model_type": "qwen3_5", "dtype": "bfloat16", "text_config": without(GDN, "dtype")}
    assert parse_config(nested).param_dtype == "bfloat16"


def test_older_spellings_that_the_reference_reads():
    raw = without(m2(mamba_n_groups=4, mamba_dt_limit=[0.0, 0.5]), "n_groups", "time_step_limit")
    config = parse_config(raw)
    assert (config.n_groups, config.dt_limit) == (4, (0.0, 0.5))
