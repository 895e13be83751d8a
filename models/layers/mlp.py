"""Feed-forward layers."""

import functools

import jax
from flax import nnx
from jaxtyping import Array, Float

from models.layers.projection import Parts, bias_free, project, project_out


class MLP(nnx.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, size: int, inner: int, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=dtype, rngs=rngs)
        self.up_proj, self.down_proj = linear(size, inner), linear(inner, size)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "B T D"], *, kernels: bool = False) -> Float[Array, "B T D"] | Parts:
        """Returns the dtype of x, or parts where a GPU kernel may serve and does."""
        inner = project(self.up_proj, x, "squared relu", kernels=kernels)
        return project_out(self.down_proj, inner, kernels=kernels)


class GatedMLP(nnx.Module):
    """down(silu(gate) up) of [gate, up] = gate_up(x)."""

    def __init__(self, size: int, inner: int, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=dtype, rngs=rngs)
        self.gate_up_proj, self.down_proj = linear(size, 2 * inner), linear(inner, size)

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "B T D"], *, kernels: bool = False) -> Float[Array, "B T D"] | Parts:
        """Returns the dtype of x, or parts where a GPU kernel may serve and does."""
        inner = project(self.gate_up_proj, x, "gated silu", kernels=kernels)
        return project_out(self.down_proj, inner, kernels=kernels)
