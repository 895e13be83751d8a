"""Qwen3.5, dense text part: Gated DeltaNet layers (arXiv 2412.06464) and gated full attention in between."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.base import HybridModel
from models.config import MTPConfig, Qwen35Config
from models.layers.attention import attend_projected, gates, split
from models.layers.conv import CausalConv
from models.layers.embedding import Embedding
from models.layers.mlp import GatedMLP
from models.layers.norm import NormThenGate, RMSNorm
from models.layers.projection import Parts, bias_free, project, project_out
from models.layers.residual import Stream, entered, joined
from models.mtp import MTPHead
from models.weights import Weight, linear
from pallas_kernels.parts import AttentionParts, Gate, Part
from replayssm_jax.cache import AttentionSpec, RecurrentSpec
from replayssm_jax.recurrence import gated_delta
from replayssm_jax.replay import Segment, recur


def _norm(size: int, config: Qwen35Config, dtype) -> RMSNorm:
    return RMSNorm(size, eps=config.norm_eps, offset=1.0, dtype=dtype)


def _widths(config: Qwen35Config) -> tuple[int, int]:
    return config.key_heads * config.key_head_dim, config.value_heads * config.value_head_dim


def _attention_widths(config: Qwen35Config) -> tuple[int, int]:
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


class GatedDeltaNet(nnx.Module):
    """in_proj to [q, k, v, z, b, a]; convolution over q, k, v; L2-normalised q and k; the gated delta rule;
    head norm times silu(z); out_proj."""

    def __init__(self, config: Qwen35Config, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=dtype, rngs=rngs)
        size, heads = config.hidden_size, config.value_heads
        keys, values = _widths(config)
        self.in_proj = linear(size, 2 * keys + 2 * values + 2 * heads)
        self.conv1d = CausalConv(2 * keys + values, config.conv_kernel, bias=False, dtype=dtype, rngs=rngs)
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)))
        self.dt_bias = nnx.Param(jnp.ones((heads,), jnp.float32))
        self.norm = NormThenGate(config.value_head_dim, eps=config.norm_eps)
        self.out_proj = linear(values, size)
        self.config = config

    @property
    def spec(self) -> RecurrentSpec:
        """Sizes of this layer's cache."""
        config = self.config
        keys, values = _widths(config)
        return RecurrentSpec(
            recurrence="gated_delta",
            heads=config.value_heads,
            groups=config.key_heads,
            head_dim=config.value_head_dim,
            d_state=config.key_head_dim,
            conv_channels=2 * keys + values,
            conv_kernel=config.conv_kernel,
        )

    def heads(self) -> gated_delta.Heads:
        """The delta rule has no per-head constants."""
        return gated_delta.Heads()

    def __call__(self, x: Float[Array, "B T D"], segment: Segment, layer):
        """Returns the layer's output in the dtype of x, or parts of it, and its cache."""
        config, groups = self.config, self.config.key_heads
        keys, values = _widths(config)
        channels, beyond = 2 * keys + values, 2 * keys + 2 * values
        heads = config.value_heads
        projected = project(self.in_proj, x, kernels=segment.kernels)
        gate = projected[..., channels:beyond]
        parts = (
            Part(groups, config.key_head_dim, config.key_head_dim**-0.5),
            Part(groups, config.key_head_dim, 1.0),
            Part(groups, values // groups),
        )
        gates = (
            (Gate("sigmoid", beyond, heads),),
            (Gate("gated_delta_log_decay", beyond + heads, heads), self.A_log[...], self.dt_bias[...]),
        )
        (q, k, v), (beta, log_decay), layer = self.conv1d.by_group(projected, 0, parts, gates, layer, segment)
        inputs = gated_delta.Inputs(v=v, k=k, log_decay=log_decay, beta=beta)
        y, layer = recur(gated_delta, layer, inputs, q, self.heads(), segment)
        gate = gate.reshape(y.shape)
        y = self.norm(y, gate).reshape(*x.shape[:2], values)
        return project_out(self.out_proj, y, kernels=segment.kernels), layer


class GatedAttention(nnx.Module):
    """Grouped-query attention with normed q and k, partial rotation, and a sigmoid gate on the output."""

    def __init__(self, config: Qwen35Config, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=dtype, rngs=rngs)
        size, (width, kv_width) = config.hidden_size, _attention_widths(config)
        self.qkv_proj, self.o_proj = linear(size, 2 * (width + kv_width)), linear(width, size)
        self.q_norm, self.k_norm = (_norm(config.head_dim, config, dtype) for _ in range(2))
        self.spec = AttentionSpec(kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
        self.parts = AttentionParts(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            gated=True,
            rotated=config.rotary_dim,
            eps=config.norm_eps,
            offset=1.0,
        )
        self.config = config

    def heads(self) -> None:
        """No recurrence, no constants."""
        return None

    @property
    def norms(self) -> tuple[RMSNorm, RMSNorm]:
        """Of queries and of keys."""
        return self.q_norm, self.k_norm

    def project(self, x: Float[Array, "B T D"], positions: Int32[Array, "B T"]):
        """Returns q and gate [B, T, Nq, head_dim], k and v [B, T, N, head_dim]; q and k rotated."""
        projected = project(self.qkv_proj, x, kernels=False)
        q, k, v = split(projected, self.parts, positions, norms=self.norms, theta=self.config.rope_theta)
        return q, gates(projected, self.parts), k, v

    def output(
        self, y: Float[Array, "B T Nq C"], gate: Float[Array, "B T Nq C"], *, kernels: bool = False
    ) -> Float[Array, "B T D"] | Parts:
        """Gates what attention read and projects it."""
        gated = y * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(y.dtype)
        return project_out(self.o_proj, gated.reshape(*y.shape[:2], -1), kernels=kernels)

    def __call__(self, x: Float[Array, "B T D"], segment: Segment, layer):
        """Returns the layer's output in the dtype of x, or parts of it, and its cache."""
        projected = project(self.qkv_proj, x, kernels=segment.kernels)
        options = {"norms": self.norms, "theta": self.config.rope_theta}
        y, layer = attend_projected(projected, self.parts, layer, segment, **options)
        return self.output(y, gates(projected, self.parts), kernels=segment.kernels), layer


class Block(nnx.Module):
    """x += mixer(norm(x)), then x += mlp(norm(x))."""

    def __init__(self, kind: str, config: Qwen35Config, *, dtype, rngs: nnx.Rngs):
        size = config.hidden_size
        self.input_norm, self.mlp_norm = (_norm(size, config, dtype) for _ in range(2))
        mixer = {"linear_attention": GatedDeltaNet, "full_attention": GatedAttention}[kind]
        self.mixer = mixer(config, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype, rngs=rngs)

    @property
    def spec(self):
        """Sizes of this layer's cache."""
        return self.mixer.spec

    def heads(self):
        """The recurrence's per-head constants, None where there is no recurrence."""
        return self.mixer.heads()

    def __call__(self, x: Float[Array, "B T D"] | Stream, segment: Segment, layer):
        """Returns the new residual stream and the layer's cache."""
        x, normed = entered(self.input_norm, x)
        y, layer = self.mixer(normed, segment, layer)
        x, normed = entered(self.mlp_norm, joined(x, y))
        return joined(x, self.mlp(normed, kernels=segment.kernels)), layer


class Qwen35(HybridModel):
    """A dense Qwen3.5 text model with random weights; `rs.load` fills in those of a checkpoint."""

    def __init__(self, config: Qwen35Config, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Block(kind, config, dtype=dtype, rngs=rngs) for kind in config.layer_types])
        self.norm = _norm(config.hidden_size, config, dtype)
        if config.tie_word_embeddings:
            self.lm_head = None
        else:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        if config.mtp is None:
            self.mtp = None
        else:
            self.mtp = MTPHead(
                config.hidden_size,
                [Block(kind, config, dtype=dtype, rngs=rngs) for kind in config.mtp.layers],
                norm=functools.partial(_norm, config.hidden_size, config, dtype),
                dtype=dtype,
                rngs=rngs,
            )


def weight_map(config: Qwen35Config) -> dict[str, Weight]:
    """Published tensor names, without their prefix, and where each goes."""
    size = config.hidden_size
    table = (config.vocab_size, size)
    weights = {
        "embed_tokens.weight": Weight(path=("embed", "weight"), shape=table),
        "norm.weight": Weight(path=("norm", "weight"), shape=(size,)),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = Weight(path=("lm_head", "weight"), shape=table)
    for index, kind in enumerate(config.layer_types):
        layer = _layer_weights(config, kind, ("layers", index))
        weights |= {f"layers.{index}.{key}": weight for key, weight in layer.items()}
    return weights | (_mtp_weights(config, config.mtp) if config.mtp is not None else {})


def _layer_weights(config: Qwen35Config, kind: str, path: tuple) -> dict[str, Weight]:
    size = config.hidden_size
    layer = {
        "input_layernorm.weight": Weight(path=(*path, "input_norm", "weight"), shape=(size,)),
        "post_attention_layernorm.weight": Weight(path=(*path, "mlp_norm", "weight"), shape=(size,)),
    }
    for part in ("gate_proj", "up_proj"):
        layer[f"mlp.{part}.weight"] = linear(
            *path, "mlp", part, inputs=size, outputs=config.intermediate_size, within="gate_up_proj"
        )
    layer["mlp.down_proj.weight"] = linear(
        *path, "mlp", "down_proj", inputs=config.intermediate_size, outputs=size
    )
    if kind == "linear_attention":
        mixer = _gated_delta_weights(config, (*path, "mixer"))
        return layer | {f"linear_attn.{key}": weight for key, weight in mixer.items()}
    mixer = _attention_weights(config, (*path, "mixer"))
    return layer | {f"self_attn.{key}": weight for key, weight in mixer.items()}


def _mtp_weights(config: Qwen35Config, mtp: MTPConfig) -> dict[str, Weight]:
    size = config.hidden_size
    weights = {
        "mtp.fc.weight": linear("mtp", "proj", inputs=2 * size, outputs=size),
        "mtp.pre_fc_norm_embedding.weight": Weight(path=("mtp", "embed_norm", "weight"), shape=(size,)),
        "mtp.pre_fc_norm_hidden.weight": Weight(path=("mtp", "hidden_norm", "weight"), shape=(size,)),
        "mtp.norm.weight": Weight(path=("mtp", "norm", "weight"), shape=(size,)),
    }
    for index, kind in enumerate(mtp.layers):
        layer = _layer_weights(config, kind, ("mtp", "layers", index))
        weights |= {f"mtp.layers.{index}.{key}": weight for key, weight in layer.items()}
    return weights


def _gated_delta_weights(config: Qwen35Config, path: tuple) -> dict[str, Weight]:
    size, heads = config.hidden_size, config.value_heads
    keys, values = _widths(config)
    channels = 2 * keys + values
    return {
        "in_proj_qkv.weight": linear(*path, "in_proj_qkv", inputs=size, outputs=channels, within="in_proj"),
        "in_proj_z.weight": linear(*path, "in_proj_z", inputs=size, outputs=values, within="in_proj"),
        "in_proj_b.weight": linear(*path, "in_proj_b", inputs=size, outputs=heads, within="in_proj"),
        "in_proj_a.weight": linear(*path, "in_proj_a", inputs=size, outputs=heads, within="in_proj"),
        "conv1d.weight": Weight(
            path=(*path, "conv1d", "weight"), shape=(channels, 1, config.conv_kernel), transform="conv"
        ),
        "A_log": Weight(path=(*path, "A_log"), shape=(heads,), keep_float32=True),
        "dt_bias": Weight(path=(*path, "dt_bias"), shape=(heads,), keep_float32=True),
        "norm.weight": Weight(
            path=(*path, "norm", "weight"), shape=(config.value_head_dim,), keep_float32=True
        ),
        "out_proj.weight": linear(*path, "out_proj", inputs=values, outputs=size),
    }


def _attention_weights(config: Qwen35Config, path: tuple) -> dict[str, Weight]:
    size, (width, kv_width) = config.hidden_size, _attention_widths(config)
    weights = {
        "q_proj.weight": linear(*path, "q_proj", inputs=size, outputs=2 * width, within="qkv_proj"),
        "k_proj.weight": linear(*path, "k_proj", inputs=size, outputs=kv_width, within="qkv_proj"),
        "v_proj.weight": linear(*path, "v_proj", inputs=size, outputs=kv_width, within="qkv_proj"),
        "o_proj.weight": linear(*path, "o_proj", inputs=width, outputs=size),
    }
    for name in ("q_norm", "k_norm"):
        weights[f"{name}.weight"] = Weight(path=(*path, name, "weight"), shape=(config.head_dim,))
    return weights
