"""Mamba-2 decode kernels of vLLM, of the authors of ReplaySSM and of mamba-ssm, in Triton."""

from typing import Any, ClassVar

import numpy as np

from bench.peers.base import Peer, RingPeer, Token, mamba2_rates
from bench.peers.loading import Retuned, load, load_vllm

OPS = "vllm.model_executor.layers.mamba.ops"
BLOCKS = (4, 8, 16, 32, 64)
WARPS = (1, 2, 4)


class Mamba2Peer(Peer):
    """Arrays that the Mamba-2 peers share: scalars of a head are views with stride 0 along head_dim and
    d_state."""

    recurrence = "mamba2"

    def allocate(self) -> None:
        shape, torch = self.shape, self.torch
        heads, head_dim, d_state = shape.heads, shape.head_dim, shape.d_state
        a, d = (torch.as_tensor(x, device="cuda") for x in mamba2_rates(heads))
        self.a = a[:, None, None].expand(heads, head_dim, d_state)
        self.d = d[:, None].expand(heads, head_dim)
        self.dt = torch.empty(self.batch, heads, device="cuda").uniform_(0.001, 0.1)
        self.wide_dt = self.dt[:, :, None].expand(-1, -1, head_dim)
        self.bias = torch.zeros(heads, device="cuda")[:, None].expand(heads, head_dim)
        self.x = self.normal(self.batch, heads, head_dim)
        self.b, self.c = (self.normal(self.batch, shape.groups, d_state) for _ in range(2))
        self.state = self.normal(self.batch, heads, head_dim, d_state, dtype=self.state_dtype)
        self.out = torch.empty_like(self.x)

    def new_window(self, window: list[Token]) -> None:
        (token,) = window
        self.x.copy_(self.tensor(token["values"]))
        self.b.copy_(self.tensor(token["keys"]))
        self.c.copy_(self.tensor(token["reader"]))
        token["first"] = token["first"].astype(np.float32).astype(np.float64)
        self.dt.copy_(self.tensor(token["first"], self.torch.float32))

    def outputs(self) -> Any:
        return self.out[:, None]

    def states(self, parameters: tuple[int, ...]) -> Any:
        del parameters
        return self.state


class VllmEager(Mamba2Peer):
    """vLLM's `selective_state_update`."""

    name, replay = "vllm", False
    parameters = ("BLOCK_SIZE_M", "num_warps")
    kernels = ("_selective_scan_update_kernel",)

    def allocate(self) -> None:
        super().allocate()
        (self.module,) = load_vllm(self.folder / "vllm", f"{OPS}.mamba_ssm")

    def candidates(self) -> list[tuple[int, ...]]:
        return [(block, warps) for block in BLOCKS for warps in WARPS]

    def launch(self, parameters: tuple[int, ...]) -> None:
        with self.module.override_ssm_config(parameters):
            self.module.selective_state_update(
                self.state, self.x, self.wide_dt, self.a, self.b, self.c, self.d, self.bias, out=self.out
            )  # fmt: skip


