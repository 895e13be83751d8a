"""Decode speed on a CPU, side by side with transformers on the same checkpoint, threads and precision.

Greedy decoding of `--new-tokens` tokens after a short prompt, end-of-sequence ignored, float32 throughout.
Replay, eager and transformers take turns within every repeat. Records: `model`, `batch`, `method` (`replay`,
`eager`, `peer:transformers`), `tokens_per_second` (median), `spread` ([p10, p90]), `threads`. Needs the extra
`parity`.
"""

import argparse
import importlib.metadata
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import replayssm_jax as rs
from bench import result_file

MODELS = ("tiny-nemotron-h", "tiny-qwen3.5")
BATCHES = (1, 8)
PROMPT_TOKENS = 16


def ours(loaded, prompts, new_tokens: int, replay) -> Callable[[], float]:
    """A call that generates and returns seconds a run of decoding, compiled beforehand."""
    sampling = rs.Sampling(max_new_tokens=new_tokens, stop_ids=())

    def run() -> float:
        begin = time.perf_counter()
        rs.generate(loaded, prompts, sampling, replay=replay, progress=False)
        return time.perf_counter() - begin

    run()
    return run


def transformers_peer(path: Path, prompts, new_tokens: int, threads: int) -> Callable[[], float]:
    """The same in transformers' generate."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.tensor(prompts)
    options = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "attention_mask": torch.ones_like(tokens),
    }

    def run() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(tokens, **options)
        seconds = time.perf_counter() - begin
        if out.shape[1] != tokens.shape[1] + new_tokens:
            raise RuntimeError(f"transformers made {out.shape[1] - tokens.shape[1]} tokens, not {new_tokens}")
        return seconds

    run()
    return run


def measure(name: str, batch: int, new_tokens: int, repeats: int, threads: int) -> list[dict]:
    """Records of the three methods for one model and batch."""
    loaded = rs.load(name, dtype=np.float32)
    rng = np.random.default_rng(batch)
    prompts = rng.integers(3, loaded.vocab_size, (batch, PROMPT_TOKENS)).tolist()
    runs = {
        "replay": ours(loaded, prompts, new_tokens, rs.ReplayConfig()),
        "eager": ours(loaded, prompts, new_tokens, None),
        "peer:transformers": transformers_peer(loaded.path, prompts, new_tokens, threads),
    }
    seconds = {method: [] for method in runs}
    for _ in range(repeats):
        for method, run in runs.items():
            seconds[method].append(run())
    records = []
    for method, times in seconds.items():
        rates = batch * new_tokens / np.array(times)
        low, middle, high = np.percentile(rates, [10, 50, 90])
        records.append(
            {
                "model": name,
                "batch": batch,
                "method": method,
                "tokens_per_second": round(float(middle), 1),
                "spread": [round(float(low), 1), round(float(high), 1)],
                "threads": threads,
            }
        )
    return records


def main() -> None:
    """Measure, print a table, write bench/results/cpu_decode.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    result_file.add_commit(parser)
    parser.add_argument("--out", type=Path, default=result_file.RESULTS / "cpu_decode.json")
    args = parser.parse_args()
    threads = os.cpu_count() or 1
    result = result_file.head("bench.cpu_decode", args.commit)
    peers = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    result |= {"versions": result["versions"] | peers, "records": []}
    print(
        f"{'model':18}{'batch':>6}{'replay':>10}{'eager':>10}{'transformers':>14}{'ratio':>8}{'replay/eager':>14}"
    )
    for name in MODELS:
        for batch in BATCHES:
            records = measure(name, batch, args.new_tokens, args.repeats, threads)
            result["records"] += records
            replay, eager, peer = (record["tokens_per_second"] for record in records)
            rates = f"{replay:10.0f}{eager:10.0f}{peer:14.0f}"
            print(f"{name:18}{batch:6}{rates}{replay / peer:8.2f}{replay / eager:14.2f}")
    result_file.write(result, args.out)


if __name__ == "__main__":
    main()
