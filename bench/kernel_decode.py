"""Decode kernels of one layer on a GPU: replay and eager, at the true flush rate, against the byte floor.

CUPTI times of the kernels alone, states far larger than the L2 cache. `decode` with random phases is one
launch pair over rows in stratified phases; with synchronised phases the mean over the steps between two
flushes. The row plan (a few small XLA kernels a step, shared by all layers) is not counted. Records follow
the timing schema of the result files.

    python -m bench.kernel_decode --commit HASH [--shapes super,q122] [--batches 256] [--out PATH] [--quick]
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import result_file
from bench.shapes import SHAPES, Shape
from pallas_kernels import gated_delta, launch, mamba2

KERNELS = {"mamba2": mamba2, "gated_delta": gated_delta}
# Ceilings measured on one H200 by CUPTI: a pure read stream, and a copy counting both directions.
READ_BYTES_A_US = 4.58e6
COPY_BYTES_A_US = 4.29e6


def draw(shape: Shape, batch: int, tokens: int, slots: int, state: Any, activation: Any) -> tuple:
    """Random checkpoint, ring, new tokens, reader, constants and ring origins of a layer."""
    keys = iter(jax.random.split(jax.random.key(batch), 16))
    width = shape.heads // shape.groups * shape.head_dim

    def normal(*size: int, dtype: Any) -> jax.Array:
        return jax.random.normal(next(keys), size, jnp.float32).astype(dtype)

    def tokens_of(count: int) -> tuple:
        values = normal(batch, shape.groups, count, width, dtype=activation)
        vectors = normal(batch, shape.groups, count, shape.d_state, dtype=jnp.float32) / np.sqrt(
            shape.d_state
        )
        scalar = functools.partial(jax.random.uniform, shape=(batch, count, shape.heads))
        if shape.recurrence == "mamba2":
            return values, vectors.astype(activation), scalar(next(keys), minval=0.001, maxval=0.1)
        return (
            values,
            vectors.astype(activation),
            -scalar(next(keys), minval=0.001, maxval=0.5),
            scalar(next(keys), minval=0.1, maxval=0.9),
        )

    constants = None
    if shape.recurrence == "mamba2":
        constants = jnp.stack([jnp.linspace(-8.0, -1.0, shape.heads), jnp.ones(shape.heads)])
    return (
        normal(batch, shape.heads, shape.head_dim, shape.d_state, dtype=state),
        tokens_of(slots),
        tokens_of(tokens),
        normal(batch, shape.groups, tokens, shape.d_state, dtype=activation),
        constants,
        jax.random.randint(next(keys), (batch,), 0, 10_000),
    )


def kernel_times(function: Any, arguments: tuple, repeats: int) -> np.ndarray:
    """Microseconds of our kernels in each of `repeats` launches, copies and helpers of XLA left out."""
    from jax.experimental.mosaic.gpu import profiler

    _, launches = profiler.measure(jax.jit(function), aggregate=False, iterations=repeats)(*arguments)
    if launches is None:
        raise RuntimeError("no kernel ran on a GPU")
    return np.array([sum(ms for name, ms in one if "mosaic" in name) * 1e3 for one in launches])


def traffic(
    shape: Shape, lengths: np.ndarray, flush: np.ndarray, tokens: int, state: int, activation: int
) -> tuple:
    """Bytes that a replay step must read, and bytes of state that it must rewrite (counted once)."""
    rows = len(lengths)
    one_state = shape.state_elements() * state
    entry = shape.token_bytes(activation)
    read = (rows - flush.sum()) * one_state + lengths.sum() * entry + rows * tokens * entry
    written = rows * tokens * (entry + shape.heads * shape.head_dim * activation)
    return float(read + written), float(flush.sum() * one_state)


def record(times: np.ndarray, shape: str, batch: int, **fields: Any) -> dict:
    """One record with the median and its spread; `moved` = (bytes streamed, bytes rewritten)."""
    streamed, rewritten = fields.pop("moved")
    return {
        "shape": shape,
        "batch": batch,
        "implementation": "pallas",
        **fields,
        "time_us": round(float(np.median(times)), 2),
        "spread_us": [round(float(np.percentile(times, q)), 2) for q in (10, 90)],
        "bytes": int(streamed + 2 * rewritten),
        "floor_us": round(streamed / READ_BYTES_A_US + 2 * rewritten / COPY_BYTES_A_US, 2),
    }


def measure(
    name: str, batch: int, *, tokens: int, buffer_length: int, state: str, repeats: int
) -> list[dict]:
    """Records of one shape: eager (one token), decode with random and synchronised phases, or verify."""
    shape = SHAPES[name]
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[state]
    activation = jnp.bfloat16
    slots = launch.ring_slots(buffer_length, tokens)
    *arguments, start = draw(shape, batch, tokens, slots, dtype, activation)
    kernels = KERNELS[shape.recurrence]
    sizes = {"state": dtype.dtype.itemsize, "activation": activation.dtype.itemsize}
    common = {"state": state, "recurrence": state, "window": tokens, "buffer_length": buffer_length}
    records = []

    def replay(lengths: np.ndarray) -> tuple[np.ndarray, tuple]:
        flush = lengths + tokens > buffer_length
        step = functools.partial(kernels.step, out_dtype=activation)
        plan = launch.plan(jnp.asarray(flush), start, jnp.asarray(lengths, jnp.int32))
        times = kernel_times(step, (*arguments, plan), repeats)
        return times, traffic(shape, lengths, flush, tokens, **sizes)

    # One token: a cycle visits lengths 1..L, and flushes at L. Several: accepted counts differ, so any length
    # may come.
    cycle = np.arange(1, buffer_length + 1) if tokens == 1 else np.arange(buffer_length + 1)
    phases = np.random.default_rng(0).permutation(np.resize(cycle, batch))
    operation = "decode" if tokens == 1 else "verify"
    times, moved = replay(phases)
    records.append(
        record(times, name, batch, method="replay", op=operation, phases="random", moved=moved, **common)
    )
    middle = np.full(batch, buffer_length // 2)
    times, moved = replay(middle)
    records.append(
        record(
            times, name, batch, method="replay", op="nonflush", phases="synchronised", moved=moved, **common
        )
    )
    full, moved_full = replay(np.full(batch, buffer_length))
    records.append(
        record(
            full, name, batch, method="replay", op="flush", phases="synchronised", moved=moved_full, **common
        )
    )
    if tokens == 1:
        runs = [replay(np.full(batch, length)) for length in cycle]
        moved = tuple(float(np.mean([m[i] for _, m in runs])) for i in range(2))
        mean = np.mean([t for t, _ in runs], axis=0)
        records.append(
            record(
                mean, name, batch, method="replay", op="decode", phases="synchronised", moved=moved, **common
            )
        )
        checkpoint, _, new, reader, constants = arguments
        eager = functools.partial(kernels.eager, out_dtype=activation)
        times = kernel_times(eager, (checkpoint, new, reader, constants), repeats)
        moved = traffic(shape, np.zeros(batch, int), np.ones(batch, bool), 1, **sizes)
        records.append(
            record(
                times, name, batch, method="eager", op="decode", phases="synchronised", moved=moved, **common
            )
        )
    return records


def table(records: list[dict]) -> str:
    """The records as lines of text, with the ratio to the floor."""
    names = ("shape", "batch", "method", "op", "phases", "state", "T", "us", "/floor")
    lines = ["{:12} {:>5} {:7} {:9} {:13} {:5} {:>2} {:>8} {:>7}".format(*names)]
    for r in records:
        ratio = r["time_us"] / r["floor_us"]
        lines.append(
            f"{r['shape']:12} {r['batch']:5} {r['method']:7} {r['op']:9} {r['phases']:13} {r['state']:5} "
            f"{r['window']:2} {r['time_us']:8.1f} {ratio:7.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line; prints a table last and writes the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", required=True)
    parser.add_argument("--shapes", default="super,nano-4b,q122,qwen3.5-4b")
    parser.add_argument("--batches", default="256")
    parser.add_argument("--windows", default="1,4")
    parser.add_argument("--states", default="fp32,bf16,fp16")
    parser.add_argument("--buffer-length", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=result_file.RESULTS / "kernel_decode.json")
    options = parser.parse_args()
    result = result_file.head("bench.kernel_decode", options.commit)
    result["records"] = []
    for name in options.shapes.split(","):
        for batch in map(int, options.batches.split(",")):
            for tokens in map(int, options.windows.split(",")):
                for state in options.states.split(","):
                    if batch != 256 and (tokens != 1 or state != "fp32"):
                        continue
                    settings = {"tokens": tokens, "state": state, "repeats": options.repeats}
                    try:
                        records = measure(name, batch, buffer_length=options.buffer_length, **settings)
                    except Exception as error:  # One failing variant must not lose the others' results.
                        print(
                            f"{name} batch {batch} T {tokens} {state}: {type(error).__name__}: {error}"[:500]
                        )
                        continue
                    result["records"] += records
                    result_file.write(result, options.out)
                    print(table(records), flush=True)
    print(table(result["records"]))


if __name__ == "__main__":
    main()
