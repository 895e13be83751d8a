"""How often a head has forgotten its checkpoint: the reads and writes that claim C15 could save.

A step n tokens after the checkpoint S reads it as total * S z, total = exp(sum of n log decays) and z the
reader. Counted for every (row, head) and the steps 2..L of a cycle, whose reads are not part of a flush:

- `exact`, `float32`, `bfloat16`: what `replayssm_jax.forgotten` leaves out with `skip_forgotten` "exact" and,
  by the kind of activations, "bounded";
- `ideal_*`: the term itself below 2^-25, or 2^-9, times the output of the step: what no rule can exceed.

Writes: `write_exact` and `write_bounded` are left out by the same functions; `write_ideal` where
total * |old row| < 2^-25 |new row| holds for every row. `error_*` is what the outputs of all steps lose by
the skipped reads, RMS over RMS; `worst_*` the largest share of its output, RMS over RMS, that a head lost at
one step by one skipped read; `worst_write_*` the largest share of its norm that a row of a checkpoint lost by
a pure write.

`trained`: the embedded checkpoints over held-out text (the `test` files of bench.embedded_text), 64-token
warm-up left out. `initialised`: layers of published sizes with random inputs, whose decay parameters are
drawn as the families' code draws them (INITIALISATIONS).

    python -m bench.embedded_text --out .data
    python -m bench.forgotten_heads --data .data
"""

import argparse
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

import replayssm_jax as rs
from bench import result_file
from bench.e2e_models import PUBLISHED
from bench.shapes import SHAPES, Shape
from models.base import HybridModel
from replayssm_jax.cache import Cache, Reach, RecurrentLayer
from replayssm_jax.forgotten import LEAST_FOLD, forgotten, heard
from replayssm_jax.precision import decode
from replayssm_jax.recurrence import RECURRENCES, gated_delta, mamba2
from replayssm_jax.recurrence.segment import token_axis
from replayssm_jax.replay import Segment, prefill_core

NAMES = ("tiny-nemotron-h", "tiny-qwen3.5")
TEXTS = ("play", "code")
THRESHOLDS = {"float32": 2.0**-25, "bfloat16": 2.0**-9}
WRITES = ("exact", "bounded", "ideal")
WARM_UP = 64
# Draws of A and of softplus(dt_bias) (or, for one, of dt_bias itself), and whose code draws so.
INITIALISATIONS = {
    ("mamba2", "A = 1..H, dt in 0.001..0.1 (transformers)"): ("count", "step"),
    ("mamba2", "A in 1..16, dt in 0.001..0.1 (mamba-ssm, Megatron)"): ("uniform", "step"),
    ("gated_delta", "A in 0..16, dt_bias = 1 (transformers)"): ("uniform0", "one"),
    ("gated_delta", "A in 0..16, dt in 0.001..0.1 (flash-linear-attention)"): ("uniform0", "step"),
}


def step_of(index: Array, fold: int, batch: int) -> Segment:
    """One token behind `index` others, of which `fold` are folded first."""

    def every(value: Any) -> Array:
        return jnp.full((batch,), value, jnp.int32)

    return Segment(
        position=every(index),
        lengths=every(1),
        fold=every(fold),
        start=every(fold),
        length=every(index - fold),
        plan=None,
        mode="step",
        tokens=1,
    )


def left_out(
    recurrence: ModuleType, layer: RecurrentLayer, outputs: Array, inputs: Any, reader: Array, heads: Any
) -> tuple[dict[str, Bool[Array, "B H L"]], dict[str, Bool[Array, "B H"]], Reach]:
    """What the library leaves out: reads of the steps, and the fold of all of them after the last.

    layer: its ring holds the L tokens in order, its reach is what was known before the first.
    Returns also what is known after the fold.
    """
    batch, length = outputs.shape[:2]
    exactly = replace(layer, reach=None)

    def all_rules(
        layer: RecurrentLayer, part: Any, reader: Array, segment: Segment
    ) -> dict[str, tuple[Array, Array, Any]]:
        """Of each rule the heads left out by a fold and by reads, and the reach."""
        call = functools.partial(forgotten, recurrence, inputs=part, heads=heads, segment=segment)
        rules = {"exact": (exactly, reader), "float32": (layer, reader)}
        rules["bfloat16"] = layer, reader.astype(jnp.bfloat16)
        return {name: call(layer, reader=reader) for name, (layer, reader) in rules.items()}

    def step(reach: Any, index: Array) -> tuple[Any, dict[str, Array]]:
        part = jax.tree.map(
            lambda field: jax.lax.dynamic_slice_in_dim(field, index, 1, token_axis(field)), inputs
        )
        one = jax.lax.dynamic_slice_in_dim(reader, index, 1, 2)
        output = jax.lax.dynamic_slice_in_dim(outputs, index, 1, 1)
        segment = step_of(index, 0, batch)
        found = all_rules(replace(layer, reach=reach), part, one, segment)
        reach = found["float32"][2]
        # The first step is the one that has flushed.
        flushed = replace(segment, fold=jnp.where(index == 0, 1, segment.fold))
        reach = heard(recurrence, reach, output, part, one, heads, flushed)
        return reach, {name: reads for name, (_, reads, _) in found.items()}

    reach, reads = jax.lax.scan(step, layer.reach, jnp.arange(length, dtype=jnp.int32))
    # The token behind them does not matter to the fold.
    part = jax.tree.map(lambda field: jax.lax.slice_in_dim(field, 0, 1, axis=token_axis(field)), inputs)
    after = step_of(jnp.asarray(length), length, batch)
    found = all_rules(replace(layer, reach=reach), part, reader[:, :, :1], after)
    writes = {"exact": found["exact"][0], "bounded": found["float32"][0]}
    reach = replace(reach, largest=found["float32"][2].largest)
    return {name: jnp.moveaxis(where, 0, -1) for name, where in reads.items()}, writes, reach


