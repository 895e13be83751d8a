"""Tables and figures of the README from a result file of `bench.precision_drift`.

python -m bench.drift_report bench/results/precision_drift.json [--plots bench/results]

Writes precision_drift.svg (divergence by position) and precision_heads.svg (error by head) into --plots.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

from bench.drift_models import CONTEXT

FP32, SHARED, SEPARATE = "FP32", "shared NVFP4, nearest", "NVFP4 read, FP32"
STOCHASTIC = "NVFP4 read, FP8 stochastic"
LINES = {
    SHARED: ("#c0392b", "o-"),
    "shared NVFP4, stochastic": ("#c0392b", "s:"),
    "shared FP8, nearest": ("#d68910", "o-"),
    "shared FP8, stochastic": ("#d68910", "s:"),
    SEPARATE: ("#1b6ca8", "o-"),
    "NVFP4 read, FP16 stochastic": ("#148f77", "v--"),
    STOCHASTIC: ("#1b6ca8", "s:"),
    "FP8 read, FP32": ("#7d3c98", "o-"),
}


def interval(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
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
    """A field of the texts without tasks, [texts, intervals]."""
    rows = [row for row, name in zip(record[field], record["texts"], strict=True) if "tasks" not in name]
    return np.asarray(rows)


def inside(records: list[dict], record: dict) -> tuple[int, int]:
    """Cells in which a configuration lies inside the FP32 run's interval, and cells that were asked."""
    truth = pick(records, model=record["model"], buffer_length=record["buffer_length"], configuration=FP32)
    assert truth is not None, "the records lack the FP32 run"
    found = asked = 0
    for ours, theirs in zip(_cells(record), _cells(truth), strict=True):
        if theirs[1]:
            low, high = interval(*theirs)
            asked, found = asked + 1, found + (low <= ours[0] / ours[1] <= high)
    return found, asked


def _cells(record: dict) -> list[tuple[int, int]]:
    return [tuple(cell) for task in record["cells"] for cell in task]


def slope(record: dict, first: int) -> tuple[float, float]:
    """Growth of log KL a doubling of the position: mean over texts, and its standard error.

    first: least beginning of the intervals that count; all do where fewer than three lie there.
    """
    edges = np.asarray(record["edges"])
    kept = edges >= first if np.sum(edges >= first) > 2 else edges >= 0
    x = np.log2([*edges[1:], record["tokens"]])[kept]
    values = np.log(np.maximum(plain(record, "kl")[:, kept], 1e-30))
    fits = np.polyfit(x, values.T, 1)[0]
    return float(fits.mean()), float(fits.std(ddof=1) / math.sqrt(fits.size))


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def _models(records: list[dict]) -> list[str]:
    return list(dict.fromkeys(r["model"] for r in records))


def headline(records: list[dict], length: int = 16) -> str:
    """KL, agreement, bits and cells of every configuration: one row each, the models side by side."""
    models = [
        name
        for name in _models(records)
        if pick(records, model=name, buffer_length=length, configuration=FP32)
    ]
    header = ["configuration"]
    for name in models:
        header += [
            f"{name}: KL to {CONTEXT:,}",
            "KL at the end",
            "slope",
            "agreement",
            "bits a byte",
            "cells inside",
        ]
    names = dict.fromkeys(r["configuration"] for r in records if "configuration" in r)
    rows = []
    for name in names:
        row = [name]
        for model in models:
            record = pick(records, model=model, buffer_length=length, configuration=name)
            row += _columns(records, record) if record else ["-"] * 6
        rows.append(row)
    return _rows(header, rows)


def _columns(records: list[dict], record: dict) -> list[str]:
    kl = plain(record, "kl").mean(axis=0)
    trained = np.asarray(record["edges"]) < CONTEXT
    spans = np.diff([*record["edges"], record["tokens"]])
    early = np.sum(kl[trained] * spans[trained]) / np.sum(spans[trained])
    found, asked = inside(records, record)
    growth = "-" if record["configuration"] == FP32 else "{:+.2f} ± {:.2f}".format(*slope(record, CONTEXT))
    return [
        f"{early:.2g}",
        f"{kl[-1]:.2g}",
        growth,
        f"{plain(record, 'agreement').mean(axis=0)[-1]:.1%}",
        f"{plain(record, 'bits').mean(axis=0)[-1]:.3f}",
        f"{found} of {asked}" if asked else "-",
    ]