class MambaSsm(Mamba2Peer):
    """mamba-ssm's `selective_state_update`, whose launch parameters are fixed by d_state; here they are
    swept."""

    name, replay = "mamba-ssm", False
    parameters = ("BLOCK_SIZE_M", "num_warps")
    kernels = ("_selective_scan_update_kernel",)

    def allocate(self) -> None:
        super().allocate()
        self.module = load(self.folder / "mamba", "mamba_ssm.ops.triton.selective_state_update")
        if not isinstance(self.module._selective_scan_update_kernel, Retuned):
            self.module._selective_scan_update_kernel = Retuned(
                self.module._selective_scan_update_kernel,
                lambda meta: (-(-meta["dim"] // meta["BLOCK_SIZE_M"]), meta["batch"], meta["nheads"]),
            )

    candidates = VllmEager.candidates

    def launch(self, parameters: tuple[int, ...]) -> None:
        self.module._selective_scan_update_kernel.meta = dict(zip(self.parameters, parameters, strict=True))
        self.out = self.module.selective_state_update(
            self.state, self.x, self.wide_dt, self.a, self.b, self.c, self.d, dt_bias=self.bias
        )


class VllmReplay(Mamba2Peer):
    """vLLM's `selective_state_update_replayssm_output_only`, upstream form of the authors' kernel."""

    name, replay = "vllm-replay", True
    parameters = ("BLOCK_SIZE_M", "num_warps", "NF_DSTATE_TILE", "FL_DSTATE_TILE", "num_stages")
    kernels = ("_replayssm_output_only",)
    checkout: ClassVar[str] = "vllm"

    def allocate(self) -> None:
        super().allocate()
        name = f"{OPS}.selective_state_update_replayssm_output_only"
        (self.module,) = load_vllm(self.folder / self.checkout, name)
        shape, torch, length = self.shape, self.torch, self.buffer_length
        self.flush = torch.zeros(self.batch, dtype=torch.bool, device="cuda")
        self.x_cache = self.normal(self.batch, shape.heads, length, shape.head_dim)
        self.b_cache = self.normal(self.batch, shape.groups, length, shape.d_state)
        self.dt_cache = torch.empty(self.batch, shape.heads, length, device="cuda").uniform_(0.001, 0.1)
        self.products = torch.zeros(self.batch, shape.groups, length, device="cuda")

    def candidates(self) -> list[tuple[int, ...]]:
        reads = [(block, warps, tile) for block in (16, 32) for warps in (1, 2) for tile in (32, 64, 128)]
        reads += [(64, 2, 32), (64, 2, 64)]
        return [(*read, 128, 2) for read in reads] + [(16, 1, 64, 64, 2), (32, 2, 32, 64, 2)]

    def set_lengths(self, lengths: np.ndarray) -> None:
        super().set_lengths(lengths)
        self.flush.copy_(self.torch.as_tensor(lengths == self.buffer_length))

    def launch(self, parameters: tuple[int, ...]) -> None:
        self.module.get_replayssm_config = lambda *_, **__: parameters
        self.module.selective_state_update_replayssm_output_only(
            self.state, self.x, self.wide_dt, self.a, self.b, self.c, self.d, self.bias,
            x_cache=self.x_cache, dt_cache=self.dt_cache, B_cache=self.b_cache, bc_pre=self.products,
            write_pos=self.cached, is_flush=self.flush, max_cache_len=self.buffer_length, out=self.out,
        )  # fmt: skip


class AuthorsReplay(VllmReplay):
    """The same kernel in the authors' own repository."""

    name, checkout = "authors-replay", "replayssm"
    parameters = ("BLOCK_SIZE_M", "num_warps")

    def candidates(self) -> list[tuple[int, ...]]:
        return [(block, warps) for block in (8, 16, 32, 64) for warps in WARPS]


class AuthorsVerify(RingPeer):
    """The authors' `selective_state_update_replayssm_spec`: several tokens a step, a ring of a power of two.

    x, B and C of a token lie side by side; slot 0 of the state is vLLM's null block.
    """

    name, recurrence, windows = "authors-replay", "mamba2", True
    parameters = (
        "BLOCK_SIZE_M",
        "num_warps",
        "DSTATE_TILE",
        "num_stages",
        "flush_BLOCK_SIZE_M",
        "flush_num_warps",
    )
    kernels = ("_fused_scatter_precompute_kernel", "_replayssm_spec_nf_kernel", "_replayssm_spec_fl_kernel")

    def allocate(self) -> None:
        name = f"{OPS}.selective_state_update_replayssm_spec"
        (self.module,) = load_vllm(self.folder / "replayssm", name)
        shape, torch = self.shape, self.torch
        heads, head_dim, d_state = shape.heads, shape.head_dim, shape.d_state
        self.inner, self.keys = heads * head_dim, shape.groups * d_state
        self.slots = 1 << (self.buffer_length + self.window - 1).bit_length()
        rows, count = self.batch + 1, self.batch * self.window
        a, d = (torch.as_tensor(x, device="cuda") for x in mamba2_rates(heads))
        self.a = a[:, None, None].expand(heads, head_dim, d_state)
        self.d = d[:, None].expand(heads, head_dim)
        self.state = self.normal(rows, heads, head_dim, d_state, dtype=self.state_dtype)
        self.cache = self.normal(rows, self.slots, self.inner + self.keys)
        self.dt_cache = torch.empty(rows, heads, self.slots, device="cuda").uniform_(0.001, 0.1)
        self.mixed = self.normal(count, self.inner + 2 * self.keys)
        self.dt = torch.empty(count, heads, device="cuda").uniform_(0.001, 0.1)
        self.out = torch.empty(count, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        block = 1 << (self.window - 1).bit_length()
        self.products = self.normal(self.batch, shape.groups, self.slots, block)
        self.offsets = torch.arange(0, count + 1, self.window, device="cuda", dtype=torch.int32)
        self.rows = torch.arange(1, rows, device="cuda", dtype=torch.int32)
        self.write_pos, self.origin = (torch.zeros(rows, device="cuda", dtype=torch.int32) for _ in range(2))
        self.flush = torch.zeros(rows, device="cuda", dtype=torch.int8)

    def new_window(self, window: list[Token]) -> None:
        parts = [
            np.concatenate(
                [token[name].reshape(self.batch, -1) for name in ("values", "keys", "reader")], axis=1
            )
            for token in window
        ]
        self.mixed.copy_(self.tensor(np.stack(parts, axis=1)).view_as(self.mixed))
        for token in window:
            token["first"] = token["first"].astype(np.float32).astype(np.float64)
        dt = np.stack([token["first"] for token in window], axis=1)
        self.dt.copy_(self.tensor(dt, self.torch.float32).view_as(self.dt))

    def outputs(self) -> Any:
        return self.out.view(self.batch, self.window, *self.out.shape[1:])

    def states(self, parameters: tuple[int, ...]) -> Any:
        del parameters
        return self.state[1:]

    def set_lengths(self, lengths: np.ndarray) -> None:
        super().set_lengths(lengths)
        self.write_pos[1:].copy_(self.cached)
        self.origin[1:].copy_(self.start)
        self.flush[1:].copy_(self.cached + self.window > self.buffer_length)

    def candidates(self) -> list[tuple[int, ...]]:
        reads = [(block, warps, tile, 2) for block in (16, 32) for warps in (1, 2) for tile in (32, 64, 128)]
        reads += [(64, 2, 32, 2), (64, 2, 64, 2)]
        return [(*read, 32, 1) for read in reads] + [(32, 2, 64, 2, 16, 1), (32, 2, 64, 2, 32, 2)]

    def launch(self, parameters: tuple[int, ...]) -> None:
        by_name = {
            "mamba2_spec_verify": parameters[:4],
            "mamba2_spec_flush": (*parameters[4:], self.shape.d_state, 2),
        }
        self.module.get_replayssm_config = lambda name, **_: by_name[name]
        self.module.selective_state_update_replayssm_spec(
            self.state, self.cache, self.dt_cache, self.mixed, self.dt, self.a, self.write_pos, self.origin,
            self.flush, self.offsets, self.rows, max_cache_len=self.buffer_length + self.window,
            max_spec_len=self.window, d_inner=self.inner, ngroups=self.shape.groups,
            dstate=self.shape.d_state, D=self.d, dt_softplus=False, out=self.out, bc_pre=self.products,
        )  # fmt: skip


PEERS = (VllmEager, MambaSsm, VllmReplay, AuthorsReplay, AuthorsVerify)
