"""Tiny checkpoints in the published Hugging Face layout, with random weights far from initialisation.

`M2` is a Nemotron-H of the letters M*M-, `GDN` a Qwen3.5 of three Gated DeltaNet layers and one attention
layer. Weights come from NumPy's frozen legacy generator, so a seed names the same weights everywhere.
"""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

M2 = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 97,
    "hidden_size": 64,
    "hybrid_override_pattern": "M*M-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_hidden_act": "silu",
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_conv_bias": True,
    "time_step_limit": [0.0, float("inf")],
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "float32",
}

GDN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "eos_token_id": 2,
    "dtype": "float32",
}

# Each with a multi-token-prediction head; the trunk's weights are those without.
M2_MTP = M2 | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-"}
GDN_MTP = GDN | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


def tensors(config: dict, seed: int = 0, hot: bool = False) -> dict[str, np.ndarray]:
    """Float32 weights of a raw configuration by their names on disk.

    Projections keep activations near one; norms, A_log, dt_bias, D and conv taps are drawn wide. `hot` sets
    the decay and the convolution so that a wrong state changes the text at once.
    """
    head = Draw(1000 + seed)
    if config["model_type"] == "nemotron_h":
        letters = config["mtp_hybrid_override_pattern"] if config.get("num_nextn_predict_layers") else ""
        return _nemotron_h(config, Draw(seed), hot) | _nemotron_h_mtp(config, head, letters)
    mtp = _qwen35_mtp(config, head) if config.get("mtp_num_hidden_layers") else {}
    return _qwen35(config, Draw(seed), hot) | mtp


