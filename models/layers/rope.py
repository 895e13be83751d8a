"""Rotary position embedding of the first channels of each head."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


def inverse_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """float32 [rotary_dim / 2]: theta^(-2i / rotary_dim)."""
    return (theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)).astype(np.float32)


def turns(
    positions: Int32[Array, "B T"], *, rotary_dim: int, theta: float
) -> tuple[Float32[Array, "B T C"], Float32[Array, "B T C"]]:
    """Cosines and sines of every position's angles, C = rotary_dim / 2."""
    frequencies = jnp.asarray(inverse_frequencies(rotary_dim, theta))
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T N D"], positions: Int32[Array, "B T"], *, rotary_dim: int, theta: float
) -> Float[Array, "B T N D"]:
    """Rotates channels i and i + rotary_dim / 2 of the first `rotary_dim`; the others pass bit-equal.

    Angles and products in float32; returns the dtype of x. (RoPE, arXiv 2104.09864, rotate-half layout.)
    """
    half = rotary_dim // 2
    cos, sin = (turn[:, :, None] for turn in turns(positions, rotary_dim=rotary_dim, theta=theta))
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half:rotary_dim].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + [x[..., rotary_dim:]], axis=-1)
