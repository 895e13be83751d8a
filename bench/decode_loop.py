"""The timed loop of the end-to-end benchmarks: one method on one published model.

A dispatch runs `steps` decode steps on the device: forward pass, argmax over the logits of every token,
commit of drawn counts, and the next tokens (the chosen one, and drafts that a hash makes up). So a
speculative step costs its verification and its choice of tokens; a drafter's own work is in it only where the
setting names one: then the model's head drafts, and the counts that are committed stay drawn. A repeat starts
at `context` committed tokens a row (the cursors are set; what keys and values hold does not matter to the
time), in the long-run distribution of ring lengths, and is `dispatches` long.
"""

import dataclasses
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import kernel_table, roofline
from bench.conventional import conventional_cache
from bench.device_clock import nanoseconds
from bench.e2e_models import depth_cut, layer_kinds, prepare_random, published, with_head
from models.checkpoint import abstract_model, parameter_count
from models.config import ModelConfig
from pallas_kernels.numerics import hash_uint32
from replayssm_jax.cache import Cache
from replayssm_jax.config import DecodingConfig, EagerConfig, ReplayConfig
from replayssm_jax.decode import FlatModel
from replayssm_jax.flush import spread_flush_at
from replayssm_jax.replay import commit_core, step_core
from replayssm_jax.sampling import Sampling, sampling_params

