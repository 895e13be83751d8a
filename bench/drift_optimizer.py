"""The optimizer of `bench.train_drift`: Adam, and orthogonalised momentum for the matrices of the blocks.

An update of a matrix is its momentum with all singular values brought near one (Jordan et al., "Muon", 2024),
by five steps of the quintic Newton-Schulz iteration, at the root mean square that Adam's updates have (Liu et
al., "Muon is scalable for LLM training", arXiv 2502.16982). Embeddings, convolutions and vectors keep Adam's.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROOT_MEAN_SQUARE = 0.2
FIRST_MOMENT, SECOND_MOMENT = 0.9, 0.95


def orthogonalised(matrices: Float32[Array, "n rows columns"]) -> Float32[Array, "n rows columns"]:
    """Every matrix with its singular values brought to about 0.7 to 1.2, products in bfloat16."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else jnp.swapaxes(matrices, 1, 2)
    x = (x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-12)).astype(jnp.bfloat16)
    first, second, third = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = jnp.einsum("nij,nkj->nik", x, x)
        x = first * x + jnp.einsum("nij,njk->nik", second * gram + third * (gram @ gram), x)
    return (x if wide else jnp.swapaxes(x, 1, 2)).astype(jnp.float32)


def _in_block(path: tuple) -> bool:
    names = {str(getattr(part, "key", part)) for part in path}
    return "kernel" in names


def adam() -> optax.GradientTransformation:
    """Adam."""
    return optax.scale_by_adam(b1=FIRST_MOMENT, b2=SECOND_MOMENT)


def orthogonal() -> optax.GradientTransformation:
    """Adam's updates, but for the kernels of the blocks their orthogonalised Nesterov momentum."""
    inner = adam()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        grads = jax.tree.leaves(updates)
        updates, state = inner.update(updates, state, params)
        assert isinstance(state, optax.ScaleByAdamState)
        moments = zip(jax.tree.leaves(state.mu), grads, strict=True)
        ahead = [FIRST_MOMENT * moment + (1.0 - FIRST_MOMENT) * grad for moment, grad in moments]
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        new, shapes = [leaf for _, leaf in leaves], {}
        for index, (path, leaf) in enumerate(leaves):
            if _in_block(path):
                shapes.setdefault(leaf.shape, []).append(index)
        # Matrices of one shape together: few kernels.
        for shape, members in shapes.items():
            scale = ROOT_MEAN_SQUARE * max(shape) ** 0.5
            together = scale * orthogonalised(jnp.stack([ahead[index] for index in members]))
            for index, matrix in zip(members, together, strict=True):
                new[index] = matrix
        return jax.tree.unflatten(structure, new), state

    return optax.GradientTransformation(inner.init, update)
