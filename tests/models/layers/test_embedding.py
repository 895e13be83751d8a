"""The output head against float64 products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.embedding import Embedding


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_scores_are_float32_products_with_every_row(shape, dtype):
    table = Embedding(37, 224, dtype=dtype, rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(1), (*shape, 224)).astype(dtype)
    scores = table.scores(hidden)
    assert scores.dtype == jnp.float32
    exact = (np.asarray(x.astype(jnp.float32), np.float64) for x in (hidden, table.weight[...]))
    np.testing.assert_allclose(scores, np.matmul(next(exact), next(exact).T), rtol=0, atol=1e-4)