def write(
    directory: Path,
    config: dict,
    weights: dict[str, np.ndarray] | None = None,
    *,
    seed: int = 0,
    hot: bool = False,
    shards: int = 1,
    generation: dict | None = None,
    dtype: str = "float32",
) -> Path:
    """Writes a checkpoint directory: config.json, the weights in `shards` files, an index if there are
    several.

    With `dtype` bfloat16 every float32 tensor is rounded; arrays of another dtype are stored as they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = tensors(config, seed, hot) if weights is None else weights
    if dtype == "bfloat16":
        weights = {name: _rounded(value) for name, value in weights.items()}
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=1))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = sorted(weights)
    places = {
        name: f"model-{1 + i * shards // len(names):05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file(
            {n: weights[n] for n in names if places[n] == file}, directory / file, metadata={"format": "pt"}
        )
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


class Draw:
    """Random float32 arrays from one frozen stream."""

    def __init__(self, seed: int):
        self.stream = np.random.RandomState(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * self.stream.standard_normal(shape)).astype(np.float32)

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        return self.stream.uniform(low, high, shape).astype(np.float32)

    def linear(self, out: int, fan_in: int) -> np.ndarray:
        return self.normal(out, fan_in, scale=fan_in**-0.5)


def _nemotron_h(c: dict, draw: Draw, hot: bool) -> dict[str, np.ndarray]:
    hidden, heads, groups = c["hidden_size"], c["mamba_num_heads"], c["n_groups"]
    inner, conv = heads * c["mamba_head_dim"], heads * c["mamba_head_dim"] + 2 * groups * c["ssm_state_size"]
    w = {"backbone.embeddings.weight": _table(c, draw)}
    for i, letter in enumerate(c["hybrid_override_pattern"]):
        layer, mixer = f"backbone.layers.{i}", f"backbone.layers.{i}.mixer"
        w[f"{layer}.norm.weight"] = draw.normal(hidden, scale=0.3, mean=1.0)
        if letter == "M":
            in_proj = draw.linear(inner + conv + heads, hidden)
            # A narrow step size keeps dt above 0.001, where the reference's prefill would clamp it.
            in_proj[-heads:] *= 0.3
            w[f"{mixer}.in_proj.weight"] = in_proj
            w[f"{mixer}.conv1d.weight"] = draw.normal(conv, 1, c["conv_kernel"], scale=0.5)
            if c["use_conv_bias"]:
                w[f"{mixer}.conv1d.bias"] = draw.normal(conv, scale=0.3)
            w[f"{mixer}.A_log"] = np.log(draw.uniform(0.5, 8.0, heads))
            w[f"{mixer}.D"] = draw.normal(heads)
            w[f"{mixer}.dt_bias"] = draw.uniform(-4.0, 1.0, heads)
            w[f"{mixer}.norm.weight"] = draw.normal(inner, scale=0.3, mean=1.0)
            w[f"{mixer}.out_proj.weight"] = draw.linear(hidden, inner)
        elif letter == "*":
            w |= _attention(c, draw, mixer, c["num_attention_heads"] * c["head_dim"])
        else:
            w |= _mlp(c, draw, mixer)
    w["backbone.norm_f.weight"] = draw.normal(hidden, scale=0.3, mean=1.0)
    return _finish(w, c, draw, hot)


def _qwen35(c: dict, draw: Draw, hot: bool) -> dict[str, np.ndarray]:
    hidden = c["hidden_size"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads, dv = c["linear_num_value_heads"], c["linear_value_head_dim"]
    w = {"model.embed_tokens.weight": _table(c, draw)}
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}"
        w[f"{layer}.input_layernorm.weight"] = draw.normal(hidden, scale=0.3)
        w[f"{layer}.post_attention_layernorm.weight"] = draw.normal(hidden, scale=0.3)
        if kind == "linear_attention":
            mixer = f"{layer}.linear_attn"
            w[f"{mixer}.in_proj_qkv.weight"] = draw.linear(2 * keys + heads * dv, hidden)
            w[f"{mixer}.in_proj_z.weight"] = draw.linear(heads * dv, hidden)
            w[f"{mixer}.in_proj_b.weight"] = draw.linear(heads, hidden)
            w[f"{mixer}.in_proj_a.weight"] = draw.linear(heads, hidden)
            w[f"{mixer}.conv1d.weight"] = draw.normal(
                2 * keys + heads * dv, 1, c["linear_conv_kernel_dim"], scale=0.5
            )
            w[f"{mixer}.A_log"] = np.log(draw.uniform(0.5, 8.0, heads))
            w[f"{mixer}.dt_bias"] = draw.uniform(-4.0, 1.0, heads)
            w[f"{mixer}.norm.weight"] = draw.normal(dv, scale=0.3, mean=1.0)
            w[f"{mixer}.out_proj.weight"] = draw.linear(hidden, heads * dv)
        else:
            mixer = f"{layer}.self_attn"
            w |= _gated_attention(c, draw, mixer)
        w |= _gated_mlp(c, draw, f"{layer}.mlp")
    w["model.norm.weight"] = draw.normal(hidden, scale=0.3)
    return _finish(w, c, draw, hot)


def _table(c: dict, draw: Draw) -> np.ndarray:
    # A large tied table would repeat the last token for ever.
    scale = 0.2 if c["tie_word_embeddings"] else 1.0
    return draw.normal(c["vocab_size"], c["hidden_size"], scale=scale)


def _attention(c: dict, draw: Draw, mixer: str, query_rows: int) -> dict[str, np.ndarray]:
    hidden, width = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]
    return {
        f"{mixer}.q_proj.weight": draw.linear(query_rows, hidden),
        f"{mixer}.k_proj.weight": draw.linear(kv, hidden),
        f"{mixer}.v_proj.weight": draw.linear(kv, hidden),
        f"{mixer}.o_proj.weight": draw.linear(hidden, width),
    }


def _mlp(c: dict, draw: Draw, mixer: str) -> dict[str, np.ndarray]:
    up = draw.linear(c["intermediate_size"], c["hidden_size"])
    down = draw.linear(c["hidden_size"], c["intermediate_size"])
    return {f"{mixer}.up_proj.weight": up, f"{mixer}.down_proj.weight": down}


def _gated_attention(c: dict, draw: Draw, mixer: str) -> dict[str, np.ndarray]:
    w = _attention(c, draw, mixer, 2 * c["num_attention_heads"] * c["head_dim"])
    for name in ("q_norm", "k_norm"):
        w[f"{mixer}.{name}.weight"] = draw.normal(c["head_dim"], scale=0.3)
    return w


def _gated_mlp(c: dict, draw: Draw, mlp: str) -> dict[str, np.ndarray]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    w = {f"{mlp}.{name}.weight": draw.linear(inner, hidden) for name in ("gate_proj", "up_proj")}
    return w | {f"{mlp}.down_proj.weight": draw.linear(hidden, inner)}


def _nemotron_h_mtp(c: dict, draw: Draw, letters: str) -> dict[str, np.ndarray]:
    hidden, w = c["hidden_size"], {}
    for i, letter in enumerate(letters):
        layer = f"mtp.layers.{i}"
        w[f"{layer}.norm.weight"] = draw.normal(hidden, scale=0.3, mean=1.0)
        width = c["num_attention_heads"] * c["head_dim"]
        w |= (
            _attention(c, draw, f"{layer}.mixer", width) if letter == "*" else _mlp(c, draw, f"{layer}.mixer")
        )
        if i == 0:
            w[f"{layer}.enorm.weight"] = draw.normal(hidden, scale=0.3, mean=1.0)
            w[f"{layer}.hnorm.weight"] = draw.normal(hidden, scale=0.3, mean=1.0)
            w[f"{layer}.eh_proj.weight"] = draw.linear(hidden, 2 * hidden)
        if i == len(letters) - 1:
            w[f"{layer}.final_layernorm.weight"] = draw.normal(hidden, scale=0.3, mean=1.0)
    return w


def _qwen35_mtp(c: dict, draw: Draw) -> dict[str, np.ndarray]:
    hidden, layer = c["hidden_size"], "mtp.layers.0"
    w = {"mtp.fc.weight": draw.linear(hidden, 2 * hidden)}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms += ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    w |= {f"mtp.{name}.weight": draw.normal(hidden, scale=0.3) for name in norms}
    return w | _gated_attention(c, draw, f"{layer}.self_attn") | _gated_mlp(c, draw, f"{layer}.mlp")


def _finish(w: dict[str, np.ndarray], c: dict, draw: Draw, hot: bool) -> dict[str, np.ndarray]:
    if not c["tie_word_embeddings"]:
        w["lm_head.weight"] = draw.linear(c["vocab_size"], c["hidden_size"]) * np.float32(math.sqrt(2.0))
    if hot:
        for name, value in w.items():
            if name.endswith("A_log"):
                value[:] = -4.0
            elif name.endswith("dt_bias"):
                value[:] = 0.54
            elif name.endswith("conv1d.weight"):
                value *= 30.0
            elif name.endswith("conv1d.bias"):
                value[:] = 0.5
    return w


def _rounded(value: np.ndarray) -> np.ndarray:
    return value.astype(ml_dtypes.bfloat16) if value.dtype == np.float32 else value