PHASES = ("random", "synchronised", "spread")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One measurement.

    model, layers: a published model and its depth cut (None: whole). method: "eager", "replay" or
    "conventional"; window: T, 1 in plain decoding. mean_accepted: tokens committed a step. context: committed
    tokens of a row at the start, and up to `spread` more where rows differ. steps: a dispatch; dispatches: a
    repeat; repeats: how often it is timed. phases, of the rows' flushes: "random" (drawn from the long run),
    "synchronised" (all rows at the same step) or "spread" (as `generate` spreads them). step_times: read the
    device's clock after every step. recurrence, read: formats of replay's checkpoint and of what its outputs
    read. profile: one more dispatch under the profiler, summed by kind of kernel. drafter: "mtp", what
    proposes the drafts; None: they are made up. skip: `skip_forgotten` of replay.
    """

    model: str
    layers: int | None = None
    batch: int
    method: str
    window: int = 1
    mean_accepted: float = 1.0
    buffer_length: int = 16
    context: int = 512
    spread: int = 64
    implementation: str = "pallas"
    steps: int = 16
    dispatches: int = 1
    repeats: int = 5
    phases: str = "random"
    step_times: bool = False
    recurrence: str = "fp32"
    read: str = "fp32"
    profile: bool = False
    drafter: str | None = None
    skip: str = "off"

    @property
    def config(self) -> ModelConfig:
        """The model's sizes, with a head where that drafts."""
        config = depth_cut(published(self.model), self.layers)
        return config if self.drafter is None else with_head(config)

    @property
    def accepted(self) -> tuple[float, ...]:
        """Probabilities of committing 1..window tokens."""
        return roofline.histogram(self.window, self.mean_accepted)

    @property
    def max_length(self) -> int:
        """Columns for keys and values: the context, and room for a repeat."""
        needed = self.context + self.spread + (self.steps * self.dispatches + 1) * self.window
        return -(-needed // 128) * 128

    @property
    def mean_context(self) -> float:
        """Committed tokens of a row, the mean over a repeat."""
        grown = self.steps * self.dispatches * self.mean_accepted
        return self.context + self.spread / 2 + grown / 2

    @property
    def decoding(self) -> DecodingConfig:
        """The configuration of an eager or replay cache."""
        if self.method == "eager":
            return EagerConfig(implementation=self.implementation)
        return ReplayConfig(
            buffer_length=self.buffer_length,
            window=self.window,
            implementation=self.implementation,
            recurrence=self.recurrence,
            read=self.read,
            skip_forgotten=self.skip,
        )


def empty_cache(setting: Setting, model: Any, batch: int, max_length: int) -> Cache:
    """An empty cache of the setting's method; call it inside `jit`."""
    if setting.method == "conventional":
        return conventional_cache(model, batch, max_length, setting.window, setting.implementation)
    return model.init_cache(batch, max_length, setting.decoding)


@functools.partial(jax.jit, donate_argnums=(1, 2, 4), static_argnames="clock")
def decode_steps(
    model: FlatModel,
    tokens: jax.Array,
    cache: Cache,
    accepted: jax.Array,
    *state: Any,
    clock: bool = False,
) -> tuple:
    """Steps that feed tokens [B, T]; accepted int32 [steps, B] are the counts that they commit.

    state: of the model's own drafter; without it drafts are made up. Returns tokens, cache, clock and state:
    the third holds, with `clock`, the device's clock before the first step and after every one, uint32
    [steps + 1]; else nothing.
    """
    network = model.unflatten()
    drafter = network.own_drafter() if state else None
    greedy = sampling_params(Sampling(), network.config.vocab_size, ())
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    vocabulary = network.config.vocab_size
    drafts = jnp.arange(tokens.shape[1], dtype=jnp.uint32)[None, :]

    def stamp(stamps: jax.Array, index: Any, tokens: jax.Array) -> jax.Array:
        return stamps.at[index].set(nanoseconds(tokens[0, 0])) if clock else stamps

    def one(step: jax.Array, carry: tuple) -> tuple:
        tokens, cache, stamps, *state = carry
        position = cache.position
        logits, hidden, cache = step_core(network, tokens, cache)
        with jax.named_scope("sampling"):
            best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        cache = commit_core(cache, accepted[step])
        chosen = jnp.take_along_axis(best, accepted[step][:, None] - 1, axis=1)
        if drafter is None:
            made_up = hash_uint32(chosen, drafts) % jnp.uint32(vocabulary)
            tokens = jnp.where(drafts == 0, chosen, made_up.astype(jnp.int32))
        else:
            moved = drafter.commit(network, *state, tokens, hidden, accepted[step], position)
            newest, count = chosen[:, 0], tokens.shape[1] - 1
            proposed, *state = drafter.draft(network, moved, newest, cache.position, rows, greedy, count)
            tokens = jnp.concatenate([chosen, proposed.tokens], axis=1)
        return tokens, cache, stamp(stamps, step + 1, tokens), *state

    stamps = jnp.zeros((accepted.shape[0] + 1 if clock else 0,), jnp.uint32)
    carry = tokens, cache, stamp(stamps, 0, tokens), *state
    return jax.lax.fori_loop(0, accepted.shape[0], one, carry)


def cursors(setting: Setting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """start and length int32 [B] before a repeat, and the counts int32 [steps, B] that a dispatch commits."""
    rng = np.random.default_rng(0)
    counts = np.arange(1, setting.window + 1)
    accepted = rng.choice(counts, (setting.steps, setting.batch), p=setting.accepted).astype(np.int32)
    position = setting.context + rng.integers(0, setting.spread + 1, setting.batch)
    length = np.zeros(setting.batch, np.int64)
    if setting.method == "replay":
        odds = roofline.phases(setting.accepted, setting.buffer_length).probability
        length = rng.choice(len(odds), setting.batch, p=odds)
        if setting.phases == "synchronised":
            length[:] = 1
        elif setting.phases == "spread":
            # A row with a first window of k tokens is k tokens ahead of one with the full window.
            ahead = setting.buffer_length - spread_flush_at(np.arange(setting.batch), setting.buffer_length)
            length[:] = 1 + ahead
    return (position - length).astype(np.int32), length.astype(np.int32), accepted


class Run:
    """A setting, compiled; the first repeat allocates its weights and cache."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.config = setting.config
        self._weights = prepare_random(self.config)
        self._start, self._length, self._accepted = cursors(setting)
        model = FlatModel.of(abstract_model(self.config, jnp.dtype(jnp.bfloat16)))

        @jax.jit
        def build(model: FlatModel) -> tuple:
            network, sizes = model.unflatten(), (setting.batch, setting.max_length)
            drafters = [] if setting.drafter is None else [network.own_drafter()]
            states = [drafter.init(network, *sizes, setting.decoding) for drafter in drafters]
            return empty_cache(setting, network, *sizes), *states

        shapes, *state = jax.eval_shape(build, model)
        # Compiled now, so that nothing is while others wait for the device.
        self._build = build.lower(model).compile()
        self._state: tuple | None = None
        # Microseconds of every step of every repeat, where the device's clock is read.
        self.step_times: list[np.ndarray] = []
        self.cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        began = time.perf_counter()
        tokens = jax.ShapeDtypeStruct((setting.batch, setting.window), jnp.int32)
        lowered = decode_steps.lower(model, tokens, shapes, self._accepted, *state, clock=setting.step_times)
        self.lowering = time.perf_counter() - began
        self.program = lowered.compile()
        self.compiling = time.perf_counter() - began - self.lowering

    def _arguments(self) -> tuple:
        """Model, tokens, a cache with the cursors of a repeat's start, counts and, where a head drafts, its
        state, all on the device."""
        setting = self.setting
        if self._state is None:
            model = FlatModel.of(self._weights())
            tokens = jnp.zeros((setting.batch, setting.window), jnp.int32)
            self._state = model, tokens, *self._build(model)
        model, tokens, cache, *state = self._state
        # Fresh arrays: the cache is donated, cursors included.
        cache = dataclasses.replace(cache, start=jnp.array(self._start), length=jnp.array(self._length))
        accepted = jnp.array(self._accepted)
        return jax.block_until_ready((model, tokens, cache, accepted, *state))

    def repeat(self) -> float:
        """Seconds a step of one repeat."""
        setting = self.setting
        model, tokens, cache, accepted, *state = self._arguments()
        stamps = []
        began = time.perf_counter()
        for _ in range(setting.dispatches):
            tokens, cache, ticks, *state = self.program(model, tokens, cache, accepted, *state)
            stamps.append(ticks)
        jax.block_until_ready(tokens)
        seconds = time.perf_counter() - began
        self._state = model, tokens, cache, *state
        # Unsigned differences stay right where the clock's low word wraps.
        ticks = np.concatenate([np.diff(np.asarray(ticks)) for ticks in stamps])
        self.step_times.append(ticks.astype(np.float64) * 1e-3)
        return seconds / (setting.steps * setting.dispatches)

    def profile(self) -> dict[str, float]:
        """Microseconds a step by kind of kernel, of one dispatch under the profiler."""
        model, tokens, cache, accepted, *state = self._arguments()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                outputs = self.program(model, tokens, cache, accepted, *state)
                tokens, cache, _, *state = jax.block_until_ready(outputs)
            found = kernel_table.events(Path(folder))
        self._state = model, tokens, cache, *state
        return kernel_table.by_kind(found, self.setting.steps)

    def record(self, seconds: list[float]) -> dict:
        """The record of repeats that took `seconds` a step."""
        setting, times = self.setting, np.array(seconds) * 1e6
        parts = roofline.step_parts(
            self.config,
            setting.method,
            setting.batch,
            accepted=setting.accepted,
            buffer_length=setting.buffer_length,
            context=setting.mean_context,
            recurrence=setting.recurrence,
            read=setting.read,
        )
        memory: Any = self.program.memory_analysis()
        middle, committed = float(np.median(times)), float(self._accepted.mean())
        ceilings = roofline.Ceilings()
        data_sheet = dataclasses.replace(ceilings, flops=roofline.DATA_SHEET_FLOPS)
        steps = self._steps(len(seconds)) if setting.step_times else {}
        bounds = {}
        if setting.method == "replay" and setting.window > 1:
            bounds = {"bounds": self._bounds(ceilings), "bounds_data_sheet": self._bounds(data_sheet)}
        profile = {"kernels_us": self.profile()} if setting.profile else {}
        return self._head("verify" if setting.window > 1 else "decode") | {
            "state": setting.read,
            "recurrence": setting.recurrence,
            "phases": setting.phases,
            "context": round(setting.mean_context),
            "accepted": round(committed, 4),
            "time_us": round(middle, 1),
            "spread_us": [round(float(np.percentile(times, q)), 1) for q in (10, 90)],
            "tokens_per_second": round(setting.batch * committed / middle * 1e6, 1),
            "bytes": int(roofline.total_bytes(parts)),
            "floor_us": round(roofline.floor(parts, ceilings) * 1e6, 1),
            "floor_data_sheet_us": round(roofline.floor(parts, data_sheet) * 1e6, 1),
            "floor_parts_us": {name: round(part.seconds(ceilings) * 1e6, 1) for name, part in parts.items()},
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0),
            "cache_bytes": self.cache_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "lowering_s": round(self.lowering, 1),
            "compile_s": round(self.compiling, 1),
            **bounds,
            **steps,
            **profile,
        }

    def _bounds(self, ceilings: roofline.Ceilings) -> dict[str, float]:
        """The most that a verified window can gain over the other methods' steps."""
        setting = self.setting
        found = roofline.bounds(
            self.config,
            setting.batch,
            ceilings,
            accepted=setting.accepted,
            buffer_length=setting.buffer_length,
            context=setting.mean_context,
        )
        return {other: round(gain, 3) for other, gain in found.items()}

    def _steps(self, repeats: int) -> dict:
        """What single steps took: the median of each over the last repeats, which begin alike, so that what
        other processes do to one of them is left out."""
        every = np.stack(self.step_times[-repeats:])
        times = np.median(every, axis=0)
        figures = {"median": np.median(times), "p99": np.percentile(times, 99), "max": times.max()}
        figures |= {"mean": times.mean(), "p99_of_all": np.percentile(every, 99)}
        return {
            "step_us": {name: round(float(value), 1) for name, value in figures.items()},
            "step_times_us": [round(float(value), 1) for value in times],
        }

    def compilation(self) -> dict:
        """The record of the program's tracing with lowering, and of its compilation."""
        times = {"lowering_s": round(self.lowering, 1), "compile_s": round(self.compiling, 1)}
        return self._head("compile") | times

    def _head(self, operation: str) -> dict:
        setting = self.setting
        return {
            "shape": setting.model,
            "layers": len(layer_kinds(self.config)),
            "depth_cut": setting.layers is not None,
            "batch": setting.batch,
            "method": setting.method,
            "implementation": setting.implementation,
            "op": operation,
            **({} if setting.drafter is None else {"drafter": setting.drafter}),
            "window": setting.window,
            "buffer_length": setting.buffer_length,
        }


def row_bytes(setting: Setting, max_length: int) -> int:
    """Bytes of one row: its cache of max_length positions, and float32 logits of a step's tokens."""
    config = setting.config
    network = abstract_model(config, jnp.dtype(jnp.bfloat16))

    def bytes_of(batch: int) -> int:
        build = functools.partial(empty_cache, setting, batch=batch, max_length=max_length)
        leaves = jax.tree.leaves(jax.eval_shape(build, network))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    # Per-head constants do not depend on the batch.
    return bytes_of(2) - bytes_of(1) + 4 * setting.window * config.vocab_size


def needed_bytes(setting: Setting) -> int:
    """Bytes of weights, cache and logits of a setting."""
    weights = 2 * parameter_count(setting.config)
    return weights + setting.batch * row_bytes(setting, setting.max_length)


def concurrency(setting: Setting, max_length: int, memory: int) -> dict:
    """The record of the largest batch: rows that fit beside bfloat16 weights into `memory` bytes.

    The cache of that many rows is allocated once, with its logits, beside a block as large as the weights; an
    out-of-memory error ends the process.
    """
    config = setting.config
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

    held = jax.block_until_ready(allocate())
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
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
    compiled = f"compiled in {record['lowering_s'] + record['compile_s']:.0f} s"
    if record["op"] == "compile":
        return f"{head} batch {record['batch']:4} {compiled}"
    return (
        f"{head} batch {record['batch']:4} "
        f"{record['time_us']:9.0f} us a step, floor {record['floor_us']:9.0f}, "
        f"{record['tokens_per_second']:9.0f} tokens/s, peak {record['peak_bytes'] / 1e9:6.2f} GB, "
        f"{compiled}"
    )