def heads(record: dict) -> np.ndarray:
    """By head: memory in tokens, predicted and measured ratio of squared errors, shared over separate."""
    memory, rho = (np.concatenate(record[field]) for field in ("memory", "rho_squared"))
    shared, separate = (np.concatenate(record["errors"][name]) for name in (SHARED, SEPARATE))
    return np.stack([memory, 1 / (1 - rho), shared / separate])


def summary(records: list[dict]) -> list[str]:
    """One line for every target, model and L."""
    lines = []
    for model in _models(records):
        for length in sorted({r["buffer_length"] for r in records if r["model"] == model}):
            same = {"model": model, "buffer_length": length}
            shared, separate = (pick(records, **same, configuration=name) for name in (SHARED, SEPARATE))
            if shared and separate:
                ends = [plain(r, "kl").mean(axis=0)[-1] for r in (shared, separate)]
                ratio = ends[0] / ends[1]
                lines.append(f"{model}, L = {length}: KL {ends[0]:.4f} / {ends[1]:.5f} = {ratio:.1f}")
            measured = pick(records, **same, heads=True)
            if measured:
                memory, predicted, ratio = heads(measured)
                off = np.abs(np.log2(ratio / predicted))
                lines.append(
                    f"{model}, L = {length}: {np.sum(memory >= 2000)} of {memory.size} heads remember 2,000 "
                    f"tokens, the longest {memory.max():.0f}; measured over predicted ratio: median "
                    f"{np.median(ratio / predicted):.2f}, within 2x {np.mean(off <= 1):.0%}"
                )
    return lines


def plot_growth(records: list[dict], path: Path, length: int = 16) -> None:
    """KL against FP32 state by position, one panel a model."""
    figure, axes, models = _panels(records, length, path.stem)
    for axis, model in zip(axes, models, strict=True):
        for name, (colour, style) in LINES.items():
            record = pick(records, model=model, buffer_length=length, configuration=name)
            if record:
                ends = [*record["edges"][1:], record["tokens"]]
                axis.plot(
                    ends, plain(record, "kl").mean(axis=0), style, color=colour, label=name, markersize=3
                )
        axis.axvline(CONTEXT, color="grey", linewidth=0.8)
        axis.set(title=model, xlabel="tokens decoded", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("KL against FP32 state\n(nats a token)")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def plot_heads(records: list[dict], path: Path) -> None:
    """Measured against predicted ratio of squared errors, a dot a head, one panel a model."""
    figure, axes, models = _panels(records, 16, path.stem)
    for axis, model in zip(axes, models, strict=True):
        for length, marker in ((8, "v"), (16, "o"), (32, "s")):
            record = pick(records, model=model, buffer_length=length, heads=True)
            if record:
                _, predicted, ratio = heads(record)
                axis.plot(predicted, ratio, marker, markersize=3, alpha=0.6, label=f"L = {length}")
        low, high = axis.get_xlim()
        line = np.geomspace(1.0, high, 2)
        axis.plot(line, line, color="grey", linewidth=0.8, label="prediction")
        axis.fill_between(line, line / 2, 2 * line, color="grey", alpha=0.15)
        axis.set(title=model, xlabel="1 / (1 - ρ²) of the head", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("squared error, shared NVFP4\nover NVFP4 read + FP32")
    axes[0].legend(fontsize=7)
    _save(figure, path)


def _panels(records: list[dict], length: int, salt: str):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = [name for name in _models(records) if pick(records, model=name, buffer_length=length)]
    matplotlib.rcParams.update({"svg.hashsalt": salt, "svg.fonttype": "none"})
    size = (3.6 * len(models), 3.4)
    figure, axes = pyplot.subplots(1, len(models), figsize=size, squeeze=False, layout="constrained")
    return figure, axes[0], models


def _save(figure, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--plots", type=Path, help="folder of the figures")
    options = parser.parse_args()
    records = json.loads(options.result.read_text())["records"]
    print(headline(records), *summary(records), sep="\n")
    if options.plots:
        plot_growth(records, options.plots / "precision_drift.svg")
        plot_heads(records, options.plots / "precision_heads.svg")


if __name__ == "__main__":
    main()
