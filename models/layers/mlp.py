"""Feed-forward layers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from replayssm_jax.few_rows import dot_general


def bias_free(inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer without bias, computed in its parameters' dtype."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=dtype,
        param_dtype=dtype,
        dot_general=dot_general,
        rngs=rngs,
    )


def relu2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Squared ReLU."""
    return jnp.square(jax.nn.relu(x))


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, size: int, inner: int, *, activation: Callable, dtype, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=dtype, rngs=rngs)
        self.up_proj, self.down_proj = linear(size, inner), linear(inner, size)
        self.activation = activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the dtype of x."""
        return self.down_proj(self.activation(self.up_proj(x)))


class GatedMLP(nnx.Module):
    """down(silu(gate) up) of [gate, up] = gate_up(x)."""

    def __init__(self, size: int, inner: int, *, dtype, rngs: nnx.Rngs):
        linear = functools.partial(bias_free, dtype=dtype, rngs=rngs)
        self.gate_up_proj, self.down_proj = linear(size, 2 * inner), linear(inner, size)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the dtype of x."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)
