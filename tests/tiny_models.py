"""Minute models of three families, in memory, with weights that make faults of the state visible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.base import HybridModel
from models.config import NemotronHConfig, Qwen35Config
from models.layers.conv import CausalConv
from models.layers.embedding import Embedding
from models.layers.groups import by_group
from models.layers.norm import RMSNorm
from models.layers.projection import bias_free
from models.nemotron_h import NemotronH
from models.qwen3_5 import Qwen35
from pallas_kernels.numerics import kimi_delta_log_decay, l2_normalize
from replayssm_jax.cache import RecurrentSpec
from replayssm_jax.recurrence import kimi_delta
from replayssm_jax.replay import recur

VOCAB = 97
FAMILIES = ("mamba2", "gated_delta", "kimi_delta")


def nemotron_config(**changes) -> NemotronHConfig:
    """`M2` of the bug bank."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "layer_pattern": "M*M-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "d_state": 32,
        "conv_kernel": 4,
        "chunk_size": 8,
        "norm_eps": 1e-5,
    }
    return NemotronHConfig(**(sizes | changes))


def qwen_config(**changes) -> Qwen35Config:
    """`GDN` of the bug bank, with a GVA ratio of 2."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": ("linear_attention", "linear_attention", "full_attention"),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "key_heads": 2,
        "value_heads": 4,
        "key_head_dim": 16,
        "value_head_dim": 16,
        "conv_kernel": 4,
        "norm_eps": 1e-6,
        "rope_theta": 1e7,
        "rotary_dim": 4,
        "tie_word_embeddings": True,
    }
    return Qwen35Config(**(sizes | changes))


class KimiBlock(nnx.Module):
    """A Kimi Delta Attention layer in plain form, for the cache operations; not a published model."""

    def __init__(self, size: int, heads: int, width: int, *, conv_kernel: int, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=jnp.float32, rngs=rngs)
        channels = 3 * heads * width
        self.norm = RMSNorm(size, eps=1e-5, dtype=jnp.float32)
        self.qkv, self.gate, self.beta = (
            linear(size, channels),
            linear(size, heads * width),
            linear(size, heads),
        )
        self.conv1d = CausalConv(channels, conv_kernel, bias=False, dtype=jnp.float32, rngs=rngs)
        self.A_log = nnx.Param(jnp.linspace(-1.0, 1.0, heads, dtype=jnp.float32))
        self.dt_bias = nnx.Param(jax.random.normal(rngs.params(), (heads * width,)))
        self.out_proj = linear(heads * width, size)
        self.spec = RecurrentSpec(
            recurrence="kimi_delta",
            heads=heads,
            groups=heads,
            head_dim=width,
            d_state=width,
            conv_channels=channels,
            conv_kernel=conv_kernel,
        )

    def heads(self):
        return kimi_delta.Heads()

    def __call__(self, x, segment, layer):
        heads, normed = self.spec.heads, self.norm(x)
        mixed, layer = self.conv1d(self.qkv(normed), layer, segment)
        q, k, v = (by_group(part, heads) for part in jnp.split(mixed, 3, axis=-1))
        raw = self.gate(normed).reshape(*x.shape[:2], heads, -1)
        decay = kimi_delta_log_decay(raw, self.A_log[...], self.dt_bias[...].reshape(raw.shape[2:]))
        inputs = kimi_delta.Inputs(
            v=v,
            k=l2_normalize(k),
            log_decay=jnp.moveaxis(decay, 2, 1),
            beta=jax.nn.sigmoid(self.beta(normed)),
        )
        reader = l2_normalize(q) * self.spec.d_state**-0.5
        y, layer = recur(kimi_delta, layer, inputs, reader, self.heads(), segment)
        return x + self.out_proj(y.reshape(*x.shape[:2], -1)), layer


class TinyKimi(HybridModel):
    """Two Kimi Delta Attention layers between an embedding and its transpose."""

    def __init__(self, *, conv_kernel: int = 4, layers: int = 2, rngs: nnx.Rngs):
        self.embed = Embedding(VOCAB, 64, dtype=jnp.float32, rngs=rngs)
        self.layers = nnx.List(
            [KimiBlock(64, 4, 16, conv_kernel=conv_kernel, rngs=rngs) for _ in range(layers)]
        )
        self.norm = RMSNorm(64, eps=1e-5, dtype=jnp.float32)
        self.lm_head = None


def heat(model: HybridModel) -> HybridModel:
    """The bug bank's hot weights: slow decay, large steps, strong convolutions, so that old tokens matter."""
    for block in model.layers:
        mixer = getattr(block, "mixer", block)
        if not hasattr(mixer, "conv1d"):
            continue
        mixer.A_log[...] = jnp.full_like(mixer.A_log[...], -4.0)
        mixer.dt_bias[...] = jnp.full_like(mixer.dt_bias[...], 0.54)
        mixer.conv1d.weight[...] = mixer.conv1d.weight[...] * 30.0
        if mixer.conv1d.bias is not None:
            mixer.conv1d.bias[...] = jnp.full_like(mixer.conv1d.bias[...], 0.5)
    return model


def randomize(make, seed: int = 7) -> HybridModel:
    """A model from `make`, its parameters drawn by NumPy: nothing is compiled for it."""
    rng = np.random.default_rng(seed)
    model = nnx.eval_shape(make)

    def draw(leaf):
        if len(leaf.shape) < 2:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.normal(scale=leaf.shape[0] ** -0.5, size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, model)


@functools.cache
def hot_model(family: str, *, conv_kernel: int = 4, layers: int | None = None) -> HybridModel:
    """A tiny model of one family with hot weights; `layers` keeps the first few only."""

    def make():
        rngs = nnx.Rngs(7)
        if family == "mamba2":
            pattern = nemotron_config().layer_pattern[:layers]
            return NemotronH(nemotron_config(conv_kernel=conv_kernel, layer_pattern=pattern), rngs=rngs)
        if family == "gated_delta":
            types = qwen_config().layer_types[:layers]
            return Qwen35(qwen_config(conv_kernel=conv_kernel, layer_types=types), rngs=rngs)
        return TinyKimi(conv_kernel=conv_kernel, layers=layers or 2, rngs=rngs)

    return heat(randomize(make))


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    """Token ids of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)


@functools.cache
def _forward():
    return jax.jit(lambda model, tokens: model.logits(model.forward(tokens)))


def full_logits(model: HybridModel, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of whole texts, without any cache; one compilation a model serves every size."""
    rows, count = tokens.shape
    padded = np.zeros((4, 72), np.int32)
    padded[:rows, :count] = tokens
    return np.asarray(_forward()(model, jnp.asarray(padded)))[:rows, :count]


def assert_close(actual, expected, tolerance: float = 1e-4) -> None:
    """`EQ-num` of the bug bank: the largest difference, relative to the largest magnitude."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.isfinite(actual).all()
    scale = np.abs(expected).max()
    assert np.abs(actual - expected).max() <= tolerance * max(scale, 1e-30)
