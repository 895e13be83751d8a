"""Nemotron-H (arXiv 2504.03624): one Mamba-2, position-free attention or squared-ReLU MLP mixer a layer."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.base import HybridModel
from models.config import MTPConfig, NemotronHConfig
from models.layers.attention import attend_projected
from models.layers.conv import CausalConv
from models.layers.embedding import Embedding
from models.layers.mlp import MLP
from models.layers.norm import GateThenNorm, RMSNorm
from models.layers.projection import bias_free, project, project_out
from models.layers.residual import Stream, entered, joined
from models.mtp import MTPHead
from models.weights import Weight, linear
from pallas_kernels.parts import AttentionParts, Gate, Part
from replayssm_jax.cache import AttentionSpec, RecurrentSpec
from replayssm_jax.recurrence import mamba2
from replayssm_jax.replay import Segment, recur


def conv_channels(config: NemotronHConfig) -> int:
    """Channels of a Mamba-2 layer's convolution: x, B and C."""
    return config.mamba_num_heads * config.mamba_head_dim + 2 * config.n_groups * config.d_state


def _attention_widths(config: NemotronHConfig) -> tuple[int, int]:
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


class Mamba2Mixer(nnx.Module):
    """in_proj to [gate z, x, B, C, dt]; convolution of x, B, C; recurrence; gated group norm; out_proj."""

    def __init__(self, config: NemotronHConfig, *, dtype, rngs: nnx.Rngs):
        heads, channels = config.mamba_num_heads, conv_channels(config)
        inner = heads * config.mamba_head_dim
        self.in_proj = bias_free(config.hidden_size, inner + channels + heads, dtype=dtype, rngs=rngs)
        self.conv1d = CausalConv(
            channels, config.conv_kernel, bias=config.use_conv_bias, dtype=dtype, rngs=rngs
        )
        self.A_log = nnx.Param(jnp.log(jnp.linspace(1.0, 16.0, heads, dtype=jnp.float32)))
        self.D = nnx.Param(jnp.ones((heads,), jnp.float32))
        step_sizes = jnp.exp(
            jax.random.uniform(rngs.params(), (heads,), minval=jnp.log(0.001), maxval=jnp.log(0.1))
        )
        self.dt_bias = nnx.Param(step_sizes + jnp.log(-jnp.expm1(-step_sizes)))
        self.norm = GateThenNorm(inner, groups=config.n_groups, eps=config.norm_eps, dtype=dtype)
        self.out_proj = bias_free(inner, config.hidden_size, dtype=dtype, rngs=rngs)
        self.config = config

    @property
    def spec(self) -> RecurrentSpec:
        """Sizes of this layer's cache."""
        config = self.config
        return RecurrentSpec(
            recurrence="mamba2",
            heads=config.mamba_num_heads,
            groups=config.n_groups,
            head_dim=config.mamba_head_dim,
            d_state=config.d_state,
            conv_channels=conv_channels(config),
            conv_kernel=config.conv_kernel,
        )

    def heads(self) -> mamba2.Heads:
        """A = -exp(A_log) and D of every head, float32."""
        return mamba2.Heads(a=-jnp.exp(self.A_log[...]), d=self.D[...])

    def __call__(self, x: Float[Array, "B T D"], segment: Segment, layer):
        """Returns the layer's output in the dtype of x, or parts of it, and its cache."""
        config = self.config
        inner, groups = config.mamba_num_heads * config.mamba_head_dim, config.n_groups
        projected = project(self.in_proj, x, kernels=segment.kernels)
        state = Part(groups, config.d_state)
        parts = Part(groups, inner // groups), state, state
        gate = Gate("mamba2_dt", inner + conv_channels(config), config.mamba_num_heads, config.dt_limit)
        (values, b, c), (dt,), layer = self.conv1d.by_group(
            projected, inner, parts, ((gate, self.dt_bias[...]),), layer, segment
        )
        inputs = mamba2.Inputs(x=values, b=b, dt=dt)
        y, layer = recur(mamba2, layer, inputs, c, self.heads(), segment)
        y = self.norm(y.reshape(*x.shape[:2], inner), projected, kernels=segment.kernels)
        return project_out(self.out_proj, y, kernels=segment.kernels), layer


class Attention(nnx.Module):
    """Grouped-query attention; no position enters it."""

    def __init__(self, config: NemotronHConfig, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=dtype, rngs=rngs)
        size, (width, kv_width) = config.hidden_size, _attention_widths(config)
        self.qkv_proj, self.o_proj = linear(size, width + 2 * kv_width), linear(width, size)
        self.spec = AttentionSpec(kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
        self.parts = AttentionParts(config.num_attention_heads, config.num_key_value_heads, config.head_dim)

    def __call__(self, x: Float[Array, "B T D"], segment: Segment, layer):
        """Returns the layer's output in the dtype of x, or parts of it, and its cache."""
        projected = project(self.qkv_proj, x, kernels=segment.kernels)
        y, layer = attend_projected(projected, self.parts, layer, segment)
        y = y.reshape(*x.shape[:2], -1)
        return project_out(self.o_proj, y, kernels=segment.kernels), layer


class Block(nnx.Module):
    """x + mixer(norm(x)), with the mixer that the layer's letter names."""

    def __init__(self, letter: str, config: NemotronHConfig, *, dtype, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        if letter == "-":
            self.mixer = MLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)
        else:
            mixer = {"M": Mamba2Mixer, "*": Attention}[letter]
            self.mixer = mixer(config, dtype=dtype, rngs=rngs)

    @property
    def spec(self):
        """Sizes of this layer's cache, None for an MLP."""
        return None if isinstance(self.mixer, MLP) else self.mixer.spec

    def heads(self):
        """The recurrence's per-head constants, None where there is no recurrence."""
        return self.mixer.heads() if isinstance(self.mixer, Mamba2Mixer) else None

    def __call__(self, x: Float[Array, "B T D"] | Stream, segment: Segment, layer):
        """Returns the new residual stream and the layer's cache."""
        x, normed = entered(self.norm, x)
        if isinstance(self.mixer, MLP):
            return joined(x, self.mixer(normed, kernels=segment.kernels)), None
        y, layer = self.mixer(normed, segment, layer)
        return joined(x, y), layer


class NemotronH(HybridModel):
    """A dense Nemotron-H language model with random weights; `rs.load` fills in those of a checkpoint."""

    def __init__(self, config: NemotronHConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [Block(letter, config, dtype=dtype, rngs=rngs) for letter in config.layer_pattern]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head = None
        else:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        if config.mtp is None:
            self.mtp = None
        else:
            self.mtp = MTPHead(
                config.hidden_size,
                [Block(letter, config, dtype=dtype, rngs=rngs) for letter in config.mtp.layers],
                norm=functools.partial(RMSNorm, config.hidden_size, eps=config.norm_eps, dtype=dtype),
                dtype=dtype,
                rngs=rngs,
            )


def weight_map(config: NemotronHConfig) -> dict[str, Weight]:
    """Published tensor names, without their prefix, and where each goes."""
    size = config.hidden_size
    table = (config.vocab_size, size)
    weights = {
        "embeddings.weight": Weight(path=("embed", "weight"), shape=table),
        "norm_f.weight": Weight(path=("norm", "weight"), shape=(size,)),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = Weight(path=("lm_head", "weight"), shape=table)
    for index, letter in enumerate(config.layer_pattern):
        layer = _layer_weights(config, letter, ("layers", index))
        weights |= {f"layers.{index}.{key}": weight for key, weight in layer.items()}
    return weights | (_mtp_weights(config, config.mtp) if config.mtp is not None else {})


def _layer_weights(config: NemotronHConfig, letter: str, path: tuple) -> dict[str, Weight]:
    mixers = {"M": _mamba2_weights, "*": _attention_weights, "-": _mlp_weights}
    mixer = mixers[letter](config, (*path, "mixer"))
    norm = Weight(path=(*path, "norm", "weight"), shape=(config.hidden_size,))
    return {"norm.weight": norm} | {f"mixer.{key}": weight for key, weight in mixer.items()}


def _mtp_weights(config: NemotronHConfig, mtp: MTPConfig) -> dict[str, Weight]:
    size, first, last = config.hidden_size, "mtp.layers.0", f"mtp.layers.{len(mtp.layers) - 1}"
    weights = {
        f"{first}.enorm.weight": Weight(path=("mtp", "embed_norm", "weight"), shape=(size,)),
        f"{first}.hnorm.weight": Weight(path=("mtp", "hidden_norm", "weight"), shape=(size,)),
        f"{first}.eh_proj.weight": linear("mtp", "proj", inputs=2 * size, outputs=size),
        f"{last}.final_layernorm.weight": Weight(path=("mtp", "norm", "weight"), shape=(size,)),
    }
    for index, letter in enumerate(mtp.layers):
        layer = _layer_weights(config, letter, ("mtp", "layers", index))
        weights |= {f"mtp.layers.{index}.{key}": weight for key, weight in layer.items()}
    return weights


def _mamba2_weights(config: NemotronHConfig, path: tuple) -> dict[str, Weight]:
    heads, channels = config.mamba_num_heads, conv_channels(config)
    inner = heads * config.mamba_head_dim
    weights = {
        "in_proj.weight": linear(
            *path, "in_proj", inputs=config.hidden_size, outputs=inner + channels + heads
        ),
        "conv1d.weight": Weight(
            path=(*path, "conv1d", "weight"), shape=(channels, 1, config.conv_kernel), transform="conv"
        ),
        "norm.weight": Weight(path=(*path, "norm", "weight"), shape=(inner,)),
        "out_proj.weight": linear(*path, "out_proj", inputs=inner, outputs=config.hidden_size),
    }
    if config.use_conv_bias:
        weights["conv1d.bias"] = Weight(path=(*path, "conv1d", "bias"), shape=(channels,))
    for name in ("A_log", "D", "dt_bias"):
        weights[name] = Weight(path=(*path, name), shape=(heads,), keep_float32=True)
    return weights


def _attention_weights(config: NemotronHConfig, path: tuple) -> dict[str, Weight]:
    size, (width, kv_width) = config.hidden_size, _attention_widths(config)
    return {
        "q_proj.weight": linear(*path, "q_proj", inputs=size, outputs=width, within="qkv_proj"),
        "k_proj.weight": linear(*path, "k_proj", inputs=size, outputs=kv_width, within="qkv_proj"),
        "v_proj.weight": linear(*path, "v_proj", inputs=size, outputs=kv_width, within="qkv_proj"),
        "o_proj.weight": linear(*path, "o_proj", inputs=width, outputs=size),
    }


def _mlp_weights(config: NemotronHConfig, path: tuple) -> dict[str, Weight]:
    size, inner = config.hidden_size, config.intermediate_size
    return {
        "up_proj.weight": linear(*path, "up_proj", inputs=size, outputs=inner),
        "down_proj.weight": linear(*path, "down_proj", inputs=inner, outputs=size),
    }
