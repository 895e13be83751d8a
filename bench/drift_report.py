"""Tables and figures of the README and bench/RESULTS.md from result files of `bench.precision_drift`.

python -m bench.drift_report bench/results/precision_drift*.json [--plots bench/results]

Writes precision_drift.svg (divergence by position) and precision_heads.svg (error by head) into --plots.
"""

import argparse
import itertools
import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from bench import e2e_report
from bench.drift_models import CONTEXT
from bench.drift_tasks import TASKS
from bench.kernel_report import rows_of_table
from bench.plots import figure

FP32, SHARED, SEPARATE = "FP32", "shared NVFP4, nearest", "NVFP4 read, FP32"
STOCHASTIC = "NVFP4 read, FP8 stochastic"
SHARED_STOCHASTIC = "shared NVFP4, stochastic"
FEW = 198  # questions of GPQA-Diamond, by which the authors judge
LINES = {
    SHARED: ("#c0392b", "o-"),
    SHARED_STOCHASTIC: ("#c0392b", "s:"),
    "shared FP8, nearest": ("#d68910", "o-"),
    "shared FP8, stochastic": ("#d68910", "s:"),
    SEPARATE: ("#1b6ca8", "o-"),
    "NVFP4 read, FP16 stochastic": ("#148f77", "v--"),
    STOCHASTIC: ("#1b6ca8", "s:"),
    "FP8 read, FP32": ("#7d3c98", "o-"),
}


