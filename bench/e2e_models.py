"""Published models with random weights: configurations, depth cuts, and weights made on the device.

Sizes are those of the published config.json files. The mixture-of-experts models stand in with dense MLPs of
the width that one token uses (`STAND_INS`); their recurrent and attention layers are the published ones.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.base import HybridModel
from models.checkpoint import FAMILIES, abstract_model
from models.config import ModelConfig, MTPConfig, NemotronHConfig, Qwen35Config, parse_config
from pallas_kernels.numerics import hash_uint32

_NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "head_dim": 128,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}
PUBLISHED = {
    "nano-4b": _NEMOTRON
    | {
        "hidden_size": 3136,
        "intermediate_size": 12544,
        "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "mamba_num_heads": 96,
        "mamba_head_dim": 80,
    },
    "qwen3.5-4b": _QWEN
    | {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    # 22 experts of 2 x 1024 x 2688, two latent projections and a shared expert of 5376: 174 million weights.
    "super": _NEMOTRON
    | {
        "hidden_size": 4096,
        "intermediate_size": 21248,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEM*EMEMEMEME".replace("E", "-"),
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
    },
    # 8 experts and a shared one of 3 x 3072 x 1024.
    "q122": _QWEN
    | {
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 64,
        "tie_word_embeddings": False,
    },
}
STAND_INS = ("super", "q122")
# Layers of a depth cut that keeps the mix of kinds.
CUT_LAYERS = {"nano-4b": 10, "qwen3.5-4b": 8, "super": 11, "q122": 8}
HUB_NAMES = {"nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16": "nano-4b", "Qwen/Qwen3.5-4B": "qwen3.5-4b"}


def published(name: str) -> ModelConfig:
    """The configuration of a model of `PUBLISHED`, by its short name or its name on the hub."""
    name = HUB_NAMES.get(name, name)
    if name not in PUBLISHED:
        known = ", ".join((*PUBLISHED, *HUB_NAMES))
        raise ValueError(f"There is no model {name!r}; known models are {known}.")
    return parse_config(PUBLISHED[name])


def published_json(name: str, layers: int | None = None) -> dict:
    """The config.json of `depth_cut(published(name), layers)`, as a checkpoint directory holds it."""
    config = depth_cut(published(name), layers)
    raw = PUBLISHED[HUB_NAMES.get(name, name)]
    kinds = layer_kinds(config)
    if isinstance(config, NemotronHConfig):
        return raw | {"hybrid_override_pattern": "".join(kinds), "num_hidden_layers": len(kinds)}
    return raw | {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


def layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The kind of every layer, in the family's own words."""
    return tuple(config.layer_pattern) if isinstance(config, NemotronHConfig) else config.layer_types


def depth_cut(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The configuration with `layers` consecutive layers, the run whose mix of kinds is nearest the whole's.

    None keeps them all. Raises ValueError for less than one layer or more than there are.
    """
    kinds = layer_kinds(config)
    if layers is None:
        return config
    if not 1 <= layers <= len(kinds):
        raise ValueError(f"layers must lie in 1..{len(kinds)}, got {layers}.")
    whole = Counter(kinds)

    def distance(first: int) -> float:
        part = Counter(kinds[first : first + layers])
        return sum((part[kind] / layers - count / len(kinds)) ** 2 for kind, count in whole.items())

    first = min(range(len(kinds) - layers + 1), key=distance)
    kept = kinds[first : first + layers]
    if isinstance(config, Qwen35Config):
        return dataclasses.replace(config, layer_types=kept)
    return dataclasses.replace(config, layer_pattern="".join(kept))


def with_head(config: ModelConfig) -> ModelConfig:
    """The configuration with a dense multi-token-prediction head as its family has them.

    Qwen3.5: one attention layer with its MLP. Nemotron-H: an attention layer and an MLP; the published head
    of Nemotron-3-Super has experts there, Nemotron-3-Nano-4B is published without one.
    """
    layers = ("full_attention",) if isinstance(config, Qwen35Config) else ("*", "-")
    return dataclasses.replace(config, mtp=MTPConfig(layers=layers))


def random_model(config: ModelConfig, dtype: Any = jnp.bfloat16) -> HybridModel:
    """The model of a configuration with random weights.

    Matrices are uniform with variance 1 / inputs; vectors (norms, A_log, dt_bias, D) are those of the
    family's own initialisation.
    """
    return prepare_random(config, dtype)()


def prepare_random(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Callable[[], HybridModel]:
    """Compiles one small program a shape; the returned call makes the weights of `random_model` with them."""
    abstract = abstract_model(config, jnp.dtype(dtype))
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)

    @jax.jit
    def vectors() -> list:
        model = FAMILIES[type(config)][0](config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        return [leaf for leaf in jax.tree.leaves(model) if leaf.ndim < 2]

    small = vectors()
    kinds = {(leaf.shape, leaf.dtype) for _, leaf in leaves if leaf.ndim > 1}
    programs = {
        (shape, kind): _matrix.lower(jnp.uint32(0), jnp.float32(0), shape=shape, dtype=kind).compile()
        for shape, kind in kinds
    }

    def make() -> HybridModel:
        vector, filled = iter(small), []
        for index, (path, leaf) in enumerate(leaves):
            if leaf.ndim < 2:
                filled.append(next(vector))
                continue
            table = any(name in jax.tree_util.keystr(path[:1]) for name in ("embed", "lm_head"))
            inputs = leaf.shape[-1] if table else leaf.shape[-2]
            program = programs[leaf.shape, leaf.dtype]
            filled.append(program(jnp.uint32(index), jnp.float32(math.sqrt(3.0 / inputs))))
        return jax.tree.unflatten(structure, filled)

    return make


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _matrix(index: jax.Array, bound: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    element = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    fraction = (hash_uint32(index, element) >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-23)
    return ((fraction - 1.0) * bound).astype(dtype)
