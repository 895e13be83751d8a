"""Plot of a result file of `bench.kernel_decode`: speed of the kernels by batch, against our eager kernel.

python -m bench.plots bench/results/kernel_decode.json [--out bench/results/kernel_decode.svg]
"""

import argparse
import json
from pathlib import Path

from bench.kernel_cases import MAIN
from bench.kernel_report import EAGER_PEERS, REPLAY_PEERS, step

LINES = {
    "replay, ours": (("replay",), "#1b6ca8", "o-"),
    "replay, fastest peer": (REPLAY_PEERS, "#c0392b", "s-"),
    "eager, fastest peer": (EAGER_PEERS, "#c0392b", "s:"),
}


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
    """Writes the figure, one panel a shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = [shape for shape in MAIN if any(r["shape"] == shape for r in records)]
    matplotlib.rcParams.update({"svg.hashsalt": "kernel_decode", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(
        1, len(shapes), figsize=(3.3 * len(shapes), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    axes = axes[0]
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
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    plot(json.loads(options.result.read_text())["records"], options.out or options.result.with_suffix(".svg"))


if __name__ == "__main__":
    main()
