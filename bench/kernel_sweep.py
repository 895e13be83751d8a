"""Launch parameters of our kernels: times of every combination around those of the table in
`pallas_kernels/launch.py`.

The window's parameters are crossed; the flush's are varied alone. Prints the fastest of each shape, window
and state by the time of a step at the true flush rate, random phases. Records are those of
`bench.kernel_decode` with `launch`.

    python -m bench.kernel_sweep --commit HASH [--shapes super,q122] [--windows 1,4] [--states fp32,bf16]
        [--workers 8]
"""

import dataclasses
import itertools

from bench import kernel_decode, result_file
from bench.kernel_cases import Case
from pallas_kernels.launch import LaunchParameters

# Values worth trying on a chip of 132 multiprocessors, fields that go together in one tuple; a field that the
# kernels no longer have is skipped.
WINDOW = {
    ("ctas", "stages"): ((132, 4), (264, 2)),
    ("granule",): ((4,), (8,)),
    ("beside", "claims"): ((0, 0), (0, 1), (1, 1)),
}
FLUSH = {"flush_workers": (2, 3, 4)}


def combinations(fields: set[str]) -> list[tuple[tuple[str, int], ...]]:
    """Launch parameters to time: the table's own, the window's crossed, the flush's one at a time."""
    window = {names: values for names, values in WINDOW.items() if fields.issuperset(names)}
    names = list(itertools.chain(*window))
    crossed = [
        tuple(zip(names, itertools.chain(*values), strict=True))
        for values in itertools.product(*window.values())
    ]
    single = [((name, value),) for name, values in FLUSH.items() if name in fields for value in values]
    return [(), *crossed, *single]


def fastest(records: list[dict]) -> str:
    """One line for each shape, window and state: the table's time and the three fastest combinations."""
    lines = []
    wanted = [r for r in records if r["op"] in ("decode", "verify") and r["phases"] == "random"]
    names = ("shape", "window", "state")
    for key in sorted({tuple(r[name] for name in names) for r in wanted}):
        mine = [r for r in wanted if tuple(r[name] for name in names) == key]
        table = [f"table {r['time_us']:.1f}" for r in mine if not r.get("launch")]
        best = sorted((r for r in mine if r.get("launch")), key=lambda r: r["time_us"])[:3]
        tried = [f"{r['time_us']:.1f} {r['launch']}" for r in best]
        lines.append("{} T {} {}: ".format(*key) + "; ".join(table + tried))
    return "\n".join(lines)


def main() -> None:
    """Command line; prints the fastest combinations last."""
    parser = kernel_decode.parser(__doc__ or "", result_file.RESULTS / "kernel_sweep.json")
    parser.add_argument("--windows", default="1,4")
    parser.add_argument("--states", default="fp32")
    options = parser.parse_args()
    tried = combinations({field.name for field in dataclasses.fields(LaunchParameters)})
    listed = [
        Case(shape=shape, batch=256, method="replay", tokens=int(tokens), state=state, launch=launch)
        for shape in options.shapes.split(",")
        for tokens in options.windows.split(",")
        for state in options.states.split(",")
        for launch in tried
    ]
    result = result_file.head("bench.kernel_sweep", options.commit) | {"left_out": {}, "records": []}
    kernel_decode.run(listed, options, result)
    print(fastest(result["records"]))


if __name__ == "__main__":
    main()
