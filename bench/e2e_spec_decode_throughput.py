"""Throughput of speculative decoding: replay against the conventional method and against plain decoding.

All four methods (`replay` and `conventional` with a window of T tokens, plain `replay` and `eager`) run on a
published model with random weights, in processes of their own, at equal acceptance: counts drawn from the
histogram whose drafts are accepted at one rate, which `--mean-accepted` fixes for T = 4. A step is the
verification of T tokens and the choice of the next; no drafter runs (with a real one its cost is the same for
both speculative methods), but in the records of `--drafting`, whose `drafter` is a head of the model's own.
Whole models at T = 4 and the batches of `--full-batches`; `--windows` at all `--batches` on a cut of
`--layers` layers, whose records have `depth_cut`: the output head weighs more there. `concurrency` records
tell how many rows of `--max-lengths` positions fit into `--memory`.

    python -m bench.e2e_spec_decode_throughput --model nano-4b
"""

import argparse
import dataclasses

from bench import model_options
from bench.decode_loop import Setting
from bench.e2e_report import rows_that_fit
from bench.processes import Task, run_all
from bench.roofline import committed, draft_rate


def points(base: Setting, batch: int, window: int, rate: float) -> list[Setting]:
    """The four methods at one batch and window; the plain ones come last."""
    speculative = {"window": window, "mean_accepted": committed(window, rate)}
    changes = (
        {"method": "replay", **speculative},
        {"method": "conventional", **speculative},
        {"method": "replay"},
        {"method": "eager"},
    )
    return [dataclasses.replace(base, batch=batch, **change) for change in changes]


def plan(options: argparse.Namespace) -> list[Task]:
    """Every task, the most important ones first."""
    rate = draft_rate(4, options.mean_accepted)
    base = Setting(
        model=options.model,
        batch=1,
        method="replay",
        buffer_length=options.buffer_length,
        context=options.context,
        steps=options.steps,
        repeats=options.repeats,
        profile=options.profile,
    )
    cut = dataclasses.replace(base, layers=model_options.cut(options))
    settings = []

    def drafting(point: Setting) -> list[Setting]:
        return [dataclasses.replace(point, drafter="mtp")] if options.drafting else []

    for batch in options.full_batches:
        settings += points(base, batch, 4, rate)
        settings += drafting(settings[-4])
    for window in options.windows:
        for batch in options.batches:
            settings += points(cut, batch, window, rate)[:2]
            settings += drafting(settings[-2])
    for batch in options.batches:
        settings += points(cut, batch, 4, rate)[2:] if options.plain else []
    tasks = [Task(setting=setting) for setting in settings]
    methods = points(base, 1, 4, rate)[: None if options.plain else 2]
    for max_length in options.max_lengths if options.concurrency else ():
        memory = {"memory": round(options.memory * 1e9), "max_length": max_length}
        tasks += [Task(setting=setting, **memory) for setting in methods]
    return tasks


def ratios(records: list[dict]) -> str:
    """Speculative replay against the others, a line for every batch and window."""
    timed = {
        (r["shape"], r["layers"], r["batch"], r["window"], r["method"]): r
        for r in records
        if r["op"] != "concurrency" and "drafter" not in r
    }
    lines = [
        f"{'shape':11}{'layers':>7}{'batch':>6}{'T':>3}{'/conventional (bound)':>23}{'/eager (bound)':>16}"
        f"{'/replay':>9}"
    ]
    for (shape, layers, batch, window, method), record in timed.items():
        if method == "replay" and window > 1:
            cells = []
            for tokens, other in ((window, "conventional"), (1, "eager"), (1, "replay")):
                found, bound = timed.get((shape, layers, batch, tokens, other)), record["bounds"].get(other)
                ratio = f"{record['tokens_per_second'] / found['tokens_per_second']:.2f}" if found else "-"
                cells.append(ratio if bound is None else f"{ratio} ({bound:.2f})")
            lines.append(f"{shape:11}{layers:7}{batch:6}{window:3}{cells[0]:>23}{cells[1]:>16}{cells[2]:>9}")
    for r in records:
        if "drafter" in r:
            alone = timed.get((r["shape"], r["layers"], r["batch"], r["window"], r["method"]))
            more = (
                f"{r['time_us'] / alone['time_us']:.2f} of the step without" if alone else "no step without"
            )
            lines.append(f"batch {r['batch']}, T = {r['window']}, {r['drafter']} drafts: {more}")
    for replay, conventional in rows_that_fit(records):
        ratio, length = replay["rows"] / conventional["rows"], replay["max_length"]
        lines.append(f"rows of {length} positions that fit, T = 4, replay over conventional: {ratio:.2f}")
    return "\n".join(lines)


def main() -> None:
    """Command line; prints the ratios last and writes the result file."""
    numbers = model_options.numbers
    parser = model_options.parser(__doc__, jobs=2)
    parser.add_argument("--full-batches", type=numbers, default=[256, 512], help="batches of the whole model")
    parser.add_argument(
        "--batches", type=numbers, default=[1, 16, 64, 128, 256, 512], help="batches of the depth cut"
    )
    parser.add_argument("--windows", type=numbers, default=[4, 2, 8], help="T of the depth cut")
    parser.add_argument(
        "--plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="plain decoding too: of the cut, and in records of how many rows fit",
    )
    parser.add_argument("--mean-accepted", type=float, default=3.0, help="tokens committed a step at T = 4")
    parser.add_argument("--buffer-length", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument(
        "--concurrency", action=argparse.BooleanOptionalAction, default=True, help="how many rows fit"
    )
    parser.add_argument(
        "--max-lengths", type=numbers, default=[512, 2048], help="positions a row in those records"
    )
    parser.add_argument("--drafting", action="store_true", help="replay with the head's own drafts too")
    parser.add_argument("--profile", action="store_true", help="one more dispatch, summed by kind of kernel")
    options = parser.parse_args()
    save, limits = model_options.results("e2e_spec_decode_throughput", options)
    groups = [[task] for task in plan(options)]
    records, _ = run_all(groups, save=save, **limits)
    print(ratios(records))


if __name__ == "__main__":
    main()
