"""Recurrences for training: all chunks of a row at once, products in the inputs' dtype.

The forms of the library's `prefill`, rearranged: what lies inside a chunk is computed for all chunks side by
side, and only the states at the borders of chunks follow one another. Sums of products are float32, and so
are states and decays; float32 inputs are multiplied at full precision. In chunks of more than 32 tokens
differences of prefix sums stand for segment sums: a training step can bear their error. `StreamLayer` hands
a layer's final state to the next window of the same row.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from models.base import HybridModel
from replayssm_jax.cache import LayerSpec, RecurrentSpec, static
from replayssm_jax.recurrence import gated_delta, mamba2
from replayssm_jax.recurrence.segment import segment_sum
from replayssm_jax.replay import Segment

CHUNK = 128


def _einsum(form: str, *operands: Array) -> Float32[Array, "..."]:
    exact = all(operand.dtype == jnp.float32 for operand in operands)
    precision = jax.lax.Precision.HIGHEST if exact else None
    return jnp.einsum(form, *operands, preferred_element_type=jnp.float32, precision=precision)


def _by_chunk(scalars: Float32[Array, "B T H"], groups: int, chunk: int) -> Float32[Array, "B G M N C"]:
    batch, tokens, heads = scalars.shape
    split = scalars.reshape(batch, tokens // chunk, chunk, groups, heads // groups)
    return jnp.transpose(split, (0, 3, 4, 1, 2))


def _decays(log_decay: Float32[Array, "*b C"], *, itself: bool) -> Float32[Array, "*b C C"]:
    """exp(sum over j+1..i of the log decays) at (i, j) for j < i (j <= i), else 0."""
    *rows, size = log_decay.shape
    if size <= 32:
        flat = log_decay.reshape(1, -1, size)
        sums = segment_sum(flat).reshape(*rows, size, size)
    else:
        total = jnp.cumsum(log_decay, axis=-1)
        sums = total[..., :, None] - total[..., None, :]
    mask = jnp.tril(jnp.ones((size, size), bool), 0 if itself else -1)
    mask = mask.reshape((1,) * (log_decay.ndim - 1) + mask.shape)
    return jnp.exp(jnp.where(mask, sums, -jnp.inf))


def _states_before(
    first: Float32[Array, "B G M V K"], kept: Array, advance: Any, parts: Any
) -> tuple[Array, Any, Float32[Array, "B G M V K"]]:
    """State before every chunk [N, ...], what `advance` gives beside the next state, and the last state.

    kept: what remains of a state over each chunk, [N, B, G, M, 1, 1].
    """

    def body(state: Array, part: Any) -> tuple[Array, Any]:
        share, rest = part
        extra, added = advance(state, rest)
        return share * state + added, (state, extra)

    last, (before, extra) = jax.lax.scan(body, first, (kept, parts))
    return before, extra, last


def mamba2_prefill(
    state: Float32[Array, "B H V K"],
    inputs: mamba2.Inputs,
    reader: Float[Array, "B G T K"],
    heads: mamba2.Heads,
    chunk: int = CHUNK,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    """Outputs of T tokens and the state behind them; T is a multiple of `chunk`."""
    batch, groups, tokens, size = reader.shape
    count, width, dtype = state.shape[1], state.shape[2], reader.dtype
    share, n = count // groups, tokens // chunk
    x = inputs.x.reshape(batch, groups, n, chunk, share, width)
    b = inputs.b.reshape(batch, groups, n, chunk, size)
    c = reader.reshape(batch, groups, n, chunk, size)
    dt = _by_chunk(inputs.dt, groups, chunk)
    log_decay = dt * heads.a.reshape(1, groups, share, 1, 1)
    total = jnp.cumsum(log_decay, axis=-1)

    scores = _einsum("bgnik,bgnjk->bgnij", c, b)[:, :, None]
    weights = (scores * _decays(log_decay, itself=True) * dt[..., None, :]).astype(dtype)
    outputs = _einsum("bgmnij,bgnjmv->bnigmv", weights, x)

    later = dt * jnp.exp(total[..., -1:] - total)
    weighed = (x * jnp.transpose(later, (0, 1, 3, 4, 2))[..., None]).astype(dtype)
    added = _einsum("bgnjmv,bgnjk->nbgmvk", weighed, b)
    kept = jnp.exp(jnp.moveaxis(total[..., -1], 3, 0))[..., None, None]
    first = state.reshape(batch, groups, share, width, size)
    before, _, last = _states_before(first, kept, lambda _, part: (None, part), added)

    carried = _einsum("bgnik,nbgmvk->bnigmv", c, before.astype(dtype))
    outputs += jnp.transpose(jnp.exp(total), (0, 3, 4, 1, 2))[..., None] * carried
    outputs += heads.d.reshape(1, 1, 1, groups, share, 1) * jnp.transpose(x, (0, 2, 3, 1, 4, 5))
    return outputs.reshape(batch, tokens, count, width), last.reshape(state.shape)


def unit_lower_inverse(strict: Float32[Array, "*b n n"]) -> Float32[Array, "*b n n"]:
    """(I + A)^-1 of strictly lower triangular A, n a power of two: blocks of 1, 2, 4, ... are merged.

    The inverse of [[P, 0], [C, Q]] is [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]].
    """
    *rows, n, _ = strict.shape
    inverse = jnp.ones((*rows, n, 1, 1), jnp.float32)
    size = 1
    while size < n:
        pairs = n // (2 * size)
        blocks = strict.reshape(*rows, pairs, 2, size, pairs, 2, size)
        # The blocks on the diagonal, by a sum: the gradient of a gather is a slow scatter.
        same = jnp.eye(pairs, dtype=bool).reshape(*(1,) * len(rows), pairs, 1, pairs, 1)
        below = jnp.sum(jnp.where(same, blocks[..., :, 1, :, :, 0, :], 0.0), axis=-2)
        halves = inverse.reshape(*rows, pairs, 2, size, size)
        top, bottom = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -_einsum("...ij,...jk,...kl->...il", bottom, below, top)
        upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def gated_delta_prefill(
    state: Float32[Array, "B H V K"],
    inputs: gated_delta.Inputs,
    reader: Float[Array, "B G T K"],
    heads: gated_delta.Heads,
    chunk: int = CHUNK,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H V K"]]:
    """Outputs of T tokens and the state behind them; T is a multiple of `chunk`, a power of two.

    A chunk adds U^T K to a state S with U = (I + A)^-1 (V' - K' S^T): both factors of the bracket are
    multiplied by the inverse for all chunks at once.
    """
    batch, groups, tokens, size = reader.shape
    count, width, dtype = state.shape[1], state.shape[2], reader.dtype
    share, n = count // groups, tokens // chunk
    v = jnp.moveaxis(inputs.v.reshape(batch, groups, n, chunk, share, width), 4, 2)
    k = inputs.k.reshape(batch, groups, n, chunk, size)
    q = reader.reshape(batch, groups, n, chunk, size)
    beta = _by_chunk(inputs.beta, groups, chunk)
    log_decay = _by_chunk(inputs.log_decay, groups, chunk)
    total = jnp.cumsum(log_decay, axis=-1)
    decay = _decays(log_decay, itself=True)

    gram = _einsum("bgnik,bgnjk->bgnij", k, k)[:, :, None]
    strict = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
    inverse = unit_lower_inverse(jnp.where(strict, beta[..., None] * decay * gram, 0.0)).astype(dtype)
    values = _einsum("bgmnij,bgmnjv->nbgmiv", inverse, (beta[..., None] * v).astype(dtype))
    arriving = (beta * jnp.exp(total))[..., None] * k[:, :, None]
    keys = _einsum("bgmnij,bgmnjk->nbgmik", inverse, arriving.astype(dtype)).astype(dtype)
    leaving = (jnp.exp(total[..., -1:] - total)[..., None] * k[:, :, None]).astype(dtype)
    kept = jnp.exp(jnp.moveaxis(total[..., -1], 3, 0))[..., None, None]

    def advance(before: Array, part: tuple) -> tuple[Array, Array]:
        values, keys, leaving = part
        updates = values - _einsum("bgmik,bgmvk->bgmiv", keys, before.astype(dtype))
        updates = updates.astype(dtype)
        return updates, _einsum("bgmiv,bgmik->bgmvk", updates, leaving)

    first = state.reshape(batch, groups, share, width, size)
    parts = (values, keys, jnp.moveaxis(leaving, 3, 0))
    before, updates, last = _states_before(first, kept, advance, parts)

    scores = _einsum("bgnik,bgnjk->bgnij", q, k)[:, :, None]
    outputs = _einsum("bgmnij,nbgmjv->bnigmv", (decay * scores).astype(dtype), updates)
    carried = _einsum("bgnik,nbgmvk->bnigmv", q, before.astype(dtype))
    outputs += jnp.transpose(jnp.exp(total), (0, 3, 4, 1, 2))[..., None] * carried
    return outputs.reshape(batch, tokens, count, width), last.reshape(state.shape)


PREFILLS = {"mamba2": mamba2_prefill, "gated_delta": gated_delta_prefill}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StreamLayer:
    """A recurrent layer whose state and convolution columns go on from the window before.

    state: of the row so far. conv: as in `RecurrentLayer`. recurrence: a key of PREFILLS.
    """

    state: Float32[Array, "B H V K"]
    conv: Float[Array, "B W C"]
    recurrence: str = static()

    def recur(
        self, recurrence: ModuleType, inputs: Any, reader: Array, heads: Any, segment: Segment
    ) -> tuple[Float32[Array, "B T H V"], "StreamLayer"]:
        """Outputs of a window of whole rows, and the layer behind it."""
        outputs, state = PREFILLS[self.recurrence](self.state, inputs, reader, heads)
        return outputs, replace(self, state=state)


def stream_layers(model: HybridModel, batch: int, dtype) -> tuple:
    """A layer of zeros for every recurrent layer of the model, None elsewhere."""

    def layer(spec: LayerSpec) -> StreamLayer | None:
        if spec is None:
            return None
        assert isinstance(spec, RecurrentSpec), "models with attention are not trained here"
        return StreamLayer(
            state=jnp.zeros((batch, spec.heads, spec.head_dim, spec.d_state), jnp.float32),
            conv=jnp.zeros((batch, spec.conv_kernel - 1, spec.conv_channels), dtype),
            recurrence=spec.recurrence,
        )

    return tuple(layer(spec) for spec in model.cache_specs())
