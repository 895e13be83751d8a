"""Bytes and operations of one decode step, from a model's configuration, and the time they take at best.

Three methods: `eager` (the state read and written for its one token), `replay` (the state read, written by
the rows that flush; T tokens, 1 in plain decoding), `conventional` (T tokens, the state read once and written
T times). A part is a kind of work: it takes the larger of bytes over bandwidth and operations over speed. The
floor of a step is the sum over parts: one part's memory traffic does not overlap another's arithmetic.

    python -m bench.roofline --model nano-4b --batch 512 --window 4
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.e2e_models import depth_cut, published, with_head
from bench.kernel_cases import COPY_BYTES_A_US, READ_BYTES_A_US
from models.base import HybridModel
from models.checkpoint import abstract_model
from models.config import ModelConfig
from replayssm_jax import precision
from replayssm_jax.cache import AttentionSpec, RecurrentSpec
from replayssm_jax.recurrence import RECURRENCES

METHODS = ("eager", "replay", "conventional")
# What the H200's data sheet promises for dense bfloat16; its power limit does not allow it for long.
DATA_SHEET_FLOPS = 989e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Speeds of a device, measured on one H200: a read-only stream; a copy, both directions counted; XLA's
    bfloat16 product of two 8192 x 8192 matrices, back to back (bench/NOTES.md)."""

    read: float = READ_BYTES_A_US * 1e6
    copy: float = COPY_BYTES_A_US * 1e6
    flops: float = 799e12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Work of one kind: bytes only read, bytes of data rewritten in place (both directions), operations."""

    read: float = 0.0
    copied: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes that move."""
        return self.read + self.copied

    def seconds(self, ceilings: Ceilings) -> float:
        """The larger of the time for the bytes and the time for the operations."""
        return max(self.read / ceilings.read + self.copied / ceilings.copy, self.flops / ceilings.flops)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
    """What a row does in the long run: `flushing` share of steps that flush, `length` mean committed ring
    entries before a step, `probability` of every length 0..L, `accepted` tokens committed a step."""

    flushing: float
    length: float
    probability: np.ndarray
    accepted: float


def phases(accepted: Sequence[float], buffer_length: int) -> Phases:
    """The stationary distribution of a row's ring length.

    accepted: probability that a step of T tokens commits 1, 2, .. T of them. A row with more than
    buffer_length - T entries flushes first.
    """
    odds = np.asarray(accepted, np.float64)
    if odds.ndim != 1 or odds.min() < 0 or abs(odds.sum() - 1.0) > 1e-6:
        raise ValueError(f"accepted must be the probabilities of committing 1..T tokens, got {accepted!r}.")
    tokens = len(odds)
    if buffer_length < tokens:
        raise ValueError(f"buffer_length must be at least {tokens}, got {buffer_length}.")
    move = np.zeros((buffer_length + 1, buffer_length + 1))
    for length in range(buffer_length + 1):
        first = 0 if length + tokens > buffer_length else length
        for count, chance in enumerate(odds, start=1):
            move[length, first + count] += chance
    # One equation too many, as they depend on each other: the balance of every length, and the sum of all.
    system = np.vstack([move.T - np.eye(buffer_length + 1), np.ones(buffer_length + 1)])
    right = np.zeros(buffer_length + 2)
    right[-1] = 1.0
    probability = np.clip(np.linalg.lstsq(system, right, rcond=None)[0], 0.0, None)
    lengths = np.arange(buffer_length + 1)
    return Phases(
        flushing=float(probability[lengths + tokens > buffer_length].sum()),
        length=float(probability @ lengths),
        probability=probability / probability.sum(),
        accepted=float(odds @ np.arange(1, tokens + 1)),
    )


def draft_rate(tokens: int, mean: float) -> float:
    """The chance of a draft to be accepted after those before it, so that a step of `tokens` commits `mean`.

    Raises ValueError for a mean outside 1..tokens.
    """
    if not 1.0 <= mean <= tokens:
        raise ValueError(f"the mean of 1..{tokens} committed tokens cannot be {mean}.")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if committed(tokens, rate) < mean else (low, rate)
    return high


def committed(tokens: int, rate: float) -> float:
    """Mean tokens committed by a step of `tokens`, drafts accepted at `rate`."""
    return sum(rate**i for i in range(tokens))


def histogram(tokens: int, mean: float) -> tuple[float, ...]:
    """Probabilities of committing 1..tokens tokens with the given mean, every draft accepted at one rate."""
    rate = draft_rate(tokens, mean)
    return tuple(rate**i * (1.0 - rate if i < tokens - 1 else 1.0) for i in range(tokens))


@functools.cache
def _model(config: ModelConfig) -> HybridModel:
    return abstract_model(config, jnp.dtype(jnp.bfloat16))


