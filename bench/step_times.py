"""How even decode steps are: replay with flushes synchronised and spread, and eager, step by step.

Random bfloat16 weights on a depth cut of `--layers` layers (0: the whole model), one token a step. A row
rewrites its checkpoint every L steps; rows that start together do so at the same step ("synchronised") unless
their first windows differ ("spread", as `generate` does it). The device's clock is read between the steps of
a device loop, so neither the host nor the start of a dispatch is in them. Settings of one batch run in
processes of their own and take turns repeat by repeat.

Records are those of `bench.decode_loop` with `step_times_us`, the median of every step over the repeats
(which begin with the same cursors: what else uses the device hits one of them), and `step_us`: median, p99,
max and mean of these, and p99_of_all without those medians. Tokens a second are by the mean step.

    python -m bench.step_times --model nano-4b --batches 64,256 --commit HASH
"""

import argparse
import os

from bench import result_file
from bench.decode_loop import Setting
from bench.e2e_models import CUT_LAYERS, HUB_NAMES, STAND_INS
from bench.processes import Task, add_options, run_all


def table(records: list[dict]) -> str:
    """Median, 99th percentile and throughput, a line for every record."""
    lines = [
        f"{'shape':11}{'layers':>7}{'batch':>6} {'method':8}{'phases':13}{'median us':>10}{'p99 us':>9}"
        f"{'p99/median':>11}{'max/median':>11}{'mean us':>9}{'tokens/s':>10}"
    ]
    for record in records:
        steps = record["step_us"]
        phases = record["phases"] if record["method"] == "replay" else "-"
        lines.append(
            f"{record['shape']:11}{record['layers']:7}{record['batch']:6} {record['method']:8}{phases:13}"
            f"{steps['median']:10.0f}{steps['p99']:9.0f}{steps['p99'] / steps['median']:11.3f}"
            f"{steps['max'] / steps['median']:11.3f}{steps['mean']:9.0f}"
            f"{record['batch'] / steps['mean'] * 1e6:10.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line; prints the table last and writes the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser.add_argument("--model", "--model-id", default="nano-4b", choices=(*CUT_LAYERS, *HUB_NAMES))
    parser.add_argument("--batches", type=numbers, default=[64, 256])
    parser.add_argument("--layers", type=int, help="layers of the depth cut; 0: the whole model")
    parser.add_argument("--context", type=int, default=512, help="committed tokens a row at the start")
    parser.add_argument("--steps", type=int, default=128, help="steps of a repeat, one dispatch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--buffer-length", type=int, default=16)
    parser.add_argument("--memory", type=float, default=130.0, help="GB for the processes of a batch")
    parser.add_argument("--jobs", type=int, default=1, help="batches that compile side by side")
    add_options(parser)
    options = parser.parse_args()
    # This process only names the device; the memory is its children's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name: str = HUB_NAMES.get(options.model) or options.model
    result = result_file.head("bench.step_times", options.commit)
    result["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    if name in STAND_INS:
        result["note"] = f"{name}: experts replaced by dense MLPs of the width that a token uses"

    def task(batch: int, method: str, phases: str) -> Task:
        layers = CUT_LAYERS[name] if options.layers is None else options.layers or None
        setting = Setting(
            model=name,
            layers=layers,
            batch=batch,
            method=method,
            buffer_length=options.buffer_length,
            context=options.context,
            steps=options.steps,
            repeats=options.repeats,
            phases=phases,
            step_times=True,
        )
        return Task(setting=setting)

    columns = (("replay", "synchronised"), ("replay", "spread"), ("eager", "random"))
    groups = [[task(batch, *column) for column in columns] for batch in options.batches]
    out = options.out or result_file.RESULTS / f"step_times_{name}.json"

    def save(records: list[dict], left_out: list[dict]) -> None:
        result_file.write(result | {"left_out": left_out, "records": records}, out)

    limits = {"jobs": options.jobs, "time_limit": options.time_limit, "turn_limit": options.turn_limit}
    records, _ = run_all(groups, save=save, memory=options.memory * 1e9, lock=options.lock, **limits)
    print(table(records))


if __name__ == "__main__":
    main()
