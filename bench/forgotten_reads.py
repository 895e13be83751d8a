"""What it saves to leave out the reads of heads that have forgotten, step after step.

A layer of a published size with random inputs decodes one token a step, rows spread over the cycle, so that
all flush once in L steps. A share of its heads decays by e^-200 a token and the others by e^-0.01, evenly
mixed. Records: `skip` ("off", "exact", "bounded", as in `ReplayConfig`), `forgotten` (share of heads) and
`time_us`, the mean over the steps of a device loop, by the device's clock, of every step's median over the
repeats: with the small programs that find out which heads to leave out, and one that reads the clock.
`spread_us`: percentiles 10 and 90 over the steps.

With `--models` also decode steps of depth cuts, with random weights whose decays are as the families
initialise them: records of `bench.e2e_decode_speedup` with `skip`, repeats of the three ways in turns.

    python -m bench.forgotten_reads --shapes super q122
"""

import argparse
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import decode_loop, result_file
from bench.device_clock import nanoseconds
from bench.e2e_models import CUT_LAYERS
from bench.kernel_layer import draw
from bench.processes import turn
from bench.shapes import SHAPES, Shape
from pallas_kernels.numerics import hash_uint32
from replayssm_jax.backend import ring_slots
from replayssm_jax.cache import Cache, RecurrentSpec, init_cache
from replayssm_jax.config import SKIPS, ReplayConfig
from replayssm_jax.flush import spread_flush_at
from replayssm_jax.recurrence import RECURRENCES
from replayssm_jax.replay import commit_core, recur, step_core

FORGETS, REMEMBERS = -200.0, -0.01


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneLayer:
    """A model of one recurrent layer whose inputs are the same at every token; its logits are its outputs."""

    inputs: Any
    reader: jax.Array
    heads: Any
    recurrence: str = dataclasses.field(metadata={"static": True})

    def __call__(self, tokens: jax.Array, segment: Any, layers: tuple) -> tuple[jax.Array, tuple]:
        """The layer's outputs [B, T, H, V] and its buffers; `tokens` do not matter."""
        module = RECURRENCES[self.recurrence]
        outputs, layer = recur(module, layers[0], self.inputs, self.reader, self.heads, segment)
        return outputs, (layer,)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The outputs themselves."""
        return hidden


def build(shape: Shape, batch: int, method: ReplayConfig, share: jax.Array) -> tuple[OneLayer, Cache]:
    """The layer and its cache, of rows spread over the cycle; call it inside `jit`.

    share: of heads that forget.
    """
    module = RECURRENCES[shape.recurrence]
    slots = ring_slots(method)
    (state, _, ring), (new, reader, constants), _ = draw(shape, batch, 1, slots, "fp32")
    index = jnp.arange(shape.heads, dtype=jnp.float32)
    forgets = jnp.floor((index + 1) * share) > jnp.floor(index * share)
    decay = jnp.where(forgets, FORGETS, REMEMBERS)

    def decaying(fields: tuple) -> Any:
        values, keys, *scalars = fields
        if shape.recurrence == "mamba2":
            return module.Inputs(values, keys, jnp.full_like(scalars[0], 0.05))
        return module.Inputs(values, keys, jnp.broadcast_to(decay, scalars[0].shape), scalars[1])

    heads = module.Heads(a=decay / 0.05, d=constants[1]) if constants is not None else module.Heads()
    model = OneLayer(decaying(new), reader, heads, shape.recurrence)
    sizes = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    spec = RecurrentSpec(**sizes, conv_channels=1, conv_kernel=2)
    cache = init_cache((spec,), (heads,), batch, 1, replay=method, dtype=reader.dtype)
    layer = dataclasses.replace(cache.layers[0], checkpoint=state, ring=decaying(ring))
    if layer.reach is not None:
        # As after a prefill: the states are of unit variance, outputs of about unit size.
        full = jnp.full_like(layer.reach.largest, 2 * shape.d_state**0.5)
        layer = dataclasses.replace(
            layer,
            reach=dataclasses.replace(layer.reach, largest=full, output=jnp.ones_like(full)),
        )
    ahead = method.buffer_length - spread_flush_at(np.arange(batch), method.buffer_length)
    length = jnp.asarray(1 + ahead, jnp.int32)
    start = (hash_uint32(jnp.arange(batch, dtype=jnp.uint32)) % jnp.uint32(1000)).astype(jnp.int32)
    return model, dataclasses.replace(cache, layers=(layer,), start=start, length=length)


def run_steps(model: OneLayer, cache: Cache, steps: int) -> tuple[jax.Array, Cache]:
    """The device's clock after each of `steps` steps, uint32 [steps], and the cache."""
    tokens = jnp.zeros((cache.batch, 1), jnp.int32)
    ones = jnp.ones((cache.batch,), jnp.int32)

    def one(step: jax.Array, carry: tuple) -> tuple:
        stamps, cache = carry
        outputs, _, cache = step_core(model, tokens, cache)
        done = (outputs[0, 0, 0, 0] > 0).astype(jnp.int32)
        return stamps.at[step].set(nanoseconds(done)), commit_core(cache, ones)

    return jax.lax.fori_loop(0, steps, one, (jnp.zeros((steps,), jnp.uint32), cache))


