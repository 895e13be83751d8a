"""How errors of low-precision states grow while a model decodes: every configuration, up to 131,072 tokens.

    python -m bench.drift_text --out .data/drift.npz
    python -m bench.train_drift drift-nemotron-h --data .data/drift.npz --out .data/weights
    python -m bench.precision_drift --data .data/drift.npz --weights .data/weights
    python -m bench.precision_drift --models tiny-qwen3.5 --data .data/drift.npz --tokens 32768

Teacher-forced decoding of held-out text and of tasks with exact answers (bench/drift_tasks.py) in windows of
L tokens (bench/drift_layers.py). Rows are [configuration, text]; formats are simulated by encoding and
decoding in float32; models have bfloat16 weights and activations. Programs run in dispatches, each under the
lock of --lock where processes share a device. The result file is written after every dispatch; a program
whose records it holds whole is not run again.

Records of a model and L, one for every configuration: `model`, `buffer_length`, `configuration`,
`recurrence`, `read`, `rounding`, `tokens`, `texts` (names), `edges` (where intervals of positions begin),
and by text and interval `kl` (nats a token, of the next token under FP32 state from this one), `agreement`
(of the most likely token) and `bits` (a byte); `cells`, by task and interval of `bench.drift_tasks`, with
[right answers, answers]. With `heads`: true, one record of the errors by head (bench/drift_heads.py).
"""

import argparse
import contextlib
import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from tqdm import tqdm

import replayssm_jax as rs
from bench import result_file
from bench.drift_heads import head_record, measure_windows, measured_layers
from bench.drift_layers import CONFIGURATIONS, decode_window, simulated_layers
from bench.drift_models import CONFIGS, load_weights
from bench.drift_streams import Streams, byte_streams, cells, numbers, text_edges, token_streams
from bench.embedded_shapes import CONFIGS as EMBEDDED
from bench.timing import exclusive
from models.base import HybridModel
from models.sources import resolve_source
from pallas_kernels.numerics import hash_uint32

FIELDS = ("kl", "agreement", "nats")


@functools.partial(jax.jit, donate_argnums=(1, 2))
def compare_windows(
    model: HybridModel,
    layers: tuple,
    position: Int32[Array, ""],
    tokens: Int32[Array, "n texts L"],
    following: Int32[Array, "n texts L"],
):
    """The layers and the position behind n windows, and what was measured in them.

    following: the token after each.
    Returns sums over each window of FIELDS, float32 [n, 3, configurations, texts], and whether each following
    token was predicted, bool [n, configurations, texts, L].
    """

    def body(carry: tuple, window: tuple) -> tuple[tuple, tuple]:
        (layers, position), (tokens, following) = carry, window
        logits, layers = decode_window(model, layers, position, tokens)
        scores = jax.nn.log_softmax(logits.reshape(len(CONFIGURATIONS), *tokens.shape, -1))
        exact, best = scores[:1], jnp.argmax(scores, axis=-1)
        kl = jnp.sum(jnp.exp(exact) * (exact - scores), axis=-1)
        targets = jnp.broadcast_to(following, best.shape)[..., None]
        nats = -jnp.take_along_axis(scores, targets, axis=-1)[..., 0]
        agreement = (best == best[:1]).astype(jnp.float32)
        sums = jnp.stack([field.sum(axis=-1) for field in (kl, agreement, nats)])
        moved_on = position + jnp.int32(tokens.shape[1])
        return (layers, moved_on), (sums, best == targets[..., 0])

    return jax.lax.scan(body, (layers, position), (tokens, following))


def in_windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """[texts, tokens] as [windows, texts, L]."""
    return np.moveaxis(tokens.reshape(tokens.shape[0], -1, length), 1, 0)


def row_seeds(texts: int) -> Array:
    """The seeds that a cache of so many rows has."""
    return hash_uint32(0, jnp.arange(texts, dtype=jnp.uint32))


def dispatched(program, model: HybridModel, carry: tuple, fields: tuple, each: int, turn, title: str):
    """After every dispatch the carry of `program(model, *carry, *fields)` and, joined, what it has given.

    fields: arrays [windows, ...], of which a dispatch takes `each`. Every dispatch has its turn on the
    device; compilation needs none.
    """
    windows, measured = fields[0].shape[0], []
    each = math.gcd(windows, each)
    compiled = program.lower(model, *carry, *(field[:each] for field in fields)).compile()
    for first in tqdm(range(0, windows, each), desc=title):
        with turn():
            carry, given = compiled(model, *carry, *(field[first : first + each] for field in fields))
            measured.append(jax.tree.map(np.asarray, jax.block_until_ready((carry[1], given))[1]))
        yield carry, jax.tree.map(lambda *parts: np.concatenate(parts), *measured)


def compared(model: HybridModel, streams: Streams, length: int, each: int, turn) -> Iterator[list[dict]]:
    """After every dispatch one record for every configuration, without the model's name."""
    fields = tuple(in_windows(part, length) for part in (streams.tokens[:, :-1], streams.tokens[:, 1:]))
    count = len(streams.names)
    layers = simulated_layers(model, count, streams.length, CONFIGURATIONS, row_seeds(count))
    carry, title = (layers, jnp.int32(0)), f"L = {length}"
    for _, measured in dispatched(compare_windows, model, carry, fields, each, turn, title):
        yield comparison(streams, length, *measured)


