"""The timed loop of the end-to-end benchmarks: one method on one published model, in a process of its own.

A dispatch runs `steps` decode steps on the device: forward pass, argmax over the logits of every token,
commit of drawn counts, and the next tokens (the chosen one, and drafts that a hash makes up). So a
speculative step costs its verification and its choice of tokens; a drafter's own work is not in it. Rows
start in the long-run distribution of their ring lengths, at positions within 64 tokens of each other.

    python -m bench.decode_loop '{"setting": {"model": "nano-4b", "batch": 256, "method": "replay"}}'
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import roofline
from bench.conventional import conventional_cache
from bench.e2e_models import depth_cut, layer_kinds, published, random_model
from models.checkpoint import abstract_model, parameter_count
from pallas_kernels.numerics import hash_uint32
from replayssm_jax.cache import Cache
from replayssm_jax.config import ReplayConfig
from replayssm_jax.decode import FlatModel
from replayssm_jax.replay import commit_core, step_core

SPREAD = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One measurement.

    model, layers: a published model and its depth cut (None: whole). method: "eager", "replay" or
    "conventional"; window: T, 1 in plain decoding. mean_accepted: tokens committed a step. context: committed
    tokens of a row, about. implementation: of replay and eager. steps: a dispatch. synchronised: all rows
    start with the same ring length.
    """

    model: str
    layers: int | None = None
    batch: int
    method: str
    window: int = 1
    mean_accepted: float = 1.0
    buffer_length: int = 16
    context: int = 512
    implementation: str = "pallas"
    steps: int = 16
    repeats: int = 5
    synchronised: bool = False

    @property
    def accepted(self) -> tuple[float, ...]:
        """Probabilities of committing 1..window tokens."""
        return roofline.histogram(self.window, self.mean_accepted)

    @property
    def max_length(self) -> int:
        """Columns for keys and values: the context, and room for a dispatch."""
        needed = self.context + SPREAD + (self.steps + 1) * self.window
        return -(-needed // 128) * 128

    @property
    def replay(self) -> ReplayConfig:
        """The configuration of a replay cache."""
        return ReplayConfig(
            buffer_length=self.buffer_length, window=self.window, implementation=self.implementation
        )


def empty_cache(setting: Setting, model: Any, batch: int, max_length: int) -> Cache:
    """An empty cache of the setting's method; call it inside `jit`."""
    if setting.method == "replay":
        return model.init_cache(batch, max_length, setting.replay)
    return conventional_cache(model, batch, max_length, setting.window, setting.implementation)


@functools.partial(jax.jit, donate_argnums=(1, 2))
def decode_steps(
    model: FlatModel,
    tokens: jax.Array,
    cache: Cache,
    start: jax.Array,
    length: jax.Array,
    accepted: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Steps from the cursors start and length; accepted int32 [steps, B] are the counts that they commit."""
    network = model.unflatten()
    vocabulary = network.config.vocab_size
    drafts = jnp.arange(tokens.shape[1], dtype=jnp.uint32)[None, :]

    def one(step: jax.Array, carry: tuple) -> tuple:
        tokens, cache = carry
        logits, _, cache = step_core(network, tokens, cache)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        cache = commit_core(cache, accepted[step])
        chosen = jnp.take_along_axis(best, accepted[step][:, None] - 1, axis=1)
        made_up = hash_uint32(chosen, drafts) % jnp.uint32(vocabulary)
        return jnp.where(drafts == 0, chosen, made_up.astype(jnp.int32)), cache

    cache = dataclasses.replace(cache, start=start, length=length)
    return jax.lax.fori_loop(0, accepted.shape[0], one, (tokens, cache))


def cursors(setting: Setting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """start and length int32 [B] of the first step, and the counts int32 [steps, B] that the steps commit."""
    rng = np.random.default_rng(0)
    counts = np.arange(1, setting.window + 1)
    accepted = rng.choice(counts, (setting.steps, setting.batch), p=setting.accepted).astype(np.int32)
    position = setting.context + rng.integers(0, SPREAD, setting.batch)
    length = np.zeros(setting.batch, np.int64)
    if setting.method == "replay":
        odds = roofline.phases(setting.accepted, setting.buffer_length).probability
        length = rng.choice(len(odds), setting.batch, p=odds)
        if setting.synchronised:
            length[:] = 1
    return (position - length).astype(np.int32), length.astype(np.int32), accepted


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Holds the lock file, so that processes side by side use the device one after the other."""
    if lock is None:
        yield
        return
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def measure(setting: Setting, lock: Path | None = None, trace: Path | None = None) -> dict:
    """The record of one setting; compiles before it takes the lock. trace: a folder for a profile."""
    config = depth_cut(published(setting.model), setting.layers)
    network = random_model(config)
    model = FlatModel.of(network)
    start, length, accepted = cursors(setting)
    build = jax.jit(lambda: empty_cache(setting, network, setting.batch, setting.max_length))
    shapes = jax.eval_shape(build)
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.window), jnp.int32)
    began = time.perf_counter()
    traced = decode_steps.trace(model, tokens, shapes, start, length, accepted)
    lowered = traced.lower()
    lowering = time.perf_counter() - began
    compiled = lowered.compile()
    compiling = time.perf_counter() - began - lowering
    memory: Any = compiled.memory_analysis()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    with turn(lock):
        cache = build()
        tokens = jnp.zeros(tokens.shape, tokens.dtype)
        seconds = []
        for repeat in range(setting.repeats + 2):
            if trace is not None and repeat == setting.repeats + 1:
                jax.profiler.start_trace(str(trace))
            jax.block_until_ready(tokens)
            began = time.perf_counter()
            tokens, cache = compiled(model, tokens, cache, start, length, accepted)
            jax.block_until_ready(tokens)
            seconds.append((time.perf_counter() - began) / setting.steps)
        if trace is not None:
            jax.profiler.stop_trace()
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        del cache
    # The first dispatch warms up, the last one may have been traced.
    times = np.array(seconds[1:-1])
    parts = roofline.step_parts(
        config,
        setting.method if setting.method != "conventional" or setting.window > 1 else "eager",
        setting.batch,
        accepted=setting.accepted,
        buffer_length=setting.buffer_length,
        context=setting.context + SPREAD / 2,
    )
    middle = float(np.median(times))
    return {
        "shape": setting.model,
        "layers": len(network.layers),
        "depth_cut": setting.layers is not None,
        "batch": setting.batch,
        "method": setting.method,
        "implementation": setting.implementation,
        "op": "verify" if setting.window > 1 else "decode",
        "state": "fp32",
        "recurrence": "fp32",
        "window": setting.window,
        "buffer_length": setting.buffer_length,
        "phases": "synchronised" if setting.synchronised else "random",
        "context": setting.context,
        "accepted": round(float(accepted.mean()), 4),
        "time_us": round(middle * 1e6, 1),
        "spread_us": [round(float(np.percentile(times, q)) * 1e6, 1) for q in (10, 90)],
        "tokens_per_second": round(setting.batch * float(accepted.mean()) / middle, 1),
        "bytes": int(roofline.total_bytes(parts)),
        "floor_us": round(roofline.floor(parts, roofline.Ceilings()) * 1e6, 1),
        "peak_bytes": int(peak),
        "cache_bytes": int(size),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "aliased_bytes": int(memory.alias_size_in_bytes),
        "lowering_s": round(lowering, 1),
        "compile_s": round(compiling, 1),
    }


