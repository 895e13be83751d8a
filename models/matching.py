"""Which tensor on disk is which parameter: names, shapes and tied heads, all judged before any read."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from models.config import CheckpointError
from models.safetensors_io import Tensor, listing
from models.weights import Weight

# Longest first. Text-only files of multimodal training stacks keep their language_model level.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "backbone.", "model.")
# Vision towers beside the text model, and a multi-token-prediction head that is not asked for.
IGNORED = ("visual.",)
MTP = "mtp."
FLOATS = ("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")

_HEAD = "lm_head.weight"
_ROWS = 4096


def full_name(prefix: str, name: str) -> str:
    """A tensor's name on disk: only those of the trunk have the prefix."""
    return prefix + name if _in_trunk(name) else name


def has_mtp(found: Iterable[str]) -> bool:
    """True where some tensor belongs to a multi-token-prediction head."""
    return any(_split(name)[1].startswith(MTP) for name in found)


def match(directory: Path, found: Mapping[str, Tensor], expected: Mapping[str, Weight]) -> dict[str, Tensor]:
    """The tensor of every expected name (without prefix).

    An output head beside tied embeddings must hold the same values and is then left out; one that differs is
    refused, since either the flag or the tensor is wrong. Raises one CheckpointError that names every
    missing, unknown, doubled or unreadable tensor and every wrong shape.
    """
    problems: list[str] = []
    matched: dict[str, Tensor] = {}
    unknown = []
    ignored = IGNORED if any(name.startswith(MTP) for name in expected) else (*IGNORED, MTP)
    levels: Counter[str] = Counter()
    for name, tensor in found.items():
        level, short = _split(name)
        if short.startswith(ignored):
            continue
        if short in matched:
            problems.append(f"{matched[short].name} and {name} are the same parameter")
        elif short in expected or short == _HEAD:
            matched[short] = tensor
            levels[level] += _in_trunk(short)
        else:
            unknown.append(name)
    prefix = levels.most_common(1)[0][0] if levels else ""
    missing = [full_name(prefix, name) for name in expected if name not in matched]
    if missing:
        problems.insert(0, f"missing {listing(missing)}")
    if unknown:
        problems.append(f"unknown {listing(unknown)}")
    problems += [
        problem
        for name, tensor in matched.items()
        if name in expected
        for problem in _misfit(tensor, expected[name])
    ]
    if not problems and _HEAD in matched and _HEAD not in expected:
        problems += _different_head(matched, expected)
    if problems:
        raise CheckpointError(f"the weights in {directory} do not fit its config.json: {'; '.join(problems)}")
    return {name: matched[name] for name in expected}


def _in_trunk(name: str) -> bool:
    return name != _HEAD and not name.startswith(MTP)


def _split(name: str) -> tuple[str, str]:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return prefix, name.removeprefix(prefix)
    return "", name


def _misfit(tensor: Tensor, weight: Weight) -> list[str]:
    if tensor.dtype not in FLOATS:
        return [f"{tensor.name} has the unsupported dtype {tensor.dtype}"]
    if tensor.shape != weight.shape:
        return [f"{tensor.name} has the shape {tensor.shape}, expected {weight.shape}"]
    return []


def _different_head(matched: Mapping[str, Tensor], expected: Mapping[str, Weight]) -> list[str]:
    table = next(name for name, weight in expected.items() if weight.path == ("embed", "weight"))
    head, embedding = matched[_HEAD], matched[table]
    if head.shape == embedding.shape and head.dtype in FLOATS:
        first, second = head.read(), embedding.read()
        same = (
            np.array_equal(first[i : i + _ROWS].astype(np.float32), second[i : i + _ROWS].astype(np.float32))
            for i in range(0, len(first), _ROWS)
        )
        if all(same):
            return []
    return [f"tie_word_embeddings is true, but {head.name} differs from {embedding.name}"]
