"""Products of a few rows with large matrices, as a step of a few tokens makes them.

XLA's matrix product for a CPU packs the matrix first, which for a few rows costs more than the product: one
row at a time reads the matrix from the processor's cache after the first, without packing. On a GPU a single
16-bit vector with a float32 result makes XLA convert the whole matrix to float32 first; several rows do not.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# Measured on a CPU with AVX2 (bench/NOTES.md): from 2 to 8 rows, one by one takes 0.3 to 0.9 of the time.
MOST_ROWS = 8
# Smaller matrices take less time than their rows' separate products.
LEAST_ELEMENTS = 2**13


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, **options: Any) -> Array:
    """`jax.lax.dot_general`; on a CPU row by row where few rows meet a large matrix, elsewhere with rows of
    zeros where a 16-bit vector meets one.

    lhs: [..., K], contracted over its last axis; rhs: a matrix. Other products pass on unchanged.
    """

    def together(lhs: Array, rhs: Array) -> Array:
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, **options)

    (contracted, (side,)), (batch, _) = dimension_numbers
    rows = math.prod(lhs.shape[:-1])
    last = tuple(contracted) == (lhs.ndim - 1,) and rhs.ndim == 2 and not batch
    if not last or not 1 <= rows <= MOST_ROWS or rhs.size < LEAST_ELEMENTS:
        return together(lhs, rhs)

    if rows == 1:
        if lhs.dtype.itemsize != 2 or options.get("preferred_element_type") != jnp.float32:
            return together(lhs, rhs)

        def padded(lhs: Array, rhs: Array) -> Array:
            vector = lhs.reshape(1, -1)
            products = jax.lax.dot_general(
                jnp.pad(vector, ((0, MOST_ROWS - 1), (0, 0))), rhs, (((1,), (side,)), ((), ())), **options
            )
            return products[:1].reshape(*lhs.shape[:-1], -1)

        return jax.lax.platform_dependent(lhs, rhs, cpu=together, default=padded)

    def one_by_one(lhs: Array, rhs: Array) -> Array:
        products = []
        for row in jnp.split(lhs.reshape(rows, -1), rows):
            # Or XLA makes one product of all that read the same matrix.
            row, matrix = jax.lax.optimization_barrier((row, rhs))
            products.append(jax.lax.dot_general(row, matrix, (((1,), (side,)), ((), ())), **options))
        return jnp.concatenate(products).reshape(*lhs.shape[:-1], -1)

    return jax.lax.platform_dependent(lhs, rhs, cpu=one_by_one, default=together)
