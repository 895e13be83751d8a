"""From what a user names to a checkpoint directory on this machine."""

import importlib.resources
import os
import re
from pathlib import Path

from models.config import CheckpointError

# owner/name or name, as the hub spells repositories; anything else can only be a path.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def embedded_names() -> tuple[str, ...]:
    """Names of the checkpoints that ship with the package."""
    folder = _embedded()
    if not folder.is_dir():
        return ()
    return tuple(sorted(item.name for item in folder.iterdir() if (item / "config.json").is_file()))


def resolve_source(source: str | os.PathLike) -> Path:
    """The directory of a checkpoint: a path, an embedded name, or a hub name, which is downloaded.

    Raises CheckpointError, with the reason, for a name that is none of these or cannot be fetched.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CheckpointError(f"{path} is a file; name the checkpoint's directory")
    name = os.fspath(source)
    if name in embedded_names():
        return _embedded() / name
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(f"{name} does not exist; {_known()}")
    return _download(name)


def _download(name: str) -> Path:
    # Imported here: most sources need no hub client.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_WANTED, etag_timeout=5))
    except Exception as problem:  # the client's errors share no base with those of its transport
        reason = str(problem).strip().split("\n")[0] or type(problem).__name__
        raise CheckpointError(
            f"{name} is no directory and could not be fetched from the Hugging Face hub ({reason});"
            f" {_known()}"
        ) from problem


def _known() -> str:
    return f"give a directory, a hub name, or an embedded name: {', '.join(embedded_names()) or 'none here'}"


def _embedded() -> Path:
    return Path(str(importlib.resources.files("models"))) / "embedded"
