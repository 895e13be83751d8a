"""The recurrences that train the models of the precision study are the library's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.drift_training import PREFILLS, unit_lower_inverse
from replayssm_jax.recurrence import RECURRENCES
from tests.replayssm_jax.recurrence.cases import Shape, draw, draw_heads, rms_error


def test_inverses_of_unit_lower_matrices():
    strict = np.tril(np.random.default_rng(1).normal(size=(2, 3, 16, 16)), -1)
    ours = unit_lower_inverse(jnp.asarray(strict, jnp.float32))
    assert rms_error(ours, np.linalg.inv(np.eye(16) + strict)) < 1e-5


@pytest.mark.parametrize("family", [pytest.param("mamba2", marks=pytest.mark.slow), "gated_delta"])
def test_windows_of_a_stream_are_one_prefill(family):
    rng = np.random.default_rng(2)
    sizes = Shape(batch=2, heads=4, groups=2, head_dim=3, d_state=8)
    heads = draw_heads(family, rng, sizes)
    inputs, reader = draw(family, rng, sizes, 32, heads, decays="slow")
    state = jnp.asarray(rng.normal(size=(2, 4, 3, 8)), jnp.float32)
    lengths = jnp.full((2,), 32, jnp.int32)
    wanted, last = RECURRENCES[family].prefill(state, inputs, reader, heads, lengths)
    outputs = []
    for first in (0, 16):
        part = lambda field, first=first: jax.lax.slice_in_dim(field, first, first + 16, axis=field.ndim - 2)  # noqa: E731
        output, state = PREFILLS[family](state, jax.tree.map(part, inputs), part(reader), heads, chunk=8)
        outputs.append(output)
    assert rms_error(jnp.concatenate(outputs, axis=1), wanted) < 1e-5
    assert rms_error(state, last) < 1e-5
