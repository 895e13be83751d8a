"""What the kernel benchmark measures: cases, the phases of their rows, the bytes that each step must move."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench.shapes import SHAPES, Shape
from replayssm_jax.precision import BITS

# Ceilings measured on one H200 by CUPTI: a pure read stream, and a copy counting both directions.
READ_BYTES_A_US = 4.58e6
COPY_BYTES_A_US = 4.29e6
ACTIVATION_BYTES = 2
BATCHES = tuple(2**i for i in range(11))
MAIN = ("super", "q122", "nano-4b", "qwen3.5-4b")
PEERS = {
    "mamba2": ("vllm", "vllm-replay", "authors-replay", "mamba-ssm", "flashinfer", "flashinfer-replay"),
    "gated_delta": ("vllm", "fla", "authors-replay"),
}
# Formats of a copy that outputs read, and of its checkpoint.
COPIES = (("nvfp4", "fp32"), ("fp8_e4m3", "fp32"), ("nvfp4", "fp16"))
# Peers that are also timed at other batches than 256, and at which.
LEADING = ("vllm", "vllm-replay", "authors-replay", "fla")
LEADING_BATCHES = (1, 16, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size: what is traced and compiled once.

    state: format that outputs read. recurrence: format of the checkpoint where outputs read a copy of it, ""
    where they read the checkpoint. launch: launch parameters that differ from the table's.
    """

    shape: str
    batch: int
    method: str
    tokens: int = 1
    state: str = "fp32"
    recurrence: str = ""
    buffer_length: int = 16
    launch: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        words = (
            self.shape,
            "batch",
            self.batch,
            self.method,
            "T",
            self.tokens,
            f"{self.state} of {self.recurrence}" if self.recurrence else self.state,
            "L",
            self.buffer_length,
        )
        return " ".join(map(str, words + tuple(f"{name}={value}" for name, value in self.launch)))


def cases(names: Iterable[str], batches: Iterable[int], peers: bool) -> list[Case]:
    """Every case of the full benchmark, those of the headline figures first."""
    main = [name for name in names if name in MAIN]
    first, *others = sorted(batches, key=lambda batch: (batch != 256, -batch))
    listed = []

    def add(name: str, methods: Iterable[str], **fields: Any) -> None:
        listed.extend(Case(shape=name, method=method, **fields) for method in methods)

    def of(name: str, chosen: Iterable[str] | None = None) -> list[str]:
        mine = PEERS[SHAPES[name].recurrence] if peers and name in main else ()
        return [f"peer:{peer}" for peer in mine if chosen is None or peer in chosen]

    for name in names:
        add(name, ("replay", "eager", *of(name)), batch=first)
    for name in main:
        add(name, ("replay", *of(name, ("authors-replay",))), batch=first, tokens=4)
        for state in ("bf16", "fp16"):
            add(name, ("replay", "eager"), batch=first, state=state)
    for name in main:
        for state, recurrence in COPIES:
            add(name, ("replay",), batch=first, state=state, recurrence=recurrence)
        add(name, ("replay",), batch=first, tokens=4, state="nvfp4", recurrence="fp32")
    for name in main:
        for tokens in (2, 8):
            add(name, ("replay",), batch=first, tokens=tokens)
    for batch in others:
        for name in main:
            add(name, ("replay", "eager"), batch=batch)
    for name in main:
        for buffer_length in (8, 32):
            add(name, ("replay",), batch=first, buffer_length=buffer_length)
        add(name, of(name, ("vllm", "vllm-replay", "authors-replay")), batch=first, state="bf16")
    for batch in (batch for batch in others if batch in LEADING_BATCHES):
        for name in main:
            add(name, of(name, LEADING), batch=batch)
    return listed


def stationary(tokens: int, buffer_length: int) -> np.ndarray:
    """Probability of each committed length 0..L before a step that commits 1..T tokens, each count equally
    often."""
    size = buffer_length + 1
    transition = np.zeros((size, size))
    for length in range(size):
        kept = 0 if length + tokens > buffer_length else length
        for accepted in range(1, tokens + 1):
            transition[length, kept + accepted] += 1 / tokens
    balance = np.vstack([transition.T - np.eye(size), np.ones(size)])
    law = np.linalg.lstsq(balance, np.eye(size + 1)[-1], rcond=None)[0]
    return np.clip(law, 0.0, None)


