"""The decoding cache: a pytree of checkpoints, rings, convolution windows and keys and values."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.numerics import hash_uint32
from replayssm_jax.backend import constants_of, resolve, ring_slots
from replayssm_jax.config import DecodingConfig, EagerConfig, ReplayConfig
from replayssm_jax.precision import Scaled, Stored, decode, in_order, zeros
from replayssm_jax.recurrence import RECURRENCES


def static(**options: Any) -> Any:
    """A dataclass field that belongs to the pytree's structure, not to its leaves."""
    return field(metadata={"static": True}, **options)


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec:
    """Sizes of one recurrent layer's cache.

    recurrence: a key of `RECURRENCES`. heads: H. groups: G, groups of B/C or key heads. head_dim: V.
    d_state: K, the contracted axis. conv_channels, conv_kernel: the causal convolution before the recurrence.
    """

    recurrence: str
    heads: int
    groups: int
    head_dim: int
    d_state: int
    conv_channels: int
    conv_kernel: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Sizes of one attention layer's cache: key-value heads and channels a head."""

    kv_heads: int
    head_dim: int


LayerSpec = RecurrentSpec | AttentionSpec | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reach:
    """How far a checkpoint reaches: what `forgotten` knows of its heads without reading it.

    added: the largest row norm of what every token added to the state, token p in slot p mod R.
    least: a lower bound of the smallest row norm of the state after that token.
    largest: a bound of the checkpoint's largest row norm. output: RMS of the head's output at the last flush.
    """

    added: Float[Array, "B R H"]
    least: Float[Array, "B R H"]
    largest: Float[Array, "B H"]
    output: Float[Array, "B H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent layer's buffers.

    checkpoint: the state at token `start`, [B, H, V, K] in the recurrence's format; the current state,
    float32, in eager caches.
    ring: inputs of the tokens since then, token p in slot p mod R; None in eager caches.
    conv: convolution *input* columns, position p in column p mod W, W = conv_kernel - 1 + window.
    heads: per-head constants of the recurrence, copied from the model; the same for all rows.
    copy: the checkpoint in the format that outputs read; None where they read the checkpoint itself.
    index: of the layer in the model.
    reach: of the checkpoint's heads, where reads are left out by bounds; else None.
    constants: the model's, as of the last prefill, as the GPU kernels read them, so that no step stacks them;
    else None.
    """

    checkpoint: Stored
    ring: Any
    conv: Float[Array, "B W C"]
    heads: Any
    recurrence: str = static()
    copy: Stored | None = None
    index: int = static(default=0)
    reach: Reach | None = None
    constants: Float32[Array, "constants H"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer's keys and values, position p in column p of every key head.

    Heads before columns, as both products of attention read them: in another order XLA would transpose them.
    """

    k: Float[Array, "B N S D"]
    v: Float[Array, "B N S D"]


def empty_attention(spec: AttentionSpec, batch: int, max_length: int, dtype) -> AttentionLayer:
    """Zero keys and values of `batch` rows with `max_length` columns."""
    shape = (batch, spec.kv_heads, max_length, spec.head_dim)
    return AttentionLayer(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Everything a batch of rows needs to go on decoding. Passed in, returned, donated.

    layers: a RecurrentLayer, an AttentionLayer or None for every layer of the model.
    start: tokens folded into the checkpoint (eager: tokens in the state).
    length: committed ring entries (eager: 0). Position = KV length = start + length.
    pending: input tokens of the last step that are not committed yet.
    flush_at: a row flushes at a step of T tokens when length + T exceeds this.
    seed: a row's seed for stochastic rounding.
    replay: how the cache decodes, with the backend that does it. max_length: columns for keys and values.
    mesh: the devices of a cache on several; see `sharding.shard_cache`.
    """

    layers: tuple
    start: Int32[Array, " B"]
    length: Int32[Array, " B"]
    pending: Int32[Array, " B"]
    flush_at: Int32[Array, " B"]
    seed: UInt32[Array, " B"]
    replay: DecodingConfig = static()
    max_length: int = static()
    mesh: Mesh | None = static(default=None)

    @property
    def batch(self) -> int:
        """Number of rows B."""
        return self.start.shape[0]

    @property
    def position(self) -> Int32[Array, " B"]:
        """Committed tokens of each row."""
        return self.start + self.length

    @property
    def window(self) -> int:
        """The largest number of tokens one step may take."""
        return self.replay.window


def kernel_constants(heads: Any, replay: DecodingConfig) -> Float32[Array, "constants H"] | None:
    """`RecurrentLayer.constants` of a cache with this configuration."""
    return constants_of(heads) if replay.implementation == "pallas" else None


def _layer(spec: LayerSpec, heads, index: int, batch: int, max_length: int, replay: DecodingConfig, dtype):
    if spec is None:
        return None
    if isinstance(spec, AttentionSpec):
        return empty_attention(spec, batch, max_length, dtype)
    shape = (batch, spec.heads, spec.head_dim, spec.d_state)
    ring, copy, reach, recurrence = None, None, None, "fp32"
    if isinstance(replay, ReplayConfig):
        recurrence = replay.recurrence
        copy = None if replay.read == recurrence else zeros(shape, replay.read)
        if isinstance(copy, Scaled) and replay.implementation == "pallas":
            copy = in_order(copy, lanes=True)
        ring = RECURRENCES[spec.recurrence].zeros(
            batch,
            ring_slots(replay),
            heads=spec.heads,
            groups=spec.groups,
            head_dim=spec.head_dim,
            d_state=spec.d_state,
            dtype=dtype,
        )
        if replay.skip_forgotten == "bounded":
            known = (batch, spec.heads)
            slots = (batch, ring_slots(replay), spec.heads)
            reach = Reach(
                added=jnp.zeros(slots, jnp.float32),
                least=jnp.zeros(slots, jnp.float32),
                largest=jnp.zeros(known, jnp.float32),
                output=jnp.zeros(known, jnp.float32),
            )
    return RecurrentLayer(
        checkpoint=zeros(shape, recurrence),
        ring=ring,
        conv=jnp.zeros((batch, spec.conv_kernel - 1 + replay.window, spec.conv_channels), dtype),
        heads=jax.tree.map(jnp.copy, heads),
        copy=copy,
        recurrence=spec.recurrence,
        index=index,
        reach=reach,
        constants=kernel_constants(heads, replay),
    )


def init_cache(
    specs: tuple[LayerSpec, ...],
    heads: tuple,
    batch: int,
    max_length: int,
    *,
    replay: DecodingConfig | None,
    dtype,
    flush_at=None,
    seed: int = 0,
) -> Cache:
    """An empty cache of `batch` rows at position 0.

    specs: one entry a model layer; heads: the recurrence's per-head constants of each layer (None elsewhere).
    max_length: tokens a row can hold. dtype: of ring inputs, convolution columns, keys and values.
    flush_at: int or [batch], 1..buffer_length; a smaller value makes a row's first window shorter. None:
    buffer_length. seed: base of the rows' seeds.

    Raises ValueError for sizes below 1, flush_at out of range, a backend that cannot serve the request, or
    skip_forgotten with a recurrence that has no rule for it.
    """
    for name, value in (("batch", batch), ("max_length", max_length)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
    replay = resolve(_method(replay), specs, int(batch), dtype)
    _check_skips(replay, specs)
    flush_at = jnp.asarray(_checked_flush_at(flush_at, batch, replay), jnp.int32)
    sizes = {"specs": specs, "batch": int(batch), "max_length": int(max_length), "replay": replay}
    return _empty(heads, flush_at, np.uint32(seed % 2**32), dtype=jnp.dtype(dtype), **sizes)


# One program, not one for every buffer: on a GPU each of those takes a tenth of a second to compile.
@functools.partial(jax.jit, static_argnames=("specs", "batch", "max_length", "replay", "dtype"))
def _empty(
    heads: tuple,
    flush_at: Int32[Array, "..."],
    seed: UInt32[Array, ""],
    *,
    specs: tuple[LayerSpec, ...],
    batch: int,
    max_length: int,
    replay: DecodingConfig,
    dtype: Any,
) -> Cache:
    count = jnp.zeros((batch,), jnp.int32)
    return Cache(
        layers=tuple(
            _layer(spec, constants, index, batch, max_length, replay, dtype)
            for index, (spec, constants) in enumerate(zip(specs, heads, strict=True))
        ),
        start=count,
        length=jnp.copy(count),
        pending=jnp.copy(count),
        flush_at=jnp.broadcast_to(flush_at, (batch,)),
        seed=hash_uint32(seed, jnp.arange(batch, dtype=jnp.uint32)),
        replay=replay,
        max_length=max_length,
    )


def _method(replay) -> DecodingConfig:
    """The configuration of a method; raises ValueError for anything else."""
    if replay is None:
        return EagerConfig()
    if not isinstance(replay, DecodingConfig):
        raise ValueError(
            f"replay must be a ReplayConfig, or an EagerConfig or None for the eager method, got {replay!r}."
        )
    return replay


def _check_skips(replay: DecodingConfig, specs: tuple[LayerSpec, ...]) -> None:
    if isinstance(replay, ReplayConfig) and replay.skip_forgotten != "off":
        for spec in specs:
            name = getattr(spec, "recurrence", None)
            if name is not None and not hasattr(RECURRENCES[name], "log_decays"):
                raise ValueError(
                    f'skip_forgotten="{replay.skip_forgotten}" needs one decay a head, which {name} has not.'
                )


def _checked_flush_at(flush_at, batch: int, replay: DecodingConfig):
    if flush_at is None:
        return replay.buffer_length
    if isinstance(replay, EagerConfig):
        raise ValueError("flush_at has no meaning in an eager cache (replay=None).")
    if isinstance(flush_at, Tracer):
        return flush_at
    values = np.asarray(flush_at)
    if values.dtype.kind not in "iu" or values.shape not in ((), (batch,)):
        raise ValueError(f"flush_at must be an integer or {batch} integers, got {flush_at!r}.")
    if values.min() < 1 or values.max() > replay.buffer_length:
        raise ValueError(
            f"flush_at must lie in 1..buffer_length={replay.buffer_length}, got {values.tolist()}."
        )
    return values


def cache_bytes(
    specs: tuple[LayerSpec, ...], max_length: int, replay: DecodingConfig | None, dtype
) -> dict[str, int]:
    """Bytes a sequence of the cache's buffers: keys checkpoint, copy, ring, conv, kv and total."""
    method = resolve(_method(replay), specs, 1, dtype)
    layers = jax.eval_shape(
        lambda: tuple(_layer(spec, None, 0, 1, max_length, method, dtype) for spec in specs)
    )
    recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
    attention = [layer for layer in layers if isinstance(layer, AttentionLayer)]

    def size(tree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    parts = {
        "checkpoint": size([layer.checkpoint for layer in recurrent]),
        "copy": size([layer.copy for layer in recurrent]),
        "ring": size([(layer.ring, layer.reach) for layer in recurrent]),
        "conv": size([layer.conv for layer in recurrent]),
        "kv": size(attention),
    }
    return parts | {"total": sum(parts.values())}


def check_usable(cache: Cache, name: str = "cache") -> None:
    """Raises ValueError when a buffer of `cache` was donated to an earlier call."""
    for leaf in jax.tree.leaves(cache):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"The {name} was donated to an earlier prefill, step, commit, insert or reset; "
                "use the cache which that call returned."
            )


def _map_rows(function, cache: Cache, *others: Cache) -> Cache:
    """Apply `function` to every leaf that has a row axis; per-head constants stay as they are."""

    def layer(first, *rest):
        if not isinstance(first, RecurrentLayer):
            return jax.tree.map(function, first, *rest)
        bare = [replace(item, heads=None, constants=None) for item in (first, *rest)]
        return replace(jax.tree.map(function, *bare), heads=first.heads, constants=first.constants)

    names = ("start", "length", "pending", "flush_at", "seed")
    return replace(
        cache,
        layers=tuple(
            layer(*items) for items in zip(cache.layers, *(other.layers for other in others), strict=True)
        ),
        **{
            name: function(getattr(cache, name), *(getattr(other, name) for other in others))
            for name in names
        },
    )


def _row_indices(rows, name: str) -> Int32[Array, " n"]:
    indices = jnp.asarray(rows)
    if indices.shape == (0,):
        indices = indices.astype(jnp.int32)  # an empty list has no dtype of its own
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"{name} takes rows as a one-dimensional integer array, got {indices.dtype}{list(indices.shape)}."
        )
    return indices.astype(jnp.int32)


@jax.jit
def _select(cache: Cache, rows: Int32[Array, " n"]) -> Cache:
    picked = _map_rows(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), cache)
    layers = tuple(
        replace(layer, **jax.tree.map(jnp.copy, {"heads": layer.heads, "constants": layer.constants}))
        if isinstance(layer, RecurrentLayer)
        else layer
        for layer in picked.layers
    )
    return replace(picked, layers=layers)


