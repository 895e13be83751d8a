"""What a peer brings to the benchmark, and its check against a serial float64 loop."""

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.kernel_cases import Case
from bench.shapes import Shape

Token = dict[str, np.ndarray]
TOLERANCE = 1e-2  # RMS ratio: bfloat16 outputs (1e-3), and inputs rounded again inside a replay kernel.


class Peer(abc.ABC):
    """One layer's decode kernel of another project, holding its PyTorch arrays for `batch` rows.

    `replay` peers keep `cached` tokens a row and flush with the L-th, which goes into the new checkpoint.
    Launch parameters are tuples of integers named by `parameters`; `candidates` lists those to sweep.
    `kernels` are parts of the names of the kernels whose time counts.
    """

    name: ClassVar[str]
    recurrence: ClassVar[str]
    replay: ClassVar[bool]
    parameters: ClassVar[tuple[str, ...]]
    kernels: ClassVar[tuple[str, ...]]
    implementation: ClassVar[str] = "triton"
    windows: ClassVar[bool] = False
    folds_new: ClassVar[bool] = True
    stamped: ClassVar[bool] = False

    def __init__(self, folder: Path, shape: Shape, case: Case) -> None:
        import torch

        self.torch, self.folder, self.shape = torch, folder, shape
        self.batch, self.buffer_length, self.window = case.batch, case.buffer_length, case.tokens
        self.state_format = case.state
        self.state_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.state]
        generator = torch.Generator("cuda").manual_seed(case.batch)

        def normal(*size: int, dtype: Any = torch.bfloat16) -> Any:
            return torch.randn(*size, generator=generator, device="cuda", dtype=dtype)

        self.normal = normal
        self.cached, self.start = torch.zeros(2, case.batch, dtype=torch.int32, device="cuda")
        self.allocate()

    @abc.abstractmethod
    def allocate(self) -> None:
        """Makes the arrays of the layer."""

    @abc.abstractmethod
    def candidates(self) -> list[tuple[int, ...]]:
        """Launch parameters to sweep."""

    @abc.abstractmethod
    def launch(self, parameters: tuple[int, ...]) -> None:
        """Starts one step."""

    @abc.abstractmethod
    def new_window(self, window: list[Token]) -> None:
        """Copies the next T tokens into the layer's inputs."""

    @abc.abstractmethod
    def outputs(self) -> Any:
        """[B, T, H, V] of the last step."""

    @abc.abstractmethod
    def states(self, parameters: tuple[int, ...]) -> Any:
        """[B, H, V, K] of the layer, stored as a launch with these parameters reads and writes it."""

    def set_lengths(self, lengths: np.ndarray) -> None:
        """Committed tokens of each row before the step, 1..L as in our own kernels, of which a row with L
        flushes."""
        self.cached.copy_(self.torch.as_tensor(lengths - 1, dtype=self.torch.int32))

    def cycle(self) -> list[int]:
        """Lengths of successive steps from an empty cache to the step after the flush."""
        return [*range(1, self.buffer_length + 1), 1] if self.replay else [1, 1, 1]

    def tensor(self, array: np.ndarray, dtype: Any = None) -> Any:
        return self.torch.as_tensor(np.asarray(array, np.float32), device="cuda").to(
            dtype or self.torch.bfloat16
        )

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def keep(self, kernel: str) -> bool:
        return any(part in kernel for part in self.kernels)


class RingPeer(Peer):
    """A replay peer with a ring of `slots`: when T tokens do not fit, it folds the committed ones first.

    `start` is the slot of a row's first committed token.
    """

    replay, folds_new = True, False
    slots: int

    def set_lengths(self, lengths: np.ndarray) -> None:
        folded = self.cached * (self.cached + self.window > self.buffer_length)
        self.start.copy_((self.start + folded) % self.slots)
        self.cached.copy_(self.torch.as_tensor(lengths, dtype=self.torch.int32))

    def cycle(self) -> list[int]:
        return [*range(0, self.buffer_length + 1, self.window), self.window]


def tokens(shape: Shape, batch: int, rng: np.random.Generator) -> Token:
    """One random token a row: values [B, H, V], keys and reader [B, G, K] as bfloat16 values, scalars [B, H].

    Mamba-2: `first` = dt. Gated DeltaNet: `first` = log decay, `second` = beta; keys and reader have length
    one.
    """
    import torch

    def rounded(*size: int, unit: bool = False) -> np.ndarray:
        array = rng.standard_normal(size)
        if unit:
            array /= np.linalg.norm(array, axis=-1, keepdims=True)
        return torch.as_tensor(array).to(torch.bfloat16).double().numpy()

    delta = shape.recurrence == "gated_delta"
    return {
        "values": rounded(batch, shape.heads, shape.head_dim),
        "keys": rounded(batch, shape.groups, shape.d_state, unit=delta),
        "reader": rounded(batch, shape.groups, shape.d_state, unit=delta),
        "first": -rng.uniform(0.001, 0.5, (batch, shape.heads))
        if delta
        else rng.uniform(0.001, 0.1, (batch, shape.heads)),
        "second": rng.uniform(0.1, 0.9, (batch, shape.heads)),
    }


def mamba2_rates(heads: int) -> tuple[np.ndarray, np.ndarray]:
    """A and D of the benchmark's Mamba-2 layer."""
    return np.linspace(-8.0, -1.0, heads, dtype=np.float32), np.ones(heads, np.float32)


def serial_step(shape: Shape, state: np.ndarray, token: Token) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, H, V] and the new state of one token in float64: the definitions of the recurrences
    (Mamba-2, arXiv 2405.21060; Gated DeltaNet, arXiv 2412.06464)."""
    share = shape.heads // shape.groups
    keys, reader = (np.repeat(token[name], share, axis=1) for name in ("keys", "reader"))
    values, first, second = token["values"], token["first"], token["second"]
    if shape.recurrence == "mamba2":
        a, d = mamba2_rates(shape.heads)
        state = np.exp(a * first)[..., None, None] * state
        state = state + np.einsum("bh,bhv,bhk->bhvk", first, values, keys)
        return np.einsum("bhvk,bhk->bhv", state, reader) + d[:, None] * values, state
    state = np.exp(first)[..., None, None] * state
    update = second[..., None] * (values - np.einsum("bhvk,bhk->bhv", state, keys))
    state = state + np.einsum("bhv,bhk->bhvk", update, keys)
    return np.einsum("bhvk,bhk->bhv", state, reader), state


def error(peer: Peer, parameters: tuple[int, ...], seed: int = 0) -> float:
    """Largest RMS ratio of a peer's outputs, and of its state after a flush, to the float64 loop, over a
    cycle."""

    def ratio(measured: Any, wanted: np.ndarray) -> float:
        difference = measured.double().cpu().numpy() - wanted
        return float(np.sqrt(np.mean(difference**2) / np.mean(wanted**2)))

    rng = np.random.default_rng(seed)
    state = peer.states(parameters).double().cpu().numpy()
    errors = []
    for length in peer.cycle():
        window = [tokens(peer.shape, peer.batch, rng) for _ in range(peer.window)]
        peer.new_window(window)
        peer.set_lengths(np.full(peer.batch, length))
        peer.launch(parameters)
        before, wanted = state, []
        for token in window:
            one, state = serial_step(peer.shape, state, token)
            wanted.append(one)
        errors.append(ratio(peer.outputs(), np.stack(wanted, axis=1)))
        if length + peer.window > peer.buffer_length or not peer.replay:
            errors.append(ratio(peer.states(parameters), state if peer.folds_new else before))
    return max(errors)


Factory = Callable[[Path, Shape, Case], Peer]
