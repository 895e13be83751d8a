"""Heads whose checkpoint is not read: bits of the state tiles that the kernels leave out, and from where on
that loses nothing."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import launch
from pallas_kernels.pipeline import TILE, Geometry
from pallas_kernels.replay import forgotten_tiles
from replayssm_jax.forgotten import LOG_ZERO
from tests.pallas_kernels import cases
from tests.pallas_kernels.test_interpret import SMALL, interpreter, needs_interpreter


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 32), (32, 64), (12, 80), (2, 128)])
def test_a_tile_is_left_out_with_all_of_its_heads(heads, head_dim):
    batch, groups = 3, 2
    gone = np.random.default_rng(heads).random((batch, groups * heads)) < 0.7
    gone[0] = True
    geometry = Geometry(batch, groups, groups * heads, head_dim, 64, 24, 1)
    bits = np.asarray(forgotten_tiles(jnp.asarray(gone), geometry)).astype(np.int64) % 2**32
    for block, word in enumerate(bits):
        row, group = divmod(block, groups)
        for tile in range(heads * head_dim // TILE):
            of_rows = {r // head_dim for r in range(tile * TILE, (tile + 1) * TILE)}
            left_out = all(gone[row, group * heads + head] for head in of_rows)
            assert (word >> tile) % 2 == left_out
    assert bits.max() < 2 ** (heads * head_dim // TILE)


@pytest.mark.slow
@needs_interpreter
def test_a_fold_token_by_token_leaves_nothing_from_the_exact_threshold_on():
    case = cases.draw(SMALL["gated_delta"], batch=1, tokens=1, buffer_length=8, slots=16)
    values, keys, log_decays, betas = case.ring
    length, plan_of = jnp.full((1,), 5, jnp.int32), functools.partial(launch.plan, jnp.ones((1,), bool))
    state = jnp.full_like(case.checkpoint, 2.0**20)

    def left(total: float) -> float:
        ring = jnp.zeros_like(values), keys, jnp.full_like(log_decays, total / 5), jnp.zeros_like(betas)
        given = state, ring, case.new, case.reader, case.constants, plan_of(case.start, length)
        _, after, _ = case.kernels.step(*given, interpret=interpreter())
        return float(jnp.max(jnp.abs(after)))

    assert left(LOG_ZERO) == 0.0
    # The decay itself is 0 in float32 here too.
    assert float(jnp.exp(jnp.float32(LOG_ZERO + 4))) == 0.0
    assert left(LOG_ZERO + 4) > 0.0