def row_bytes(setting: Setting, max_length: int) -> int:
    """Bytes of one row: its cache of max_length positions, and float32 logits of a step's tokens."""
    config = depth_cut(published(setting.model), setting.layers)
    network = abstract_model(config, jnp.dtype(jnp.bfloat16))

    def bytes_of(batch: int) -> int:
        build = functools.partial(empty_cache, setting, batch=batch, max_length=max_length)
        leaves = jax.tree.leaves(jax.eval_shape(build, network))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    # Per-head constants do not depend on the batch.
    return bytes_of(2) - bytes_of(1) + 4 * setting.window * config.vocab_size


def concurrency(setting: Setting, max_length: int, memory: int, lock: Path | None = None) -> dict:
    """The record of the largest batch: rows that fit beside bfloat16 weights into `memory` bytes.

    The cache of that many rows is allocated once, with its logits, beside a block as large as the weights; an
    out-of-memory error ends the process.
    """
    config = depth_cut(published(setting.model), setting.layers)
    weights = 2 * parameter_count(config)
    each = row_bytes(setting, max_length)
    rows = (memory - weights) // each
    network = abstract_model(config, jnp.dtype(jnp.bfloat16))
    logits = rows * setting.window * config.vocab_size

    @jax.jit
    def allocate() -> tuple:
        constants = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), network)
        cache = empty_cache(setting, constants, rows, max_length)
        return jnp.zeros((weights // 2,), jnp.bfloat16), jnp.zeros((logits,), jnp.float32), cache

    with turn(lock):
        held = jax.block_until_ready(allocate())
        allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
        del held
    return {
        "shape": setting.model,
        "layers": len(layer_kinds(config)),
        "depth_cut": setting.layers is not None,
        "method": setting.method,
        "op": "concurrency",
        "window": setting.window,
        "buffer_length": setting.buffer_length,
        "max_length": max_length,
        "memory_bytes": memory,
        "weight_bytes": weights,
        "row_bytes": each,
        "rows": rows,
        "allocated_bytes": allocated,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A setting to be measured, or with `memory` the largest batch of it that fits."""

    setting: Setting
    memory: int | None = None
    max_length: int = 2048

    def run(self, lock: Path | None, trace: Path | None) -> dict:
        """The record."""
        if self.memory is None:
            return measure(self.setting, lock, trace)
        return concurrency(self.setting, self.max_length, self.memory, lock)


def run_all(tasks: Sequence[Task], *, jobs: int, time_limit: float, lock: Path | None = None) -> tuple:
    """Runs every task in a process of its own: (records, tasks left out with the reason).

    jobs: processes at once; they compile side by side and use the device in turns. time_limit: seconds after
    which nothing is started any more and what runs is ended. lock: a file shared with other programs that use
    the device. Prints a line as a task ends.
    """
    deadline = time.monotonic() + time_limit
    records, left_out = [], []
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    } | os.environ
    with tempfile.TemporaryDirectory() as folder:
        turns = lock or Path(folder) / "device.lock"

        def child(task: Task) -> tuple[dict | None, str]:
            left = deadline - time.monotonic()
            if left <= 0:
                return None, "time limit"
            command = [sys.executable, "-m", "bench.decode_loop", json.dumps(dataclasses.asdict(task))]
            try:
                done = subprocess.run(
                    [*command, "--lock", str(turns)],
                    capture_output=True,
                    text=True,
                    timeout=left,
                    env=environment,
                )
            except subprocess.TimeoutExpired:
                return None, "time limit"
            if done.returncode:
                return None, (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
            return json.loads(done.stdout.strip().splitlines()[-1]), ""

        with ThreadPoolExecutor(jobs) as pool:
            for task, (record, reason) in zip(tasks, pool.map(child, tasks), strict=True):
                if record is None:
                    left_out.append(dataclasses.asdict(task) | {"reason": reason})
                    setting = task.setting
                    print(f"left out: {setting.method} batch {setting.batch} T {setting.window}: {reason}")
                else:
                    records.append(record)
                    print(line(record), flush=True)
    return records, left_out


def line(record: dict) -> str:
    """A record as a line of text."""
    cut = f"{record['layers']} layers" if record["depth_cut"] else "full depth"
    method = f"{record['method']:12} T {record['window']} L {record['buffer_length']:2}"
    head = f"{record['shape']:11} {cut:10} {method}"
    if record["op"] == "concurrency":
        return (
            f"{head} {record['rows']} rows of {record['row_bytes'] / 1e6:.1f} MB fit into "
            f"{record['memory_bytes'] / 1e9:.1f} GB beside the weights"
        )
    return (
        f"{head} batch {record['batch']:4} "
        f"{record['time_us']:9.0f} us a step, floor {record['floor_us']:9.0f}, "
        f"{record['tokens_per_second']:9.0f} tokens/s, peak {record['peak_bytes'] / 1e9:6.2f} GB, "
        f"compiled in {record['lowering_s'] + record['compile_s']:.0f} s"
    )


def main() -> None:
    """Command line; prints the record as JSON in the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", type=json.loads, help="JSON object of the fields of Task")
    parser.add_argument("--lock", type=Path, help="file to hold while the device is in use")
    parser.add_argument("--trace", type=Path, help="folder for a profile of one dispatch")
    options = parser.parse_args()
    task = Task(**options.task | {"setting": Setting(**options.task["setting"])})
    record = task.run(options.lock, options.trace)
    print(line(record))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
