"""Time of one prefill call by the prompts it takes and their bucket.

Published models with random bfloat16 weights, prompts that fill their bucket, a cache of the default method
for so many rows. A record has the op `prefill`, `rows`, `bucket`, and of a call `time_us` (median) and
`spread_us`. With `--compile-only` the programs are compiled into JAX's persistent cache, without weights.

    python -m bench.prefill_calls --model nano-4b --calls 1x16,32x16,64x16,1x512
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import result_file
from bench.e2e_models import HUB_NAMES, depth_cut, layer_kinds, prepare_random, published
from models.checkpoint import abstract_model
from replayssm_jax import decode
from replayssm_jax.config import DEFAULT_REPLAY
from replayssm_jax.speculative import NoDrafts

NONE = decode.FlatModel.of(NoDrafts())
MAX_LENGTH = 640


def lowered(model: Any, rows: int, bucket: int) -> Any:
    """The call's program for abstract weights."""
    network = decode.FlatModel.of(model)
    cache = jax.eval_shape(lambda: decode.empty_cache(network, rows, MAX_LENGTH, DEFAULT_REPLAY))
    tokens = jax.ShapeDtypeStruct((rows, bucket), jnp.int32)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return decode.prefill_chunk.lower(network, NONE, tokens, lengths, cache, ())


def seconds(model: decode.FlatModel, program: Any, rows: int, bucket: int, repeats: int) -> list[float]:
    """Of calls one after the other, the first left out."""
    cache = decode.empty_cache(model, rows, MAX_LENGTH, DEFAULT_REPLAY)
    tokens, lengths = np.zeros((rows, bucket), np.int32), np.full(rows, bucket, np.int32)
    times = []
    for _ in range(repeats + 1):
        jax.block_until_ready(cache)
        began = time.perf_counter()
        logits, cache, _ = program(model, NONE, tokens, lengths, cache, ())
        jax.block_until_ready(logits)
        times.append(time.perf_counter() - began)
    return times[1:]


def main() -> None:
    """Command line; prints a line a call and writes the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano-4b", choices=("nano-4b", "qwen3.5-4b", *HUB_NAMES))
    parser.add_argument("--layers", type=int, help="a depth cut of so many layers, marked so")
    parser.add_argument("--calls", default="1x16,8x16,32x16,64x16,128x16,1x128,4x128,1x512,4x512")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile-only", action="store_true")
    result_file.add_commit(parser)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = depth_cut(published(options.model), options.layers)
    name: str = HUB_NAMES.get(options.model) or options.model
    model = abstract_model(config, jnp.dtype(jnp.bfloat16))
    calls = [tuple(map(int, call.split("x"))) for call in options.calls.split(",")]
    with ThreadPoolExecutor(3) as pool:
        programs = list(pool.map(lambda call: lowered(model, *call).compile(), calls))
    make = prepare_random(config)
    if options.compile_only:
        return
    network = decode.FlatModel.of(make())
    records = []
    for (rows, bucket), program in zip(calls, programs, strict=True):
        times = np.array(seconds(network, program, rows, bucket, options.repeats)) * 1e6
        records.append(
            {
                "shape": name,
                "layers": len(layer_kinds(config)),
                "depth_cut": options.layers is not None,
                "op": "prefill",
                "rows": rows,
                "bucket": bucket,
                "time_us": round(float(np.median(times)), 1),
                "spread_us": [round(float(np.percentile(times, q)), 1) for q in (10, 90)],
            }
        )
        each = records[-1]["time_us"] / rows
        print(f"{rows:4} x {bucket:4}: {records[-1]['time_us']:9.0f} us, {each:8.0f} a prompt", flush=True)
    result = result_file.head("bench.prefill_calls", options.commit) | {"records": records}
    result_file.write(result, options.out or result_file.RESULTS / f"prefill_calls_{name}.json")


if __name__ == "__main__":
    main()
