"""Which backend serves a cache, and what it asks of the cache's layout."""

import logging

logger = logging.getLogger(__name__)


def resolve_implementation(implementation: str) -> str:
    """The backend that serves a request: "auto" becomes a concrete one.

    Raises ValueError when the requested backend cannot serve it, with the reason.
    """
    if implementation == "pallas":
        raise ValueError(
            'implementation="pallas" cannot be served: the GPU kernels are not wired into the jitted steps '
            'yet; use "auto" or "xla".'
        )
    return "xla"


def ring_granule(implementation: str) -> int:
    """Ring slots come in multiples of this many tokens."""
    return 1