def step_parts(
    config: ModelConfig,
    method: str,
    batch: int,
    *,
    accepted: Sequence[float] = (1.0,),
    buffer_length: int = 16,
    context: float = 512.0,
    activation_bytes: int = 2,
    recurrence: str = "fp32",
    read: str = "fp32",
) -> dict[str, Part]:
    """The parts of one step: weights, head, state, ring, conv, kv, activations, logits.

    accepted: as for `phases`; its length is T, the tokens of a step. context: mean committed tokens of a row,
    whose keys and values are read. Weights and activations have `activation_bytes`. recurrence, read: formats
    of the checkpoint and of what a replay step reads; where they differ, a flush writes a copy too. Other
    states are float32.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if method == "eager" and len(accepted) != 1:
        raise ValueError(f"an eager step takes one token, got the probabilities of {len(accepted)}.")
    model = _model(config)
    tokens = len(accepted)
    rows, width = batch * tokens, activation_bytes
    recurrent = [spec for spec in model.cache_specs() if isinstance(spec, RecurrentSpec)]
    attention = [spec for spec in model.cache_specs() if isinstance(spec, AttentionSpec)]
    state = batch * state_bytes(recurrent, "fp32")
    column = sum(spec.conv_channels for spec in recurrent) * batch * width
    past = max((spec.conv_kernel - 1 for spec in recurrent), default=0)
    token_kv = sum(2 * spec.kv_heads * spec.head_dim for spec in attention) * batch * width
    scores = len(attention) * config.num_attention_heads * config.head_dim
    ring = Part()
    if method == "eager":
        states = Part(copied=2 * state)
    elif method == "conventional":
        states = Part(copied=(1 + tokens) * state)
    else:
        long_run = phases(accepted, buffer_length)
        entry = sum(entry_bytes(spec) for spec in recurrent) * batch
        checkpoint, copy = (batch * state_bytes(recurrent, format) for format in (recurrence, read))
        rewritten = 2 * checkpoint + (copy if read != recurrence else 0)
        states = Part(read=(1 - long_run.flushing) * copy, copied=long_run.flushing * rewritten)
        ring = Part(read=long_run.length * entry, copied=tokens * entry)
    kernels = matrices(model.layers)
    weights = sum(math.prod(shape) for shape in kernels)
    head = math.prod((model.embed if model.lm_head is None else model.lm_head).weight.shape)
    return {
        "weights": Part(read=weights * width, flops=2.0 * weights * rows),
        "head": Part(read=head * width, flops=2.0 * head * rows),
        "state": states,
        "ring": ring,
        "conv": Part(read=past * column, copied=tokens * column),
        "kv": Part(read=context * token_kv, copied=tokens * token_kv, flops=4.0 * rows * context * scores),
        "activations": Part(copied=sum(map(sum, kernels)) * rows * width),
        "logits": Part(copied=2.0 * rows * config.vocab_size * 4),
    }


def matrices(layers: nnx.Module) -> list[tuple[int, ...]]:
    """Shapes (inputs, outputs) of the layers' projections."""
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    return [leaf.shape for path, leaf in leaves if ".kernel" in jax.tree_util.keystr(path)]


def state_bytes(specs: Sequence[RecurrentSpec], format: str) -> int:
    """Bytes of one row's states in a format, scales included."""

    def stored() -> list:
        return [precision.zeros((spec.heads, spec.head_dim, spec.d_state), format) for spec in specs]

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(stored)))


def entry_bytes(spec: RecurrentSpec) -> int:
    """Bytes of one ring entry of one row, activations in bfloat16."""
    entry = jax.eval_shape(
        lambda: RECURRENCES[spec.recurrence].zeros(
            1,
            1,
            heads=spec.heads,
            groups=spec.groups,
            head_dim=spec.head_dim,
            d_state=spec.d_state,
            dtype=jnp.bfloat16,
        )
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(entry))


def floor(parts: dict[str, Part], ceilings: Ceilings) -> float:
    """Seconds of a step at the roofline."""
    return sum(part.seconds(ceilings) for part in parts.values())


def bounds(
    config: ModelConfig,
    batch: int,
    ceilings: Ceilings,
    *,
    accepted: Sequence[float],
    buffer_length: int = 16,
    context: float = 512.0,
) -> dict[str, float]:
    """Tokens a second of a replay step of T tokens over those of another method, all at their floors.

    The other: "conventional", which verifies T tokens too, or "eager", which decodes one. Arguments as for
    `step_parts`.
    """

    def rate(method: str, accepted: Sequence[float]) -> float:
        parts = step_parts(
            config, method, batch, accepted=accepted, buffer_length=buffer_length, context=context
        )
        return float(np.dot(accepted, np.arange(1, len(accepted) + 1))) / floor(parts, ceilings)

    replay = rate("replay", accepted)
    return {"conventional": replay / rate("conventional", accepted), "eager": replay / rate("eager", (1.0,))}


