"""Multi-token-prediction heads: one more layer that reads the trunk and drafts the tokens after the next.

Entry p of a head joins the embedding of token p + 1 with the trunk's hidden state at p, after the trunk's
final norm; its output, through the trunk's output head, predicts token p + 2 (arXiv 2412.19437, section 2.2).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.layers.norm import RMSNorm
from models.layers.program import run_layers
from models.layers.projection import bias_free
from models.layers.residual import entered
from replayssm_jax.backend import resolve
from replayssm_jax.cache import AttentionLayer, empty_attention, static
from replayssm_jax.config import EagerConfig
from replayssm_jax.replay import Segment, fresh_segment
from replayssm_jax.speculative import Drafter, Drafts, at_index, draw_draft

Caches = tuple[AttentionLayer | None, ...]


class MTPHead(nnx.Module):
    """norm(layers(proj([embed_norm(embedding), hidden_norm(hidden)]))); embedding and output head are shared.

    layers: blocks as the trunk's, none of them recurrent. norm: makes an RMS norm of the family.
    """

    def __init__(self, size: int, layers: Sequence, *, norm: Callable[[], RMSNorm], dtype, rngs: nnx.Rngs):
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.proj = bias_free(2 * size, size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(layers)

    def init_caches(self, batch: int, max_length: int, dtype) -> Caches:
        """Empty keys and values of `batch` rows; None for layers without attention."""
        specs = (layer.spec for layer in self.layers)
        return tuple(spec and empty_attention(spec, batch, max_length, dtype) for spec in specs)

    def join(self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the first layer reads: the embedding half comes first."""
        return self.proj(jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1))

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        segment: Segment,
        caches: Caches | None,
    ) -> tuple[Float[Array, "B T D"], Caches]:
        """Normed outputs of T entries from `segment.position` on, and the caches moved on (None: none)."""
        x, moved = run_layers(self.layers, self.join(embedded, hidden), segment, caches)
        return entered(self.norm, x)[1], moved


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPState:
    """What a head keeps of each row.

    caches: keys and values of entry p in column p; entries below position - waiting are final, the others are
    scratch. tokens, hidden: of the last `waiting` committed positions, from column 0 on; hidden: the trunk's.
    waiting: 0 in an empty row; an entry waits until the token after it is known.
    kernels: the GPU kernels serve the target's cache, so they may serve the head's layers.
    """

    caches: Caches
    tokens: Int32[Array, "B W"]
    hidden: Float[Array, "B W D"]
    waiting: Int32[Array, " B"]
    kernels: bool = static(default=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPDrafter(Drafter):
    """Drafts with the target's own head: from trunk hidden first, then from the head's own normed output.

    Entries that the head fed itself are written again from the trunk's hidden states when their tokens stand.
    """

    def init(self, model, batch, max_length, replay):
        dtype, size = model.embed.weight.dtype, model.embed.weight.shape[1]
        method = EagerConfig() if replay is None else replay
        served = resolve(method, model.cache_specs(), batch, dtype).implementation == "pallas"
        return MTPState(
            caches=model.mtp.init_caches(batch, max_length, dtype),
            tokens=jnp.zeros((batch, method.window), jnp.int32),
            hidden=jnp.zeros((batch, method.window, size), dtype),
            waiting=jnp.zeros((batch,), jnp.int32),
            kernels=served,
        )

    def prefill(self, model, state, tokens, hidden, lengths, position):
        # What waits and the chunk in one sequence; all of it but the newest entry knows its token now.
        window, size = state.tokens.shape[1], tokens.shape[1]
        column = jnp.arange(window + size, dtype=jnp.int32)[None, :]
        waits = column < state.waiting[:, None]
        source = jnp.clip(
            jnp.where(waits, column, window + column - state.waiting[:, None]), 0, window + size - 1
        )
        text = jnp.take_along_axis(jnp.concatenate([state.tokens, tokens], axis=1), source, axis=1)
        trunk = jnp.concatenate([state.hidden, hidden.astype(state.hidden.dtype)], axis=1)
        trunk = jnp.take_along_axis(trunk, source[:, :, None], axis=1)
        given = lengths > 0
        known = jnp.where(given, state.waiting + lengths - 1, 0)
        segment = fresh_segment(text.shape[0], text.shape[1] - 1, known)
        segment = dataclasses.replace(segment, position=position - state.waiting)
        _, caches = model.mtp(model.embed(text[:, 1:]), trunk[:, :-1], segment, state.caches)
        newest = dataclasses.replace(
            state,
            tokens=state.tokens.at[:, 0].set(at_index(text, known)),
            hidden=state.hidden.at[:, 0].set(at_index(trunk, known)),
            waiting=jnp.ones_like(state.waiting),
        )
        return dataclasses.replace(_where(given, newest, state), caches=caches)

    def draft(self, model, state, token, position, prompt, params, count):
        last = jnp.maximum(state.waiting - 1, 0)
        rows = jnp.arange(token.shape[0], dtype=jnp.int32)
        following = jnp.roll(state.tokens, -1, axis=1).at[rows, last].set(token)
        entries = functools.partial(_entries, model, kernels=state.kernels)
        outputs, caches = entries(state.caches, following, state.hidden, position - state.waiting)
        output = at_index(outputs, last)
        logits = model.logits(output)
        q = jnp.zeros((logits.shape[0], count, logits.shape[1]), jnp.float32)
        draft, q = draw_draft(logits, prompt, position + 1, params, q, 0)

        def one_more(carry, place):
            draft, output, caches, q = carry
            outputs, caches = entries(caches, draft[:, None], output[:, None], position + place - 2)
            draft, q = draw_draft(model.logits(outputs[:, 0]), prompt, position + place, params, q, place - 1)
            return (draft, outputs[:, 0], caches, q), draft

        places = jnp.arange(2, 1 + count, dtype=jnp.int32)
        (_, _, caches, q), later = jax.lax.scan(one_more, (draft, output, caches, q), places)
        drafts = Drafts(
            tokens=jnp.concatenate([draft[:, None], later.T], axis=1),
            probabilities=q,
            count=jnp.full_like(token, count),
        )
        return drafts, dataclasses.replace(state, caches=caches)

    def commit(self, model, state, tokens, hidden, accepted, position):
        hidden = hidden.astype(state.hidden.dtype)
        kept = dataclasses.replace(state, tokens=tokens, hidden=hidden, waiting=accepted)
        return dataclasses.replace(_where(accepted > 0, kept, state), caches=state.caches)


def _entries(
    model: Any,
    caches: Caches,
    tokens: Int32[Array, "B T"],
    hidden: Float[Array, "B T D"],
    position: Int32[Array, " B"],
    *,
    kernels: bool,
) -> tuple[Float[Array, "B T D"], Caches]:
    """The head's normed outputs of T entries from `position` on, as a step makes them.

    tokens: those after the entries. All entries are stored, those that mean nothing too: they are scratch.
    """
    batch, count = tokens.shape
    segment = fresh_segment(batch, count)
    segment = dataclasses.replace(segment, position=position, mode="step", head=kernels)
    return model.mtp(model.embed(tokens), hidden, segment, caches)


def _where(rows, new: MTPState, old: MTPState) -> MTPState:
    """`new` in the given rows, caches left out."""

    def pick(first, second):
        return jnp.where(jnp.expand_dims(rows, tuple(range(1, first.ndim))), first, second)

    bare = (dataclasses.replace(state, caches=()) for state in (new, old))
    return jax.tree.map(pick, *bare)
