"""How a tensor of a published checkpoint becomes a parameter of a model, and back."""

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Where one checkpoint tensor goes.

    path: attribute names and list indices of the parameter inside the model. shape: as stored on disk.
    transform: "none"; "transpose", a linear layer's (out, in) becomes (in, out); "conv", a depthwise
    convolution's (channels, 1, taps) becomes (taps, channels); "flatten", any shape becomes one axis.
    keep_float32: the parameter is float32 whatever the model's dtype.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    transform: Literal["none", "transpose", "conv", "flatten"] = "none"
    keep_float32: bool = False

    def to_model(self, array: np.ndarray) -> np.ndarray:
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


def linear(*path: str | int, inputs: int, outputs: int) -> Weight:
    """A bias-free linear layer."""
    return Weight(path=(*path, "kernel"), shape=(outputs, inputs), transform="transpose")
