"""Bits a byte of the embedded checkpoints on the held-out `test` files.

    python -m bench.embedded_text --out .data
    python -m bench.evaluate_embedded --data .data [--names tiny-qwen3.5]

Stored weights, float32 arithmetic, contexts of CONTEXT tokens of which each new window repeats half. Records:
`model`, `parameters` (without a multi-token-prediction head), `text` (`play` or `code`), `bytes`,
`bits_a_byte`, `least_dt` (the least Mamba-2 step size met; null for a model without one). With --names, the
records of other models stay in the result file.
"""

import argparse
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import replayssm_jax as rs
from bench import result_file
from bench.embedded_shapes import CONFIGS, CONTEXT
from bench.train_embedded import KINDS, bits_a_byte, scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores the embedded checkpoints.")
    parser.add_argument("--data", type=Path, required=True, help="folder that bench.embedded_text wrote")
    result_file.add_commit(parser)
    parser.add_argument("--names", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="models scored")
    parser.add_argument("--batch", type=int, default=2, help="windows scored at once")
    arguments = parser.parse_args()
    parts = json.loads((arguments.data / "text.json").read_text())["parts"]
    file = result_file.RESULTS / "evaluate_embedded.json"
    kept = json.loads(file.read_text())["records"] if file.exists() else []
    kept = [record for record in kept if record["model"] not in arguments.names]
    result = result_file.head("bench.evaluate_embedded", arguments.commit) | {"records": kept}
    for name, kind in tqdm([(name, kind) for name in arguments.names for kind in KINDS]):
        model = rs.load(name, dtype=jnp.float32, mtp=False).model
        tokens, size = np.load(arguments.data / f"test_{kind}.npy"), parts[f"test_{kind}"]["bytes"]
        with jax.default_matmul_precision("highest"):
            score = functools.partial(jax.jit(scores), model)
            bits, least = bits_a_byte(score, tokens, size, CONTEXT, CONTEXT // 2, arguments.batch)
        record = {"model": name, "parameters": sum(leaf.size for leaf in jax.tree.leaves(model))}
        record |= {"text": kind, "bytes": size, "bits_a_byte": round(bits, 4)}
        result["records"].append(record | {"least_dt": None if math.isinf(least) else round(least, 6)})
        tqdm.write(json.dumps(result["records"][-1]))
    result_file.write(result, file)


if __name__ == "__main__":
    main()
