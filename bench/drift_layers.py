"""Decoding in windows of L tokens with formats simulated in float32, each row with its own configuration.

What single steps do with a buffer of L tokens: the first token of a window folds the L tokens before it,
stores the checkpoint rounded, encodes the copy and reads the new checkpoint; the L - 1 tokens after it read
the copy. Here a window is computed at once, and its fold at its end instead of the next one's beginning.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from bench.drift_training import gated_delta_prefill
from models.base import HybridModel
from replayssm_jax.cache import AttentionSpec, RecurrentSpec, init_cache, static
from replayssm_jax.config import ReplayConfig
from replayssm_jax.precision import decode, encode, row_random
from replayssm_jax.recurrence import gated_delta
from replayssm_jax.replay import Segment

NAMES = {"fp32": "FP32", "bf16": "BF16", "fp16": "FP16", "fp8_e4m3": "FP8", "nvfp4": "NVFP4"}


@dataclass(frozen=True)
class Configuration:
    """Formats of the recurrence and of reads, and how the recurrence rounds; as in `ReplayConfig`."""

    recurrence: str
    read: str
    rounding: str = "nearest"

    @property
    def name(self) -> str:
        """As it stands in tables."""
        if self.recurrence == self.read:
            return "FP32" if self.read == "fp32" else f"shared {NAMES[self.read]}, {self.rounding}"
        suffix = " stochastic" if self.rounding == "stochastic" else ""
        return f"{NAMES[self.read]} read, {NAMES[self.recurrence]}{suffix}"

    def replay(self, buffer_length: int) -> ReplayConfig:
        """The configuration of a cache that decodes so in single steps."""
        return ReplayConfig(
            buffer_length=buffer_length,
            implementation="xla",
            recurrence=self.recurrence,
            read=self.read,
            rounding=self.rounding,
        )


def _separate(read: str) -> tuple[Configuration, ...]:
    other = [Configuration("fp8_e4m3", read, "stochastic")] if read == "nvfp4" else []
    return (Configuration("fp32", read), Configuration("fp16", read, "stochastic"), *other)


# FP8 reads of an FP8 recurrence are the shared FP8 state. The first is what the others are compared with.
CONFIGURATIONS = (
    Configuration("fp32", "fp32"),
    *(
        Configuration(format, format, rounding)
        for format in ("bf16", "fp8_e4m3", "nvfp4")
        for rounding in ("nearest", "stochastic")
    ),
    *_separate("nvfp4"),
    *_separate("fp8_e4m3"),
)


def simulated(
    x: Float32[Array, "B H V K"], formats: tuple[str, ...], random: tuple | None = None
) -> Float32[Array, "B H V K"]:
    """Every equal share of the rows encoded in its format, and decoded; fp32 leaves them as they are.

    random: for every share None (round to nearest) or the words of stochastic rounding.
    """
    shares = jnp.split(x, len(formats))
    words = random or (None,) * len(formats)
    parts = zip(shares, formats, words, strict=True)
    return jnp.concatenate([decode(encode(share, format, random)) for share, format, random in parts])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SimulatedLayer:
    """A recurrent layer of rows [configuration, text].

    checkpoint: decoded, at the window's first token. conv: the columns before it. seed: of every row.
    index: of the layer in the model.
    """

    checkpoint: Float32[Array, "B H V K"]
    conv: Float[Array, "B W C"]
    seed: UInt32[Array, " B"]
    configurations: tuple[Configuration, ...] = static()
    index: int = static()

    def recur(
        self, recurrence: ModuleType, inputs: Any, reader: Array, heads: Any, segment: Segment
    ) -> tuple[Float32[Array, "B L H V"], "SimulatedLayer"]:
        """Outputs of a window, and the layer at the first token behind it."""
        outputs, state = self.through(recurrence, self.checkpoint, inputs, reader, heads, segment)
        shared = self.shared_rows
        if shared < self.checkpoint.shape[0]:
            inputs, reader = jax.tree.map(lambda field: field[shared:], (inputs, reader))
            later, _ = self.through(recurrence, self.copies(), inputs, reader, heads, segment)
            separate = jnp.concatenate([outputs[shared:, :1], later[:, 1:]], axis=1)
            outputs = jnp.concatenate([outputs[:shared], separate])
        return outputs, self.rewritten(state, segment)

    @property
    def shared_rows(self) -> int:
        """Rows without a copy, which come first."""
        shared = sum(item.read == item.recurrence for item in self.configurations)
        return self.checkpoint.shape[0] // len(self.configurations) * shared

    def copies(self) -> Float32[Array, "separate H V K"]:
        """What all tokens of a window but the first read, in the rows that have a copy."""
        formats = tuple(item.read for item in self.configurations if item.read != item.recurrence)
        return simulated(self.checkpoint[self.shared_rows :], formats)

    def read(self) -> Float32[Array, "B H V K"]:
        """What all tokens of a window but the first read, of all rows."""
        return jnp.concatenate([self.checkpoint[: self.shared_rows], self.copies()])

    def through(self, recurrence: ModuleType, state, inputs, reader, heads, segment: Segment):
        """Outputs of the window from a state, and the state behind it, unrounded."""
        if recurrence is gated_delta:
            # The library's triangular solve of such small systems is slow on a GPU.
            inputs, reader = jax.tree.map(lambda field: field.astype(jnp.float32), (inputs, reader))
            return gated_delta_prefill(state, inputs, reader, heads, chunk=segment.tokens)
        lengths = jnp.full((state.shape[0],), segment.tokens, jnp.int32)
        return recurrence.prefill(state, inputs, reader, heads, lengths, chunk_size=segment.tokens)

    def rewritten(self, state: Float32[Array, "B H V K"], segment: Segment) -> "SimulatedLayer":
        """The layer with a new checkpoint, rounded as the rows' configurations say."""
        # As in `flush.rewrite`: one state for all readers.
        state = jax.lax.optimization_barrier(state)
        seeds = jnp.split(self.seed, len(self.configurations))
        start = segment.position[:1] + jnp.int32(segment.tokens)
        words = tuple(
            row_random(seed, self.index, jnp.broadcast_to(start, seed.shape), state.shape[1:])
            if item.rounding == "stochastic"
            else None
            for item, seed in zip(self.configurations, seeds, strict=True)
        )
        formats = tuple(item.recurrence for item in self.configurations)
        return replace(self, checkpoint=simulated(state, formats, words))


