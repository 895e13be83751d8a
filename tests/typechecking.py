"""beartype for jaxtyping's import hook, without checks while JAX rebuilds a pytree."""

import functools
import sys
from collections.abc import Callable
from typing import TypeVar

from beartype import beartype

Function = TypeVar("Function", bound=Callable)


def typechecker(function: Function) -> Function:
    """Checks arguments and results as beartype does, except of a dataclass that JAX unflattens.

    JAX calls the constructor of a registered dataclass with placeholders, shapes, shardings, and arrays with
    an axis more (scan) or less (vmap): the annotations of its fields hold only where our code constructs it.
    """
    checked = beartype(function)
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(function)
    def check_own_calls(*args, **kwargs):
        return function(*args, **kwargs) if _called_by_jax() else checked(*args, **kwargs)

    return check_own_calls  # pyright: ignore[reportReturnType]


def _called_by_jax() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("jaxtyping."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("jax.")
