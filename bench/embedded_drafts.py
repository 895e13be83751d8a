"""The training loss of a multi-token-prediction head: all drafts of all positions of a window at once."""

import jax
import jax.numpy as jnp

from models.qwen3_5 import Block, GatedAttention


def shifted(x, count: int):
    """x [B, T, ...] moved `count` positions to the right, zeros before it."""
    return jnp.pad(x, ((0, 0), (count, 0)) + ((0, 0),) * (x.ndim - 2))[:, : x.shape[1]]


# Its scores take more memory than the rest of a training step.
@jax.checkpoint
def chain_attention(q, keys: list, values: list):
    """What draft s = len(keys) reads at every entry, as it does in decoding.

    keys[r], values[r] [B, T, N, D] are those of draft r + 1. Draft s at entry i comes from a chain that left
    the trunk s - 1 entries ago: it attends to draft 1 (trunk hidden) up to entry i - s + 1 and, behind it, to
    drafts 2 .. s of its own chain. Returns [B, T, Nq, D].
    """
    batch, tokens, kv_heads, width = keys[0].shape
    depth = len(keys) - 1
    grouped = q.reshape(batch, tokens, kv_heads, -1, width) * width**-0.5
    seen = jnp.tril(jnp.ones((tokens, tokens), bool), -depth)[None, None, None]
    scores = jnp.where(seen, jnp.einsum("btngd,bsnd->bngts", grouped, keys[0]), -1e30)
    own_keys = [shifted(k, depth - r) for r, k in enumerate(keys) if r > 0]
    own_values = [shifted(v, depth - r) for r, v in enumerate(values) if r > 0]
    own = [jnp.einsum("btngd,btnd->bngt", grouped, k)[..., None] for k in own_keys]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1)
    out = jnp.einsum("bngts,bsnd->btngd", weights[..., :tokens], values[0])
    for r, v in enumerate(own_values):
        share = jnp.moveaxis(weights[..., tokens + r], 3, 1)
        out += share[..., None] * v[:, :, :, None]
    return out.reshape(q.shape)


def draft_outputs(model, tokens, hidden, drafts: int) -> list:
    """Normed head outputs [B, T, D] of drafts 1 .. `drafts` at every entry i, made from token i + 1.

    tokens [B, T] are those after each entry, hidden [B, T, D] the trunk's. Draft s of entry i belongs to the
    chain that left the trunk at entry i - s + 1; entries below s - 1 mean nothing.
    """
    head = model.mtp
    (block,) = head.layers
    assert isinstance(block, Block) and isinstance(block.mixer, GatedAttention)
    embedded = model.embed(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    keys, values, outputs, source = [], [], [], hidden
    for _ in range(drafts):
        x = head.join(embedded, source)
        q, gate, k, v = block.mixer.project(block.input_norm(x), positions)
        keys.append(k)
        values.append(v)
        x = x + block.mixer.output(chain_attention(q, keys, values), gate)
        outputs.append(head.norm(x + block.mlp(block.mlp_norm(x))))
        source = shifted(outputs[-1], 1)
    return outputs


def draft_losses(model, windows, hidden, logits, drafts: int):
    """Cross-entropy in nats and greedy agreement of every draft with the trunk's own next distribution.

    windows [B, T + 1]; hidden [B, T, D] and logits [B, T, V] of its first T tokens. The target of entry i is
    the trunk's distribution at i + 1, which is what verification compares with; no gradient enters it.
    Returns float32 [drafts] twice: mean loss, and the mean over chains of "drafts 1 .. s all agree".
    """
    outputs = draft_outputs(model, windows[:, 1:-1], hidden[:, :-1], drafts)
    target = jax.lax.stop_gradient(logits[:, 1:])
    share, best = jax.nn.softmax(target), target.argmax(-1)
    nats, agreed, chain = [], [], True
    for depth, output in enumerate(outputs):
        scores = model.logits(output)
        loss = -jnp.sum(share * jax.nn.log_softmax(scores), axis=-1)
        nats.append(loss[:, depth:].mean())
        chain = shifted(chain, 1) if depth else True
        chain &= scores.argmax(-1) == best
        agreed.append(chain[:, depth:].mean())
    return jnp.stack(nats), jnp.stack(agreed)
