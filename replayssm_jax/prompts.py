"""From what users pass as prompts to lists of token ids that a model can take."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def encode_prompts(
    prompts: Any, tokenizer: Any, vocab_size: int, *, attention_mask: Any = None, continued: bool = False
) -> list[list[int]]:
    """Token ids of every prompt.

    prompts: a list of texts or of token-id lists, or an integer array [n, S]. tokenizer: None where prompts
    are token ids. vocab_size: rows of the model's embedding. attention_mask: for token ids, 1 at tokens and 0
    at pads, which may stand on either side. continued: the prompts go on with a text, so no special tokens
    are added.

    Raises ValueError naming the prompt that is not a list of ids of the vocabulary, or whose mask has a hole.
    """
    if isinstance(prompts, str | bytes):
        raise ValueError("prompts must be a list; for a single prompt write [prompt].")
    prompts = _listed(prompts)
    encoded = [_token_ids(prompt, f"prompt {i}", tokenizer, continued) for i, prompt in enumerate(prompts)]
    if attention_mask is not None:
        if any(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("attention_mask goes with token ids, but a prompt is a text.")
        encoded = _without_pads(encoded, attention_mask)
    for i, ids in enumerate(encoded):
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(
                f"prompt {i} has the token id {wrong[0]}, outside the vocabulary 0..{vocab_size - 1}."
            )
    return encoded


def refuse_empty(encoded: Sequence[Sequence[int]]) -> None:
    """Raises ValueError when there is no prompt, or one without a token."""
    if not encoded:
        raise ValueError("prompts is empty: give at least one prompt.")
    for i, ids in enumerate(encoded):
        if not ids:
            raise ValueError(
                f"prompt {i} is empty: give it at least one token, such as the beginning-of-text token."
            )


def _listed(prompts: Any) -> list:
    try:
        return list(prompts)
    except TypeError:
        kind = type(prompts).__name__
        raise ValueError(f"prompts must be a list of texts or of token-id lists, got {kind}.") from None


def _token_ids(prompt: Any, name: str, tokenizer: Any, continued: bool) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name} is a text, but the checkpoint has no tokenizer: pass token ids.")
        try:
            prompt.encode()
        except UnicodeEncodeError as problem:
            wrong = prompt[problem.start]
            raise ValueError(
                f"{name} has {wrong!r} at position {problem.start}, which is no Unicode character."
            ) from None
        return list(tokenizer(prompt, add_special_tokens=not continued)["input_ids"])
    array = np.asarray(prompt if hasattr(prompt, "__array__") else _listed_ids(prompt, name))
    if array.size == 0:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a text or a list of integer token ids, got {array.dtype} values.")
    return array.tolist()


def _listed_ids(prompt: Any, name: str) -> list:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ValueError(f"{name} must be a text or a list of token ids, got {prompt!r}.")
    if any(not isinstance(token, int | np.integer) or isinstance(token, bool) for token in prompt):
        raise ValueError(
            f"{name} must be a text or a list of token ids, but some of its items are no integers."
        )
    return list(prompt)


def _without_pads(encoded: list[list[int]], attention_mask: Any) -> list[list[int]]:
    masks = [np.asarray(row) for row in _listed(attention_mask)]
    if len(masks) != len(encoded):
        raise ValueError(f"attention_mask has {len(masks)} rows for {len(encoded)} prompts.")
    stripped = []
    for i, (ids, mask) in enumerate(zip(encoded, masks, strict=True)):
        if mask.shape != (len(ids),) or not np.isin(mask, (0, 1)).all():
            raise ValueError(
                f"attention_mask of prompt {i} must be {len(ids)} zeros and ones, one for each of its ids."
            )
        real = np.flatnonzero(mask)
        if real.size and real[-1] - real[0] + 1 != real.size:
            raise ValueError(
                f"attention_mask of prompt {i} has a hole: its ones must stand together, pads around them."
            )
        stripped.append([ids[at] for at in real])
    return stripped
