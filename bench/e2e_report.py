"""Tables of whole models and of speculation, in Markdown, from result files of `bench.e2e_decode_speedup`,
`bench.step_times`, `bench.e2e_transformers`, `bench.e2e_spec_decode_throughput` and `bench.real_drafts`.

python -m bench.e2e_report bench/results/e2e_*.json
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import kernel_table
from bench.e2e_decode_speedup import METHODS
from bench.e2e_models import STAND_INS
from bench.kernel_report import rows_of_table
from bench.roofline import DATA_SHEET_FLOPS, Ceilings, bounds_of, floor_parts_of

NAMES = {"nano-4b": "Nemotron-3-Nano-4B", "qwen3.5-4b": "Qwen3.5-4B"}
# Dense MLPs stand in for their experts.
NAMES |= {"super": "Nemotron-3-Super*", "q122": "Qwen3.5-122B*"}


class Place(NamedTuple):
    """What was run, but not by which method: fields of the records. The last four are replay's."""

    shape: str
    depth_cut: bool
    layers: int
    batch: int
    context: int
    phases: str
    state: str
    recurrence: str
    buffer_length: int

    @property
    def size(self) -> tuple[str, int, int]:
        """Model, layers and batch."""
        return self.shape, self.layers, self.batch

    @property
    def depth(self) -> str:
        """The number of layers in words."""
        return f"{self.layers} (cut)" if self.depth_cut else str(self.layers)

    @property
    def plain(self) -> bool:
        """Whether rows are in random phases, states float32, and L = 16."""
        return self[-4:] == ("random", "fp32", "fp32", 16)


def read(paths: Iterable[Path], bench: str) -> list[dict]:
    """Records of the result files among `paths` that a benchmark wrote, with their file's name, commit and
    device."""
    results = {path.stem: json.loads(path.read_text()) for path in paths}
    return [
        record | {"commit": result.get("commit", "-"), "file": name, "on": result.get("device", "-")}
        for name, result in results.items()
        if result["bench"] == bench
        for record in result["records"]
    ]


def pairs(records: Sequence[dict]) -> dict[Place, dict[str, dict]]:
    """Eager and replay records of the same place, by method; whole models first, then by size.

    An eager step, whose states are float32 and which has no phases, stands beside every replay step of its
    size in the same file.
    """
    decode = [record for record in records if record["op"] == "decode"]

    def size(record: dict) -> tuple:
        return record.get("file"), *(record[name] for name in ("shape", "layers", "batch", "context"))

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


def series(found: dict[Place, dict[str, dict]]) -> list[list[Place]]:
    """Plain places on a depth cut that differ in their context alone, of files with three and more."""
    lines: dict[tuple, list[Place]] = {}
    for place, pair in found.items():
        if place.plain and place.depth_cut:
            lines.setdefault((pair["replay"].get("file"), place.size), []).append(place)
    return [places for places in lines.values() if len(places) > 2]


def share_of_floor(record: dict, ceilings: Ceilings) -> str:
    """What the floor of a record's step is of its time; a tenth of a percent, as a target is not met by
    rounding."""
    return f"{100 * sum(floor_parts_of(record, ceilings).values()) / record['time_us']:.1f} %"


def _cells(pair: dict[str, dict]) -> list[str]:
    """Milliseconds a step of both methods, speed-up, tokens a second and both shares of the roofline."""
    milliseconds = [f"{pair[method]['time_us'] / 1e3:.2f}" for method in METHODS]
    shares = [share_of_floor(pair[method], Ceilings()) for method in METHODS]
    return [*milliseconds, f"{speedup(pair):.2f}", f"{pair['replay']['tokens_per_second']:,.0f}", *shares]


COLUMNS = ["eager", "replay", "speed-up", "tokens/s", "eager, of its floor", "replay, of its floor"]


def steps(records: Sequence[dict]) -> str:
    """Milliseconds a step of both methods, L = 16, float32 states, random phases, but for series of
    contexts; last the shares of the floor with products at the data sheet's speed."""
    found, data_sheet = pairs(records), Ceilings(flops=DATA_SHEET_FLOPS)
    apart = {place for places in series(found) for place in places}
    rows = [
        [NAMES.get(place.shape, place.shape), place.depth, str(place.batch), f"{place.context:,}"]
        + _cells(pair)
        + [share_of_floor(pair[method], data_sheet) for method in METHODS]
        for place, pair in found.items()
        if place.plain and place not in apart
    ]
    by_data_sheet = [f"{method}, by the data sheet" for method in METHODS]
    return rows_of_table(["model", "layers", "batch", "context", *COLUMNS, *by_data_sheet], rows)


