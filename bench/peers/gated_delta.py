"""Gated DeltaNet decode kernels of vLLM, the authors of ReplaySSM and flash-linear-attention, in Triton."""

from typing import Any

import numpy as np

from bench.peers.base import Peer, RingPeer, Token
from bench.peers.loading import Retuned, load, load_vllm

BLOCKS = (8, 16, 32, 64, 128)
WARPS = (1, 2, 4)


class PackedPeer(Peer):
    """Arrays of vLLM's packed decode: q, k and v of a token side by side, gates computed in the kernel.

    log decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b) with A_log = dt_bias = 0. Slot 0 of
    the state is vLLM's null block.
    """

    recurrence = "gated_delta"

    def allocate(self) -> None:
        shape, torch = self.shape, self.torch
        self.key_width = shape.groups * shape.d_state
        heads = shape.heads
        count = self.batch * self.window
        self.mixed = self.normal(count, 2 * self.key_width + heads * shape.head_dim)
        keys = self.mixed[:, : 2 * self.key_width].view(count, 2 * shape.groups, shape.d_state)
        keys /= keys.norm(dim=-1, keepdim=True)
        self.a = torch.empty(count, heads, device="cuda").uniform_(-7.0, -0.5)
        self.b = torch.empty(count, heads, device="cuda").uniform_(-2.0, 2.0)
        self.zero = torch.zeros(heads, device="cuda")
        self.state = self.normal(self.batch + 1, heads, shape.head_dim, shape.d_state, dtype=self.state_dtype)
        self.out = torch.empty(count, 1, heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        self.slots_of_rows = torch.arange(1, self.batch + 1, device="cuda", dtype=torch.int32)

    def new_window(self, window: list[Token]) -> None:
        joined = {name: np.stack([token[name] for token in window], axis=1) for name in window[0]}
        count = len(self.mixed)
        parts = [joined[name].reshape(count, -1) for name in ("reader", "keys", "values")]
        self.mixed.copy_(self.tensor(np.concatenate(parts, axis=1)))
        first, second = (joined[name].reshape(count, -1) for name in ("first", "second"))
        self.a.copy_(self.tensor(np.log(np.expm1(-first)), self.torch.float32))
        self.b.copy_(self.tensor(-np.log(1 / second - 1), self.torch.float32))

    def outputs(self) -> Any:
        return self.out.view(self.batch, self.window, *self.out.shape[2:])

    def states(self, parameters: tuple[int, ...]) -> Any:
        del parameters
        return self.state[1:]


class VllmEager(PackedPeer):
    """vLLM's `fused_recurrent_gated_delta_rule_packed_decode`."""

    name, replay = "vllm", False
    parameters = ("BV", "num_warps", "num_stages")
    kernels = ("packed_decode_kernel",)

    def allocate(self) -> None:
        super().allocate()
        name = "vllm.third_party.flash_linear_attention.ops.fused_recurrent"
        (self.module,) = load_vllm(self.folder / "vllm", name)
        kernel = "fused_recurrent_gated_delta_rule_packed_decode_kernel"
        heads = self.shape.heads

        def grid(meta: dict) -> tuple:
            blocks = -(-meta["V"] // meta["BV"])
            split = meta.get("SPLIT_BATCH_HEAD_GRID", False)
            return (blocks, heads, self.batch) if split else (blocks, self.batch * heads)

        self.kernel = Retuned(getattr(self.module, kernel), grid)
        setattr(self.module, kernel, self.kernel)

    def candidates(self) -> list[tuple[int, ...]]:
        return [(block, warps, 3) for block in BLOCKS for warps in WARPS]

    def launch(self, parameters: tuple[int, ...]) -> None:
        self.kernel.meta = dict(zip(self.parameters, parameters, strict=True))
        self.module.fused_recurrent_gated_delta_rule_packed_decode(
            self.mixed, self.a, self.b, self.zero, self.zero, 1.0, self.state, self.out, self.slots_of_rows
        )


class AuthorsReplay(PackedPeer):
    """The authors' `fused_recurrent_gated_delta_rule_replayssm`."""

    name, replay = "authors-replay", True
    parameters = ("block_v", "num_warps", "num_stages", "nk")
    kernels = ("replayssm_kernel",)

    def allocate(self) -> None:
        super().allocate()
        (self.module,) = load_vllm(
            self.folder / "replayssm", "vllm.model_executor.layers.fla.ops.fused_recurrent_replayssm"
        )
        shape, torch, length = self.shape, self.torch, self.buffer_length
        rows = self.batch + 1
        self.d_cache = self.normal(rows, shape.heads, length, shape.head_dim)
        self.k_cache = self.normal(rows, shape.groups, length, shape.d_state)
        self.k_cache /= self.k_cache.norm(dim=-1, keepdim=True)
        self.g_cache = -torch.empty(rows, shape.heads, length, device="cuda").uniform_(0.001, 0.5)

    def candidates(self) -> list[tuple[int, ...]]:
        blocks = [(block, warps, 3, parts) for block in (32, 64) for warps in WARPS for parts in (2, 4)]
        return [*blocks, (64, 1, 2, 2), (64, 2, 2, 2), (128, 4, 3, 4)]

    def launch(self, parameters: tuple[int, ...]) -> None:
        named = dict(zip(self.parameters, parameters, strict=True))
        self.module.fused_recurrent_gated_delta_rule_replayssm(
            self.mixed, self.a, self.b, self.zero, self.zero, 1.0, self.state, self.d_cache, self.k_cache,
            self.g_cache, self.out, self.slots_of_rows, self.cached, **named,
        )  # fmt: skip


class AuthorsVerify(RingPeer, PackedPeer):
    """The authors' `gdn_replayssm_spec_decode`: several tokens a step, a ring of a power of two."""

    name, windows = "authors-replay", True
    parameters = ("block_v", "num_warps", "nk", "num_stages", "flush_nk")
    kernels = ("gdn_replayssm_spec_circular_kernel",)

    def allocate(self) -> None:
        super().allocate()
        (self.module,) = load_vllm(
            self.folder / "replayssm", "vllm.model_executor.layers.fla.ops.gdn_replayssm_spec_decode"
        )
        shape, torch = self.shape, self.torch
        self.slots = 1 << (self.buffer_length + self.window - 1).bit_length()
        rows = self.batch + 1
        self.d_cache = self.normal(rows, shape.heads, self.slots, shape.head_dim)
        self.k_cache = self.normal(rows, shape.groups, self.slots, shape.d_state)
        self.k_cache /= self.k_cache.norm(dim=-1, keepdim=True)
        self.g_cache = -torch.empty(rows, shape.heads, self.slots, device="cuda").uniform_(0.001, 0.5)
        self.offsets = torch.arange(0, len(self.mixed) + 1, self.window, device="cuda", dtype=torch.int32)
        self.write_pos, self.origin = (torch.zeros(rows, device="cuda", dtype=torch.int32) for _ in range(2))
        self.flush = torch.zeros(rows, device="cuda", dtype=torch.int8)

    def set_lengths(self, lengths: np.ndarray) -> None:
        super().set_lengths(lengths)
        self.write_pos[1:].copy_(self.cached)
        self.origin[1:].copy_(self.start)
        self.flush[1:].copy_(self.cached + self.window > self.buffer_length)

    def candidates(self) -> list[tuple[int, ...]]:
        blocks = [(block, warps, parts, 2, 2) for block in (32, 64) for warps in WARPS for parts in (2, 4)]
        return [*blocks, (64, 1, 2, 3, 2), (64, 1, 2, 2, 4)]

    def launch(self, parameters: tuple[int, ...]) -> None:
        *verify, flush_parts = parameters
        by_name = {"gdn_spec_verify": tuple(verify), "gdn_spec_flush": (64, 1, flush_parts, 2)}
        self.module.get_replayssm_config = lambda name, **_: by_name[name]
        self.module.gdn_replayssm_spec_decode(
            self.mixed, self.a, self.b, self.zero, self.zero, self.state, self.d_cache, self.k_cache,
            self.g_cache, self.out[:, 0], self.offsets, self.slots_of_rows, self.write_pos, self.origin,
            self.flush, max_cache_len=self.buffer_length + self.window, max_spec_len=self.window, scale=1.0,
            use_qk_l2norm_in_kernel=False,
        )  # fmt: skip


class FlashLinearAttention(Peer):
    """flash-linear-attention's `fused_recurrent_gated_delta_rule` at one token. It writes the state to a new
    array."""

    name, recurrence, replay = "fla", "gated_delta", False
    parameters = ("BV", "num_warps", "STATE_V_FIRST")
    kernels = ("fused_recurrent_gated_delta_rule_fwd_kernel",)

    def allocate(self) -> None:
        self.module = load(self.folder / "fla", "fla.ops.gated_delta_rule.fused_recurrent")
        if not isinstance(self.module.fused_recurrent_gated_delta_rule_fwd_kernel, Retuned):
            self.module.fused_recurrent_gated_delta_rule_fwd_kernel = Retuned(
                self.module.fused_recurrent_gated_delta_rule_fwd_kernel, None
            )
        self.kernel = self.module.fused_recurrent_gated_delta_rule_fwd_kernel
        rows = self.batch * self.shape.heads
        self.kernel.grid = lambda meta: (-(-meta["V"] // meta["BV"]) * rows,)
        shape, torch = self.shape, self.torch
        self.q, self.k = (self.normal(self.batch, 1, shape.groups, shape.d_state) for _ in range(2))
        self.q /= self.q.norm(dim=-1, keepdim=True)
        self.k /= self.k.norm(dim=-1, keepdim=True)
        self.v = self.normal(self.batch, 1, shape.heads, shape.head_dim)
        self.g = -torch.empty(self.batch, 1, shape.heads, device="cuda").uniform_(0.001, 0.5)
        self.beta = torch.empty(self.batch, 1, shape.heads, device="cuda").uniform_(0.1, 0.9)
        self.state = self.normal(
            self.batch, shape.heads, shape.head_dim, shape.d_state, dtype=self.state_dtype
        )

    def candidates(self) -> list[tuple[int, ...]]:
        return [(block, warps, 1) for block in (8, 16, 32) for warps in WARPS] + [(8, 1, 0), (16, 1, 0)]

    def launch(self, parameters: tuple[int, ...]) -> None:
        block, warps, order = parameters
        self.kernel.meta = {"BV": block, "num_warps": warps}
        self.out, self.new = self.module.fused_recurrent_gated_delta_rule_fwd(
            self.q, self.k, self.v, self.g, beta=self.beta, scale=1.0, initial_state=self.state,
            output_final_state=True, state_v_first=bool(order),
        )  # fmt: skip
        self.state, self.new = self.new, None

    def new_window(self, window: list[Token]) -> None:
        (token,) = window
        self.q.copy_(self.tensor(token["reader"])[:, None])
        self.k.copy_(self.tensor(token["keys"])[:, None])
        self.v.copy_(self.tensor(token["values"])[:, None])
        self.g.copy_(self.tensor(token["first"], self.torch.float32)[:, None])
        self.beta.copy_(self.tensor(token["second"], self.torch.float32)[:, None])

    def outputs(self) -> Any:
        return self.out

    def states(self, parameters: tuple[int, ...]) -> Any:
        return self.state if parameters[2] else self.state.transpose(2, 3)


PEERS = (VllmEager, AuthorsReplay, AuthorsVerify, FlashLinearAttention)
