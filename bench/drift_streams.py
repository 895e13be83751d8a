"""What the models of `bench.precision_drift` decode: held-out text and fresh tasks, cut into streams."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.drift_tasks import INTERVALS, TASKS, answers, task_stream
from bench.drift_text import KINDS


@dataclasses.dataclass(frozen=True)
class Streams:
    """Texts of equal length, one token more than is decoded.

    names: what each is, e.g. "play 0". tokens: [texts, length + 1]. sizes: bytes of each token.
    kinds: as `task_stream` gives them, of the last `kinds.shape[0]` texts.
    """

    names: tuple[str, ...]
    tokens: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray

    @property
    def texts(self) -> int:
        """Number of texts without tasks."""
        return len(self.names) - self.kinds.shape[0]

    @property
    def length(self) -> int:
        """Tokens that are decoded."""
        return self.tokens.shape[1] - 1


def _cut(tokens: np.ndarray, count: int, size: int, kind: str) -> np.ndarray:
    if tokens.size < count * size:
        raise ValueError(
            f"{count} texts of {size} tokens need more than the {tokens.size} held out of {kind}."
        )
    return tokens[: count * size].reshape(count, size)


def byte_streams(data: Path, length: int, texts: int, tasks: int, seed: int = 1000) -> Streams:
    """`texts` streams of each kind of held-out text of `bench.drift_text`, then `tasks` streams of tasks."""
    arrays = np.load(data)
    held = [arrays[f"held_{kind}"] for kind in KINDS]
    rows = [_cut(body, texts, length + 1, kind) for body, kind in zip(held, KINDS, strict=True)]
    made = [
        task_stream(held[index % len(held)].tobytes(), length + 1, seed + index) for index in range(tasks)
    ]
    names = [f"{kind} {index}" for kind in KINDS for index in range(texts)]
    names += [f"tasks {index}" for index in range(tasks)]
    tokens = np.concatenate([*rows, *(body[None] for body, _ in made)]).astype(np.int32)
    kinds = np.stack([kinds for _, kinds in made]) if made else np.zeros((0, length + 1), np.uint8)
    return Streams(tuple(names), tokens, np.ones(tokens.shape, np.int32), kinds)


def token_streams(data: Path, tokenizer: Path, length: int, texts: int) -> Streams:
    """`texts` streams of each kind of held-out text of `bench.drift_text`, in tokens of a tokenizer.json."""
    encoder, arrays, rows, sizes = Tokenizer.from_file(str(tokenizer)), np.load(data), [], []
    for kind in KINDS:
        # Byte-level: the ASCII characters that a token stands for are its bytes.
        encoded = encoder.encode(arrays[f"held_{kind}"].tobytes().decode("ascii"))
        sizes.append(np.asarray([end - start for start, end in encoded.offsets], np.int32))
        rows.append(np.asarray(encoded.ids, np.int32))
    tokens, spans = (
        np.concatenate([_cut(row, texts, length + 1, kind) for row, kind in zip(part, KINDS, strict=True)])
        for part in (rows, sizes)
    )
    names = tuple(f"{kind} {index}" for kind in KINDS for index in range(texts))
    return Streams(names, tokens, spans, np.zeros((0, length + 1), np.uint8))


def numbers(values: np.ndarray, digits: int = 6) -> Any:
    """Nested lists of the values to so many digits; None for what is not finite."""
    if values.ndim:
        return [numbers(value, digits) for value in values]
    return float(f"{values:.{digits}g}") if np.isfinite(values) else None


def text_edges(length: int) -> list[int]:
    """Where intervals of positions begin: 0, 1024, 2048, 4096, ... below `length`."""
    edges = [0]
    while (following := max(1024, 2 * edges[-1])) < length:
        edges.append(following)
    return edges


def cells(kinds: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Whole answers that are right, and those asked for: int [..., tasks, intervals, 2].

    kinds: of the streams' tokens, [texts, length + 1]. right: bool [..., texts, length], whether the token
    after each was predicted.
    """
    counts = np.zeros((*right.shape[:-2], len(TASKS), len(INTERVALS), 2), np.int64)
    starts = [low for low, _ in INTERVALS]
    for text in range(kinds.shape[0]):
        found = np.asarray([span for span in answers(kinds[text]) if span[2] <= kinds.shape[1]], np.int64)
        task, first, last = found.reshape(-1, 3).T
        wrong = np.cumsum(~right[..., text, :], axis=-1)
        wrong = np.concatenate([np.zeros_like(wrong[..., :1]), wrong], axis=-1)
        whole = wrong[..., last - 1] == wrong[..., first - 1]
        place: Any = (..., task, np.searchsorted(starts, first, side="right") - 1)
        np.add.at(counts[..., 1], place, 1)
        np.add.at(counts[..., 0], place, whole)
    return counts