def phases(batch: int, tokens: int, buffer_length: int) -> np.ndarray:
    """Committed lengths of the rows, [steps, batch]: a stratified draw of the stationary law, as many as make
    it exact."""
    law = np.cumsum(stationary(tokens, buffer_length))
    steps = max(1, -(-buffer_length // batch))
    places = (np.arange(steps * batch) + 0.5) / (steps * batch)
    lengths = np.minimum(np.searchsorted(law, places), buffer_length)
    return np.random.default_rng(0).permutation(lengths).reshape(steps, batch)


def state_bytes(shape: Shape, format: str) -> float:
    """Bytes of one row's state; fp8_e4m3 and nvfp4 have a float32 scale a row of K, nvfp4 a byte for 16."""
    scales = 32 / shape.d_state if format in ("fp8_e4m3", "nvfp4") else 0.0
    scales += 8 / 16 if format == "nvfp4" else 0.0
    return shape.state_elements() * (BITS[format] + scales) / 8


def traffic(case: Case, lengths: np.ndarray, flush: np.ndarray) -> tuple[float, float]:
    """Bytes that a replay step must read or write once, and bytes of state that it must rewrite, counted
    once; lengths, flush [batch]."""
    shape, tokens = SHAPES[case.shape], case.tokens
    read, checkpoint = (state_bytes(shape, format) for format in (case.state, case.recurrence or case.state))
    entry = shape.token_bytes(ACTIVATION_BYTES)
    rows = lengths.size
    streamed = (rows - flush.sum()) * read + lengths.sum() * entry + rows * tokens * entry
    streamed += rows * tokens * (entry + shape.heads * shape.head_dim * ACTIVATION_BYTES)
    if case.recurrence:
        streamed += flush.sum() * read
    return float(streamed), float(flush.sum() * checkpoint)


def bounds(case: Case, lengths: np.ndarray, flush: np.ndarray) -> dict:
    """Bytes moved a step and the time that they take at the measured ceilings; lengths and flush [steps,
    batch]."""
    moved = [traffic(case, a, b) for a, b in zip(lengths, flush, strict=True)]
    streamed, rewritten = (float(x) for x in np.mean(moved, axis=0))
    floor = streamed / READ_BYTES_A_US + 2 * rewritten / COPY_BYTES_A_US
    return {"bytes": int(streamed + 2 * rewritten), "floor_us": round(floor, 2)}


def record(case: Case, times: np.ndarray, operation: str, phase: str, **fields: Any) -> dict:
    """One record; times [launches] in microseconds."""
    return {
        "shape": case.shape,
        "batch": case.batch,
        "method": case.method,
        "implementation": "pallas",
        "op": operation,
        "phases": phase,
        "state": case.state,
        "recurrence": case.recurrence or case.state,
        "window": case.tokens,
        "buffer_length": case.buffer_length,
        **({"launch": dict(case.launch)} if case.launch else {}),
        "time_us": round(float(np.median(times)), 2),
        "spread_us": [round(float(np.percentile(times, q)), 2) for q in (10, 90)],
    } | fields


def programs(case: Case) -> list[tuple[str, str, np.ndarray]]:
    """(operation, phases, lengths [steps, batch]) that a replay case times."""
    length, batch = case.buffer_length, case.batch
    amortised = "decode" if case.tokens == 1 else "verify"
    middle = min(length // 2, length - case.tokens)
    cycle = np.arange(1, length + 1)[:, None].repeat(batch, axis=1)
    listed = [
        (amortised, "random", phases(batch, case.tokens, length)),
        ("nonflush", "synchronised", np.full((1, batch), middle)),
        ("flush", "synchronised", np.full((1, batch), length)),
    ]
    if case.tokens == 1:
        listed.append((amortised, "synchronised", cycle))
    return listed


def step_means(times: Sequence[float] | np.ndarray, steps: int) -> np.ndarray:
    """[repeats] means over the steps of one pass through a program; times in order, of any shape."""
    return np.asarray(times).reshape(-1, steps).mean(axis=1)