@functools.cache
def _record_parts(
    shape: str,
    layers: int | None,
    with_drafter: bool,
    method: str,
    batch: int,
    window: int,
    accepted: float,
    buffer_length: int,
    context: int,
    recurrence: str,
    read: str,
) -> dict[str, Part]:
    config = depth_cut(published(shape), layers)
    return step_parts(
        with_head(config) if with_drafter else config,
        method,
        batch,
        accepted=histogram(window, accepted),
        buffer_length=buffer_length,
        context=context,
        recurrence=recurrence,
        read=read,
    )


def floor_parts_of(record: dict, ceilings: Ceilings | None = None) -> dict[str, float]:
    """Microseconds of the floor's parts for the step of a record of `bench.decode_loop`, from its sizes.

    So records of different dates are held against one model and one set of ceilings.
    """
    layers = record["layers"] if record["depth_cut"] else None
    names = ("method", "batch", "window", "accepted", "buffer_length", "context", "recurrence", "state")
    sizes = (record[name] for name in names)
    parts = _record_parts(record["shape"], layers, "drafter" in record, *sizes)
    return {name: part.seconds(ceilings or Ceilings()) * 1e6 for name, part in parts.items()}


@functools.cache
def _bounds_at(
    shape: str, layers: int | None, batch: int, window: int, accepted: float, length: int, context: int
):
    config, odds = depth_cut(published(shape), layers), histogram(window, accepted)
    sizes = {"accepted": odds, "buffer_length": length, "context": context}
    return bounds(config, batch, Ceilings(), **sizes)


def bounds_of(record: dict) -> dict[str, float]:
    """`bounds` of a replay record of T tokens: its own, or from its sizes where it was written without."""
    if "bounds" in record or "context" not in record or record["window"] == 1:
        return record.get("bounds", {})
    layers = record["layers"] if record["depth_cut"] else None
    sizes = (record[name] for name in ("batch", "window", "accepted", "buffer_length", "context"))
    return _bounds_at(record["shape"], layers, *sizes)


def total_bytes(parts: dict[str, Part]) -> float:
    """Bytes that a step moves."""
    return sum(part.bytes for part in parts.values())


def table(parts: dict[str, Part], ceilings: Ceilings) -> str:
    """A line a part: bytes, operations, microseconds and which of the two bounds it."""
    lines = [f"{'part':12}{'MB':>10}{'GFLOP':>10}{'us':>10}  bound"]
    for name, part in parts.items():
        seconds = part.seconds(ceilings)
        bound = "flops" if part.flops and seconds == part.flops / ceilings.flops else "bytes"
        lines.append(
            f"{name:12}{part.bytes / 1e6:10.1f}{part.flops / 1e9:10.1f}{seconds * 1e6:10.1f}  {bound}"
        )
    lines.append(f"{'step':12}{total_bytes(parts) / 1e6:10.1f}{'':10}{floor(parts, ceilings) * 1e6:10.1f}")
    return "\n".join(lines)


def main() -> None:
    """Command line; prints the parts of every method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano-4b")
    parser.add_argument("--layers", type=int, help="depth cut")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--window", type=int, default=4, help="T of the speculative methods")
    parser.add_argument(
        "--mean-accepted", type=float, default=3.0, help="tokens committed a speculative step"
    )
    parser.add_argument("--buffer-length", type=int, default=16)
    parser.add_argument("--context", type=float, default=512.0)
    for field in dataclasses.fields(Ceilings):
        parser.add_argument(f"--{field.name}", type=float, default=field.default)
    options = parser.parse_args()
    config = depth_cut(published(options.model), options.layers)
    ceilings = Ceilings(read=options.read, copy=options.copy, flops=options.flops)
    spread = histogram(options.window, options.mean_accepted)
    sizes = {"buffer_length": options.buffer_length, "context": options.context}
    for method, accepted in (
        ("eager", (1.0,)),
        ("replay", (1.0,)),
        ("replay", spread),
        ("conventional", spread),
    ):
        parts = step_parts(config, method, options.batch, accepted=accepted, **sizes)
        tokens = options.batch * float(np.dot(accepted, np.arange(1, len(accepted) + 1)))
        print(
            f"\n{method}, T = {len(accepted)}: {tokens / floor(parts, ceilings):,.0f} tokens a second at best"
        )
        print(table(parts, ceilings))
    for other, gain in bounds(config, options.batch, ceilings, accepted=spread, **sizes).items():
        print(f"replay, T = {options.window}, over {other}: {gain:.2f} at best")


if __name__ == "__main__":
    main()
