"""Updates of the optimizer that trains the models of the precision study."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.drift_optimizer import orthogonal


@pytest.mark.long
@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # Optax's Adam raises floats to integer powers.
def test_matrices_of_blocks_move_along_the_singular_vectors_of_their_momentum():
    """Against NumPy's singular value decomposition; what is no kernel gets Adam's update."""
    rng = np.random.default_rng(4)
    shapes = {"layers": {0: {"kernel": (24, 64)}, 1: {"kernel": (64, 24)}}, "embed": {"weight": (24, 64)}}
    draw = lambda shape: jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)  # noqa: E731
    both = jax.tree.map(draw, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    first, second = (jax.tree.map(lambda leaf, index=index: leaf[index], both) for index in range(2))

    @jax.jit
    def after_both():
        given = []
        for transform in (orthogonal(), optax.scale_by_adam(b1=0.9, b2=0.95)):
            _, state = transform.update(first, transform.init(first))
            given.append(transform.update(second, state)[0])
        return given

    updates, expected = after_both()
    np.testing.assert_allclose(updates["embed"]["weight"], expected["embed"]["weight"], rtol=1e-6)
    for layer in (0, 1):
        before, now = np.asarray(both["layers"][layer]["kernel"], np.float64)
        left, _, right = np.linalg.svd(
            0.9 * (0.9 * 0.1 * before + 0.1 * now) + 0.1 * now, full_matrices=False
        )
        singular = left.T @ np.asarray(updates["layers"][layer]["kernel"]) @ right.T / (0.2 * 64**0.5)
        strengths = np.diag(singular)
        assert 0.6 < strengths.min() and strengths.max() < 1.3
        assert np.abs(singular - np.diag(strengths)).max() < 0.05
