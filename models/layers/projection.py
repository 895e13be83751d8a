"""Linear layers without bias, in a step of few rows on a GPU by a kernel of their own."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from replayssm_jax.backend import kernel_product, split_product
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


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """relu(x)^2."""
    return jnp.square(jax.nn.relu(x))


def gated_silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """silu(left half) times right half."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


_ACTIVATIONS = {None: lambda x: x, "squared relu": squared_relu, "gated silu": gated_silu}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
    """A layer's output as the kernel leaves it: the sum over the first axis."""

    parts: Float32[Array, "S rows D"]


@jax.named_scope("in_proj")
def project(
    linear: nnx.Linear, x: Float[Array, "B T D"], activation: str | None = None, *, kernels: bool
) -> Float[Array, "B T E"]:
    """The linear layer, then "squared relu", "gated silu" or nothing. kernels: a GPU kernel may serve."""
    served = kernel_product(x, linear.kernel[...], activation) if kernels else None
    return _ACTIVATIONS[activation](linear(x)) if served is None else served


@jax.named_scope("out_proj")
def project_out(
    linear: nnx.Linear, x: Float[Array, "B T D"], *, kernels: bool
) -> Float[Array, "B T E"] | Parts:
    """A layer's last projection, whose result goes to `residual.joined`."""
    if kernels:
        for product in (functools.partial(kernel_product, summed=False), split_product):
            parts = product(x, linear.kernel[...])
            if parts is not None:
                return Parts(parts)
    return linear(x)
