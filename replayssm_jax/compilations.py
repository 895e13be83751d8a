"""Counting and logging what XLA compiles."""

import contextlib
import logging
import threading

import jax

logger = logging.getLogger(__name__)

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """A context manager that counts the compilations of the current thread while it is entered.

    count: compilations over all times it was entered; a program read from JAX's persistent cache counts too.
    Each one is logged at INFO with its name and duration.
    """

    def __init__(self):
        self.count = 0
        self._thread = 0

    def __enter__(self) -> "Compilations":
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._observe)
        return self

    def __exit__(self, *exception) -> None:
        # It is gone when somebody has called jax.monitoring.clear_event_listeners().
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_duration_listener(self._observe)

    def _observe(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == _BACKEND_COMPILE and threading.get_ident() == self._thread:
            self.count += 1
            logger.info("compiled %s in %.2f s", details.get("fun_name", "a program"), duration_secs)
