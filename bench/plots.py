"""Plots of result files: kernels by batch against our eager kernel, and whole models by batch, by context and
against their roofline.

python -m bench.plots bench/results/kernel_decode.json
python -m bench.plots bench/results/e2e_decode_speedup_*.json --out bench/results/e2e_decode_speedup.svg
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import e2e_report
from bench.kernel_cases import MAIN
from bench.kernel_report import EAGER_PEERS, REPLAY_PEERS, step
from bench.roofline import floor_parts_of

LINES = {
    "replay, ours": (("replay",), "#1b6ca8", "o-"),
    "replay, fastest peer": (REPLAY_PEERS, "#c0392b", "s-"),
    "eager, fastest peer": (EAGER_PEERS, "#c0392b", "s:"),
}
COLOURS = {"nano-4b": "#1b6ca8", "qwen3.5-4b": "#c0392b", "super": "#27ae60", "q122": "#8e44ad"}
METHOD_STYLES = {"replay": "o-", "eager": "s:"}
PARTS = {
    "state": "#1b6ca8",
    "ring": "#7fb3d5",
    "weights": "#7f8c8d",
    "head": "#bdc3c7",
    "kv": "#27ae60",
    "conv": "#e59866",
    "activations": "#f7dc6f",
    "logits": "#af7ac5",
}


@contextmanager
def figure(path: Path, panels: int, **options: Any) -> Iterator[Any]:
    """Axes of a row of panels; the figure goes to `path` at the end, the same bytes for the same data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": path.stem, "svg.fonttype": "none"})
    drawn, axes = pyplot.subplots(1, panels, squeeze=False, layout="constrained", **options)
    yield axes[0]
    drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(drawn)


def curves(records: list[dict], shape: str) -> dict[str, tuple[list[int], list[float]]]:
    """Batches and speed-ups over our eager kernel, a line."""
    drawn = {}
    for name, (methods, _, _) in LINES.items():
        batches, ratios = [], []
        for batch in sorted({r["batch"] for r in records if r["shape"] == shape}):
            base = step(records, shape, batch, ("eager",))
            mine = step(records, shape, batch, methods)
            if base and mine:
                batches.append(batch)
                ratios.append(base["time_us"] / mine["time_us"])
        drawn[name] = batches, ratios
    return drawn


def plot(records: list[dict], path: Path) -> None:
    """Writes the figure of the kernels, one panel a shape."""
    shapes = [shape for shape in MAIN if any(r["shape"] == shape for r in records)]
    with figure(path, len(shapes), figsize=(3.3 * len(shapes), 3.4), sharey=True) as axes:
        for axis, shape in zip(axes, shapes, strict=True):
            for name, (batches, ratios) in curves(records, shape).items():
                _, colour, style = LINES[name]
                axis.plot(batches, ratios, style, color=colour, label=name, markersize=4)
            axis.axhline(1.0, color="grey", linewidth=0.8)
            axis.set(title=shape, xlabel="batch")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("times faster than\nour eager kernel")
        axes[0].legend(fontsize=8)


def by_batch(records: Sequence[dict]) -> dict[tuple[str, bool], tuple[list[int], list[float]]]:
    """Batches and speed-ups of each model, whole and cut, of plain pairs at the context that most have."""
    pairs = {place: pair for place, pair in e2e_report.pairs(records).items() if place.plain}
    contexts = Counter(place.context for place in pairs)
    lines: dict[tuple[str, bool], tuple[list[int], list[float]]] = {}
    for place, pair in pairs.items():
        if place.context == contexts.most_common(1)[0][0]:
            batches, ratios = lines.setdefault((place.shape, place.depth_cut), ([], []))
            batches.append(place.batch)
            ratios.append(e2e_report.speedup(pair))
    return lines


def by_context(records: Sequence[dict]) -> dict[tuple[str, int, str], tuple[list[int], list[float]]]:
    """Contexts and milliseconds a step of each model, batch and method that ran at three contexts."""
    pairs = e2e_report.pairs(records)
    lines = {}
    for places in e2e_report.series(pairs):
        for method in e2e_report.METHODS:
            times = [pairs[place][method]["time_us"] / 1e3 for place in places]
            line = places[0].shape, places[0].batch, method
            lines[line] = [place.context for place in places], times
    return lines


def whole_models(records: Sequence[dict], path: Path, batch: int = 256) -> None:
    """Writes the figure of whole models: speed-up by batch, steps over floors, and step by context where
    several contexts were measured."""
    lines = by_context(records)
    panels = 3 if lines else 2
    with figure(path, panels, figsize=(4.4 * panels, 3.6)) as axes:
        for (shape, cut), (batches, ratios) in by_batch(records).items():
            label = f"{shape}, depth cut" if cut else shape
            axes[0].plot(
                batches, ratios, "o:" if cut else "o-", color=COLOURS[shape], label=label, markersize=4
            )
        axes[0].axhline(1.0, color="grey", linewidth=0.8)
        axes[0].set(xlabel="batch", ylabel="eager step / replay step")
        axes[0].set_xscale("log", base=2)
        bars = [
            (f"{place.shape}\n{method}", pair[method])
            for place, pair in e2e_report.pairs(records).items()
            for method in ("eager", "replay")
            if place.batch == batch and place.plain and not place.depth_cut
        ]
        roofline_bars(axes[1], bars)
        axes[1].set(ylabel=f"ms a step, batch {batch}")
        largest = {shape: rows for shape, rows, _ in sorted(lines)}
        for (shape, rows, method), (contexts, times) in lines.items():
            drawn = {"label": f"{shape}, batch {rows}, {method}", "color": COLOURS[shape], "markersize": 4}
            drawn["alpha"] = 1.0 if rows == largest[shape] else 0.4
            axes[2].plot(contexts, times, METHOD_STYLES[method], **drawn)
            axes[2].set(xlabel="context, tokens", ylabel="ms a step (depth cut)", xscale="log", yscale="log")
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
        axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def roofline_bars(axis: Any, bars: Sequence[tuple[str, dict]]) -> None:
    """A bar of the floor's parts for every named record, and a mark at the measured time."""
    for place, (_, record) in enumerate(bars):
        bottom, parts = 0.0, floor_parts_of(record)
        for name, colour in PARTS.items():
            height = parts[name] / 1e3
            axis.bar(place, height, bottom=bottom, color=colour, label=name if place == 0 else None)
            bottom += height
        label = "measured" if place == 0 else None
        axis.plot([place - 0.45, place + 0.45], [record["time_us"] / 1e3] * 2, "k-", label=label)
    axis.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=7)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or options.results[0].with_suffix(".svg")
    decode = e2e_report.read(options.results, "bench.e2e_decode_speedup")
    if decode:
        whole_models(decode, out)
    else:
        plot(e2e_report.read(options.results, "bench.kernel_decode"), out)


if __name__ == "__main__":
    main()