def comparison(streams: Streams, length: int, sums: np.ndarray, right: np.ndarray) -> list[dict]:
    """The records of what `compare_windows` gave of the first windows of the streams."""
    tokens = sums.shape[0] * length
    edges = text_edges(tokens)
    by_edge = np.add.reduceat(sums.astype(np.float64), [edge // length for edge in edges], axis=0)
    spans = np.diff([*edges, tokens])
    size = np.add.reduceat(streams.sizes[:, 1 : tokens + 1], edges, axis=1)
    predicted = np.moveaxis(right[:, :, streams.texts :], 0, 2)
    predicted = predicted.reshape(*predicted.shape[:2], tokens)
    counts = cells(streams.kinds[:, : tokens + 1], predicted)

    records = []
    for index, item in enumerate(CONFIGURATIONS):
        kl, agreement, nats = np.moveaxis(by_edge[:, :, index], 0, 2)
        record = {"buffer_length": length, "configuration": item.name, "recurrence": item.recurrence}
        record |= {"read": item.read, "rounding": item.rounding, "tokens": tokens}
        record |= {"texts": streams.names, "edges": edges, "kl": numbers(kl / spans)}
        record |= {"agreement": numbers(agreement / spans), "bits": numbers(nats / math.log(2.0) / size)}
        records.append(record | {"cells": counts[index].tolist()})
    return records


def head_errors(model: HybridModel, streams: Streams, length: int, each: int, turn) -> dict:
    """The record of errors by head, without the model's name, on the texts without tasks."""
    tokens = in_windows(streams.tokens[: streams.texts, :-1], length)
    edges, count = tuple(text_edges(streams.length)), streams.texts
    layers = measured_layers(model, count, streams.length, CONFIGURATIONS, row_seeds(count), edges)
    carry, title = (layers, jnp.int32(0)), f"L = {length}, heads"
    *_, (carry, _) = dispatched(measure_windows, model, carry, (tokens,), each, turn, title)
    record = {
        "buffer_length": length,
        "heads": True,
        "tokens": streams.length,
        "texts": streams.names[:count],
    }
    return record | {"edges": edges} | head_record(carry[0], CONFIGURATIONS, length)


def load(name: str, weights: Path | None) -> HybridModel:
    """A model of `bench.drift_models` from its weights, or an embedded one."""
    if name in EMBEDDED:
        model = rs.load(name, dtype=jnp.bfloat16, mtp=False).model
        assert isinstance(model, HybridModel)
        return model
    if weights is None:
        raise SystemExit(f"{name} needs --weights, the folder that bench.train_drift wrote.")
    return load_weights(weights, name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*CONFIGS, *EMBEDDED], default=list(CONFIGS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 8, 32], help="values of L")
    parser.add_argument("--tokens", type=int, default=131072, help="decoded of every text")
    parser.add_argument("--texts", type=int, default=4, help="streams of each kind of text")
    parser.add_argument("--tasks", type=int, default=8, help="streams of tasks (not for embedded models)")
    parser.add_argument("--head-texts", type=int, default=1, help="streams of each kind for errors by head")
    parser.add_argument("--head-tokens", type=int, default=32768, help="decoded of each of those; 0: none")
    parser.add_argument("--data", type=Path, required=True, help="file that bench.drift_text wrote")
    parser.add_argument("--weights", type=Path, help="folder that bench.train_drift wrote")
    parser.add_argument("--out", type=Path, default=result_file.RESULTS / "precision_drift.json")
    parser.add_argument("--dispatch", type=int, default=8192, help="tokens of a text in one dispatch")
    parser.add_argument("--lock", type=Path, help="lock file of processes that share the device")
    result_file.add_commit(parser)
    options = parser.parse_args()
    turn = functools.partial(exclusive, options.lock) if options.lock else contextlib.nullcontext
    kept = json.loads(options.out.read_text())["records"] if options.out.exists() else []
    result = result_file.head("bench.precision_drift", options.commit) | {"records": kept}

    def streams(name: str, length: int, texts: int, tasks: int) -> Streams:
        if name in EMBEDDED:
            return token_streams(options.data, resolve_source(name) / "tokenizer.json", length, texts)
        return byte_streams(options.data, length, texts, tasks)

    def done(**fields: object) -> bool:
        return any(all(r.get(k) == v for k, v in fields.items()) for r in result["records"])

    for name, length in [(name, length) for length in options.lengths for name in options.models]:
        model, each, began = load(name, options.weights), options.dispatch // length, time.perf_counter()
        same = {"model": name, "buffer_length": length}
        if options.head_tokens and not done(**same, heads=True):
            given = streams(name, options.head_tokens, options.head_texts, 0)
            result["records"].append({"model": name} | head_errors(model, given, length, each, turn))
            result_file.write(result, options.out)
        if not done(**same, tokens=options.tokens, configuration=CONFIGURATIONS[0].name):
            given = streams(name, options.tokens, options.texts, options.tasks)
            before = [r for r in result["records"] if "heads" in r or any(r[k] != same[k] for k in same)]
            for records in compared(model, given, length, each, turn):
                result["records"] = before + [{"model": name} | record for record in records]
                result_file.write(result, options.out)
        print(f"{name}, L = {length}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
