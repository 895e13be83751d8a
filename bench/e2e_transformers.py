"""Greedy generation by `rs.generate` and by transformers' `generate` on one GPU, with the same weights.

transformers makes the model of a published configuration with random bfloat16 weights on the device, and our
model takes them from there. Both continue the same short prompts, end of sequence ignored, and take turns
repeat by repeat after one call that is not counted. `seconds` is a whole call for `new_tokens` tokens,
prompts included, `first_token_s` one for a single token; `decode_us` is a step without prompts: the
difference of the two divided by the steps between them.
`tokens_per_second` and `decode_tokens_per_second` follow from the two, `warmup_s` is what `rs.warmup` took to
compile, all batches side by side. `fast_kernels` names the installed packages from which transformers could
take kernels of these layers; where there is none, as in a plain installation, it runs its own PyTorch path.
That path's Mamba-2 prefill forms chunk x chunk x heads x d_state products of every row, so its chunks are
made as long as the prompt here.

    python -m bench.e2e_transformers --model nano-4b --batches 1,256
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import replayssm_jax as rs
from bench import result_file
from bench.e2e_models import HUB_NAMES, published_json
from bench.processes import turn
from models.checkpoint import FAMILIES, abstract_model
from models.config import parse_config
from models.weights import Weight

FAST_KERNELS = ("mamba_ssm", "causal_conv1d", "fla", "kernels")
# Generates so many tokens for every prompt, and returns the token ids of the first.
Generate = Callable[[int], list[int]]


def random_model(config: dict, device: str) -> Any:
    """The transformers model of a config.json with random bfloat16 weights on the device."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    raw = {name: value for name, value in config.items() if name not in ("torch_dtype", "dtype")}
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**raw), dtype=torch.bfloat16
        )
    return model.eval()


def same_weights(model: Any, config: dict) -> rs.Loaded:
    """Our model with the weights of the transformers model of the same config.json, on the same device."""
    import torch

    parsed = parse_config(config)
    graph, state = nnx.split(abstract_model(parsed, jnp.dtype(jnp.bfloat16)))
    variables = dict(nnx.to_flat_state(state))
    tensors = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    names: dict[tuple, list[tuple[str, Weight]]] = {}
    for name, weight in FAMILIES[type(parsed)][1](parsed).items():
        names.setdefault(weight.parameter, []).append((name, weight))
    filled = []
    for path, parts in names.items():
        arrays = [weight.to_model(jnp.from_dlpack(tensors[name].contiguous())) for name, weight in parts]
        value = jnp.concatenate(arrays, axis=-1).astype(variables[path].dtype)
        filled.append((path, variables[path].replace(jax.block_until_ready(value))))
    return rs.Loaded(
        model=nnx.merge(graph, nnx.from_flat_state(filled)),
        config=parsed,
        tokenizer=None,
        stop_ids=(),
        vocab_size=parsed.vocab_size,
        path=Path(),
    )


def theirs(model: Any, prompts: np.ndarray) -> Generate:
    """transformers' side; prompts int [batch, tokens]."""
    import torch

    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = prompts.shape[1]
    tokens = torch.tensor(prompts, device=model.device)
    mask = torch.ones_like(tokens)

    def generate(count: int) -> list[int]:
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        made = out[0, tokens.shape[1] :].tolist()
        if len(made) != count:
            raise RuntimeError(f"transformers made {len(made)} tokens, not {count}")
        return made

    return generate


def ours(loaded: rs.Loaded, prompts: np.ndarray, most: int) -> Generate:
    """Our side, with the defaults of `rs.generate`; `most`: the largest number of tokens asked for."""

    def generate(count: int) -> list[int]:
        sampling = rs.Sampling(max_new_tokens=count, stop_ids=())
        length = prompts.shape[1] + most
        made = rs.generate(loaded, prompts.tolist(), sampling, max_length=length, progress=False)
        return made.tokens[0]

    return generate


def timed(generate: Generate, count: int) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    generate(count)
    return time.perf_counter() - began


