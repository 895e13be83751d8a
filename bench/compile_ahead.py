"""Compiles what `rs.generate` needs of a published model into JAX's persistent cache, without its weights.

Programs are those of one token a step, prompts of one bucket and the default method; a later process with
the same model, rows and lengths loads them, where the weights are bound to the first device, as those that
`bench.e2e_transformers` takes over are. Needs JAX_COMPILATION_CACHE_DIR.

    python -m bench.compile_ahead --model nano-4b --batches 256,1 --prompt-tokens 16 --max-length 48
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.e2e_models import HUB_NAMES, depth_cut, published
from models.checkpoint import abstract_model
from replayssm_jax import decode
from replayssm_jax.backend import default_method, prefill_tokens
from replayssm_jax.buckets import prefill_chunks, rows_together
from replayssm_jax.sampling import Sampling, sampling_params
from replayssm_jax.speculative import NoDrafts


def bound(tree: Any) -> Any:
    """The same arrays, abstract, on the first device: programs of arrays that may move have other keys."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


def array(*shape: int, dtype: Any = jnp.int32) -> Any:
    """An array that nobody fills."""
    return jax.ShapeDtypeStruct(shape, dtype)


def programs(model: Any, batch: int, prompt_tokens: int, max_length: int) -> Iterator[tuple[str, Any]]:
    """Names and lowered programs of `generate` for `batch` prompts of a length; model: abstract arrays."""
    network, none = bound(decode.FlatModel.of(model)), decode.FlatModel.of(NoDrafts())
    vocabulary = model.config.vocab_size
    params = sampling_params(Sampling(stop_ids=()), vocabulary, ())
    method = default_method(model, batch)
    *whole, (bucket, _) = prefill_chunks(prompt_tokens, max_length)
    if whole:
        raise ValueError(f"prompt_tokens must fit into one chunk of {bucket}, got {prompt_tokens}.")
    group = rows_together(bucket, batch, prefill_tokens())
    cache = bound(jax.eval_shape(lambda: decode.empty_cache(network, batch, max_length, method)))
    part = bound(jax.eval_shape(lambda: decode.empty_cache(network, group, max_length, cache.replay)))
    flags = array(batch, dtype=jnp.bool_)
    rows = decode.Rows(array(batch), flags, array(batch), array(batch), flags)
    logits = bound(array(group, vocabulary, dtype=jnp.float32))
    one = np.int32(1)
    yield "decode", decode.decode.lower(network, none, bound(rows), cache, (), flags, one, one, params, 0)
    each = array(group)
    yield "prefill", decode.prefill_chunk.lower(network, none, array(group, bucket), each, part, ())
    yield "empty cache", decode.empty_cache.lower(network, batch, max_length, method)
    yield "clear", decode.clear_rows.lower(none, part, (), each, each, params)
    yield "first tokens", decode.first_tokens.lower(logits, each, each, one, params)
    if batch > 1:
        yield "empty part", decode.empty_cache.lower(network, group, max_length, cache.replay)
        yield "insert", decode.insert_rows.lower(none, cache, (), part, (), each)


def main() -> None:
    """Command line; prints what every program took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano-4b", choices=("nano-4b", "qwen3.5-4b", *HUB_NAMES))
    parser.add_argument("--layers", type=int, help="a depth cut of so many layers")
    parser.add_argument("--batches", default="256")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-length", type=int, required=True)
    options = parser.parse_args()
    model = abstract_model(depth_cut(published(options.model), options.layers), jnp.dtype(jnp.bfloat16))

    began = time.perf_counter()

    def compile(batch: str, name: str, lowered: Any) -> None:
        lowered.compile()
        print(f"batch {batch}: {name} after {time.perf_counter() - began:.1f} s", flush=True)

    with ThreadPoolExecutor(4) as pool:
        compiling = [
            pool.submit(compile, batch, name, lowered)
            for batch in options.batches.split(",")
            for name, lowered in programs(model, int(batch), options.prompt_tokens, options.max_length)
        ]
        for one in compiling:
            one.result()


if __name__ == "__main__":
    main()