def interval(right: float, asked: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share, 95 % for the default z."""
    if not asked:
        return 0.0, 1.0
    share, spread = right / asked, z * z / asked
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / asked + spread / asked / 4) / (1 + spread)
    return (centre - half if right else 0.0), (centre + half if right < asked else 1.0)


def pick(records: list[dict], **fields: object) -> dict | None:
    """The record with these fields, None where there is none."""
    return next((r for r in records if all(r.get(key) == value for key, value in fields.items())), None)


def plain(record: dict, field: str) -> np.ndarray:
    """A field of the texts without tasks, [texts, intervals]; NaN where it was not finite."""
    rows = [row for row, name in zip(record[field], record["texts"], strict=True) if "tasks" not in name]
    return np.asarray(rows, np.float64)


def inside(records: list[dict], record: dict, most: float = math.inf) -> tuple[int, int]:
    """Cells in which a configuration lies inside the FP32 run's interval, and cells that were asked.

    most: answers that an interval counts at most, which makes it as wide as that of a smaller test.
    """
    truth = pick(records, model=record["model"], buffer_length=record["buffer_length"], configuration=FP32)
    assert truth is not None, "the records lack the FP32 run"
    found = asked = 0
    for ours, theirs in zip(_cells(record), _cells(truth), strict=True):
        if theirs[1]:
            counted = min(theirs[1], most)
            low, high = interval(theirs[0] * counted / theirs[1], counted)
            asked, found = asked + 1, found + (low <= ours[0] / ours[1] <= high)
    return found, asked


def _cells(record: dict) -> list[tuple[int, int]]:
    return [tuple(cell) for task in record["cells"] for cell in task]


def slope(record: dict) -> tuple[float, float]:
    """Growth of log KL a doubling of the position over the last three doublings: mean over texts, and its
    standard error."""
    edges = np.asarray(record["edges"])
    kept = 8 * edges >= record["tokens"]
    x = np.log2([*edges[1:], record["tokens"]])[kept]
    values = np.log(np.maximum(plain(record, "kl")[:, kept], 1e-30))
    fits = np.polyfit(x, values.T, 1)[0]
    return float(fits.mean()), float(fits.std(ddof=1) / math.sqrt(fits.size))


def _models(records: list[dict], length: int) -> list[str]:
    """Models with tasks in a run at this L, in the order of the records."""
    runs = (r for r in records if r["buffer_length"] == length and "configuration" in r)
    return list(dict.fromkeys(r["model"] for r in runs if any(asked for _, asked in _cells(r))))


def headline(records: list[dict], length: int = 16) -> str:
    """KL, agreement and cells of every configuration, the models that were asked tasks side by side."""
    models = _models(records, length)
    header = ["configuration"]
    for model in models:
        truth = pick(records, model=model, buffer_length=length, configuration=FP32)
        assert truth is not None, f"the records lack the FP32 run of {model}"
        last = f"{truth['edges'][-1]:,} to {truth['tokens']:,}"
        header += [f"`{model}`: KL to {CONTEXT:,}", f"KL {last}", f"same token {last}", "cells inside"]
    names = dict.fromkeys(r["configuration"] for r in records if "configuration" in r)
    rows = []
    for name in names:
        found = [pick(records, model=m, buffer_length=length, configuration=name) for m in models]
        cells = [_columns(records, record) if record else ["-"] * 4 for record in found]
        rows.append([name, *(cell for part in cells for cell in part)])
    return rows_of_table(header, rows)


def _early(record: dict) -> float:
    """Mean KL up to the trained context."""
    kl, edges = plain(record, "kl").mean(axis=0), np.asarray(record["edges"])
    trained, spans = edges < CONTEXT, np.diff([*edges, record["tokens"]])
    return float(np.sum(kl[trained] * spans[trained]) / np.sum(spans[trained]))


def _inside(records: list[dict], record: dict, most: float = math.inf) -> str:
    found, asked = inside(records, record, most)
    return f"{found} of {asked}" if asked else "-"


def _columns(records: list[dict], record: dict) -> list[str]:
    last = plain(record, "kl").mean(axis=0)[-1]
    same = f"{100 * plain(record, 'agreement').mean(axis=0)[-1]:.1f} %"
    return [f"{_early(record):.2g}", f"{last:.2g}", same, _inside(records, record)]


def by_length(records: list[dict]) -> str:
    """Shared NVFP4 and NVFP4 reads by model and L: KL up to the trained context and at the end, its growth,
    and cells, at last inside intervals of FEW answers."""
    header = ["model", "L", "tokens", "KL: shared", "separate", "at the end: shared", "separate", "ratio"]
    header += ["slope: shared", "separate", "cells: shared", "separate, FP8", f"by {FEW} answers"]
    rows = []
    for model, length in _runs(records):
        same = {"model": model, "buffer_length": length}
        found = [pick(records, **same, configuration=name) for name in (SHARED, SEPARATE, STOCHASTIC)]
        shared, separate, stochastic = found
        if shared is None or separate is None or stochastic is None:
            continue
        ends = [plain(run, "kl").mean(axis=0)[-1] for run in (shared, separate)]
        row = [f"`{model}`", f"{length}", f"{shared['tokens']:,}"]
        row += [f"{kl:.2g}" for kl in (_early(shared), _early(separate), *ends)]
        ratio = ends[0] / ends[1]
        row.append(f"{ratio:.0f}" if ratio > 10 else f"{ratio:.1f}")
        row += ["{:+.2f} ± {:.2f}".format(*slope(run)) for run in (shared, separate)]
        row += [_inside(records, run) for run in (shared, stochastic)]
        rows.append([*row, _inside(records, stochastic, FEW)])
    return rows_of_table(header, rows)


def by_task(records: list[dict], length: int = 16) -> str:
    """Shares of right answers over all positions, task by task, the models side by side."""
    models, header, columns = _models(records, length), ["task"], []
    for model in models:
        for name in (FP32, SHARED, SHARED_STOCHASTIC, SEPARATE, STOCHASTIC):
            record = pick(records, model=model, buffer_length=length, configuration=name)
            if record is not None:
                header.append(f"`{model}`: {name}" if name == FP32 else name)
                right, asked = np.asarray(record["cells"]).sum(axis=1).T
                columns.append([f"{100 * share:.1f} %" for share in right / np.maximum(asked, 1)])
    return rows_of_table(header, [[task.name, *row] for task, *row in zip(TASKS, *columns, strict=False)])


def by_memory(records: list[dict], lengths: Collection[int]) -> str:
    """Squared errors by head, shared NVFP4 over NVFP4 read + FP32: measured against predicted ratio."""
    header = ["model", "L", "heads that decay by e over", "heads", "predicted", "nearest", "within 2x"]
    header += ["stochastic", "within 2x"]
    rows = []
    for model, length in _runs(records):
        record = pick(records, model=model, buffer_length=length, heads=True)
        if record is None or length not in lengths:
            continue
        memory, predicted, nearest, stochastic = heads(record)
        for low, high in itertools.pairwise((0, 4 * length, 2000, math.inf)):
            here = (memory >= low) & (memory < high)
            if here.any():
                span = f"{low:,} to {high:,} tokens" if high < math.inf else f"{low:,} tokens and more"
                row = [
                    f"`{model}`",
                    f"{length}",
                    span,
                    f"{np.sum(here)}",
                    f"{np.median(predicted[here]):.3g}",
                ]
                for measured in (nearest, stochastic):
                    row += [
                        f"{np.median(measured[here]):.3g}",
                        _within_twice(measured[here], predicted[here]),
                    ]
                rows.append(row)
    return rows_of_table(header, rows)


def _runs(records: list[dict]) -> list[tuple[str, int]]:
    """Models and L of the records, the models in their order."""
    models = dict.fromkeys(r["model"] for r in records)
    lengths = sorted({r["buffer_length"] for r in records})
    return [(model, length) for model in models for length in lengths]


def tables(records: list[dict], lengths: Collection[int] = (16,)) -> dict[str, str]:
    """The tables of the documents, by name. lengths: of those by head."""
    if not records:
        return {}
    return {
        "precision": headline(records),
        "precision-by-task": by_task(records),
        "precision-by-length": by_length(records),
        "precision-by-memory": by_memory(records, lengths),
    }


def heads(record: dict) -> np.ndarray:
    """By head: memory in tokens, and squared errors of a shared NVFP4 state over those of NVFP4 reads.

    The ratio predicted from the decays, and measured with rounding to nearest and stochastically. The error
    of a stochastic rounding is larger from the start: its ratio is divided by that of heads that keep
    nothing.
    """

    def joined(rows: list) -> np.ndarray:
        values = np.concatenate([np.asarray(row, np.float64) for row in rows])
        return np.nan_to_num(values, nan=np.inf)  # states that have left float32

    separate = joined(record["errors"][SEPARATE])
    predicted, nearest, stochastic = (
        joined(rows) / separate
        for rows in (record["predicted"], record["errors"][SHARED], record["errors"][SHARED_STOCHASTIC])
    )
    unit = np.median(stochastic[predicted < 1.1])
    return np.stack([joined(record["memory"]), predicted, nearest, stochastic / unit])


def _within_twice(measured: np.ndarray, predicted: np.ndarray) -> str:
    return f"{100 * np.mean(np.abs(np.log2(measured / predicted)) <= 1):.0f} %"


def plot_growth(records: list[dict], path: Path, length: int = 16) -> None:
    """KL against FP32 state by position, one panel a model."""
    models = _models(records, length)
    with figure(path, len(models), figsize=(3.6 * len(models) + 1.6, 3.4)) as axes:
        for axis, model in zip(axes, models, strict=True):
            for name, (colour, style) in LINES.items():
                record = pick(records, model=model, buffer_length=length, configuration=name)
                if record:
                    ends = [*record["edges"][1:], record["tokens"]]
                    kl = plain(record, "kl").mean(axis=0)
                    axis.plot(ends, kl, style, color=colour, label=name, markersize=3)
            axis.axvline(CONTEXT, color="grey", linewidth=0.8)
            axis.set(title=model, xlabel="tokens decoded", yscale="log")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("KL against FP32 state\n(nats a token)")
        axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def plot_heads(records: list[dict], path: Path, length: int = 16) -> None:
    """Measured against predicted ratio of squared errors, a dot a head, one panel a model."""
    models = _models(records, length)
    with figure(path, len(models), figsize=(3.6 * len(models), 3.4), sharey=True) as axes:
        for axis, model in zip(axes, models, strict=True):
            record = pick(records, model=model, buffer_length=length, heads=True)
            if record is None:
                continue
            _, predicted, nearest, stochastic = heads(record)
            axis.plot(predicted, nearest, "o", color="#c0392b", markersize=3, label="nearest")
            axis.plot(predicted, stochastic, "s", color="#1b6ca8", markersize=3, label="stochastic")
            line = np.geomspace(1.0, predicted.max(), 2)
            axis.plot(line, line, color="grey", linewidth=0.8, label="prediction")
            axis.fill_between(line, line / 2, 2 * line, color="grey", alpha=0.15)
            axis.set(
                title=model, xlabel="predicted from the decay", xscale="log", yscale="log", ylim=(0.3, 1e6)
            )
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("squared error, shared NVFP4\nover NVFP4 read + FP32")
        axes[0].legend(fontsize=7)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--plots", type=Path, help="folder of the figures")
    options = parser.parse_args()
    records = e2e_report.read(options.results, "bench.precision_drift")
    print(*tables(records, {record["buffer_length"] for record in records}).values(), sep="\n\n")
    if options.plots:
        plot_growth(records, options.plots / "precision_drift.svg")
        plot_heads(records, options.plots / "precision_heads.svg")


if __name__ == "__main__":
    main()