def records(sides: dict[str, Generate], batch: int, new_tokens: int, repeats: int) -> list[dict]:
    """A record a side, after a whole call of each: whole calls, and steps without prompts."""
    long: dict[str, list[float]] = {side: [] for side in sides}
    short: dict[str, list[float]] = {side: [] for side in sides}
    for generate in sides.values():
        timed(generate, new_tokens)
    for _ in range(repeats):
        for side, generate in sides.items():
            short[side].append(timed(generate, 1))
            long[side].append(timed(generate, new_tokens))
    made = []
    for side in sides:
        steps = [(a - b) / (new_tokens - 1) * 1e6 for a, b in zip(long[side], short[side], strict=True)]
        whole, step = statistics.median(long[side]), statistics.median(steps)
        made.append(
            {
                "batch": batch,
                "method": side,
                "op": "generate",
                "new_tokens": new_tokens,
                "seconds": round(whole, 4),
                "spread_s": [round(float(np.percentile(long[side], q)), 4) for q in (10, 90)],
                "first_token_s": round(statistics.median(short[side]), 4),
                "tokens_per_second": round(batch * new_tokens / whole, 1),
                "decode_us": round(step, 1),
                "decode_tokens_per_second": round(batch / step * 1e6, 1),
            }
        )
    return made


def table(rows: list[dict]) -> str:
    """Tokens a second of both sides and their ratios, a line for every batch."""
    lines = [
        f"{'model':12}{'layers':>7}{'batch':>6}{'ours':>11}{'transformers':>14}{'ratio':>7}{'decode':>8}"
    ]
    pairs: dict[tuple, dict] = {}
    for row in rows:
        key = row["shape"], row["layers"], row["batch"]
        pairs.setdefault(key, {})[row["method"]] = row
    for (shape, layers, batch), pair in pairs.items():
        mine, peer = pair["generate"], pair["peer:transformers"]
        rates = [one["tokens_per_second"] for one in (mine, peer)]
        decode = mine["decode_tokens_per_second"] / peer["decode_tokens_per_second"]
        lines.append(
            f"{shape:12}{layers:7}{batch:6}{rates[0]:11.0f}{rates[1]:14.0f}{rates[0] / rates[1]:7.2f}"
            f"{decode:8.2f}"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def progress(what: str) -> Iterator[list[float]]:
    """Prints how long something took; its seconds are in the list afterwards."""
    seconds: list[float] = []
    began = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - began)
    print(f"{what} in {seconds[0]:.1f} s", flush=True)


def main() -> None:
    """Command line; prints a table last and writes the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", "--model-id", default="nano-4b", choices=("nano-4b", "qwen3.5-4b", *HUB_NAMES)
    )
    parser.add_argument("--layers", type=int, help="a depth cut of so many layers, marked so")
    parser.add_argument("--batches", default="1,256")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="of transformers; JAX takes its own default")
    parser.add_argument("--lock", type=Path, help="file to hold from the warm-up on, as other users do")
    result_file.add_commit(parser)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # PyTorch needs the rest of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name: str = HUB_NAMES.get(options.model) or options.model
    config = published_json(name, options.layers)
    result = result_file.head("bench.e2e_transformers", options.commit)
    result["versions"] |= {
        package: importlib.metadata.version(package) for package in ("torch", "transformers")
    }
    result["fast_kernels"] = [package for package in FAST_KERNELS if importlib.util.find_spec(package)]
    result["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    head = {"shape": name, "layers": config["num_hidden_layers"], "depth_cut": options.layers is not None}
    head |= {"prompt_tokens": options.prompt_tokens}
    rows: list[dict] = []
    with progress("random weights made"):
        model = random_model(config, options.device)
    with progress("weights taken over"):
        loaded = same_weights(model, config)
    batches = [int(batch) for batch in options.batches.split(",")]
    length = options.prompt_tokens + options.new_tokens

    def compile(batch: int) -> float:
        with progress(f"batch {batch} compiled") as seconds:
            rs.warmup(loaded, rows=batch, longest_prompt=options.prompt_tokens, max_length=length)
        return seconds[0]

    with turn(options.lock):
        with ThreadPoolExecutor(len(batches)) as pool:
            compiling = dict(zip(batches, pool.map(compile, batches), strict=True))
        rng = np.random.default_rng(0)
        for batch in batches:
            prompts = rng.integers(3, loaded.vocab_size, (batch, options.prompt_tokens))
            sides = {
                "generate": ours(loaded, prompts, options.new_tokens),
                "peer:transformers": theirs(model, prompts),
            }
            with progress(f"batch {batch} measured"):
                made = records(sides, batch, options.new_tokens, options.repeats)
            made[0]["warmup_s"] = round(compiling[batch], 1)
            rows += [head | row for row in made]
            print(table(rows), flush=True)
            out = options.out or result_file.RESULTS / f"e2e_transformers_{name}.json"
            result_file.write(result | {"records": rows}, out)


if __name__ == "__main__":
    main()
