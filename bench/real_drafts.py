"""Speculative decoding with real drafts: an embedded checkpoint, four methods in the library's own loop.

Greedy decoding of `--new-tokens` tokens after prompts that the checkpoint was not trained on, stop ids
ignored: `replay` and `conventional` with the drafter's windows, plain `replay` and `eager`. All that is done
in a dispatch of 16 windows stays on the device: drafting, verification, acceptance, commit. The methods take
turns within every repeat. Records: `model`, `batch`, `method`, `implementation`, `drafter`, `window`,
`buffer_length`, `tokens_per_second` (median) with `spread`, `step_us`, `committed` (tokens a row and step),
`equal` (rows whose tokens are those of `eager`). Plain decoding stands once a model and batch.

    python -m bench.real_drafts [--model tiny-qwen3.5] [--drafters mtp,ngram,tiny-nemotron-h]
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replayssm_jax as rs
from bench import result_file
from bench.conventional import conventional_cache
from bench.processes import turn
from replayssm_jax.cache import Cache
from replayssm_jax.decode import FlatModel, Rows, decode, empty_cache, empty_state
from replayssm_jax.drafters import NAMES, drafter_of
from replayssm_jax.replay import prefill_core
from replayssm_jax.sampling import sampling_params

# Lines of our own, in the two kinds of text that the embedded checkpoints know.
PROMPTS = (
    "FIRST WATCHMAN.\nWho knocks so late upon the castle gate?\n",
    "def rolling_mean(values, size):\n    total = 0\n",
    "THE DUKE.\nI had a dream of ships upon the sea,\n",
    "class Ledger:\n    def __init__(self, owner):\n        self.owner = owner\n",
    "MARGARET.\nGood cousin, put away that idle sword,\n",
    "import os\n\ndef largest_files(folder, count):\n",
    "Enter a Messenger with letters.\n\nMESSENGER.\n",
    "for line in stream:\n    key, value = line.split('=')\n",
)


class Decoder:
    """One method on a batch of prompts: `run` decodes them all and gives tokens, seconds and the tally."""

    def __init__(
        self, loaded: Any, prompts: list, new_tokens: int, method: str, speculative: Any, replay: Any
    ):
        self.drafts = 0 if speculative is None else speculative.draft_tokens
        self.model = FlatModel.of(loaded.model)
        self.drafter = FlatModel.of(drafter_of(speculative, loaded))
        self.new_tokens = new_tokens
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self.tokens = np.zeros((len(prompts), self.lengths.max()), np.int32)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = prompt
        sampling = rs.Sampling(max_new_tokens=new_tokens, temperature=0.0, stop_ids=())
        self.params = sampling_params(sampling, loaded.vocab_size, ())
        max_length = self.tokens.shape[1] + new_tokens + 1 + self.drafts
        batch = len(prompts)
        self.empty: Callable[[], Cache] = functools.partial(
            empty_cache, self.model, batch, max_length, replay
        )
        if method == "conventional":
            build = functools.partial(
                conventional_cache,
                batch=batch,
                max_length=max_length,
                window=1 + self.drafts,
                implementation=replay.implementation,
            )
            self.empty = functools.partial(jax.jit(lambda model: build(model.unflatten())), self.model)
        self.state = functools.partial(empty_state, self.model, self.drafter, batch, max_length, replay)

    def run(self) -> tuple[np.ndarray, float, Any]:
        """Tokens int32 [B, new_tokens], seconds of decoding without the prefill, and the summed tally."""
        token, cache, state = _prefill(
            self.model, self.drafter, self.tokens, self.lengths, self.empty(), self.state()
        )
        batch = len(self.lengths)
        rows = Rows(
            token=token,
            active=jnp.ones((batch,), bool),
            remaining=jnp.full((batch,), self.new_tokens - 1, jnp.int32),
            prompt=jnp.arange(batch, dtype=jnp.int32),
            finite=jnp.ones((batch,), bool),
        )
        busy, texts, tally = np.ones(batch, bool), [[one] for one in np.asarray(token)], None
        jax.block_until_ready((cache, state))
        began = time.perf_counter()
        while True:
            rows, cache, state, block = decode(
                self.model,
                self.drafter,
                rows,
                cache,
                state,
                busy,
                np.int32(16),
                np.int32(1),
                self.params,
                drafts=self.drafts,
            )
            active, block = jax.device_get((rows.active, block))
            for text, new, count in zip(texts, block.tokens, block.count, strict=True):
                text.extend(new[:count])
            tally = block.tally if tally is None else jax.tree.map(np.add, tally, block.tally)
            if not active.any():
                return np.array(texts, np.int32), time.perf_counter() - began, tally


@functools.partial(jax.jit, donate_argnums=(4, 5))
def _prefill(model, drafter, tokens, lengths, cache, state):
    network, position = model.unflatten(), cache.position
    logits, hidden, cache = prefill_core(network, tokens, lengths, cache)
    state = drafter.unflatten().prefill(network, state, tokens, hidden, lengths, position)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache, state


def measure(
    loaded: Any,
    batch: int,
    new_tokens: int,
    speculatives: Mapping[str, rs.Speculative],
    repeats: int,
    replay: rs.ReplayConfig,
    lock: Path | None = None,
) -> list[dict]:
    """Records of plain decoding and of both speculative methods with every drafter, by name; a run that
    compiles comes first and is not counted."""
    prompts = [loaded.tokenizer(PROMPTS[i % len(PROMPTS)])["input_ids"] for i in range(batch)]
    make = functools.partial(Decoder, loaded, prompts, new_tokens)
    plain = rs.EagerConfig(implementation=replay.implementation)
    decoders: dict[tuple[str, str | None], Decoder] = {
        ("eager", None): make("eager", None, plain),
        ("replay", None): make("replay", None, replay),
    }
    for name, speculative in speculatives.items():
        window = dataclasses.replace(replay, window=speculative.window)
        for method in ("replay", "conventional"):
            decoders[method, name] = make(method, speculative, window)
    texts = {key: decoder.run()[0] for key, decoder in decoders.items()}
    seconds = {key: [] for key in decoders}
    tallies = {}
    for _ in range(repeats):
        for key, decoder in decoders.items():
            with turn(lock):
                _, spent, tallies[key] = decoder.run()
            seconds[key].append(spent)
    records = []
    for (method, drafter), times in seconds.items():
        tally = tallies[method, drafter]
        # The first token comes from the prefill.
        rates = batch * (new_tokens - 1) / np.array(times)
        low, middle, high = np.percentile(rates, [10, 50, 90])
        records.append(
            {
                "model": loaded.path.name,
                "batch": batch,
                "method": method,
                "implementation": replay.implementation,
                "drafter": drafter,
                "window": 1 + decoders[method, drafter].drafts,
                "buffer_length": replay.buffer_length,
                "tokens_per_second": round(float(middle), 1),
                "spread": [round(float(low), 1), round(float(high), 1)],
                "step_us": round(float(np.median(times)) / int(tally.steps) * 1e6, 1),
                "committed": round(batch * (new_tokens - 1) / int(tally.row_steps), 3),
                "equal": int((texts[method, drafter] == texts["eager", None]).all(axis=1).sum()),
            }
        )
    return records


def table(records: list[dict]) -> str:
    """The records as lines of text."""
    lines = [
        f"{'model':16}{'batch':>6}{'method':>14}{'drafter':>17}{'T':>3}{'tokens/s':>10}{'us a step':>11}"
        f"{'committed':>11}{'equal':>7}"
    ]
    for r in records:
        lines.append(
            f"{r['model']:16}{r['batch']:6}{r['method']:>14}{r['drafter'] or '-':>17}{r['window']:3}"
            f"{r['tokens_per_second']:10.0f}{r['step_us']:11.0f}{r['committed']:11.2f}{r['equal']:4}/{r['batch']}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line; prints a table and writes the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-qwen3.5")
    parser.add_argument("--drafters", default="mtp,ngram", help="mtp, ngram, names or folders of models")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--buffer-length", type=int, default=16)
    parser.add_argument("--implementation", default="xla", choices=("xla", "pallas"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lock", type=Path, help="file that other users of the device hold in their turn")
    result_file.add_commit(parser)
    parser.add_argument("--out", type=Path, default=result_file.RESULTS / "real_drafts.json")
    options = parser.parse_args()
    loaded = rs.load(options.model)
    speculatives = {
        name: rs.Speculative(name if name in NAMES else rs.load(name, mtp=False), options.draft_tokens)
        for name in options.drafters.split(",")
    }
    replay = rs.ReplayConfig(buffer_length=options.buffer_length, implementation=options.implementation)
    result = result_file.head("bench.real_drafts", options.commit)
    result["records"] = []
    for batch in map(int, options.batches.split(",")):
        records = measure(
            loaded, batch, options.new_tokens, speculatives, options.repeats, replay, options.lock
        )
        print(table(records), flush=True)
        result["records"] += records
        result_file.write(result, options.out)


if __name__ == "__main__":
    main()
