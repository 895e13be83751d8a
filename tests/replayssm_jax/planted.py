"""A drafter that knows the text and errs where it is told to."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from replayssm_jax.speculative import Drafter, Drafts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Planted(Drafter):
    """Proposes the text of each row's prompt, with one wrong token a round.

    texts: int32 [N, S], prompt and continuation of every prompt. plan: int32 [N, R, 2], for every round of a
    prompt the number of drafts and the place of the wrong one, which is also the number of drafts that stand.
    The first `rounds` of it come over and over.
    """

    texts: jax.Array
    plan: jax.Array
    rounds: jax.Array
    vocab: int = field(metadata={"static": True})

    @classmethod
    def of(cls, prompts, continuations, plan, vocab) -> "Planted":
        """plan: a list of (drafts, place) for every prompt. Small ones share their shapes, and programs."""
        whole = [[*p, *c] for p, c in zip(prompts, continuations, strict=True)]
        count, rounds = max(12, len(whole)), len(plan[0])
        texts = np.zeros((count, max(128, *map(len, whole))), np.int32)
        padded = np.zeros((count, max(64, rounds), 2), np.int32)
        for i, (text, places) in enumerate(zip(whole, plan, strict=True)):
            texts[i, : len(text)] = text
            padded[i, :rounds] = places
        return cls(jnp.asarray(texts), jnp.asarray(padded), jnp.int32(rounds), vocab)

    def init(self, model, batch, max_length, replay):
        """Rounds so far, int32 [B]."""
        return jnp.zeros((batch,), jnp.int32)

    def draft(self, model, state, token, position, prompt, params, count):
        drafts, wrong = jnp.moveaxis(self.plan[prompt, state % self.rounds], 1, 0)
        place = jnp.arange(count, dtype=jnp.int32)[None, :]
        column = jnp.minimum(position[:, None] + 1 + place, self.texts.shape[1] - 1)
        true = self.texts[prompt[:, None], column]
        others = (true + 1 + state[:, None] % (self.vocab - 1)) % self.vocab
        tokens = jnp.where(place == wrong[:, None], others, true)
        return Drafts(tokens, None, jnp.minimum(drafts, count)), state + 1
