"""A model whose text is known without running it, for tests of everything around the model."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replayssm_jax.api import Loaded
from replayssm_jax.cache import init_cache
from replayssm_jax.config import DEFAULT_REPLAY

VOCAB = 257


@dataclass(frozen=True)
class ChainConfig:
    vocab_size: int
    max_position_embeddings: int | None


def successor(token, position, vocab=VOCAB):
    """The most likely token after `token` at `position`: one wrong token or position changes the rest."""
    return (token * 31 + position * 17 + 5) % vocab


def chain(prompt: list[int], count: int, vocab: int = VOCAB) -> list[int]:
    """Greedy continuation of a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(successor(tokens[-1], len(tokens) - 1, vocab))
    return tokens[len(prompt) :]


class ChainModel(nnx.Module):
    """Logits fall off linearly from the successor of the last token, and are NaN after `bad_token`.

    A `script` replaces the successors: it follows any prompt of one token, over and over.
    """

    def __init__(self, vocab: int, bad_token: int, script: list[int]):
        self.vocab = vocab
        self.bad_token = nnx.Param(jnp.int32(bad_token))
        self.script = nnx.Param(jnp.asarray(script + [0] * (64 - len(script)), jnp.int32))
        self.script_length = nnx.Param(jnp.int32(len(script)))

    def __call__(self, tokens, segment, layers):
        return jnp.stack([tokens, segment.positions], axis=-1).astype(jnp.float32), layers

    def logits(self, hidden):
        token, position = hidden[..., 0].astype(jnp.int32), hidden[..., 1].astype(jnp.int32)
        scripted = jnp.take(self.script[...], position % jnp.maximum(self.script_length[...], 1))
        best = jnp.where(self.script_length[...] > 0, scripted, successor(token, position, self.vocab))[
            ..., None
        ]
        ids = jax.lax.broadcasted_iota(jnp.int32, (*token.shape, self.vocab), token.ndim)
        logits = -((ids - best) % self.vocab).astype(jnp.float32) - 1
        return jnp.where((token == self.bad_token[...])[..., None], jnp.nan, logits)

    def init_cache(self, batch, max_length, replay=DEFAULT_REPLAY, *, flush_at=None, seed=0):
        return init_cache(
            (), (), batch, max_length, replay=replay, dtype=jnp.float32, flush_at=flush_at, seed=seed
        )


def loaded_chain(
    *, vocab=VOCAB, tokenizer=None, stop_ids=(), vocab_size=None, context=None, bad_token=-1, script=()
) -> Loaded:
    return Loaded(
        model=ChainModel(vocab, bad_token, list(script)),
        config=ChainConfig(vocab, context),
        tokenizer=tokenizer,
        stop_ids=tuple(stop_ids),
        vocab_size=vocab if vocab_size is None else vocab_size,
        path=Path(),
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, 256 in all, and `<end>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
