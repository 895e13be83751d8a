"""How even decode steps are: replay with flushes synchronised and spread, and eager, step by step.

Random bfloat16 weights on a depth cut of `--layers` layers (0: the whole model), one token a step. A row
rewrites its checkpoint every L steps; rows that start together do so at the same step ("synchronised") unless
their first windows differ ("spread", as `generate` does it). The device's clock is read between the steps of
a device loop, so neither the host nor the start of a dispatch is in them. Settings of one batch run in
processes of their own and take turns repeat by repeat.

Records are those of `bench.decode_loop` with `step_times_us`, the median of every step over the repeats
(which begin with the same cursors: what else uses the device hits one of them), and `step_us`: median, p99,
max and mean of these, and p99_of_all without those medians. Tokens a second are by the mean step.

    python -m bench.step_times --model nano-4b --batches 64,256
"""

from bench import model_options
from bench.decode_loop import Setting
from bench.processes import Task, run_all


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
    parser = model_options.parser(__doc__, steps=128, repeats=7)
    parser.add_argument("--batches", type=model_options.numbers, default=[64, 256])
    parser.add_argument("--context", type=int, default=512, help="committed tokens a row at the start")
    parser.add_argument("--buffer-length", type=int, default=16)
    options = parser.parse_args()

    def task(batch: int, method: str, phases: str) -> Task:
        setting = Setting(
            model=options.model,
            layers=model_options.cut(options),
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
    save, limits = model_options.results("step_times", options)
    records, _ = run_all(groups, save=save, **limits)
    print(table(records))


if __name__ == "__main__":
    main()