class Run:
    """One shape and way of skipping, compiled; the share of heads that forget is given to every call."""

    def __init__(self, shape: Shape, batch: int, skip: str, *, implementation: str, steps: int):
        method = ReplayConfig(implementation=implementation, skip_forgotten=skip)
        share = jax.ShapeDtypeStruct((), jnp.float32)
        make = jax.jit(functools.partial(build, shape, batch, method))
        self._build = make.lower(share).compile()
        run = jax.jit(run_steps, donate_argnums=1, static_argnames="steps")
        self._run = run.lower(*jax.eval_shape(make, share), steps=steps + 1).compile()

    def times(self, share: float, repeats: int) -> np.ndarray:
        """Microseconds of every step of each repeat, a warm-up left out: [repeats, steps]."""
        model, cache = self._build(jnp.float32(share))
        found = []
        for _ in range(repeats + 1):
            clock, cache = self._run(model, cache)
            found.append(np.diff(np.asarray(clock)).astype(np.float64) * 1e-3)
        return np.stack(found[1:])


def model_steps(name: str, batch: int, repeats: int) -> list[dict]:
    """Records of a depth cut's decode step, a way of skipping each."""

    def prepare(skip: str) -> decode_loop.Run:
        setting = decode_loop.Setting(
            model=name,
            layers=CUT_LAYERS[name],
            batch=batch,
            method="replay",
            phases="spread",
            dispatches=4,
            skip=skip,
        )
        return decode_loop.Run(setting)

    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(prepare, SKIPS))
    # The first repeat allocates, and fills rings.
    times = [[run.repeat() for run in runs] for _ in range(repeats + 1)][1:]
    parts = zip(SKIPS, runs, zip(*times, strict=True), strict=True)
    return [run.record(list(seconds)) | {"skip": skip} for skip, run, seconds in parts]


def line(record: dict) -> str:
    """A record as a line of text."""
    heads = f"{100 * record['forgotten']:.0f} % of the heads forget" if "forgotten" in record else "a model"
    return (
        f"{record['shape']:11} batch {record['batch']:4} skip {record['skip']:8} "
        f"{heads}: {record['time_us']:7.1f} us a step"
    )


def main() -> None:
    """Command line; prints a line a record and writes the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["super", "q122"])
    parser.add_argument("--models", nargs="+", choices=CUT_LAYERS, default=[])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--steps", type=int, default=64, help="steps of a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--implementation", choices=("pallas", "xla"), default="pallas")
    parser.add_argument("--lock", type=Path, help="file that other users of the device hold in their turn")
    result_file.add_commit(parser)
    parser.add_argument("--out", type=Path, default=result_file.RESULTS / "forgotten_reads.json")
    options = parser.parse_args()
    result = result_file.head("bench.forgotten_reads", options.commit) | {"records": []}
    for name in options.shapes:
        for skip in SKIPS:
            run = Run(
                SHAPES[name], options.batch, skip, implementation=options.implementation, steps=options.steps
            )
            with turn(options.lock):
                for share in options.shares:
                    # The median of every step leaves out what others do to one repeat; L steps are a cycle.
                    times = np.median(run.times(share, options.repeats), axis=0)
                    record = {
                        "shape": name,
                        "batch": options.batch,
                        "method": "replay",
                        "implementation": options.implementation,
                        "op": "step",
                        "state": "fp32",
                        "recurrence": "fp32",
                        "window": 1,
                        "buffer_length": 16,
                        "phases": "spread",
                        "skip": skip,
                        "forgotten": share,
                        "time_us": round(float(np.mean(times)), 1),
                        "spread_us": [round(float(np.percentile(times, q)), 1) for q in (10, 90)],
                    }
                    print(line(record), flush=True)
                    result["records"].append(record)
            result_file.write(result, options.out)
    for name in options.models:
        with turn(options.lock):
            records = model_steps(name, options.batch, options.repeats)
        print(*map(line, records), sep="\n", flush=True)
        result["records"] += records
        result_file.write(result, options.out)


if __name__ == "__main__":
    main()
