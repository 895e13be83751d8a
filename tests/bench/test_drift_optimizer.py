"""Updates of the optimizer that trains the models of the precision study."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.drift_optimizer import orthogonal


@jax.numpy_dtype_promotion("standard")  # Optax's Adam raises floats to integer powers.
def test_matrices_of_blocks_move_along_the_singular_vectors_of_their_momentum():
    """Against NumPy's singular value decomposition; what is no kernel gets Adam's update."""
    rng = np.random.default_rng(4)
    draw = lambda: {  # noqa: E731
        "layers": {
            0: {"kernel": jnp.asarray(rng.normal(size=(24, 64)), jnp.float32)},
            1: {"kernel": jnp.asarray(rng.normal(size=(64, 24)), jnp.float32)},
        },
        "embed": {"weight": jnp.asarray(rng.normal(size=(24, 64)), jnp.float32)},
    }
    first, second = draw(), draw()
    ours, adam = orthogonal(), optax.scale_by_adam(b1=0.9, b2=0.95)
    state, plain = ours.init(first), adam.init(first)
    for grads in (first, second):
        updates, state = ours.update(grads, state)
        expected, plain = adam.update(grads, plain)
    np.testing.assert_array_equal(updates["embed"]["weight"], expected["embed"]["weight"])
    for layer in (0, 1):
        momenta = [np.asarray(grads["layers"][layer]["kernel"], np.float64) for grads in (first, second)]
        ahead = 0.9 * (0.9 * 0.1 * momenta[0] + 0.1 * momenta[1]) + 0.1 * momenta[1]
        left, _, right = np.linalg.svd(ahead, full_matrices=False)
        singular = left.T @ np.asarray(updates["layers"][layer]["kernel"]) @ right.T / (0.2 * 64**0.5)
        strengths = np.diag(singular)
        assert 0.6 < strengths.min() and strengths.max() < 1.3
        assert np.abs(singular - np.diag(strengths)).max() < 0.05
