"""How even decode steps are: replay with flushes synchronised and spread, and eager, step by step.

Random bfloat16 weights on a depth cut of `--layers` layers (0: the whole model), one token a step. A row
rewrites its checkpoint every L steps; rows that start together do so at the same step ("synchronised") unless
their first windows differ ("spread", as `generate` does it). The device's clock is read between the steps of
a device loop, so neither the host nor the start of a dispatch is in them. Settings of one batch run in
processes of their own and take turns repeat by repeat, where the memory holds them together.

Records are those of `bench.decode_loop` with `step_times_us`, the median of every step over the repeats
(which begin with the same cursors: what else uses the device hits one of them), and `step_us`: median, p99,
max and mean of these, and p99_of_all without those medians. Tokens a second are by the mean step.

    python -m bench.step_times --model nano-4b --jobs 3
"""

from bench import e2e_report, model_options
from bench.decode_loop import Setting
from bench.processes import Task, in_turns, run_all


def main() -> None:
    """Command line; prints the table last and writes the result file."""
    parser = model_options.parser(__doc__, steps=128)
    parser.add_argument("--batches", type=model_options.numbers, default=[64, 256, 512])
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
    groups = [
        group
        for batch in options.batches
        for group in in_turns([task(batch, *column) for column in columns], options.memory * 1e9)
    ]
    save, limits = model_options.results("step_times", options)
    records, _ = run_all(groups, save=save, **limits)
    print(e2e_report.step_times(records))


if __name__ == "__main__":
    main()
