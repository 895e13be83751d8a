"""Loading by one call: what `rs.load` and `rs.convert` do."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint in memory.

    model: the Flax model; `model.config` is `config`. tokenizer: a transformers tokenizer, or None when the
    checkpoint has none. stop_ids: token ids that end a text, from config.json, generation_config.json and the
    tokenizer. vocab_size: ids below it mean a token; rows of the output head beyond it are padding.
    path: the checkpoint's directory.
    """

    model: nnx.Module
    config: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    vocab_size: int
    path: Path


def load(source: str | os.PathLike, *, dtype: Any | None = None, mtp: bool = True) -> Loaded:
    """Loads a hybrid model with its tokenizer.

    source: a checkpoint directory (published or converted), an embedded name such as "tiny-nemotron-h", or a
    name on the Hugging Face hub. dtype: of parameters and activations; None means float32 on a CPU and the
    stored dtype elsewhere. mtp: load the multi-token-prediction head where the checkpoint has one.
    Raises ValueError with one sentence that names everything in the checkpoint that does not fit.
    """
    from models.checkpoint import load_model
    from models.sources import resolve_source
    from models.tokenizer import load_tokenizer

    path = resolve_source(source)
    model = load_model(path, dtype, mtp=mtp)
    config = model.config
    tokenizer = load_tokenizer(path)
    stop_ids, vocab_size = config.eos_token_ids, config.vocab_size
    if tokenizer is not None:
        vocab_size = min(vocab_size, len(tokenizer))
        stop_ids += () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Loaded(
        model=model,
        config=config,
        tokenizer=tokenizer,
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        vocab_size=vocab_size,
        path=path,
    )


def convert(source: str | os.PathLike, destination: str | os.PathLike) -> Path:
    """Writes a checkpoint as an Orbax directory that `load` reads back identically; returns the destination.

    Raises ValueError when the source does not load or the destination is not an empty directory; nothing
    half-written stays behind.
    """
    from models.checkpoint import convert as write

    return write(source, destination)
