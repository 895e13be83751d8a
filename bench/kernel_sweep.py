"""Launch parameters of our kernels: times of the combinations worth trying, and the table made of them.

Every combination is timed at every shape, window and state; prints the fastest by the time of a step at the
true flush rate, random phases. Records are those of `bench.kernel_decode` with `launch`. `--table` times
nothing: it writes `pallas_kernels/launch_table.py` from the result files (`kernel_sweep*.json`). An entry of
the table serves one recurrence, one width of a state element and windows up to the timed one (the widest:
all). Of all combinations it has the one whose largest ratio to a shape's fastest is least; of several that
are the same within half a percent, the one with most CTAs. Entries that were not timed stay. States fp8_e4m3
and nvfp4 are copies of an fp32 checkpoint; their parameters stand in `pallas_kernels/launch.py`.

    python -m bench.kernel_sweep [--only super:1:fp32,q122:4:nvfp4] [--workers 8] [--out PATH]
    python -m bench.kernel_sweep --table
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from bench import kernel_decode, result_file
from bench.kernel_cases import MAIN, Case
from bench.shapes import SHAPES
from pallas_kernels import launch_table
from pallas_kernels.launch import LaunchParameters
from replayssm_jax.precision import BITS

OUT = result_file.RESULTS / "kernel_sweep.json"
TABLE = Path(__file__).resolve().parents[1] / "pallas_kernels" / "launch_table.py"
MOST_TOKENS = 8
# Two runs of the same combination differ by as much.
SAME = 0.005
# A chip of 132 multiprocessors: one CTA on each or two.
GRIDS = ((132, 4), (264, 2))
CODED = ("fp8_e4m3", "nvfp4")
HEAD = '''"""Launch parameters by device kind, recurrence and (bytes of a state element, largest window).