def simulated_layers(
    model: HybridModel,
    texts: int,
    max_length: int,
    configurations: tuple[Configuration, ...],
    seeds: UInt32[Array, " texts"],
) -> tuple:
    """Empty layers for rows [configuration, text]; a text's seed is the same in all configurations.

    configurations: those without a copy first. max_length: columns for keys and values, where the model has
    attention. Raises ValueError for another order.
    """
    copied = [item.read != item.recurrence for item in configurations]
    if copied != sorted(copied):
        raise ValueError("configurations without a copy must come first.")
    rows, dtype = texts * len(configurations), model.embed.weight.dtype

    def layer(spec: RecurrentSpec | AttentionSpec | None, index: int) -> Any:
        if spec is None:
            return None
        if isinstance(spec, AttentionSpec):
            return init_cache((spec,), (None,), rows, max_length, replay=None, dtype=dtype).layers[0]
        return SimulatedLayer(
            checkpoint=jnp.zeros((rows, spec.heads, spec.head_dim, spec.d_state), jnp.float32),
            conv=jnp.zeros((rows, spec.conv_kernel - 1, spec.conv_channels), dtype),
            seed=jnp.tile(seeds, len(configurations)),
            configurations=configurations,
            index=index,
        )

    return tuple(layer(spec, index) for index, spec in enumerate(model.cache_specs()))


def window_segment(position: Int32[Array, ""], rows: int, tokens: int) -> Segment:
    """A window of whole rows that all stand at `position`."""
    start = jnp.full((rows,), position, jnp.int32)
    return Segment(
        position=start,
        lengths=jnp.full_like(start, tokens),
        fold=jnp.zeros_like(start),
        start=start,
        length=jnp.zeros_like(start),
        plan=None,
        mode="prefill",
        tokens=tokens,
    )


def decode_window(
    model: HybridModel, layers: tuple, position: Int32[Array, ""], tokens: Int32[Array, "texts L"]
) -> tuple[Float32[Array, "B L vocab"], tuple]:
    """Logits of one window of every text under every configuration, and the layers behind it."""
    simulated = next(layer for layer in layers if isinstance(layer, SimulatedLayer))
    rows = jnp.tile(tokens, (len(simulated.configurations), 1))
    hidden, layers = model(rows, window_segment(position, *rows.shape), layers)
    return model.logits(hidden), layers