def measure(
    recurrence: ModuleType, layer: RecurrentLayer, inputs: Any, reader: Array, heads: Any
) -> tuple[Float32[Array, "B L H V"], RecurrentLayer, dict[str, Array]]:
    """One cycle of L tokens: outputs, the layer after it, counts of every head.

    layer: a checkpoint in float32 and what is known of it.
    """
    state = layer.checkpoint
    lengths = jnp.full((reader.shape[0],), reader.shape[2], jnp.int32)
    outputs, new = recurrence.prefill(state, inputs, reader, heads, lengths)
    # Without values nothing is added: what comes out is read from the checkpoint, what remains is of it.
    names = ("x",) if recurrence is mamba2 else ("v",)
    silent = replace(inputs, **{name: jnp.zeros_like(getattr(inputs, name)) for name in names})
    carried, remains = recurrence.prefill(state, silent, reader, heads, lengths)
    layer = replace(layer, ring=inputs)
    reads, writes, reach = left_out(recurrence, layer, outputs, inputs, reader, heads)

    def size(values: Array) -> Float32[Array, "B H L"]:
        return jnp.moveaxis(jnp.sqrt(jnp.mean(jnp.square(values), axis=-1)), 1, 2)

    output, term = size(outputs), size(carried)
    for name, threshold in THRESHOLDS.items():
        reads[f"ideal_{name}"] = term < threshold * output
    decay = jnp.sum(recurrence.log_decays(inputs, heads), axis=1)
    counts = {"log_decay": decay / reader.shape[2], "squares": jnp.sum(output**2, axis=-1)}
    for name, where in reads.items():
        counts[name] = jnp.mean(where[..., 1:], axis=-1, dtype=jnp.float32)
        lost = jnp.where(where, term, 0.0)[..., 1:]
        counts[f"lost_{name}"] = jnp.sum(lost**2, axis=-1)
        counts[f"worst_{name}"] = jnp.max(lost / jnp.maximum(output[..., 1:], 1e-30), axis=-1)
    old_rows, new_rows, lost = (jnp.linalg.norm(rows, axis=-1) for rows in (state, new, remains))
    kept = jnp.exp(decay)[..., None] * old_rows
    writes["ideal"] = jnp.all(kept < LEAST_FOLD * new_rows, axis=-1)
    for name, where in writes.items():
        counts[f"write_{name}"] = where.astype(jnp.float32)
        share = jnp.max(lost / jnp.maximum(new_rows, 1e-30), axis=-1)
        counts[f"worst_write_{name}"] = jnp.where(where, share, 0.0)
    return outputs, replace(layer, checkpoint=new, ring=None, reach=reach), counts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeasuredLayer:
    """A recurrent layer that takes a cycle of tokens at a time and keeps the counts of the last one."""

    conv: Float[Array, "B W C"]
    heads: Any
    layer: RecurrentLayer
    counts: dict[str, Array]

    def recur(self, recurrence: ModuleType, inputs: Any, reader: Array, heads: Any, segment: Segment):
        """Outputs of the segment, and the layer after it."""
        outputs, layer, counts = measure(recurrence, self.layer, inputs, reader, heads)
        return outputs, replace(self, layer=layer, counts=counts)