What is left out is at its default. Written by `python -m bench.kernel_sweep --table` from its result files.
"""

TABLE = '''


def combinations() -> list[LaunchParameters]:
    """Launch parameters to time: grids, claims, short copies of the ring's keys for two CTAs a
    multiprocessor, and the flush beside the window, which takes a whole one."""
    tried = [
        LaunchParameters(ctas, stages, claims=claims)
        for (ctas, stages), claims in itertools.product(GRIDS, (False, True))
    ]
    ctas, stages = GRIDS[0]
    tried += [LaunchParameters(ctas, stages, beside=1, claims=claims) for claims in (False, True)]
    return [*tried, dataclasses.replace(tried[2], granule=4)]


def coded_combinations() -> list[LaunchParameters]:
    """The same for copies in codes: coefficients apart from the copies where a multiprocessor has one CTA."""
    whole = LaunchParameters(132, 6, step=4, workers=2, apart=True, claims=True)
    tried = [whole, dataclasses.replace(whole, claims=False)]
    tried += [dataclasses.replace(whole, stages=stages, step=step) for stages, step in ((4, 4), (2, 8))]
    halves = itertools.product((2, 3), (False, True))
    return tried + [LaunchParameters(264, stages, claims=claims, step=4) for stages, claims in halves]


def wanted(records: Iterable[dict]) -> dict[tuple, dict[LaunchParameters, float]]:
    """Microseconds of a step at the true flush rate by (shape, window, state) and launch parameters."""
    times: dict[tuple, dict[LaunchParameters, float]] = {}
    for record in records:
        if record["op"] in ("decode", "verify") and record["phases"] == "random":
            key = record["shape"], record["window"], record["state"]
            times.setdefault(key, {})[LaunchParameters(**record["launch"])] = record["time_us"]
    return times


def changed(parameters: LaunchParameters) -> dict[str, int | bool]:
    """The parameters that are not at their default."""
    defaults = dataclasses.asdict(LaunchParameters(0, 0))
    return {name: v for name, v in dataclasses.asdict(parameters).items() if v != defaults[name]}


def fastest(records: Iterable[dict]) -> str:
    """One line for each shape, window and state: its three fastest combinations."""
    lines = []
    for (shape, window, state), times in sorted(wanted(records).items()):
        best = sorted(times, key=lambda one: times[one])[:3]
        tried = [
            " ".join([f"{times[one]:.1f}", *(f"{name}={v:d}" for name, v in changed(one).items())])
            for one in best
        ]
        lines.append(f"{shape} T {window} {state}: " + "; ".join(tried))
    return "\n".join(lines)


def choose(records: Iterable[dict]) -> dict[str, dict[tuple[int, int], LaunchParameters]]:
    """Entries by recurrence and (bytes of a state element, largest window)."""
    groups: dict[tuple, list[dict[LaunchParameters, float]]] = {}
    stored = (record for record in records if record["state"] not in CODED)
    for (shape, window, state), times in wanted(stored).items():
        groups.setdefault((SHAPES[shape].recurrence, BITS[state] // 8, window), []).append(times)
    widest = {key[:2]: max(k[2] for k in groups if k[:2] == key[:2]) for key in groups}
    chosen: dict[str, dict[tuple[int, int], LaunchParameters]] = {}
    for (recurrence, size, window), shapes in sorted(groups.items()):
        common = [one for one in shapes[0] if all(one in times for times in shapes)]
        slowest = {one: max(times[one] / min(times.values()) for times in shapes) for one in common}
        served = MOST_TOKENS if window == widest[recurrence, size] else window
        near = [one for one in common if slowest[one] <= min(slowest.values()) + SAME]
        best = min(near, key=lambda one: (-one.ctas, slowest[one]))
        chosen.setdefault(recurrence, {})[size, served] = best
    return chosen


def of_results() -> tuple[str, dict[str, dict[tuple[int, int], LaunchParameters]]]:
    """The device kind of the result files, and the choice from all of them."""
    results = [json.loads(path.read_text()) for path in sorted(OUT.parent.glob(f"{OUT.stem}*.json"))]
    (kind,) = {result["device"].removeprefix("gpu ").split(",")[0] for result in results}
    return kind, choose([record for result in results for record in result["records"]])


def table(kind: str, chosen: dict[str, dict[tuple[int, int], LaunchParameters]], known: dict) -> str:
    """Source text of the package's table: `known`, a table, with the chosen entries of one device kind."""
    made = {name: {r: dict(entries) for r, entries in kinds.items()} for name, kinds in known.items()}
    for recurrence, entries in chosen.items():
        fields = {key: changed(parameters) for key, parameters in entries.items()}
        made.setdefault(kind, {}).setdefault(recurrence, {}).update(fields)
    lines = [f"{HEAD}{{"]
    for name, recurrences in sorted(made.items()):
        lines.append(f'    "{name}": {{')
        for recurrence, entries in sorted(recurrences.items()):
            lines.append(f'        "{recurrence}": {{')
            for key, parameters in sorted(entries.items()):
                body = ", ".join(f'"{field}": {value}' for field, value in parameters.items())
                lines.append(f"            {key}: {{{body}}},")
            lines.append("        },")
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    """Command line; prints the fastest combinations last."""
    if sys.argv[1:] == ["--table"]:
        TABLE.write_text(table(*of_results(), launch_table.TABLE))
        return
    options = parser().parse_args()
    listed = [
        Case(
            shape=shape,
            batch=256,
            method="replay",
            tokens=int(tokens),
            state=state,
            recurrence="fp32" if state in CODED else "",
            launch=tuple(dataclasses.asdict(parameters).items()),
        )
        for shape, tokens, state in (one.split(":") for one in options.only.split(","))
        for parameters in (coded_combinations() if state in CODED else combinations())
    ]
    result = result_file.head("bench.kernel_sweep", options.commit) | {"left_out": {}, "records": []}
    kernel_decode.run(listed, options, result)
    print(fastest(result["records"]))


def parser() -> argparse.ArgumentParser:
    """Options of the sweep."""
    made = kernel_decode.parser(__doc__ or "", OUT)
    made.set_defaults(repeats=6)
    every = itertools.product(MAIN, (1, 4), ("fp32", "bf16", *CODED))
    made.add_argument(
        "--only",
        default=",".join(f"{shape}:{tokens}:{state}" for shape, tokens, state in every),
        help="shape:tokens:state, which are swept",
    )
    return made


if __name__ == "__main__":
    main()
