"""Kernels of other projects, timed beside ours. Nothing of theirs is in this repository: see `loading`."""

from bench.peers.base import TOLERANCE, Factory, error

__all__ = ["TOLERANCE", "error", "find"]


def find(name: str, recurrence: str) -> Factory:
    """The peer of that name for a recurrence."""
    from bench.peers import flashinfer, gated_delta, mamba2

    for peer in (*mamba2.PEERS, *gated_delta.PEERS, *flashinfer.PEERS):
        if (peer.name, peer.recurrence) == (name, recurrence):
            return peer
    raise ValueError(f"no peer {name!r} for {recurrence}")
