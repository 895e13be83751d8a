"""The two models of `bench.precision_drift`: sizes, initial parameters, and their stored weights.

Byte-level models of 20 to 21 million parameters without attention, with the head and key dimensions of the
published families: Mamba-2 heads of 64 x 128 and Gated DeltaNet heads of 128 x 128. Weights are rounded to
`MANTISSA` bits behind the point and stored in files of at most PART bytes; the rounded weights are the model.
"""

import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from models.base import HybridModel
from models.checkpoint import FAMILIES
from models.config import ModelConfig, parse_config

VOCAB_SIZE = 256
CONTEXT = 4096
MANTISSA = 4
PART = 15_000_000
# Tokens over which the state of a head decays by e at first, from the first head of a layer to the last.
SHORTEST, LONGEST = 4.0, 8192.0
# Step sizes (Mamba-2) and softplus(dt_bias) (Gated DeltaNet) of those heads at first.
FIRST_STEP, LAST_STEP = 0.1, 0.03

_COMMON = {
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 0,
}

CONFIGS = {
    "drift-nemotron-h": {
        "model_type": "nemotron_h",
        **_COMMON,
        "hybrid_override_pattern": "M-MM-MM-MM-",
        "num_hidden_layers": 11,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1792,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 2,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "expand": 2,
        "chunk_size": 128,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "drift-qwen3.5": {
        "model_type": "qwen3_5_text",
        **_COMMON,
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention"] * 6,
        "intermediate_size": 832,
        "hidden_act": "silu",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
}


def build(config: ModelConfig, dtype) -> HybridModel:
    """A model with random weights."""
    return FAMILIES[type(config)][0](config, dtype=dtype, rngs=nnx.Rngs(0))


def abstract(config: ModelConfig, dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of a model and the shapes of its parameters."""
    return nnx.split(nnx.eval_shape(lambda: build(config, dtype)))


def _names(path: tuple) -> set[str]:
    return {str(getattr(part, "key", part)) for part in path}


def initial_parameters(config: ModelConfig) -> nnx.State:
    """Float32 weights whose heads remember from SHORTEST to LONGEST tokens, evenly in logarithms.

    A head decays by exp(-exp(A_log) step) a token. The last products of each block are shrunk by
    sqrt(2 layers).
    """
    params = nnx.state(build(config, jnp.float32))
    depth = len(params["layers"])

    def adjust(path: tuple, value: jax.Array) -> jax.Array:
        names = _names(path)
        if names & {"out_proj", "down_proj"}:
            return value * (2 * depth) ** -0.5
        steps = jnp.geomspace(FIRST_STEP, LAST_STEP, value.size)
        if "A_log" in names:
            return -jnp.log(steps * jnp.geomspace(SHORTEST, LONGEST, value.size))
        if "dt_bias" in names:
            return steps + jnp.log(-jnp.expm1(-steps))
        return value

    return jax.tree_util.tree_map_with_path(adjust, params)


def rounded(params: nnx.State) -> nnx.State:
    """The weights in their stored dtypes, matrices rounded to nearest even at `MANTISSA` bits."""
    return jax.tree.map(lambda value: _to_codes(value) if value.ndim > 1 else np.asarray(value), params)


def _to_codes(value: jax.Array) -> np.ndarray:
    bits = np.asarray(value, np.float32).view(np.uint32)
    dropped = np.uint32(23 - MANTISSA)
    odd = (bits >> dropped) & np.uint32(1)
    bits = (bits + (np.uint32(1) << (dropped - np.uint32(1))) - np.uint32(1) + odd) >> dropped
    return ((bits << dropped) >> np.uint32(16)).astype(np.uint16).view(ml_dtypes.bfloat16)


def save_weights(params: nnx.State, folder: Path, name: str) -> int:
    """Writes NAME.0, NAME.1, ... with the rounded weights; returns their bytes together.

    Matrices come as their low and high bytes apart, which is what compresses; vectors as float32.
    """
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(rounded(params))]
    matrices = np.concatenate([leaf.reshape(-1).view(np.uint16) for leaf in leaves if leaf.ndim > 1])
    vectors = np.concatenate([leaf.astype(np.float32).reshape(-1) for leaf in leaves if leaf.ndim < 2])
    planes = [(matrices & 0xFF).astype(np.uint8), (matrices >> 8).astype(np.uint8), vectors.view(np.uint8)]
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    packed = b"".join([*(packer.compress(plane.tobytes()) for plane in planes), packer.flush()])
    folder.mkdir(parents=True, exist_ok=True)
    for part, first in enumerate(range(0, len(packed), PART)):
        partial = folder / f"{name}.partial"
        partial.write_bytes(packed[first : first + PART])
        partial.replace(folder / f"{name}.{part}")
    return len(packed)


def load_weights(folder: Path, name: str) -> HybridModel:
    """The model of `save_weights`, bfloat16 with the float32 parameters that its family keeps.

    Raises FileNotFoundError without a first part, ValueError for parts of another model.
    """
    parts = [folder / f"{name}.0"]
    while parts[-1].exists():
        parts.append(folder / f"{name}.{len(parts)}")
    if len(parts) == 1:
        raise FileNotFoundError(f"{parts[0]} is not there: bench.train_drift writes it.")
    data = zlib.decompress(b"".join(part.read_bytes() for part in parts[:-1]), -15)
    graph, spec = abstract(parse_config(CONFIGS[name]), jnp.bfloat16)
    leaves, structure = jax.tree.flatten(spec)
    sizes = [leaf.size for leaf in leaves if leaf.ndim > 1]
    count, vectors = sum(sizes), sum(leaf.size for leaf in leaves if leaf.ndim < 2)
    if len(data) != 2 * count + 4 * vectors:
        raise ValueError(f"{parts[0]} holds {len(data)} bytes, {name} has {2 * count + 4 * vectors}.")
    planes = np.frombuffer(data, np.uint8, 2 * count).reshape(2, count).astype(np.uint16)
    matrices = iter(np.split((planes[0] | (planes[1] << 8)).view(ml_dtypes.bfloat16), np.cumsum(sizes)))
    place, values = 2 * count, []
    for leaf in leaves:
        if leaf.ndim > 1:
            value = next(matrices).reshape(leaf.shape)
        else:
            value = np.frombuffer(data, np.float32, leaf.size, place).reshape(leaf.shape)
            place += 4 * leaf.size
        values.append(jnp.asarray(value).astype(leaf.dtype))
    return nnx.merge(graph, jax.tree.unflatten(structure, values))
