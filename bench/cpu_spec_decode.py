"""Speculative decoding of the embedded model with its own head, on a CPU: acceptance, step costs, speed.

    python -m bench.embedded_text --out .data
    python -m bench.cpu_spec_decode --data .data

Prompts are windows of the held-out `test` files; plain and speculative decoding of the same prompts take
turns within every repeat, float32, end-of-text ignored, everything compiled beforehand.

Records of decoding: `model`, `text` (`play`, `code`), `batch`, `temperature`, `method` (`replay`, `eager`,
`mtp`), `draft_tokens`, `tokens_per_step` (committed a step of a row), `draft_acceptance`, `tokens_per_second`
of decode steps (median), `spread` ([p10, p90]), `threads`; `mtp` adds `gain` (over replay) and, greedy,
`same_tokens` (share of replay's text up to the first difference). Records of costs: `op` (`step`: trunk, one
token; `verify`: trunk, 1 + draft_tokens tokens; `head`: the first draft; `draft`: all drafts), `time_us`
(median), `spread_us`.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import replayssm_jax as rs
from bench import result_file
from bench.train_embedded import KINDS
from replayssm_jax.decode import FlatModel
from replayssm_jax.drafters import with_window
from replayssm_jax.replay import commit_core, step_core
from replayssm_jax.sampling import sampling_params

MODEL = "tiny-qwen3.5"
PROMPT_TOKENS = 64
CALLS = 64


def held_out(data: Path, kind: str, count: int) -> list[list[int]]:
    """`count` prompts, evenly spaced in the held-out text of one kind."""
    tokens = np.load(data / f"test_{kind}.npy")
    starts = np.linspace(0, tokens.size - PROMPT_TOKENS - 1, count, dtype=int)
    return [tokens[start : start + PROMPT_TOKENS].tolist() for start in starts]


def decoding(loaded, prompts: list, settings: argparse.Namespace, **shared) -> list[dict]:
    """Records of plain and speculative decoding of the same prompts, and what they have in common."""
    sampling = rs.Sampling(max_new_tokens=settings.new_tokens, temperature=shared["temperature"], stop_ids=())
    methods = {
        "replay": {},
        "eager": {"replay": None},
        "mtp": {"speculative": rs.Speculative("mtp", settings.draft_tokens)},
    }
    runs = {
        method: functools.partial(
            rs.generate, loaded, prompts, sampling, max_rows=shared["batch"], progress=False, **how
        )
        for method, how in methods.items()
    }
    outputs = {method: run() for method, run in runs.items()}
    rates = {method: [] for method in runs}
    for _ in range(settings.repeats):
        for method, run in runs.items():
            rates[method].append(run().stats.tokens_per_second)
    records = []
    for method, output in outputs.items():
        low, middle, high = np.percentile(rates[method], [10, 50, 90])
        records.append(
            {
                **shared,
                "method": method,
                "draft_tokens": settings.draft_tokens if method == "mtp" else 0,
                "tokens_per_step": round(output.stats.tokens_per_step, 3),
                "draft_acceptance": round(output.stats.draft_acceptance, 3),
                "tokens_per_second": round(float(middle), 1),
                "spread": [round(float(low), 1), round(float(high), 1)],
                "threads": os.cpu_count(),
            }
        )
    plain, _, ours = records
    ours["gain"] = round(ours["tokens_per_second"] / plain["tokens_per_second"], 3)
    if shared["temperature"] == 0:
        texts = zip(outputs["replay"].tokens, outputs["mtp"].tokens, strict=True)
        agreed = [agreement(*pair) for pair in texts]
        ours["same_tokens"] = round(float(np.mean(agreed)), 4)
    return records


def agreement(first: list[int], second: list[int]) -> float:
    """The share of two texts up to their first difference."""
    same = np.equal(first, second)
    return float(1.0 if same.all() else np.argmin(same) / len(same))


def costs(loaded, batch: int, settings: argparse.Namespace) -> list[dict]:
    """Records of the parts of a speculative step, each alone."""
    drafts = settings.draft_tokens
    replay = with_window(rs.ReplayConfig(), rs.Speculative("mtp", drafts))
    model, drafter = FlatModel.of(loaded.model), loaded.model.own_drafter()
    params = sampling_params(rs.Sampling(), loaded.vocab_size, ())
    length = PROMPT_TOKENS + CALLS * (1 + drafts)
    tokens = jnp.ones((batch, 1 + drafts), jnp.int32)
    rows = jnp.zeros((batch,), jnp.int32)

    def advance(network, cache, count: int):
        logits, _, cache = step_core(network, tokens[:, :count], cache)
        return commit_core(cache, rows + min(count, 2)), jnp.argmax(logits, axis=-1)

    def draft(network, state, count: int):
        proposed, state = drafter.draft(
            network, state, tokens[:, 0], rows + PROMPT_TOKENS, rows, params, count
        )
        return state, proposed.tokens

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def many(model, carry, part: Callable, count: int):
        """CALLS calls in one program, as decoding makes them; the tokens are used lest they be left out."""
        network = model.unflatten()

        def call(_, carry):
            carry, used = carry
            carry, found = part(network, carry, count)
            return carry, used + jnp.sum(found, dtype=jnp.int32)

        return jax.lax.fori_loop(0, CALLS, call, (carry, jnp.int32(0)))

    def cache():
        return loaded.model.init_cache(batch, length, replay)

    def state():
        return drafter.init(loaded.model, batch, length, replay)

    parts = {
        "step": (advance, cache, 1),
        "verify": (advance, cache, 1 + drafts),
        "head": (draft, state, 1),
        "draft": (draft, state, drafts),
    }
    records = []
    for op, (part, start, count) in parts.items():
        carry, times = start(), []
        for _ in range(settings.repeats + 1):
            begin = time.perf_counter()
            jax.block_until_ready(many(model, carry, part, count))
            times.append((time.perf_counter() - begin) / CALLS)
        low, middle, high = 1e6 * np.percentile(times[1:], [10, 50, 90])
        record = {
            "model": MODEL,
            "batch": batch,
            "draft_tokens": drafts,
            "op": op,
            "time_us": round(float(middle), 1),
        }
        records.append(
            record | {"spread_us": [round(float(low), 1), round(float(high), 1)], "threads": os.cpu_count()}
        )
    return records


def main() -> None:
    """Measure, print a table, write bench/results/cpu_spec_decode.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder that bench.embedded_text wrote")
    result_file.add_commit(parser)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind of text")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, default=result_file.RESULTS / "cpu_spec_decode.json")
    settings = parser.parse_args()
    loaded = rs.load(MODEL, dtype=np.float32)
    result = result_file.head("bench.cpu_spec_decode", settings.commit) | {"records": []}
    print(
        f"{'text':6}{'batch':>6}{'temp.':>7}{'tokens/step':>13}{'accepted':>10}"
        f"{'tok/s':>8}{'replay':>8}{'eager':>8}{'gain':>7}"
    )
    for batch in settings.batches:
        for temperature in settings.temperatures:
            for kind in KINDS:
                shared = {"model": MODEL, "text": kind, "batch": batch, "temperature": temperature}
                prompts = held_out(settings.data, kind, settings.prompts)
                records = decoding(loaded, prompts, settings, **shared)
                result["records"] += records
                plain, eager, ours = records
                print(
                    f"{kind:6}{batch:6}{temperature:7.1f}{ours['tokens_per_step']:13.2f}"
                    f"{ours['draft_acceptance']:10.2f}{ours['tokens_per_second']:8.0f}"
                    f"{plain['tokens_per_second']:8.0f}{eager['tokens_per_second']:8.0f}{ours['gain']:7.2f}"
                )
        for record in costs(loaded, batch, settings):
            result["records"].append(record)
            print(f"batch {batch}: {record['op']:7}{record['time_us']:9.0f} us")
    result_file.write(result, settings.out)


if __name__ == "__main__":
    main()
