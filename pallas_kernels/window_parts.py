"""What the window kernels share: a flush inside them, and what a group appends to the ring."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pipeline import CTA_SHARED_BYTES, Geometry, shared_bytes
from pallas_kernels.rows import WARPGROUP

SM_REGISTERS = 65536


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
    registers: int
    fused: bool

    @classmethod
    def fitting(
        cls,
        make: Callable[[int], Work] | None,
        most: int,
        warpgroups: int,
        scratch: dict,
        *,
        registers: int = 0,
        fused: bool,
    ) -> "Ahead | None":
        """The one of most warpgroups, up to `most`, that shared memory allows beside `scratch`; None where
        there is none. warpgroups: of the kernel without it. registers: of a thread that folds, where it takes
        some from the warpgroups that do not (0: its share)."""
        works = map(make, range(most, 0, -1)) if make else ()
        fitting = (one for one in works if shared_bytes((scratch, one.scratch)) <= CTA_SHARED_BYTES)
        return next((cls(one, max(warpgroups, one.workers), registers, fused) for one in fitting), None)

    def _shares(self) -> tuple[int, int, int] | None:
        """Registers of a thread: of every warpgroup afterwards, of those that fold and of those that wait;
        None where they stay as they are."""
        all_registers, waiting = SM_REGISTERS // WARPGROUP, self.warpgroups - self.work.workers
        share = all_registers // self.warpgroups // 8 * 8
        if not self.fused or not waiting or self.registers <= share:
            return None
        return share, self.registers, (all_registers - self.registers * self.work.workers) // waiting // 8 * 8

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
        folds, shares = mine < work.workers, self._shares()

        def registers(who: jax.Array, action: Any, count: int) -> None:
            pl.when(who)(lambda: plgpu.set_max_registers(count, action=action))

        if shares is not None:
            registers(~folds, "decrease", shares[2])
            registers(folds, "increase", shares[1])

        @pl.when(folds)
        def _():
            worker, of_all = mine * ctas + cta, work.workers * ctas
            work.serve(source, worker, of_all, buffers | smem.earlier, rows, mine)

        if shares is not None:
            registers(folds, "decrease", shares[0])
            registers(~folds, "increase", shares[0])
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
    smem: Any,
    rings: Any,
    row: jax.Array,
    group: jax.Array,
    first: jax.Array,
) -> None:
    """Begins to append the new tokens' keys of a group and, with group 0, all scalars of the row.

    smem: `keys` [slots, K] and `row_scalars` [T, H]. rings: `keys` and `scalars`. first: the position of the
    first new token.
    """
    block = row * geometry.groups + group
    for t in range(geometry.tokens):
        slot = lax.rem(first + t, geometry.ring)
        plgpu.copy_smem_to_gmem(
            smem.keys.at[pl.ds(geometry.ring + t, 1)],
            rings.keys.at[block, pl.ds(slot, 1)],
            commit_group=False,
        )

        @pl.when(group == 0)
        def _(t=t, slot=slot):
            # A whole row of heads at once: partial sectors cost a read before the write.
            for target, source in zip(rings.scalars, smem.row_scalars, strict=True):
                plgpu.copy_smem_to_gmem(source.at[t], target.at[row, slot], commit_group=False)

    plgpu.commit_smem_to_gmem_group()
