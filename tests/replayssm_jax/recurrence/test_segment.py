import jax.numpy as jnp
import numpy as np
import pytest

from replayssm_jax.recurrence.segment import forward_substitution, unit_lower_inverse


@pytest.mark.parametrize("tokens", [1, 2, 5, 37, 64])
@pytest.mark.parametrize("kind", ["ones", "normal", "growing"])
def test_triangular_systems_are_those_of_float64(tokens, kind):
    rng = np.random.default_rng(tokens)
    interactions = {
        "ones": np.ones((2, 3, tokens, tokens)),  # powers of A grow as binomials, its inverse does not
        "normal": rng.normal(size=(2, 3, tokens, tokens)) / 3,
        "growing": np.full((2, 3, tokens, tokens), -0.2),
    }[kind]
    interactions = jnp.tril(jnp.asarray(interactions, jnp.float32), -1)
    right = jnp.asarray(rng.normal(size=(2, 3, tokens, 7)), jnp.float32)
    truth = np.linalg.solve(
        np.eye(tokens) + np.asarray(interactions, np.float64), np.asarray(right, np.float64)
    )
    inverse = np.asarray(unit_lower_inverse(interactions), np.float64)
    for solved in (inverse @ right, forward_substitution(interactions, right)):
        assert np.linalg.norm(solved - truth) <= 1e-6 * np.linalg.norm(truth)