def select(cache: Cache, rows) -> Cache:
    """A new cache of the given rows; `cache` stays usable.

    rows: int32 [n] in 0..B-1, repeats allowed. Returns a cache of n rows that shares no buffer with `cache`.
    Raises ValueError for a donated cache, for rows of another shape, and for host integers out of range.
    """
    check_usable(cache)
    indices = _row_indices(rows, "select")
    if not isinstance(rows, jax.Array) and indices.size:
        values = np.asarray(rows)
        if values.min() < 0 or values.max() >= cache.batch:
            raise ValueError(f"select takes rows in 0..{cache.batch - 1}, got {values.tolist()}.")
    return _select(cache, indices)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _insert(cache: Cache, part: Cache, rows: Int32[Array, " n"]) -> Cache:
    return _map_rows(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), cache, part)


def insert(cache: Cache, part: Cache, rows) -> Cache:
    """Write the rows of `part` over rows of `cache`.

    cache: donated. part: n rows, same model, replay configuration, max_length and dtypes; stays usable.
    rows: int32 [n], distinct; indices >= B are dropped (pad with B), -1 means the last row.
    Raises ValueError for a donated argument and for a `part` that differs in configuration or dtypes.
    """
    check_usable(cache)
    check_usable(part, "part")
    indices = _row_indices(rows, "insert")
    if indices.shape[0] != part.batch:
        raise ValueError(f"insert got {indices.shape[0]} row indices for a part of {part.batch} rows.")
    for name in ("replay", "max_length", "mesh"):
        mine, theirs = getattr(cache, name), getattr(part, name)
        if mine != theirs:
            raise ValueError(f"insert needs the same {name}: the cache has {mine}, the part has {theirs}.")
    mine, theirs = (
        [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(_without_heads(item)[:2])]
        for item in (cache, part)
    )
    if jax.tree.structure(cache) != jax.tree.structure(part) or mine != theirs:
        raise ValueError("insert needs a part with the layers, shapes and dtypes of the cache.")
    return _insert(cache, part, indices)