def empty_layer(recurrence: str, sizes: tuple[int, ...], length: int) -> RecurrentLayer:
    """A layer of states [B, H, V, K] of zeros before a cycle of `length` tokens, as `measure` takes it."""
    batch, heads = sizes[:2]
    slots, known = jnp.zeros((batch, length, heads)), jnp.zeros((batch, heads))
    return RecurrentLayer(
        checkpoint=jnp.zeros(sizes),
        ring=None,
        conv=jnp.zeros((batch, 0, 0)),
        heads=None,
        recurrence=recurrence,
        reach=Reach(added=slots, least=slots, largest=known, output=known),
    )


def measured_cache(model: HybridModel, batch: int, max_length: int, length: int) -> Cache:
    """An empty cache whose recurrent layers are measured; it has no counts before the first cycle."""
    cache = model.init_cache(batch, max_length, None)

    def layer(eager: Any) -> Any:
        if not isinstance(eager, RecurrentLayer):
            return eager
        measured = empty_layer(eager.recurrence, decode(eager.checkpoint).shape, length)
        return MeasuredLayer(eager.conv, eager.heads, measured, {})

    return replace(cache, layers=tuple(map(layer, cache.layers)))


@functools.partial(jax.jit, static_argnames="length")
def text_cycles(model: HybridModel, tokens: Int32[Array, "B S"], length: int) -> list[dict[str, Array]]:
    """Counts [cycles, B, H] of each recurrent layer over the tokens, in cycles of `length`."""
    batch, total = tokens.shape
    lengths = jnp.full((batch,), length, jnp.int32)

    def counts_of(cache: Cache) -> list[dict[str, Array]]:
        return [layer.counts for layer in cache.layers if isinstance(layer, MeasuredLayer)]

    def forget(cache: Cache) -> Cache:
        bare = (replace(x, counts={}) if isinstance(x, MeasuredLayer) else x for x in cache.layers)
        return replace(cache, layers=tuple(bare))

    def cycle(cache: Cache, chunk: Array) -> tuple[Cache, list[dict[str, Array]]]:
        _, _, cache = prefill_core(model, chunk, lengths, cache)
        return forget(cache), counts_of(cache)

    chunks = jnp.moveaxis(tokens.reshape(batch, total // length, length), 1, 0)
    return jax.lax.scan(cycle, measured_cache(model, batch, total, length), chunks)[1]


def initial_cycles(shape: Shape, hidden: int, draws: tuple[str, str], length: int) -> dict[str, Array]:
    """Counts [cycles, B, H] of one layer with random inputs and freshly drawn decay parameters."""
    rows, cycles = 2, WARM_UP // length + 4
    keys = iter(jax.random.split(jax.random.key(0), 16))
    heads = shape.heads

    def normal(*sizes: int) -> Array:
        return jax.random.normal(next(keys), sizes)

    if draws[0] == "count":
        rate = jnp.arange(1.0, heads + 1.0)
    else:
        rate = jax.random.uniform(next(keys), (heads,), minval=float(draws[0] == "uniform"), maxval=16.0)
    step = jnp.exp(jax.random.uniform(next(keys), (heads,), minval=math.log(1e-3), maxval=math.log(0.1)))
    bias = jnp.ones((heads,)) if draws[1] == "one" else step + jnp.log(-jnp.expm1(-step))
    recurrence = RECURRENCES[shape.recurrence]
    constants = mamba2.Heads(a=-rate, d=jnp.ones((heads,))) if recurrence is mamba2 else gated_delta.Heads()
    tokens, wide = cycles * length, heads // shape.groups * shape.head_dim
    # Projections have a standard deviation of 0.02 and take hidden values of RMS 1.
    spread = 0.02 * hidden**0.5
    dt = jax.nn.softplus(spread * normal(rows, tokens, heads) + bias)
    values = jax.nn.silu(normal(rows, shape.groups, tokens, wide))
    keys_, reader = (jax.nn.silu(normal(rows, shape.groups, tokens, shape.d_state)) for _ in range(2))
    if recurrence is mamba2:
        inputs = mamba2.Inputs(x=values, b=keys_, dt=dt)
    else:
        keys_, reader = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (keys_, reader))
        reader = reader * shape.d_state**-0.5
        beta = jax.nn.sigmoid(spread * normal(rows, tokens, heads))
        inputs = gated_delta.Inputs(v=values, k=keys_, log_decay=-rate * dt, beta=beta)

    def cycle(layer: RecurrentLayer, part: tuple) -> tuple[RecurrentLayer, dict[str, Array]]:
        tokens, readers = part
        _, layer, counts = measure(recurrence, layer, tokens, readers, constants)
        return layer, counts

    def split(field: Array) -> Array:
        axis = field.ndim - 2
        sizes = (*field.shape[:axis], cycles, length, *field.shape[axis + 1 :])
        return jnp.moveaxis(field.reshape(sizes), axis, 0)

    sizes = rows, heads, shape.head_dim, shape.d_state
    layer = empty_layer(shape.recurrence, sizes, length)
    run = jax.jit(lambda layer, parts: jax.lax.scan(cycle, layer, parts)[1])
    return run(layer, jax.tree.map(split, (inputs, reader)))


def summary(layers: list[dict[str, Array]], length: int) -> dict:
    """Means over rows, cycles and heads of all layers, those of the warm-up left out."""
    first = WARM_UP // length
    parts = [{name: np.asarray(values)[first:] for name, values in layer.items()} for layer in layers]
    joined = {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}
    quantiles = np.percentile(joined["log_decay"], [1, 10, 50, 90, 99])
    record: dict = {"log_decay": [float(f"{value:.3g}") for value in quantiles]}
    rules = ("exact", *THRESHOLDS, *(f"ideal_{name}" for name in THRESHOLDS))
    for name in (*rules, *(f"write_{name}" for name in WRITES)):
        record[name] = round(float(joined[name].mean()), 5)
    for name in ("exact", *THRESHOLDS):
        record[f"error_{name}"] = float(
            f"{(joined[f'lost_{name}'].sum() / joined['squares'].sum()) ** 0.5:.2g}"
        )
        record[f"worst_{name}"] = float(f"{joined[f'worst_{name}'].max():.2g}")
    for name in WRITES[:2]:
        record[f"worst_write_{name}"] = float(f"{joined[f'worst_write_{name}'].max():.2g}")
    record["by_layer"] = [round(float(part["float32"].mean()), 4) for part in parts]
    # A head counts where it can skip more than half of its reads.
    record["heads_mostly"] = round(float((joined["float32"].mean(axis=(0, 1)) > 0.5).mean()), 4)
    return record


def trained(data: Path, length: int, rows: int, tokens: int) -> Iterator[dict]:
    """Records of the embedded checkpoints."""
    for name in NAMES:
        model = rs.load(name, dtype=jnp.float32, mtp=False).model
        for text in TEXTS:
            stream = np.load(data / f"test_{text}.npy")
            start = np.linspace(0, stream.size - tokens, rows).astype(int)
            batch = np.stack([stream[first : first + tokens] for first in start]).astype(np.int32)
            with jax.default_matmul_precision("highest"):
                layers = text_cycles(model, jnp.asarray(batch), length)
            head = {"source": "trained", "model": name, "text": text, "buffer_length": length}
            yield head | summary(layers, length)


def initialised(names: list[str], length: int) -> Iterator[dict]:
    """Records of layers of published sizes as they are before training."""
    for name in names:
        shape, hidden = SHAPES[name], PUBLISHED[name]["hidden_size"]
        for (recurrence, words), draws in INITIALISATIONS.items():
            if recurrence == shape.recurrence:
                counts = initial_cycles(shape, hidden, draws, length)
                head = {"source": "initialised", "model": name, "drawn": words, "buffer_length": length}
                yield head | summary([counts], length)


def line(record: dict) -> str:
    """A record as a line of text."""
    where = record.get("text") or record["drawn"]
    shares = " ".join(f"{100 * record[name]:6.2f}" for name in ("exact", *THRESHOLDS))
    ideal = " ".join(f"{100 * record[f'ideal_{name}']:6.2f}" for name in THRESHOLDS)
    writes = " ".join(f"{100 * record[f'write_{name}']:6.2f}" for name in WRITES)
    return (
        f"{record['model']:16}{where[:44]:45}{record['buffer_length']:3}  reads {shares}  ideal {ideal}  "
        f"writes {writes}  error {record['error_float32']:.1e} {record['error_bfloat16']:.1e}"
        f"  worst {record['worst_bfloat16']:.1e}  of a write {record['worst_write_bounded']:.1e}"
    )


def main() -> None:
    """Command line; prints a line a record (shares in percent) and writes the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder that bench.embedded_text wrote")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32], help="buffer lengths")
    parser.add_argument("--shapes", nargs="+", default=["nano-4b", "super", "qwen3.5-4b", "q122"])
    parser.add_argument("--rows", type=int, default=8, help="places in the text")
    parser.add_argument("--tokens", type=int, default=1024, help="of each")
    result_file.add_commit(parser)
    parser.add_argument("--out", type=Path, default=result_file.RESULTS / "forgotten_heads.json")
    options = parser.parse_args()
    result = result_file.head("bench.forgotten_heads", options.commit) | {"records": []}
    for length in options.lengths:
        for records in (
            trained(options.data, length, options.rows, options.tokens),
            initialised(options.shapes, length),
        ):
            for record in records:
                print(line(record), flush=True)
                result["records"].append(record)
    result_file.write(result, options.out)


if __name__ == "__main__":
    main()
