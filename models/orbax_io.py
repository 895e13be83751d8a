"""The converted form of a checkpoint: parameters in layout and dtype of their own, in an Orbax directory."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from models.config import CheckpointError

MARKER = "replayssm.json"
VERSION = 1
_FOLDER = "parameters"

ParameterPath = tuple[str | int, ...]


def is_converted(directory: Path) -> bool:
    """True for a directory that `write_parameters` filled."""
    return (directory / MARKER).is_file()


def write_parameters(directory: Path, parameters: Mapping[ParameterPath, np.ndarray]) -> None:
    """Writes all parameters, bit for bit, below an existing directory."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            (directory / _FOLDER).absolute(), {_key(path): value for path, value in parameters.items()}
        )
    (directory / MARKER).write_text(json.dumps({"version": VERSION}))


def read_parameters(directory: Path) -> dict[ParameterPath, np.ndarray]:
    """All parameters of a converted checkpoint, by their path in the model.

    Raises CheckpointError for another version of the layout and for a directory that Orbax cannot read.
    """
    import orbax.checkpoint as ocp

    try:
        version = json.loads((directory / MARKER).read_text())["version"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{directory / MARKER} cannot be read") from None
    if version != VERSION:
        raise CheckpointError(
            f"{directory} has the layout version {version}; this library reads version {VERSION}"
        )
    folder = (directory / _FOLDER).absolute()
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            names = checkpointer.metadata(folder).item_metadata.tree
            restore = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            tree = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=restore))
    except Exception as problem:  # tensorstore and Orbax raise many kinds
        reason = str(problem).strip().split("\n")[0]
        raise CheckpointError(f"the parameters in {folder} cannot be read: {reason}") from problem
    return {_path(name): value for name, value in tree.items()}


def _key(path: ParameterPath) -> str:
    return ".".join(str(part) for part in path)


def _path(key: str) -> ParameterPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))