def by_context(records: Sequence[dict]) -> str:
    """The same of series of contexts, with the share of the replay floor that reads keys and values."""
    found, rows = pairs(records), []
    for places in series(found):
        for place in places:
            replay = found[place]["replay"]
            parts = floor_parts_of(replay)
            share = parts["kv"] / sum(parts.values())
            head = [NAMES.get(place.shape, place.shape), place.depth, str(place.batch), f"{place.context:,}"]
            rows.append([*head, f"{100 * share:.0f} %", *_cells(found[place])])
    return rows_of_table(["model", "layers", "batch", "context", "keys and values", *COLUMNS], rows)


def variants(records: Sequence[dict]) -> str:
    """The same where phases, formats or L were varied: the plain step first, then by L, phases and format."""
    found = pairs(records)
    varied = {place.size + (place.context,) for place in found if not place.plain}

    def order(place: Place) -> tuple:
        formats = place.state, place.recurrence
        changed = not place.plain, formats != ("fp32", "fp32"), place.phases != "random"
        return *place.size, place.context, *changed, place.buffer_length, place.phases, formats

    rows = []
    for place in sorted(found, key=order):
        pair = found[place]
        if place.size + (place.context,) in varied:
            shared = place.state == place.recurrence
            state = place.state if shared else f"{place.state} of {place.recurrence}"
            head = [NAMES.get(place.shape, place.shape), place.depth, str(place.batch), place.phases]
            rows.append([*head, state, str(place.buffer_length), *_cells(pair)])
    return rows_of_table(["model", "layers", "batch", "phases", "state read", "L", *COLUMNS], rows)


def step_times(records: Sequence[dict]) -> str:
    """Microseconds of single steps and tokens a second by the mean step; the 99th percentile of the steps'
    medians over the repeats, and that of all single steps, over the median."""
    order = [("replay", "synchronised"), ("replay", "spread"), ("eager", "random")]

    def place(record: dict) -> tuple:
        return *(record[name] for name in ("shape", "depth_cut", "layers", "batch")), order.index(
            kind(record)
        )

    def kind(record: dict) -> tuple[str, str]:
        return record["method"], record["phases"]

    rows = []
    for record in sorted(records, key=place):
        steps, (method, phases) = record["step_us"], kind(record)
        depth = f"{record['layers']} (cut)" if record["depth_cut"] else str(record["layers"])
        cells = [NAMES.get(record["shape"], record["shape"]), depth, str(record["batch"]), method]
        cells += [phases if method == "replay" else "-", str(len(record["step_times_us"]))]
        cells += [f"{steps[name]:,.0f}" for name in ("median", "p99", "mean")]
        cells += [f"{steps[name] / steps['median']:.3f}" for name in ("p99", "p99_of_all")]
        rows.append([*cells, f"{record['batch'] / steps['mean'] * 1e6:,.0f}", record.get("commit", "-")])
    header = ["model", "layers", "batch", "method", "flushes", "steps", "median", "p99", "mean"]
    header += ["p99 / median", "the same of all single steps", "tokens/s", "commit"]
    return rows_of_table(header, rows)


KINDS = (*kernel_table.KINDS, kernel_table.OTHER, kernel_table.BETWEEN)
# Parts of the roofline that a kind of kernel does.
FLOORS = {"state and ring": ("state", "ring"), "products": ("weights", "head"), "attention": ("kv",)}


def by_kind(records: Sequence[dict]) -> str:
    """Milliseconds a step by kind of kernel in a profile of one dispatch, with those of the roofline in
    brackets."""
    rows = []
    for place, pair in pairs(records).items():
        for method, record in pair.items():
            if "kernels_us" in record and place.plain:
                head = [NAMES.get(place.shape, place.shape), place.depth, str(place.batch), method]
                rows.append([*head, *_kinds(record)])
    return rows_of_table(["model", "layers", "batch", "method", *KINDS], rows)


def _kinds(record: dict) -> list[str]:
    """Milliseconds of each of `KINDS` in a record's profile, with those of the roofline in brackets."""
    cells, parts = [], floor_parts_of(record)
    for kind in KINDS:
        cell = f"{record['kernels_us'][kind] / 1e3:.2f}"
        if kind in FLOORS:
            least = sum(parts[part] for part in FLOORS[kind])
            cell += f" ({least / 1e3:.2f})"
        cells.append(cell)
    return cells


