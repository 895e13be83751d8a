"""Tables of whole models, in Markdown, from result files of `bench.e2e_decode_speedup` and
`bench.e2e_transformers`.

python -m bench.e2e_report bench/results/e2e_*.json
"""

import argparse
import json
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.e2e_decode_speedup import METHODS
from bench.kernel_report import rows_of_table

NAMES = {"nano-4b": "Nemotron-3-Nano-4B", "qwen3.5-4b": "Qwen3.5-4B"}


class Place(NamedTuple):
    """What was run, but not by which method: fields of the records. state, recurrence: replay's formats."""

    shape: str
    depth_cut: bool
    layers: int
    batch: int
    context: int
    phases: str
    state: str
    recurrence: str

    @property
    def depth(self) -> str:
        """The number of layers in words."""
        return f"{self.layers} (cut)" if self.depth_cut else str(self.layers)

    @property
    def plain(self) -> bool:
        """Whether rows are in random phases and states float32."""
        return (self.phases, self.state, self.recurrence) == ("random", "fp32", "fp32")


def read(paths: Iterable[Path], bench: str) -> list[dict]:
    """Records of the result files among `paths` that a benchmark wrote, each with its file's commit."""
    results = [json.loads(path.read_text()) for path in paths]
    return [
        record | {"commit": result.get("commit", "-")}
        for result in results
        if result["bench"] == bench
        for record in result["records"]
    ]


def pairs(records: Sequence[dict]) -> dict[Place, dict[str, dict]]:
    """Eager and replay records of the same place, by method; whole models first, then by size.

    An eager step, whose states are float32 and which has no phases, stands beside every replay step of its
    size.
    """
    decode = [record for record in records if record["op"] == "decode"]
    size = operator.itemgetter("shape", "layers", "batch", "context")
    eager = {size(record): record for record in decode if record["method"] == "eager"}
    found = {
        Place(*(record[name] for name in Place._fields)): {"eager": eager[size(record)], "replay": record}
        for record in decode
        if record["method"] == "replay" and size(record) in eager
    }
    return {place: found[place] for place in sorted(found)}


def speedup(pair: dict[str, dict]) -> float:
    """Replay over eager, by medians."""
    return pair["eager"]["time_us"] / pair["replay"]["time_us"]


def steps(records: Sequence[dict]) -> str:
    """Milliseconds a step of both methods, with the speed-up and the share of the roofline."""
    header = ["model", "layers", "batch", "context", "phases", "state read", "eager", "replay", "speed-up"]
    header += ["tokens/s", "eager, of its floor", "replay, of its floor"]
    rows = []
    for place, pair in pairs(records).items():
        milliseconds = [f"{pair[method]['time_us'] / 1e3:.2f}" for method in METHODS]
        shares = [f"{100 * pair[m]['floor_us'] / pair[m]['time_us']:.0f} %" for m in METHODS]
        cells = [NAMES.get(place.shape, place.shape), place.depth, str(place.batch), f"{place.context:,}"]
        cells += [place.phases, place.state, *milliseconds, f"{speedup(pair):.2f}"]
        rows.append([*cells, f"{pair['replay']['tokens_per_second']:,.0f}", *shares])
    return rows_of_table(header, rows)


def compile_times(records: Sequence[dict]) -> str:
    """Seconds to trace, lower and compile the step of whole models, without and with the persistent cache."""
    found: dict[tuple, dict] = {}
    for record in records:
        if not record["depth_cut"] and record["op"] in ("decode", "compile"):
            place = record["shape"], record["method"], record["batch"]
            seconds = record["lowering_s"] + record["compile_s"]
            found.setdefault(place, {}).setdefault(record["op"], seconds)
    rows = [
        [NAMES.get(shape, shape), method, str(batch), f"{times['decode']:.0f}", f"{times['compile']:.0f}"]
        for (shape, method, batch), times in sorted(found.items())
        if len(times) == len(("decode", "compile"))
    ]
    return rows_of_table(["model", "method", "batch", "empty cache", "from the cache"], rows)


def generation(records: Sequence[dict]) -> str:
    """Tokens a second of `rs.generate` and of transformers, whole calls and steps without prompts."""
    found: dict[tuple, dict[str, dict]] = {}
    for record in records:
        place = tuple(record[name] for name in ("shape", "depth_cut", "layers", "batch", "new_tokens"))
        found.setdefault(place, {})[record["method"]] = record
    header = ["model", "layers", "batch", "new tokens", "ours, tokens/s", "transformers, tokens/s", "ratio"]
    rows = []
    for (shape, cut, layers, batch, new_tokens), sides in sorted(found.items()):
        mine, peer = sides["generate"], sides["peer:transformers"]
        rates = [side["tokens_per_second"] for side in (mine, peer)]
        decode = mine["decode_tokens_per_second"] / peer["decode_tokens_per_second"]
        depth = f"{layers} (cut)" if cut else str(layers)
        cells = [NAMES.get(shape, shape), depth, str(batch), str(new_tokens)]
        cells += [f"{rate:,.0f}" for rate in rates]
        rows.append([*cells, f"{rates[0] / rates[1]:.1f}", f"{decode:.1f}"])
    return rows_of_table([*header, "ratio without prompts"], rows)


def verification(records: Sequence[dict], window: int = 4) -> str:
    """Milliseconds of plain steps and of steps of T tokens of whole models, L = 16, with ratios of tokens a
    second. Only steps of one commit stand in a row."""
    columns = (("eager", 1), ("replay", 1), ("replay", window), ("conventional", window))
    found: dict[tuple[str, int, str], dict[tuple[str, int], dict]] = {}
    for record in records:
        if record["op"] != "concurrency" and not record["depth_cut"] and record["buffer_length"] == 16:
            place = record["shape"], record["batch"], record.get("commit", "-")
            found.setdefault(place, {})[record["method"], record["window"]] = record
    rows = []
    for (shape, batch, commit), steps_of in sorted(found.items()):
        cells = [f"{steps_of[c]['time_us'] / 1e3:.1f}" if c in steps_of else "-" for c in columns]
        rates = {column: record["tokens_per_second"] for column, record in steps_of.items()}
        for base in (("eager", 1), ("conventional", window)):
            known = base in rates and ("replay", window) in rates
            cells.append(f"{rates['replay', window] / rates[base]:.2f}" if known else "-")
        rows.append([NAMES.get(shape, shape), str(batch), *cells, commit])
    header = ["model", "batch", "eager", "replay", f"replay T = {window}", f"conventional T = {window}"]
    header += [f"T = {window} tokens/s over eager", "over conventional", "commit"]
    return rows_of_table(header, rows)


def tables(paths: Sequence[Path]) -> dict[str, str]:
    """The tables of the README that these result files give, by name."""
    made = {
        "whole-models": (steps, read(paths, "bench.e2e_decode_speedup")),
        "compile-times": (compile_times, read(paths, "bench.e2e_decode_speedup")),
        "transformers": (generation, read(paths, "bench.e2e_transformers")),
        "verification": (verification, read(paths, "bench.e2e_spec_decode_throughput")),
    }
    return {name: table(records) for name, (table, records) in made.items() if records}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    print(*tables(parser.parse_args().results).values(), sep="\n\n")


if __name__ == "__main__":
    main()
