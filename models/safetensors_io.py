"""Safetensors files read through a memory map: every dtype JAX knows, bit for bit, without torch.

The `safetensors` package reads no 8-bit floats into NumPy, so the header (a little-endian length and one
JSON object, https://github.com/huggingface/safetensors#format) is read here.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from models.config import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F64": np.float64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: its file, byte range in that file, stored dtype name and shape.

    Nothing is read yet.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> np.ndarray:
        """The tensor as a read-only array over the mapped file, in its stored dtype.

        Raises CheckpointError naming the tensor for a dtype that is not supported.
        """
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{self.name} in {self.file.name} has the unsupported dtype {self.dtype}")
        dtype = np.dtype(DTYPES[self.dtype])
        size = math.prod(self.shape)
        if self.end - self.begin != size * dtype.itemsize:
            raise CheckpointError(
                f"{self.name} in {self.file.name} takes {self.end - self.begin} bytes, but {self.dtype} of"
                f" shape {self.shape} needs {size * dtype.itemsize}"
            )
        if size == 0:
            return np.zeros(self.shape, dtype)
        raw = np.memmap(
            self.file, mode="r", offset=self.begin, shape=(self.end - self.begin,), dtype=np.uint8
        )
        return np.asarray(raw).view(dtype).reshape(self.shape)


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one file by name.

    Raises CheckpointError for a file that is cut short or has no valid header.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file.name} is cut short: it has {size} bytes, too few for its header")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            base = 8 + length
            tensors = {
                name: Tensor(
                    name=name,
                    file=file,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    begin=base + entry["data_offsets"][0],
                    end=base + entry["data_offsets"][1],
                )
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise CheckpointError(
                f"{file.name} is not a safetensors file: its header cannot be read"
            ) from None
    promised = max((tensor.end for tensor in tensors.values()), default=base)
    if size < promised:
        raise CheckpointError(
            f"{file.name} is cut short: it has {size} bytes and its header promises {promised}"
        )
    return tensors


def find_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory by their name on disk.

    An index decides alone: tensors that it does not give to a file, and files that it does not name, are
    ignored. Without an index there must be exactly one safetensors file. Raises one CheckpointError naming
    every absent or broken file and every tensor that the index promises and its file lacks.
    """
    index = directory / INDEX
    if not index.exists():
        return read_header(_only_file(directory))
    places = _read_index(index)
    problems: list[str] = []
    headers: dict[str, dict[str, Tensor]] = {}
    for name in sorted(set(places.values())):
        try:
            headers[name] = read_header(_shard(directory, name))
        except CheckpointError as problem:
            problems.append(str(problem))
    lost: dict[str, list[str]] = {}
    for tensor, name in places.items():
        if name in headers and tensor not in headers[name]:
            lost.setdefault(name, []).append(tensor)
    problems += [f"{name} lacks {listing(names)}, which {INDEX} places there" for name, names in lost.items()]
    if problems:
        raise CheckpointError("; ".join(problems))
    return {tensor: headers[name][tensor] for tensor, name in places.items()}


def listing(names: Iterable[str], limit: int = 40) -> str:
    """Names as a sentence part, cut after `limit` of them with the count of the rest."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _only_file(directory: Path) -> Path:
    single = directory / SINGLE
    if single.exists():
        return single
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = listing(file.name for file in found)
        raise CheckpointError(f"{directory} has {len(found)} safetensors files ({names}) but no {INDEX}")
    raise CheckpointError(f"{directory} has no {SINGLE} and no {INDEX}")


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        places = json.loads(index.read_text())["weight_map"]
        if not all(isinstance(name, str) for name in places.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{index.name} cannot be read: it must map tensor names to files in weight_map"
        ) from None
    return places


def _shard(directory: Path, name: str) -> Path:
    if Path(name).name != name:
        raise CheckpointError(f"{INDEX} names the file {name!r}, which is not in the checkpoint's directory")
    file = directory / name
    if not file.exists():
        raise CheckpointError(f"the shard {name} is missing from {directory}")
    return file
