"""What the window kernels share: a flush inside them, and what a group appends to the ring."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pipeline import CTA_SHARED_BYTES, Geometry, shared_bytes


class Work(NamedTuple):
    """A flush inside another kernel, from `fold.flush_work`: its buffers, its program and its warpgroups."""

    scratch: dict
    serve: Callable[..., None]
    workers: int


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A flush in all warpgroups of a kernel's CTAs before they do anything else. Its buffers lie in memory
    that the stages take afterwards. fused: compiled, not interpreted."""

    work: Work
    warpgroups: int
    fused: bool

    @classmethod
    def fitting(
        cls,
        make: Callable[[int], Work] | None,
        most: int,
        warpgroups: int,
        scratch: dict,
        fused: bool,
    ) -> "Ahead | None":
        """The one of most warpgroups, up to `most`, that shared memory allows beside `scratch`; None where
        there is none. warpgroups: of the kernel without it."""
        works = map(make, range(most, 0, -1)) if make else ()
        fitting = (one for one in works if shared_bytes((scratch, one.scratch)) <= CTA_SHARED_BYTES)
        return next((cls(one, max(warpgroups, one.workers), fused) for one in fitting), None)

    def _parts(self, barriers: bool) -> dict:
        return {name: x for name, x in self.work.scratch.items() if name.endswith("_landed") == barriers}

    def scratch(self, plgpu: Any) -> dict:
        """What a kernel needs of it besides the memory of its stages."""
        return {"earlier": self._parts(True), "folded": plgpu.Barrier(num_arrivals=self.warpgroups)}

    def and_stages(self, plgpu: Any, stages: dict) -> Any:
        """Scratch of the stages and of this flush, in the same memory."""
        buffers = self._parts(False)
        return plgpu.RefUnion(stages, buffers) if self.fused else (stages, buffers)

    def run(self, plgpu: Any, source: Any, smem: Any, buffers: dict, place: tuple, rows: jax.Array) -> None:
        """Folds the plan's last `rows` rows; no warpgroup goes on before all have. source: references by
        name. buffers: its part of `and_stages`. place: the CTA and their number."""
        mine, work, (cta, ctas) = lax.axis_index("warpgroup"), self.work, place

        @pl.when(mine < work.workers)
        def _():
            worker, of_all = mine * ctas + cta, work.workers * ctas
            work.serve(source, worker, of_all, buffers | smem.earlier, rows, mine)

        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.folded)
        plgpu.barrier_wait(smem.folded)


def split_stages(earlier: Ahead | None, buffers: dict) -> tuple[dict, dict]:
    """A kernel's buffers, those of its stages among them, and those that the earlier flush has in their
    memory; the kernel keeps what `Ahead.and_stages` made, or the stages alone, under "stages"."""
    stages, work = buffers["stages"], {}
    if earlier is not None:
        stages, work = stages
    return {name: x for name, x in buffers.items() if name != "stages"} | stages, work


def aligned_head(geometry: Geometry, group: Any) -> Any:
    """First head of a copy of a group's scalars, which begins at a multiple of 16 bytes."""
    return lax.div(group * geometry.group_heads, 4) * 4


def append_group(
    plgpu: Any,
    geometry: Geometry,
    keys: Any,
    row_scalars: tuple,
    rings: Any,
    row: jax.Array,
    group: jax.Array,
    first: jax.Array,
) -> None:
    """Begins to append the new tokens' keys of a group and, with group 0, all scalars of the row.

    In shared memory: keys [slots, K], and row_scalars of [T, H] each. rings: `keys` and `scalars`. first: the
    position of the first new token.
    """
    block = row * geometry.groups + group
    for t in range(geometry.tokens):
        slot = lax.rem(first + t, geometry.ring)
        plgpu.copy_smem_to_gmem(
            keys.at[pl.ds(geometry.ring + t, 1)],
            rings.keys.at[block, pl.ds(slot, 1)],
            commit_group=False,
        )

        @pl.when(group == 0)
        def _(t=t, slot=slot):
            # A whole row of heads at once: partial sectors cost a read before the write.
            for target, source in zip(rings.scalars, row_scalars, strict=True):
                plgpu.copy_smem_to_gmem(source.at[t], target.at[row, slot], commit_group=False)

    plgpu.commit_smem_to_gmem_group()
