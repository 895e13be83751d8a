"""Launch parameters of our kernels: times of every combination around those of the table in
`pallas_kernels/launch.py`.

The window's parameters are crossed; the flush's are varied alone. Prints the fastest of each shape and
window by the time of a step at the true flush rate, random phases. Records are those of `bench.kernel_decode`
with `launch`.

    python -m bench.kernel_sweep --commit HASH [--shapes super,q122] [--windows 1,4] [--workers 8]
"""

import dataclasses
import itertools

from bench import kernel_decode, result_file
from bench.kernel_cases import Case
from pallas_kernels.launch import LaunchParameters

# Values worth trying on a chip of 132 multiprocessors; a field that the kernels no longer have is skipped.
WINDOW = {"ctas": (132, 264), "stages": (2, 4), "granule": (4, 8), "beside": (0, 1)}
FLUSH = {"flush_workers": (2, 3, 4)}


def combinations(fields: set[str]) -> list[tuple[tuple[str, int], ...]]:
    """Launch parameters to time: the table's own, the window's crossed, the flush's one at a time."""
    window = {name: values for name, values in WINDOW.items() if name in fields}
    crossed = [tuple(zip(window, values, strict=True)) for values in itertools.product(*window.values())]
    single = [((name, value),) for name, values in FLUSH.items() if name in fields for value in values]
    return [(), *crossed, *single]


def fastest(records: list[dict]) -> str:
    """One line for each shape and window: the table's time and the three fastest combinations."""
    lines = []
    wanted = [r for r in records if r["op"] in ("decode", "verify") and r["phases"] == "random"]
    keys = sorted({(r["shape"], r["window"]) for r in wanted})
    for shape, tokens in keys:
        mine = [r for r in wanted if (r["shape"], r["window"]) == (shape, tokens)]
        table = [f"table {r['time_us']:.1f}" for r in mine if not r.get("launch")]
        best = sorted((r for r in mine if r.get("launch")), key=lambda r: r["time_us"])[:3]
        tried = [f"{r['time_us']:.1f} {r['launch']}" for r in best]
        lines.append(f"{shape} T {tokens}: " + "; ".join(table + tried))
    return "\n".join(lines)


def main() -> None:
    """Command line; prints the fastest combinations last."""
    parser = kernel_decode.parser(__doc__ or "", result_file.RESULTS / "kernel_sweep.json")
    parser.add_argument("--windows", default="1,4")
    options = parser.parse_args()
    tried = combinations({field.name for field in dataclasses.fields(LaunchParameters)})
    listed = [
        Case(shape=shape, batch=256, method="replay", tokens=int(tokens), launch=launch)
        for shape in options.shapes.split(",")
        for tokens in options.windows.split(",")
        for launch in tried
    ]
    result = result_file.head("bench.kernel_sweep", options.commit) | {"left_out": {}, "records": []}
    kernel_decode.run(listed, options, result)
    print(fastest(result["records"]))


if __name__ == "__main__":
    main()
