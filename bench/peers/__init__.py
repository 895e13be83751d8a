"""Kernels of other projects, timed beside ours. Nothing of theirs is in this repository: see `loading`."""

import importlib.metadata
import json
from pathlib import Path

from bench.peers.base import TOLERANCE, Factory, error

__all__ = ["TOLERANCE", "error", "find", "versions"]


def versions(folder: Path) -> dict[str, str]:
    """Versions of PyTorch, Triton and the peers, the latter from `versions.json` in their folder."""
    listed = folder / "versions.json"
    packages = {package: importlib.metadata.version(package) for package in ("torch", "triton")}
    return packages | (json.loads(listed.read_text()) if listed.exists() else {})


def find(name: str, recurrence: str, tokens: int) -> Factory:
    """The peer of that name for a recurrence: its kernel of one token a step, or of several."""
    from bench.peers import flashinfer, gated_delta, mamba2

    for peer in (*mamba2.PEERS, *gated_delta.PEERS, *flashinfer.PEERS):
        if (peer.name, peer.recurrence, peer.windows) == (name, recurrence, tokens > 1):
            return peer
    raise ValueError(f"no peer {name!r} for {recurrence} with {tokens} tokens a step")
