"""Heads whose checkpoint is not read, as bits of the state tiles that the kernels leave out."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pipeline import TILE, Geometry
from pallas_kernels.replay import forgotten_tiles


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