def verification_by_kind(records: Sequence[dict]) -> str:
    """The same of verified windows, and of plain steps in their result files."""
    rows = []
    for record in records:
        if "kernels_us" in record:
            depth = f"{record['layers']} (cut)" if record["depth_cut"] else str(record["layers"])
            head = [NAMES.get(record["shape"], record["shape"]), depth, str(record["batch"])]
            method = f"{record['method']}, {record['drafter']}" if "drafter" in record else record["method"]
            head += [method, str(record["window"]), f"{record['time_us'] / 1e3:.1f}"]
            rows.append([*head, *_kinds(record), record.get("commit", "-")])
    return rows_of_table(["model", "layers", "batch", "method", "T", "step", *KINDS, "commit"], rows)


def compile_times(records: Sequence[dict]) -> str:
    """Seconds to trace, lower and compile the step of whole models, without and with the persistent cache."""
    found: dict[tuple, dict] = {}
    for record in records:
        if record["op"] == "compile":
            place = record["shape"], record["method"], record["batch"]
            found.setdefault(place, {})[record.get("cached")] = record["lowering_s"] + record["compile_s"]
    rows = [
        [NAMES.get(shape, shape), method, str(batch), f"{times[False]:.0f}", f"{times[True]:.0f}"]
        for (shape, method, batch), times in sorted(found.items())
        if {False, True} <= set(times)
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
    """Milliseconds of plain steps and of steps of T tokens, L = 16, with ratios of tokens a second, and in
    brackets those of the floors; of depth cuts where the model is one of `STAND_INS`.

    Only steps of one commit stand in a row.
    """
    columns = (("eager", 1), ("replay", 1), ("replay", window), ("conventional", window))
    found: dict[tuple, dict[tuple[str, int], dict]] = {}
    for record in records:
        if record["op"] == "concurrency" or record["buffer_length"] != 16 or "drafter" in record:
            continue
        if not record["depth_cut"] or record["shape"] in STAND_INS:
            place = [record[name] for name in ("depth_cut", "shape", "layers", "batch")]
            steps_of = found.setdefault((*place, record.get("commit", "-")), {})
            steps_of[record["method"], record["window"]] = record
    rows = []
    for (cut, shape, layers, batch, commit), steps_of in sorted(found.items()):
        cells = [f"{steps_of[c]['time_us'] / 1e3:.1f}" if c in steps_of else "-" for c in columns]
        rates = {column: record["tokens_per_second"] for column, record in steps_of.items()}
        for base in (("eager", 1), ("conventional", window)):
            known = base in rates and ("replay", window) in rates
            cell = f"{rates['replay', window] / rates[base]:.2f}" if known else "-"
            replay = steps_of.get(("replay", window))
            bound = None if replay is None else bounds_of(replay).get(base[0])
            cells.append(cell if bound is None else f"{cell} ({bound:.2f})")
        depth = f"{layers} (cut)" if cut else str(layers)
        rows.append([NAMES.get(shape, shape), depth, str(batch), *cells, commit])
    header = ["model", "layers", "batch", "eager", "replay", f"replay T = {window}"]
    header += [
        f"conventional T = {window}",
        f"T = {window} tokens/s over eager",
        "over conventional",
        "commit",
    ]
    return rows_of_table(header, rows)


def verification_grid(records: Sequence[dict]) -> str:
    """Windows of depth cuts by T and batch, L = 16: milliseconds of both methods, ratios of tokens a second
    with those of the floors in brackets, and peak memory of both; only steps of one file are compared."""
    found: dict[tuple, dict[tuple[str, int], dict]] = {}
    for record in records:
        timed = record["op"] != "concurrency" and record["buffer_length"] == 16 and "drafter" not in record
        if timed and record["depth_cut"] and record["shape"] not in STAND_INS:
            place = record["shape"], record["layers"], record["file"], record["batch"]
            found.setdefault(place, {})[record["method"], record["window"]] = record
    windows = sorted({window for steps_of in found.values() for _, window in steps_of if window > 1})
    rows = []
    for window in windows:
        for (shape, layers, _, batch), steps_of in sorted(found.items()):
            replay, conventional = (steps_of.get((m, window)) for m in ("replay", "conventional"))
            if replay is None or conventional is None:
                continue
            cells = [NAMES.get(shape, shape), f"{layers} (cut)", str(window), str(batch)]
            cells += [f"{record['time_us'] / 1e3:.2f}" for record in (replay, conventional)]
            for other in (conventional, steps_of.get(("eager", 1))):
                cell = f"{replay['tokens_per_second'] / other['tokens_per_second']:.2f}" if other else "-"
                bound = bounds_of(replay).get(other["method"]) if other else None
                cells.append(cell if bound is None else f"{cell} ({bound:.2f})")
            cells += [f"{record['peak_bytes'] / 1e9:.1f}" for record in (replay, conventional)]
            rows.append([*cells, replay.get("commit", "-")])
    header = ["model", "layers", "T", "batch", "replay", "conventional", "over conventional", "over eager"]
    return rows_of_table([*header, "peak GB, replay", "peak GB, conventional", "commit"], rows)


def rows_that_fit(records: Sequence[dict], window: int = 4) -> list[tuple[dict, dict]]:
    """Records of the largest batch at T tokens a step: replay's and the conventional method's, by model and
    positions a row."""
    found: dict[tuple, dict[str, dict]] = {}
    for record in records:
        if record["op"] == "concurrency" and record["window"] == window:
            place = record["shape"], record["max_length"], record["memory_bytes"], record.get("commit", "-")
            found.setdefault(place, {})[record["method"]] = record
    pairs = [found[place] for place in sorted(found)]
    return [
        (pair["replay"], pair["conventional"]) for pair in pairs if {"replay", "conventional"} <= set(pair)
    ]


def concurrency(records: Sequence[dict]) -> str:
    """Rows that fit beside the weights."""
    rows = []
    for replay, conventional in rows_that_fit(records):
        cells = [NAMES.get(replay["shape"], replay["shape"]), f"{replay['max_length']:,}"]
        cells += [f"{replay['memory_bytes'] / 1e9:.0f}", str(replay["rows"]), str(conventional["rows"])]
        rows.append([*cells, f"{replay['rows'] / conventional['rows']:.2f}", replay.get("commit", "-")])
    header = ["model", "positions a row", "memory, GB", "rows, replay T = 4", "rows, conventional T = 4"]
    return rows_of_table([*header, "ratio", "commit"], rows)


def real_drafts(records: Sequence[dict]) -> str:
    """Decoding with drafters that run: tokens a second, and what a step takes and commits."""
    rows = []
    for record in sorted(records, key=lambda record: (record["on"], record["model"], record["batch"])):
        drafter, batch = record["drafter"] or "-", str(record["batch"])
        device = record["on"].split(",")[0].removeprefix("gpu NVIDIA ").removeprefix("cpu ")
        cells = [device, f"`{record['model']}`", batch, record["method"], drafter, str(record["window"])]
        cells += [f"{record['tokens_per_second']:,.0f}", f"{record['step_us'] / 1e3:.2f}"]
        rows.append([*cells, f"{record['committed']:.2f}", f"{record['equal']} of {batch}"])
    header = ["device", "model", "batch", "method", "drafter", "T"]
    header += ["tokens/s", "ms a step", "tokens a step"]
    return rows_of_table([*header, "texts as eager's"], rows)


def tables(paths: Sequence[Path]) -> dict[str, str]:
    """The tables of the documents that these result files give, by name."""
    whole = read(paths, "bench.e2e_decode_speedup")
    made = {
        "whole-models": (steps, whole),
        "whole-models-by-context": (by_context, whole),
        "whole-models-variants": (variants, whole),
        "whole-models-by-kind": (by_kind, whole),
        "compile-times": (compile_times, whole),
        "step-times": (step_times, read(paths, "bench.step_times")),
        "transformers": (generation, read(paths, "bench.e2e_transformers")),
        "verification": (verification, read(paths, "bench.e2e_spec_decode_throughput")),
        "verification-grid": (verification_grid, read(paths, "bench.e2e_spec_decode_throughput")),
        "verification-by-kind": (
            verification_by_kind,
            read(paths, "bench.e2e_spec_decode_throughput"),
        ),
        "concurrency": (concurrency, read(paths, "bench.e2e_spec_decode_throughput")),
        "real-drafts": (real_drafts, read(paths, "bench.real_drafts")),
    }
    found = {name: table(records) for name, (table, records) in made.items() if records}
    return {name: table for name, table in found.items() if len(table.splitlines()) > 2}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    print(*tables(parser.parse_args().results).values(), sep="\n\n")


if __name__ == "__main__":
    main()
