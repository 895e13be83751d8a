"""How a tensor of a published checkpoint becomes a parameter of a model, and back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Where one checkpoint tensor goes.

    path: attribute names and list indices that name it. within: None where these are a parameter of the
    model, else the layer that has the tensor's columns beside those of others. shape: as stored on disk.
    transform: "none"; "transpose", a linear layer's (out, in) becomes (in, out); "conv", a depthwise
    convolution's (channels, 1, taps) becomes (taps, channels); "flatten", any shape becomes one axis.
    keep_float32: the parameter is float32 whatever the model's dtype.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    transform: Literal["none", "transpose", "conv", "flatten"] = "none"
    keep_float32: bool = False
    within: str | None = None

    @property
    def parameter(self) -> tuple[str | int, ...]:
        """Attribute names and list indices of the parameter inside the model."""
        return self.path if self.within is None else (*self.path[:-2], self.within, self.path[-1])

    def to_model(self, array: Array) -> Array:
        """The parameter's layout of a tensor in the checkpoint's layout."""
        if self.transform == "transpose":
            return array.T
        if self.transform == "conv":
            return array[:, 0, :].T
        return array.reshape(-1) if self.transform == "flatten" else array

    def to_disk(self, array: np.ndarray) -> np.ndarray:
        """The checkpoint's layout of a tensor in the parameter's layout."""
        if self.transform == "transpose":
            return array.T
        if self.transform == "conv":
            return array.T[:, None, :]
        return array.reshape(self.shape)


def linear(*path: str | int, inputs: int, outputs: int, within: str | None = None) -> Weight:
    """A bias-free linear layer, or columns of the one that `within` names."""
    shape = (outputs, inputs)
    return Weight(path=(*path, "kernel"), shape=shape, transform="transpose", within=within)


def by_parameter(weights: Iterable[Weight]) -> dict[tuple[str | int, ...], list[Weight]]:
    """The tensors of every parameter; several lie side by side along its last axis, in this order."""
    parameters = {}
    for weight in weights:
        parameters.setdefault(weight.parameter, []).append(weight)
    return parameters


def parts(array: np.ndarray, weights: Sequence[Weight]) -> list[np.ndarray]:
    """The tensors of one parameter, in its layout."""
    if len(weights) == 1:
        return [array]
    return np.split(array, np.cumsum([weight.shape[0] for weight in weights])[:-1], axis=-1)