def _without_heads(cache: Cache) -> tuple:
    layers = tuple(
        replace(layer, heads=None, constants=None) if isinstance(layer, RecurrentLayer) else layer
        for layer in cache.layers
    )
    return layers, (cache.start, cache.length, cache.pending, cache.flush_at, cache.seed)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _reset(cache: Cache, rows: Int32[Array, " n"], seeds: UInt32[Array, " n"] | None) -> Cache:
    seed = cache.seed if seeds is None else cache.seed.at[rows].set(seeds, mode="drop")
    full = jnp.int32(cache.replay.buffer_length)
    flush_at = cache.flush_at.at[rows].set(full, mode="drop")
    cleared = _map_rows(lambda leaf: leaf.at[rows].set(jnp.zeros((), leaf.dtype), mode="drop"), cache)
    return replace(cleared, seed=seed, flush_at=flush_at)


def reset(cache: Cache, rows, seeds=None) -> Cache:
    """Empty the given rows: state, ring, convolution, keys, values and cursors become 0, flush_at L.

    cache: donated. rows: int32 [n]; indices >= B are dropped (pad with B), -1 means the last row.
    seeds: uint32 [n] new row seeds, or None to keep them.
    Raises ValueError for a donated cache and for shapes that do not fit.
    """
    check_usable(cache)
    indices = _row_indices(rows, "reset")
    if seeds is not None:
        seeds = jnp.asarray(seeds, jnp.uint32)
        if seeds.shape != indices.shape:
            raise ValueError(f"reset got {seeds.shape} seeds for {indices.shape[0]} rows.")
    return _reset(cache, indices, seeds)


@jax.jit
def _materialize(cache: Cache) -> tuple:
    states = []
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            state = jnp.copy(decode(layer.checkpoint))
            if layer.ring is not None:
                recurrence = RECURRENCES[layer.recurrence]
                state = recurrence.fold(state, layer.ring, layer.heads, cache.start, cache.length)
            states.append(state)
    return tuple(states)


def materialize(cache: Cache) -> tuple[Float[Array, "B H V K"], ...]:
    """The true state of every recurrent layer at the committed position.

    Returns float32 [B, H, V, K] a recurrent layer, unrounded; uncommitted entries are ignored. `cache` stays
    usable. Raises ValueError for a donated cache.
    """
    check_usable(cache)
    return _materialize(cache)
