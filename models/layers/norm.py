"""Root-mean-square norms; statistics and products in float32, one cast at the end."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from replayssm_jax.backend import kernel_gated_norm


def rms_normalize(x: Float[Array, "*batch D"], eps: float) -> Float[Array, "*batch D"]:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _scaled(x: Float[Array, "*batch D"], scale: Float[Array, " D"]) -> Float[Array, "*batch D"]:
    return x * jnp.reshape(scale, (1,) * (x.ndim - 1) + scale.shape)


class RMSNorm(nnx.Module):
    """RMS norm times (offset + weight); offset 1 for the families that store weights around 0."""

    def __init__(self, size: int, *, eps: float, offset: float = 0.0, dtype):
        self.weight = nnx.Param(jnp.full((size,), 1.0 - offset, dtype))
        self.eps, self.offset = eps, offset

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Normalises the last axis; returns the dtype of x."""
        scale = self.offset + self.weight[...].astype(jnp.float32)
        return _scaled(rms_normalize(x, self.eps), scale).astype(x.dtype)


class GateThenNorm(nnx.Module):
    """Mamba-2's output norm: y silu(z), then an RMS norm in each of `groups` equal parts of the channels."""

    def __init__(self, size: int, *, groups: int, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.groups, self.eps = groups, eps

    @jax.named_scope("gated_norm")
    def __call__(
        self, y: Float[Array, "B T D"], projected: Float[Array, "B T P"], *, kernels: bool = False
    ) -> Float[Array, "B T D"]:
        """y float32; the gates are the first channels of `projected`, whose dtype is returned.

        kernels: a GPU kernel may serve.
        """
        if kernels:
            normed = kernel_gated_norm(y, projected, self.weight[...], self.groups, self.eps)
            if normed is not None:
                return normed
        gate = projected[..., : y.shape[-1]]
        gated = y * jax.nn.silu(gate.astype(jnp.float32))
        parts = gated.reshape(*gated.shape[:-1], self.groups, -1)
        normed = rms_normalize(parts, self.eps).reshape(gated.shape)
        return _scaled(normed, self.weight[...].astype(jnp.float32)).astype(gate.dtype)


class NormThenGate(nnx.Module):
    """Gated DeltaNet's output norm: an RMS norm of each head, then times silu(z)."""

    def __init__(self, size: int, *, eps: float):
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    @jax.named_scope("gated_norm")
    def __call__(self, y: Float[Array, "B T H V"], gate: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
        """y float32; returns the dtype of the gate."""
        normed = _scaled(rms_normalize(y, self.eps), self.weight[...].astype(jnp.float32))
        return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
