"""FlashInfer's Mamba-2 decode kernels in CUDA C++: `selective_state_update` and `checkpointing_ssu`.

Its compiler stamps sizes and types into a module. They are loaded through TVM's FFI (package apache-tvm-ffi,
or `tvm_ffi` in the folder) under the names that FlashInfer gives them; a size that has not been compiled is
left out.
"""

import functools
import sys
from pathlib import Path
from typing import Any

from bench.peers.base import RingPeer
from bench.peers.mamba2 import Mamba2Peer

TYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}


@functools.cache
def module(folder: Path, name: str) -> Any:
    """The compiled module `name`.so in the folder."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    import tvm_ffi  # pyright: ignore

    return tvm_ffi.load_module(str(folder / f"{name}.so"))


class FlashInferEager(Mamba2Peer):
    """FlashInfer's `selective_state_update` at one token; its algorithm is the launch parameter."""

    name, replay, implementation = "flashinfer", False, "cuda"
    parameters = ("algorithm",)
    kernels = ("selective_state_update",)

    def allocate(self) -> None:
        super().allocate()
        sizes = f"d_{self.shape.head_dim}_ds_{self.shape.d_state}_nt_1_cs_i32_na_i32_sm90"
        name = f"selective_state_update_s_{TYPES[self.state_format]}_i_bf16_w_f32_a_f32_si_i32_{sizes}"
        self.module = module(self.folder / "flashinfer", name)

    def candidates(self) -> list[tuple[int, ...]]:
        return [(0,), (1,), (2,), (3,)]

    def launch(self, parameters: tuple[int, ...]) -> None:
        nothing = (None,) * 2
        self.module.selective_state_update(
            self.state, self.x, self.wide_dt, self.a, self.b, self.c, self.d, None, self.bias, False,
            *nothing, -1, None, self.out, False, *nothing, None, None, 0, *nothing, *parameters,
        )  # fmt: skip


class FlashInferReplay(RingPeer, Mamba2Peer):
    """FlashInfer's `checkpointing_ssu`: it folds the committed tokens of a full ring, then adds the
    new one."""

    name, implementation = "flashinfer-replay", "cuda"
    parameters = ("precompute_heads", "stages", "ctas", "split")
    kernels = ("checkpointing_ssu", "checkpointing")
    stamped = True

    def allocate(self) -> None:
        super().allocate()
        shape, torch = self.shape, self.torch
        share = shape.heads // shape.groups
        sizes = f"d_{shape.head_dim}_ds_{shape.d_state}_np_1_mw_{self.buffer_length}"
        sizes += f"_hpg_{share}_ng_{shape.groups}"
        name = f"checkpointing_ssu_s_{TYPES[self.state_format]}_i_bf16_dt_f32_w_f32_a_f32_si_i32_{sizes}"
        self.module = module(self.folder / "flashinfer", name)
        slots = self.slots = self.buffer_length + 1
        self.x_cache = self.normal(self.batch, shape.heads, slots, shape.head_dim)
        self.b_cache = self.normal(self.batch, shape.groups, slots, shape.d_state)
        self.dt_cache = torch.empty(self.batch, shape.heads, slots, device="cuda").uniform_(0.001, 0.1)
        old = -(-self.buffer_length // 8) * 8
        rows = (self.batch, shape.heads)
        self.scratch = (
            torch.empty(*rows, 32, 8, dtype=torch.bfloat16, device="cuda"),
            torch.empty(*rows, 16, device="cuda"),
            torch.empty(*rows, 32, old // 2, dtype=torch.bfloat16, device="cuda"),
        )

    def candidates(self) -> list[tuple[int, ...]]:
        share = self.shape.heads // self.shape.groups
        heads = [share >> shift for shift in range(share.bit_length())]
        two = [(h, s, c, d) for h in heads[:3] for s in (1, 2) for c in (2, 4, 6, 8, 12, 16) for d in (1, 2)]
        return [(0, 0, 0, 1), (0, 0, 0, 2), *two]

    def launch(self, parameters: tuple[int, ...]) -> None:
        heads, stages, ctas, split = parameters
        scratch = self.scratch if stages else (None,) * 3
        one = (slice(None), None)
        self.module.checkpointing_ssu(
            self.state, self.x[one], self.wide_dt[one], self.a, self.b[one], self.c[one], self.out[one],
            self.x_cache, self.b_cache, self.dt_cache, self.start, self.cached,
            self.d, None, self.bias, False, None, -1, None, None, split, None, *scratch, heads, stages, ctas,
        )  # fmt: skip


PEERS = (FlashInferEager, FlashInferReplay)
